//! Fused elementwise updates: each reads and writes every operand once.

#![allow(clippy::inline_always)] // every `apply` must be compiled inside its caller's instruction set

use super::{Op, Real};
use crate::kernels::cuda_call::{Pass, flag};
use crate::tensor::FlatView;

/// `m ← β·m + γ·g`, then `u ← β·m + γ·g` (nesterov) or `u ← m`. Operands: gradient, momentum, u.
#[derive(Clone, Copy, Debug)]
pub struct Momentum {
    /// β, the momentum factor.
    pub mu: f64,
    /// γ, the gradient's factor: sign and unscaling.
    pub grad_factor: f64,
    /// Whether `u` looks one step ahead.
    pub nesterov: bool,
}

impl Op<3> for Momentum {
    const WRITES: [bool; 3] = [false, true, true];

    #[inline(always)]
    fn apply<C: Real>(&self, _job: usize, [g, m, u]: [&mut [C]; 3]) {
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

    fn on_cuda(&self) -> Option<Pass<'_>> {
        Some(Pass::new("momentum", [self.mu, self.grad_factor, flag(self.nesterov)]))
    }
}

/// `m ← β·m + γ·g` without a second output. Operands: gradient, momentum.
impl Op<2> for Momentum {
    const WRITES: [bool; 2] = [false, true];

    #[inline(always)]
    fn apply<C: Real>(&self, _job: usize, [g, m]: [&mut [C]; 2]) {
        let (mu, factor) = (C::of(self.mu), C::of(self.grad_factor));
        for (g, m) in g.iter().zip(m) {
            *m = mu * *m + factor * *g;
        }
    }

    fn on_cuda(&self) -> Option<Pass<'_>> {
        Some(Pass::new("momentum_alone", [self.mu, self.grad_factor]))
    }
}

/// `u ← m + γ·g`, m as it was. Operands: gradient, momentum, u.
#[derive(Clone, Copy, Debug)]
pub struct Accumulate {
    /// γ, the gradient's factor: sign and unscaling.
    pub grad_factor: f64,
}

impl Op<3> for Accumulate {
    const WRITES: [bool; 3] = [false, false, true];

    #[inline(always)]
    fn apply<C: Real>(&self, _job: usize, [g, m, u]: [&mut [C]; 3]) {
        let factor = C::of(self.grad_factor);
        for ((g, m), u) in g.iter().zip(m).zip(u) {
            *u = *m + factor * *g;
        }
    }

    fn on_cuda(&self) -> Option<Pass<'_>> {
        Some(Pass::new("accumulate", [self.grad_factor]))
    }
}

/// `x ← (1 - decay)·x - rate·u`; cautious: the decay acts where `x·u ≥ 0`. Operands: x, u.
#[derive(Clone, Copy, Debug)]
pub struct Apply {
    /// Factor of the update.
    pub rate: f64,
    /// `lr · weight_decay`.
    pub decay: f64,
    /// Whether the decay acts only where it points along the update.
    pub cautious: bool,
}

impl Op<2> for Apply {
    const WRITES: [bool; 2] = [true, false];

    #[inline(always)]
    fn apply<C: Real>(&self, _job: usize, [x, u]: [&mut [C]; 2]) {
        let (rate, keep, zero) = (C::of(self.rate), C::of(1.0 - self.decay), C::default());
        if self.cautious && self.decay != 0.0 {
            for (x, u) in x.iter_mut().zip(u) {
                let kept = if *x * *u >= zero { *x * keep } else { *x };
                *x = kept - rate * *u;
            }
        } else {
            for (x, u) in x.iter_mut().zip(u) {
                *x = *x * keep - rate * *u;
            }
        }
    }

    fn on_cuda(&self) -> Option<Pass<'_>> {
        Some(Pass::new("apply", [self.rate, self.decay, flag(self.cautious)]).per_rate(0b011))
    }
}

/// `y ← factor·x`, from one type to another. Operands: x, y.
#[derive(Clone, Copy, Debug)]
pub struct Convert {
    /// The factor.
    pub factor: f64,
}

impl Op<2> for Convert {
    const WRITES: [bool; 2] = [false, true];

    #[inline(always)]
    fn apply<C: Real>(&self, _job: usize, [x, y]: [&mut [C]; 2]) {
        let factor = C::of(self.factor);
        for (x, y) in x.iter().zip(y) {
            *y = factor * *x;
        }
    }

    fn on_cuda(&self) -> Option<Pass<'_>> {
        Some(Pass::new("convert", [self.factor]))
    }
}

/// `u ← m`, then `m ← keep·m`. Operands: m, u.
#[derive(Clone, Copy, Debug)]
pub struct Release {
    /// What is left of m.
    pub keep: f64,
}

impl Op<2> for Release {
    const WRITES: [bool; 2] = [true, true];

    #[inline(always)]
    fn apply<C: Real>(&self, _job: usize, [m, u]: [&mut [C]; 2]) {
        let keep = C::of(self.keep);
        for (m, u) in m.iter_mut().zip(u) {
            *u = *m;
            *m = keep * *m;
        }
    }

    fn on_cuda(&self) -> Option<Pass<'_>> {
        Some(Pass::new("release", [self.keep]))
    }
}

/// `x ← x + 1`. Operand: x.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Count;

impl Op<1> for Count {
    const WRITES: [bool; 1] = [true];

    #[inline(always)]
    fn apply<C: Real>(&self, _job: usize, [x]: [&mut [C]; 1]) {
        for x in x.iter_mut() {
            *x = *x + C::of(1.0);
        }
    }

    fn on_cuda(&self) -> Option<Pass<'_>> {
        Some(Pass::new("count", []))
    }
}

/// `x ← (1 - decay)·x`. Operand: x.
#[derive(Clone, Copy, Debug)]
pub struct Decay {
    /// `lr · weight_decay`, or another.
    pub decay: f64,
    /// Whether it is proportional to the learning rate.
    pub per_rate: bool,
}

impl Op<1> for Decay {
    const WRITES: [bool; 1] = [true];

    #[inline(always)]
    fn apply<C: Real>(&self, _job: usize, [x]: [&mut [C]; 1]) {
        let keep = C::of(1.0 - self.decay);
        for x in x.iter_mut() {
            *x = *x * keep;
        }
    }

    fn on_cuda(&self) -> Option<Pass<'_>> {
        Some(Pass::new("decay", [self.decay]).per_rate(u32::from(self.per_rate)))
    }
}

/// `AdamW` with decoupled decay. Operands: x, gradient, first moment, second moment[, its running maximum].
#[derive(Clone, Debug)]
pub struct AdamW {
    /// Decay rate of the first moment.
    pub beta1: f64,
    /// Decay rate of the second moment.
    pub beta2: f64,
    /// Added to the denominator.
    pub epsilon: f64,
    /// `lr · weight_decay`.
    pub decay: f64,
    /// Whether the decay acts only where `m·x ≥ 0`.
    pub cautious: bool,
    /// Whether the decay comes after the update.
    pub late: bool,
    /// The gradient's factor: sign and unscaling.
    pub grad_factor: f64,
    /// Of each job the factors of the first moment and of the root of the second, as `corrections` gives them.
    pub corrections: Vec<[f64; 2]>,
    /// Where a device counts the steps of each job; else empty. There the first factor of `corrections` is `lr`.
    pub steps: Vec<FlatView>,
}

impl AdamW {
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

    fn pass(&self, kernel: &'static str) -> Pass<'_> {
        let Self { beta1, beta2, epsilon, decay, cautious, late, grad_factor, .. } = *self;
        let scalars = [beta1, beta2, epsilon, decay, flag(cautious), flag(late), grad_factor];
        Pass::new(kernel, scalars).per_rate(0b1000).with(&self.corrections).after(&self.steps)
    }

    #[inline(always)]
    fn moments<C: Real>(&self, job: usize) -> Moments<C> {
        let [rate, inverse_root] = self.corrections[job];
        Moments {
            factor: C::of(self.grad_factor),
            one_minus_beta1: C::of(1.0 - self.beta1),
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
    one_minus_beta1: C,
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
        *m = *m + self.one_minus_beta1 * (g - *m);
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

impl Op<4> for AdamW {
    const WRITES: [bool; 4] = [true, false, true, true];

    #[inline(always)]
    fn apply<C: Real>(&self, job: usize, [x, g, m, v]: [&mut [C]; 4]) {
        let moments = self.moments::<C>(job);
        for (((x, g), m), v) in x.iter_mut().zip(g).zip(m).zip(v) {
            let v = moments.update(*g, m, v);
            moments.apply(x, *m, v);
        }
    }

    fn on_cuda(&self) -> Option<Pass<'_>> {
        Some(self.pass("adamw"))
    }
}

impl Op<5> for AdamW {
    const WRITES: [bool; 5] = [true, false, true, true, true];

    #[inline(always)]
    fn apply<C: Real>(&self, job: usize, [x, g, m, v, largest]: [&mut [C]; 5]) {
        let moments = self.moments::<C>(job);
        for ((((x, g), m), v), largest) in x.iter_mut().zip(g).zip(m).zip(v).zip(largest) {
            let v = moments.update(*g, m, v);
            // A NaN in v must show, so it is taken over: the comparison is false for it.
            *largest = if *largest >= v { *largest } else { v };
            moments.apply(x, *m, *largest);
        }
    }

    fn on_cuda(&self) -> Option<Pass<'_>> {
        Some(self.pass("adamw_largest"))
    }
}

/// Lion: `u = sign(β₁·m + (1-β₁)·g)`, `m ← β₂·m + (1-β₂)·g`, decay, `x ← x - lr·u`. Operands: x, gradient, m.
#[derive(Clone, Copy, Debug)]
pub struct Lion {
    /// `lr`.
    pub lr: f64,
    /// Weight of the momentum in the direction.
    pub beta1: f64,
    /// Decay rate of the momentum.
    pub beta2: f64,
    /// `lr · weight_decay`.
    pub decay: f64,
    /// Whether the decay acts only where `x·u ≥ 0`.
    pub cautious: bool,
    /// The gradient's factor: sign and unscaling.
    pub grad_factor: f64,
}

impl Op<3> for Lion {
    const WRITES: [bool; 3] = [true, false, true];

    #[inline(always)]
    fn apply<C: Real>(&self, _job: usize, [x, g, m]: [&mut [C]; 3]) {
        let (zero, lr, keep) = (C::default(), C::of(self.lr), C::of(1.0 - self.decay));
        let (beta1, rest1) = (C::of(self.beta1), C::of(1.0 - self.beta1));
        let (beta2, rest2) = (C::of(self.beta2), C::of(1.0 - self.beta2));
        let factor = C::of(self.grad_factor);
        let cautious = self.cautious && self.decay != 0.0;
        for ((x, g), m) in x.iter_mut().zip(g).zip(m) {
            let g = factor * *g;
            let blend = beta1 * *m + rest1 * g;
            let sign = if blend > zero {
                lr
            } else if blend < zero {
                -lr
            } else {
                zero
            };
            // Nothing is added for a number; NaN for what is none, so that it shows.
            let step = sign + zero * blend;
            *m = beta2 * *m + rest2 * g;
            let kept = if cautious && *x * blend < zero { *x } else { *x * keep };
            *x = kept - step;
        }
    }

    fn on_cuda(&self) -> Option<Pass<'_>> {
        let scalars = [self.lr, self.beta1, self.beta2, self.decay, flag(self.cautious), self.grad_factor];
        Some(Pass::new("lion", scalars).per_rate(0b1001))
    }
}
