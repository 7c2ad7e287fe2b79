//! The update of `Lion`.

#![allow(clippy::inline_always)] // formulas must be compiled inside their caller's instruction set

use super::apply::Rule;
use super::declare::{kernel, operation};
use crate::kernels::formula::{Num, Own};
use crate::kernels::op::{Declared, Formula, Kernel};

operation! {
    /// Lion: `u = sign(β₁·m + (1-β₁)·g)`, `m ← β₂·m + (1-β₂)·g`, decay, `x ← x - lr·u`. Operands: x, gradient, m.
    #[derive(Clone, Copy, Debug)]
    pub struct Lion as LionScalars {
        /// `lr`.
        lr: f64 * lr,
        /// Weight of the momentum in the direction.
        beta1: f64,
        /// Decay rate of the momentum.
        beta2: f64,
        /// `lr · weight_decay`.
        decay: f64 * lr,
        /// True if the decay acts only where `x·u ≥ 0`.
        cautious: bool,
        /// The gradient's factor: sign and unscaling.
        grad_factor: f64,
    }
}

pub(in crate::kernels) const DECLARED: Declared = &[Lion::KERNEL];

impl Formula<3, 1, 2> for Lion {
    const KERNEL: &'static Kernel = kernel!(Elementwise lion = Lion
        [x: update param, g: read plain, m: update signed]);
    type Constants<V: Num> = ([V; 6], Rule<V>);

    #[inline(always)]
    fn constants<V: Num>(s: LionScalars<V::Wide>, _: &Own<V::Wide>) -> Self::Constants<V> {
        let one = V::Wide::of(1.0);
        let numbers = [s.lr, s.grad_factor, s.beta1, one - s.beta1, s.beta2, one - s.beta2];
        (numbers.map(V::narrow), Rule::new(s.decay, s.cautious))
    }

    #[inline(always)]
    fn update<V: Num>(
        ([lr, factor, beta1, rest1, beta2, rest2], rule): &Self::Constants<V>,
        [x, g, m]: &mut [V; 3],
    ) -> [[V; 2]; 0] {
        let (g, zero) = (*factor * *g, V::of(0.0));
        let blend = *beta1 * *m + *rest1 * g;
        *m = *beta2 * *m + *rest2 * g;
        // As torch.sign, 0 for NaN.
        let step = V::select(zero.lt(blend), *lr, V::select(blend.lt(zero), -*lr, zero));
        *x = rule.apply(*x, blend, step);
        []
    }
}
