//! Rows or columns of matrices that are chosen by their sums. The host does not know which. Slices that are not chosen are
//! moved too, to memory that is never read.

use tch::{Kind, Tensor};

use crate::error::Result;
use crate::kernels::libtorch::value::Value::{Computed, Scalar};
use crate::kernels::libtorch::value::followed_rate;
use crate::kernels::libtorch::{arithmetic, load, load_matrix, store, store_matrix};
use crate::kernels::ops::apply::Apply;
use crate::kernels::ops::slices::{Chosen, Move, Sliced};
use crate::spec::Side;
use crate::tensor::{DType, FlatView, FlatViewMut, MatrixView, to_i64};

/// The sums of absolute values, else of squares, of each row or column, into float64 views.
pub(in crate::kernels) fn line_sums(
    side: Side,
    absolute: bool,
    all: &[(MatrixView, FlatView)],
) -> Result<()> {
    for (x, sums) in all {
        let x = load_matrix(x, Kind::Double)?;
        let terms = if absolute { x.f_abs()? } else { x.f_square()? };
        let dim = i64::from(side == Side::Rows);
        store(sums, &terms.f_sum_dim_intlist([dim].as_slice(), false, Kind::Double)?)?;
    }
    Ok(())
}

/// See [`crate::kernels::choose`].
pub(in crate::kernels) fn choose(wanted: usize, all: &[(FlatView<'_>, FlatViewMut<'_>)]) -> Result<()> {
    for (scores, chosen) in all {
        let narrow = load(scores, Kind::Double)?.f_to_kind(Kind::Float)?;
        let (_, order) = narrow.f_sort_stable(true, 0, true)?;
        let count = to_i64(wanted.min(scores.len()).min(chosen.len()))?;
        let (first, _) = order.f_narrow(0, 0, count)?.f_sort_stable(true, 0, false)?;
        let mut to = chosen.view().tensor(&[chosen.len()])?.shallow_clone();
        let _ = to.f_zero_()?;
        to.f_narrow(0, 0, count)?.f_copy_(&first.f_add_scalar(1)?)?;
    }
    Ok(())
}

/// Slices of a matrix that belong to slices of another one.
pub(in crate::kernels) struct Pairs {
    /// For each slice of the other the number of the matrix's; `stored` where it has none.
    own: Tensor,
    /// True where a slice of the other has one.
    is_other: Tensor,
    /// True where a slice of the matrix is chosen.
    is_own: Tensor,
}

impl Pairs {
    /// Of a matrix with `stored` slices and another one with `others`.
    pub(in crate::kernels) fn of(chosen: &Chosen<'_>, stored: i64, others: i64) -> Result<Self> {
        let numbers = load(&chosen.numbers, Kind::Double)?.f_to_kind(Kind::Int64)?.f_sub_scalar(1)?;
        let numbers = numbers.f_sub_scalar(to_i64(chosen.first.unwrap_or(0))?)?;
        let is_here = numbers.f_ge(0)?.f_logical_and(&numbers.f_lt(stored)?)?;
        let none = numbers.f_zeros_like()?.f_add_scalar(stored)?;
        let targets = numbers.f_where_self(&is_here, &none)?;
        // One more, for those that are not here.
        let marks = Tensor::f_zeros([stored + 1], (Kind::Float, numbers.device()))?;
        let is_own = marks.f_index_fill(0, &targets, 1.0)?.f_narrow(0, 0, stored)?.f_gt(0.0)?;
        if chosen.first.is_some() {
            let at = Tensor::f_arange_start(0, stored, (Kind::Int64, numbers.device()))?;
            let none = at.f_zeros_like()?.f_add_scalar(stored)?;
            return Ok(Self {
                own: at.f_where_self(&is_own, &none)?,
                is_other: is_own.shallow_clone(),
                is_own,
            });
        }
        // Those that follow each other, and slices of the other one behind them.
        let count = to_i64(chosen.numbers.len())?.min(others);
        let own = Tensor::f_zeros([others], (Kind::Int64, numbers.device()))?.f_add_scalar(stored)?;
        own.f_narrow(0, 0, count)?.f_copy_(&targets.f_narrow(0, 0, count)?)?;
        Ok(Self { is_other: own.f_lt(stored)?, own, is_own })
    }

    /// A slice of the matrix for each of the other, zero where it has none.
    pub(in crate::kernels) fn take(&self, x: &Tensor) -> Result<Tensor> {
        if x.size()[0] == 0 {
            return Ok(Tensor::f_zeros([self.own.size()[0], x.size()[1]], (x.f_kind()?, x.device()))?);
        }
        let taken = x.f_index_select(0, &self.own.f_clamp_max((x.size()[0] - 1).max(0))?)?;
        let none = taken.f_zeros_like()?;
        Ok(taken.f_where_self(&column(&self.is_other)?, &none)?)
    }

    /// Returns `x` with the chosen slices replaced by those of `u`.
    pub(in crate::kernels) fn put(&self, x: &Tensor, u: &Tensor) -> Result<Tensor> {
        if x.size()[0] == 0 {
            return Ok(x.shallow_clone());
        }
        let mut padded = Tensor::f_cat(&[x, &x.f_narrow(0, 0, 1)?], 0)?;
        let _ = padded.f_index_copy_(0, &self.own, &u.f_to_kind(x.f_kind()?)?)?;
        Ok(padded.f_narrow(0, 0, x.size()[0])?)
    }

    /// True where a slice of the other has one.
    pub(in crate::kernels) fn is_other(&self) -> &Tensor {
        &self.is_other
    }
}

/// Returns one number for each slice, with a shape that broadcasts over its elements.
fn column(x: &Tensor) -> Result<Tensor> {
    Ok(x.f_unsqueeze(1)?)
}

/// The slices of a matrix as rows.
fn lines(x: &MatrixView<'_>, side: Side, kind: Kind) -> Result<Tensor> {
    let x = load_matrix(x, kind)?;
    Ok(if side == Side::Rows { x } else { x.f_tr()? })
}

fn store_lines(x: &MatrixView<'_>, side: Side, lines: &Tensor) -> Result<()> {
    store_matrix(x, &if side == Side::Rows { lines.shallow_clone() } else { lines.f_tr()? })
}

/// The type of arithmetic on a matrix and slices of it.
fn kind_of(one: &Sliced<'_>) -> Kind {
    arithmetic([one.x.dtype(), one.u.dtype()].contains(&DType::F64))
}

/// Tests whether nothing is stored here.
fn is_empty(one: &Sliced<'_>) -> bool {
    one.x.shape().contains(&0) || one.u.shape().contains(&0)
}

/// Moves chosen slices between matrices.
pub(in crate::kernels) fn move_slices(side: Side, how: Move, all: &[Sliced]) -> Result<()> {
    for one in all {
        let (x, u) = (one.x.view(), one.u.view());
        if is_empty(one) {
            if matches!(how, Move::Take(_)) && !u.shape().contains(&0) {
                let _ = u.tensor()?.shallow_clone().f_zero_()?;
            }
            continue;
        }
        let kind = kind_of(one);
        let (own, other) = (lines(&x, side, kind)?, lines(&u, side, kind)?);
        let pairs = Pairs::of(&one.chosen, own.size()[0], other.size()[0])?;
        match how {
            Move::Take(keep) => {
                let taken = pairs.take(&own)?;
                let left = own.f_mul_scalar(keep)?.f_where_self(&column(&pairs.is_own)?, &own)?;
                store_lines(&u, side, &taken)?;
                store_lines(&x, side, &left)?;
            }
            Move::Return => store_lines(&x, side, &pairs.put(&own, &other)?)?,
        }
    }
    Ok(())
}

/// See [`crate::kernels::apply_slices`].
pub(in crate::kernels) fn apply_slices(side: Side, apply: &Apply, all: &[Sliced]) -> Result<()> {
    let unit = followed_rate()?;
    let (rate, decay) = (Scalar(apply.rate) * &unit, Scalar(apply.decay) * &unit);
    for one in all.iter().filter(|one| !one.x.shape().contains(&0)) {
        let x = one.x.view();
        let old = lines(&x, side, kind_of(one))?;
        let kept = Computed(old.shallow_clone()) * (1.0 - &decay);
        let new = if one.u.shape().contains(&0) {
            kept
        } else {
            let update = lines(&one.u.view(), side, kind_of(one))?;
            let pairs = Pairs::of(&one.chosen, old.size()[0], update.size()[0])?;
            let update = Computed(pairs.put(&old.f_zeros_like()?, &update)?);
            let old = Computed(old.shallow_clone());
            let opposes = (&old * &update).below(&Scalar(0.0));
            let base = if apply.cautious { opposes.choose(&old, &kept) } else { kept.clone() };
            Computed(column(&pairs.is_own)?).choose(&(base - &rate * &update), &kept)
        };
        store_lines(&x, side, &new.tensor(&old)?)?;
    }
    Ok(())
}
