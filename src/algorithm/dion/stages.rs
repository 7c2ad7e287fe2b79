//! The stages of Dion on one bucket.

use tch::Tensor;

use super::{Dion, EPSILON, FULL, LR, MOMENTUM, MU, NORMS, P, Q, R, STEP, WEIGHT_DECAY, WORK};
use crate::error::Result;
use crate::hyper::Hyper;
use crate::kernels;
use crate::linalg::low_rank::{add_product, project, set_product, sketches};
use crate::linalg::qr::{QrMethod, orthonormalize, sketch_rows};
use crate::linalg::random::Key;
use crate::plan::BufferId;
use crate::stage::{StageIo, jobs, orthogonality_error};

/// Separates the random numbers of the sketch from those of the initial Q.
const SKETCH_TAG: u32 = 1;

impl Dion {
    /// `P = B·Q` with Q in the given buffer.
    pub(super) fn project(io: &StageIo<'_>, q: BufferId) -> Result<()> {
        (0..io.units.len()).try_for_each(|i| {
            let (q, p) = (io.matrix(q, i)?, io.matrix(P, i)?);
            project(&Self::momentum(io, i)?, io.units[i].transposed, &q, &p)
        })
    }

    pub(super) fn orthonormalize(&self, io: &mut StageIo<'_>, h: &Hyper) -> Result<()> {
        let units = io.units.len();
        if units == 0 {
            return Ok(());
        }
        let mut p = io.matrices(P, units)?;
        let (tall, rank) = (p.size()[1], p.size()[2]);
        let method = self.method(h[STEP]);
        let sketch = if method == QrMethod::Rcqr && rank < tall {
            let keys: Vec<_> = io
                .units
                .iter()
                .map(|u| (Key { seed: self.seed, stream: u.param_index as u64 }, u.block_index))
                .collect();
            let rows = usize::try_from(sketch_rows(rank, self.oversample, tall)).unwrap_or(0);
            #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // a step count
            let step = h[STEP] as u64;
            Some(sketches(&keys, rows, usize::try_from(tall).unwrap_or(0), SKETCH_TAG, step)?)
        } else {
            None
        };
        let empty: Vec<bool> =
            (0..units).map(|i| Ok(kernels::sum_of_squares(&io.slab(P, i)?) == 0.0)).collect::<Result<_>>()?;
        let (orthonormal, report) = orthonormalize(&p, method, sketch.as_ref())?;
        if report.householder > 0 {
            log::debug!(target: "oxidion.dion", "{} of {units} matrices went to Householder QR", report.householder);
        }
        p.f_copy_(&orthonormal)?;
        // Q sees nothing of the momentum: any basis would be made up, so there is no direction to step along.
        for i in (0..units).filter(|i| empty[*i]) {
            let _ = io.matrix(P, i)?.f_zero_()?;
        }
        for i in 0..units {
            let matrix = io.matrix(P, i)?;
            io.record("orthogonality_error", i, || orthogonality_error(&matrix))?;
        }
        Ok(())
    }

    pub(super) fn feedback(io: &mut StageIo<'_>, h: &Hyper) -> Result<()> {
        for i in 0..io.units.len() {
            let unit = io.units[i];
            let (r, norms) = (io.slab(R, i)?, io.slab(NORMS, i)?);
            kernels::column_sums_of_squares(&r, norms.len(), &norms)?;
            let mut stored = Self::momentum(io, i)?;
            let whole = stored.shallow_clone();
            io.record_stored("captured_energy", i, || {
                let whole = f64::try_from(whole.f_to_kind(tch::Kind::Double)?.f_norm()?)?.powi(2);
                Ok(kernels::sum_of_squares(&r) / whole.max(f64::MIN_POSITIVE))
            })?;
            let mut scaled = io.matrix(WORK, i)?;
            scaled.f_copy_(&io.matrix(R, i)?)?;
            let _ = scaled.f_mul_scalar_(h[MU] - 1.0)?;
            add_product(&mut stored, unit.transposed, &io.matrix(P, i)?, &scaled)?;
            if unit.state[MOMENTUM].dtype() != r.dtype() {
                let whole = [Ok([io.area(FULL, i)?, unit.state[MOMENTUM]])];
                kernels::run(&kernels::Convert { factor: 1.0 }, &jobs(whole)?);
            }
            io.record_stored("error_feedback_norm", i, || {
                Ok(unit.state[MOMENTUM].runs().map(|run| kernels::sum_of_squares(&run)).sum::<f64>().sqrt())
            })?;
        }
        Ok(())
    }

    pub(super) fn apply(&self, io: &StageIo<'_>, h: &Hyper) -> Result<()> {
        let Some(unit) = io.units.first() else {
            return Ok(());
        };
        let (transposed, units) = (unit.transposed, 0..io.units.len());
        let rate = h[LR] * self.adjust.factor(unit.rows as u64, unit.cols as u64);
        let decay = h[LR] * h[WEIGHT_DECAY];
        let direct = !self.in_two_steps(unit.param.dtype(), io.slab(P, 0)?.dtype());
        for i in units.clone() {
            let factor = if direct { -rate } else { 1.0 };
            let (own, work) = (io.declared_cols(WORK, i)?, io.slab(WORK, i)?);
            let q = io.units[i].state[Q].first_cols(own.len());
            kernels::normalize_columns(
                &io.slab(R, i)?,
                &io.slab(NORMS, i)?,
                h[EPSILON],
                factor,
                (&q, own),
                &work,
            );
        }
        if direct {
            if decay != 0.0 {
                kernels::run(&kernels::Decay { decay }, &jobs(io.units.iter().map(|u| Ok([u.param])))?);
            }
            for i in units {
                let mut param = io.units[i].param.tensor()?;
                add_product(&mut param, transposed, &io.matrix(P, i)?, &io.matrix(WORK, i)?)?;
            }
        } else {
            for i in units.clone() {
                set_product(&io.matrix(FULL, i)?, transposed, &io.matrix(P, i)?, &io.matrix(WORK, i)?)?;
            }
            let apply = kernels::Apply { rate, decay, cautious: self.cautious };
            kernels::run(&apply, &jobs(units.map(|i| Ok([io.units[i].param, io.area(FULL, i)?])))?);
        }
        Ok(())
    }

    /// The momentum in product type as it is stored: itself, or its copy in `FULL`.
    pub(super) fn momentum(io: &StageIo<'_>, i: usize) -> Result<Tensor> {
        let unit = &io.units[i];
        if unit.state[MOMENTUM].dtype() == io.slab(P, i)?.dtype() {
            unit.state[MOMENTUM].tensor()
        } else {
            io.matrix(FULL, i)
        }
    }

    pub(super) fn accumulate(io: &StageIo<'_>) -> Result<()> {
        let Some(unit) = io.units.first() else {
            return Ok(());
        };
        if unit.state[MOMENTUM].dtype() == io.slab(P, 0)?.dtype() {
            let add = kernels::Momentum { mu: 1.0, grad_factor: io.grad_factor, nesterov: false };
            kernels::run(&add, &jobs(io.units.iter().map(|u| Ok([u.grad, u.state[MOMENTUM]])))?);
        } else {
            let units = io.units.iter().enumerate();
            let all = units.map(|(i, u)| Ok([u.grad, u.state[MOMENTUM], io.area(FULL, i)?]));
            // The momentum is stored once, after the feedback.
            kernels::run(&kernels::Accumulate { grad_factor: io.grad_factor }, &jobs(all)?);
        }
        for i in 0..io.units.len() {
            let mut work = io.matrix(WORK, i)?;
            let stored = io.units[i].state[Q].first_cols(io.shape(WORK, i)?[1]);
            work.f_copy_(&stored.tensor()?)?;
        }
        Ok(())
    }
}
