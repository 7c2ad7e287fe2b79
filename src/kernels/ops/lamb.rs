//! The passes of LAMB.

#![allow(clippy::inline_always)] // formulas must be compiled inside their caller's instruction set

use super::declare::{kernel, operation, operation_of};
use super::factors::Factors;
use super::lerp::weights;
use crate::kernels::formula::{Num, Own};
use crate::kernels::op::{Declared, Formula, Kernel};

operation! {
    /// LAMB: `m ← β₁·m + γ·g`, `v ← β₂·v + (1-β₂)·g²`, `u = m̂ / (√v̂ + ε) + λ·x`.
    #[derive(Debug)]
    pub struct Lamb as LambScalars {
        /// β₁.
        beta1: f64,
        /// γ, the gradient's weight in m.
        blend: f64,
        /// β₂.
        beta2: f64,
        /// Added to the denominator.
        epsilon: f64,
        /// λ.
        weight_decay: f64,
        /// True if the decay acts only where it points along the update.
        cautious: bool,
        ;
        /// Of each job `1 / (1 - β₁ᵗ)` and `1 / √(1 - β₂ᵗ)` or ones, the gradient's factor (sign, unscaling, clipping), and by
        /// what u is multiplied in the end.
        factors: Factors<4> => reading,
    }
}

/// Σ x² and Σ u². Operands: x, gradient, m, v. With `STORE` the moments are written: only where they are stored as they
/// are computed, as a step is along what was not rounded.
#[derive(Clone, Copy, Debug)]
pub struct LambNorms<'a, const STORE: bool>(pub &'a Lamb);

pub(in crate::kernels) const DECLARED: Declared = &[
    <Lamb as Formula<4, 1, 3>>::KERNEL,
    <Lamb as Formula<3, 2, 1>>::KERNEL,
    LambNorms::<true>::KERNEL,
    LambNorms::<false>::KERNEL,
];

/// Constants of a job.
#[derive(Clone, Copy, Debug)]
pub struct Constants<V: Num> {
    factor: V,
    beta1: V,
    blend: V,
    second: [V; 2],
    debias: [V; 2],
    epsilon: V,
    decay: V,
    cautious: V::Flag,
    rate: V,
}

impl<V: Num> Constants<V> {
    #[inline(always)]
    fn new(s: LambScalars<V::Wide>, own: &Own<V::Wide>) -> Self {
        let [first, second, factor, rate, _] = own.live;
        Self {
            factor: V::narrow(factor),
            beta1: V::narrow(s.beta1),
            blend: V::narrow(s.blend),
            second: weights(s.beta2),
            debias: [first, second].map(V::narrow),
            epsilon: V::narrow(s.epsilon),
            decay: V::narrow(s.weight_decay),
            cautious: s.cautious,
            rate: V::narrow(rate),
        }
    }

    /// Updates both moments; returns the direction along them.
    #[inline(always)]
    fn next(&self, [x, g, m, v]: &mut [V; 4]) -> V {
        let (g, [beta2, rest2]) = (self.factor * *g, self.second);
        *m = self.beta1 * *m + self.blend * g;
        *v = beta2 * *v + rest2 * (g * g);
        self.along(*x, *m, *v)
    }

    /// The direction along moments.
    #[inline(always)]
    fn along(&self, x: V, m: V, v: V) -> V {
        let [first, second] = self.debias;
        let adam = m * first / (v.sqrt() * second + self.epsilon);
        let opposes = V::both(self.cautious, (x * adam).lt(V::of(0.0)));
        V::select(opposes, adam, adam + self.decay * x)
    }
}

/// The moments, and `x ← x - rate·u`. Operands: x, gradient, m, v.
impl Formula<4, 1, 3> for Lamb {
    const KERNEL: &'static Kernel = kernel!(Elementwise lamb = Lamb
        [x: update param, g: read plain, m: update signed, v: update unsigned]);
    type Constants<V: Num> = Constants<V>;

    #[inline(always)]
    fn constants<V: Num>(s: LambScalars<V::Wide>, own: &Own<V::Wide>) -> Constants<V> {
        Constants::new(s, own)
    }

    #[inline(always)]
    fn update<V: Num>(k: &Constants<V>, x: &mut [V; 4]) -> [[V; 2]; 0] {
        let u = k.next(x);
        x[0] = x[0] - k.rate * u;
        []
    }
}

/// `x ← x - rate·u` along moments that are written. Operands: x, m, v.
impl Formula<3, 2, 1> for Lamb {
    const KERNEL: &'static Kernel = kernel!(Elementwise lamb_along = LambAlong
        [x: update param, m: read signed, v: read unsigned]);
    type Constants<V: Num> = Constants<V>;

    #[inline(always)]
    fn constants<V: Num>(s: LambScalars<V::Wide>, own: &Own<V::Wide>) -> Constants<V> {
        Constants::new(s, own)
    }

    #[inline(always)]
    fn update<V: Num>(k: &Constants<V>, [x, m, v]: &mut [V; 3]) -> [[V; 2]; 0] {
        *x = *x - k.rate * k.along(*x, *m, *v);
        []
    }
}

operation_of!([<const STORE: bool>] LambNorms<'_, STORE>: 0 is Lamb as LambScalars);

/// Of parameters that are stored as numbers of their type.
impl Formula<4, 2, 2, 2> for LambNorms<'_, true> {
    const KERNEL: &'static Kernel = kernel!(Sum lamb_norms = LambNormsKept
        [x: read param, g: read plain, m: update plain, v: update plain] 2);
    type Constants<V: Num> = Constants<V>;

    #[inline(always)]
    fn constants<V: Num>(s: LambScalars<V::Wide>, own: &Own<V::Wide>) -> Constants<V> {
        Constants::new(s, own)
    }

    #[inline(always)]
    fn update<V: Num>(k: &Constants<V>, x: &mut [V; 4]) -> [[V; 2]; 2] {
        let u = k.next(x);
        [[x[0]; 2], [u; 2]]
    }
}

impl Formula<4, 4, 0, 2> for LambNorms<'_, false> {
    const KERNEL: &'static Kernel = kernel!(Sum lamb_norms_only = LambNormsOnly
        [x: read param, g: read plain, m: read signed, v: read unsigned] 2);
    type Constants<V: Num> = Constants<V>;

    #[inline(always)]
    fn constants<V: Num>(s: LambScalars<V::Wide>, own: &Own<V::Wide>) -> Constants<V> {
        Constants::new(s, own)
    }

    #[inline(always)]
    fn update<V: Num>(k: &Constants<V>, x: &mut [V; 4]) -> [[V; 2]; 2] {
        let u = k.next(x);
        [[x[0]; 2], [u; 2]]
    }
}
