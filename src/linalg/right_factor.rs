//! Right factors of low rank with orthonormal columns, next to columns that are kept.
//!
//! R = matrix `[n, r]` with n >= r, B = matrices in the batch.

use tch::{Kind, Tensor};

use super::basis::{Rounding, orthonormal_or_zero};
use super::qr::{QrMethod, Report, rows};
use crate::error::{Error, Result};
use crate::kernels::{frozen, on_device};
use crate::tensor::to_i64;

/// Share of its length that a kept column has of its own, at least, to be made orthogonal to the others: less is rounding.
const OWN: f64 = 1.0 / 1024.0;

/// Replaces the live columns of every matrix of `r_bnr`, `[B, n, r]` with `n >= r`, by their Q factor, in place, in their
/// order and with a positive diagonal. `live_br` is 0 for the other columns, which are kept. These are no part of the
/// factorization, lose their components along the new columns and get length 1. A kept column with next to nothing of its own
/// is unchanged, as are all columns where none is live.
///
/// A live column that depends on those before it, up to its rounding, would get an arbitrary direction. It is divided by its
/// length instead.
///
/// # Errors
/// Whatever libtorch or a kernel says.
pub fn right_factor(r_bnr: &mut Tensor, live_br: &Tensor, rounding: Rounding) -> Result<Report> {
    if r_bnr.numel() == 0 {
        return Ok(Report::default());
    }
    let mut report = Report::default();
    if on_device() {
        // The host reads nothing: which are live is in the order of the columns.
        frozen(|| among(r_bnr, &live_br.f_ne(0.0)?, rounding).map(|_| ()))?;
        return Ok(report);
    }
    let live_br = live_br.f_ne(0.0)?;
    let all_b = Vec::<bool>::try_from(live_br.f_all_dims([1].as_slice(), false)?)?;
    let of = |wanted: bool| -> Result<Vec<i64>> {
        all_b.iter().enumerate().filter(|(_, all)| **all == wanted).map(|(i, _)| to_i64(i)).collect()
    };
    let plain = of(true)?;
    if !plain.is_empty() {
        let own_bnr = rows(r_bnr, &plain)?;
        let (new_bnr, found) = positive(&own_bnr, rounding)?;
        let at = Tensor::f_from_slice(&plain)?.f_to_device(r_bnr.device())?;
        let _ = r_bnr.f_index_copy_(0, &at, &new_bnr)?;
        report = found;
    }
    for index in of(false)? {
        let mut one = r_bnr.f_narrow(0, index, 1)?;
        let found = among(&mut one, &live_br.f_narrow(0, index, 1)?, rounding)?;
        report.shifted += found.shifted;
        report.householder += found.householder;
    }
    Ok(report)
}

/// The factor of matrices without kept columns.
fn positive(r_bnr: &Tensor, rounding: Rounding) -> Result<(Tensor, Report)> {
    let kind = r_bnr.f_kind()?;
    let mut q_bnr = r_bnr.f_detach_copy()?;
    let none = |_: &[usize]| Err(Error::Internal("Cholesky QR has no sketch".into()));
    let report = orthonormal_or_zero(&mut q_bnr, QrMethod::Cqr, rounding, none)?;
    let [wide_bnr, basis_bnr] = [r_bnr.f_to_kind(arithmetic(kind))?, q_bnr.f_to_kind(arithmetic(kind))?];
    let diagonal_b1r = basis_bnr.f_mul(&wide_bnr)?.f_sum_dim_intlist([1].as_slice(), true, Kind::Double)?;
    let turned_b1r = diagonal_b1r.f_lt(0.0)?;
    let signed_bnr = basis_bnr.f_where_self(&turned_b1r.f_logical_not()?, &basis_bnr.f_neg()?)?;
    // What nothing made independent, and is no column of zeros.
    let length_b1r = lengths(&wide_bnr)?;
    let lost_b1r = signed_bnr.f_eq(0.0)?.f_all_dims([1].as_slice(), true)?;
    let unit_bnr = wide_bnr.f_div(&length_b1r.f_masked_fill(&length_b1r.f_eq(0.0)?, 1.0)?)?;
    Ok((unit_bnr.f_where_self(&lost_b1r, &signed_bnr)?.f_to_kind(kind)?, report))
}

/// Computes [`right_factor`] of matrices with some dead columns, which are moved to the end. On the host it takes one matrix.
fn among(r_bnr: &mut Tensor, live_br: &Tensor, rounding: Rounding) -> Result<Report> {
    let kind = r_bnr.f_kind()?;
    let dead_br = live_br.f_logical_not()?.f_to_kind(Kind::Int)?;
    let (_, order_br) = dead_br.f_sort_stable(true, 1, false)?;
    let behind_b1r = dead_br.f_gather(1, &order_br, false)?.f_ne(0.0)?.f_unsqueeze(1)?;
    let along = |order_br: &Tensor| order_br.f_unsqueeze(1)?.f_expand_as(r_bnr);
    let sorted_bnr = r_bnr.f_gather(2, &along(&order_br)?, false)?;
    let zeroed_bnr = sorted_bnr.f_masked_fill(&behind_b1r, 0.0)?;
    let (new_bnr, report) = if on_device() {
        let (new_bnr, report) = positive(&zeroed_bnr, rounding)?;
        // A square matrix gets directions for its zeros too.
        (new_bnr.f_masked_fill(&behind_b1r, 0.0)?, report)
    } else {
        let count = i64::try_from(live_br.f_sum(Kind::Int64)?)?;
        let (new_bnr, report) = positive(&sorted_bnr.f_narrow(2, 0, count)?, rounding)?;
        zeroed_bnr.f_narrow(2, 0, count)?.f_copy_(&new_bnr)?;
        (zeroed_bnr, report)
    };
    let new_bnr = new_bnr.f_to_kind(arithmetic(kind))?;
    let old_bnr = sorted_bnr.f_to_kind(arithmetic(kind))?.f_masked_fill(&behind_b1r.f_logical_not()?, 0.0)?;
    let share_brr = new_bnr.f_transpose(1, 2)?.f_matmul(&old_bnr)?;
    let rest_bnr = old_bnr.f_sub(&new_bnr.f_matmul(&share_brr)?)?;
    let left_b1r = lengths(&rest_bnr)?;
    let has_own_b1r = left_b1r.f_gt_tensor(&lengths(&old_bnr)?.f_mul_scalar(OWN)?)?;
    let any_b11 = behind_b1r.f_all_dims([2].as_slice(), true)?.f_logical_not()?;
    let moved_b1r = has_own_b1r.f_logical_and(&any_b11)?.f_logical_and(&behind_b1r)?;
    let unit_bnr = rest_bnr.f_div(&left_b1r.f_masked_fill(&moved_b1r.f_logical_not()?, 1.0)?)?;
    let kept_bnr = unit_bnr.f_where_self(&moved_b1r, &old_bnr)?;
    let all_bnr = kept_bnr.f_where_self(&behind_b1r, &new_bnr)?.f_to_kind(kind)?;
    let (_, places_br) = order_br.f_sort_stable(true, 1, false)?;
    r_bnr.f_copy_(&all_bnr.f_gather(2, &along(&places_br)?, false)?)?;
    Ok(report)
}

/// The lengths of columns.
fn lengths(x_bnr: &Tensor) -> Result<Tensor> {
    Ok(x_bnr.f_norm_scalaropt_dim(2.0, [1], true)?)
}

/// The type of arithmetic on elements of a type.
fn arithmetic(kind: Kind) -> Kind {
    if kind == Kind::Double { Kind::Double } else { Kind::Float }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::disallowed_methods, reason = "a test may panic")]
#[path = "right_factor_tests.rs"]
mod tests;
