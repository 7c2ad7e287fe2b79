//! The update of `ClassName`.

#![allow(clippy::inline_always)] // formulas must be compiled inside their caller's instruction set

use super::apply::Rule;
use super::declare::{kernel, operation};
use crate::kernels::formula::{Num, Own};
use crate::kernels::op::{Declared, Formula, Kernel};

operation! {
    /// `m ← μ·m + g`, decay, `x ← x - lr·m`. Operands: x, gradient, m.
    #[derive(Clone, Copy, Debug)]
    pub struct RustType as RustTypeScalars {
        /// `lr`.
        lr: f64 * lr,
        /// μ, the momentum factor.
        mu: f64,
        /// `lr · weight_decay`.
        decay: f64 * lr,
        /// True if the decay acts only where `x·m ≥ 0`.
        cautious: bool,
        /// The gradient's factor: sign and unscaling.
        grad_factor: f64,
    }
}

pub(in crate::kernels) const DECLARED: Declared = &[RustType::KERNEL];

impl Formula<3, 1, 2> for RustType {
    const KERNEL: &'static Kernel = kernel!(Elementwise optimizer_name = RustType
        [x: update param, g: read plain, m: update signed]);
    type Constants<V: Num> = ([V; 3], Rule<V>);

    #[inline(always)]
    fn constants<V: Num>(s: RustTypeScalars<V::Wide>, _: &Own<V::Wide>) -> Self::Constants<V> {
        ([s.lr, s.mu, s.grad_factor].map(V::narrow), Rule::new(s.decay, s.cautious))
    }

    #[inline(always)]
    #[allow(clippy::many_single_char_names)] // as the equation has them
    fn update<V: Num>(([lr, mu, factor], rule): &Self::Constants<V>, [x, g, m]: &mut [V; 3]) -> [[V; 2]; 0] {
        *m = *mu * *m + *factor * *g;
        *x = rule.apply(*x, *m, *lr * *m);
        []
    }
}
