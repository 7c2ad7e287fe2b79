//! How an elementwise operation is called where it is compiled apart from this crate.

#![cfg_attr(not(feature = "cuda"), allow(dead_code))] // what is said is for devices

use std::ops::Range;

use super::ops::factored::Scales;
use crate::tensor::FlatView;

/// Scalars of an operation at most.
pub(super) const MOST_SCALARS: usize = 12;

/// A kernel's name and what it is told beside its operands.
#[derive(Clone, Copy, Debug)]
pub struct Pass<'a> {
    /// The kernel, without what says how many jobs it takes.
    pub(super) kernel: &'static str,
    /// In the order of the operation's constructor.
    pub(super) scalars: [f64; MOST_SCALARS],
    /// A bit for each scalar that is for each unit of the learning rate, where the device has it.
    pub(super) per_rate: u32,
    /// Two factors of each job's own; none where the operation has none.
    pub(super) factors: &'a [[f64; 2]],
    /// Where the steps of each job are counted, if that is on the device: its factors depend on them.
    pub(super) steps: &'a [FlatView],
    /// Where the device left factors of each job; none where the operation has none of that kind.
    pub(super) live: &'a [FlatView],
    /// Whether arithmetic is float64 whatever the operands are.
    pub(super) double: bool,
}

/// How a pass over the rows of matrices is called.
#[derive(Clone, Copy, Debug)]
pub struct RowPassCall<'a> {
    /// The kernel and what it is told.
    pub(super) pass: Pass<'a>,
    /// The scales of every job; none where the operation has none.
    pub(super) scales: [&'a [Scales]; 2],
}

impl<'a> Pass<'a> {
    /// An operation with these scalars.
    pub(super) fn new<const N: usize>(kernel: &'static str, scalars: [f64; N]) -> Self {
        const { assert!(N <= MOST_SCALARS) };
        let mut all = [0.0; MOST_SCALARS];
        all[..N].copy_from_slice(&scalars);
        Self { kernel, scalars: all, per_rate: 0, factors: &[], steps: &[], live: &[], double: false }
    }

    /// The same with these scalars proportional to the learning rate, a bit for each.
    pub(super) fn per_rate(self, scalars: u32) -> Self {
        Self { per_rate: scalars, ..self }
    }

    /// The same with factors of each job's own.
    pub(super) fn with(self, factors: &'a [[f64; 2]]) -> Self {
        Self { factors, ..self }
    }

    /// The same with the steps of each job.
    pub(super) fn after(self, steps: &'a [FlatView]) -> Self {
        Self { steps, ..self }
    }

    /// The same with factors of each job's own that the device left.
    pub(super) fn reading(self, live: &'a [FlatView]) -> Self {
        Self { live, ..self }
    }

    /// The same in float64.
    pub(super) fn double(self) -> Self {
        Self { double: true, ..self }
    }

    /// As a pass over rows with these scales.
    pub(super) fn over_rows(self, scales: [&'a [Scales]; 2]) -> RowPassCall<'a> {
        RowPassCall { pass: self, scales }
    }
}

impl RowPassCall<'_> {
    /// The same for some of the jobs only.
    pub(super) fn of(&self, jobs: Range<usize>) -> Self {
        fn part<T>(all: &[T], jobs: Range<usize>) -> &[T] {
            all.get(jobs).unwrap_or_default()
        }
        let pass = Pass {
            factors: part(self.pass.factors, jobs.clone()),
            steps: part(self.pass.steps, jobs.clone()),
            live: part(self.pass.live, jobs.clone()),
            ..self.pass
        };
        Self { pass, scales: self.scales.map(|scales| part(scales, jobs.clone())) }
    }
}

/// A flag as a scalar.
pub(super) fn flag(on: bool) -> f64 {
    f64::from(u8::from(on))
}
