//! The update of `AdamW`.

#![allow(clippy::inline_always)] // formulas must be compiled inside their caller's instruction set

use super::apply::Rule;
use super::declare::{kernel, operation};
use super::lerp::{Lerp, weights};
use crate::kernels::formula::{Num, Own, corrections};
use crate::kernels::op::{Declared, Formula, Kernel};
use crate::tensor::FlatView;

operation! {
    /// `AdamW` with decoupled decay. Operands: x, gradient, first moment, second moment[, its running maximum].
    #[derive(Clone, Debug)]
    pub struct AdamW<'a> as AdamWScalars {
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
    }
}

pub(in crate::kernels) const DECLARED: Declared =
    &[<AdamW<'_> as Formula<4, 1, 3>>::KERNEL, <AdamW<'_> as Formula<5, 1, 4>>::KERNEL];

impl AdamW<'_> {
    /// `lr / (1 - β₁ᵗ)` and `1 / √(1 - β₂ᵗ)` for each number of steps taken, this one included. The powers of equal
    /// neighbours are taken once.
    pub fn corrections(lr: f64, betas: [f64; 2], steps: impl Iterator<Item = f64>) -> Vec<[f64; 2]> {
        let mut last = (f64::NAN, [f64::NAN; 2]);
        let each = steps.map(|step| {
            if last.0.to_bits() != step.to_bits() {
                let own = Own { factors: [lr, 1.0], counts: true, steps: step, ..Own::NONE };
                last = (step, corrections(&own, betas, 1.0));
            }
            last.1
        });
        each.collect()
    }
}

/// Constants of a job.
#[derive(Clone, Copy, Debug)]
pub struct AdamWConstants<V: Num> {
    factor: V,
    first: Lerp<V>,
    second: [V; 2],
    rate: V,
    root: V,
    epsilon: V,
    rule: Rule<V>,
}

impl<V: Num> AdamWConstants<V> {
    #[inline(always)]
    fn new(s: AdamWScalars<V::Wide>, own: &Own<V::Wide>) -> Self {
        let [rate, root] = corrections(own, [s.beta1, s.beta2], own.rate);
        Self {
            factor: V::narrow(s.grad_factor),
            first: Lerp::keeping(s.beta1),
            second: weights(s.beta2),
            rate: V::narrow(rate),
            // Multiplied by: a second division would be as costly as the pass over memory.
            root: V::narrow(root),
            epsilon: V::narrow(s.epsilon),
            rule: Rule::new(s.decay, s.cautious).late(s.late),
        }
    }

    /// Updates both moments.
    #[inline(always)]
    fn moments(&self, [g, m, v]: [V; 3]) -> [V; 2] {
        let (g, [beta2, rest2]) = (self.factor * g, self.second);
        [self.first.of(m, g), beta2 * v + rest2 * (g * g)]
    }

    #[inline(always)]
    fn apply(&self, x: V, m: V, v: V) -> V {
        self.rule.apply(x, m, self.rate * m / (v.sqrt() * self.root + self.epsilon))
    }
}

impl Formula<4, 1, 3> for AdamW<'_> {
    const KERNEL: &'static Kernel = kernel!(Elementwise adamw = AdamW
        [x: update param, g: read plain, m: update signed, v: update unsigned]);
    type Constants<V: Num> = AdamWConstants<V>;

    #[inline(always)]
    fn constants<V: Num>(s: AdamWScalars<V::Wide>, own: &Own<V::Wide>) -> AdamWConstants<V> {
        AdamWConstants::new(s, own)
    }

    #[inline(always)]
    #[allow(clippy::many_single_char_names)] // as the equation has them
    fn update<V: Num>(k: &AdamWConstants<V>, x: &mut [V; 4]) -> [[V; 2]; 0] {
        let [p, g, m, v] = *x;
        let [m, v] = k.moments([g, m, v]);
        *x = [k.apply(p, m, v), g, m, v];
        []
    }
}

impl Formula<5, 1, 4> for AdamW<'_> {
    const KERNEL: &'static Kernel = kernel!(Elementwise adamw_largest = AdamWLargest
        [x: update param, g: read plain, m: update signed, v: update unsigned, largest: update unsigned]);
    type Constants<V: Num> = AdamWConstants<V>;

    #[inline(always)]
    fn constants<V: Num>(s: AdamWScalars<V::Wide>, own: &Own<V::Wide>) -> AdamWConstants<V> {
        AdamWConstants::new(s, own)
    }

    #[inline(always)]
    #[allow(clippy::many_single_char_names)] // as the equation has them
    fn update<V: Num>(k: &AdamWConstants<V>, x: &mut [V; 5]) -> [[V; 2]; 0] {
        let [p, g, m, v, largest] = *x;
        let [m, v] = k.moments([g, m, v]);
        // A NaN in v is taken over: the comparison is false for it.
        let largest = V::select(largest.ge(v), largest, v);
        *x = [k.apply(p, m, largest), g, m, v, largest];
        []
    }
}
