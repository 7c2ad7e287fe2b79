//! How an elementwise operation is called where it is compiled apart from this crate.

#![cfg_attr(not(feature = "cuda"), allow(dead_code))] // what is said is for devices

use crate::batch::Slab;

/// Scalars of an operation at most.
pub(super) const MOST_SCALARS: usize = 12;

/// A kernel's name and what it is told beside its operands.
#[derive(Clone, Copy, Debug)]
pub struct Pass<'a> {
    /// The kernel, without what says how many jobs it takes.
    pub(super) kernel: &'static str,
    /// In the order of the operation's constructor.
    pub(super) scalars: [f64; MOST_SCALARS],
    /// Two factors of each job's own; none where the operation has none.
    pub(super) factors: &'a [[f64; 2]],
    /// Where the steps of each job are counted, if that is on the device: its factors depend on them.
    pub(super) steps: &'a [Slab],
    /// Where the device left factors of each job; none where the operation has none of that kind.
    pub(super) live: &'a [Slab],
}

impl<'a> Pass<'a> {
    /// An operation with these scalars.
    pub(super) fn new<const N: usize>(kernel: &'static str, scalars: [f64; N]) -> Self {
        const { assert!(N <= MOST_SCALARS) };
        let mut all = [0.0; MOST_SCALARS];
        all[..N].copy_from_slice(&scalars);
        Self { kernel, scalars: all, factors: &[], steps: &[], live: &[] }
    }

    /// The same with factors of each job's own.
    pub(super) fn with(self, factors: &'a [[f64; 2]]) -> Self {
        Self { factors, ..self }
    }

    /// The same with the steps of each job.
    pub(super) fn after(self, steps: &'a [Slab]) -> Self {
        Self { steps, ..self }
    }

    /// The same with factors of each job's own that the device left.
    pub(super) fn reading(self, live: &'a [Slab]) -> Self {
        Self { live, ..self }
    }
}

/// A flag as a scalar.
pub(super) fn flag(on: bool) -> f64 {
    f64::from(u8::from(on))
}
