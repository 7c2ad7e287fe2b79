//! The same polynomials as in `newton_schulz`, computed on the Gram matrix of the short side (Gram-Newton-Schulz).
//!
//! B = matrices in the batch, g = matrices computed together, m = rows, n = cols, k = min(m, n).
//!
//! With `R = X Xᵀ` a step is `P = a I + b R + c R²`, `X <- P X`, `R <- P R P`, and all factors commute: their product
//! is gathered in a `k x k` matrix and applied to `X` once. A *restart* applies it earlier and computes `R` anew.

use tch::Tensor;

use super::coefficients::Polynomial;
use super::newton_schulz::{Step, alone, by_group, group_size};
use super::symmetric::{Symmetric, accumulate, number};
use crate::dtype::DType;
use crate::error::{Error, Result};

/// By which share, in total, the factors may come out larger on a spurious eigenvalue than at zero: see [`restarts`].
/// In 16-bit types what stays bounded: a tenth is less than what the polynomials leave.
const BOUNDED: f64 = 0.1;
/// The same in wider types, which are chosen for accuracy: on 40 matrices of early training and of rank 1 plus noise
/// the error of Polar Express in float32 is 5e-3 of the norm without restarts and 3e-4 with the one that this asks for.
const ACCURATE: f64 = 1e-3;

/// Elements of scratch, in the dtype of the batch, that [`gram_newton_schulz`] needs for `b` matrices `m x n`.
#[must_use]
pub fn scratch_elements(b: i64, m: i64, n: i64) -> i64 {
    let k = m.min(n);
    // The next iterate and four Gram-sized matrices; or, before the first step, the matrix in twice the width.
    group_size(b, m, n) * (m * n + (4 * k * k).max(m * n))
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
        DType::Q8 | DType::UQ8 => 1.0,
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

/// The steps before which the Gram matrix is computed anew, in ascending order.
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

/// As [`newton_schulz`](super::newton_schulz::newton_schulz), in the Gram form.
///
/// The scaled iterate `Y` makes the linear coefficient a power of two `l`, so a step is `l (I + Z)` with
/// `Z = (gamma / l)(ratio G + G G)`. Only `Z` is stored, and of the product of the factors `prod l (I + V)` only
/// `V <- V + Z + V Z`: the identity would take the digits of the small entries in a 16-bit type. `restarts` are those
/// of [`restarts`] for the dtype. A zero matrix stays exactly zero; a non-finite matrix becomes NaN and leaves the
/// others alone.
///
/// # Errors
/// [`Error::Internal`] for a batch or scratch of another form, [`Error::Torch`] when libtorch refuses.
pub fn gram_newton_schulz(
    x_bmn: &mut Tensor,
    polynomial: &Polynomial,
    restarts: &[usize],
    epsilon: f64,
    scratch: &Tensor,
) -> Result<()> {
    let (b, m, n) = x_bmn.size3()?;
    let needed = scratch_elements(b, m, n);
    by_group(x_bmn, polynomial, epsilon, scratch, needed, |part_gmn, steps, scratch| {
        iterate(part_gmn, steps, restarts, scratch)
    })
}

fn iterate(x_gmn: &mut Tensor, steps: &[Step], restarts: &[usize], scratch: &Tensor) -> Result<()> {
    let (g, m, n) = x_gmn.size3()?;
    let k = m.min(n);
    // A large matrix is a matrix, not a batch: libtorch's products of two matrices are the faster ones. Whether it is
    // goes by its shape only: the two differ in rounding, and a result must not depend on what else is in the batch.
    let (shape, square) = if alone(m, n) { (vec![m, n], vec![k, k]) } else { (vec![g, m, n], vec![g, k, k]) };
    let (size, square_size) = (g * m * n, g * k * k);
    let mut current = x_gmn.f_view(shape.as_slice())?;
    let mut next = scratch.f_narrow(0, 0, size)?.f_view(shape.as_slice())?;
    let small = |i: i64| -> Result<Tensor> {
        Ok(scratch.f_narrow(0, size + i * square_size, square_size)?.f_view(square.as_slice())?)
    };
    let (mut gram, mut factor, mut product, mut work) = (small(0)?, small(1)?, small(2)?, small(3)?);
    let symmetric = Symmetric::new(g, k);
    let mut linear = 1.0;
    let mut applied = 0;

    for (i, step) in steps.iter().enumerate() {
        let fresh = i == 0 || restarts.contains(&i);
        let last = i + 1 == steps.len() || restarts.contains(&(i + 1));
        if fresh {
            let short = if m > n { current.f_transpose(-2, -1)? } else { current.f_alias()? };
            symmetric.gram(&mut gram, &short, &work)?;
        }
        let numbers = [step.ratio, step.gamma / step.linear];
        symmetric.quadratic(&mut factor, &gram, numbers, step.square, &next)?;
        linear *= step.linear;
        if !last {
            // G <- l² (I + Z) G (I + Z).
            work.f_copy_(&gram)?;
            symmetric.accumulate(&mut work, &gram, &factor, &next)?;
            gram.f_copy_(&work)?;
            symmetric.accumulate(&mut gram, &factor, &work, &next)?;
            let _ = gram.f_mul_scalar_(step.linear * step.linear)?;
        }
        if fresh {
            std::mem::swap(&mut product, &mut factor);
        } else {
            let _ = product.f_add_out(&work, &factor)?;
            symmetric.accumulate(&mut work, &product, &factor, &next)?;
            std::mem::swap(&mut product, &mut work);
        }
        if last {
            let _ = product.f_mul_scalar_(linear)?;
            let _ = current.f_mul_out(&next, &number(linear)?)?;
            if m > n {
                accumulate(&mut next, &current, &product)?;
            } else {
                accumulate(&mut next, &product, &current)?;
            }
            std::mem::swap(&mut current, &mut next);
            applied += 1;
            linear = 1.0;
        }
    }
    if applied % 2 == 1 {
        // `next` is `x_gmn` now.
        next.f_copy_(&current)?;
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::disallowed_methods, reason = "a test may panic")]
#[path = "gram_tests.rs"]
mod tests;
