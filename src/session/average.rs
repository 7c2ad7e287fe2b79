//! Averages of the weights, before and after the instructions of a step.

use std::sync::Arc;

use super::Session;
use super::tensors::BoundParam;
use crate::error::{Error, Result};
use crate::kernels::{self, Job};
use crate::plan::{AVERAGE, Param, Plan};

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
        let plan = Arc::clone(&self.plan);
        for device in plan.devices() {
            let _there = self.enter(device)?;
            if kernels::is_capturing()? {
                return Err(Error::Value(
                    "a step with an average of the weights cannot be captured: its numbers change from step to step".into(),
                ));
            }
            for (group, average) in groups.iter().enumerate() {
                if let Some(average) = average.filter(|own| own.interpolates || is_late) {
                    let takes = |planned: &Param| planned.group == group && planned.device == device;
                    average_of(&plan, &mut self.bound, takes, average, is_late)?;
                }
            }
        }
        Ok(())
    }
}

/// The averages of the parameters of one group on one device.
fn average_of(
    plan: &Plan,
    bound: &mut [BoundParam],
    takes: impl Fn(&Param) -> bool,
    average: AverageStep,
    is_late: bool,
) -> Result<()> {
    let AverageStep { interpolates, share, beta, decay } = average;
    let mut operands = Vec::new();
    for (planned, bound) in plan.params.iter().zip(bound) {
        let at = planned.states.iter().position(|state| state.spec.role == AVERAGE);
        let (Some(at), true) = (at, takes(planned) && bound.grad.is_some()) else { continue };
        operands.push((bound.param.view_mut(), bound.states[at].view_mut()));
    }
    if !interpolates {
        let all = operands.into_iter().map(|(x, e)| Job { read: [x.into_view()], write: [e] });
        return kernels::run(&kernels::Average { share }, &mut all.collect::<Vec<_>>());
    }
    let mut all: Vec<_> = operands.into_iter().map(|(x, e)| Job { read: [], write: [x, e] }).collect();
    if is_late {
        kernels::run(&kernels::PutTogether { beta, share }, &mut all)
    } else {
        kernels::run(&kernels::TakeApart { beta, decay }, &mut all)
    }
}
