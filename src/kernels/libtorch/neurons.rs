//! Normalization by neuron.

use tch::{Kind, Tensor};

use super::slices::Pairs;
use super::value::Value::{Known, There};
use super::value::lerp;
use super::{arithmetic, load, load_matrix, store, store_matrix};
use crate::error::Result;
use crate::kernels::ops::neurons::Neurons;
use crate::tensor::{DType, FlatView, to_i64};

/// Added to the root of the running mean square.
const EPSILON: f64 = 1e-8;
/// The smallest norm that is divided by.
const SMALLEST: f64 = 1e-8;

/// Rows of V that belong to rows of U.
fn pairs(one: &Neurons<'_>, variance: &Tensor) -> Result<Pairs> {
    let (rows, all) = (to_i64(one.u.shape()[0])?, variance.size()[0]);
    match &one.chosen {
        Some(chosen) => Pairs::of(chosen, all, rows),
        None => Pairs::all(rows, variance),
    }
}

/// Launches one of the passes by the name of its kernel; `mean` is β₂ and the length of a whole neuron.
pub(in crate::kernels) fn neurons(kernel: &str, mean: [f64; 2], all: &[Neurons<'_>]) -> Result<()> {
    for one in all {
        let is_empty = one.u.shape().contains(&0);
        match kernel {
            "neuron_squares" if is_empty => clear(&one.squares.view())?,
            "neuron_squares" => squares(one)?,
            "neuron_variance" if one.u.shape()[0] == 0 => clear(&one.totals.view())?,
            "neuron_variance" => variance(mean, one)?,
            _ if is_empty => {}
            _ => scale(one)?,
        }
    }
    Ok(())
}

fn clear(x: &FlatView<'_>) -> Result<()> {
    let _ = x.tensor(&[x.len()])?.shallow_clone().f_zero_()?;
    Ok(())
}

/// The first of some numbers in this shape: there may be room for more.
fn first(x: &FlatView<'_>, like: &Tensor) -> Result<Tensor> {
    Ok(load(x, Kind::Double)?.f_narrow(0, 0, to_i64(like.numel())?)?.f_reshape_as(like)?)
}

/// Writes the first of some numbers; what there is room for behind them becomes zero.
fn write_first(x: &FlatView<'_>, numbers: &Tensor) -> Result<()> {
    let count = to_i64(numbers.numel())?;
    let all = numbers.f_flatten(0, -1)?.f_constant_pad_nd([0, to_i64(x.len())? - count])?;
    store(x, &all)
}

/// U in this type as `[rows, neurons of a row, length]`.
fn parted(one: &Neurons<'_>, kind: Kind) -> Result<Tensor> {
    let ([rows, _], [_, across]) = (one.u.shape(), one.variance.shape());
    let sizes = [rows, across, one.length].map(to_i64);
    let [rows, across, length] = sizes;
    Ok(load_matrix(&one.u.view(), kind)?.f_reshape([rows?, across?, length?])?)
}

/// A truth value for each row, beside its neurons.
fn beside(is_row: &Tensor, neurons: &Tensor) -> Result<Tensor> {
    Ok(is_row.f_unsqueeze(1)?.f_expand_as(neurons)?)
}

fn squares(one: &Neurons<'_>) -> Result<()> {
    let sums = parted(one, Kind::Double)?.f_square()?.f_sum_dim_intlist(&[2_i64][..], false, Kind::Double)?;
    let v = load_matrix(&one.variance.view(), Kind::Double)?;
    let is_here = beside(pairs(one, &v)?.is_other(), &sums)?;
    write_first(&one.squares.view(), &sums.f_where_self(&is_here, &sums.f_zeros_like()?)?)
}

fn variance([beta2, length]: [f64; 2], one: &Neurons<'_>) -> Result<()> {
    let v = load_matrix(&one.variance.view(), Kind::Double)?;
    let pairs = pairs(one, &v)?;
    let own = pairs.take(&v)?;
    let squares = first(&one.squares.view(), &own)?;
    let new = lerp(&Known(beta2), &There(own), &(There(squares.shallow_clone()) / length));
    let new = new.tensor(&v)?;
    store_matrix(&one.variance.view(), &pairs.put(&v, &new)?)?;

    // What was stored is what the update is divided by.
    let stored = new.f_to_kind(one.variance.dtype().kind())?.f_to_kind(Kind::Double)?;
    let root = There(stored).sqrt() + EPSILON;
    let after = (There(squares.shallow_clone()) / (&root * &root)).tensor(&v)?;
    let is_here = beside(pairs.is_other(), &squares)?;
    let group = to_i64(one.group.max(1))?;
    let groups = to_i64(one.totals.len() / 2)?;
    let total = |x: &Tensor| -> Result<Tensor> {
        let x = x.f_where_self(&is_here, &x.f_zeros_like()?)?.f_flatten(0, -1)?;
        let all = x.f_constant_pad_nd([0, (group * groups - x.size()[0]).max(0)])?;
        let all = all.f_narrow(0, 0, group * groups)?.f_reshape([groups, group])?;
        Ok(all.f_sum_dim_intlist(&[1_i64][..], false, Kind::Double)?)
    };
    store(&one.totals.view(), &Tensor::f_stack(&[total(&squares)?, total(&after)?], 1)?)
}

fn scale(one: &Neurons<'_>) -> Result<()> {
    let v = load_matrix(&one.variance.view(), Kind::Double)?;
    let pairs = pairs(one, &v)?;
    let own = pairs.take(&v)?;
    let totals = load(&one.totals.view(), Kind::Double)?.f_reshape([-1, 2])?;
    let at = Tensor::f_arange_start(0, to_i64(own.numel())?, (Kind::Int64, v.device()))?;
    let group = at.f_div_scalar_mode(to_i64(one.group.max(1))?, "floor")?;
    let of = |column: i64| -> Result<super::value::Value> {
        let numbers = totals.f_select(1, column)?.f_index_select(0, &group)?;
        Ok(There(numbers.f_reshape_as(&own)?))
    };
    let norm = of(0)?.sqrt() / of(1)?.sqrt().max(&Known(SMALLEST));
    let factor = (norm / (There(own.shallow_clone()).sqrt() + EPSILON)).tensor(&v)?;
    let is_here = beside(pairs.is_other(), &factor)?;
    let factor = factor.f_where_self(&is_here, &factor.f_ones_like()?)?.f_unsqueeze(2)?;
    let kind = arithmetic(one.u.dtype() == DType::F64);
    let scaled = parted(one, kind)?.f_mul(&factor.f_to_kind(kind)?)?;
    let [rows, cols] = one.u.shape().map(to_i64);
    store_matrix(&one.u.view(), &scaled.f_reshape([rows?, cols?])?)
}
