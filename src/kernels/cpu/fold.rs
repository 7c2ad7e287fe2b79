//! Elementwise passes that also sum something up: in float64, in the same order whatever the number of threads.

use std::sync::atomic::{AtomicU64, Ordering};

use super::{Job, Op, Real, Slot, run};
use crate::kernels::op::Pass;

/// Elements that are summed in the type of the arithmetic before the sum goes on in float64.
pub(in crate::kernels) const RUN: usize = 256;
/// An elementwise pass over `N` operands of equal length (`R` read, `W` written), with `K` sums.
pub trait Fold<const N: usize, const R: usize, const W: usize, const K: usize>: Sync {
    /// The order in which kernels of devices take the operands.
    const ORDER: [Slot; N];

    /// Does its work on equally long slices of job `job`; returns what they add to the sums.
    fn apply<C: Real>(&self, job: usize, read: [&[C]; R], write: [&mut [C]; W]) -> [f64; K];

    /// The sums are multiplied by its square.
    fn factor(&self) -> f64 {
        1.0
    }

    /// Call of the pass on CUDA devices; none where there is no kernel of it.
    fn on_cuda(&self) -> Option<Pass<'_>> {
        None
    }
}

/// A pass as an elementwise operation whose jobs are pieces of the pass's jobs.
struct Pieces<'a, F, const K: usize> {
    fold: &'a F,
    jobs: Vec<usize>,
    /// Bits of float64 numbers: each is written by the one thread that has the piece.
    sums: Vec<[AtomicU64; K]>,
}

impl<F: Fold<N, R, W, K>, const N: usize, const R: usize, const W: usize, const K: usize> Op<N, R, W>
    for Pieces<'_, F, K>
{
    const ORDER: [Slot; N] = F::ORDER;
    // The sums of parts would be rounded otherwise.
    const SPLITS: bool = false;
    type Constants<C: Real> = usize;

    #[inline(always)]
    #[allow(clippy::inline_always)] // must be compiled inside its caller's instruction set
    fn constants<C: Real>(&self, piece: usize) -> usize {
        piece
    }

    #[inline(always)]
    #[allow(clippy::inline_always)] // must be compiled inside its caller's instruction set
    fn apply<C: Real>(&self, &piece: &usize, read: [&[C]; R], write: [&mut [C]; W]) {
        let new = self.fold.apply(self.jobs[piece], read, write);
        for (sum, new) in self.sums[piece].iter().zip(new) {
            let old = f64::from_bits(sum.load(Ordering::Relaxed));
            sum.store((old + new).to_bits(), Ordering::Relaxed);
        }
    }
}

/// Runs a pass over all jobs; returns the sums of each.
pub fn fold<const N: usize, const R: usize, const W: usize, const K: usize, F: Fold<N, R, W, K>>(
    pass: &F,
    jobs: &mut [Job<'_, R, W>],
) -> Vec<[f64; K]> {
    let mut totals = vec![[0.0; K]; jobs.len()];
    let (owners, mut pieces): (Vec<usize>, Vec<Job<'_, R, W>>) =
        super::pieces(jobs).into_iter().map(|piece| (piece.number, piece.job)).unzip();
    let sums = owners.iter().map(|_| std::array::from_fn(|_| AtomicU64::new(0))).collect();
    let op = Pieces { fold: pass, jobs: owners, sums };
    run(&op, &mut pieces);
    for (job, sums) in op.jobs.iter().zip(&op.sums) {
        for (total, sum) in totals[*job].iter_mut().zip(sums) {
            *total += f64::from_bits(sum.load(Ordering::Relaxed));
        }
    }
    let factor = pass.factor();
    totals.iter_mut().flatten().for_each(|total| *total = *total * factor * factor);
    totals
}
