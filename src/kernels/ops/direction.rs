//! Elementwise passes of the optimizers with low-rank moments.

#![allow(clippy::inline_always)] // every `apply` must be compiled inside its caller's instruction set

use crate::kernels::cpu::Slot::{self, Read, Write};
use crate::kernels::cpu::{Op, Real};
use crate::kernels::ops::declare::{kernel, ops};
use crate::kernels::ops::lerp::Lerp;

ops! {
    cuda "direction.cuh";

    /// Adam's direction: `m ← β₁m + (1-β₁)γr`, `v ← β₂v + (1-β₂)(γr)²`, `r ← f·m̂ / (√v̂ + ε)`. Operands: r, m, v.
    #[derive(Clone, Debug)]
    pub struct Direction {
        /// Decay rate of the first moment.
        beta1: f64,
        /// Decay rate of the second moment.
        beta2: f64,
        /// Added to the denominator.
        epsilon: f64,
        /// γ, the gradient's factor: sign and unscaling.
        grad_factor: f64,
        /// 1, by which the result is multiplied: the learning rate where a device reads it and f is proportional to it.
        unit: f64 * lr if per_rate,
        ;
        /// `f / (1 - β₁ᵗ)` and `1 / √(1 - β₂ᵗ)` of each job, with the factor f of the result
        /// ([`super::adamw::AdamW::corrections`]).
        corrections: Vec<[f64; 2]> => with,
        /// True if f is proportional to the learning rate.
        per_rate: bool,
    } => {
        direction = Direction [r: update plain, m: update signed, v: update unsigned];
    }

    /// `x ← x - rate·u`, then `x ← (1 - decay)·x`; cautious: the decay acts where `x·u ≥ 0`. Operands: x, u.
    #[derive(Clone, Copy, Debug)]
    pub struct ApplyLate {
        /// Factor of the update.
        rate: f64 * lr,
        /// `lr · weight_decay`.
        decay: f64 * lr,
        /// True if the decay acts only where it points along the update.
        cautious: bool,
    } => {
        apply_late = ApplyLate [x: update param, u: read plain];
    }
}

impl Op<3, 0, 3> for Direction {
    const ORDER: [Slot; 3] = [Write(0), Write(1), Write(2)];

    #[inline(always)]
    fn apply<C: Real>(&self, job: usize, []: [&[C]; 0], [r, m, v]: [&mut [C]; 3]) {
        let (factor, epsilon) = (C::of(self.grad_factor), C::of(self.epsilon));
        let (first, beta2, rest2) = (Lerp::keeping(self.beta1), C::of(self.beta2), C::of(1.0 - self.beta2));
        let [rate, inverse_root] = self.corrections[job].map(C::of);
        for ((r, m), v) in r.iter_mut().zip(m).zip(v) {
            let g = *r * factor;
            *m = first.of(*m, g);
            *v = beta2 * *v + rest2 * (g * g);
            *r = rate * *m / (v.sqrt() * inverse_root + epsilon);
        }
    }
}

impl Op<2, 1, 1> for ApplyLate {
    const ORDER: [Slot; 2] = [Write(0), Read(0)];

    #[inline(always)]
    fn apply<C: Real>(&self, _job: usize, [u]: [&[C]; 1], [x]: [&mut [C]; 1]) {
        let (rate, keep, zero) = (C::of(self.rate), C::of(1.0 - self.decay), C::default());
        for (x, u) in x.iter_mut().zip(u) {
            let y = *x - rate * *u;
            *x = if self.cautious && y * *u < zero { y } else { y * keep };
        }
    }
}

/// By libtorch.
mod formulas {
    use crate::kernels::libtorch::prelude::*;

    pub(super) fn direction(given: &Given<'_>, values: &mut [Value]) -> Vec<Value> {
        let g = &values[0] * given.scalar("grad_factor");
        let beta2 = given.scalar("beta2");
        values[1] = lerp(&given.scalar("beta1"), &values[1], &g);
        values[2] = &beta2 * &values[2] + (1.0 - &beta2) * (&g * &g);
        let [mut rate, inverse_root] = given.corrections(&Known(1.0));
        rate = rate * given.scalar("unit");
        values[0] = rate * &values[1] / (values[2].sqrt() * inverse_root + given.scalar("epsilon"));
        Vec::new()
    }

    pub(super) fn apply_late(given: &Given<'_>, values: &mut [Value]) -> Vec<Value> {
        let u = values[1].clone();
        let y = &values[0] - given.scalar("rate") * &u;
        let kept = &y * (1.0 - given.scalar("decay"));
        values[0] = if given.is("cautious") { (&y * u).below(&Known(0.0)).choose(&y, &kept) } else { kept };
        Vec::new()
    }
}
