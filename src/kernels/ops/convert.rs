//! Conversion of one type to another, and counters.

#![allow(clippy::inline_always)] // every `apply` must be compiled inside its caller's instruction set

use crate::kernels::cpu::{Op, Real};
use crate::kernels::ops::declare::{kernel, ops};

ops! {
    cuda "convert.cuh";

    /// `y ← factor·x`, from one type to another. Operands: x, y.
    #[derive(Clone, Copy, Debug)]
    pub struct Convert {
        /// The factor.
        factor: f64,
    } => {
        convert = Convert [x: read unsigned, y: write signed];
    }

    /// `x ← x + 1`. Operand: x.
    #[derive(Clone, Copy, Debug)]
    pub(in crate::kernels) struct Count {
    } => {
        count = Count [x: update plain];
    }
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
}

impl Op<1> for Count {
    const WRITES: [bool; 1] = [true];

    #[inline(always)]
    fn apply<C: Real>(&self, _job: usize, [x]: [&mut [C]; 1]) {
        for x in x.iter_mut() {
            *x = *x + C::of(1.0);
        }
    }
}
