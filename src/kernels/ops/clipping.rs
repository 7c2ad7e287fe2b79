//! By what updates with factored second moments are multiplied: rates, and the clipping of their root mean square.

use super::factors::{Clipping, Factors, Rates, UpdateSums, count};
use crate::error::Result;
use crate::kernels::libtorch::on_device;
use crate::tensor::{Device, FlatView};

impl Clipping {
    /// Of each job the factor of g/√V, and the decay.
    ///
    /// # Errors
    /// Whatever a device says.
    pub fn factors(&self, rates: &Rates<'_>, sums: &[UpdateSums<'_>]) -> Result<Factors<2>> {
        let device = sums.first().map_or(Device::Cpu, |sums| sums.update.device());
        if device != Device::Cpu {
            let factors = Factors::room(sums.len(), device)?;
            on_device!(
                super::factors::SOURCES;
                super::factors::device::update_factors(self, rates, sums, factors.left()),
                else super::factors::fallback::update_factors(self, rates, sums, factors.left())
            )?;
            return Ok(factors);
        }
        let each = sums.iter().enumerate().map(|(job, sums)| {
            let scale = match sums.param.numbers() {
                [squares] => {
                    let size = root_mean_square(*squares, sums.numel);
                    if size < self.floor { self.floor } else { size }
                }
                _ => 1.0,
            };
            let rate = rates.of(job) * scale;
            let update = sums.update.numbers().first().copied().unwrap_or(f64::NAN);
            let ratio = root_mean_square(update, sums.numel) / self.threshold;
            // A NaN must show.
            let divisor = if ratio < 1.0 { 1.0 } else { ratio };
            [rate * self.grad_factor / divisor, rate * self.weight_decay]
        });
        Ok(Factors::known(each.collect()))
    }
}

impl<'a> Rates<'a> {
    /// The rate of a job, where the host counts.
    pub(in crate::kernels) fn of(&self, job: usize) -> f64 {
        match self {
            Self::Learning(rate) => *rate,
            Self::Unit => 1.0,
            Self::Relative { steps, warms_up } => {
                let step = steps.of(job);
                let most = if *warms_up { 1e-6 * step } else { 1e-2 };
                most.min(1.0 / step.sqrt())
            }
        }
    }

    /// Counter of the steps of a job, where a device counts.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    pub(in crate::kernels) fn counter(&self, job: usize) -> Option<FlatView<'a>> {
        match self {
            Self::Learning(_) | Self::Unit => None,
            Self::Relative { steps, .. } => steps.counter(job),
        }
    }
}

fn root_mean_square(squares: f64, numel: usize) -> f64 {
    (squares / count(numel)).sqrt()
}
