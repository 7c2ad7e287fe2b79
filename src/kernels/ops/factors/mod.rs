//! Numbers of each job that a step computes on its way, and that no host reads where a device computed them.

#[cfg(feature = "cuda")]
pub(in crate::kernels) mod device;
pub(in crate::kernels) mod fallback;

use std::sync::{Mutex, PoisonError};

use tch::Tensor;

use crate::error::Result;
use crate::kernels::Job;
use crate::kernels::ops::convert::Count;
use crate::tensor::{DType, Device, FlatView, FlatViewMut};

/// Sources of the kernels.
pub(in crate::kernels) const SOURCES: &[&str] = &["factors.cu", "totals.cu"];

/// `K` factors of each job.
#[derive(Debug, Default)]
pub struct Factors<const K: usize> {
    known: Vec<[f64; K]>,
    /// Factors of each job, where a device left them.
    left: Vec<FlatView<'static>>,
    /// Owner of that memory, which no other code reads.
    memory: Option<Mutex<Tensor>>,
}

impl<const K: usize> Factors<K> {
    /// Factors that the host knows.
    #[must_use]
    pub fn known(known: Vec<[f64; K]>) -> Self {
        Self { known, ..Self::default() }
    }

    /// Room on a device for the factors of `count` jobs, one after the other.
    pub(in crate::kernels) fn room(count: usize, device: Device) -> Result<Self> {
        let (memory, all) = crate::kernels::backend::scratch(count * K, DType::F64, device)?;
        let left = (0..count).map(|job| all.part(job * K, K)).collect();
        Ok(Self { known: Vec::new(), left, memory: Some(Mutex::new(memory)) })
    }

    /// Factors that libtorch computed on a device: a row of `values` for each job, in float64.
    pub(in crate::kernels) fn computed(values: &Tensor, device: Device) -> Result<Self> {
        let (count, _) = values.size2()?;
        let room = Self::room(usize::try_from(count).unwrap_or(0), device)?;
        if let Some(memory) = &room.memory {
            let mut memory = memory.lock().unwrap_or_else(PoisonError::into_inner);
            memory.f_copy_(&values.f_reshape([-1])?)?;
        }
        Ok(room)
    }

    /// Returns the factors of other jobs: job `i` has those of the present job `of[i]`.
    #[must_use]
    pub fn spread(mut self, of: &[usize]) -> Self {
        let pick = |at: &usize| self.known.get(*at).copied();
        self.known = if self.known.is_empty() { Vec::new() } else { of.iter().filter_map(pick).collect() };
        let pick = |at: &usize| self.left.get(*at).copied();
        self.left = if self.left.is_empty() { Vec::new() } else { of.iter().filter_map(pick).collect() };
        self
    }

    /// Factors of a job, on the host.
    #[inline]
    pub(in crate::kernels) fn of(&self, job: usize) -> [f64; K] {
        self.known[job]
    }

    /// Factors of each job, where a device left them; empty where the host knows them.
    pub(in crate::kernels) fn left(&self) -> &[FlatView<'static>] {
        &self.left
    }
}

impl<'a, const K: usize> AsRef<[FlatView<'a>]> for Factors<K> {
    fn as_ref(&self) -> &[FlatView<'a>] {
        &self.left
    }
}

/// The steps that each parameter of a bucket has taken.
#[derive(Debug)]
pub enum Steps<'a> {
    /// The host counts.
    Counted(Vec<f64>),
    /// A device does, here.
    Counters(Vec<FlatView<'a>>),
}

impl<'a> Steps<'a> {
    /// Counts a step of each counter, where it is.
    ///
    /// # Errors
    /// As [`crate::kernels::run`].
    pub fn count(mut counters: Vec<FlatViewMut<'a>>) -> Result<Self> {
        if counters.iter().all(|counter| counter.device() == Device::Cpu) {
            return Ok(Self::Counted(counters.iter_mut().map(FlatViewMut::increment).collect()));
        }
        let mut jobs: Vec<_> =
            counters.into_iter().map(|counter| Job { read: [], write: [counter] }).collect();
        crate::kernels::run(&Count {}, &mut jobs)?;
        Ok(Self::Counters(jobs.into_iter().map(|Job { write: [counter], .. }| counter.into_view()).collect()))
    }

    /// Steps that were counted.
    #[must_use]
    pub fn counted(counters: Vec<FlatView<'a>>) -> Self {
        if counters.iter().all(|counter| counter.device() == Device::Cpu) {
            return Self::Counted(counters.iter().map(FlatView::count).collect());
        }
        Self::Counters(counters)
    }

    /// Steps of a parameter, where the host counts.
    pub(in crate::kernels) fn of(&self, param: usize) -> f64 {
        match self {
            Self::Counted(steps) => steps.get(param).copied().unwrap_or(f64::NAN),
            Self::Counters(_) => f64::NAN,
        }
    }

    /// Counter of the steps of a parameter, where a device counts.
    pub(in crate::kernels) fn counter(&self, param: usize) -> Option<FlatView<'a>> {
        match self {
            Self::Counted(_) => None,
            Self::Counters(counters) => counters.get(param).copied(),
        }
    }
}

/// Correction for moments that start at zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Debias {
    /// Nothing.
    None,
    /// They are corrected.
    Moments,
    /// The finished step is.
    Step,
}

/// The trust ratio φ(‖x‖)/‖u‖, and what else a parameter's own factors follow from. A bound that is not set is NaN.
#[derive(Clone, Copy, Debug)]
pub struct Trust {
    /// `lr`.
    pub lr: f64,
    /// β₁ and β₂.
    pub betas: [f64; 2],
    /// Correction for moments that start at zero.
    pub debias: Debias,
    /// True if the ratio is taken.
    pub adapts: bool,
    /// Bounds between which ‖x‖ is kept.
    pub bounds: [f64; 2],
    /// The largest ratio.
    pub clip: f64,
    /// The gradient's factor: sign and unscaling.
    pub grad_factor: f64,
    /// The largest norm of all gradients of the group.
    pub max_grad_norm: f64,
}

/// The rates of parameters before they are clipped.
#[derive(Clone, Copy, Debug)]
pub enum Rates<'a> {
    /// The learning rate.
    Learning(f64),
    /// 1: what is multiplied by the learning rate comes later.
    Unit,
    /// Of each `min(a, 1/√t)` with `a = 10⁻²`, or `10⁻⁶ t` where it warms up.
    Relative {
        /// t.
        steps: &'a Steps<'a>,
        /// True if the rate warms up.
        warms_up: bool,
    },
}

/// Sums over the elements of one parameter.
#[derive(Clone, Copy, Debug)]
pub struct UpdateSums<'a> {
    /// Σ u².
    pub update: FlatView<'a>,
    /// Σ x²; empty where the rate does not follow the parameter.
    pub param: FlatView<'a>,
    /// Elements.
    pub numel: usize,
}

/// Scalars that are common to all parameters.
#[derive(Clone, Copy, Debug)]
pub struct Clipping {
    /// The gradient's factor: sign and unscaling.
    pub grad_factor: f64,
    /// The root mean square from which an update is clipped.
    pub threshold: f64,
    /// The least root mean square of a parameter that its rate follows.
    pub floor: f64,
    /// λ.
    pub weight_decay: f64,
}

/// A number of elements, at least one.
#[allow(clippy::cast_precision_loss)] // below 2⁵³
pub(in crate::kernels) fn count(numel: usize) -> f64 {
    numel.max(1) as f64
}

/// Counts a step of each counter where it is. Returns `AdamW`'s corrections, and the counters that they follow: none
/// where the host counts.
///
/// # Errors
/// As [`crate::kernels::run`].
pub fn count_steps(
    counters: Vec<FlatViewMut<'_>>,
    lr: f64,
    betas: [f64; 2],
) -> Result<(Vec<[f64; 2]>, Vec<FlatView<'_>>)> {
    Ok(match Steps::count(counters)? {
        Steps::Counted(steps) => (super::adamw::AdamW::corrections(lr, betas, steps.into_iter()), Vec::new()),
        Steps::Counters(counters) => (vec![[lr, 1.0]; counters.len()], counters),
    })
}
