//! The update of `AdEMAMix`.

#![allow(clippy::inline_always)] // formulas must be compiled inside their caller's instruction set

use super::apply::Rule;
use super::declare::{kernel, operation};
use super::factors::Steps;
use super::lerp::Lerp;
use crate::kernels::formula::{Num, Own};
use crate::kernels::op::{Declared, Formula, Kernel};
use crate::tensor::FlatView;

operation! {
    /// `AdEMAMix` with decoupled decay. Operands: x, gradient, fast and slow first moment, second moment.
    #[derive(Clone, Debug)]
    pub struct AdEMAMix<'a> as AdEMAMixScalars {
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
        /// Counters of the steps of each job, where a device counts; else empty.
        steps: Vec<FlatView<'a>> => after,
    }
}

pub(in crate::kernels) const DECLARED: Declared = &[AdEMAMix::KERNEL];

impl<'a> AdEMAMix<'a> {
    /// The same at these steps.
    #[must_use]
    pub fn at(self, steps: Steps<'a>) -> Self {
        match steps {
            Steps::Counted(steps) => {
                Self { known: steps.into_iter().map(|step| [step, 0.0]).collect(), steps: Vec::new(), ..self }
            }
            Steps::Counters(steps) => Self { known: vec![[0.0; 2]; steps.len()], steps, ..self },
        }
    }
}

/// Constants of a job.
#[derive(Clone, Copy, Debug)]
pub struct AdEMAMixConstants<V: Num> {
    factor: V,
    fast: Lerp<V>,
    slow: Lerp<V>,
    second: [V; 2],
    rates: [V; 2],
    root: V,
    epsilon: V,
    rule: Rule<V>,
}

/// α and β₃ of a step: until `warmup`, α grows evenly, and β₃ from β₁ so that its half-life does.
#[inline(always)]
fn grown<W: Num>(s: AdEMAMixScalars<W>, step: W) -> [W; 2] {
    let one = W::of(1.0);
    // NaN, where nothing warms up, is not below.
    let part = step / s.warmup;
    let is_warming = part.lt(one);
    let beta3 = (one / ((one - part) / s.beta1.ln() + part / s.beta3.ln())).exp();
    let beta3 = W::select(beta3.lt(s.beta3), beta3, s.beta3);
    [W::select(is_warming, s.alpha * step / s.warmup, s.alpha), W::select(is_warming, beta3, s.beta3)]
}

impl Formula<5, 1, 4> for AdEMAMix<'_> {
    const KERNEL: &'static Kernel = kernel!(Elementwise ademamix = AdEMAMix
        [x: update param, g: read plain, fast: update signed, slow: update signed, v: update unsigned]);
    type Constants<V: Num> = AdEMAMixConstants<V>;

    #[inline(always)]
    fn constants<V: Num>(s: AdEMAMixScalars<V::Wide>, own: &Own<V::Wide>) -> AdEMAMixConstants<V> {
        let one = V::Wide::of(1.0);
        let step = V::Wide::select(own.counts, own.steps, own.factors[0]);
        let [alpha, beta3] = grown(s, step);
        let rates = [s.lr / (one - s.beta1.power(step)), s.lr * alpha];
        AdEMAMixConstants {
            factor: V::narrow(s.grad_factor),
            fast: Lerp::keeping(s.beta1),
            slow: Lerp::keeping(beta3),
            second: [s.beta2, one - s.beta2].map(V::narrow),
            rates: rates.map(V::narrow),
            root: V::narrow(one / (one - s.beta2.power(step)).sqrt()),
            epsilon: V::narrow(s.epsilon),
            rule: Rule::new(s.decay, s.cautious),
        }
    }

    #[inline(always)]
    fn update<V: Num>(k: &AdEMAMixConstants<V>, [x, g, fast, slow, v]: &mut [V; 5]) -> [[V; 2]; 0] {
        let (g, [beta2, rest2], [rate, slow_rate]) = (k.factor * *g, k.second, k.rates);
        *fast = k.fast.of(*fast, g);
        *slow = k.slow.of(*slow, g);
        *v = beta2 * *v + rest2 * (g * g);
        let step = (rate * *fast + slow_rate * *slow) / (v.sqrt() * k.root + k.epsilon);
        *x = k.rule.apply(*x, step, step);
        []
    }
}
