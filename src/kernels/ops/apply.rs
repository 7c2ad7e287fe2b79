//! Updates of parameters and their decay.

#![allow(clippy::inline_always)] // every `apply` must be compiled inside its caller's instruction set

use crate::kernels::cpu::Slot::{self, Read, Write};
use crate::kernels::cpu::{Op, Real};
use crate::kernels::ops::declare::{kernel, ops};

ops! {
    cuda "apply.cuh";

    /// `x ← (1 - decay)·x - rate·u`; cautious: the decay acts where `x·u ≥ 0`. Operands: x, u.
    #[derive(Clone, Copy, Debug)]
    pub struct Apply {
        /// Factor of the update.
        rate: f64 * lr,
        /// `lr · weight_decay`.
        decay: f64 * lr,
        /// True if the decay acts only where it points along the update.
        cautious: bool,
    } => {
        apply = Apply [x: update param, u: read plain];
    }

    /// `x ← (1 - decay)·x`. Operand: x.
    #[derive(Clone, Copy, Debug)]
    pub struct Decay {
        /// `lr · weight_decay`, or another.
        decay: f64 * lr if per_rate,
        ;
        /// True if the decay is proportional to the learning rate.
        per_rate: bool,
    } => {
        decay = Decay [x: update param];
    }
}

impl Op<2, 1, 1> for Apply {
    const ORDER: [Slot; 2] = [Write(0), Read(0)];

    #[inline(always)]
    fn apply<C: Real>(&self, _job: usize, [u]: [&[C]; 1], [x]: [&mut [C]; 1]) {
        let (rate, keep, zero) = (C::of(self.rate), C::of(1.0 - self.decay), C::default());
        if self.cautious && self.decay != 0.0 {
            for (x, u) in x.iter_mut().zip(u) {
                let kept = if *x * *u >= zero { *x * keep } else { *x };
                *x = kept - rate * *u;
            }
        } else {
            for (x, u) in x.iter_mut().zip(u) {
                *x = *x * keep - rate * *u;
            }
        }
    }
}

impl Op<1, 0, 1> for Decay {
    const ORDER: [Slot; 1] = [Write(0)];

    #[inline(always)]
    fn apply<C: Real>(&self, _job: usize, []: [&[C]; 0], [x]: [&mut [C]; 1]) {
        let keep = C::of(1.0 - self.decay);
        for x in x.iter_mut() {
            *x = *x * keep;
        }
    }
}

/// By libtorch.
mod formulas {
    use crate::kernels::libtorch::prelude::*;

    pub(super) fn apply(given: &Given<'_>, values: &mut [Value]) -> Vec<Value> {
        let (x, u) = (values[0].clone(), values[1].clone());
        let kept = &x * (1.0 - given.scalar("decay"));
        let kept = if given.is("cautious") { Known(0.0).at_most(&(&x * &u)).choose(&kept, &x) } else { kept };
        values[0] = kept - given.scalar("rate") * u;
        Vec::new()
    }

    pub(super) fn decay(given: &Given<'_>, values: &mut [Value]) -> Vec<Value> {
        values[0] = &values[0] * (1.0 - given.scalar("decay"));
        Vec::new()
    }
}
