//! Conversion of one type to another, and counters.

#![allow(clippy::inline_always)] // every `apply` must be compiled inside its caller's instruction set

use crate::kernels::cpu::Slot::{self, Read, Write};
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

impl Op<2, 1, 1> for Convert {
    const ORDER: [Slot; 2] = [Read(0), Write(0)];

    #[inline(always)]
    fn apply<C: Real>(&self, _job: usize, [x]: [&[C]; 1], [y]: [&mut [C]; 1]) {
        let factor = C::of(self.factor);
        for (x, y) in x.iter().zip(y) {
            *y = factor * *x;
        }
    }
}

impl Op<1, 0, 1> for Count {
    const ORDER: [Slot; 1] = [Write(0)];

    #[inline(always)]
    fn apply<C: Real>(&self, _job: usize, []: [&[C]; 0], [x]: [&mut [C]; 1]) {
        for x in x.iter_mut() {
            *x = *x + C::of(1.0);
        }
    }
}

/// By libtorch.
mod formulas {
    use crate::kernels::libtorch::prelude::*;

    pub(super) fn convert(given: &Given<'_>, values: &mut [Value]) -> Vec<Value> {
        values[1] = given.scalar("factor") * &values[0];
        Vec::new()
    }

    pub(super) fn count(_given: &Given<'_>, values: &mut [Value]) -> Vec<Value> {
        values[0] = &values[0] + 1.0;
        Vec::new()
    }
}
