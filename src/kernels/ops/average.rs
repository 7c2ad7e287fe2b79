//! Averages of weights.

#![allow(clippy::inline_always)] // formulas must be compiled inside their caller's instruction set

use super::declare::{kernel, operation};
use super::lerp::Lerp;
use crate::kernels::formula::{Num, Own};
use crate::kernels::op::{Declared, Formula, Kernel};

operation! {
    /// `e ← (1 - c)·e + c·x`, exactly x for c = 1. Operands: x, e, which may be rounded at random; so may x, whose
    /// numbers are only read.
    #[derive(Clone, Copy, Debug)]
    pub struct Average as AverageScalars {
        /// The share c of what is new.
        share: f64,
    }
}

operation! {
    /// Maps `y = (1 - b)·z + b·x` and z to `z - decay·y` and x. Operands: y, z. One of them may be rounded stochastically.
    #[derive(Clone, Copy, Debug)]
    pub struct ScheduleFreeBegin as ScheduleFreeBeginScalars {
        /// The share b of the average x in y.
        beta: f64,
        /// `lr · weight_decay` of a decay along y.
        decay: f64 * lr,
    }
}

operation! {
    /// Computes `x ← (1 - c)·x + c·z`, then maps z and x to `y = (1 - b)·z + b·x` and z. Operands: z, x. One of them may be
    /// rounded stochastically.
    #[derive(Clone, Copy, Debug)]
    pub struct ScheduleFreeEnd as ScheduleFreeEndScalars {
        /// The share b of the average x in y.
        beta: f64,
        /// The share c of what is new.
        share: f64,
    }
}

pub(in crate::kernels) const DECLARED: Declared =
    &[Average::KERNEL, ScheduleFreeBegin::KERNEL, ScheduleFreeEnd::KERNEL];

impl Formula<2, 1, 1> for Average {
    const KERNEL: &'static Kernel = kernel!(Elementwise average = Average [x: read param, e: update param]);
    type Constants<V: Num> = Lerp<V>;

    #[inline(always)]
    fn constants<V: Num>(s: AverageScalars<V::Wide>, _: &Own<V::Wide>) -> Lerp<V> {
        Lerp::adding(s.share)
    }

    #[inline(always)]
    fn update<V: Num>(mean: &Lerp<V>, [x, e]: &mut [V; 2]) -> [[V; 2]; 0] {
        *e = mean.of(*e, *x);
        []
    }
}

impl Formula<2, 0, 2> for ScheduleFreeBegin {
    const KERNEL: &'static Kernel =
        kernel!(Elementwise schedule_free_begin = ScheduleFreeBegin [y: update param, z: update param]);
    type Constants<V: Num> = [V; 3];

    #[inline(always)]
    fn constants<V: Num>(s: ScheduleFreeBeginScalars<V::Wide>, _: &Own<V::Wide>) -> [V; 3] {
        [s.beta, V::Wide::of(1.0) - s.beta, s.decay].map(V::narrow)
    }

    #[inline(always)]
    fn update<V: Num>([beta, rest, decay]: &[V; 3], yz: &mut [V; 2]) -> [[V; 2]; 0] {
        let [y, z] = *yz;
        *yz = [z - *decay * y, (y - *rest * z) / *beta];
        []
    }
}

impl Formula<2, 0, 2> for ScheduleFreeEnd {
    const KERNEL: &'static Kernel =
        kernel!(Elementwise schedule_free_end = ScheduleFreeEnd [z: update param, x: update param]);
    type Constants<V: Num> = [Lerp<V>; 2];

    #[inline(always)]
    fn constants<V: Num>(s: ScheduleFreeEndScalars<V::Wide>, _: &Own<V::Wide>) -> [Lerp<V>; 2] {
        [s.share, s.beta].map(Lerp::adding)
    }

    #[inline(always)]
    fn update<V: Num>([mean, between]: &[Lerp<V>; 2], zx: &mut [V; 2]) -> [[V; 2]; 0] {
        let [z, x] = *zx;
        *zx = [between.of(z, mean.of(x, z)), z];
        []
    }
}
