//! Orthonormal bases of tall matrices by randomized Cholesky QR, Cholesky QR or Householder QR.
//!
//! B = matrices in the batch, m = rows, r = columns (m >= r), k = rows of the sketch. Suffixes name logical
//! dimensions.
//!
//! Signatures: [`orthonormalize`]`(&p_bmr, method, sketch_bkm) -> (q_bmr, Report)` and
//! [`sketch_rows`]`(r, oversample, m) -> k`.

use tch::{Kind, Tensor};

use super::random::{Key, fill_normal};
use crate::error::{Error, Result};

/// Factorization that [`orthonormalize`] tries first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum QrMethod {
    /// Randomized Cholesky QR: QR of a sketch, then one Cholesky QR (arXiv:2406.11751). Any condition number.
    #[default]
    Rcqr,
    /// Cholesky QR, repeated once when the first result is not orthonormal to rounding. The cheapest for
    /// condition numbers (of the columns scaled to equal length) below about 1e3 in float32.
    Cqr,
    /// Cholesky QR, always repeated once: rounding-level orthonormality without a decision.
    Cqr2,
    /// Householder QR.
    Qr,
}

impl QrMethod {
    /// The method called `name`.
    ///
    /// # Errors
    /// [`Error::Value`] for an unknown name.
    pub fn parse(name: &str) -> Result<Self> {
        match name {
            "rcqr" => Ok(Self::Rcqr),
            "cqr" => Ok(Self::Cqr),
            "cqr2" => Ok(Self::Cqr2),
            "qr" => Ok(Self::Qr),
            other => {
                Err(Error::Value(format!("qr_method must be one of rcqr, cqr, cqr2, qr, got {other:?}")))
            }
        }
    }
}

/// Matrices of one call that the first method did not orthonormalize.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Report {
    /// Matrices retried with a shifted Cholesky factorization.
    pub shifted: usize,
    /// Matrices that needed Householder QR after that (not counted where it is the method asked for).
    pub householder: usize,
}

/// Rows of the sketch for `r` columns: `ceil(oversample * r)`, at least `r` and at most `m`.
#[must_use]
#[expect(clippy::cast_possible_truncation, clippy::cast_precision_loss, reason = "sizes are far below 2^53")]
pub fn sketch_rows(r: i64, oversample: f64, m: i64) -> i64 {
    ((oversample * r as f64).ceil() as i64).max(r).min(m)
}

/// Columns of random signs with which a result is tested.
const PROBES: i64 = 8;
/// A result whose probe deviates more than this cannot be repaired by repeating Cholesky QR.
const REPAIRABLE: f64 = 0.1;
/// Multiple of the tolerance for a second pass within which its result is accepted; one pass leaves about a
/// tenth.
const ACCEPTED: f64 = 8.0;

/// An orthonormal basis `Q` of the columns of every matrix: `Qᵀ Q = I` and `range(P) ⊆ range(Q)`.
///
/// `p_bmr` is `[B, m, r]` with `m >= r` in any float dtype; arithmetic is float32 (float64 for float64) and
/// the result is a new tensor of the dtype of `p_bmr`. Columns are scaled by their largest entry first, so
/// neither the scale of a matrix nor of a column matters. `sketch_bkm` (`[B or 1, k, m]`, `k >= r`, entries
/// `N(0, 1/k)`, any float dtype) is needed for [`QrMethod::Rcqr`] when `m > r`; square matrices always use
/// Householder QR.
///
/// * Rcqr: `R₁ = qr(S P).R`, `P₁ = P R₁⁻¹`, `R₂ = chol(P₁ᵀ P₁)`, `Q = P₁ R₂⁻¹`.
/// * Cqr: `R = chol(Pᵀ P)`, `Q = P R⁻¹`.
/// * Cqr2: the same twice (Yamamoto et al., Electron. Trans. Numer. Anal. 44, 2015).
///
/// Every result is tested with eight random sign vectors `Z`: `d = max |Qᵀ Q Z - Z|`. Where `d` is between
/// `32 sqrt(r) u` (`u` = unit roundoff) and 0.1, Cholesky QR is applied to `Q` once more ("`CholeskyQR2`").
/// A matrix whose Cholesky factorization failed or whose `d` is still too large is retried with the
/// Cholesky factor of `Pᵀ P + s I` and two further passes (shifted Cholesky QR, Fukaya et al., SIAM J. Sci.
/// Comput. 42, 2020). Their shift `11 (m r + r (r + 1)) u ||P||²` is the worst case of rounding, above
/// `||P||²` itself in float32; `s = sqrt(m r + r (r + 1)) u ||P||_F²` is the size that random rounding has.
/// At last comes Householder QR, which needs no full rank: zero and dependent columns give an orthonormal
/// completion. A zero matrix gives Householder's `Q`, the first columns of the identity up to sign. A
/// non-finite matrix gives NaN and does not disturb the others.
///
/// The host reads one number per matrix, the deviation, to decide about retries.
///
/// # Errors
/// [`Error::Value`] for `m < r` or an unfit sketch, [`Error::Torch`] when libtorch refuses.
pub fn orthonormalize(
    p_bmr: &Tensor,
    method: QrMethod,
    sketch_bkm: Option<Tensor>,
) -> Result<(Tensor, Report)> {
    let (b, m, r) = p_bmr.size3()?;
    if m < r {
        return Err(Error::Value(format!(
            "orthonormalize needs at least as many rows as columns, got {m} x {r}"
        )));
    }
    let mut report = Report::default();
    if b == 0 || r == 0 {
        return Ok((p_bmr.f_zeros_like()?, report));
    }
    let (scaled_bmr, finite_b) = scale_columns(p_bmr)?;
    let mut q_bmr = if m == r || method == QrMethod::Qr {
        householder(&scaled_bmr)?
    } else {
        let attempt = match method {
            QrMethod::Rcqr => randomized(&scaled_bmr, fitting(sketch_bkm, b, m, r)?)?,
            QrMethod::Cqr | QrMethod::Qr => cholesky_pass(&scaled_bmr, None)?,
            QrMethod::Cqr2 => {
                let first = cholesky_pass(&scaled_bmr, None)?;
                let second = cholesky_pass(&first.q_bmr, None)?;
                Attempt { info_b: first.info_b.f_abs()?.f_add(&second.info_b.f_abs()?)?, ..second }
            }
        };
        accept_or_repair(&scaled_bmr, attempt, &finite_b, &mut report)?
    };
    let bad_b11 = finite_b.f_logical_not()?.f_view([b, 1, 1])?;
    let _ = q_bmr.f_masked_fill_(&bad_b11, f64::NAN)?;
    Ok((q_bmr.f_totype(p_bmr.f_kind()?)?, report))
}

/// The sketch, if it fits a batch of `b` matrices `m x r`.
fn fitting(sketch_bkm: Option<Tensor>, b: i64, m: i64, r: i64) -> Result<Tensor> {
    let sketch = sketch_bkm.ok_or_else(|| Error::Value("qr_method rcqr needs a sketch".to_owned()))?;
    let (batch, rows, columns) = sketch.size3()?;
    if (batch != b && batch != 1) || rows < r || columns != m {
        return Err(Error::Value(format!(
            "the sketch must be {b} or 1 matrices of at least {r} rows and {m} columns, got {:?}",
            sketch.size()
        )));
    }
    Ok(sketch)
}

/// A copy in the dtype of the arithmetic with columns divided by their largest absolute entry (zero columns
/// and non-finite matrices become zero), and whether each matrix is finite.
fn scale_columns(p_bmr: &Tensor) -> Result<(Tensor, Tensor)> {
    let kind = if p_bmr.f_kind()? == Kind::Double { Kind::Double } else { Kind::Float };
    let wide_bmr = p_bmr.f_totype(kind)?;
    let (low_b1r, high_b1r) = wide_bmr.f_aminmax(1, true)?;
    let largest_b1r = high_b1r.f_maximum(&low_b1r.f_neg()?)?;
    let finite_b1r = largest_b1r.f_isfinite()?;
    let finite_b = finite_b1r.f_all_dims([1, 2].as_slice(), false)?;
    let divisor_b1r = largest_b1r.f_masked_fill(&largest_b1r.f_eq(0.0)?, 1.0)?;
    let mut scaled_bmr = wide_bmr.f_div(&divisor_b1r)?;
    let bad_b11 = finite_b.f_logical_not()?.f_view([-1, 1, 1])?;
    let _ = scaled_bmr.f_masked_fill_(&bad_b11, 0.0)?;
    Ok((scaled_bmr, finite_b))
}

/// The reduced `Q` of Householder QR.
fn householder(p_bmr: &Tensor) -> Result<Tensor> {
    Ok(Tensor::f_linalg_qr(p_bmr, "reduced")?.0)
}

/// A candidate basis and, per matrix, whether its Cholesky factorization succeeded (0).
struct Attempt {
    q_bmr: Tensor,
    info_b: Tensor,
}

/// Randomized Cholesky QR. The sketch is dropped before there is a result: it may be the largest of all.
fn randomized(p_bmr: &Tensor, sketch_bkm: Tensor) -> Result<Attempt> {
    let sketched_bkr = sketch_bkm.f_totype(p_bmr.f_kind()?)?.f_matmul(p_bmr)?;
    drop(sketch_bkm);
    let (_, upper_brr) = Tensor::f_linalg_qr(&sketched_bkr, "r")?;
    let first_bmr = upper_brr.f_linalg_solve_triangular(p_bmr, true, false, false)?;
    cholesky_pass(&first_bmr, None)
}

/// `Q = P R⁻¹` with `Rᵀ R = Pᵀ P + shift I`.
fn cholesky_pass(p_bmr: &Tensor, shift_b1: Option<&Tensor>) -> Result<Attempt> {
    let gram_brr = p_bmr.f_transpose(1, 2)?.f_matmul(p_bmr)?;
    if let Some(shift_b1) = shift_b1 {
        let _ = gram_brr.f_diagonal(0, 1, 2)?.f_add_(shift_b1)?;
    }
    let (upper_brr, info_b) = gram_brr.f_linalg_cholesky_ex(true, false)?;
    let q_bmr = upper_brr.f_linalg_solve_triangular(p_bmr, true, false, false)?;
    Ok(Attempt { q_bmr, info_b })
}

/// Shifted Cholesky QR followed by two plain passes.
fn shifted(p_bmr: &Tensor) -> Result<Attempt> {
    let (_, m, r) = p_bmr.size3()?;
    #[expect(clippy::cast_precision_loss, reason = "sizes are far below 2^53")]
    let factor = ((m * r + r * (r + 1)) as f64).sqrt() * unit_roundoff(p_bmr)?;
    let norm_b1 = p_bmr.f_norm_scalaropt_dim(2.0, [1, 2], false)?.f_unsqueeze(1)?;
    let shift_b1 = norm_b1.f_square()?.f_mul_scalar(factor)?;
    let first = cholesky_pass(p_bmr, Some(&shift_b1))?;
    let second = cholesky_pass(&first.q_bmr, None)?;
    let third = cholesky_pass(&second.q_bmr, None)?;
    let info_b = first.info_b.f_abs()?.f_add(&second.info_b.f_abs()?)?.f_add(&third.info_b.f_abs()?)?;
    Ok(Attempt { q_bmr: third.q_bmr, info_b })
}

/// Tests a first attempt and repairs the matrices that need it.
fn accept_or_repair(
    p_bmr: &Tensor,
    first: Attempt,
    finite_b: &Tensor,
    report: &mut Report,
) -> Result<Tensor> {
    let (_, _, r) = p_bmr.size3()?;
    #[expect(clippy::cast_precision_loss, reason = "sizes are far below 2^53")]
    let tolerance = 32.0 * (r as f64).sqrt() * unit_roundoff(p_bmr)?;
    let mut q_bmr = first.q_bmr;
    // A non-finite matrix is given up, not repaired.
    let mut deviations =
        host(&deviation(&q_bmr, &first.info_b)?.f_masked_fill(&finite_b.f_logical_not()?, 0.0)?)?;

    let again = select(&deviations, |d| d > tolerance && d <= REPAIRABLE);
    if !again.is_empty() {
        let attempt = cholesky_pass(&rows(&q_bmr, &again)?, None)?;
        replace(&mut q_bmr, &attempt, &again, &mut deviations)?;
    }
    let failed = select(&deviations, |d| d.is_nan() || d > ACCEPTED * tolerance);
    if !failed.is_empty() {
        report.shifted += failed.len();
        let attempt = shifted(&rows(p_bmr, &failed)?)?;
        replace(&mut q_bmr, &attempt, &failed, &mut deviations)?;
    }
    let failed = select(&deviations, |d| d.is_nan() || d > ACCEPTED * tolerance);
    if !failed.is_empty() {
        report.householder += failed.len();
        log::debug!("Householder QR used for {} of {} matrices", failed.len(), deviations.len());
        let index = Tensor::f_from_slice(&failed)?.f_to_device(q_bmr.device())?;
        let _ = q_bmr.f_index_copy_(0, &index, &householder(&rows(p_bmr, &failed)?)?)?;
    }
    Ok(q_bmr)
}

/// `max |Qᵀ Q Z - Z|` of every matrix for random signs `Z`, infinite where the factorization failed.
fn deviation(q_bmr: &Tensor, info_b: &Tensor) -> Result<Tensor> {
    let (_, _, r) = q_bmr.size3()?;
    let probes_1rz = probes(r, q_bmr)?;
    let image_brz = q_bmr.f_transpose(1, 2)?.f_matmul(&q_bmr.f_matmul(&probes_1rz)?)?;
    let largest_b = image_brz.f_sub(&probes_1rz)?.f_abs()?.f_amax([1, 2].as_slice(), false)?;
    Ok(largest_b.f_masked_fill(&info_b.f_ne(0)?, f64::INFINITY)?)
}

/// `[1, r, PROBES]` signs, the same for every matrix and call.
pub(super) fn probes(r: i64, like: &Tensor) -> Result<Tensor> {
    let mut values = vec![0.0_f32; usize::try_from(r * PROBES).unwrap_or(0)];
    fill_normal(&mut values, Key { seed: 0, stream: 0 }, u32::MAX, 0, 0);
    for value in &mut values {
        *value = value.signum();
    }
    Ok(Tensor::f_from_slice(&values)?
        .f_to_device(like.device())?
        .f_totype(like.f_kind()?)?
        .f_view([1, r, PROBES])?)
}

/// Half the distance from 1 to the next number.
fn unit_roundoff(x: &Tensor) -> Result<f64> {
    Ok(if x.f_kind()? == Kind::Double { f64::EPSILON / 2.0 } else { f64::from(f32::EPSILON) / 2.0 })
}

/// The numbers of a vector, on the host.
fn host(x_b: &Tensor) -> Result<Vec<f64>> {
    let mut values = vec![0.0; x_b.numel()];
    let count = values.len();
    x_b.f_totype(Kind::Double)?.f_copy_data(&mut values, count)?;
    Ok(values)
}

/// Indices of the deviations that satisfy `wanted`.
fn select(deviations: &[f64], wanted: impl Fn(f64) -> bool) -> Vec<i64> {
    (0..).zip(deviations).filter(|&(_, &d)| wanted(d)).map(|(i, _)| i).collect()
}

/// The matrices with these indices, to be read: a view of one or of all, else a copy.
pub(super) fn rows(x_bmr: &Tensor, indices: &[i64]) -> Result<Tensor> {
    if let &[only] = indices {
        return Ok(x_bmr.f_narrow(0, only, 1)?);
    }
    if usize::try_from(x_bmr.size3()?.0) == Ok(indices.len()) {
        return Ok(x_bmr.f_alias()?);
    }
    Ok(x_bmr.f_index_select(0, &Tensor::f_from_slice(indices)?.f_to_device(x_bmr.device())?)?)
}

/// Stores an attempt for some of the matrices and its deviations.
fn replace(q_bmr: &mut Tensor, attempt: &Attempt, indices: &[i64], deviations: &mut [f64]) -> Result<()> {
    let new = host(&deviation(&attempt.q_bmr, &attempt.info_b)?)?;
    for (&i, d) in indices.iter().zip(new) {
        if let Some(slot) = usize::try_from(i).ok().and_then(|i| deviations.get_mut(i)) {
            *slot = d;
        }
    }
    let index = Tensor::f_from_slice(indices)?.f_to_device(q_bmr.device())?;
    let _ = q_bmr.f_index_copy_(0, &index, &attempt.q_bmr)?;
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::disallowed_methods, reason = "a test may panic")]
#[path = "qr_tests.rs"]
mod tests;
