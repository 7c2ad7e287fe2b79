//! By what LAMB scales the steps of parameters.

use super::factors::{Debias, Factors, Steps, Trust};
use crate::error::Result;
use crate::kernels::libtorch::on_device;
use crate::tensor::{Device, FlatView};

impl Trust {
    /// Of each job the corrections of m and √v, the factor of the gradient and, from Σ x² and Σ u² in `norms` where they
    /// are `summed`, that of u. `group` has Σ g² of all parameters of the group, where gradients are clipped.
    ///
    /// # Errors
    /// Whatever a device says.
    pub fn factors(
        &self,
        steps: &Steps<'_>,
        norms: &[FlatView<'_>],
        summed: bool,
        group: &[FlatView<'_>],
    ) -> Result<Factors<4>> {
        let device = norms.first().map_or(Device::Cpu, FlatView::device);
        let (Device::Cpu, Steps::Counted(steps)) = (device, steps) else {
            let factors = Factors::room(norms.len(), device)?;
            let norms = summed.then_some(norms);
            on_device!(
                super::factors::SOURCES;
                super::factors::device::lamb_factors(self, steps, norms, group, factors.left()),
                else super::factors::fallback::lamb_factors(self, steps, norms, group, factors.left())
            )?;
            return Ok(factors);
        };
        let norm = group.iter().flat_map(|sums| sums.numbers().iter()).sum::<f64>().sqrt();
        let clip = if norm > self.max_grad_norm { self.max_grad_norm / norm } else { 1.0 };
        let each = steps.iter().zip(norms).map(|(step, norms)| {
            let own = self.corrections(*step);
            let [first, second] = if self.debias == Debias::Moments { own } else { [1.0; 2] };
            let rate = if summed { self.rate(own, norms.numbers()) } else { 0.0 };
            [first, second, self.grad_factor * clip, rate]
        });
        Ok(Factors::known(each.collect()))
    }

    /// `1 / (1 - β₁ᵗ)` and `1 / √(1 - β₂ᵗ)`.
    pub(in crate::kernels) fn corrections(&self, step: f64) -> [f64; 2] {
        let [beta1, beta2] = self.betas;
        [1.0 / (1.0 - beta1.powf(step)), 1.0 / (1.0 - beta2.powf(step)).sqrt()]
    }

    /// The factor of u: `lr` times the trust ratio of these squared norms.
    fn rate(&self, [first, second]: [f64; 2], squares: &[f64]) -> f64 {
        let [mut x, u] = [squares[0].sqrt(), squares[1].sqrt()];
        let [low, high] = self.bounds;
        if !low.is_nan() && !high.is_nan() {
            x = x.max(low).min(high);
        }
        let mut ratio = if self.adapts && !(x <= 0.0 || u <= 0.0) { x / u } else { 1.0 };
        if self.adapts && ratio > self.clip {
            ratio = self.clip;
        }
        if self.debias == Debias::Step {
            ratio *= first / second;
        }
        self.lr * ratio
    }
}
