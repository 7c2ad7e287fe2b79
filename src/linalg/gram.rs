//! Polynomials of `newton_schulz`, computed on the Gram matrix of the short side (Gram-Newton-Schulz).
//!
//! B = matrices in the batch, g = matrices computed together, m = rows, n = cols, k = min(m, n).
//!
//! With `R = X Xᵀ` a step is `P = a I + b R + c R²`, `X <- P X`, `R <- P R P`, and all factors commute: their product is
//! gathered in a `k x k` matrix and applied to `X` once. A *restart* applies it earlier and recomputes `R`.

use tch::Tensor;

use super::coefficients::Polynomial;
use super::iteration::{self, Iteration};
use crate::error::{Error, Result};
use crate::tensor::DType;

/// Share by which, in total, the factors may come out larger on a spurious eigenvalue than at zero: see [`restarts`].
/// In 16-bit types what stays bounded: a tenth is less than what the polynomials leave.
const BOUNDED: f64 = 0.1;
/// Share in wider types, which are chosen for accuracy: on 40 matrices of early training and of rank 1 plus noise the
/// error of Polar Express in float32 is 5e-3 of the norm without restarts and 3e-4 with the one that this asks for.
const ACCURATE: f64 = 1e-3;

/// Elements of scratch, in the dtype of the batch, that [`gram_newton_schulz`] needs for `b` matrices `m x n`.
#[must_use]
pub fn scratch_elements(b: i64, m: i64, n: i64, dtype: DType) -> i64 {
    iteration::scratch_elements(b, m, n, dtype, true)
}

/// Half the distance from 1 to the next number of an element type.
#[must_use]
pub fn unit_roundoff(dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => f64::from(2.0_f32.powi(-8)),
        DType::F16 => f64::from(2.0_f32.powi(-11)),
        DType::F32 => f64::from(2.0_f32.powi(-24)),
        DType::F64 => f64::EPSILON / 2.0,
        // No matrix is of these.
        DType::Q8 | DType::UQ8 | DType::I16 => 1.0,
    }
}

/// Refuses rows whose `a` is not positive: the factor that they multiply small singular values by is none.
///
/// # Errors
/// [`Error::Value`] for such a row.
pub fn require_positive(rows: &[[f64; 3]]) -> Result<()> {
    match rows.iter().find(|row| row[0] <= 0.0) {
        None => Ok(()),
        Some(row) => Err(Error::Value(format!(
            "orth_method 'gram' needs ns_coefficients with a > 0 in every triple, got {row:?}; use orth_method \
             'standard'"
        ))),
    }
}

/// Returns the steps before which the Gram matrix is recomputed, in ascending order.
///
/// Rounding gives a Gram matrix of norm 1 spurious eigenvalues of either sign and of about `unit_roundoff` in size,
/// where the true ones are smaller. A negative one is not drawn towards 1: with `p(r) = a + b r + c r²`, `b < 0`, a
/// step takes it to `r p(r)²`, more than `a²` times as far, until `p(r)` is far from the `a` that a small singular
/// value should be multiplied by, and the polynomials that follow get arguments beyond their range. A restart puts it
/// back to `-unit_roundoff`. Chosen is the smallest number of restarts with `prod p(r) / a` at most 1.1 (1.001 where
/// `unit_roundoff` is below 1e-4), and among sets of that number the one with the smallest product.
#[must_use]
pub fn restarts(rows: &[[f64; 3]], unit_roundoff: f64) -> Vec<usize> {
    let n = rows.len();
    let bound = (if unit_roundoff > 1e-4 { BOUNDED } else { ACCURATE }).ln_1p();
    // excess[i][j] = ln prod p(r) / a over the steps i..j, started afresh at i.
    let excess: Vec<Vec<f64>> = (0..n)
        .map(|i| {
            let (mut eigenvalue, mut sum) = (-unit_roundoff, 0.0);
            let mut row = vec![0.0; n + 1];
            for j in i..n {
                let [a, b, c] = rows[j];
                let factor = a + eigenvalue * (b + eigenvalue * c);
                sum += (factor / a).abs().ln().abs();
                eigenvalue *= factor * factor;
                row[j + 1] = if sum.is_finite() { sum } else { f64::INFINITY };
            }
            row
        })
        .collect();
    // best[j] = smallest sum over the steps ..j with one restart more in every round, and where its last part begins.
    let mut best: Vec<f64> = excess.first().cloned().unwrap_or_default();
    let mut begins: Vec<Vec<usize>> = Vec::new();
    while best.last().is_some_and(|&sum| sum > bound) && begins.len() + 1 < n {
        let part = |j: usize| {
            let sums = (1..j).map(|i| (best[i] + excess[i][j], i));
            sums.fold((f64::INFINITY, 0), |least, now| if now.0 < least.0 { now } else { least })
        };
        let (sums, starts): (Vec<f64>, Vec<usize>) = (0..=n).map(part).unzip();
        best = sums;
        begins.push(starts);
    }
    let mut found = Vec::new();
    let mut end = n;
    for starts in begins.iter().rev() {
        end = starts[end];
        found.push(end);
    }
    found.reverse();
    found
}

/// Newton–Schulz iteration as [`newton_schulz`](super::newton_schulz::newton_schulz), in the Gram form.
///
/// The scaled iterate `Y` makes the linear coefficient a power of two `l`, so a step is `l (I + Z)` with
/// `Z = (gamma / l)(ratio G + G G)`. Only `Z` is stored, and of the product of the factors `prod l (I + V)` only
/// `V <- V + Z + V Z`: the identity would take the digits of the small entries in a 16-bit type. `restarts` are those
/// of [`restarts`] for the dtype. A zero matrix stays exactly zero; a non-finite matrix becomes NaN and leaves the
/// others alone. In 16-bit types a result whose norm is that of no near-orthogonal matrix is computed again in the standard
/// form.
///
/// # Errors
/// [`Error::Internal`] for a batch or scratch of another form, [`Error::Torch`] when libtorch refuses.
pub fn gram_newton_schulz(
    x_bmn: &mut Tensor,
    polynomial: &Polynomial,
    restarts: &[usize],
    epsilon: f64,
    scratch: &mut Tensor,
) -> Result<()> {
    let product = iteration::dtype_of(x_bmn)?;
    Iteration { polynomial, restarts: Some(restarts), epsilon, squares: None, product }.run(x_bmn, scratch)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::disallowed_methods, reason = "a test may panic")]
#[path = "gram_tests.rs"]
mod tests;
