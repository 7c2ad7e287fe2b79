//! The stages of Dion on one bucket.

use super::{Dion, EPSILON, FULL, LR, MOMENTUM, MU, NORMS, P, Q, R, STEP, WEIGHT_DECAY, WORK};
use crate::algorithm::stage::{StageIo, jobs};
use crate::error::Result;
use crate::kernels::{self, Columns, Kept, measured_squares};
use crate::linalg::basis::orthonormal_or_zero;
use crate::linalg::low_rank::{
    Factored, add_product, back_project, decay_and_add_product, project, set_product, sketches,
};
use crate::linalg::orthogonality::orthogonality_error;
use crate::linalg::qr::sketch_rows;
use crate::linalg::random::Key;
use crate::program::BufferId;
use crate::spec::Hyper;
use crate::tensor::{DType, MatrixView};

/// Separates the random numbers of the sketch from those of the initial Q.
const SKETCH_TAG: u32 = 1;

/// Where the products find the momentum.
#[derive(Clone, Copy, PartialEq, Eq)]
enum BufferShard {
    /// In the state itself.
    State,
    /// In a wider copy, from which the state is rounded once.
    Wider,
    /// In a narrower copy; what is exact is the state.
    Narrower,
}

/// Sum of the squares of all elements.
fn energy(area: &MatrixView) -> Result<f64> {
    area.runs().map(|run| measured_squares(&run)).sum()
}

impl Dion {
    fn held(momentum: DType, product: DType) -> BufferShard {
        match momentum {
            same if same == product => BufferShard::State,
            wide if wide.bytes() > product.bytes() => BufferShard::Narrower,
            _ => BufferShard::Wider,
        }
    }

    /// Where the momentum of the bucket's matrices is, which are all alike.
    fn momentum_held(io: &StageIo<'_>) -> Result<BufferShard> {
        let Some(unit) = io.units.first() else {
            return Ok(BufferShard::State);
        };
        Ok(Self::held(unit.state[MOMENTUM].dtype(), io.flat(P, 0)?.dtype()))
    }

    /// Every matrix that `stored` tells, with the factors P and those in the buffer `right`.
    fn factored(
        io: &StageIo<'_>,
        right: BufferId,
        stored: impl Fn(usize) -> Result<MatrixView>,
    ) -> Result<Vec<Factored>> {
        let units = io.units.iter().enumerate();
        units
            .map(|(i, unit)| {
                let (p, r) = (io.area(P, i)?, io.area(right, i)?);
                Ok(Factored { stored: stored(i)?, transposed: unit.transposed, p, r })
            })
            .collect()
    }

    /// The momentum in product type, with the factors P and those in the buffer `right`.
    fn momentum(io: &StageIo<'_>, right: BufferId) -> Result<Vec<Factored>> {
        let held = Self::momentum_held(io)?;
        Self::factored(io, right, |i| {
            if held == BufferShard::State { Ok(io.units[i].state[MOMENTUM]) } else { io.area(FULL, i) }
        })
    }

    pub(super) fn accumulate(io: &StageIo<'_>) -> Result<()> {
        let grad_factor = io.grad_factor;
        let units = || io.units.iter().enumerate();
        let add = kernels::Momentum { mu: 1.0, grad_factor, nesterov: false };
        match Self::momentum_held(io)? {
            BufferShard::State => {
                kernels::run(&add, &jobs(units().map(|(_, u)| Ok([u.grad, u.state[MOMENTUM]])))?)?;
            }
            held => {
                let all = units().map(|(i, u)| Ok([u.grad, u.state[MOMENTUM], io.area(FULL, i)?]));
                if held == BufferShard::Narrower {
                    kernels::run(&add, &jobs(all)?)?;
                } else {
                    // The momentum is stored once, after the feedback.
                    kernels::run(&kernels::Accumulate { grad_factor }, &jobs(all)?)?;
                }
            }
        }
        let all = units().map(|(i, u)| Ok([u.state[Q].first_cols(io.shape(WORK, i)?[1]), io.area(WORK, i)?]));
        kernels::run(&kernels::Convert { factor: 1.0 }, &jobs(all)?)
    }

    /// `P = B·Q` with Q in the given buffer.
    pub(super) fn project(io: &StageIo<'_>, q: BufferId) -> Result<()> {
        project(&Self::momentum(io, q)?)
    }

    pub(super) fn back_project(io: &StageIo<'_>) -> Result<()> {
        back_project(&Self::momentum(io, R)?)
    }

    pub(super) fn orthonormalize(&self, io: &mut StageIo<'_>, h: &Hyper) -> Result<()> {
        let units = io.units.len();
        if units == 0 {
            return Ok(());
        }
        let mut p = io.matrices(P, units)?;
        let (tall, rank) = (p.size()[1], p.size()[2]);
        // Zero where Q sees nothing of the momentum: there is no direction to step along.
        let report = orthonormal_or_zero(&mut p, self.method(h[STEP]), |which| {
            let key = |u: &crate::algorithm::stage::UnitIo| {
                (Key { seed: self.seed, stream: u.param_index as u64 }, u.block_index)
            };
            let keys: Vec<_> = which.iter().map(|&i| key(&io.units[i])).collect();
            let rows = usize::try_from(sketch_rows(rank, self.oversample, tall)).unwrap_or(0);
            #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // a step count
            let step = h[STEP] as u64;
            sketches(&keys, rows, usize::try_from(tall).unwrap_or(0), SKETCH_TAG, step)
        })?;
        if report.householder > 0 {
            log::debug!(target: "oxidion.dion", "{} of {units} matrices went to Householder QR", report.householder);
        }
        for i in 0..units {
            let matrix = io.matrix(P, i)?;
            io.record("orthogonality_error", i, || orthogonality_error(&matrix))?;
        }
        Ok(())
    }

    /// R with the sums of its columns and the factor that is made of it.
    fn columns(io: &StageIo<'_>) -> Result<Vec<Columns>> {
        let columns =
            |i| Ok(Columns { x: io.flat(R, i)?, sums: io.flat(NORMS, i)?, scaled: io.flat(WORK, i)? });
        (0..io.units.len()).map(columns).collect()
    }

    pub(super) fn feedback(io: &mut StageIo<'_>, h: &Hyper) -> Result<()> {
        let held = Self::momentum_held(io)?;
        let lost = h[MU] - 1.0;
        // Of a narrower copy only the product is taken, which the exact momentum is then corrected by.
        let factor = if held == BufferShard::Narrower { 1.0 } else { lost };
        kernels::squares_and_scaled(&Self::columns(io)?, factor)?;
        let products = Self::momentum(io, WORK)?;
        for (i, product) in products.iter().enumerate() {
            let r = io.flat(R, i)?;
            io.record_stored("captured_energy", i, || {
                Ok(measured_squares(&r)? / energy(&product.stored)?.max(f64::MIN_POSITIVE))
            })?;
        }
        if held == BufferShard::Narrower {
            set_product(&products)?;
        } else {
            add_product(&products)?;
        }
        let units = || io.units.iter().enumerate();
        let all = || jobs(units().map(|(i, u)| Ok([io.area(FULL, i)?, u.state[MOMENTUM]])));
        match held {
            BufferShard::State => {}
            BufferShard::Wider => kernels::run(&kernels::Convert { factor: 1.0 }, &all()?)?,
            BufferShard::Narrower => {
                let correct = kernels::Momentum { mu: 1.0, grad_factor: lost, nesterov: false };
                kernels::run(&correct, &all()?)?;
            }
        }
        for i in 0..io.units.len() {
            let momentum = io.units[i].state[MOMENTUM];
            io.record_stored("error_feedback_norm", i, || Ok(energy(&momentum)?.sqrt()))?;
        }
        Ok(())
    }

    pub(super) fn apply(&self, io: &StageIo<'_>, h: &Hyper) -> Result<()> {
        let Some(unit) = io.units.first() else {
            return Ok(());
        };
        let units = 0..io.units.len();
        let rate = h[LR] * self.adjust.factor(unit.rows as u64, unit.cols as u64);
        let decay = h[LR] * h[WEIGHT_DECAY];
        let direct = !self.in_two_steps(unit.param.dtype(), io.flat(P, 0)?.dtype());
        let kept = Self::columns(io)?.into_iter().enumerate().map(|(i, columns)| {
            let own = io.declared_cols(WORK, i)?;
            Ok(Kept { columns, q: io.units[i].state[Q].first_cols(own.len()), own })
        });
        let factor = if direct { -rate } else { 1.0 };
        kernels::normalize_columns(&kept.collect::<Result<Vec<_>>>()?, h[EPSILON], factor, direct)?;
        if direct {
            let decay = (h[WEIGHT_DECAY] != 0.0).then_some(decay);
            decay_and_add_product(&Self::factored(io, WORK, |i| Ok(io.units[i].param))?, decay)
        } else {
            set_product(&Self::factored(io, WORK, |i| io.area(FULL, i))?)?;
            let apply = kernels::Apply { rate, decay, cautious: self.cautious };
            kernels::run(&apply, &jobs(units.map(|i| Ok([io.units[i].param, io.area(FULL, i)?])))?)
        }
    }
}
