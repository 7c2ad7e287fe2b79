//! Normalization by neuron.

use tch::{Kind, Tensor};

use crate::error::Result;
use crate::kernels::libtorch::value::Value::{self, Computed, Scalar};
use crate::kernels::libtorch::value::lerp;
use crate::kernels::libtorch::{arithmetic, load, load_matrix, store, store_matrix};
use crate::kernels::ops::neurons::Neurons;
use crate::kernels::ops::slices::fallback::Pairs;
use crate::tensor::{DType, FlatView, to_i64};

/// Added to the root of the running mean square.
const EPSILON: f64 = 1e-8;
/// The smallest norm that is divided by.
const SMALLEST: f64 = 1e-8;

/// Returns the rows of V that belong to rows of U; none where U has all rows.
fn pairs(one: &Neurons<'_>) -> Result<Option<Pairs>> {
    let [own, all] = [one.u.shape()[0], one.variance.shape()[0]].map(to_i64);
    let (own, all) = (own?, all?);
    one.chosen.as_ref().map(|chosen| Pairs::of(chosen, all, own)).transpose()
}

/// See [`crate::kernels::neuron_squares`].
pub(in crate::kernels) fn squares(all: &[Neurons<'_>]) -> Result<()> {
    all.iter().try_for_each(|one| {
        if one.u.shape().contains(&0) { clear(&one.squares.view()) } else { squares_of(one) }
    })
}

/// See [`crate::kernels::neuron_variance`].
pub(in crate::kernels) fn variance(beta2: &Value, length: f64, all: &[Neurons<'_>]) -> Result<()> {
    all.iter().try_for_each(|one| {
        if one.u.shape()[0] == 0 { clear(&one.totals.view()) } else { variance_of(beta2, length, one) }
    })
}

/// See [`crate::kernels::normalize_neurons`].
pub(in crate::kernels) fn normalize(all: &[Neurons<'_>]) -> Result<()> {
    all.iter().filter(|one| !one.u.shape().contains(&0)).try_for_each(normalize_one)
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

/// Returns numbers of neurons, and `other` for those in rows of U that are not chosen.
fn of_chosen(pairs: Option<&Pairs>, numbers: Tensor, other: f64) -> Result<Tensor> {
    let Some(pairs) = pairs else { return Ok(numbers) };
    Ok(numbers.f_masked_fill(&pairs.is_other().f_logical_not()?.f_unsqueeze(1)?, other)?)
}

/// Returns V of the neurons of U.
fn own_rows(pairs: Option<&Pairs>, v: &Tensor) -> Result<Tensor> {
    pairs.map_or_else(|| Ok(v.shallow_clone()), |pairs| pairs.take(v))
}

fn squares_of(one: &Neurons<'_>) -> Result<()> {
    let sums = parted(one, Kind::Double)?.f_square()?.f_sum_dim_intlist(&[2_i64][..], false, Kind::Double)?;
    write_first(&one.squares.view(), &of_chosen(pairs(one)?.as_ref(), sums, 0.0)?)
}

fn variance_of(beta2: &Value, length: f64, one: &Neurons<'_>) -> Result<()> {
    let v = load_matrix(&one.variance.view(), Kind::Double)?;
    let pairs = pairs(one)?;
    let own = own_rows(pairs.as_ref(), &v)?;
    let squares = first(&one.squares.view(), &own)?;
    let new = lerp(beta2, &Computed(own), &(Computed(squares.shallow_clone()) / length)).tensor(&v)?;
    match &pairs {
        Some(pairs) => store_matrix(&one.variance.view(), &pairs.put(&v, &new)?)?,
        None => store_matrix(&one.variance.view(), &new)?,
    }

    // What was stored is what the update is divided by.
    let stored = new.f_to_kind(one.variance.dtype().kind())?.f_to_kind(Kind::Double)?;
    let root = Computed(stored).sqrt() + EPSILON;
    let after = (Computed(squares.shallow_clone()) / (&root * &root)).tensor(&v)?;
    let group = to_i64(one.group.max(1))?;
    let groups = to_i64(one.totals.len() / 2)?;
    let total = |x: Tensor| -> Result<Tensor> {
        let x = of_chosen(pairs.as_ref(), x, 0.0)?.f_flatten(0, -1)?;
        let all = x.f_constant_pad_nd([0, (group * groups - x.size()[0]).max(0)])?;
        let all = all.f_narrow(0, 0, group * groups)?.f_reshape([groups, group])?;
        Ok(all.f_sum_dim_intlist(&[1_i64][..], false, Kind::Double)?)
    };
    store(&one.totals.view(), &Tensor::f_stack(&[total(squares)?, total(after)?], 1)?)
}

fn normalize_one(one: &Neurons<'_>) -> Result<()> {
    let v = load_matrix(&one.variance.view(), Kind::Double)?;
    let pairs = pairs(one)?;
    let own = own_rows(pairs.as_ref(), &v)?;
    let totals = load(&one.totals.view(), Kind::Double)?.f_reshape([-1, 2])?;
    let at = Tensor::f_arange_start(0, to_i64(own.numel())?, (Kind::Int64, v.device()))?;
    let group = at.f_div_scalar_mode(to_i64(one.group.max(1))?, "floor")?;
    let of = |column: i64| -> Result<Value> {
        let numbers = totals.f_select(1, column)?.f_index_select(0, &group)?;
        Ok(Computed(numbers.f_reshape_as(&own)?))
    };
    let norm = of(0)?.sqrt() / of(1)?.sqrt().max(&Scalar(SMALLEST));
    let factor = (norm / (Computed(own.shallow_clone()).sqrt() + EPSILON)).tensor(&v)?;
    let factor = of_chosen(pairs.as_ref(), factor, 1.0)?.f_unsqueeze(2)?;
    let kind = arithmetic(one.u.dtype() == DType::F64);
    let scaled = parted(one, kind)?.f_mul(&factor.f_to_kind(kind)?)?;
    let [rows, cols] = one.u.shape().map(to_i64);
    store_matrix(&one.u.view(), &scaled.f_reshape([rows?, cols?])?)
}
