//! The sum of squares.

use tch::Tensor;

use crate::error::Result;
use crate::kernels::cpu::fold::RUN;
use crate::kernels::cpu::lanes::squares;
use crate::kernels::cpu::{Fold, Real, Slot};
use crate::kernels::cuda_call::{Kernel, Pass};
use crate::kernels::ops::declare::{kernel, ops};
use crate::kernels::stay;
use crate::tensor::{DType, FlatView};

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

impl Fold<1, 1, 0, 1> for SumOfSquares {
    const ORDER: [Slot; 1] = KERNEL.order();

    #[inline(always)]
    #[allow(clippy::inline_always)] // must be compiled inside its caller's instruction set
    fn apply<C: Real>(&self, _job: usize, [x]: [&[C]; 1], []: [&mut [C]; 0]) -> [f64; 1] {
        [x.chunks(RUN).map(squares).sum()]
    }

    fn factor(&self) -> f64 {
        self.factor
    }

    fn on_cuda(&self) -> Option<Pass<'_>> {
        Some(self.call(&KERNEL))
    }
}

/// Σ x² of each of `count` equal parts of memory of a device, as float64 `[count]` there.
///
/// # Errors
/// As [`crate::kernels::run`].
pub fn squares_of_parts(x: &FlatView, count: usize) -> Result<Tensor> {
    let (squares, sums) = stay::scratch(count, DType::F64, x.device())?;
    let each = x.len() / count.max(1);
    let jobs: Vec<_> = (0..count).map(|i| [x.part(i * each, each)]).collect();
    let places: Vec<_> = (0..count).map(|i| sums.part(i, 1)).collect();
    // Who works on a device has no other memory, whatever place a tensor's own is.
    crate::kernels::dispatch::fold_there(&SumOfSquares { factor: 1.0 }.call(&KERNEL), 1.0, &jobs, &places)?;
    Ok(squares)
}

/// By libtorch.
mod formulas {
    use crate::kernels::libtorch::prelude::*;

    pub(super) fn sum_of_squares(_given: &Given<'_>, values: &mut [Value]) -> Vec<Value> {
        vec![values[0].wide().square().sum()]
    }
}
