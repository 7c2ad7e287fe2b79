//! Elementwise passes of the optimizers that work in an eigenbasis.

#![allow(clippy::inline_always)] // every `apply` must be compiled inside its caller's instruction set

use crate::kernels::cpu::Slot::{self, Read, Write};
use crate::kernels::cpu::{Op, Real};
use crate::kernels::ops::declare::{kernel, ops};

ops! {
    cuda "whiten.cuh";

    /// `v ← β₂v + (1-β₂)y²`, `n ← f·n / (√v + ε)`. Operands: n, y, v.
    #[derive(Clone, Debug)]
    pub struct Whiten {
        /// Decay rate of the second moment.
        beta2: f64,
        /// Added to the denominator.
        epsilon: f64,
        ;
        /// Of each job the factor f of the result, and 1.
        factors: Vec<[f64; 2]> => with,
    } => {
        whiten = Whiten [n: update plain, y: read plain, v: update unsigned];
    }

    /// `v ← β₂v + (1-β₂)y²`, `y ← y / max(v, ε²)^p`. Operands: y, v.
    #[derive(Clone, Copy, Debug)]
    pub struct Temper {
        /// Decay rate of the second moment.
        beta2: f64,
        /// The least second moment, ε².
        least: f64,
        /// The exponent p.
        power: f64,
    } => {
        temper = Temper [y: update plain, v: update unsigned];
    }
}

impl Op<2, 0, 2> for Temper {
    const ORDER: [Slot; 2] = [Write(0), Write(1)];

    #[inline(always)]
    #[allow(clippy::float_cmp)] // of two exponents the powers are known
    fn apply<C: Real>(&self, _job: usize, []: [&[C]; 0], [y, v]: [&mut [C]; 2]) {
        let (least, beta2, rest2) = (C::of(self.least), C::of(self.beta2), C::of(1.0 - self.beta2));
        for (y, v) in y.iter_mut().zip(v) {
            *v = beta2 * *v + rest2 * (*y * *y);
            // A NaN in v must show: the comparison is false for it.
            let base = if *v < least { least } else { *v };
            if self.power == 0.5 {
                *y = *y / base.sqrt();
            } else if self.power != 0.0 {
                *y = *y / C::of(base.wide().powf(self.power));
            }
        }
    }
}

impl Op<3, 1, 2> for Whiten {
    const ORDER: [Slot; 3] = [Write(0), Read(0), Write(1)];

    #[inline(always)]
    fn apply<C: Real>(&self, job: usize, [y]: [&[C]; 1], [n, v]: [&mut [C]; 2]) {
        let (epsilon, beta2, rest2) = (C::of(self.epsilon), C::of(self.beta2), C::of(1.0 - self.beta2));
        let factor = C::of(self.factors[job][0]);
        for ((n, y), v) in n.iter_mut().zip(y).zip(v) {
            *v = beta2 * *v + rest2 * (*y * *y);
            *n = factor * *n / (v.sqrt() + epsilon);
        }
    }
}

/// By libtorch.
mod formulas {
    use crate::kernels::libtorch::prelude::*;

    pub(super) fn whiten(given: &Given<'_>, values: &mut [Value]) -> Vec<Value> {
        let (beta2, y) = (given.scalar("beta2"), values[1].clone());
        values[2] = &beta2 * &values[2] + (1.0 - &beta2) * (&y * &y);
        values[0] = given.factor(0) * &values[0] / (values[2].sqrt() + given.scalar("epsilon"));
        Vec::new()
    }

    #[expect(clippy::float_cmp, reason = "of one exponent the power is known")]
    pub(super) fn temper(given: &Given<'_>, values: &mut [Value]) -> Vec<Value> {
        let (beta2, least) = (given.scalar("beta2"), given.scalar("least"));
        values[1] = &beta2 * &values[1] + (1.0 - &beta2) * (&values[0] * &values[0]);
        // A NaN in v must show: the comparison is false for it.
        let base = values[1].below(&least).choose(&least, &values[1]);
        if let Known(power) = given.scalar("power") {
            values[0] = &values[0] / if power == 0.5 { base.sqrt() } else { base.to_the(power) };
        }
        Vec::new()
    }
}
