//! Updates of parameters and their decay.

#![allow(clippy::inline_always)] // formulas must be compiled inside their caller's instruction set

use super::declare::{kernel, operation};
use crate::kernels::formula::{Num, Own};
use crate::kernels::op::{Declared, Formula, Kernel};

/// The rule by which every update ends: `x ← (1 - decay)·x - step`, or late `x ← (1 - decay)·(x - step)`; cautious: the decay
/// acts where the update's direction does not oppose the weight that it is about to shrink.
#[derive(Clone, Copy, Debug)]
pub struct Rule<V: Num> {
    /// `1 - decay`, or the decay where it is subtracted.
    by: V,
    is_subtracted: bool,
    cautious: V::Flag,
    late: V::Flag,
}

impl<V: Num> Rule<V> {
    /// With `lr · weight_decay`, before the update.
    #[inline(always)]
    pub(in crate::kernels) fn new(decay: V::Wide, cautious: V::Flag) -> Self {
        let by = V::narrow(V::Wide::of(1.0) - decay);
        Self { by, is_subtracted: false, cautious, late: V::never() }
    }

    /// The same with `decay·x` subtracted, for rates of 1e-6: float32 rounds `1 - decay` by 3 percent of such a decay.
    #[inline(always)]
    pub(in crate::kernels) fn subtracting(decay: V::Wide, cautious: V::Flag) -> Self {
        Self { by: V::narrow(decay), is_subtracted: true, cautious, late: V::never() }
    }

    /// The same after the update, if the flag says so.
    #[inline(always)]
    pub(in crate::kernels) fn late(self, late: V::Flag) -> Self {
        Self { late, ..self }
    }

    /// The new weight, with a step that has the sign of `along`.
    #[inline(always)]
    pub(in crate::kernels) fn apply(&self, x: V, along: V, step: V) -> V {
        let moved = V::select(self.late, x - step, x);
        let opposes = (along * moved).lt(V::of(0.0));
        let less = if self.is_subtracted { moved - self.by * moved } else { moved * self.by };
        let kept = V::select(V::both(self.cautious, opposes), moved, less);
        V::select(self.late, kept, kept - step)
    }
}

operation! {
    /// `x ← (1 - decay)·x - rate·u`, by the [`Rule`]. Operands: x, u.
    #[derive(Clone, Copy, Debug)]
    pub struct Apply as ApplyScalars {
        /// Factor of the update.
        rate: f64 * lr,
        /// `lr · weight_decay`.
        decay: f64 * lr,
        /// True if the decay acts only where it points along the update.
        cautious: bool,
        /// True if the decay comes after the update.
        late: bool,
    }
}

operation! {
    /// `x ← (1 - decay)·x`. Operand: x.
    #[derive(Clone, Copy, Debug)]
    pub struct Decay as DecayScalars {
        /// `lr · weight_decay`, or another.
        decay: f64 * lr if per_rate,
        ;
        /// True if the decay is proportional to the learning rate.
        per_rate: bool,
    }
}

pub(in crate::kernels) const DECLARED: Declared = &[Apply::KERNEL, Decay::KERNEL];

impl Formula<2, 1, 1> for Apply {
    const KERNEL: &'static Kernel = kernel!(Elementwise apply = Apply [x: update param, u: read plain]);
    type Constants<V: Num> = (V, Rule<V>);

    #[inline(always)]
    fn constants<V: Num>(s: ApplyScalars<V::Wide>, _: &Own<V::Wide>) -> (V, Rule<V>) {
        (V::narrow(s.rate), Rule::new(s.decay, s.cautious).late(s.late))
    }

    #[inline(always)]
    fn update<V: Num>((rate, rule): &(V, Rule<V>), [x, u]: &mut [V; 2]) -> [[V; 2]; 0] {
        *x = rule.apply(*x, *u, *rate * *u);
        []
    }
}

impl Formula<1, 0, 1> for Decay {
    const KERNEL: &'static Kernel = kernel!(Elementwise decay = Decay [x: update param]);
    type Constants<V: Num> = V;

    #[inline(always)]
    fn constants<V: Num>(s: DecayScalars<V::Wide>, _: &Own<V::Wide>) -> V {
        V::narrow(V::Wide::of(1.0) - s.decay)
    }

    #[inline(always)]
    fn update<V: Num>(keep: &V, [x]: &mut [V; 1]) -> [[V; 2]; 0] {
        *x = *x * *keep;
        []
    }
}
