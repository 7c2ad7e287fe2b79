//! Numbers of each job that a step computes on its way, and that no host reads where a device computed them.

#[cfg(feature = "cuda")]
pub(in crate::kernels) mod device;

use std::sync::Mutex;

use tch::Tensor;

use crate::error::Result;
use crate::kernels::ops::convert::Count;
use crate::tensor::{DType, Device, FlatView};

/// `K` factors of each job.
#[derive(Debug, Default)]
pub struct Factors<const K: usize> {
    known: Vec<[f64; K]>,
    /// Where a device left those of each job.
    left: Vec<FlatView>,
    /// What owns that memory. Nobody else looks at it.
    _memory: Option<Mutex<Tensor>>,
}

impl<const K: usize> Factors<K> {
    /// Factors that the host knows.
    #[must_use]
    pub fn known(known: Vec<[f64; K]>) -> Self {
        Self { known, ..Self::default() }
    }

    /// Room on a device for the factors of `count` jobs, one after the other.
    pub(in crate::kernels) fn room(count: usize, device: Device) -> Result<Self> {
        let (memory, all) = crate::kernels::cuda::scratch(count * K, DType::F64, device)?;
        let left = (0..count).map(|job| all.part(job * K, K)).collect();
        Ok(Self { known: Vec::new(), left, _memory: Some(Mutex::new(memory)) })
    }

    /// Those of a job, on the host.
    #[inline]
    pub(in crate::kernels) fn of(&self, job: usize) -> [f64; K] {
        self.known[job]
    }

    /// Where a device left those of each job; empty where the host knows them.
    pub(in crate::kernels) fn left(&self) -> &[FlatView] {
        &self.left
    }
}

impl<const K: usize> AsRef<[FlatView]> for Factors<K> {
    fn as_ref(&self) -> &[FlatView] {
        &self.left
    }
}

/// The steps that each parameter of a bucket has taken.
#[derive(Clone, Debug)]
pub enum Steps {
    /// The host counts.
    Counted(Vec<f64>),
    /// A device does, here.
    Counters(Vec<FlatView>),
}

impl Steps {
    /// Counts a step of each counter, where it is.
    ///
    /// # Errors
    /// As [`crate::kernels::run`].
    pub fn count(counters: Vec<FlatView>) -> Result<Self> {
        if counters.iter().all(|counter| counter.device() == Device::Cpu) {
            return Ok(Self::Counted(counters.iter().map(FlatView::increment).collect()));
        }
        crate::kernels::run(&Count {}, &counters.iter().map(|&counter| [counter]).collect::<Vec<_>>())?;
        Ok(Self::Counters(counters))
    }

    /// Those that were counted.
    #[must_use]
    pub fn counted(counters: Vec<FlatView>) -> Self {
        if counters.iter().all(|counter| counter.device() == Device::Cpu) {
            return Self::Counted(counters.iter().map(FlatView::count).collect());
        }
        Self::Counters(counters)
    }

    /// Those of a parameter, where the host counts.
    pub(in crate::kernels) fn of(&self, param: usize) -> f64 {
        match self {
            Self::Counted(steps) => steps.get(param).copied().unwrap_or(f64::NAN),
            Self::Counters(_) => f64::NAN,
        }
    }

    /// Where a device counts those of a parameter.
    pub(in crate::kernels) fn counter(&self, param: usize) -> Option<FlatView> {
        match self {
            Self::Counted(_) => None,
            Self::Counters(counters) => counters.get(param).copied(),
        }
    }
}

/// Counts a step of each counter where it is. Returns `AdamW`'s corrections, and the counters that they follow: none
/// where the host counts.
///
/// # Errors
/// As [`crate::kernels::run`].
pub fn count_steps(
    counters: Vec<FlatView>,
    lr: f64,
    betas: [f64; 2],
) -> Result<(Vec<[f64; 2]>, Vec<FlatView>)> {
    Ok(match Steps::count(counters)? {
        Steps::Counted(steps) => (super::adamw::AdamW::corrections(lr, betas, steps.into_iter()), Vec::new()),
        Steps::Counters(counters) => (vec![[lr, 1.0]; counters.len()], counters),
    })
}
