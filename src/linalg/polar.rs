//! Exact polar factors.
//!
//! B = matrices in the batch, m = rows, n = cols, k = min(m, n).

use tch::{Kind, Tensor};

use super::decompose::singular;
use crate::error::{Error, Result};
use crate::kernels::on_device;

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
    let (u_bmk, sigma_bk, v_bnk) =
        if on_device() { there(&scaled_bmn)? } else { scaled_bmn.f_svd(true, true)? };
    let roundoff = if kind == Kind::Double { f64::EPSILON } else { f64::from(f32::EPSILON) };
    #[expect(clippy::cast_precision_loss, reason = "sizes are far below 2^53")]
    let bound_b1 = sigma_bk.f_amax([1].as_slice(), true)?.f_mul_scalar(m.max(n) as f64 * roundoff)?;
    let kept_b1k = sigma_bk.f_gt_tensor(&bound_b1)?.f_totype(kind)?.f_unsqueeze(1)?;
    let factor_bmn =
        u_bmk.f_mul(&kept_b1k)?.f_bmm(&v_bnk.f_transpose(1, 2)?)?.f_masked_fill(&bad_b11, f64::NAN)?;
    x_bmn.f_copy_(&factor_bmn)?;
    Ok(())
}

/// Singular value decompositions on a device, of which the host is told nothing: of each matrix A the left vectors U in
/// float64. The right ones are the Q of `Aᵀ U = Q R`, whose R is the singular values but for rounding: orthonormal
/// whatever these are, with the signs of R's diagonal.
fn there(x_bmn: &Tensor) -> Result<(Tensor, Tensor, Tensor)> {
    let (kind, mut found) = (x_bmn.f_kind()?, [Vec::new(), Vec::new(), Vec::new()]);
    for i in 0..x_bmn.size()[0] {
        let one_mn = x_bmn.f_select(0, i)?.f_to_kind(Kind::Double)?;
        let none = || Error::Internal("no vectors on a device".into());
        let (sigma_k, u_mk) = singular(&one_mn, false)?.ok_or_else(none)?;
        let (q_nk, r_kk) = Tensor::f_linalg_qr(&one_mn.f_tr()?.f_mm(&u_mk)?, "reduced")?;
        let is_turned_k = r_kk.f_diagonal(0, 0, 1)?.f_lt(0.0)?;
        let v_nk = q_nk.f_where_self(&is_turned_k.f_logical_not()?, &q_nk.f_neg()?)?;
        for (all, one) in found.iter_mut().zip([u_mk, sigma_k, v_nk]) {
            all.push(one.f_to_kind(kind)?);
        }
    }
    let [u, sigma, v] = found;
    Ok((Tensor::f_stack(&u, 0)?, Tensor::f_stack(&sigma, 0)?, Tensor::f_stack(&v, 0)?))
}

/// Floating-point operations for one `m x n` matrix: about `4 m n k + 22 k³` for the decomposition with both factors
/// and `2 m n k` for their product.
#[must_use]
pub fn flops(m: usize, n: usize) -> u128 {
    let (m, n, k) = (m as u128, n as u128, m.min(n) as u128);
    6 * m * n * k + 22 * k * k * k
}
