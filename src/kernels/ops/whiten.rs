//! Elementwise passes of the optimizers that work in an eigenbasis.

#![allow(clippy::inline_always)] // formulas must be compiled inside their caller's instruction set

use super::declare::{kernel, operation};
use super::lerp::weights;
use crate::kernels::formula::{Num, Own};
use crate::kernels::op::{Declared, Formula, Kernel};

operation! {
    /// `v ← β₂v + (1-β₂)y²`, `n ← f·n / (√v + ε)`. Operands: n, y, v.
    #[derive(Clone, Debug)]
    pub struct Whiten as WhitenScalars {
        /// Decay rate of the second moment.
        beta2: f64,
        /// Added to the denominator.
        epsilon: f64,
        ;
        /// Of each job the factor f of the result, and 1.
        factors: Vec<[f64; 2]> => with,
    }
}

operation! {
    /// `v ← β₂v + (1-β₂)y²`, `y ← y / √max(v, ε²)`. Operands: y, v.
    #[derive(Clone, Copy, Debug)]
    pub struct Temper as TemperScalars {
        /// Decay rate of the second moment.
        beta2: f64,
        /// The least second moment, ε².
        least: f64,
    }
}

operation! {
    /// `v ← β₂v + (1-β₂)y²`, `y ← y / max(v, ε²)^p`. Operands: y, v.
    #[derive(Clone, Copy, Debug)]
    pub struct TemperTo as TemperToScalars {
        /// Decay rate of the second moment.
        beta2: f64,
        /// The least second moment, ε².
        least: f64,
        /// The exponent p.
        power: f64,
    }
}

pub(in crate::kernels) const DECLARED: Declared = &[Whiten::KERNEL, Temper::KERNEL, TemperTo::KERNEL];

/// Updates the second moment; returns it, no less than `least`. NaN stays: the comparison is false for it.
#[inline(always)]
fn moment<V: Num>([beta2, rest2]: [V; 2], least: V, y: V, v: &mut V) -> V {
    *v = beta2 * *v + rest2 * (y * y);
    V::select(v.lt(least), least, *v)
}

impl Formula<3, 1, 2> for Whiten {
    const KERNEL: &'static Kernel = kernel!(Elementwise whiten = Whiten
        [n: update plain, y: read plain, v: update unsigned]);
    type Constants<V: Num> = ([V; 2], V, V);

    #[inline(always)]
    fn constants<V: Num>(s: WhitenScalars<V::Wide>, own: &Own<V::Wide>) -> Self::Constants<V> {
        (weights::<V>(s.beta2), V::narrow(s.epsilon), V::narrow(own.factors[0]))
    }

    #[inline(always)]
    fn update<V: Num>(
        ([beta2, rest2], epsilon, factor): &Self::Constants<V>,
        [n, y, v]: &mut [V; 3],
    ) -> [[V; 2]; 0] {
        *v = *beta2 * *v + *rest2 * (*y * *y);
        *n = *factor * *n / (v.sqrt() + *epsilon);
        []
    }
}

impl Formula<2, 0, 2> for Temper {
    const KERNEL: &'static Kernel =
        kernel!(Elementwise temper = Temper [y: update plain, v: update unsigned]);
    type Constants<V: Num> = ([V; 2], V);

    #[inline(always)]
    fn constants<V: Num>(s: TemperScalars<V::Wide>, _: &Own<V::Wide>) -> Self::Constants<V> {
        (weights::<V>(s.beta2), V::narrow(s.least))
    }

    #[inline(always)]
    fn update<V: Num>((weights, least): &Self::Constants<V>, [y, v]: &mut [V; 2]) -> [[V; 2]; 0] {
        *y = *y / moment(*weights, *least, *y, v).sqrt();
        []
    }
}

impl Formula<2, 0, 2> for TemperTo {
    const KERNEL: &'static Kernel =
        kernel!(Elementwise temper_to = TemperTo [y: update plain, v: update unsigned]);
    type Constants<V: Num> = ([V; 2], V, V::Wide);

    #[inline(always)]
    fn constants<V: Num>(s: TemperToScalars<V::Wide>, _: &Own<V::Wide>) -> Self::Constants<V> {
        (weights::<V>(s.beta2), V::narrow(s.least), s.power)
    }

    #[inline(always)]
    fn update<V: Num>((weights, least, power): &Self::Constants<V>, [y, v]: &mut [V; 2]) -> [[V; 2]; 0] {
        *y = *y / moment(*weights, *least, *y, v).powf(*power);
        []
    }
}
