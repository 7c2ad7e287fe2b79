//! Rows or columns of a matrix chosen by their absolute sums.

use std::cmp::Ordering;

use super::host::height;
use crate::kernels::cpu::{Job, convert, run};
use crate::kernels::ops::apply::{Apply, Decay};
use crate::kernels::ops::momentum::Release;
use crate::spec::Side;
use crate::tensor::{FlatView, FlatViewMut, MatrixView, MatrixViewMut};
use crate::threads;

/// The numbers of the `count` largest of `scores` (float64, compared in float32, NaN before all, ties to the lowest
/// number), ascending and counted from 1, into the float64 view `chosen`, which is filled up with 0: a cleared view is
/// one where nothing was chosen.
pub(in crate::kernels) fn choose(scores: &FlatView<'_>, count: usize, chosen: &mut FlatViewMut<'_>) {
    let (scores, chosen) = (scores.slice::<f64>(), chosen.slice_mut::<f64>());
    #[allow(clippy::cast_possible_truncation)] // meant: sums that differ by their rounding only are equal
    let narrow: Vec<f32> = scores.iter().map(|s| if s.is_nan() { f32::NAN } else { *s as f32 }).collect();
    let before = |a: &usize, b: &usize| -> Ordering { narrow[*b].total_cmp(&narrow[*a]).then(a.cmp(b)) };
    let mut order: Vec<usize> = (0..scores.len()).collect();
    if count < order.len() {
        let _ = order.select_nth_unstable_by(count, before);
        order.truncate(count);
    }
    order.sort_unstable();
    chosen.fill(0.0);
    #[allow(clippy::cast_precision_loss)] // a matrix side
    chosen.iter_mut().zip(order).for_each(|(to, from)| *to = (from + 1) as f64);
}

/// Numbers of the slices that `choose` left.
#[must_use]
pub(in crate::kernels) fn chosen(flat: &FlatView<'_>) -> Vec<usize> {
    let numbers = flat.slice::<f64>();
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // a matrix side, exact
    numbers.iter().filter(|n| **n >= 1.0).map(|n| *n as usize - 1).collect()
}

/// Rows of a matrix by number, to be taken one after the other.
fn lines(matrix: MatrixViewMut<'_>) -> Vec<Option<FlatViewMut<'_>>> {
    matrix.into_rows().map(Some).collect()
}

/// Copies slice `from` of `x` to slice `to` of `u` for every pair `(from, to)` and multiplies it in `x` by `keep`.
pub(in crate::kernels) fn take(
    x: MatrixViewMut<'_>,
    side: Side,
    pairs: &[(usize, usize)],
    keep: f64,
    u: MatrixViewMut<'_>,
) {
    match side {
        Side::Rows => {
            let (mut x, mut u) = (lines(x), lines(u));
            let job = |&(from, to): &(usize, usize)| {
                Some(Job { read: [], write: [x.get_mut(from)?.take()?, u.get_mut(to)?.take()?] })
            };
            run(&Release { keep }, &mut pairs.iter().filter_map(job).collect::<Vec<_>>());
        }
        Side::Cols => {
            let (shape, height) = (x.shape(), height(x.shape()));
            let [cols, width] = [shape[1], u.shape()[1]];
            let mut parts: Vec<_> = x.into_groups(height).zip(u.into_groups(height)).collect();
            threads::chunks(&mut parts, 1, |_, parts| {
                for (x, u) in parts {
                    let (mut line, mut out) = (vec![0.0_f64; cols], vec![0.0_f64; width]);
                    for (mut x, mut u) in x.reborrow().into_rows().zip(u.reborrow().into_rows()) {
                        convert::load(&x.view(), &mut line);
                        convert::load(&u.view(), &mut out);
                        for &(from, to) in pairs {
                            out[to] = line[from];
                            line[from] *= keep;
                        }
                        convert::store(&out, &mut u);
                        convert::store(&line, &mut x);
                    }
                }
            });
        }
    }
}

/// Applies slice `from` of `u` to slice `to` of `x` for every pair `(to, from)`; the other slices decay.
pub(in crate::kernels) fn put(
    x: MatrixViewMut<'_>,
    side: Side,
    pairs: &[(usize, usize)],
    u: &MatrixView<'_>,
    apply: &Apply,
) {
    match side {
        Side::Rows => {
            let mut x = lines(x);
            let job = |&(to, from): &(usize, usize)| {
                Some(Job { read: [u.row(from)], write: [x.get_mut(to)?.take()?] })
            };
            run(apply, &mut pairs.iter().filter_map(job).collect::<Vec<_>>());
            if apply.decay != 0.0 {
                let others = x.into_iter().flatten().map(|x| Job { read: [], write: [x] });
                run(&Decay { decay: apply.decay, per_rate: true }, &mut others.collect::<Vec<_>>());
            }
        }
        Side::Cols => {
            let (keep, height, cols) = (1.0 - apply.decay, height(x.shape()), x.shape()[1]);
            let mut parts: Vec<_> = x.into_groups(height).collect();
            threads::chunks(&mut parts, 1, |part, parts| {
                for x in parts {
                    let (mut line, mut update) = (vec![0.0_f64; cols], vec![0.0_f64; u.shape()[1]]);
                    let mut old = vec![0.0_f64; pairs.len()];
                    for (row, mut x) in x.reborrow().into_rows().enumerate() {
                        convert::load(&x.view(), &mut line);
                        convert::load(&u.row(part * height + row), &mut update);
                        old.iter_mut().zip(pairs).for_each(|(old, (to, _))| *old = line[*to]);
                        for x in &mut line {
                            *x *= keep;
                        }
                        for (&(to, from), old) in pairs.iter().zip(&old) {
                            let kept =
                                if apply.cautious && old * update[from] < 0.0 { *old } else { line[to] };
                            line[to] = kept - apply.rate * update[from];
                        }
                        convert::store(&line, &mut x);
                    }
                }
            });
        }
    }
}
