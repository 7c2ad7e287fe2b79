//! Columns of a matrix that depend on those before them, as far as their rounding tells.
//!
//! X = matrix `[m, r]` with m >= r, Q its orthonormal basis, `X = Q·T` with T upper triangular, ε the relative rounding of X.

use tch::{Kind, Tensor};

use super::qr::probes;
use crate::error::{Error, Result};
use crate::tensor::to_i64;

/// Multiple of its rounding at which a column has nothing of its own.
pub(super) const ROUNDINGS: f64 = 8.0;
/// Share of a bound below which an estimate from random signs is sure enough: one of 2e8 is as far off.
const SURE: f64 = 1.0 / 16.0;

/// Size of the rounding of the columns of X.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rounding {
    /// What has the rounding of X.
    pub of: Size,
    /// Relative rounding of the elements of the matrix that X is a product of.
    pub stored: f64,
}

/// What has the rounding of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Size {
    /// The longest column: X is the product of a matrix and vectors of about one length, and a short column is one of
    /// which much was cancelled. Roundings of the elements of the matrix are those of a column of root mean square length.
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
        if self.of == Size::Each || longest == 0.0 {
            return epsilon.max(self.stored);
        }
        let mean = lengths.iter().map(|length| (length / longest).powi(2)).sum::<f64>() / lengths.len() as f64;
        epsilon.max(self.stored * mean.sqrt())
    }
}

/// Finds the columns that are more than their part in the span of those before them, and their basis; none where all
/// are, or where X is not finite.
///
/// A column `x = X₀·y + ρ·q`, with X₀ those before it, has a rounding of ε times its size, and so has each of X₀: with
/// sizes of 1 its own part ρ has an error of `ε·√(1 + ‖y‖²)`, and is nothing else unless it is 8 times as large. As
/// `√(1 + ‖y‖²) / ρ` is the norm of a column of T⁻¹, products of T⁻ᵀ with some random signs tell if there is any.
pub(super) fn independent(
    x_mr: &Tensor,
    q_mr: &Tensor,
    epsilon: f64,
    rounding: Rounding,
) -> Result<Option<Independent>> {
    let Some(Units { unit_mr, mut columns, epsilon }) = units(x_mr, epsilon, rounding)? else { return Ok(None) };
    let all = usize::try_from(unit_mr.size()[1]).unwrap_or(0);
    let select =
        |columns: &[i64]| Ok::<_, Error>(unit_mr.f_index_select(1, &Tensor::f_from_slice(columns)?)?);
    let mut basis_mk = q_mr.f_to_kind(unit_mr.f_kind()?)?;
    // Behind a column without a direction of its own Q has another part of the others.
    let mut is_prefix = columns.last().is_none_or(|&last| usize::try_from(last + 1) == Ok(columns.len()));
    while !columns.is_empty() {
        let some_mk = select(&columns)?;
        basis_mk = if is_prefix {
            basis_mk.f_narrow(1, 0, to_i64(columns.len())?)?
        } else {
            Tensor::f_linalg_qr(&some_mk, "reduced")?.0
        };
        let Some((first, others)) = first_dependent(&some_mk, &basis_mk, epsilon)? else { break };
        is_prefix = others.is_empty();
        columns = (0..first).chain(others).map(|i| columns[i]).collect();
        if is_prefix {
            basis_mk = basis_mk.f_narrow(1, 0, to_i64(first)?)?;
            break;
        }
    }
    Ok((columns.len() < all).then_some(Independent { columns, basis_mk }))
}

/// Columns that do not depend on those before them.
#[derive(Debug)]
pub(super) struct Independent {
    /// Their indices.
    pub(super) columns: Vec<i64>,
    /// Their orthonormal basis.
    pub(super) basis_mk: Tensor,
}

/// Columns over their size.
struct Units {
    unit_mr: Tensor,
    /// Those that are not zero.
    columns: Vec<i64>,
    /// Their relative rounding.
    epsilon: f64,
}

/// The columns over their size; none where not all is finite.
fn units(x_mr: &Tensor, epsilon: f64, rounding: Rounding) -> Result<Option<Units>> {
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
    let length_1r = scaled_mr.f_norm_scalaropt_dim(2.0, [0], true)?;
    let lengths = numbers(&length_1r.f_select(0, 0)?.f_to_kind(Kind::Double)?)?;
    let epsilon = rounding.relative(epsilon, &lengths);
    let columns = (0..).zip(lengths).filter(|(_, length)| *length > 0.0).map(|(column, _)| column).collect();
    let size = match rounding.of {
        // At least 1 where there is any.
        Size::Each => length_1r.f_clamp_min(0.5)?,
        Size::All => length_1r.f_amax([0, 1].as_slice(), true)?.f_clamp_min(0.5)?,
    };
    Ok(Some(Units { unit_mr: scaled_mr.f_div(&size)?, columns, epsilon }))
}

/// The first column that depends on those before it, and those behind it that do not depend on these either.
fn first_dependent(x_mk: &Tensor, q_mk: &Tensor, epsilon: f64) -> Result<Option<(usize, Vec<usize>)>> {
    let mut t_kk = q_mk.f_tr()?.f_mm(x_mk)?.f_to_kind(Kind::Double)?;
    let _ = t_kk.f_triu_(0)?;
    let transposed_kk = t_kk.f_tr()?;
    // Squares of the norms of the columns of T⁻¹, up to the first that depends on others: forwards, so that nothing
    // behind one is in them.
    let seen = |z_kz: &Tensor| squares(&transposed_kk.f_linalg_solve_triangular(z_kz, false, true, false)?, 1);
    let bound = (ROUNDINGS * epsilon).powi(-2);
    let signs_kz = probes(t_kk.size()[0], &t_kk)?.f_select(0, 0)?;
    #[expect(clippy::cast_precision_loss, reason = "a handful")]
    let share = signs_kz.size()[1] as f64;
    // What is not a number is not below.
    if seen(&signs_kz)?.into_iter().all(|s| s / share < bound * SURE.powi(2)) {
        return Ok(None);
    }
    let exact = seen(&Tensor::f_eye(t_kk.size()[0], (Kind::Double, t_kk.device()))?)?;
    let is_below = |s: &f64| *s < bound;
    let Some(first) = exact.iter().position(|s| !is_below(s)) else { return Ok(None) };
    let (at, count) = (to_i64(first)?, t_kk.size()[0]);
    let behind = count - at;
    let (upper, lower) = (
        t_kk.f_narrow(0, 0, at)?.f_narrow(1, at, behind)?,
        t_kk.f_narrow(0, at, behind)?.f_narrow(1, at, behind)?,
    );
    let y =
        t_kk.f_narrow(0, 0, at)?.f_narrow(1, 0, at)?.f_linalg_solve_triangular(&upper, true, true, false)?;
    let alive = squares(&lower, 0)?.into_iter().zip(squares(&y, 0)?).enumerate().filter_map(|(i, (rest, y))| {
        let is_own = i > 0 && rest.sqrt() > ROUNDINGS * epsilon * (1.0 + y).sqrt();
        is_own.then_some(first + i)
    });
    Ok(Some((first, alive.collect())))
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
