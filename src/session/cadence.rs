//! The steps that parameters have taken, and which parts of a step wait for them.

use std::collections::BTreeSet;

use super::Session;
use super::tensors::{BoundParam, BoundTensor};

impl BoundParam {
    /// Counts the step that was taken. All matrices of a parameter share the counter, and processes that store none of
    /// them have it too.
    pub(super) fn count(&mut self) {
        if let Some(counter) = self.counter {
            let _ = self.states[counter].view_mut().increment();
        }
    }
}

impl Session {
    /// Finds the parameters that are due, and the buckets with one. Ranks that work on the same matrices find the same:
    /// they agree on the gradients, and their counters are equal.
    pub(super) fn mark_due(&mut self) {
        for bound_param in &mut self.bound {
            if let (Some(counter), Some(_)) = (bound_param.counter, &bound_param.grad) {
                bound_param.steps = bound_param.states[counter].view().count();
            }
        }
        for (bucket, marked) in self.plan.buckets.iter().zip(&mut self.due) {
            *marked = false;
            if !bucket.program.guarded() {
                continue;
            }
            let algorithm = &self.plan.algorithms[bucket.algorithm];
            for unit in &bucket.units {
                let bound_param = &mut self.bound[unit.param];
                bound_param.due = bound_param.grad.is_some() && algorithm.due(unit.param, bound_param.steps);
                *marked |= bound_param.due;
            }
        }
    }

    /// The collectives that are left out in the step that has begun.
    #[must_use]
    pub fn idle(&self) -> BTreeSet<usize> {
        let transfers = self.plan.transfers.iter().enumerate();
        transfers.filter(|(_, t)| t.guarded && !self.due[t.bucket]).map(|(k, _)| k).collect()
    }

    /// Pattern of the parameters, which decides about the launches of the step that has begun: 0 for one that takes no
    /// part, else 1 or, where its gradient has to stay, the gradient's address; and true if one of the buckets is due.
    /// Steps with equal patterns are made of the same launches.
    #[must_use]
    pub fn pattern(&self) -> (Vec<usize>, bool) {
        let bound = self.bound.iter().zip(&self.plan.params);
        let taken = bound.map(|(bound_param, planned)| {
            let stays = self.plan.algorithms[planned.algorithm].multiplies_gradients();
            bound_param.grad.as_ref().map_or(0, |grad| if stays { grad.flat.address() } else { 1 })
        });
        (taken.collect(), self.due.iter().any(|due| *due))
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
