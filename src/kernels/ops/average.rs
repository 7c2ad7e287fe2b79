//! Averages of weights.

#![allow(clippy::inline_always)] // every pass must be compiled inside its caller's instruction set

use crate::kernels::cpu::Slot::{self, Read, Write};
use crate::kernels::cpu::{Op, Real};
use crate::kernels::ops::declare::{kernel, ops};
use crate::kernels::ops::lerp::Lerp;

ops! {
    cuda "average.cuh";

    /// `e ← (1 - c)·e + c·x`, exactly x for c = 1. Operands: x, e, which may be rounded at random; so may x, whose
    /// numbers are only read.
    #[derive(Clone, Copy, Debug)]
    pub struct Average {
        /// The share c of what is new.
        share: f64,
    } => {
        average = Average [x: read param, e: update param];
    }

    /// From `y = (1 - b)·z + b·x` and z to `z - decay·y` and x. Operands: y, z, of which one may be rounded at random.
    #[derive(Clone, Copy, Debug)]
    pub struct TakeApart {
        /// The share b of the average x in y.
        beta: f64,
        /// `lr · weight_decay` of a decay along y.
        decay: f64 * lr,
    } => {
        take_apart = TakeApart [y: update param, z: update param];
    }

    /// `x ← (1 - c)·x + c·z`, then from z and x to `y = (1 - b)·z + b·x` and z. Operands: z, x, of which one may be
    /// rounded at random.
    #[derive(Clone, Copy, Debug)]
    pub struct PutTogether {
        /// The share b of the average x in y.
        beta: f64,
        /// The share c of what is new.
        share: f64,
    } => {
        put_together = PutTogether [z: update param, x: update param];
    }
}

impl Op<2, 1, 1> for Average {
    const ORDER: [Slot; 2] = [Read(0), Write(0)];

    #[inline(always)]
    fn apply<C: Real>(&self, _job: usize, [x]: [&[C]; 1], [e]: [&mut [C]; 1]) {
        let mean = Lerp::<C>::adding(self.share);
        for (x, e) in x.iter().zip(e) {
            *e = mean.of(*e, *x);
        }
    }
}

impl Op<2, 0, 2> for TakeApart {
    const ORDER: [Slot; 2] = [Write(0), Write(1)];

    #[inline(always)]
    fn apply<C: Real>(&self, _job: usize, []: [&[C]; 0], [y, z]: [&mut [C]; 2]) {
        let (beta, rest, decay) = (C::of(self.beta), C::of(1.0 - self.beta), C::of(self.decay));
        for (y, z) in y.iter_mut().zip(z) {
            let x = (*y - rest * *z) / beta;
            *y = *z - decay * *y;
            *z = x;
        }
    }
}

impl Op<2, 0, 2> for PutTogether {
    const ORDER: [Slot; 2] = [Write(0), Write(1)];

    #[inline(always)]
    fn apply<C: Real>(&self, _job: usize, []: [&[C]; 0], [z, x]: [&mut [C]; 2]) {
        let (mean, between) = (Lerp::<C>::adding(self.share), Lerp::<C>::adding(self.beta));
        for (z, x) in z.iter_mut().zip(x) {
            let y = between.of(*z, mean.of(*x, *z));
            (*x, *z) = (*z, y);
        }
    }
}

/// By libtorch.
mod formulas {
    use crate::kernels::libtorch::prelude::*;

    pub(super) fn average(given: &Given<'_>, values: &mut [Value]) -> Vec<Value> {
        values[1] = lerp(&(1.0 - given.scalar("share")), &values[1], &values[0]);
        Vec::new()
    }

    pub(super) fn take_apart(given: &Given<'_>, values: &mut [Value]) -> Vec<Value> {
        let (y, z, beta) = (values[0].clone(), values[1].clone(), given.scalar("beta"));
        values[0] = &z - given.scalar("decay") * &y;
        values[1] = (&y - (1.0 - &beta) * &z) / beta;
        Vec::new()
    }

    pub(super) fn put_together(given: &Given<'_>, values: &mut [Value]) -> Vec<Value> {
        let z = values[0].clone();
        let x = lerp(&(1.0 - given.scalar("share")), &values[1], &z);
        values[0] = lerp(&(1.0 - given.scalar("beta")), &z, &x);
        values[1] = z;
        Vec::new()
    }
}
