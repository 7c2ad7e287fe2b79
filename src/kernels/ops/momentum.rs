//! Momentum: its update, the look ahead, and what is taken out of it.

#![allow(clippy::inline_always)] // formulas must be compiled inside their caller's instruction set

use super::declare::{kernel, operation};
use crate::kernels::formula::{Num, Own};
use crate::kernels::op::{Declared, Formula, Kernel};

operation! {
    /// `m ← β·m + γ·g`, then `u ← β·m + γ·g` (nesterov) or `u ← m`. Operands: gradient, momentum[, u].
    #[derive(Clone, Copy, Debug)]
    pub struct Momentum as MomentumScalars {
        /// β, the momentum factor.
        mu: f64,
        /// γ, the gradient's factor: sign and unscaling.
        grad_factor: f64,
        /// True if `u` looks one step ahead.
        nesterov: bool,
    }
}

operation! {
    /// `u ← m + γ·g`, m as it was. Operands: gradient, momentum, u.
    #[derive(Clone, Copy, Debug)]
    pub struct Accumulate as AccumulateScalars {
        /// γ, the gradient's factor: sign and unscaling.
        grad_factor: f64,
    }
}

operation! {
    /// `u ← m`, then `m ← keep·m`. Operands: m, u.
    #[derive(Clone, Copy, Debug)]
    pub struct Release as ReleaseScalars {
        /// Share of m that is left.
        keep: f64,
    }
}

pub(in crate::kernels) const DECLARED: Declared = &[
    <Momentum as Formula<3, 1, 2>>::KERNEL,
    <Momentum as Formula<2, 1, 1>>::KERNEL,
    Accumulate::KERNEL,
    Release::KERNEL,
];

impl Formula<3, 1, 2> for Momentum {
    const KERNEL: &'static Kernel = kernel!(Elementwise momentum = Momentum
        [g: read plain, m: update signed, u: write plain]);
    type Constants<V: Num> = (V, V, V::Flag);

    #[inline(always)]
    fn constants<V: Num>(s: MomentumScalars<V::Wide>, _: &Own<V::Wide>) -> Self::Constants<V> {
        (V::narrow(s.mu), V::narrow(s.grad_factor), s.nesterov)
    }

    #[inline(always)]
    fn update<V: Num>((mu, factor, nesterov): &Self::Constants<V>, [g, m, u]: &mut [V; 3]) -> [[V; 2]; 0] {
        let g = *factor * *g;
        *m = *mu * *m + g;
        *u = V::select(*nesterov, *mu * *m + g, *m);
        []
    }
}

/// `m ← β·m + γ·g` alone.
impl Formula<2, 1, 1> for Momentum {
    const KERNEL: &'static Kernel =
        kernel!(Elementwise momentum_alone = MomentumAlone [g: read plain, m: update signed]);
    type Constants<V: Num> = [V; 2];

    #[inline(always)]
    fn constants<V: Num>(s: MomentumScalars<V::Wide>, _: &Own<V::Wide>) -> [V; 2] {
        [s.mu, s.grad_factor].map(V::narrow)
    }

    #[inline(always)]
    fn update<V: Num>([mu, factor]: &[V; 2], [g, m]: &mut [V; 2]) -> [[V; 2]; 0] {
        *m = *mu * *m + *factor * *g;
        []
    }
}

impl Formula<3, 2, 1> for Accumulate {
    const KERNEL: &'static Kernel = kernel!(Elementwise accumulate = Accumulate
        [g: read plain, m: read signed, u: write plain]);
    type Constants<V: Num> = V;

    #[inline(always)]
    fn constants<V: Num>(s: AccumulateScalars<V::Wide>, _: &Own<V::Wide>) -> V {
        V::narrow(s.grad_factor)
    }

    #[inline(always)]
    fn update<V: Num>(factor: &V, [g, m, u]: &mut [V; 3]) -> [[V; 2]; 0] {
        *u = *m + *factor * *g;
        []
    }
}

impl Formula<2, 0, 2> for Release {
    const KERNEL: &'static Kernel = kernel!(Elementwise release = Release [m: update signed, u: write plain]);
    type Constants<V: Num> = V;

    #[inline(always)]
    fn constants<V: Num>(s: ReleaseScalars<V::Wide>, _: &Own<V::Wide>) -> V {
        V::narrow(s.keep)
    }

    #[inline(always)]
    fn update<V: Num>(keep: &V, [m, u]: &mut [V; 2]) -> [[V; 2]; 0] {
        *u = *m;
        *m = *keep * *m;
        []
    }
}
