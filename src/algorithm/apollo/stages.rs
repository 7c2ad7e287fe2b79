//! The stages of APOLLO.

use super::super::low_rank::{MOMENTUM, VARIANCE};
use super::{
    Apollo, BETA1, BETA2, EPSILON, FACTORS, LOW, LR, NORMS, P, SCALE, TOTAL, TOTAL_ALL, UPDATE_NORM,
    WEIGHT_DECAY, WIDE,
};
use crate::algorithm::stage::{StageIo, jobs};
use crate::error::Result;
use crate::kernels::{self, ChannelStep, Channels, Limited, Projected};
use crate::linalg::low_rank::{GaussianRows, gaussian_rows};
use crate::linalg::random::Key;
use crate::spec::{Hyper, Side};
use crate::tensor::FlatView;

/// Separates these random numbers from others of the same parameter.
const TAG: u32 = 4;

impl Apollo {
    /// `R = G·P`, as far as both are stored here.
    pub(super) fn project(&self, io: &StageIo<'_>) -> Result<()> {
        let side = self.side(io.class);
        let product = io.class.param.arithmetic();
        let rows = io.units.iter().enumerate().map(|(i, unit)| {
            let d = [unit.rows, unit.cols][side.index()];
            #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // a step count
            let period = unit.steps as u64 / self.common.gap as u64;
            Ok(GaussianRows {
                key: Key { seed: self.common.seed, stream: unit.param_index as u64 },
                tag: TAG,
                step: period,
                first: unit.block_index * d + io.origin(P, i)?[0],
                out: io.area(P, i)?,
            })
        });
        gaussian_rows(&rows.collect::<Result<Vec<_>>>()?)?;
        for (i, unit) in io.units.iter().enumerate() {
            let p = io.matrix(P, i)?;
            let grad = if unit.grad.dtype() == product {
                unit.grad.tensor()?
            } else {
                let [rows, cols] = unit.grad.shape();
                let wide = io.flat(WIDE, i)?.part(0, rows * cols).area(0, [rows, cols], cols);
                kernels::run(&kernels::Convert { factor: 1.0 }, &jobs([Ok([unit.grad, wide])])?)?;
                wide.tensor()?
            };
            let out = io.matrix(LOW, i)?;
            kernels::frozen(|| {
                let _ = match side {
                    Side::Cols => grad.f_mm_out(&out, &p)?,
                    Side::Rows => p.f_tr()?.f_mm_out(&out, &grad)?,
                };
                Ok(())
            })?;
        }
        Ok(())
    }

    /// Moments of the projected gradient, and the ratios of norms that they give.
    pub(super) fn ratio(&self, io: &StageIo<'_>, h: &Hyper) -> Result<()> {
        let one = |i| Ok(Projected { low: io.area(LOW, i)?, channels: self.channels(io, i)? });
        let projected = (0..io.units.len()).map(one).collect::<Result<Vec<_>>>()?;
        kernels::channel_squares(&projected)?;
        let direction = kernels::Direction {
            beta1: h[BETA1],
            beta2: h[BETA2],
            epsilon: h[EPSILON],
            grad_factor: io.grad_factor,
            // Not corrected: the step size is.
            corrections: vec![[1.0; 2]; io.units.len()],
            unit: 1.0,
            per_rate: false,
        };
        let units = io.units.iter().enumerate();
        let all = units.map(|(i, u)| Ok([io.area(LOW, i)?, u.state[MOMENTUM], u.state[VARIANCE]]));
        kernels::run(&direction, &jobs(all)?)?;
        kernels::channel_ratios(io.grad_factor, &projected)
    }

    /// The factors of a unit's channels.
    fn channels(&self, io: &StageIo<'_>, i: usize) -> Result<Channels> {
        let norms = if self.tensor { io.flat(NORMS, i)? } else { FlatView::EMPTY };
        Ok(Channels { side: self.channel_side(io.class), factors: io.flat(FACTORS, i)?, norms })
    }

    /// The squared norms of the updates, as far as they are stored here.
    pub(super) fn measure(&self, io: &StageIo<'_>) -> Result<()> {
        let one = |i: usize| Ok((self.channels(io, i)?, io.units[i].grad, io.flat(TOTAL, i)?));
        kernels::channel_totals(&(0..io.units.len()).map(one).collect::<Result<Vec<_>>>()?)
    }

    /// The limited step.
    pub(super) fn apply(&self, io: &StageIo<'_>, h: &Hyper) -> Result<()> {
        let step = ChannelStep {
            grad_factor: io.grad_factor,
            decay: h[LR] * h[WEIGHT_DECAY],
            cautious: self.common.cautious,
            late: self.common.late,
        };
        let units = io.units.iter().enumerate().map(|(i, unit)| {
            let steps = unit.steps + 1.0;
            let corrected = (1.0 - h[BETA2].powf(steps)).sqrt() / (1.0 - h[BETA1].powf(steps));
            Ok(Limited {
                channels: self.channels(io, i)?,
                param: unit.param,
                grad: unit.grad,
                total: io.flat(TOTAL_ALL, i)?,
                last: unit.state[UPDATE_NORM].row(0),
                rate: h[LR] * corrected * h[SCALE].sqrt(),
                fresh: unit.steps <= 0.0,
            })
        });
        kernels::channel_steps(&step, &units.collect::<Result<Vec<_>>>()?)
    }
}
