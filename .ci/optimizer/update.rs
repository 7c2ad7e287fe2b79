//! The update of `ClassName`.

#![allow(clippy::inline_always)] // every `apply` must be compiled inside its caller's instruction set

use crate::kernels::cpu::Slot::{self, Read, Write};
use crate::kernels::cpu::{Op, Real};
use crate::kernels::ops::declare::{kernel, ops};

ops! {
    cuda "optimizer_name.cuh" r#"// The update of ClassName.
#pragma once
#include "arithmetic.cuh"

// As src/kernels/ops/optimizer_name.rs has it. Operands: x, g, m.
template <typename C>
struct ClassName : ClassNameOperands {
    C lr, mu, keep, factor;
    bool cautious;

    __device__ ClassName(const ClassNameScalars& s, const Job&)
        : lr(scalar<C>(s.lr())),
          mu(scalar<C>(s.mu())),
          keep(scalar<C>(1.0 - s.decay())),
          factor(scalar<C>(s.grad_factor())),
          cautious(s.cautious() && s.decay() != 0) {}

    __device__ void operator()(C (&x)[3]) const {
        x[2] = mu * x[2] + factor * x[1];
        const C kept = cautious && x[0] * x[2] < C(0) ? x[0] : x[0] * keep;
        x[0] = kept - lr * x[2];
    }
};
"#;

    /// `m ← μ·m + g`, decay, `x ← x - lr·m`. Operands: x, gradient, m.
    #[derive(Clone, Copy, Debug)]
    pub struct ClassName {
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
    } => {
        optimizer_name = ClassName [x: update param, g: read plain, m: update signed];
    }
}

impl Op<3, 1, 2> for ClassName {
    const ORDER: [Slot; 3] = [Write(0), Read(0), Write(1)];

    #[inline(always)]
    fn apply<C: Real>(&self, _job: usize, [g]: [&[C]; 1], [x, m]: [&mut [C]; 2]) {
        let (lr, mu, keep) = (C::of(self.lr), C::of(self.mu), C::of(1.0 - self.decay));
        let factor = C::of(self.grad_factor);
        let cautious = self.cautious && self.decay != 0.0;
        for ((x, g), m) in x.iter_mut().zip(g).zip(m) {
            *m = mu * *m + factor * *g;
            let kept = if cautious && *x * *m < C::default() { *x } else { *x * keep };
            *x = kept - lr * *m;
        }
    }
}

/// By libtorch.
mod formulas {
    use crate::kernels::libtorch::prelude::*;

    pub(super) fn optimizer_name(given: &Given<'_>, values: &mut [Value]) -> Vec<Value> {
        let (x, g) = (values[0].clone(), given.scalar("grad_factor") * &values[1]);
        values[2] = given.scalar("mu") * &values[2] + g;
        let kept = &x * (1.0 - given.scalar("decay"));
        let kept =
            if given.is("cautious") { (&x * &values[2]).below(&Known(0.0)).choose(&x, &kept) } else { kept };
        values[0] = kept - given.scalar("lr") * &values[2];
        Vec::new()
    }
}
