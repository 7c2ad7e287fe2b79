//! Passes over the columns of thin matrices.

use std::ops::Range;

use crate::kernels::cpu::Real;
use crate::tensor::{DType, Element, FlatView, MatrixView};

/// A column whose norm is at most this fraction of the largest one holds rounding noise only: two units in the
/// last place of float32.
const DEAD: f64 = 2.4e-7;

/// See [`crate::kernels::squares_and_scaled`].
pub(in crate::kernels) fn squares_and_scaled(x: &FlatView, sums: &FlatView, factor: f64, scaled: &FlatView) {
    // SAFETY: the caller owns all views for this stage, and they do not overlap.
    let sums = unsafe { sums.slice::<f64>() };
    sums.fill(0.0);
    if wide(x) {
        squares::<f64>(x, sums, factor, scaled);
    } else {
        squares::<f32>(x, sums, factor, scaled);
    }
}

/// Whether arithmetic on elements of a view is float64.
fn wide(x: &FlatView) -> bool {
    x.dtype() == DType::F64
}

fn squares<C: Real>(x: &FlatView, sums: &mut [f64], factor: f64, scaled: &FlatView) {
    let (columns, factor) = (sums.len(), C::of(factor));
    let (mut xs, mut ys) = (vec![C::default(); columns], vec![C::default(); columns]);
    for start in (0..x.len()).step_by(columns.max(1)) {
        let xs = row(&x.part(start, columns), &mut xs);
        let out = scaled.part(start, columns);
        let to = row_to(&out, &mut ys);
        for ((x, y), sum) in xs.iter().zip(to.iter_mut()).zip(sums.iter_mut()) {
            let wide = x.wide();
            *sum += wide * wide;
            *y = factor * *x;
        }
        stored(to, &out);
    }
}

/// The elements of a view in arithmetic type: its own, or converted ones.
fn row<'a, C: Real>(flat: &FlatView, buffer: &'a mut [C]) -> &'a [C] {
    if flat.dtype() == <C as Element>::DTYPE {
        // SAFETY: the caller of the pass owns the view for this stage.
        return unsafe { flat.slice::<C>() };
    }
    crate::kernels::cpu::convert::load(flat, &mut buffer[..flat.len()]);
    &buffer[..flat.len()]
}

/// The elements of a view to be written, or a buffer that [`stored`] puts there.
fn row_to<'a, C: Real>(flat: &FlatView, buffer: &'a mut [C]) -> &'a mut [C] {
    if flat.dtype() == <C as Element>::DTYPE {
        // SAFETY: as in `row`.
        return unsafe { flat.slice::<C>() };
    }
    &mut buffer[..flat.len()]
}

fn stored<C: Real>(values: &[C], flat: &FlatView) {
    if flat.dtype() != <C as Element>::DTYPE {
        crate::kernels::cpu::convert::store(values, flat);
    }
}

/// See [`crate::kernels::normalize_columns`].
pub(in crate::kernels) fn normalize_columns(
    x: &FlatView,
    sums: &FlatView,
    epsilon: f64,
    factor: f64,
    (q, own): (&MatrixView, Range<usize>),
    scaled: &FlatView,
) {
    // SAFETY: the caller owns the views for this stage, and they do not overlap.
    let sums = unsafe { sums.slice::<f64>() };
    let largest = sums.iter().fold(0.0_f64, |a, &b| a.max(b)).sqrt();
    let divisors: Vec<Option<f64>> = sums
        .iter()
        .map(|s| {
            let norm = s.sqrt();
            // A NaN is not dead: it has to show.
            (norm.is_nan() || norm > DEAD * largest).then_some(norm + epsilon)
        })
        .collect();
    let task = Normalized { x, q, own, scaled };
    if wide(x) { task.run::<f64>(&divisors, factor) } else { task.run::<f32>(&divisors, factor) }
}

struct Normalized<'a> {
    x: &'a FlatView,
    q: &'a MatrixView,
    own: Range<usize>,
    scaled: &'a FlatView,
}

impl Normalized<'_> {
    fn run<C: Real>(&self, divisors: &[Option<f64>], factor: f64) {
        let columns = divisors.len();
        let divide: Vec<C> = divisors.iter().map(|d| C::of(d.unwrap_or(1.0))).collect();
        let factors: Vec<C> = divisors.iter().map(|d| C::of(d.map_or(0.0, |_| factor))).collect();
        let dead: Vec<usize> = self.own.clone().filter(|j| divisors[*j].is_none()).collect();
        let mut buffers = [(); 3].map(|()| vec![C::default(); columns]);
        let [xs, ys, qs] = &mut buffers;
        for (number, start) in (0..self.x.len()).step_by(columns.max(1)).enumerate() {
            let xs = row(&self.x.part(start, columns), xs);
            let (out, q) = (self.scaled.part(start, columns), self.q.row(number));
            let to = row_to(&out, ys);
            for (((x, y), d), f) in xs.iter().zip(to.iter_mut()).zip(&divide).zip(&factors) {
                *y = *f * (*x / *d);
            }
            stored(to, &out);
            let kept: Vec<C> = if dead.is_empty() { Vec::new() } else { self.kept(&q, &dead) };
            let to = row_to(&q, qs);
            for ((x, q), d) in xs[self.own.clone()].iter().zip(to.iter_mut()).zip(&divide[self.own.clone()]) {
                *q = *x / *d;
            }
            dead.iter().zip(kept).for_each(|(j, old)| to[j - self.own.start] = old);
            stored(to, &q);
        }
    }

    /// The old values of a row of `q` in some columns.
    fn kept<C: Real>(&self, q: &FlatView, dead: &[usize]) -> Vec<C> {
        let mut old = vec![C::default(); q.len()];
        let old = row(q, &mut old);
        dead.iter().map(|j| old[j - self.own.start]).collect()
    }
}

#[cfg(test)]
mod tests {
    use tch::Tensor;

    use super::*;

    #[test]
    fn normalize_columns_dead_column_keeps_q() {
        let x = Tensor::from_slice(&[3.0_f64, 0.0, 1e-9, 4.0, 0.0, 0.0]).view([2, 3]);
        let q = Tensor::from_slice(&[9.0_f64, 8.0, 7.0, 6.0, 5.0, 4.0]).view([2, 3]);
        let (scaled, sums) = (q.zeros_like(), Tensor::zeros([3], (tch::Kind::Double, tch::Device::Cpu)));
        let flat = |t: &Tensor| FlatView::of(t).unwrap();
        squares_and_scaled(&flat(&x), &flat(&sums), 0.5, &flat(&scaled));
        assert_eq!(Vec::<f64>::try_from(sums.copy()).unwrap(), [25.0, 0.0, 1e-18]);
        assert_eq!(Vec::<f64>::try_from(scaled.view([-1])).unwrap(), [1.5, 0.0, 5e-10, 2.0, 0.0, 0.0]);
        let area = |t: &Tensor, cols| flat(t).area(0, [2, cols], cols);
        normalize_columns(&flat(&x), &flat(&sums), 0.0, -2.0, (&area(&q, 3), 0..3), &flat(&scaled));
        assert_eq!(Vec::<f64>::try_from(q.view([-1])).unwrap(), [0.6, 8.0, 7.0, 0.8, 5.0, 4.0]);
        assert_eq!(Vec::<f64>::try_from(scaled.view([-1])).unwrap(), [-1.2, 0.0, 0.0, -1.6, 0.0, 0.0]);
        let q = Tensor::from_slice(&[8.0_f64, 7.0, 5.0, 4.0]).view([2, 2]);
        normalize_columns(&flat(&x), &flat(&sums), 0.0, 1.0, (&area(&q, 2), 0..2), &flat(&scaled));
        assert_eq!(Vec::<f64>::try_from(q.view([-1])).unwrap(), [0.6, 7.0, 0.8, 4.0]);
    }
}
