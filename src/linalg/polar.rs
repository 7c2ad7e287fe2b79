//! Exact polar factors.
//!
//! B = matrices in the batch, m = rows, n = cols, k = min(m, n).

use tch::{Kind, Tensor};

use crate::error::Result;

/// Replaces every matrix `X = U S Vᵀ` of the batch by its polar factor `U Vᵀ`, in place.
///
/// The singular value decomposition is computed in float32 (float64 for float64) of the matrix divided by its largest
/// entry, so its scale does not matter. Directions whose singular value is at most `max(m, n)` units of roundoff of the
/// largest one are left out: a matrix of rank `r` gives a partial isometry of rank `r`, and zero gives exactly zero. A
/// non-finite matrix becomes NaN and leaves the others alone.
///
/// `x_bmn` is `[B, m, n]` in any float dtype. Memory of several matrices in the dtype of the arithmetic is allocated.
///
/// # Errors
/// [`Error::Torch`](crate::error::Error::Torch) when the decomposition does not converge.
pub fn polar_factor(x_bmn: &mut Tensor) -> Result<()> {
    let (b, m, n) = x_bmn.size3()?;
    if b == 0 || m == 0 || n == 0 {
        return Ok(());
    }
    let kind = if x_bmn.f_kind()? == Kind::Double { Kind::Double } else { Kind::Float };
    let wide_bmn = x_bmn.f_totype(kind)?;
    let largest_b11 = wide_bmn.f_abs()?.f_amax([1, 2].as_slice(), true)?;
    let bad_b11 = largest_b11.f_isfinite()?.f_logical_not()?;
    let divisor_b11 = largest_b11.f_masked_fill(&largest_b11.f_eq(0.0)?, 1.0)?;
    let scaled_bmn = wide_bmn.f_div(&divisor_b11)?.f_masked_fill(&bad_b11, 0.0)?;
    let (u_bmk, sigma_bk, v_bnk) = scaled_bmn.f_svd(true, true)?;
    let roundoff = if kind == Kind::Double { f64::EPSILON } else { f64::from(f32::EPSILON) };
    #[expect(clippy::cast_precision_loss, reason = "sizes are far below 2^53")]
    let bound_b1 = sigma_bk.f_amax([1].as_slice(), true)?.f_mul_scalar(m.max(n) as f64 * roundoff)?;
    let kept_b1k = sigma_bk.f_gt_tensor(&bound_b1)?.f_totype(kind)?.f_unsqueeze(1)?;
    let factor_bmn =
        u_bmk.f_mul(&kept_b1k)?.f_bmm(&v_bnk.f_transpose(1, 2)?)?.f_masked_fill(&bad_b11, f64::NAN)?;
    x_bmn.f_copy_(&factor_bmn)?;
    Ok(())
}

/// Floating-point operations for one `m x n` matrix: about `4 m n k + 22 k³` for the decomposition with both factors
/// and `2 m n k` for their product.
#[must_use]
pub fn flops(m: usize, n: usize) -> u128 {
    let (m, n, k) = (m as u128, n as u128, m.min(n) as u128);
    6 * m * n * k + 22 * k * k * k
}
