//! Approximate polar factors by an odd polynomial of the matrix (Newton–Schulz, Polar Express).
//!
//! B = matrices in the batch, m = rows, n = cols, k = min(m, n). Suffixes name logical dimensions.
//!
//! Signatures: [`scratch_elements`]`(b, m, n, dtype) -> i64` and
//! [`newton_schulz`]`(&mut x_bmn, &polynomial, epsilon, &scratch)`.

use tch::Tensor;

use super::coefficients::Polynomial;
use super::iteration::{self, Iteration};
use super::products::Products;
use crate::error::Result;
use crate::tensor::DType;

/// Elements of scratch, in the dtype of `x`, that [`newton_schulz`] needs for `b` matrices `m x n`.
#[must_use]
pub fn scratch_elements(b: i64, m: i64, n: i64, dtype: DType) -> i64 {
    iteration::scratch_elements(b, m, n, dtype, false)
}

/// Replaces every matrix of the batch by an approximation of its polar factor `U Vᵀ` (of `X = U S Vᵀ`), in
/// place.
///
/// `X <- X / (norm_factor * ||X||_F + epsilon)`, what the preconditioner of `polynomial` does, then for every row
/// `[a, b, c]` `A = X Xᵀ`, `X <- a X + (b A + c A A) X` (with `A = Xᵀ X` on the right of `X` when `m > n`).
///
/// `x_bmn` is contiguous `[B, m, n]` in bfloat16, float16, float32 or float64; norms are taken in float64 and products
/// accumulate at least in float32. `scratch` is a flat tensor of the same dtype and device with at least
/// [`scratch_elements`] elements, aligned to 4 bytes; its contents are overwritten and no other memory of the size of a
/// matrix is used. A zero matrix stays exactly zero; a non-finite matrix becomes NaN and leaves the others alone.
///
/// The iterate is stored as `Y = X / s` with a number `s` close to 1 chosen per step such that the `a X` term
/// is a power of two times `Y`, which costs no rounding; `s = 1` at the end.
///
/// # Errors
/// [`Error::Internal`](crate::error::Error::Internal) for a batch or scratch of another form,
/// [`Error::Torch`](crate::error::Error::Torch) when libtorch refuses.
pub fn newton_schulz(
    x_bmn: &mut Tensor,
    polynomial: &Polynomial,
    epsilon: f64,
    scratch: &mut Tensor,
) -> Result<()> {
    Iteration { polynomial, restarts: None, epsilon, squares: None }.run(x_bmn, scratch)
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
pub(super) fn plan(polynomial: &Polynomial) -> (Vec<Step>, f64) {
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

/// Applies the steps to a normalized matrix. `by`: where `S[0]` and `S[1]` are its Gram matrix and the square of that,
/// to be multiplied by the second and fourth power of this number.
pub(super) fn iterate(products: &mut impl Products, steps: &[Step], by: Option<f64>) -> Result<()> {
    for (i, step) in steps.iter().enumerate() {
        if let Some(by) = by.filter(|_| i == 0) {
            quadratic_of_both(products, step, step.gamma, by)?;
        } else {
            products.gram(0)?;
            quadratic(products, step, step.gamma)?;
        }
        products.apply(1, step.linear, 1.0)?;
    }
    Ok(())
}

/// `S[1] <- gamma (ratio S[0] + square S[0]²)`.
pub(super) fn quadratic(products: &mut impl Products, step: &Step, gamma: f64) -> Result<()> {
    if step.square {
        products.multiply(1, [0, 0], &[(step.ratio, 0)], gamma)
    } else {
        products.combine(1, 0.0, 0, gamma * step.ratio)
    }
}

/// `quadratic` where `S[1] = S[0]²` is there already, for `by² S[0]`.
pub(super) fn quadratic_of_both(
    products: &mut impl Products,
    step: &Step,
    gamma: f64,
    by: f64,
) -> Result<()> {
    let keep = if step.square { gamma * by.powi(4) } else { 0.0 };
    products.combine(1, keep, 0, gamma * step.ratio * by.powi(2))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::disallowed_methods, reason = "a test may panic")]
#[path = "newton_schulz_tests.rs"]
mod tests;
