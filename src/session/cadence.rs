//! The steps that parameters have taken, and which parts of a step wait for them.

use std::collections::BTreeSet;

use super::Session;
use super::tensors::{BoundParam, BoundTensor};
use super::views::{Fixed, matrix};
use crate::error::Result;
use crate::kernels;
use crate::plan::Param;
use crate::tensor::Device;

impl BoundParam {
    /// Counts the step that was taken. All matrices of a parameter share the counter, and processes that store none of
    /// them have it too.
    pub(super) fn count(&mut self) {
        if let Some(counter) = self.counter {
            let _ = self.states[counter].view_mut().increment();
        }
    }
}

impl Fixed {
    /// Tests whether the unit waits still, given the state that says so. It is read until it does not; during a capture,
    /// which no answer can reach, nothing waits.
    fn waits(&mut self, bound_param: &BoundParam, state: usize) -> Result<bool> {
        let Some((at, rect)) = self.states.get(state).filter(|_| !self.seen) else { return Ok(false) };
        let number = matrix(&bound_param.states[*at].view(), rect);
        if number.device() != Device::Cpu && kernels::is_capturing()? {
            return Ok(false);
        }
        let numbers = number.tensor()?;
        self.seen = numbers.numel() == 0 || f64::try_from(numbers.f_sum(tch::Kind::Double)?)? != 0.0;
        Ok(!self.seen)
    }
}

impl Session {
    /// Finds the units that are due, and the buckets with one. Ranks that work on the same matrices find the same: they agree
    /// on the gradients, and their counters are equal.
    ///
    /// # Errors
    /// Whatever libtorch says where a device is asked.
    pub(super) fn mark_due(&mut self) -> Result<()> {
        for bound_param in &mut self.bound {
            if let (Some(counter), Some(_)) = (bound_param.counter, &bound_param.grad) {
                bound_param.steps = bound_param.states[counter].view().count();
            }
        }
        for ((bucket, marked), fixed) in self.plan.buckets.iter().zip(&mut self.due).zip(&mut self.fixed) {
            *marked = false;
            if !bucket.program.guarded() {
                continue;
            }
            let algorithm = &self.plan.algorithms[bucket.algorithm];
            for unit in fixed {
                let bound_param = &self.bound[unit.param];
                unit.due = bound_param.grad.is_some()
                    && (algorithm.due(unit.stream, bound_param.steps)
                        || algorithm
                            .first_refresh()
                            .map_or(Ok(false), |state| unit.waits(bound_param, state))?);
                *marked |= unit.due;
            }
        }
        Ok(())
    }

    /// The collectives that are left out in the step that has begun.
    #[must_use]
    pub fn idle(&self) -> BTreeSet<usize> {
        let transfers = self.plan.transfers.iter().enumerate();
        transfers.filter(|(_, t)| t.guarded && !self.due[t.bucket]).map(|(k, _)| k).collect()
    }

    /// Returns the pattern of the parameters, which decides about the launches of the step that has begun: 0 for one without
    /// a gradient, else 1 or, where the gradient must keep its address, that address; then which units are scheduled
    /// (`Algorithm::due`). Also returns true if a unit is scheduled or no replay repeats the step.
    /// Steps with equal patterns are made of the same launches.
    #[must_use]
    pub fn pattern(&self) -> (Vec<usize>, bool) {
        let bound = self.bound.iter().zip(&self.plan.params);
        let taken = bound.map(|(bound_param, planned)| {
            let stays = self.plan.algorithms[planned.algorithm].multiplies_gradients();
            bound_param.grad.as_ref().map_or(0, |grad| if stays { grad.flat.address() } else { 1 })
        });
        let due = self.fixed.iter().flatten().map(|unit| usize::from(unit.due));
        let is_direct = |planned: &Param| {
            let encoded = planned.rounding.is_some() || planned.master().is_some();
            !self.plan.algorithms[planned.algorithm].replays(encoded)
        };
        let direct = self.plan.params.iter().any(is_direct) || self.due.iter().any(|due| *due);
        (taken.chain(due).collect(), direct)
    }

    /// The parameters of the step that has begun which, with their states, are worked on in copies.
    #[must_use]
    pub fn copied(&self) -> Vec<&str> {
        let bound =
            self.bound.iter().zip(&self.plan.params).filter(|(bound_param, _)| bound_param.grad.is_some());
        let copied = bound.filter(|(bound_param, _)| bound_param.own().any(BoundTensor::is_copied));
        copied.map(|(_, planned)| planned.spec.name.as_str()).collect()
    }
}
