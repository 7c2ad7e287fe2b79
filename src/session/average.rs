//! Averages of the weights: the numbers of a step, and what is done before and after its instructions.

use std::sync::Arc;

use super::Session;
use super::tensors::{BoundParam, BoundTensor};
use crate::error::{Error, Result};
use crate::kernels::{self, Job};

/// The rule of an average, with its settings.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum AverageRule {
    /// An exponential moving average E: `E ← E + (1 - decay)·(X - E)`, and E = X up to step `start`.
    Ema {
        /// The share of E that is kept.
        decay: f64,
        /// The steps of the parameter after which the average begins.
        start: f64,
    },
    /// Schedule-Free: the algorithm steps z, the average x follows z, and gradients are taken at `y = (1 - beta)·z + beta·x`.
    ScheduleFree {
        /// The share of x in y.
        beta: f64,
        /// The power of the largest learning rate in the weight of a step.
        lr_power: f64,
        /// The power of the number of the step in it.
        step_power: f64,
        /// `lr · weight_decay` of a decay along y.
        decay: f64,
    },
}

/// The average of a group in a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AverageStep {
    /// Its rule.
    pub rule: AverageRule,
    /// The learning rate, if the host knows it. A step at 0 begins no average: it changes no weight, and optimizers are
    /// stepped at 0 to make states for a checkpoint before the weights are there.
    pub lr: Option<f64>,
}

/// Change of the average of a parameter in the step that has begun.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct AverageUpdate {
    /// True if the average starts as a copy of the weights.
    begins: bool,
    /// Share of the new weights in the average.
    share: f64,
    /// Only of Schedule-Free.
    between: Option<Between>,
}

/// Interpolation between the weights that are stepped and their average.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Between {
    /// Share of the average in the parameter before the step.
    before: f64,
    /// The same after it.
    beta: f64,
    /// `lr · weight_decay`.
    decay: f64,
}

/// The counters of an average after the step, in the order of `AveragePlaces`.
#[derive(Clone, Copy, Debug)]
pub(super) struct AverageCounters {
    step: f64,
    schedule_free: [f64; 3],
}

impl BoundParam {
    /// Change of the average by a step, and its counters after it. None where the parameter has no average, and where the
    /// step does not begin one.
    ///
    /// # Errors
    /// `Error::Mode` for a parameter that holds its average.
    fn average_update(&self, own: &AverageStep) -> Result<Option<(AverageUpdate, AverageCounters)>> {
        let Some(places) = self.average else { return Ok(None) };
        let number = |at: usize| self.states[at].view().count();
        let before = number(places.step);
        let begins = before == 0.0;
        if begins && own.lr == Some(0.0) {
            return Ok(None);
        }
        let step = before + 1.0;
        let (share, between, schedule_free) = match (own.rule, places.schedule_free) {
            (AverageRule::Ema { decay, start }, _) => {
                (if step <= start { 1.0 } else { 1.0 - decay }, None, [0.0; 3])
            }
            (AverageRule::ScheduleFree { beta, lr_power, step_power, decay }, Some(own_places)) => {
                let [sum, most, held] = if begins { [0.0, 0.0, 1.0] } else { own_places.map(number) };
                if !begins && held >= 1.0 {
                    return Err(Error::Mode(
                        "the parameters hold their averages since eval(): call train() before step()".into(),
                    ));
                }
                let most = most.max(own.lr.unwrap_or(0.0));
                let weight = step.powf(step_power) * most.powf(lr_power);
                let sum = sum + weight;
                // Before the first step the parameter, z and x are equal: its share of x is 1.
                let between = Between { before: held, beta, decay };
                (if sum == 0.0 { 0.0 } else { weight / sum }, Some(between), [sum, most, beta])
            }
            (AverageRule::ScheduleFree { .. }, None) => {
                return Err(Error::Internal("an average without its counters".into()));
            }
        };
        Ok(Some((AverageUpdate { begins, share, between }, AverageCounters { step, schedule_free })))
    }

    /// Writes the counters of the average after a step.
    fn count_average(&mut self, counters: &AverageCounters) {
        let Some(places) = self.average else { return };
        self.states[places.step].view_mut().slice_mut::<f64>().fill(counters.step);
        for (at, value) in places.schedule_free.into_iter().flatten().zip(counters.schedule_free) {
            self.states[at].view_mut().slice_mut::<f64>().fill(value);
        }
    }
}

impl Session {
    /// Finds what the step that has begun does to averages, by group. Nothing is written.
    ///
    /// # Errors
    /// `Error::Mode` for parameters that hold their averages.
    pub(super) fn mark_averages(&mut self, groups: &[Option<AverageStep>]) -> Result<()> {
        self.averages.clear();
        if groups.iter().all(Option::is_none) {
            return Ok(());
        }
        for (at, (planned, bound)) in self.plan.params.iter().zip(&self.bound).enumerate() {
            let own = groups.get(planned.group).copied().flatten();
            if let (Some(own), true) = (own, bound.grad.is_some())
                && let Some((update, counters)) = bound.average_update(&own)?
            {
                self.averages.push((at, update, counters));
            }
        }
        Ok(())
    }

    /// Works on the averages of the parameters with a gradient, before the instructions of the step that has begun or
    /// after them, and after `look_before_averages`.
    ///
    /// # Errors
    /// Whatever a device says, and `Error::Value` during a capture, whose replays would all have the numbers of one step.
    pub fn average(&mut self, is_late: bool) -> Result<()> {
        if self.averages.is_empty() {
            return Ok(());
        }
        let plan = Arc::clone(&self.plan);
        for device in plan.devices() {
            let _there = self.enter(device)?;
            if kernels::is_capturing()? {
                return Err(Error::Value(
                    "a step with an average of the weights cannot be captured: its numbers change from step to step".into(),
                ));
            }
            let here: Vec<_> =
                self.averages.iter().filter(|(at, ..)| plan.params[*at].device == device).copied().collect();
            let mut alike: Vec<AverageUpdate> = Vec::new();
            for (_, update, _) in &here {
                if !alike.contains(update) {
                    alike.push(*update);
                }
            }
            for update in alike {
                let takes: Vec<usize> =
                    here.iter().filter(|(_, other, _)| *other == update).map(|(at, ..)| *at).collect();
                run(&mut self.bound, &takes, update, is_late)?;
            }
        }
        if is_late {
            for (at, _, counters) in &self.averages {
                self.bound[*at].count_average(counters);
            }
        }
        Ok(())
    }
}

/// Does the same to the averages of these parameters, whose numbers ascend.
fn run(bound: &mut [BoundParam], takes: &[usize], update: AverageUpdate, is_late: bool) -> Result<()> {
    let AverageUpdate { begins, share, between } = update;
    if begins && !is_late {
        follow(bound, takes, 1.0)?;
    }
    let Some(Between { before, beta, decay }) = between else {
        return if is_late { follow(bound, takes, share) } else { Ok(()) };
    };
    let pairs = pairs(bound, takes);
    let mut all: Vec<_> = pairs.map(|(x, e)| Job { read: [], write: [x.view_mut(), e.view_mut()] }).collect();
    if is_late {
        kernels::run(&kernels::ScheduleFreeEnd { beta, share }, &mut all)
    } else {
        kernels::run(&kernels::ScheduleFreeBegin { beta: before, decay }, &mut all)
    }
}

/// Has averages take this share of the weights.
fn follow(bound: &mut [BoundParam], takes: &[usize], share: f64) -> Result<()> {
    let all = pairs(bound, takes).map(|(x, e)| Job { read: [x.view()], write: [e.view_mut()] });
    kernels::run(&kernels::Average { share }, &mut all.collect::<Vec<_>>())
}

/// Parameters with their averages.
fn pairs<'s>(
    bound: &'s mut [BoundParam],
    takes: &'s [usize],
) -> impl Iterator<Item = (&'s mut BoundTensor, &'s mut BoundTensor)> {
    let own = bound.iter_mut().enumerate().filter(|(at, _)| takes.binary_search(at).is_ok());
    own.filter_map(|(_, bound)| {
        let places = bound.average?;
        Some((&mut bound.param, &mut bound.states[places.average]))
    })
}
