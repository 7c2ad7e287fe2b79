//! Rows or columns of a matrix chosen by their absolute sums.

use std::cmp::Ordering;

use super::host::in_pieces;
use crate::kernels::ops::apply::{Apply, Decay};
use crate::kernels::ops::momentum::Release;
use crate::spec::Side;
use crate::tensor::{FlatView, MatrixView};

/// The numbers of the `count` largest of `scores` (float64, compared in float32, NaN before all, ties to the lowest
/// number), ascending and counted from 1, into the float64 view `chosen`, which is filled up with 0: a cleared view is
/// one where nothing was chosen.
pub(in crate::kernels) fn choose(scores: &FlatView, count: usize, chosen: &FlatView) {
    // SAFETY: the caller owns both for this stage, and they do not overlap.
    let (scores, chosen) = unsafe { (scores.slice::<f64>(), chosen.slice::<f64>()) };
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

/// What `choose` left.
#[must_use]
pub(in crate::kernels) fn chosen(flat: &FlatView) -> Vec<usize> {
    // SAFETY: the caller owns it for this stage; it is only read.
    let numbers = unsafe { flat.slice::<f64>() };
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // a matrix side, exact
    numbers.iter().filter(|n| **n >= 1.0).map(|n| *n as usize - 1).collect()
}

/// Copies slice `from` of `x` to slice `to` of `u` for every pair `(from, to)` and multiplies it in `x` by `keep`.
pub(in crate::kernels) fn take(
    x: &MatrixView,
    side: Side,
    pairs: &[(usize, usize)],
    keep: f64,
    u: &MatrixView,
) {
    let release = Release { keep };
    match side {
        Side::Rows => {
            let jobs: Vec<_> = pairs.iter().map(|&(from, to)| [x.row(from), u.row(to)]).collect();
            crate::kernels::cpu::run(&release, &jobs);
        }
        Side::Cols => {
            in_pieces(x.shape(), |start, rows| {
                let (mut line, mut out) = (vec![0.0_f64; x.shape()[1]], vec![0.0_f64; u.shape()[1]]);
                for row in start..start + rows {
                    crate::kernels::cpu::convert::load(&x.row(row), &mut line);
                    crate::kernels::cpu::convert::load(&u.row(row), &mut out);
                    for &(from, to) in pairs {
                        out[to] = line[from];
                        line[from] *= keep;
                    }
                    crate::kernels::cpu::convert::store(&out, &u.row(row));
                    crate::kernels::cpu::convert::store(&line, &x.row(row));
                }
            });
        }
    }
}

/// Applies slice `from` of `u` to slice `to` of `x` for every pair `(to, from)`; the other slices decay.
pub(in crate::kernels) fn put(
    x: &MatrixView,
    side: Side,
    pairs: &[(usize, usize)],
    u: &MatrixView,
    apply: &Apply,
) {
    let decay = Decay { decay: apply.decay, per_rate: true };
    match side {
        Side::Rows => {
            let jobs: Vec<_> = pairs.iter().map(|&(to, from)| [x.row(to), u.row(from)]).collect();
            crate::kernels::cpu::run(apply, &jobs);
            if apply.decay != 0.0 {
                let mut other = vec![true; x.shape()[0]];
                for (to, _) in pairs {
                    other[*to] = false;
                }
                let jobs: Vec<_> =
                    other.iter().enumerate().filter(|(_, o)| **o).map(|(row, _)| [x.row(row)]).collect();
                crate::kernels::cpu::run(&decay, &jobs);
            }
        }
        Side::Cols => {
            let keep = 1.0 - apply.decay;
            in_pieces(x.shape(), |start, rows| {
                let (mut line, mut update) = (vec![0.0_f64; x.shape()[1]], vec![0.0_f64; u.shape()[1]]);
                let mut old = vec![0.0_f64; pairs.len()];
                for row in start..start + rows {
                    crate::kernels::cpu::convert::load(&x.row(row), &mut line);
                    crate::kernels::cpu::convert::load(&u.row(row), &mut update);
                    old.iter_mut().zip(pairs).for_each(|(old, (to, _))| *old = line[*to]);
                    for x in &mut line {
                        *x *= keep;
                    }
                    for (&(to, from), old) in pairs.iter().zip(&old) {
                        let kept = if apply.cautious && old * update[from] < 0.0 { *old } else { line[to] };
                        line[to] = kept - apply.rate * update[from];
                    }
                    crate::kernels::cpu::convert::store(&line, &x.row(row));
                }
            });
        }
    }
}
