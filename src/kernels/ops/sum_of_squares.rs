//! The sum of squares.

use crate::kernels::cpu::fold::RUN;
use crate::kernels::cpu::lanes::{LANES, sums};
use crate::kernels::cpu::{Fold, Real};
use crate::kernels::cuda_call::{Kernel, Pass};
use crate::kernels::ops::declare::{kernel, ops};

ops! {
    cuda "sum_of_squares.cuh" also [&KERNEL];

    /// Σ (factor·x)². Operand: x.
    #[derive(Clone, Copy, Debug)]
    pub struct SumOfSquares {
        ;
        /// The factor.
        factor: f64,
    }
}

const KERNEL: Kernel = kernel!(Sum sum_of_squares = SumOfSquares told SumOfSquares [x: read plain]);

impl Fold<1, 1> for SumOfSquares {
    const WRITES: [bool; 1] = KERNEL.writes();

    #[inline(always)]
    #[allow(clippy::inline_always)] // must be compiled inside its caller's instruction set
    fn apply<C: Real>(&self, _job: usize, [x]: [&mut [C]; 1]) -> [f64; 1] {
        [x.chunks(RUN).map(|x| sums!(x;; j => x[j] * x[j])).sum()]
    }

    fn factor(&self) -> f64 {
        self.factor
    }

    fn on_cuda(&self) -> Option<Pass<'_>> {
        Some(self.call(&KERNEL))
    }
}
