//! Averages of the weights, before and after the instructions of a step.

use std::sync::Arc;

use super::{Session, device};
use crate::error::{Error, Result};
use crate::kernels;
use crate::plan::AVERAGE;

/// The average of a group's weights in one step.
#[derive(Clone, Copy, Debug)]
pub struct AverageStep {
    /// True if gradients are taken between the weights that are stepped and their average, false if the average follows.
    pub interpolates: bool,
    /// The share of the present weights in the average.
    pub share: f64,
    /// The share of the average in where gradients are taken.
    pub beta: f64,
    /// `lr · weight_decay` of a decay along the weights at which gradients are taken.
    pub decay: f64,
}

impl Session {
    /// Works on the averages of the parameters with a gradient, by group: before the instructions of the step that has begun,
    /// where they are stepped elsewhere than where gradients are taken, or after them.
    ///
    /// # Errors
    /// Whatever a device says, and `Error::Value` during a capture, whose replays would all have the numbers of one step.
    pub fn average(&mut self, groups: &[Option<AverageStep>], is_late: bool) -> Result<()> {
        let _there = device::enter(self.device, self.stream, self.encoded, &self.sources)?;
        if kernels::is_capturing()? {
            return Err(Error::Value(
                "a step with an average of the weights cannot be captured: its numbers change from step to step".into(),
            ));
        }
        let plan = Arc::clone(&self.plan);
        for (group, average) in groups.iter().enumerate() {
            let Some(AverageStep { interpolates, share, beta, decay }) = *average else { continue };
            if !interpolates && !is_late {
                continue;
            }
            let mut operands = Vec::new();
            for (planned, bound) in plan.params.iter().zip(&mut self.bound) {
                let at = planned.states.iter().position(|state| state.spec.role == AVERAGE);
                let (Some(at), true) = (at, planned.group == group && bound.grad.is_some()) else { continue };
                let (param, state) = (&mut bound.param, &mut bound.states[at]);
                operands.push((param.view_mut(), state.view_mut()));
            }
            if !interpolates {
                let all =
                    operands.into_iter().map(|(x, e)| kernels::Job { read: [x.into_view()], write: [e] });
                kernels::run(&kernels::Average { share }, &mut all.collect::<Vec<_>>())?;
                continue;
            }
            let mut all: Vec<_> =
                operands.into_iter().map(|(x, e)| kernels::Job { read: [], write: [x, e] }).collect();
            if is_late {
                kernels::run(&kernels::PutTogether { beta, share }, &mut all)?;
            } else {
                kernels::run(&kernels::TakeApart { beta, decay }, &mut all)?;
            }
        }
        Ok(())
    }
}
