//! Approximate polar factors by an odd polynomial of the matrix (Newton–Schulz, Polar Express).
//!
//! B = matrices in the batch, g = matrices computed together, m = rows, n = cols, k = min(m, n).
//! Suffixes name logical dimensions.
//!
//! Signatures: [`scratch_elements`]`(b, m, n) -> i64` and
//! [`newton_schulz`]`(&mut x_bmn, &polynomial, epsilon, &scratch)`.

use tch::{Kind, Tensor};

use super::coefficients::{Polynomial, Preconditioner};
use super::symmetric::{Symmetric, accumulate, number};
use crate::error::{Error, Result};

/// Matrices are computed together while their elements stay within one group: small matrices share the cost
/// of a call, large ones stay in the cache through all steps.
const GROUP_ELEMENTS: i64 = 1 << 17;
/// Elements of scratch, in the dtype of `x`, that [`newton_schulz`] needs for `b` matrices `m x n`.
///
/// Large matrices are computed one by one, so this does not grow with `b` for them.
#[must_use]
pub fn scratch_elements(b: i64, m: i64, n: i64) -> i64 {
    let k = m.min(n);
    // The next iterate and two Gram-sized matrices; or, before the first step, the matrix in twice the width.
    let each = m * n + (2 * k * k).max(m * n);
    group_size(b, m, n) * each
}

/// Whether a matrix is computed alone, whatever the size of the batch.
pub(super) fn alone(m: i64, n: i64) -> bool {
    group_size(2, m, n) < 2
}

/// Matrices computed together.
pub(super) fn group_size(b: i64, m: i64, n: i64) -> i64 {
    (GROUP_ELEMENTS / (m * n).max(1)).clamp(1, b.max(1)).min(b)
}

/// Replaces every matrix of the batch by an approximation of its polar factor `U Vᵀ` (of `X = U S Vᵀ`), in
/// place.
///
/// `X <- X / (norm_factor * ||X||_F + epsilon)`, then for every row `[a, b, c]` of `polynomial`
/// `A = X Xᵀ`, `X <- a X + (b A + c A A) X` (with `A = Xᵀ X` on the right of `X` when `m > n`).
///
/// `x_bmn` is contiguous `[B, m, n]` in bfloat16, float16, float32 or float64; norms are taken in float32
/// (float64 for float64) and products accumulate at least in float32. `scratch` is a flat tensor of the same
/// dtype and device with at least [`scratch_elements`] elements, aligned to 4 bytes; its contents are
/// overwritten and no other memory of the size of a matrix is used. A zero matrix stays exactly zero; a
/// non-finite matrix becomes NaN and leaves the others alone.
///
/// The iterate is stored as `Y = X / s` with a number `s` close to 1 chosen per step such that the `a X` term
/// is a power of two times `Y`, which costs no rounding; `s = 1` at the end.
///
/// # Errors
/// [`Error::Internal`] for a batch or scratch of another form, [`Error::Torch`] when libtorch refuses.
pub fn newton_schulz(
    x_bmn: &mut Tensor,
    polynomial: &Polynomial,
    epsilon: f64,
    scratch: &Tensor,
) -> Result<()> {
    let (b, m, n) = x_bmn.size3()?;
    by_group(x_bmn, polynomial, epsilon, scratch, scratch_elements(b, m, n), iterate)
}

/// Normalizes the matrices of a batch and gives them group by group, with the steps of `polynomial`, to `iterate`.
pub(super) fn by_group(
    x_bmn: &mut Tensor,
    polynomial: &Polynomial,
    epsilon: f64,
    scratch: &Tensor,
    needed: i64,
    iterate: impl Fn(&mut Tensor, &[Step], &Tensor) -> Result<()>,
) -> Result<()> {
    let (b, m, n) = x_bmn.size3()?;
    if b == 0 || m == 0 || n == 0 {
        return Ok(());
    }
    let kind = x_bmn.f_kind()?;
    let flat = scratch.size();
    if !x_bmn.is_contiguous() || flat.len() != 1 || flat[0] < needed || scratch.f_kind()? != kind {
        return Err(Error::Internal(format!(
            "an iteration needs a contiguous batch and {needed} elements of {kind:?}, got scratch {flat:?}"
        )));
    }
    let (steps, start) = plan(polynomial);
    let group = group_size(b, m, n);
    for first in (0..b).step_by(usize::try_from(group).unwrap_or(1)) {
        let g = group.min(b - first);
        let mut part_gmn = x_bmn.f_narrow(0, first, g)?;
        match polynomial.preconditioner {
            Preconditioner::Frobenius => {
                normalize(&mut part_gmn, polynomial.norm_factor, epsilon, start, scratch)?;
            }
            Preconditioner::Aol => {
                normalize(&mut part_gmn, polynomial.norm_factor, epsilon, 1.0, scratch)?;
                scale_rows(&mut part_gmn, start, scratch)?;
            }
        }
        iterate(&mut part_gmn, &steps, scratch)?;
    }
    Ok(())
}

/// One step in terms of `Y`: `Y <- linear Y + gamma (ratio G + square G G) Y` with `G = Y Yᵀ`.
pub(super) struct Step {
    pub(super) linear: f64,
    pub(super) ratio: f64,
    pub(super) square: bool,
    pub(super) gamma: f64,
}

/// Steps of `polynomial` for the scaled iterate, and the scale `s` of its first argument.
///
/// With `X = s Y` and `X' = s' Y'`, `Y' = (s/s') (a Y + b s² G Y + c s⁴ G² Y)`; `s/s' = 2^e / a` makes the
/// first coefficient a power of two. Going backwards from `s = 1`, `e` is chosen to keep `s` within a factor
/// √2 of 1.
fn plan(polynomial: &Polynomial) -> (Vec<Step>, f64) {
    let mut scale = 1.0;
    let mut steps = Vec::with_capacity(polynomial.rows.len());
    for &[a, b, c] in polynomial.rows.iter().rev() {
        let after: f64 = scale;
        // A coefficient without logarithm is rounded like the others are.
        let linear = if a > 0.0 { (a / after).log2().round().exp2() } else { a };
        scale = if a > 0.0 { after * linear / a } else { after };
        let cubic = scale.powi(3) * b / after;
        let quintic = scale.powi(5) * c / after;
        let square = quintic != 0.0;
        let (ratio, gamma) = if square { (cubic / quintic, quintic) } else { (cubic, 1.0) };
        steps.push(Step { linear, ratio, square, gamma });
    }
    steps.reverse();
    (steps, scale)
}

/// `X <- X / ((factor ||X||_F + epsilon) start)`, with one rounding to the dtype of `X`.
fn normalize(x_gmn: &mut Tensor, factor: f64, epsilon: f64, start: f64, scratch: &Tensor) -> Result<()> {
    let (g, m, n) = x_gmn.size3()?;
    // In float64, so that no finite matrix overflows; the smallest divisor keeps a zero matrix zero when epsilon is
    // zero. NaN stays NaN.
    let inverse = |x: &Tensor| -> Result<Tensor> {
        let mut norm_g11 = x.f_norm_scalaropt_dim_dtype(2.0, [1, 2], true, Kind::Double)?;
        let _ =
            norm_g11.f_mul_scalar_(factor * start)?.f_add_scalar_(epsilon * start)?.f_clamp_min_(1e-37)?;
        Ok(norm_g11.f_reciprocal()?.f_to_kind(x.f_kind()?)?)
    };
    if matches!(x_gmn.f_kind()?, Kind::Half | Kind::BFloat16) {
        let elements = g * m * n;
        let mut wide_gmn =
            scratch.f_narrow(0, 0, 2 * elements)?.f_view_dtype(Kind::Float)?.f_view([g, m, n])?;
        wide_gmn.f_copy_(x_gmn)?;
        let _ = wide_gmn.f_mul_(&inverse(&wide_gmn)?)?;
        x_gmn.f_copy_(&wide_gmn)?;
    } else {
        let _ = x_gmn.f_mul_(&inverse(x_gmn)?)?;
    }
    Ok(())
}

/// `X_i <- X_i / (sqrt(sum_j |A_ij|) start)` for the rows of the short side, `A = X Xᵀ`. A row whose products underflow
/// becomes zero.
fn scale_rows(x_gmn: &mut Tensor, start: f64, scratch: &Tensor) -> Result<()> {
    let (g, m, n) = x_gmn.size3()?;
    let k = m.min(n);
    let short = if m > n { x_gmn.f_transpose(1, 2)? } else { x_gmn.f_alias()? };
    let mut gram = scratch.f_narrow(0, 0, g * k * k)?.f_view([g, k, k])?;
    let _ = short.f_bmm_out(&gram, &short.f_transpose(1, 2)?)?;
    let kind = if x_gmn.f_kind()? == Kind::Double { Kind::Double } else { Kind::Float };
    let sums_gk1 = gram.f_abs_()?.f_sum_dim_intlist([2].as_slice(), true, kind)?;
    let scale_gk1 =
        sums_gk1.f_rsqrt()?.f_masked_fill(&sums_gk1.f_eq(0.0)?, 0.0)?.f_mul_scalar(start.recip())?;
    let _ = x_gmn.f_mul_(&if m > n { scale_gk1.f_transpose(1, 2)? } else { scale_gk1 })?;
    Ok(())
}

/// Applies the steps to a group of normalized matrices.
fn iterate(x_gmn: &mut Tensor, steps: &[Step], scratch: &Tensor) -> Result<()> {
    let (g, m, n) = x_gmn.size3()?;
    let k = m.min(n);
    // A large matrix is a matrix, not a batch: libtorch's products of two matrices are the faster ones. Whether it is
    // goes by its shape only: the two differ in rounding, and a result must not depend on what else is in the batch.
    let (shape, gram_shape) =
        if alone(m, n) { (vec![m, n], vec![k, k]) } else { (vec![g, m, n], vec![g, k, k]) };
    let (size, gram_size) = (g * m * n, g * k * k);
    let mut current = x_gmn.f_view(shape.as_slice())?;
    let mut next = scratch.f_narrow(0, 0, size)?.f_view(shape.as_slice())?;
    let mut gram = scratch.f_narrow(0, size, gram_size)?.f_view(gram_shape.as_slice())?;
    let mut quadratic = scratch.f_narrow(0, size + gram_size, gram_size)?.f_view(gram_shape.as_slice())?;
    let symmetric = Symmetric::new(g, k);

    for step in steps {
        let short = if m > n { current.f_transpose(-2, -1)? } else { current.f_alias()? };
        symmetric.gram(&mut gram, &short, &quadratic)?;
        symmetric.quadratic(&mut quadratic, &gram, [step.ratio, step.gamma], step.square, &next)?;
        let _ = current.f_mul_out(&next, &number(step.linear)?)?;
        if m > n {
            accumulate(&mut next, &current, &quadratic)?;
        } else {
            accumulate(&mut next, &quadratic, &current)?;
        }
        std::mem::swap(&mut current, &mut next);
    }
    if steps.len() % 2 == 1 {
        // `next` is `x_gmn` now.
        next.f_copy_(&current)?;
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::disallowed_methods, reason = "a test may panic")]
#[path = "newton_schulz_tests.rs"]
mod tests;
