//! The stages of APOLLO.

use super::{
    Apollo, BETA1, BETA2, EPSILON, FACTORS, LOW, LR, NORMS, P, SCALE, TOTAL, TOTAL_ALL, UPDATE_NORM,
    WEIGHT_DECAY, WIDE,
};
use crate::algorithm::low_rank::{gradient, in_products};
use crate::algorithm::stage::{BufferIo, StageIo, UnitIo, jobs};
use crate::error::Result;
use crate::kernels::{self, ChannelStep, Channels, Job, Limited, Projected};
use crate::linalg::OneThread;
use crate::linalg::low_rank::{GaussianRows, gaussian_rows};
use crate::linalg::random::Key;
use crate::spec::{Hyper, Side, UnitShape};
use crate::tensor::FlatViewMut;

/// Separates these random numbers from others of the same parameter.
const TAG: u32 = 4;

impl Apollo {
    /// `R = G·P`, as far as both are stored here.
    pub(super) fn project(&self, io: &mut StageIo<'_>) -> Result<()> {
        let side = self.side(io.class);
        let StageIo { units, buffers, class, .. } = io;
        let projections = buffers.get_mut(P)?;
        let firsts = units.iter().map(|unit| Ok(projections.origin(unit)?[0])).collect::<Result<Vec<_>>>()?;
        let all = units.iter().zip(projections.matrices(units)?).zip(firsts);
        let rows = all.filter(|((unit, _), _)| unit.active).map(|((unit, out), first)| {
            let d = [unit.rows, unit.cols][side.index()];
            #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // a step count
            let period = unit.steps as u64 / self.common.gap as u64;
            GaussianRows {
                key: Key { seed: self.common.seed, stream: unit.stream },
                tag: TAG,
                step: period,
                first: unit.block_index * d + first,
                out,
            }
        });
        gaussian_rows(&mut rows.collect::<Vec<_>>())?;
        let [p, wide, low] = buffers.several([P, WIDE, LOW])?;
        let _alone = OneThread::for_small(units.len() * class.rows * class.cols * self.common.rank());
        for unit in units.iter().filter(|unit| unit.active) {
            let p = p.read_tensor(unit)?;
            let grad = gradient(class, unit, wide)?;
            let out = low.tensor(unit)?;
            kernels::frozen(|| {
                let grad = in_products(class, &grad)?;
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
    pub(super) fn ratio(&self, io: &mut StageIo<'_>, h: &Hyper) -> Result<()> {
        let (grad_factor, class) = (io.grad_factor, io.class);
        let StageIo { units, buffers, .. } = io;
        let [low, factors, norms] = buffers.several([LOW, FACTORS, NORMS])?;
        let channels = self.channels(class, units, factors, norms)?;
        // Where matrices are whole, those without a gradient are among the units.
        let projected =
            units.iter().zip(low.matrices(units)?).zip(channels).filter(|((unit, _), _)| unit.active);
        let mut projected: Vec<_> =
            projected.map(|((_, low), channels)| Projected { low, channels }).collect();
        kernels::channel_squares(&mut projected)?;
        let direction = kernels::Direction {
            beta1: h[BETA1],
            beta2: h[BETA2],
            epsilon: h[EPSILON],
            grad_factor,
            // Not corrected: the step size is.
            corrections: vec![[1.0; 2]; projected.len()],
            unit: 1.0,
            per_rate: false,
        };
        let active = units.iter_mut().filter(|unit| unit.active);
        let all = active.zip(&mut projected).map(|(unit, one)| {
            let [m, v, ..] = &mut unit.state;
            ([], [one.low.reborrow(), m.reborrow(), v.reborrow()])
        });
        kernels::run(&direction, &mut jobs(all))?;
        kernels::channel_ratios(grad_factor, &mut projected)
    }

    /// The factors of the units' channels.
    fn channels<'s>(
        &self,
        class: &UnitShape,
        units: &[UnitIo<'_>],
        factors: &'s mut BufferIo<'_>,
        norms: &'s mut BufferIo<'_>,
    ) -> Result<Vec<Channels<'s>>> {
        let side = self.channel_side(class);
        let norms = if self.tensor {
            norms.flats(units)?
        } else {
            units.iter().map(|_| FlatViewMut::EMPTY).collect()
        };
        let all = factors.flats(units)?.into_iter().zip(norms);
        Ok(all.map(|(factors, norms)| Channels { side, factors, norms }).collect())
    }

    /// The squared norms of the updates, as far as they are stored here.
    pub(super) fn measure(&self, io: &mut StageIo<'_>) -> Result<()> {
        let StageIo { units, buffers, class, .. } = io;
        let [factors, norms, totals] = buffers.several([FACTORS, NORMS, TOTAL])?;
        let channels = self.channels(class, units, factors, norms)?;
        let all = units.iter().zip(channels).zip(totals.flats(units)?);
        let all = all.map(|((unit, channels), total)| (channels, unit.grad, total));
        kernels::channel_totals(&mut all.collect::<Vec<_>>())
    }

    /// The sums of the squared norms over the rows, to be summed over the columns.
    pub(super) fn sum(io: &mut StageIo<'_>) -> Result<()> {
        let StageIo { units, buffers, .. } = io;
        let [totals, all] = buffers.several([TOTAL, TOTAL_ALL])?;
        let pairs = totals.flats(units)?.into_iter().zip(all.flats(units)?);
        let pairs = pairs.map(|(from, to)| Job { read: [from.into_view()], write: [to] });
        kernels::run(&kernels::Convert { factor: 1.0 }, &mut pairs.collect::<Vec<_>>())
    }

    /// The limited step.
    pub(super) fn apply(&self, io: &mut StageIo<'_>, h: &Hyper) -> Result<()> {
        let step = ChannelStep {
            grad_factor: io.grad_factor,
            decay: h[LR] * h[WEIGHT_DECAY],
            cautious: self.common.cautious,
            late: self.common.late,
        };
        let StageIo { units, buffers, class, .. } = io;
        let [factors, norms, totals] = buffers.several([FACTORS, NORMS, TOTAL_ALL])?;
        let channels = self.channels(class, units, factors, norms)?;
        let all = channels.into_iter().zip(totals.flats(units)?);
        let all = units.iter_mut().zip(all).map(|(unit, (channels, total))| {
            let steps = unit.steps + 1.0;
            let corrected = (1.0 - h[BETA2].powf(steps)).sqrt() / (1.0 - h[BETA1].powf(steps));
            let UnitIo { param, grad, state, .. } = unit;
            Limited {
                channels,
                param: param.reborrow(),
                grad: *grad,
                total: total.into_view(),
                last: state[UPDATE_NORM].row(0),
                rate: h[LR] * corrected * h[SCALE].sqrt(),
            }
        });
        kernels::channel_steps(&step, &mut all.collect::<Vec<_>>())
    }
}
