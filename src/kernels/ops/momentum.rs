//! Momentum: its update, the look ahead, and what is taken out of it.

#![allow(clippy::inline_always)] // every `apply` must be compiled inside its caller's instruction set

use crate::kernels::cpu::Slot::{self, Read, Write};
use crate::kernels::cpu::{Op, Real};
use crate::kernels::ops::declare::{kernel, ops};

ops! {
    cuda "momentum.cuh";

    /// `m ← β·m + γ·g`, then `u ← β·m + γ·g` (nesterov) or `u ← m`. Operands: gradient, momentum, u.
    #[derive(Clone, Copy, Debug)]
    pub struct Momentum {
        /// β, the momentum factor.
        mu: f64,
        /// γ, the gradient's factor: sign and unscaling.
        grad_factor: f64,
        /// True if `u` looks one step ahead.
        nesterov: bool,
    } => {
        momentum = Momentum [g: read plain, m: update signed, u: write plain];
        momentum_alone = MomentumAlone [g: read plain, m: update signed];
    }

    /// `u ← m + γ·g`, m as it was. Operands: gradient, momentum, u.
    #[derive(Clone, Copy, Debug)]
    pub struct Accumulate {
        /// γ, the gradient's factor: sign and unscaling.
        grad_factor: f64,
    } => {
        accumulate = Accumulate [g: read plain, m: read signed, u: write plain];
    }

    /// `u ← m`, then `m ← keep·m`. Operands: m, u.
    #[derive(Clone, Copy, Debug)]
    pub struct Release {
        /// Share of m that is left.
        keep: f64,
    } => {
        release = Release [m: update signed, u: write plain];
    }
}

impl Op<3, 1, 2> for Momentum {
    const ORDER: [Slot; 3] = [Read(0), Write(0), Write(1)];

    #[inline(always)]
    fn apply<C: Real>(&self, _job: usize, [g]: [&[C]; 1], [m, u]: [&mut [C]; 2]) {
        let (mu, factor) = (C::of(self.mu), C::of(self.grad_factor));
        if self.nesterov {
            for ((g, m), u) in g.iter().zip(m).zip(u) {
                let new = mu * *m + factor * *g;
                *m = new;
                *u = mu * new + factor * *g;
            }
        } else {
            for ((g, m), u) in g.iter().zip(m).zip(u) {
                let new = mu * *m + factor * *g;
                *m = new;
                *u = new;
            }
        }
    }
}

/// `m ← β·m + γ·g` without a second output. Operands: gradient, momentum.
impl Op<2, 1, 1> for Momentum {
    const ORDER: [Slot; 2] = [Read(0), Write(0)];

    #[inline(always)]
    fn apply<C: Real>(&self, _job: usize, [g]: [&[C]; 1], [m]: [&mut [C]; 1]) {
        let (mu, factor) = (C::of(self.mu), C::of(self.grad_factor));
        for (g, m) in g.iter().zip(m) {
            *m = mu * *m + factor * *g;
        }
    }
}

impl Op<3, 2, 1> for Accumulate {
    const ORDER: [Slot; 3] = [Read(0), Read(1), Write(0)];

    #[inline(always)]
    fn apply<C: Real>(&self, _job: usize, [g, m]: [&[C]; 2], [u]: [&mut [C]; 1]) {
        let factor = C::of(self.grad_factor);
        for ((g, m), u) in g.iter().zip(m).zip(u) {
            *u = *m + factor * *g;
        }
    }
}

impl Op<2, 0, 2> for Release {
    const ORDER: [Slot; 2] = [Write(0), Write(1)];

    #[inline(always)]
    fn apply<C: Real>(&self, _job: usize, []: [&[C]; 0], [m, u]: [&mut [C]; 2]) {
        let keep = C::of(self.keep);
        for (m, u) in m.iter_mut().zip(u) {
            *u = *m;
            *m = keep * *m;
        }
    }
}

pub(super) use formulas::momentum as momentum_formula;

/// By libtorch.
mod formulas {
    use crate::kernels::libtorch::prelude::*;

    pub(in crate::kernels::ops) fn momentum(given: &Given<'_>, values: &mut [Value]) -> Vec<Value> {
        let (mu, g) = (given.scalar("mu"), given.scalar("grad_factor") * &values[0]);
        values[1] = &mu * &values[1] + &g;
        values[2] = if given.is("nesterov") { mu * &values[1] + g } else { values[1].clone() };
        Vec::new()
    }

    pub(super) fn momentum_alone(given: &Given<'_>, values: &mut [Value]) -> Vec<Value> {
        values[1] = given.scalar("mu") * &values[1] + given.scalar("grad_factor") * &values[0];
        Vec::new()
    }

    pub(super) fn accumulate(given: &Given<'_>, values: &mut [Value]) -> Vec<Value> {
        values[2] = &values[1] + given.scalar("grad_factor") * &values[0];
        Vec::new()
    }

    pub(super) fn release(given: &Given<'_>, values: &mut [Value]) -> Vec<Value> {
        values[1] = values[0].copied();
        values[0] = given.scalar("keep") * &values[0];
        Vec::new()
    }
}
