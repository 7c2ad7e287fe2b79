//! Elementwise passes of the optimizers with low-rank moments.

#![allow(clippy::inline_always)] // every `apply` must be compiled inside its caller's instruction set

use super::super::pass::{Pass, flag};
use super::{Op, Real};

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
    /// f, the factor of the result.
    pub factor: f64,
    /// Steps taken by each job's parameter, this one included.
    pub steps: Vec<f64>,
}

impl Op<3> for Direction {
    const WRITES: [bool; 3] = [true; 3];

    #[inline(always)]
    fn apply<C: Real>(&self, job: usize, [r, m, v]: [&mut [C]; 3]) {
        let (factor, epsilon) = (C::of(self.grad_factor), C::of(self.epsilon));
        let (beta2, rest1, rest2) = (C::of(self.beta2), C::of(1.0 - self.beta1), C::of(1.0 - self.beta2));
        let step = self.steps[job];
        let rate = C::of(self.factor / (1.0 - self.beta1.powf(step)));
        let inverse_root = C::of(1.0 / (1.0 - self.beta2.powf(step)).sqrt());
        for ((r, m), v) in r.iter_mut().zip(m).zip(v) {
            let g = *r * factor;
            *m = *m + rest1 * (g - *m);
            *v = beta2 * *v + rest2 * (g * g);
            *r = rate * *m / (v.sqrt() * inverse_root + epsilon);
        }
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
        Some(Pass::new("apply_late", [self.rate, self.decay, flag(self.cautious)]))
    }
}
