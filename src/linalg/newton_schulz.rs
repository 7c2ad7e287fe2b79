//! Approximate polar factors by an odd polynomial of the matrix (Newton–Schulz, Polar Express).
//!
//! B = matrices in the batch, m = rows, n = cols, k = min(m, n). Suffixes name logical dimensions.
//!
//! Signatures: [`scratch_elements`]`(b, m, n, dtype) -> i64` and
//! [`newton_schulz`]`(&mut x_bmn, &polynomial, epsilon, &scratch)`.

use tch::Tensor;

use super::coefficients::Polynomial;
use super::iteration::{self, Iteration};
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
    let product = iteration::dtype_of(x_bmn)?;
    Iteration { polynomial, restarts: None, epsilon, squares: None, product }.run(x_bmn, scratch)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::disallowed_methods, reason = "a test may panic")]
#[path = "newton_schulz_tests.rs"]
mod tests;
