//! Elementwise passes of the optimizers with low-rank moments.

#![allow(clippy::inline_always)] // every `apply` must be compiled inside its caller's instruction set

use crate::kernels::cpu::{Op, Real};
use crate::kernels::cuda_call::{Pass, flag};

/// Adam's direction: `m ← β₁m + (1-β₁)γr`, `v ← β₂v + (1-β₂)(γr)²`, `r ← f·m̂ / (√v̂ + ε)`. Operands: r, m, v.
#[derive(Clone, Debug)]
pub struct Direction {
    /// Decay rate of the first moment.
    pub beta1: f64,
    /// Decay rate of the second moment.
    pub beta2: f64,
    /// Added to the denominator.
    pub epsilon: f64,
    /// γ, the gradient's factor: sign and unscaling.
    pub grad_factor: f64,
    /// `f / (1 - β₁ᵗ)` and `1 / √(1 - β₂ᵗ)` of each job, with the factor f of the result
    /// ([`super::elementwise::AdamW::corrections`]).
    pub corrections: Vec<[f64; 2]>,
    /// Whether f is proportional to the learning rate.
    pub per_rate: bool,
}

impl Op<3> for Direction {
    const WRITES: [bool; 3] = [true; 3];

    #[inline(always)]
    fn apply<C: Real>(&self, job: usize, [r, m, v]: [&mut [C]; 3]) {
        let (factor, epsilon) = (C::of(self.grad_factor), C::of(self.epsilon));
        let (beta2, rest1, rest2) = (C::of(self.beta2), C::of(1.0 - self.beta1), C::of(1.0 - self.beta2));
        let [rate, inverse_root] = self.corrections[job].map(C::of);
        for ((r, m), v) in r.iter_mut().zip(m).zip(v) {
            let g = *r * factor;
            *m = *m + rest1 * (g - *m);
            *v = beta2 * *v + rest2 * (g * g);
            *r = rate * *m / (v.sqrt() * inverse_root + epsilon);
        }
    }

    fn on_cuda(&self) -> Option<Pass<'_>> {
        let scalars = [self.beta1, self.beta2, self.epsilon, self.grad_factor, 1.0];
        let per_rate = if self.per_rate { 0b10000 } else { 0 };
        Some(Pass::new("direction", scalars).per_rate(per_rate).with(&self.corrections))
    }
}

/// `x ← x - rate·u`, then `x ← (1 - decay)·x`; cautious: the decay acts where `x·u ≥ 0`. Operands: x, u.
#[derive(Clone, Copy, Debug)]
pub struct ApplyLate {
    /// Factor of the update.
    pub rate: f64,
    /// `lr · weight_decay`.
    pub decay: f64,
    /// Whether the decay acts only where it points along the update.
    pub cautious: bool,
}

impl Op<2> for ApplyLate {
    const WRITES: [bool; 2] = [true, false];

    #[inline(always)]
    fn apply<C: Real>(&self, _job: usize, [x, u]: [&mut [C]; 2]) {
        let (rate, keep, zero) = (C::of(self.rate), C::of(1.0 - self.decay), C::default());
        for (x, u) in x.iter_mut().zip(u) {
            let y = *x - rate * *u;
            *x = if self.cautious && y * *u < zero { y } else { y * keep };
        }
    }

    fn on_cuda(&self) -> Option<Pass<'_>> {
        Some(Pass::new("apply_late", [self.rate, self.decay, flag(self.cautious)]).per_rate(0b011))
    }
}
