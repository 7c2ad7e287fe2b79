//! The sum of squares.

#![allow(clippy::inline_always)] // formulas must be compiled inside their caller's instruction set

use tch::Tensor;

use super::declare::{kernel, operation};
use crate::error::Result;
use crate::kernels::backend;
use crate::kernels::formula::{Num, Own};
use crate::kernels::op::{Declared, Formula, Kernel, Operation as _};
use crate::tensor::{DType, FlatView};

operation! {
    /// Σ (factor·x)². Operand: x.
    #[derive(Clone, Copy, Debug)]
    pub struct SumOfSquares as SumOfSquaresScalars {
        ;
        /// The factor.
        factor: f64,
    }
}

pub(in crate::kernels) const DECLARED: Declared = &[SumOfSquares::KERNEL];

impl Formula<1, 1, 0, 1> for SumOfSquares {
    const KERNEL: &'static Kernel = kernel!(Sum sum_of_squares = SumOfSquares [x: read plain] 1);
    type Constants<V: Num> = ();

    #[inline(always)]
    fn constants<V: Num>(_: SumOfSquaresScalars<V::Wide>, _: &Own<V::Wide>) {}

    #[inline(always)]
    fn update<V: Num>((): &(), [x]: &mut [V; 1]) -> [[V; 2]; 1] {
        [[*x; 2]]
    }

    fn factor(&self) -> f64 {
        self.factor
    }
}

/// Σ x² of each of `count` equal parts of memory of a device, as float64 `[count]` there.
///
/// # Errors
/// As [`crate::kernels::run`].
pub fn squares_of_parts(x: &FlatView, count: usize) -> Result<Tensor> {
    Ok(squares_there(x, count)?.0)
}

/// The same with a view of them.
pub(in crate::kernels) fn squares_there(x: &FlatView, count: usize) -> Result<(Tensor, FlatView<'static>)> {
    let (squares, sums) = backend::scratch(count, DType::F64, x.device())?;
    let each = x.len() / count.max(1);
    let jobs: Vec<_> = (0..count).map(|i| [x.part(i * each, each)]).collect();
    let places: Vec<_> = (0..count).map(|i| sums.part(i, 1)).collect();
    // Who works on a device has no other memory, whatever place a tensor's own is.
    crate::kernels::dispatch::fold_there(
        &SumOfSquares { factor: 1.0 }.call(SumOfSquares::KERNEL),
        1.0,
        &jobs,
        &places,
    )?;
    Ok((squares, sums))
}
