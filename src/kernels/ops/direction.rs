//! Adam's direction on low-rank gradients.

#![allow(clippy::inline_always)] // formulas must be compiled inside their caller's instruction set

use super::declare::{kernel, operation};
use super::lerp::Lerp;
use crate::kernels::formula::{Num, Own, corrections};
use crate::kernels::op::{Declared, Formula, Kernel};

operation! {
    /// Adam's direction: `m ← β₁m + (1-β₁)γr`, `v ← β₂v + (1-β₂)(γr)²`, `r ← f·m̂ / (√v̂ + ε)`. Operands: r, m, v.
    #[derive(Clone, Debug)]
    pub struct Direction as DirectionScalars {
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
    }
}

pub(in crate::kernels) const DECLARED: Declared = &[Direction::KERNEL];

impl Formula<3, 0, 3> for Direction {
    const KERNEL: &'static Kernel = kernel!(Elementwise direction = Direction
        [r: update plain, m: update signed, v: update unsigned]);
    type Constants<V: Num> = (Lerp<V>, [V; 6]);

    #[inline(always)]
    fn constants<V: Num>(s: DirectionScalars<V::Wide>, own: &Own<V::Wide>) -> Self::Constants<V> {
        let [rate, root] = corrections(own, [s.beta1, s.beta2], s.unit);
        let numbers = [s.grad_factor, s.beta2, V::Wide::of(1.0) - s.beta2, rate, root, s.epsilon];
        (Lerp::keeping(s.beta1), numbers.map(V::narrow))
    }

    #[inline(always)]
    fn update<V: Num>(
        (first, [factor, beta2, rest2, rate, root, epsilon]): &Self::Constants<V>,
        [r, m, v]: &mut [V; 3],
    ) -> [[V; 2]; 0] {
        let g = *factor * *r;
        *m = first.of(*m, g);
        *v = *beta2 * *v + *rest2 * (g * g);
        *r = *rate * *m / (v.sqrt() * *root + *epsilon);
        []
    }
}
