//! The update of `Lion`.

#![allow(clippy::inline_always)] // every `apply` must be compiled inside its caller's instruction set

use crate::kernels::cpu::Slot::{self, Read, Write};
use crate::kernels::cpu::{Op, Real};
use crate::kernels::ops::declare::{kernel, ops};

ops! {
    cuda "lion.cuh";

    /// Lion: `u = sign(β₁·m + (1-β₁)·g)`, `m ← β₂·m + (1-β₂)·g`, decay, `x ← x - lr·u`. Operands: x, gradient, m.
    #[derive(Clone, Copy, Debug)]
    pub struct Lion {
        /// `lr`.
        lr: f64 * lr,
        /// Weight of the momentum in the direction.
        beta1: f64,
        /// Decay rate of the momentum.
        beta2: f64,
        /// `lr · weight_decay`.
        decay: f64 * lr,
        /// True if the decay acts only where `x·u ≥ 0`.
        cautious: bool,
        /// The gradient's factor: sign and unscaling.
        grad_factor: f64,
    } => {
        lion = Lion [x: update param, g: read plain, m: update signed];
    }
}

impl Op<3, 1, 2> for Lion {
    const ORDER: [Slot; 3] = [Write(0), Read(0), Write(1)];

    #[inline(always)]
    fn apply<C: Real>(&self, _job: usize, [g]: [&[C]; 1], [x, m]: [&mut [C]; 2]) {
        let (zero, lr, keep) = (C::default(), C::of(self.lr), C::of(1.0 - self.decay));
        let (beta1, rest1) = (C::of(self.beta1), C::of(1.0 - self.beta1));
        let (beta2, rest2) = (C::of(self.beta2), C::of(1.0 - self.beta2));
        let factor = C::of(self.grad_factor);
        let cautious = self.cautious && self.decay != 0.0;
        for ((x, g), m) in x.iter_mut().zip(g).zip(m) {
            let g = factor * *g;
            let blend = beta1 * *m + rest1 * g;
            // As torch.sign: of what is no number zero.
            let step = if blend > zero {
                lr
            } else if blend < zero {
                -lr
            } else {
                zero
            };
            *m = beta2 * *m + rest2 * g;
            let kept = if cautious && *x * blend < zero { *x } else { *x * keep };
            *x = kept - step;
        }
    }
}

/// By libtorch.
mod formulas {
    use crate::kernels::libtorch::prelude::*;

    pub(super) fn lion(given: &Given<'_>, values: &mut [Value]) -> Vec<Value> {
        let (beta1, beta2) = (given.scalar("beta1"), given.scalar("beta2"));
        let g = given.scalar("grad_factor") * &values[1];
        let (x, m) = (values[0].clone(), values[2].clone());
        let blend = &beta1 * &m + (1.0 - &beta1) * &g;
        values[2] = &beta2 * &m + (1.0 - &beta2) * &g;
        let kept = &x * (1.0 - given.scalar("decay"));
        let kept =
            if given.is("cautious") { (&x * &blend).below(&Known(0.0)).choose(&x, &kept) } else { kept };
        values[0] = kept - given.scalar("lr") * blend.sign();
        Vec::new()
    }
}
