//! The stages of APOLLO.

use super::super::low_rank::{MOMENTUM, VARIANCE};
use super::{
    Apollo, BETA1, BETA2, EPSILON, FACTORS, LOW, LR, NORMS, P, SCALE, TOTAL, TOTAL_ALL, UPDATE_NORM,
    WEIGHT_DECAY, WIDE,
};
use crate::error::Result;
use crate::hyper::Hyper;
use crate::kernels::{self, ChannelStep, Channels};
use crate::linalg::low_rank::gaussian_rows;
use crate::linalg::random::Key;
use crate::spec::Side;
use crate::stage::{StageIo, jobs};

/// Separates these random numbers from others of the same parameter.
const TAG: u32 = 4;
/// By how much the norm of an update may exceed that of the one before.
const GROWTH: f64 = 1.01;
const TINY: f64 = 1e-8;

impl Apollo {
    /// `R = G·P`, as far as both are stored here.
    pub(super) fn project(&self, io: &StageIo<'_>) -> Result<()> {
        let side = self.side(io.class);
        let product = io.class.param.arithmetic();
        for (i, unit) in io.units.iter().enumerate() {
            let (d, rank) = ([unit.rows, unit.cols][side.index()], self.common.rank());
            let key = Key { seed: self.common.seed, stream: unit.param_index as u64 };
            #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // a step count
            let period = unit.steps as u64 / self.common.gap as u64;
            let first = unit.block_index * d + io.origin(P, i)?[0];
            let mut p = io.matrix(P, i)?;
            p.f_copy_(&gaussian_rows(key, TAG, period, first, io.shape(P, i)?)?)?;
            let grad = if unit.grad.dtype() == product {
                unit.grad.tensor()?
            } else {
                let [rows, cols] = unit.grad.shape();
                let wide = io.slab(WIDE, i)?.part(0, rows * cols).area(0, [rows, cols], cols);
                kernels::run(&kernels::Convert { factor: 1.0 }, &jobs([Ok([unit.grad, wide])])?)?;
                wide.tensor()?
            };
            let out = io.matrix(LOW, i)?;
            debug_assert!(rank == io.shape(P, i)?[1]);
            let _ = match side {
                Side::Cols => grad.f_mm_out(&out, &p)?,
                Side::Rows => p.f_tr()?.f_mm_out(&out, &grad)?,
            };
        }
        Ok(())
    }

    /// Moments of the projected gradient, and the ratios of norms that they give.
    pub(super) fn ratio(&self, io: &StageIo<'_>, h: &Hyper) -> Result<()> {
        let by_row = self.side(io.class) == Side::Cols;
        let squares = |i: usize| Ok(kernels::channel_squares(&io.slab(LOW, i)?, io.shape(LOW, i)?, by_row));
        let before = (0..io.units.len()).map(squares).collect::<Result<Vec<_>>>()?;
        let direction = kernels::Direction {
            beta1: h[BETA1],
            beta2: h[BETA2],
            epsilon: h[EPSILON],
            grad_factor: io.grad_factor,
            factor: 1.0,
            // Not corrected: the step size is.
            steps: vec![f64::INFINITY; io.units.len()],
        };
        let units = io.units.iter().enumerate();
        let all = units.map(|(i, u)| Ok([io.area(LOW, i)?, u.state[MOMENTUM], u.state[VARIANCE]]));
        kernels::run(&direction, &jobs(all)?)?;
        for (i, before) in before.into_iter().enumerate() {
            let after = squares(i)?;
            let low = before.iter().map(|x| io.grad_factor.abs() * x.sqrt());
            if self.tensor {
                let sums = [after.iter().sum::<f64>(), low.map(|x| x * x).sum()];
                io.slab(NORMS, i)?.numbers().copy_from_slice(&sums);
            } else {
                let ratios: Vec<f64> = after.iter().zip(low).map(|(n, r)| n.sqrt() / (r + TINY)).collect();
                io.slab(FACTORS, i)?.numbers().copy_from_slice(&ratios);
            }
        }
        Ok(())
    }

    /// The factors of a unit's channels.
    fn channels(&self, io: &StageIo<'_>, i: usize) -> Result<Channels> {
        let rows = self.side(io.class) == Side::Cols;
        let factors = io.slab(FACTORS, i)?;
        if self.tensor {
            let norms = io.slab(NORMS, i)?.numbers();
            let ratio = norms[0].sqrt() / (norms[1].sqrt() + TINY);
            return Ok(Channels { factors: vec![ratio; factors.len()], rows });
        }
        Ok(Channels { factors: factors.numbers().to_vec(), rows })
    }

    /// The squared norms of the updates, as far as they are stored here.
    pub(super) fn measure(&self, io: &StageIo<'_>) -> Result<()> {
        (0..io.units.len()).try_for_each(|i| {
            let total = self.channels(io, i)?.sum_of_squares(&io.units[i].grad);
            io.slab(TOTAL, i)?.numbers().fill(total);
            Ok(())
        })
    }

    /// The limited step.
    pub(super) fn apply(&self, io: &StageIo<'_>, h: &Hyper) -> Result<()> {
        for (i, unit) in io.units.iter().enumerate() {
            let steps = unit.steps + 1.0;
            let norm = io.slab(TOTAL_ALL, i)?.numbers()[0].sqrt() * io.grad_factor.abs();
            let stored = unit.state[UPDATE_NORM].row(0);
            let last = stored.tensor(&[1])?.f_double_value(&[0])?;
            // Nothing is compared with at first, and a gradient of zero says nothing of the next one.
            let limiter = if unit.steps > 0.0 { (norm / (last + TINY)).max(GROWTH) / GROWTH } else { 1.0 };
            if norm != 0.0 {
                let _ = stored.tensor(&[1])?.f_fill_(norm / limiter)?;
            }
            let corrected = (1.0 - h[BETA2].powf(steps)).sqrt() / (1.0 - h[BETA1].powf(steps));
            let step = ChannelStep {
                rate: h[LR] * corrected * h[SCALE].sqrt() / limiter * io.grad_factor,
                decay: h[LR] * h[WEIGHT_DECAY],
                cautious: self.common.cautious,
                late: self.common.late,
            };
            self.channels(io, i)?.step(&step, &unit.param, &unit.grad);
        }
        Ok(())
    }
}
