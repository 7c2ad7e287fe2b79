//! Products of small matrices and orthonormal bases of tall ones, by faer.
//!
//! Work is split by the sizes of a matrix alone, so neither the number of threads nor the other matrices of a call
//! change a bit of the result.

use std::sync::{Mutex, PoisonError};

use faer::linalg::cholesky::llt::factor::{LltRegularization, cholesky_in_place, cholesky_in_place_scratch};
use faer::linalg::matmul::matmul;
use faer::linalg::triangular_inverse::invert_lower_triangular;
use faer::{Accum, MatMut, MatRef, Par, Spec};

use super::super::Real;
use super::ThinProduct;
use crate::tensor::{DType, FlatViewMut, MatrixView, MatrixViewMut};
use crate::threads;

/// Columns that are multiplied together: products with one triangle are split into panels of this width. On 4096 x 256
/// 48 takes 2.4 ms, 64 the same, 128 2.8 ms and the full product 3.6 ms.
const PANEL: usize = 48;
/// Rows that are multiplied together, so that they remain in the L2 cache.
const ROWS: usize = 512;
/// Multiplications below which a matrix is not worth more than one thread.
const ALONE: usize = 1 << 22;

/// One pass is enough where `tr (PᵀP)⁻¹`, with columns of norm 1, is at most this multiple of the number of columns:
/// the error of a pass is that many roundoffs. Measured at 1.8: 6e-7 in float32, where Householder QR has 2.6e-7.
const ONE_PASS: f64 = 4.0;
/// A second pass repairs the first where the same trace times the roundoff is at most this.
const TWO_PASSES: f64 = 0.02;

/// A type that faer multiplies.
trait Dense: Real + faer::traits::RealField {
    /// Half the distance from 1 to the next number.
    const ROUNDOFF: f64;
    /// Squared norms of columns that neither overflow nor lose digits.
    const NORMS: [f64; 2];
}
impl Dense for f32 {
    const ROUNDOFF: f64 = 5.97e-8;
    const NORMS: [f64; 2] = [1e-24, 1e36];
}
impl Dense for f64 {
    const ROUNDOFF: f64 = 1.12e-16;
    const NORMS: [f64; 2] = [1e-270, 1e300];
}

/// Computes products of float32 or float64 matrices.
pub fn multiply(products: &mut [ThinProduct<'_>]) {
    let cost: usize = products.iter().map(|p| p.out.shape().iter().product::<usize>() * p.inner()).sum();
    let mut tasks = Vec::new();
    for ThinProduct { out, left, right, keep } in products {
        for (part, out) in out.reborrow().into_groups(ROWS).enumerate() {
            tasks.push(Rows { first: part * ROWS, out, left: *left, right: *right, keep: *keep });
        }
    }
    let work = |rows: &mut Rows<'_>| match rows.out.dtype() {
        DType::F64 => rows.run::<f64>(),
        _ => rows.run::<f32>(),
    };
    if cost < ALONE {
        tasks.iter_mut().for_each(work);
    } else {
        threads::chunks(&mut tasks, 1, |_, tasks| tasks.iter_mut().for_each(work));
    }
}

/// Some rows of a product from `first` on.
struct Rows<'a> {
    first: usize,
    out: MatrixViewMut<'a>,
    left: (MatrixView<'a>, bool),
    right: (MatrixView<'a>, bool),
    keep: f64,
}

impl Rows<'_> {
    #[allow(clippy::float_cmp)] // a factor is exactly 1 or it is applied
    fn run<T: Dense>(&mut self) {
        let [height, cols] = self.out.shape();
        if cols == 0 {
            return;
        }
        let (left, right) = (factor::<T>(self.left), factor::<T>(self.right));
        let (mut out, stride) = self.out.strided();
        let (pointer, stride) = (out.pointer::<T>(), stride.cast_signed());
        // SAFETY: a `MatrixViewMut` has these rows, and the result goes before it is used again.
        let mut out = unsafe { MatMut::from_raw_parts_mut(pointer, height, cols, stride, 1) };
        let accumulate = if self.keep == 0.0 { Accum::Replace } else { Accum::Add };
        if self.keep != 0.0 && self.keep != 1.0 {
            let keep = T::of(self.keep);
            (0..height).for_each(|i| out.as_mut().get_mut(i, ..).iter_mut().for_each(|x| *x *= keep));
        }
        let left = left.get(self.first..self.first + height, ..);
        matmul(out, accumulate, left, right, T::of(1.0), Par::Seq);
    }
}

fn factor<T: Dense>((matrix, transposed): (MatrixView<'_>, bool)) -> MatRef<'_, T> {
    let ([rows, cols], (x, stride)) = (matrix.shape(), matrix.strided());
    // SAFETY: a `MatrixView` has these rows, which are not written while it is borrowed.
    let matrix = unsafe { MatRef::from_raw_parts(x.pointer::<T>(), rows, cols, stride.cast_signed(), 1) };
    if transposed { matrix.transpose() } else { matrix }
}

/// Orthonormalizes the columns of row-major matrices `[rows, cols]` in float32 or float64, in place, by Cholesky QR:
/// `R = chol(PᵀP)`, `Q = P R⁻¹` with a positive diagonal of R, once where R says that this is accurate, else (or with
/// `twice`) two times. Returns which matrices were done. The others, and those for which `depends` is true, have the columns
/// that they had, or orthonormal ones of the same span, up to some roundoffs.
#[must_use]
pub fn cholesky_qr(
    mut matrices: Vec<FlatViewMut<'_>>,
    cols: usize,
    twice: bool,
    depends: Option<Depends<'_>>,
) -> Vec<bool> {
    let several = threads::get() > 1 && matrices.iter().map(|p| p.len() * cols).sum::<usize>() > ALONE;
    // Whole matrices for each thread where there are enough of them.
    let inside = several && matrices.len() < threads::get();
    let work = |x: &mut FlatViewMut<'_>| match x.dtype() {
        DType::F64 => basis(x.slice_mut::<f64>(), cols, twice, inside, depends),
        DType::F32 => basis(x.slice_mut::<f32>(), cols, twice, inside, depends),
        _ => false,
    };
    if several && !inside {
        let mut done = vec![false; matrices.len()];
        let mut tasks: Vec<_> = matrices.iter_mut().zip(&mut done).collect();
        threads::chunks(&mut tasks, 1, |_, tasks| tasks.iter_mut().for_each(|(x, done)| **done = work(x)));
        done
    } else {
        matrices.iter_mut().map(work).collect()
    }
}

/// Test whether a column of a matrix depends on others.
pub type Depends<'a> = &'a (dyn Fn(&Inverse) -> bool + Sync);

/// Sizes of a triangular factor R and its inverse, before a matrix is changed.
#[derive(Debug)]
pub struct Inverse {
    /// Lengths of the columns of P.
    pub lengths: Vec<f64>,
    /// Norms of the columns of R⁻¹.
    pub norms: Vec<f64>,
    /// The same where the columns of P have length 1.
    pub unit_norms: Vec<f64>,
}

impl Inverse {
    /// Trace of the inverse of `PᵀP` with columns of length 1.
    fn trace(&self) -> f64 {
        self.unit_norms.iter().map(|norm| norm * norm).sum()
    }
}

fn basis<T: Dense>(
    x: &mut [T],
    cols: usize,
    twice: bool,
    parallel: bool,
    depends: Option<Depends<'_>>,
) -> bool {
    let mut inverse = vec![T::default(); cols * cols];
    let enough = ONE_PASS * count(cols);
    // A NaN fails every comparison.
    let Some(found) = triangle(x, cols, &mut inverse, parallel) else { return false };
    let trace = found.trace();
    let is_accurate = trace * T::ROUNDOFF <= TWO_PASSES;
    if !is_accurate || depends.is_some_and(|depends| depends(&found)) {
        return false;
    }
    apply(x, cols, &inverse, parallel);
    if trace <= enough && !twice {
        return true;
    }
    if triangle(x, cols, &mut inverse, parallel).is_none_or(|found| found.trace() > enough) {
        return false;
    }
    apply(x, cols, &inverse, parallel);
    true
}

/// Writes the transposed inverse of the Cholesky factor of `XᵀX` to the lower triangle of `inverse`. Returns what there
/// is to know of it, where there is a factor.
fn triangle<T: Dense>(x: &[T], cols: usize, inverse: &mut [T], parallel: bool) -> Option<Inverse> {
    let mut gram = vec![T::default(); cols * cols];
    let panel = |number: usize, out: &mut [T]| {
        let (start, width) = (number * PANEL, out.len() / cols);
        let seen = start + width;
        let mut out = MatMut::from_row_major_slice_mut(out, width, cols).get_mut(.., ..seen);
        for (piece, rows) in x.chunks(ROWS * cols).enumerate() {
            let rows = MatRef::from_row_major_slice(rows, rows.len() / cols, cols);
            let accumulate = if piece == 0 { Accum::Replace } else { Accum::Add };
            let (left, right) = (rows.get(.., start..seen).transpose(), rows.get(.., ..seen));
            matmul(out.as_mut(), accumulate, left, right, T::of(1.0), Par::Seq);
        }
    };
    if parallel {
        threads::chunks(&mut gram, PANEL * cols, panel);
    } else {
        gram.chunks_mut(PANEL * cols).enumerate().for_each(|(number, out)| panel(number, out));
    }
    // Columns of norm 1: neither their sizes nor the scale of the matrix matter.
    let mut factors = Vec::with_capacity(cols);
    let mut lengths = Vec::with_capacity(cols);
    for j in 0..cols {
        let norm = gram[j * cols + j].wide();
        if !(T::NORMS[0]..=T::NORMS[1]).contains(&norm) {
            return None;
        }
        lengths.push(norm.sqrt());
        factors.push(T::of(1.0 / norm.sqrt()));
    }
    for (j, row) in gram.chunks_mut(cols).enumerate() {
        let own = factors[j];
        row[..j].iter_mut().zip(&factors).for_each(|(g, f)| *g *= own * *f);
        row[j] = T::of(1.0);
    }
    let mut memory =
        faer::dyn_stack::MemBuffer::new(cholesky_in_place_scratch::<T>(cols, Par::Seq, Spec::default()));
    let stack = faer::dyn_stack::MemStack::new(&mut memory);
    let matrix = MatMut::from_row_major_slice_mut(&mut gram, cols, cols);
    cholesky_in_place(matrix, LltRegularization::default(), Par::Seq, stack, Spec::default()).ok()?;
    invert_lower_triangular(
        MatMut::from_row_major_slice_mut(inverse, cols, cols),
        MatRef::from_row_major_slice(&gram, cols, cols),
        Par::Seq,
    );
    let norm = |row: &[T]| row.iter().map(|u| u.wide() * u.wide()).sum::<f64>().sqrt();
    let [mut norms, mut unit_norms] = [(); 2].map(|()| Vec::with_capacity(cols));
    for (j, row) in inverse.chunks_mut(cols).enumerate() {
        unit_norms.push(norm(&row[..=j]));
        row[..=j].iter_mut().zip(&factors).for_each(|(u, f)| *u *= *f);
        norms.push(norm(&row[..=j]));
    }
    Some(Inverse { lengths, norms, unit_norms })
}

/// `X ← X·U` with U the transpose of the lower triangle `lower`.
fn apply<T: Dense>(x: &mut [T], cols: usize, lower: &[T], parallel: bool) {
    let rows = |scratch: &mut Vec<T>, x: &mut [T]| {
        scratch.clear();
        scratch.extend_from_slice(x);
        let height = x.len() / cols;
        let old = MatRef::from_row_major_slice(scratch.as_slice(), height, cols);
        let lower = MatRef::from_row_major_slice(lower, cols, cols);
        let mut new = MatMut::from_row_major_slice_mut(x, height, cols);
        for start in (0..cols).step_by(PANEL) {
            let seen = (start + PANEL).min(cols);
            let out = new.as_mut().get_mut(.., start..seen);
            let right = lower.get(start..seen, ..seen).transpose();
            matmul(out, Accum::Replace, old.get(.., ..seen), right, T::of(1.0), Par::Seq);
        }
    };
    if parallel {
        // Memory that threads hand on.
        let spare = Mutex::new(Vec::new());
        let lend = || spare.lock().unwrap_or_else(PoisonError::into_inner).pop().unwrap_or_default();
        threads::chunks(x, ROWS * cols, |_, x| {
            let mut scratch = lend();
            rows(&mut scratch, x);
            spare.lock().unwrap_or_else(PoisonError::into_inner).push(scratch);
        });
    } else {
        let mut scratch = Vec::new();
        x.chunks_mut(ROWS * cols).for_each(|x| rows(&mut scratch, x));
    }
}

#[allow(clippy::cast_precision_loss)] // a number of columns
fn count(n: usize) -> f64 {
    n as f64
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::disallowed_methods, reason = "a test may panic")]
mod tests {
    use tch::{Device, Kind, Tensor};

    use super::*;
    use crate::tensor::test_views::{view, view_mut};

    #[test]
    fn products_of_any_shape_equal_float64_on_any_thread_count() {
        for kind in [Kind::Float, Kind::Double] {
            for (rows, cols, inner, gap) in [
                (768, 768, 48, 0),
                (1100, 300, 24, 5),
                (300, 1100, 24, 0),
                (384, 1000, 96, 0),
                (64, 64, 16, 0),
                (5, 3, 1, 2),
                (1, 513, 1, 0),
            ] {
                for flags in 0..12 {
                    let (turned, right_turned) = (flags & 1 == 1, flags & 2 == 2);
                    let keep = [0.0, 1.0, -0.5][flags >> 2];
                    let random = |shape: [i64; 2]| Tensor::randn(shape, (kind, Device::Cpu));
                    let left = random(if turned { [inner, rows] } else { [rows, inner] });
                    let right = random(if right_turned { [cols, inner] } else { [inner, cols] });
                    let start = random([rows, cols + gap]);
                    let size = |t: &Tensor| [0, 1].map(|d| usize::try_from(t.size()[d]).unwrap());
                    let whole = |t| view(t).matrix(0, size(t), size(t)[1]);
                    let wide = |t: &Tensor, flip: bool| {
                        let wide = t.to_kind(Kind::Double);
                        if flip { wide.tr() } else { wide }
                    };
                    let expected = start.to_kind(Kind::Double).copy();
                    let product = wide(&left, turned).matmul(&wide(&right, right_turned));
                    let mut inside = expected.narrow(1, 0, cols);
                    let sum = &inside * keep + product;
                    inside.copy_(&sum);
                    let mut results = Vec::new();
                    for count in [1, 3] {
                        threads::set(count);
                        let out = start.copy();
                        let all = view_mut(&out).into_matrix(0, size(&out), size(&out)[1]);
                        multiply(&mut [ThinProduct {
                            out: all.into_first_cols(usize::try_from(cols).unwrap()),
                            left: (whole(&left), turned),
                            right: (whole(&right), right_turned),
                            keep,
                        }]);
                        let off = (out.to_kind(Kind::Double) - &expected).abs().max().double_value(&[]);
                        let limit = if kind == Kind::Float { 1e-4 } else { 1e-12 };
                        assert!(off < limit, "{kind:?} {rows}x{cols} {inner} {flags}: {off:e}");
                        results.push(out);
                    }
                    threads::set(1);
                    assert!(results[0].equal(&results[1]), "{kind:?} {rows}x{cols} {inner} {flags}");
                }
            }
        }
    }
}
