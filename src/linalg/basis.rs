//! Orthonormal bases in place: Cholesky QR where its own factor shows that it is accurate, else the method asked for.

use tch::{Kind, Tensor};

use super::dependent::{Independent, ROUNDINGS, STORED_ROUNDINGS, independent};
pub use super::dependent::{Rounding, Size};
use super::qr::{QrMethod, Report, orthonormalize, rows};
use super::views;
use crate::error::Result;
use crate::kernels::{self, Depends, Inverse};
use crate::tensor::{DType, to_i64};

/// Bytes of the matrices that libtorch orthonormalizes together.
const TOGETHER: usize = 1 << 20;

/// Makes the columns of every matrix of `p_bmr`, `[B, m, r]` with `m >= r`, orthonormal: what [`orthonormalize`] gives,
/// up to rounding and the signs of columns, in place.
///
/// All methods but [`QrMethod::Qr`] begin with Cholesky QR, once where the trace of `(PᵀP)⁻¹` shows that the result is
/// orthonormal to a few roundoffs, else (and for [`QrMethod::Cqr2`] always) twice. A matrix that is too ill-conditioned
/// for that, and every square one, goes through [`orthonormalize`]; for [`QrMethod::Rcqr`] `sketch` is asked for the
/// sketches of those matrices, given their indices.
///
/// # Errors
/// As [`orthonormalize`], and whatever `sketch` returns.
pub fn orthonormal_basis(
    p_bmr: &mut Tensor,
    method: QrMethod,
    sketch: impl FnMut(&[usize]) -> Result<Tensor>,
) -> Result<Report> {
    with_basis(p_bmr, method, sketch, None)
}

/// As [`orthonormal_basis`]; columns that depend on those before them get any direction that completes the basis, or with
/// `clear`, the size of their rounding, become zero.
fn with_basis(
    p_bmr: &mut Tensor,
    method: QrMethod,
    mut sketch: impl FnMut(&[usize]) -> Result<Tensor>,
    clear: Option<Rounding>,
) -> Result<Report> {
    let (b, m, r) = p_bmr.size3()?;
    if b == 0 || m == 0 || r == 0 {
        return Ok(Report::default());
    }
    let kind = p_bmr.f_kind()?;
    if matches!(kind, Kind::BFloat16 | Kind::Half) {
        let wide = p_bmr.f_to_kind(Kind::Float)?;
        let mut basis = wide.f_alias()?;
        if clear.is_some() {
            basis = wide.f_detach_copy()?;
        }
        let report = with_basis(&mut basis, method, sketch, None)?;
        if let Some(rounding) = clear {
            clear_dependent(&wide, &mut basis, [epsilon_of(Kind::Float), epsilon_of(kind)], rounding)?;
        }
        p_bmr.f_copy_(&basis)?;
        return Ok(report);
    }
    let mut rest: Vec<usize> = (0..usize::try_from(b).unwrap_or(0)).collect();
    if m > r && method != QrMethod::Qr && !kernels::on_device() {
        let (all, cols) = (views::write(p_bmr)?, usize::try_from(r).unwrap_or(0));
        let each = all.len() / rest.len();
        let twice = method == QrMethod::Cqr2;
        let depends =
            clear.map(|rounding| move |inverse: &Inverse| depends(inverse, epsilon_of(kind), rounding));
        let depends = depends.as_ref().map(|depends| depends as Depends<'_>);
        let done = kernels::cholesky_qr(all.chunks(each).collect(), cols, twice, depends);
        rest.retain(|i| !done[*i]);
    }
    // Some at a time: a copy of each with its sketch and a handful of results are in memory at once.
    let bytes =
        usize::try_from(m * r).unwrap_or(usize::MAX).saturating_mul(p_bmr.f_kind()?.elt_size_in_bytes());
    let mut report = Report::default();
    for some in rest.chunks((TOGETHER / bytes.max(1)).max(1)) {
        let sketch = if method == QrMethod::Rcqr && m > r {
            Some(sketch(some)?.f_to_device(p_bmr.device())?)
        } else {
            None
        };
        let indices = some.iter().map(|&i| to_i64(i)).collect::<Result<Vec<_>>>()?;
        let some_bmr = rows(p_bmr, &indices)?;
        let (mut q_bmr, found) = orthonormalize(&some_bmr, method, sketch)?;
        if let Some(rounding) = clear {
            clear_dependent(&some_bmr, &mut q_bmr, [epsilon_of(kind), 0.0], rounding)?;
        }
        let at = Tensor::f_from_slice(&indices)?.f_to_device(p_bmr.device())?;
        let _ = p_bmr.f_index_copy_(0, &at, &q_bmr)?;
        report.shifted += found.shifted;
        report.householder += found.householder;
    }
    Ok(report)
}

/// Relative rounding, on average, of the elements of a matrix that is stored in a type. It is a quarter of a unit in the last
/// place, or of a step between quantized values. In 16 bits it is a third of a unit, as these may be rounded stochastically.
#[must_use]
pub fn stored_epsilon(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => f64::EPSILON / 4.0,
        DType::F32 => f64::from(f32::EPSILON) / 4.0,
        DType::BF16 => 2.0_f64.powf(-8.5),
        DType::F16 => 2.0_f64.powf(-11.5),
        DType::Q8 | DType::UQ8 => 2.0_f64.powi(-6),
        // No matrix is of these.
        DType::I16 => 0.0,
    }
}

/// The same of operands that have the bits of a type. bfloat16 is rounded to the nearest; TF32, which has the bits of float16,
/// may be truncated.
#[must_use]
pub fn operand_epsilon(dtype: DType) -> f64 {
    if dtype == DType::BF16 { 2.0_f64.powi(-9) } else { stored_epsilon(dtype) }
}

/// Relative rounding of a product that is stored in a type: about a unit in the last place, and half of one at most where
/// it was summed in a wider type.
fn epsilon_of(kind: Kind) -> f64 {
    match kind {
        Kind::Double => f64::EPSILON,
        Kind::BFloat16 => 2.0_f64.powi(-9),
        Kind::Half => 2.0_f64.powi(-12),
        _ => f64::from(f32::EPSILON),
    }
}

/// Tests whether a column depends on those before it, as [`independent`] does, by the inverse of the triangular factor.
fn depends(inverse: &Inverse, epsilon: f64, rounding: Rounding) -> bool {
    let bound = 1.0 / (ROUNDINGS * rounding.relative(epsilon, &inverse.lengths));
    let longest = inverse.lengths.iter().copied().fold(0.0, f64::max);
    let norms = if rounding.of == Size::Each { &inverse.unit_norms } else { &inverse.norms };
    let size = if rounding.of == Size::Each { 1.0 } else { longest };
    // What is not a number is not below.
    !norms.iter().all(|norm| norm * size < bound)
}

/// Clears the basis columns for which the column of X depends on those before it.
fn clear_dependent(x_bmr: &Tensor, q_bmr: &mut Tensor, epsilons: [f64; 2], rounding: Rounding) -> Result<()> {
    for index in 0..x_bmr.size()[0] {
        let mut one = q_bmr.f_select(0, index)?;
        if let Some(Independent { columns, basis_mk }) =
            independent(&x_bmr.f_select(0, index)?, &one, epsilons, rounding)?
        {
            // Which may be a part of Q.
            let basis_mk = basis_mk.f_detach_copy()?;
            let _ = one.f_zero_()?;
            if columns.is_empty() {
                continue;
            }
            let at = Tensor::f_from_slice(&columns)?.f_to_device(one.device())?;
            let _ = one.f_index_copy_(1, &at, &basis_mk)?;
        }
    }
    Ok(())
}

/// Orthonormal bases as of [`orthonormal_basis`], but a column that depends on those before it, as one of zeros does,
/// becomes zero: any direction would be made up.
///
/// On a device with kernels for it, where the host reads nothing, all methods but [`QrMethod::Qr`] are Cholesky QR in as many passes as the
/// factors ask for, with shifts; a column that still depends on those before it becomes zero. Square and float64
/// matrices go through Householder QR.
///
/// # Errors
/// As [`orthonormal_basis`].
pub fn orthonormal_or_zero(
    p_bmr: &mut Tensor,
    method: QrMethod,
    rounding: Rounding,
    sketch: impl FnMut(&[usize]) -> Result<Tensor>,
) -> Result<Report> {
    let (b, m, r) = p_bmr.size3()?;
    if b == 0 || m == 0 || r == 0 {
        return Ok(Report::default());
    }
    if kernels::has_orthonormal_columns()? {
        kernels::frozen(|| on_device(p_bmr, method, rounding.stored))?;
        return Ok(Report::default());
    }
    with_basis(p_bmr, method, sketch, Some(rounding))
}

/// Computes [`orthonormal_or_zero`] without reads by the host. The matrices are products of one with this rounding.
fn on_device(p_bmr: &mut Tensor, method: QrMethod, stored: f64) -> Result<()> {
    let (b, m, r) = p_bmr.size3()?;
    match p_bmr.f_kind()? {
        Kind::Float if m > r && method != QrMethod::Qr => {
            let shape = [b, m, r].map(|n| usize::try_from(n).unwrap_or(0));
            let twice = method == QrMethod::Cqr2;
            return kernels::orthonormal_columns(
                &mut views::write(p_bmr)?,
                shape,
                twice,
                STORED_ROUNDINGS * stored,
            );
        }
        Kind::Half | Kind::BFloat16 => {
            let mut wide = p_bmr.f_to_kind(Kind::Float)?;
            on_device(&mut wide, method, stored)?;
            p_bmr.f_copy_(&wide)?;
            return Ok(());
        }
        _ => {}
    }
    let has_elements_b11 = p_bmr.f_abs()?.f_amax([1, 2].as_slice(), true)?.f_ne(0.0)?;
    let (q_bmr, _) = orthonormalize(p_bmr, QrMethod::Qr, None)?;
    p_bmr.f_copy_(&q_bmr.f_mul(&has_elements_b11)?)?;
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::disallowed_methods, reason = "a test may panic")]
#[path = "basis_tests.rs"]
mod tests;
