//! Columns of a matrix that depend on those before them, up to their rounding.
//!
//! X = matrix `[m, r]` with m >= r, Q its orthonormal basis, `X = Q·T` with T upper triangular, ε the relative rounding of X.
//! In 16 bits X has two: that of the sums that it was computed as, and that of each column as it is stored.

use tch::{Kind, Tensor};

use super::qr::probes;
use crate::error::Result;
use crate::tensor::to_i64;

/// Multiple of its rounding at which a column has nothing of its own.
pub(super) const ROUNDINGS: f64 = 8.0;
/// The same of the rounding of elements that are stored: of sums over a row or a column of these little more is ever left.
pub(super) const STORED_ROUNDINGS: f64 = 2.0;
/// Share of a bound below which an estimate from random signs is sure enough: one of 2e8 is as far off.
const SURE: f64 = 1.0 / 16.0;

/// Size of the rounding of the columns of X.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rounding {
    /// Columns that have the rounding of X.
    pub of: Size,
    /// Relative rounding, on average, of the elements of the matrix that X is a product of.
    pub stored: f64,
}

/// Columns that have the rounding of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Size {
    /// The longest column: X is the product of a matrix and vectors of about one length, and a column is short
    /// because much was cancelled in it. Roundings of the elements of the matrix are those of a column of root mean square length.
    All,
    /// Each column itself.
    Each,
}

impl Rounding {
    /// Relative rounding of the columns of a product that is itself rounded by `epsilon`, in units of what divides them:
    /// the longest, or each. `lengths` are theirs.
    #[allow(clippy::cast_precision_loss)] // a number of columns
    pub(crate) fn relative(self, epsilon: f64, lengths: &[f64]) -> f64 {
        let longest = lengths.iter().copied().fold(0.0, f64::max);
        let stored = self.stored * STORED_ROUNDINGS / ROUNDINGS;
        if self.of == Size::Each || longest == 0.0 {
            return epsilon.max(stored);
        }
        let mean =
            lengths.iter().map(|length| (length / longest).powi(2)).sum::<f64>() / lengths.len() as f64;
        epsilon.max(stored * mean.sqrt())
    }
}

/// Finds the columns that are more than their part in the span of those before them, and their basis; none where all
/// are, or where X is not finite. `q_mr` is Q.
///
/// A column `x = X₀·y + ρ·q`, with X₀ the kept ones before it, has a rounding of ε times its size, and so has each of X₀:
/// with sizes of 1 its own part ρ has an error of `ε·√(1 + ‖y‖²)`, and is nothing else unless it is 8 times as large. As
/// `√(1 + ‖y‖²) / ρ` is the norm of a column of T⁻¹, products of T⁻ᵀ with some random signs tell if there is any.
///
/// `epsilons`: the rounding of sums, and that of a column as it is stored, zero where that is the same.
pub(super) fn independent(
    x_mr: &Tensor,
    q_mr: &Tensor,
    epsilons: [f64; 2],
    rounding: Rounding,
) -> Result<Option<Independent>> {
    let Some((unit_mr, epsilon)) = units(x_mr, epsilons, rounding)? else { return Ok(None) };
    let q_mr = q_mr.f_to_kind(unit_mr.f_kind()?)?;
    let Some(t_rr) = factor(&unit_mr, &q_mr, epsilon)? else { return Ok(None) };
    let bound = 1.0 / (ROUNDINGS * epsilon);
    let Some(first) = first_dependent(&t_rr, bound)? else { return Ok(None) };
    let (kept, more_kk) = behind(&t_rr, first, bound)?;
    let at = to_i64(first)?;
    let rest_mk = q_mr.f_narrow(1, at, q_mr.size()[1] - at)?.f_mm(&more_kk.f_to_kind(q_mr.f_kind()?)?)?;
    let columns = (0..first).chain(kept).map(to_i64).collect::<Result<_>>()?;
    Ok(Some(Independent { columns, basis_mk: Tensor::f_cat(&[q_mr.f_narrow(1, 0, at)?, rest_mk], 1)? }))
}

/// Columns that do not depend on those before them.
#[derive(Debug)]
pub(super) struct Independent {
    /// Their indices.
    pub(super) columns: Vec<i64>,
    /// Their orthonormal basis.
    pub(super) basis_mk: Tensor,
}

/// The columns over their size, and their relative rounding; none where not all is finite.
fn units(x_mr: &Tensor, [sums, own]: [f64; 2], rounding: Rounding) -> Result<Option<(Tensor, f64)>> {
    let kind = if x_mr.f_kind()? == Kind::Double { Kind::Double } else { Kind::Float };
    let wide_mr = x_mr.f_to_kind(kind)?;
    let over = if rounding.of == Size::Each { [0].as_slice() } else { &[0, 1] };
    // In two steps: no square of a length overflows.
    let largest = wide_mr.f_abs()?.f_amax(over, true)?;
    let sizes = numbers(&largest.f_to_kind(Kind::Double)?.f_view([-1])?)?;
    if !sizes.iter().all(|size| size.is_finite()) {
        return Ok(None);
    }
    let scaled_mr = wide_mr.f_div(&largest.f_masked_fill(&largest.f_eq(0.0)?, 1.0)?)?;
    // libtorch's norm over rows takes four times as long.
    let length_1r = scaled_mr.f_square()?.f_sum_dim_intlist([0].as_slice(), true, kind)?.f_sqrt()?;
    let sums = rounding.relative(sums, &numbers(&length_1r.f_select(0, 0)?.f_to_kind(Kind::Double)?)?);
    let size = match rounding.of {
        // At least 1 where there is any.
        Size::Each => length_1r.f_clamp_min(0.5)?,
        Size::All => length_1r.f_amax([0, 1].as_slice(), true)?.f_clamp_min(0.5)?,
    };
    let own = own * STORED_ROUNDINGS / ROUNDINGS;
    if own == 0.0 {
        return Ok(Some((scaled_mr.f_div(&size)?, sums)));
    }
    // Both roundings of a column, in units of that of its own length.
    let size =
        length_1r.f_square()?.f_add(&size.f_square()?.f_mul_scalar((sums / own).powi(2))?)?.f_sqrt()?;
    Ok(Some((scaled_mr.f_div(&size)?, own)))
}

/// T, unless all columns have plenty of their own: one that depends on others has little, or one of these has.
fn factor(unit_mr: &Tensor, q_mr: &Tensor, epsilon: f64) -> Result<Option<Tensor>> {
    let own_r = unit_mr.f_mul(q_mr)?.f_sum_dim_intlist([0].as_slice(), false, Kind::Double)?.f_abs()?;
    if numbers(&own_r)?.into_iter().all(|own| own >= epsilon.sqrt()) {
        return Ok(None);
    }
    let mut t_rr = q_mr.f_tr()?.f_mm(unit_mr)?.f_to_kind(Kind::Double)?;
    let _ = t_rr.f_triu_(0)?;
    Ok(Some(t_rr))
}

/// Returns the first column for which the column of T⁻¹ has at least this norm.
fn first_dependent(t_rr: &Tensor, bound: f64) -> Result<Option<usize>> {
    let transposed_rr = t_rr.f_tr()?;
    // Forwards, so that nothing behind a column is in its number.
    let seen =
        |z_rz: &Tensor| squares(&transposed_rr.f_linalg_solve_triangular(z_rz, false, true, false)?, 1);
    let signs_rz = probes(t_rr.size()[0], t_rr)?.f_select(0, 0)?;
    #[expect(clippy::cast_precision_loss, reason = "a handful")]
    let share = signs_rz.size()[1] as f64;
    // What is not a number is not below.
    if seen(&signs_rz)?.into_iter().all(|s| (s / share).sqrt() < bound * SURE) {
        return Ok(None);
    }
    let norms = seen(&Tensor::f_eye(t_rr.size()[0], (Kind::Double, t_rr.device()))?)?;
    let is_below = |s: &f64| s.sqrt() < bound;
    Ok(norms.iter().position(|s| !is_below(s)))
}

/// Columns that are taken together where some may depend on others.
const PANEL: i64 = 32;

/// The independent columns among those from `first` on, before which all are, and the orthonormal basis of what they have
/// of their own, in terms of the columns of Q from there on: Gram-Schmidt, twice.
fn behind(t_rr: &Tensor, first: usize, bound: f64) -> Result<(Vec<usize>, Tensor)> {
    let (at, all) = (to_i64(first)?, t_rr.size()[0]);
    let count = all - at;
    let before = t_rr.f_narrow(0, 0, at)?;
    let (upper, lower) =
        (before.f_narrow(1, at, count)?, t_rr.f_narrow(0, at, count)?.f_narrow(1, at, count)?);
    let y = before.f_narrow(1, 0, at)?.f_linalg_solve_triangular(&upper, true, true, false)?;
    // Columns: a vector of the basis, and what it is made of all columns of X.
    let (basis, made) = (lower.f_zeros_like()?, t_rr.f_zeros_like()?);
    let mut kept = Vec::new();
    for start in (0..count).step_by(usize::try_from(PANEL).unwrap_or(1)) {
        let width = PANEL.min(count - start);
        let old = to_i64(kept.len())?;
        let rest = lower.f_narrow(1, start, width)?.f_detach_copy()?;
        let share = take_away(&rest, &basis.f_narrow(1, 0, old)?)?;
        let parts = made.f_narrow(1, 0, old)?.f_mm(&share)?;
        let _ = parts.f_narrow(0, 0, at)?.f_add_(&y.f_narrow(1, start, width)?)?;
        for j in 0..width {
            let (one, now) = (rest.f_narrow(1, j, 1)?, to_i64(kept.len())?);
            let length = norm(&one)?;
            let share = take_away(&one, &basis.f_narrow(1, old, now - old)?)?;
            if norm(&one)? < 0.1 * length {
                let _ = take_away(&one, &basis.f_narrow(1, 0, now)?)?;
            }
            let part = parts.f_narrow(1, j, 1)?.f_add(&made.f_narrow(1, old, now - old)?.f_mm(&share)?)?;
            let own = norm(&one)?;
            if own * bound > (1.0 + norm(&part)?.powi(2)).sqrt() {
                let column = at + start + j;
                basis.f_narrow(1, now, 1)?.f_copy_(&one.f_mul_scalar(1.0 / own)?)?;
                let mut made = made.f_narrow(1, now, 1)?;
                made.f_copy_(&part.f_mul_scalar(-1.0 / own)?)?;
                let _ = made.f_narrow(0, column, 1)?.f_fill_(1.0 / own)?;
                kept.push(first + usize::try_from(start + j).unwrap_or(0));
            }
        }
    }
    let basis = basis.f_narrow(1, 0, to_i64(kept.len())?)?;
    Ok((kept, basis))
}

/// Takes away from some columns what they have of an orthonormal basis, twice, and returns how much it was of each.
fn take_away(x: &Tensor, basis: &Tensor) -> Result<Tensor> {
    let mut share = basis.f_tr()?.f_mm(x)?;
    for time in 0..2 {
        let again = if time == 0 { share.f_detach_copy()? } else { basis.f_tr()?.f_mm(x)? };
        x.f_alias()?.f_copy_(&x.f_sub(&basis.f_mm(&again)?)?)?;
        if time > 0 {
            let _ = share.f_add_(&again)?;
        }
    }
    Ok(share)
}

fn norm(x: &Tensor) -> Result<f64> {
    Ok(squares(x, 0)?.iter().sum::<f64>().sqrt())
}

/// The sums of squares of a matrix of float64 over a dimension.
fn squares(x: &Tensor, over: i64) -> Result<Vec<f64>> {
    numbers(&x.f_square()?.f_sum_dim_intlist([over].as_slice(), false, Kind::Double)?)
}

/// The numbers of a vector of float64.
fn numbers(x_k: &Tensor) -> Result<Vec<f64>> {
    let mut values = vec![0.0; x_k.numel()];
    let count = values.len();
    x_k.f_copy_data(&mut values, count)?;
    Ok(values)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::disallowed_methods, reason = "a test may panic")]
#[path = "dependent_tests.rs"]
mod tests;
