//! Passes over the columns of thin matrices.

use std::ops::Range;

use crate::kernels::cpu::Real;
use crate::tensor::{DType, Element, FlatView, FlatViewMut, MatrixViewMut};

/// Share of the norm of the matrix at which a column holds rounding noise only: products that miss it leave up to eleven
/// units in the last place of float32, and half a unit of bfloat16 where that is what they are stored in.
pub(in crate::kernels) fn dead_share(dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => 2.0_f64.powi(-8),
        DType::F16 => 2.0_f64.powi(-11),
        _ => 2.0_f64.powi(-19),
    }
}

/// See [`crate::kernels::squares_and_scaled`].
pub(in crate::kernels) fn squares_and_scaled(
    x: &FlatView<'_>,
    sums: &mut FlatViewMut<'_>,
    factor: f64,
    scaled: &mut FlatViewMut<'_>,
) {
    let sums = sums.slice_mut::<f64>();
    sums.fill(0.0);
    if wide(x) {
        squares::<f64>(x, sums, factor, scaled);
    } else {
        squares::<f32>(x, sums, factor, scaled);
    }
}

/// Tests whether arithmetic on elements of a view is float64.
fn wide(x: &FlatView<'_>) -> bool {
    x.dtype() == DType::F64
}

fn squares<C: Real>(x: &FlatView<'_>, sums: &mut [f64], factor: f64, scaled: &mut FlatViewMut<'_>) {
    let (columns, factor) = (sums.len(), C::of(factor));
    let (mut xs, mut ys) = (vec![C::default(); columns], vec![C::default(); columns]);
    for start in (0..x.len()).step_by(columns.max(1)) {
        let xs = row(&x.part(start, columns), &mut xs);
        let mut out = scaled.part(start, columns);
        write_row(&mut out, &mut ys, |to| {
            for ((x, y), sum) in xs.iter().zip(to.iter_mut()).zip(sums.iter_mut()) {
                let wide = x.wide();
                *sum += wide * wide;
                *y = factor * *x;
            }
        });
    }
}

/// The elements of a view in arithmetic type: its own, or converted ones.
fn row<'a, C: Real>(flat: &FlatView<'a>, buffer: &'a mut [C]) -> &'a [C] {
    if flat.dtype() == <C as Element>::DTYPE {
        return flat.slice::<C>();
    }
    crate::kernels::cpu::convert::load(flat, &mut buffer[..flat.len()]);
    &buffer[..flat.len()]
}

/// Has the elements of a view written in arithmetic type: in place, or in a buffer that is stored then.
fn write_row<C: Real>(flat: &mut FlatViewMut<'_>, buffer: &mut [C], write: impl FnOnce(&mut [C])) {
    if flat.dtype() == <C as Element>::DTYPE {
        return write(flat.slice_mut::<C>());
    }
    let buffer = &mut buffer[..flat.len()];
    write(buffer);
    crate::kernels::cpu::convert::store(buffer, flat);
}

/// See [`crate::kernels::normalize_columns`].
pub(in crate::kernels) fn normalize_columns(
    x: &FlatView<'_>,
    sums: &FlatView<'_>,
    epsilon: f64,
    factor: f64,
    (q, own): (&mut MatrixViewMut<'_>, Range<usize>),
    scaled: &mut FlatViewMut<'_>,
) {
    let sums = sums.slice::<f64>();
    let norm = sums.iter().filter(|s| !s.is_nan()).sum::<f64>().sqrt();
    let noise = dead_share(x.dtype()) * norm.max(epsilon);
    let divisors: Vec<Option<f64>> = sums
        .iter()
        .map(|s| {
            let norm = s.sqrt();
            // A NaN is not dead: it has to show.
            (norm.is_nan() || norm > noise).then_some(norm + epsilon)
        })
        .collect();
    let (mut q, mut scaled) = (q.reborrow(), scaled.reborrow());
    let task = Normalized { x: *x, q: &mut q, own, scaled: &mut scaled };
    if wide(x) { task.run::<f64>(&divisors, factor) } else { task.run::<f32>(&divisors, factor) }
}

struct Normalized<'t, 'a> {
    x: FlatView<'a>,
    q: &'t mut MatrixViewMut<'a>,
    own: Range<usize>,
    scaled: &'t mut FlatViewMut<'a>,
}

impl Normalized<'_, '_> {
    fn run<C: Real>(self, divisors: &[Option<f64>], factor: f64) {
        let Self { x, q, own, scaled } = self;
        let columns = divisors.len();
        let divide: Vec<C> = divisors.iter().map(|d| C::of(d.unwrap_or(1.0))).collect();
        let factors: Vec<C> = divisors.iter().map(|d| C::of(d.map_or(0.0, |_| factor))).collect();
        let dead: Vec<usize> = own.clone().filter(|j| divisors[*j].is_none()).collect();
        let mut buffers = [(); 3].map(|()| vec![C::default(); columns]);
        let [xs, ys, qs] = &mut buffers;
        for (number, start) in (0..x.len()).step_by(columns.max(1)).enumerate() {
            let xs = row(&x.part(start, columns), xs);
            write_row(&mut scaled.part(start, columns), ys, |to| {
                for (((x, y), d), f) in xs.iter().zip(to.iter_mut()).zip(&divide).zip(&factors) {
                    *y = *f * (*x / *d);
                }
            });
            let mut q = q.row(number);
            let kept = if dead.is_empty() { Vec::new() } else { kept::<C>(&q.view(), &dead, own.start) };
            write_row(&mut q, qs, |to| {
                for ((x, q), d) in xs[own.clone()].iter().zip(to.iter_mut()).zip(&divide[own.clone()]) {
                    *q = *x / *d;
                }
                dead.iter().zip(kept).for_each(|(j, old)| to[j - own.start] = old);
            });
        }
    }
}

/// Returns the old values of a row of `q` in some columns. The first column of the row has number `first`.
fn kept<C: Real>(q: &FlatView<'_>, dead: &[usize], first: usize) -> Vec<C> {
    let mut old = vec![C::default(); q.len()];
    let old = row(q, &mut old);
    dead.iter().map(|j| old[j - first]).collect()
}

#[cfg(test)]
mod tests {
    use tch::Tensor;

    use super::*;
    use crate::tensor::test_views::{view, view_mut};

    #[test]
    fn normalize_columns_dead_column_keeps_q() {
        let x = Tensor::from_slice(&[3.0_f64, 0.0, 1e-9, 4.0, 0.0, 0.0]).view([2, 3]);
        let q = Tensor::from_slice(&[9.0_f64, 8.0, 7.0, 6.0, 5.0, 4.0]).view([2, 3]);
        let (scaled, sums) = (q.zeros_like(), Tensor::zeros([3], (tch::Kind::Double, tch::Device::Cpu)));
        squares_and_scaled(&view(&x), &mut view_mut(&sums), 0.5, &mut view_mut(&scaled));
        assert_eq!(Vec::<f64>::try_from(sums.copy()).unwrap(), [25.0, 0.0, 1e-18]);
        assert_eq!(Vec::<f64>::try_from(scaled.view([-1])).unwrap(), [1.5, 0.0, 5e-10, 2.0, 0.0, 0.0]);
        let normalize = |q: &Tensor, factor, own: Range<usize>| {
            let cols = own.len();
            let mut matrix = view_mut(q).into_matrix(0, [2, cols], cols);
            let (sums, mut scaled) = (view(&sums), view_mut(&scaled));
            normalize_columns(&view(&x), &sums, 0.0, factor, (&mut matrix, own), &mut scaled);
        };
        normalize(&q, -2.0, 0..3);
        assert_eq!(Vec::<f64>::try_from(q.view([-1])).unwrap(), [0.6, 8.0, 7.0, 0.8, 5.0, 4.0]);
        assert_eq!(Vec::<f64>::try_from(scaled.view([-1])).unwrap(), [-1.2, 0.0, 0.0, -1.6, 0.0, 0.0]);
        let q = Tensor::from_slice(&[8.0_f64, 7.0, 5.0, 4.0]).view([2, 2]);
        normalize(&q, 1.0, 0..2);
        assert_eq!(Vec::<f64>::try_from(q.view([-1])).unwrap(), [0.6, 7.0, 0.8, 4.0]);
    }
}
