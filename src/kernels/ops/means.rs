//! Running means of squares, in float64 whatever their type.

#![allow(clippy::inline_always)] // every pass must be compiled inside its caller's instruction set

use super::factors::Steps;
use crate::kernels::cpu::Slot;
use crate::kernels::cpu::{Op, Real};
use crate::kernels::cuda_call::{Kernel, Launch, Pass};
use crate::kernels::ops::declare::{kernel, ops};
use crate::kernels::ops::lerp::Lerp;
use crate::tensor::FlatView;

ops! {
    cuda "means.cuh" also [&MEANS, &SQUARES];

    /// Scalars of running means.
    struct MeansScalars {
        /// Added to what is new.
        epsilon: f64,
        /// Exponent of the steps.
        exponent: f64,
        /// The gradient's factor: sign and unscaling.
        grad_factor: f64,
        /// The largest finite mean that can be stored.
        most: f64,
    }
}

const MEANS: Kernel = kernel!(Mean means = Means told MeansScalars [m: update plain, sum: read plain]);
const SQUARES: Kernel = kernel!(Mean squares = Squares told MeansScalars [v: update plain, g: read plain]);

/// The share of what is new in running means.
#[derive(Clone, Copy, Debug)]
pub enum NewShare<'a> {
    /// One for all parameters.
    Same(f64),
    /// Of each a power of the steps that it has taken.
    OfSteps {
        /// The steps.
        steps: &'a Steps<'a>,
        /// The exponent.
        exponent: f64,
    },
}

/// Scalars by which every mean is moved.
#[derive(Debug)]
struct Moves<'a> {
    epsilon: f64,
    exponent: f64,
    /// The largest finite mean that can be stored.
    most: f64,
    /// Of each job the share of the new value, and by what its sum is divided.
    own: Vec<[f64; 2]>,
    /// Counters of the steps of each job, where a device counts, if the share follows them.
    steps: Vec<FlatView<'a>>,
}

impl<'a> Moves<'a> {
    /// Of each job the number of its parameter, and the divisor.
    fn new(epsilon: f64, most: f64, share: &NewShare<'a>, jobs: &[(usize, f64)]) -> Self {
        let (exponent, counters) = match share {
            NewShare::Same(_) => (0.0, Vec::new()),
            NewShare::OfSteps { steps, exponent } => {
                (*exponent, jobs.iter().filter_map(|(param, _)| steps.counter(*param)).collect())
            }
        };
        let own = jobs.iter().map(|(param, divisor)| {
            let share = match share {
                NewShare::Same(share) => *share,
                NewShare::OfSteps { steps, exponent } => steps.of(*param).powf(*exponent),
            };
            [share, *divisor]
        });
        Self { epsilon, exponent, most, own: own.collect(), steps: counters }
    }

    fn pass(&self, kernel: &'static Kernel, grad_factor: f64) -> Pass<'_> {
        let Self { epsilon, exponent, most, .. } = *self;
        let scalars = MeansScalars { epsilon, exponent, grad_factor, most };
        scalars.told(kernel).with(&self.own).after(&self.steps).double()
    }
}

impl Moves<'_> {
    /// A mean as it can be stored: one of finite numbers stays finite.
    #[inline(always)]
    fn stored(&self, mean: f64) -> f64 {
        if mean > self.most && mean.is_finite() { self.most } else { mean }
    }
}

/// `m ← (1-share)·m + share·(sum / count + ε)`. Operands: m, sum.
#[derive(Debug)]
pub struct Means<'a>(Moves<'a>);

impl<'a> Means<'a> {
    /// For jobs of which each is given by the number of its parameter and the count, with the largest mean that all of them
    /// can store.
    #[must_use]
    pub fn new(epsilon: f64, most: f64, share: &NewShare<'a>, jobs: &[(usize, f64)]) -> Self {
        Self(Moves::new(epsilon, most, share, jobs))
    }
}

impl Launch<2> for Means<'_> {
    fn on_cuda(&self) -> Option<Pass<'_>> {
        Some(self.0.pass(&MEANS, 0.0))
    }
}

impl Op<2, 1, 1> for Means<'_> {
    const ORDER: [Slot; 2] = MEANS.order();

    #[inline(always)]
    fn apply<C: Real>(&self, job: usize, [sum]: [&[C]; 1], [m]: [&mut [C]; 1]) {
        let (epsilon, [share, count]) = (self.0.epsilon, self.0.own[job]);
        let lerp = Lerp::adding(share);
        for (m, sum) in m.iter_mut().zip(sum) {
            *m = C::of(self.0.stored(lerp.of(m.wide(), sum.wide() / count + epsilon)));
        }
    }
}

/// `v ← (1-share)·v + share·(g² + ε)`. Operands: v, gradient.
#[derive(Debug)]
pub struct Squares<'a> {
    moves: Moves<'a>,
    grad_factor: f64,
}

impl<'a> Squares<'a> {
    /// For as many parameters, one job each, with the largest mean that all of them can store.
    #[must_use]
    pub fn new(epsilon: f64, most: f64, share: &NewShare<'a>, (grad_factor, params): (f64, usize)) -> Self {
        let jobs: Vec<_> = (0..params).map(|param| (param, 1.0)).collect();
        Self { moves: Moves::new(epsilon, most, share, &jobs), grad_factor }
    }
}

impl Launch<2> for Squares<'_> {
    fn on_cuda(&self) -> Option<Pass<'_>> {
        Some(self.moves.pass(&SQUARES, self.grad_factor))
    }
}

impl Op<2, 1, 1> for Squares<'_> {
    const ORDER: [Slot; 2] = SQUARES.order();

    #[inline(always)]
    fn apply<C: Real>(&self, job: usize, [g]: [&[C]; 1], [v]: [&mut [C]; 1]) {
        let (epsilon, [share, _]) = (self.moves.epsilon, self.moves.own[job]);
        let lerp = Lerp::adding(share);
        for (v, g) in v.iter_mut().zip(g) {
            let g = self.grad_factor * g.wide();
            *v = C::of(self.moves.stored(lerp.of(v.wide(), g * g + epsilon)));
        }
    }
}

/// By libtorch.
mod formulas {
    use crate::kernels::libtorch::prelude::*;

    pub(super) fn means(given: &Given<'_>, values: &mut [Value]) -> Vec<Value> {
        let new = &values[1] / given.factor(1);
        move_to(given, values, &new);
        Vec::new()
    }

    pub(super) fn squares(given: &Given<'_>, values: &mut [Value]) -> Vec<Value> {
        let new = (given.scalar("grad_factor") * &values[1]).square();
        move_to(given, values, &new);
        Vec::new()
    }

    fn move_to(given: &Given<'_>, values: &mut [Value], new: &Value) {
        let share = match (given.step(), given.scalar("exponent")) {
            (Some(step), Known(exponent)) => step.to_the(exponent),
            _ => given.factor(0),
        };
        let mean = lerp(&(1.0 - share), &values[0], &(new + given.scalar("epsilon")));
        // A mean of finite numbers stays finite.
        let most = given.scalar("most");
        let is_finite = mean.at_most(&Known(f64::MAX));
        let bounded = most.below(&mean).choose(&most, &mean);
        values[0] = is_finite.choose(&bounded, &mean);
    }
}
