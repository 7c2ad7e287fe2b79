//! Conversion of one type to another, and counters.

#![allow(clippy::inline_always)] // every `apply` must be compiled inside its caller's instruction set

use crate::kernels::cpu::{Op, Real};
use crate::kernels::cuda_call::Pass;

/// `y ← factor·x`, from one type to another. Operands: x, y.
#[derive(Clone, Copy, Debug)]
pub struct Convert {
    /// The factor.
    pub factor: f64,
}

impl Op<2> for Convert {
    const WRITES: [bool; 2] = [false, true];

    #[inline(always)]
    fn apply<C: Real>(&self, _job: usize, [x, y]: [&mut [C]; 2]) {
        let factor = C::of(self.factor);
        for (x, y) in x.iter().zip(y) {
            *y = factor * *x;
        }
    }

    fn on_cuda(&self) -> Option<Pass<'_>> {
        Some(Pass::new("convert", [self.factor]))
    }
}

/// `x ← x + 1`. Operand: x.
#[derive(Clone, Copy, Debug)]
pub(in crate::kernels) struct Count;

impl Op<1> for Count {
    const WRITES: [bool; 1] = [true];

    #[inline(always)]
    fn apply<C: Real>(&self, _job: usize, [x]: [&mut [C]; 1]) {
        for x in x.iter_mut() {
            *x = *x + C::of(1.0);
        }
    }

    fn on_cuda(&self) -> Option<Pass<'_>> {
        Some(Pass::new("count", []))
    }
}
