//! Elementwise passes that also sum something up: in float64, in the same order whatever the number of threads.

use std::sync::atomic::{AtomicU64, Ordering};

use super::{Op, Real, run};
use crate::kernels::cuda_call::{Launch, Pass};
use crate::tensor::FlatView;

/// Elements that are summed in the type of the arithmetic before the sum goes on in float64.
pub(in crate::kernels) const RUN: usize = 256;
/// An elementwise pass over `N` operands of equal length with `K` sums.
pub trait Fold<const N: usize, const K: usize>: Sync {
    /// Which operands are written.
    const WRITES: [bool; N];

    /// Does its work on equally long slices of job `job`; returns what they add to the sums.
    fn apply<C: Real>(&self, job: usize, operands: [&mut [C]; N]) -> [f64; K];

    /// The sums are multiplied by its square.
    fn factor(&self) -> f64 {
        1.0
    }

    /// How it is called on CUDA devices; none where there is no kernel of it.
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

impl<F, const N: usize, const K: usize> Launch<N> for Pieces<'_, F, K> {}

impl<F: Fold<N, K>, const N: usize, const K: usize> Op<N> for Pieces<'_, F, K> {
    const WRITES: [bool; N] = F::WRITES;
    // The sums of parts would be rounded otherwise.
    const SPLITS: bool = false;

    #[inline(always)]
    #[allow(clippy::inline_always)] // must be compiled inside its caller's instruction set
    fn apply<C: Real>(&self, piece: usize, operands: [&mut [C]; N]) {
        let new = self.fold.apply(self.jobs[piece], operands);
        for (sum, new) in self.sums[piece].iter().zip(new) {
            let old = f64::from_bits(sum.load(Ordering::Relaxed));
            sum.store((old + new).to_bits(), Ordering::Relaxed);
        }
    }
}

/// Runs a pass over all jobs, each `N` views of equal length, disjoint from those of the other jobs; returns the sums of
/// each job.
pub fn fold<const N: usize, const K: usize, F: Fold<N, K>>(
    pass: &F,
    jobs: &[[FlatView; N]],
) -> Vec<[f64; K]> {
    let (owners, pieces): (Vec<usize>, Vec<[FlatView; N]>) =
        super::pieces(jobs).into_iter().map(|piece| (piece.job, piece.operands)).unzip();
    let sums = owners.iter().map(|_| std::array::from_fn(|_| AtomicU64::new(0))).collect();
    let op = Pieces { fold: pass, jobs: owners, sums };
    run(&op, &pieces);
    let mut totals = vec![[0.0; K]; jobs.len()];
    for (job, sums) in op.jobs.iter().zip(&op.sums) {
        for (total, sum) in totals[*job].iter_mut().zip(sums) {
            *total += f64::from_bits(sum.load(Ordering::Relaxed));
        }
    }
    let factor = pass.factor();
    totals.iter_mut().flatten().for_each(|total| *total = *total * factor * factor);
    totals
}
