//! The update of `AdamW`.

#![allow(clippy::inline_always)] // every `apply` must be compiled inside its caller's instruction set

use crate::kernels::cpu::Slot::{self, Read, Write};
use crate::kernels::cpu::{Op, Real};
use crate::kernels::ops::declare::{kernel, ops};
use crate::kernels::ops::lerp::Lerp;
use crate::tensor::FlatView;

ops! {
    cuda "adamw.cuh";

    /// `AdamW` with decoupled decay. Operands: x, gradient, first moment, second moment[, its running maximum].
    #[derive(Clone, Debug)]
    pub struct AdamW<'a> {
        /// Decay rate of the first moment.
        beta1: f64,
        /// Decay rate of the second moment.
        beta2: f64,
        /// Added to the denominator.
        epsilon: f64,
        /// `lr · weight_decay`.
        decay: f64 * lr,
        /// True if the decay acts only where `m·x ≥ 0`.
        cautious: bool,
        /// True if the decay comes after the update.
        late: bool,
        /// The gradient's factor: sign and unscaling.
        grad_factor: f64,
        ;
        /// Of each job the factors of the first moment and of the root of the second, as `corrections` gives them.
        corrections: Vec<[f64; 2]> => with,
        /// Counters of the steps of each job, where a device counts; else empty. There the first factor of
        /// `corrections` is `lr`.
        steps: Vec<FlatView<'a>> => after,
    } => {
        adamw = AdamW [x: update param, g: read plain, m: update signed, v: update unsigned];
        adamw_largest = AdamWLargest [
            x: update param, g: read plain, m: update signed, v: update unsigned, largest: update unsigned,
        ];
    }
}

impl AdamW<'_> {
    /// `lr / (1 - β₁ᵗ)` and `1 / √(1 - β₂ᵗ)` for each number of steps taken, this one included. The powers of equal
    /// neighbours are taken once.
    pub fn corrections(lr: f64, [beta1, beta2]: [f64; 2], steps: impl Iterator<Item = f64>) -> Vec<[f64; 2]> {
        let mut last = (f64::NAN, [f64::NAN; 2]);
        let each = steps.map(|step| {
            if last.0.to_bits() != step.to_bits() {
                last = (step, [lr / (1.0 - beta1.powf(step)), 1.0 / (1.0 - beta2.powf(step)).sqrt()]);
            }
            last.1
        });
        each.collect()
    }

    #[inline(always)]
    fn moments<C: Real>(&self, job: usize) -> Moments<C> {
        let [rate, inverse_root] = self.corrections[job];
        Moments {
            factor: C::of(self.grad_factor),
            first: Lerp::keeping(self.beta1),
            beta2: C::of(self.beta2),
            one_minus_beta2: C::of(1.0 - self.beta2),
            rate: C::of(rate),
            // Multiplied by: a second division would be as costly as the pass over memory.
            inverse_root: C::of(inverse_root),
            epsilon: C::of(self.epsilon),
            decay: C::of(self.decay),
            keep: C::of(1.0 - self.decay),
            cautious: self.cautious && self.decay != 0.0,
            late: self.late && self.decay != 0.0,
        }
    }
}

#[derive(Clone, Copy)]
struct Moments<C> {
    factor: C,
    first: Lerp<C>,
    beta2: C,
    one_minus_beta2: C,
    rate: C,
    inverse_root: C,
    epsilon: C,
    decay: C,
    keep: C,
    cautious: bool,
    late: bool,
}

impl<C: Real> Moments<C> {
    /// Updates both moments, returns the new second one.
    #[inline(always)]
    fn update(&self, g: C, m: &mut C, v: &mut C) -> C {
        let g = g * self.factor;
        *m = self.first.of(*m, g);
        *v = self.beta2 * *v + self.one_minus_beta2 * (g * g);
        *v
    }

    #[inline(always)]
    fn apply(&self, x: &mut C, m: C, v: C) {
        let denominator = v.sqrt() * self.inverse_root + self.epsilon;
        let step = self.rate * m / denominator;
        if self.late {
            let y = *x - step;
            *x = if self.cautious && m * y < C::default() { y } else { y * self.keep };
        } else if self.cautious {
            let decay = if m * *x < C::default() { C::default() } else { self.decay };
            *x = *x - decay * *x - step;
        } else {
            *x = *x * self.keep - step;
        }
    }
}

impl Op<4, 1, 3> for AdamW<'_> {
    const ORDER: [Slot; 4] = [Write(0), Read(0), Write(1), Write(2)];

    #[inline(always)]
    fn apply<C: Real>(&self, job: usize, [g]: [&[C]; 1], [x, m, v]: [&mut [C]; 3]) {
        let moments = self.moments::<C>(job);
        for (((x, g), m), v) in x.iter_mut().zip(g).zip(m).zip(v) {
            let v = moments.update(*g, m, v);
            moments.apply(x, *m, v);
        }
    }
}

impl Op<5, 1, 4> for AdamW<'_> {
    const ORDER: [Slot; 5] = [Write(0), Read(0), Write(1), Write(2), Write(3)];

    #[inline(always)]
    fn apply<C: Real>(&self, job: usize, [g]: [&[C]; 1], [x, m, v, largest]: [&mut [C]; 4]) {
        let moments = self.moments::<C>(job);
        for ((((x, g), m), v), largest) in x.iter_mut().zip(g).zip(m).zip(v).zip(largest) {
            let v = moments.update(*g, m, v);
            // A NaN in v must show, so it is taken over: the comparison is false for it.
            *largest = if *largest >= v { *largest } else { v };
            moments.apply(x, *m, *largest);
        }
    }
}

/// By libtorch.
mod formulas {
    use crate::kernels::libtorch::prelude::*;

    pub(super) fn adamw(given: &Given<'_>, values: &mut [Value]) -> Vec<Value> {
        let second = moments(given, values);
        apply(given, values, &second);
        Vec::new()
    }

    pub(super) fn adamw_largest(given: &Given<'_>, values: &mut [Value]) -> Vec<Value> {
        let second = moments(given, values);
        // A NaN in v must show: the comparison is false for it.
        values[4] = second.at_most(&values[4]).choose(&values[4], &second);
        let largest = values[4].clone();
        apply(given, values, &largest);
        Vec::new()
    }

    fn moments(given: &Given<'_>, values: &mut [Value]) -> Value {
        let g = &values[1] * given.scalar("grad_factor");
        let beta2 = given.scalar("beta2");
        values[2] = lerp(&given.scalar("beta1"), &values[2], &g);
        values[3] = &beta2 * &values[3] + (1.0 - &beta2) * (&g * &g);
        values[3].clone()
    }

    fn apply(given: &Given<'_>, values: &mut [Value], second: &Value) {
        let [rate, inverse_root] = given.corrections(given.rate());
        let (x, m, decay) = (values[0].clone(), values[2].clone(), given.scalar("decay"));
        let step = rate * &m / (second.sqrt() * inverse_root + given.scalar("epsilon"));
        let opposes = |x: &Value| {
            if given.is("cautious") { (&m * x).below(&Known(0.0)) } else { Known(0.0) }
        };
        values[0] = if given.is("late") {
            let y = x - step;
            opposes(&y).choose(&y, &(&y * (1.0 - decay)))
        } else {
            opposes(&x).choose(&x, &(&x * (1.0 - decay))) - step
        };
    }
}
