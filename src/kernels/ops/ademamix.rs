//! The update of `AdEMAMix`.

#![allow(clippy::inline_always)] // every `apply` must be compiled inside its caller's instruction set

use super::factors::Steps;
use crate::kernels::cpu::Slot::{self, Read, Write};
use crate::kernels::cpu::{Op, Real};
use crate::kernels::ops::declare::{kernel, ops};
use crate::kernels::ops::lerp::Lerp;
use crate::tensor::FlatView;

ops! {
    cuda "ademamix.cuh" r#"// The update of AdEMAMix.
#pragma once
#include "arithmetic.cuh"

// As src/kernels/ops/ademamix.rs has it. The first factor of a job is the number of this step, unless the device
// counts. Operands: x, g, fast, slow, v.
template <typename C>
struct AdEMAMix : AdEMAMixOperands {
    Lerp<C> into_fast, into_slow;
    C factor, beta2, rest2, fast, slow, inverse_root, epsilon;
    C decay;  // what is left of the parameter, unless cautious
    bool cautious;

    __device__ AdEMAMix(const AdEMAMixScalars& s, const Job& job)
        : AdEMAMix(s, job.steps ? static_cast<double>(*in_global_memory(job.steps)) : job.factor[0]) {}

    __device__ AdEMAMix(const AdEMAMixScalars& s, double step)
        : into_fast(Lerp<C>::keeping(s.beta1())),
          into_slow(Lerp<C>::keeping(beta3_at(s, step))),
          factor(scalar<C>(s.grad_factor())),
          beta2(scalar<C>(s.beta2())),
          rest2(scalar<C>(1.0 - s.beta2())),
          fast(scalar<C>(s.lr() / (1.0 - power(s.beta1(), static_cast<float>(step))))),
          slow(scalar<C>(s.lr() * (step < s.warmup() ? s.alpha() * step / s.warmup() : s.alpha()))),
          inverse_root(scalar<C>(1.0 / sqrt(1.0 - power(s.beta2(), static_cast<float>(step))))),
          epsilon(scalar<C>(s.epsilon())),
          decay(scalar<C>(s.cautious() && s.decay() != 0 ? s.decay() : 1.0 - s.decay())),
          cautious(s.cautious() && s.decay() != 0) {}

    // beta3 comes from beta1 so that its half-life grows evenly.
    static __device__ double beta3_at(const AdEMAMixScalars& s, double step) {
        if (!(step < s.warmup())) return s.beta3();
        const double t = step / s.warmup();
        return fmin(exp(1.0 / ((1.0 - t) / log(s.beta1()) + t / log(s.beta3()))), s.beta3());
    }

    __device__ void operator()(C (&x)[5]) const {
        const C g = factor * x[1];
        x[2] = into_fast(x[2], g);
        x[3] = into_slow(x[3], g);
        x[4] = beta2 * x[4] + rest2 * (g * g);
        const C step = quotient(fast * x[2] + slow * x[3], root(x[4]) * inverse_root + epsilon);
        if (cautious) {
            const C own_decay = step * x[0] < C(0) ? C(0) : decay;
            x[0] = x[0] - own_decay * x[0] - step;
        } else {
            x[0] = x[0] * decay - step;
        }
    }
};
"#;

    /// `AdEMAMix` with decoupled decay. Operands: x, gradient, fast and slow first moment, second moment.
    #[derive(Clone, Debug)]
    pub struct AdEMAMix<'a> {
        /// `lr`.
        lr: f64 * lr,
        /// Decay rate of the fast first moment.
        beta1: f64,
        /// Decay rate of the second moment.
        beta2: f64,
        /// Decay rate of the slow first moment, at last.
        beta3: f64,
        /// Weight of the slow first moment, at last.
        alpha: f64,
        /// Steps in which the last two grow to what they are; NaN where they do not.
        warmup: f64,
        /// Added to the denominator.
        epsilon: f64,
        /// `lr · weight_decay`.
        decay: f64 * lr,
        /// True if the decay acts only where it points along the update.
        cautious: bool,
        /// The gradient's factor: sign and unscaling.
        grad_factor: f64,
        ;
        /// Of each job its number of this step, where the host counts.
        known: Vec<[f64; 2]> => with,
        /// Of each job what the host has computed from that number, once for all of its elements.
        at_step: Vec<AtStep>,
        /// Counters of the steps of each job, where a device counts; else empty.
        steps: Vec<FlatView<'a>> => after,
    } => {
        ademamix = AdEMAMix [
            x: update param, g: read plain, fast: update signed, slow: update signed, v: update unsigned,
        ];
    }
}

/// Factors of one step.
#[derive(Clone, Copy, Debug)]
pub struct AtStep {
    /// `lr / (1 - β₁ᵗ)`.
    rate: f64,
    /// `lr · α` of the step.
    slow_rate: f64,
    /// β₃ of the step.
    beta3: f64,
    /// `1 / √(1 - β₂ᵗ)`.
    inverse_root: f64,
}

impl<'a> AdEMAMix<'a> {
    /// The same at these steps.
    #[must_use]
    pub fn at(self, steps: Steps<'a>) -> Self {
        match steps {
            Steps::Counted(steps) => {
                let at_step = steps.iter().map(|&step| self.at_step(step)).collect();
                let known = steps.into_iter().map(|step| [step, 0.0]).collect();
                Self { known, at_step, steps: Vec::new(), ..self }
            }
            Steps::Counters(steps) => Self { known: Vec::new(), steps, ..self },
        }
    }

    fn at_step(&self, step: f64) -> AtStep {
        AtStep {
            rate: self.lr / (1.0 - self.beta1.powf(step)),
            slow_rate: self.lr * self.alpha_at(step),
            beta3: self.beta3_at(step),
            inverse_root: 1.0 / (1.0 - self.beta2.powf(step)).sqrt(),
        }
    }

    /// β₃ of a step, with a half-life that grows evenly from that of β₁.
    fn beta3_at(&self, step: f64) -> f64 {
        let t = step / self.warmup;
        let grown = (1.0 / ((1.0 - t) / self.beta1.ln() + t / self.beta3.ln())).exp();
        if t < 1.0 { grown.min(self.beta3) } else { self.beta3 }
    }

    /// α of a step.
    fn alpha_at(&self, step: f64) -> f64 {
        if step < self.warmup { self.alpha * step / self.warmup } else { self.alpha }
    }
}

impl Op<5, 1, 4> for AdEMAMix<'_> {
    const ORDER: [Slot; 5] = [Write(0), Read(0), Write(1), Write(2), Write(3)];

    #[inline(always)]
    #[allow(clippy::many_single_char_names)] // as the equation has them
    fn apply<C: Real>(&self, job: usize, [g]: [&[C]; 1], [x, fast, slow, v]: [&mut [C]; 4]) {
        let at = &self.at_step[job];
        let (factor, epsilon) = (C::of(self.grad_factor), C::of(self.epsilon));
        let (into_fast, into_slow) = (Lerp::keeping(self.beta1), Lerp::keeping(at.beta3));
        let (beta2, rest2) = (C::of(self.beta2), C::of(1.0 - self.beta2));
        let (rate, slow_rate, inverse_root) = (C::of(at.rate), C::of(at.slow_rate), C::of(at.inverse_root));
        let (decay, keep) = (C::of(self.decay), C::of(1.0 - self.decay));
        let cautious = self.cautious && self.decay != 0.0;
        for ((((x, g), fast), slow), v) in x.iter_mut().zip(g).zip(fast).zip(slow).zip(v) {
            let g = *g * factor;
            *fast = into_fast.of(*fast, g);
            *slow = into_slow.of(*slow, g);
            *v = beta2 * *v + rest2 * (g * g);
            let step = (rate * *fast + slow_rate * *slow) / (v.sqrt() * inverse_root + epsilon);
            let own = if cautious && step * *x < C::default() { C::default() } else { decay };
            *x = if cautious { *x - own * *x - step } else { *x * keep - step };
        }
    }
}

/// By libtorch.
mod formulas {
    use crate::kernels::libtorch::prelude::*;

    pub(super) fn ademamix(given: &Given<'_>, values: &mut [Value]) -> Vec<Value> {
        let step = given.step().cloned().unwrap_or_else(|| given.factor(0));
        let (Known(beta1), Known(beta2), Known(beta3)) =
            (given.scalar("beta1"), given.scalar("beta2"), given.scalar("beta3"))
        else {
            return Vec::new();
        };
        let (lr, alpha, one) = (given.scalar("lr"), given.scalar("alpha"), Known(1.0));
        // NaN, where nothing warms up, is not below.
        let part = &step / given.scalar("warmup");
        let is_warm = part.below(&one);
        let grown = (1.0 / ((1.0 - &part) / beta1.ln() + &part / beta3.ln())).exp().min(&Known(beta3));
        let beta3 = is_warm.choose(&grown, &Known(beta3));
        let alpha = is_warm.choose(&(&alpha * &part), &alpha);
        let g = &values[1] * given.scalar("grad_factor");
        values[2] = lerp(&Known(beta1), &values[2], &g);
        values[3] = lerp(&beta3, &values[3], &g);
        values[4] = beta2 * &values[4] + (1.0 - beta2) * (&g * &g);
        let rate = &lr / (1.0 - step.power_of(beta1));
        let inverse_root = 1.0 / (1.0 - step.power_of(beta2)).sqrt();
        let along = rate * &values[2] + lr * alpha * &values[3];
        let along = along / (values[4].sqrt() * inverse_root + given.scalar("epsilon"));
        let (x, kept) = (values[0].clone(), &values[0] * (1.0 - given.scalar("decay")));
        let kept =
            if given.is("cautious") { (&along * &x).below(&Known(0.0)).choose(&x, &kept) } else { kept };
        values[0] = kept - along;
        Vec::new()
    }
}
