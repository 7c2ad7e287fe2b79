//! Running means of squares, in float64 whatever their type.

#![allow(clippy::inline_always)] // formulas must be compiled inside their caller's instruction set

use super::declare::{kernel, operation, operation_of};
use super::factors::Steps;
use super::lerp::Lerp;
use crate::kernels::formula::{Num, Own};
use crate::kernels::op::{Declared, Formula, Kernel};
use crate::tensor::FlatView;

operation! {
    /// `m ← (1-share)·m + share·(sum / count + ε)`. Operands: m, sum.
    #[derive(Debug)]
    pub struct Means<'a> as MeansScalars {
        /// Added to what is new.
        epsilon: f64,
        /// Exponent of the steps.
        exponent: f64,
        /// The gradient's factor: sign and unscaling.
        grad_factor: f64,
        /// The largest finite mean that can be stored.
        most: f64,
        ;
        /// Of each job the share of the new value, and by what its sum is divided.
        own: Vec<[f64; 2]> => with,
        /// Counters of the steps of each job, where a device counts, if the share follows them.
        steps: Vec<FlatView<'a>> => after,
    }
}

/// `v ← (1-share)·v + share·(g² + ε)`. Operands: v, gradient.
#[derive(Debug)]
pub struct Squares<'a>(Means<'a>);

pub(in crate::kernels) const DECLARED: Declared = &[Means::KERNEL, Squares::KERNEL];

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

impl<'a> Means<'a> {
    /// Creates the means of jobs, each given by the number of its parameter and the count. `most` is the largest mean that
    /// all of them can store.
    #[must_use]
    pub fn new(epsilon: f64, most: f64, share: &NewShare<'a>, jobs: &[(usize, f64)]) -> Self {
        let (exponent, steps) = match share {
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
        Self { epsilon, exponent, grad_factor: 1.0, most, own: own.collect(), steps }
    }
}

impl<'a> Squares<'a> {
    /// For as many parameters, one job each, with the largest mean that all of them can store.
    #[must_use]
    pub fn new(epsilon: f64, most: f64, share: &NewShare<'a>, (grad_factor, params): (f64, usize)) -> Self {
        let jobs: Vec<_> = (0..params).map(|param| (param, 1.0)).collect();
        Self(Means { grad_factor, ..Means::new(epsilon, most, share, &jobs) })
    }
}

/// Constants of a job.
#[derive(Clone, Copy, Debug)]
pub struct Constants<V: Num> {
    mean: Lerp<V>,
    epsilon: V,
    most: V,
    factor: V,
    count: V,
}

impl<V: Num> Constants<V> {
    #[inline(always)]
    fn new(s: MeansScalars<V::Wide>, own: &Own<V::Wide>) -> Self {
        let [share, count] = own.factors;
        // A power of the steps where a device counts them.
        let share = V::Wide::select(own.counts, own.steps.powf(s.exponent), share);
        let [epsilon, most, factor, count] = [s.epsilon, s.most, s.grad_factor, count].map(V::narrow);
        Self { mean: Lerp::adding(share), epsilon, most, factor, count }
    }

    /// The mean as it can be stored: one of finite numbers stays finite.
    #[inline(always)]
    fn moved(&self, old: V, new: V) -> V {
        let mean = self.mean.of(old, new + self.epsilon);
        let is_bounded = V::both(self.most.lt(mean), V::of(f64::MAX).ge(mean));
        V::select(is_bounded, self.most, mean)
    }
}

impl Formula<2, 1, 1> for Means<'_> {
    const KERNEL: &'static Kernel = kernel!(Mean means = Means [m: update plain, sum: read plain]);
    type Constants<V: Num> = Constants<V>;

    #[inline(always)]
    fn constants<V: Num>(s: MeansScalars<V::Wide>, own: &Own<V::Wide>) -> Constants<V> {
        Constants::new(s, own)
    }

    #[inline(always)]
    fn update<V: Num>(k: &Constants<V>, [m, sum]: &mut [V; 2]) -> [[V; 2]; 0] {
        *m = k.moved(*m, *sum / k.count);
        []
    }
}

operation_of!([] Squares<'_>: 0 is Means as MeansScalars);

impl Formula<2, 1, 1> for Squares<'_> {
    const KERNEL: &'static Kernel = kernel!(Mean squares = Squares [v: update plain, g: read plain]);
    type Constants<V: Num> = Constants<V>;

    #[inline(always)]
    fn constants<V: Num>(s: MeansScalars<V::Wide>, own: &Own<V::Wide>) -> Constants<V> {
        Constants::new(s, own)
    }

    #[inline(always)]
    fn update<V: Num>(k: &Constants<V>, [v, g]: &mut [V; 2]) -> [[V; 2]; 0] {
        let g = k.factor * *g;
        *v = k.moved(*v, g * g);
        []
    }
}
