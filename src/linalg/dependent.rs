//! Columns of a matrix that depend on those before them, as far as their rounding tells.
//!
//! X = matrix `[m, r]` with m >= r, Q its orthonormal basis, `X = Q·T` with T upper triangular, ε the relative rounding of X.

use tch::{Kind, Tensor};

use super::qr::probes;
use crate::error::{Error, Result};
use crate::tensor::to_i64;

/// Multiple of its rounding at which a column has nothing of its own.
const ROUNDINGS: f64 = 8.0;

/// Size of the rounding of the columns of X.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rounding {
    /// Rounding of the longest column: X is the product of a matrix and vectors of about one length, and a short column is one
    /// of which much was cancelled.
    OfAll,
    /// Rounding of the column itself.
    OfEach,
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
    let Some((unit_mr, mut columns)) = units(x_mr, rounding)? else { return Ok(None) };
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

/// The columns over the size of their rounding, and those that are not zero; none where not all is finite.
fn units(x_mr: &Tensor, rounding: Rounding) -> Result<Option<(Tensor, Vec<i64>)>> {
    let kind = if x_mr.f_kind()? == Kind::Double { Kind::Double } else { Kind::Float };
    let wide_mr = x_mr.f_to_kind(kind)?;
    let over = if rounding == Rounding::OfEach { [0].as_slice() } else { &[0, 1] };
    // In two steps: no square of a length overflows.
    let largest = wide_mr.f_abs()?.f_amax(over, true)?;
    let sizes = numbers(&largest.f_to_kind(Kind::Double)?.f_view([-1])?)?;
    if !sizes.iter().all(|size| size.is_finite()) {
        return Ok(None);
    }
    let scaled_mr = wide_mr.f_div(&largest.f_masked_fill(&largest.f_eq(0.0)?, 1.0)?)?;
    let length_1r = scaled_mr.f_norm_scalaropt_dim(2.0, [0], true)?;
    let lengths = numbers(&length_1r.f_select(0, 0)?.f_to_kind(Kind::Double)?)?;
    let some = (0..).zip(lengths).filter(|(_, length)| *length > 0.0).map(|(column, _)| column).collect();
    let unit = match rounding {
        // At least 1 where there is any.
        Rounding::OfEach => length_1r.f_clamp_min(0.5)?,
        Rounding::OfAll => length_1r.f_amax([0, 1].as_slice(), true)?.f_clamp_min(0.5)?,
    };
    Ok(Some((scaled_mr.f_div(&unit)?, some)))
}

/// The first column that depends on those before it, and those behind it that do not depend on these either.
fn first_dependent(x_mk: &Tensor, q_mk: &Tensor, epsilon: f64) -> Result<Option<(usize, Vec<usize>)>> {
    let own_k = x_mk.f_mul(q_mk)?.f_sum_dim_intlist([0].as_slice(), false, Kind::Double)?.f_abs()?;
    // A column that depends on others has little of its own, or one of these has.
    if numbers(&own_k)?.into_iter().all(|own| own >= epsilon.sqrt()) {
        return Ok(None);
    }
    let mut t_kk = q_mk.f_tr()?.f_mm(x_mk)?.f_to_kind(Kind::Double)?;
    let _ = t_kk.f_triu_(0)?;
    let signs_kz = probes(t_kk.size()[0], &t_kk)?.f_select(0, 0)?;
    let seen_kz = t_kk.f_tr()?.f_linalg_solve_triangular(&signs_kz, false, true, false)?;
    #[expect(clippy::cast_precision_loss, reason = "a handful")]
    let share = signs_kz.size()[1] as f64;
    let sizes = numbers(&seen_kz.f_square()?.f_sum_dim_intlist([1].as_slice(), false, Kind::Double)?)?;
    let bound = 1.0 / (ROUNDINGS * epsilon);
    // What is not a number is not below.
    let is_below = |s: &f64| (s / share).sqrt() < bound;
    let Some(first) = sizes.iter().position(|s| !is_below(s)) else { return Ok(None) };
    let (at, count) = (to_i64(first)?, t_kk.size()[0]);
    let behind = count - at;
    let (upper, lower) = (
        t_kk.f_narrow(0, 0, at)?.f_narrow(1, at, behind)?,
        t_kk.f_narrow(0, at, behind)?.f_narrow(1, at, behind)?,
    );
    let y =
        t_kk.f_narrow(0, 0, at)?.f_narrow(1, 0, at)?.f_linalg_solve_triangular(&upper, true, true, false)?;
    let squares = |x: &Tensor| -> Result<Vec<f64>> {
        numbers(&x.f_square()?.f_sum_dim_intlist([0].as_slice(), false, Kind::Double)?)
    };
    let alive = squares(&lower)?.into_iter().zip(squares(&y)?).enumerate().filter_map(|(i, (rest, y))| {
        let is_own = i > 0 && rest.sqrt() > ROUNDINGS * epsilon * (1.0 + y).sqrt();
        is_own.then_some(first + i)
    });
    Ok(Some((first, alive.collect())))
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
