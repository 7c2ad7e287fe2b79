//! Approximate polar factors by an odd polynomial of the matrix (Newton–Schulz, Polar Express).
//!
//! B = matrices in the batch, g = matrices computed together, m = rows, n = cols, k = min(m, n).
//! Suffixes name logical dimensions.
//!
//! Signatures: [`scratch_elements`]`(b, m, n) -> i64` and
//! [`newton_schulz`]`(&mut x_bmn, &polynomial, epsilon, &scratch)`.

use tch::{Device, Kind, Tensor};

use super::coefficients::Polynomial;
use crate::error::{Error, Result};

/// Matrices are computed together while their elements stay within one group: small matrices share the cost
/// of a call, large ones stay in the cache through all steps.
const GROUP_ELEMENTS: i64 = 1 << 17;
/// Symmetric products of at least this many rows are computed by strips below the diagonal.
const STRIPS_FROM: i64 = 512;
/// Rows of a strip for every thread of libtorch; fewer make the products inefficient.
const STRIP_ROWS: i64 = 128;
/// Most strips of a symmetric product, which then costs (1 + 1/8) / 2 of the full one.
const STRIPS: i64 = 8;

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

/// Matrices computed together.
fn group_size(b: i64, m: i64, n: i64) -> i64 {
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
    if b == 0 || m == 0 || n == 0 {
        return Ok(());
    }
    let kind = x_bmn.f_kind()?;
    let needed = scratch_elements(b, m, n);
    let flat = scratch.size();
    if !x_bmn.is_contiguous() || flat.len() != 1 || flat[0] < needed || scratch.f_kind()? != kind {
        return Err(Error::Internal(format!(
            "newton_schulz needs a contiguous batch and {needed} elements of {kind:?}, got scratch {flat:?}"
        )));
    }
    let (steps, start) = plan(polynomial);
    let group = group_size(b, m, n);
    for first in (0..b).step_by(usize::try_from(group).unwrap_or(1)) {
        let g = group.min(b - first);
        let mut part_gmn = x_bmn.f_narrow(0, first, g)?;
        normalize(&mut part_gmn, polynomial.norm_factor, epsilon, start, scratch)?;
        iterate(&mut part_gmn, &steps, scratch)?;
    }
    Ok(())
}

/// One step in terms of `Y`: `Y <- linear Y + gamma (ratio G + square G G) Y` with `G = Y Yᵀ`.
struct Step {
    linear: f64,
    ratio: f64,
    square: bool,
    gamma: f64,
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

/// Applies the steps to a group of normalized matrices.
fn iterate(x_gmn: &mut Tensor, steps: &[Step], scratch: &Tensor) -> Result<()> {
    let (g, m, n) = x_gmn.size3()?;
    let k = m.min(n);
    // One matrix is a matrix, not a batch: libtorch's products of two matrices are the faster ones.
    let (shape, gram_shape) = if g == 1 { (vec![m, n], vec![k, k]) } else { (vec![g, m, n], vec![g, k, k]) };
    let (size, gram_size) = (g * m * n, g * k * k);
    let mut current = x_gmn.f_view(shape.as_slice())?;
    let mut next = scratch.f_narrow(0, 0, size)?.f_view(shape.as_slice())?;
    let mut gram = scratch.f_narrow(0, size, gram_size)?.f_view(gram_shape.as_slice())?;
    let mut quadratic = scratch.f_narrow(0, size + gram_size, gram_size)?.f_view(gram_shape.as_slice())?;
    let strips = if g == 1 && k >= STRIPS_FROM {
        let threads = i64::from(tch::get_num_threads().max(1));
        (k / (STRIP_ROWS * threads)).clamp(1, STRIPS)
    } else {
        1
    };
    let mirror = Mirror { strips, size: k };

    for step in steps {
        let short = if m > n { current.f_transpose(-2, -1)? } else { current.f_alias()? };
        mirror.gram(&mut gram, &short, &quadratic)?;
        mirror.quadratic(&mut quadratic, &gram, step, &next)?;
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

/// `out <- out + a b` for matrices or batches.
fn accumulate(out: &mut Tensor, a: &Tensor, b: &Tensor) -> Result<()> {
    let _ = if out.dim() == 2 { out.f_addmm_(a, b)? } else { out.f_baddbmm_(a, b)? };
    Ok(())
}

/// A number that multiplies a tensor of any float dtype without changing its dtype.
fn number(x: f64) -> Result<Tensor> {
    Ok(Tensor::f_scalar_tensor(x, (Kind::Double, Device::Cpu))?)
}

/// Symmetric products, computed on and below the diagonal by strips of rows and mirrored.
struct Mirror {
    strips: i64,
    size: i64,
}

impl Mirror {
    /// First and past-the-end row of every strip.
    fn bounds(&self) -> impl Iterator<Item = (i64, i64)> {
        let (strips, size) = (self.strips, self.size);
        (0..strips).map(move |i| (i * size / strips, (i + 1) * size / strips))
    }

    /// `out <- W Wᵀ`, exactly symmetric when there are strips. `free` is overwritten.
    fn gram(&self, out: &mut Tensor, w: &Tensor, free: &Tensor) -> Result<()> {
        if self.strips == 1 {
            let w_t = w.f_transpose(-2, -1)?;
            let _ = if out.dim() == 2 { w.f_mm_out(out, &w_t)? } else { w.f_bmm_out(out, &w_t)? };
            return Ok(());
        }
        for (low, high) in self.bounds() {
            let strip = block(out, low, high, 0, high)?;
            let _ = w
                .f_narrow(0, low, high - low)?
                .f_mm_out(&strip, &w.f_narrow(0, 0, high)?.f_transpose(0, 1)?)?;
            reflect(out, low, high, free)?;
        }
        Ok(())
    }

    /// `out <- gamma (ratio G + G G)`, or `gamma ratio G` for a cubic step. `free` is overwritten.
    fn quadratic(&self, out: &mut Tensor, gram: &Tensor, step: &Step, free: &Tensor) -> Result<()> {
        if self.strips == 1 || !step.square {
            let _ = gram.f_mul_out(out, &number(step.ratio)?)?;
            if step.square {
                accumulate(out, gram, gram)?;
            }
            let _ = out.f_mul_scalar_(step.gamma)?;
            return Ok(());
        }
        for (low, high) in self.bounds() {
            let mut strip = block(out, low, high, 0, high)?;
            let rows = gram.f_narrow(0, low, high - low)?;
            let _ = rows.f_narrow(1, 0, high)?.f_mul_out(&strip, &number(step.ratio)?)?;
            let _ = strip.f_addmm_(&rows, &gram.f_narrow(1, 0, high)?)?;
            let _ = strip.f_mul_scalar_(step.gamma)?;
            reflect(out, low, high, free)?;
        }
        Ok(())
    }
}

/// Rows `[top, bottom)` and columns `[left, right)` of a matrix, as a view.
fn block(matrix: &Tensor, top: i64, bottom: i64, left: i64, right: i64) -> Result<Tensor> {
    Ok(matrix.f_narrow(0, top, bottom - top)?.f_narrow(1, left, right - left)?)
}

/// Copies what lies below the diagonal in rows `[low, high)` to its mirror image. `free` is overwritten.
fn reflect(matrix: &Tensor, low: i64, high: i64, free: &Tensor) -> Result<()> {
    if low > 0 {
        block(matrix, 0, low, low, high)?.f_copy_(&block(matrix, low, high, 0, low)?.f_transpose(0, 1)?)?;
    }
    let size = high - low;
    let mut corner = block(matrix, low, high, low, high)?;
    let mut image = free.f_view(-1)?.f_narrow(0, 0, size * size)?.f_view([size, size])?;
    image.f_copy_(&corner.f_transpose(0, 1)?)?;
    let _ = image.f_triu_(1)?;
    let _ = corner.f_tril_(0)?.f_add_(&image)?;
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::disallowed_methods, reason = "a test may panic")]
#[path = "newton_schulz_tests.rs"]
mod tests;
