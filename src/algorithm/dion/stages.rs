//! The stages of Dion on one bucket.

use super::{Dion, EPSILON, FULL, MOMENTUM, MU, NORMS, P, Q, R, RIGHT, STEP, UPDATES, WEIGHT_DECAY, WORK};
use crate::algorithm::Algorithm;
use crate::algorithm::last_step::apply;
use crate::algorithm::stage::{Buffers, StageIo, UnitIo, jobs, record, record_stored};
use crate::error::Result;
use crate::kernels::{self, Columns, Kept, measured_squares};
use crate::linalg::basis::{Rounding, Size, operand_epsilon, orthonormal_or_zero, stored_epsilon};
use crate::linalg::low_rank::{
    Factored, add_product, back_project, decay_and_add_product, project, set_product, sketches,
};
use crate::linalg::orthogonality::orthogonality_error;
use crate::linalg::qr::sketch_rows;
use crate::linalg::random::Key;
use crate::program::BufferId;
use crate::spec::Hyper;
use crate::tensor::{DType, MatrixView, MatrixViewMut};

/// Separates the random numbers of the sketch from those of the initial Q.
const SKETCH_TAG: u32 = 1;

/// Storage in which the products find the momentum.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Held {
    /// The state itself.
    State,
    /// Wider copy of the state, from which the state is rounded once.
    Wider,
    /// Narrower copy of the state, which stays exact.
    Narrower,
}

/// Sum of the squares of all elements.
fn energy(matrix: &MatrixView<'_>) -> Result<f64> {
    matrix.runs().map(|run| measured_squares(&run)).sum()
}

/// Matrices of all units with the factors P and those in another buffer.
fn factored<'s>(
    units: &[UnitIo<'_>],
    stored: Vec<MatrixViewMut<'s>>,
    factors: [Vec<MatrixViewMut<'s>>; 2],
) -> Vec<Factored<'s>> {
    let [p, r] = factors;
    let all = units.iter().zip(stored).zip(p).zip(r);
    all.map(|(((unit, stored), p), r)| Factored { stored, transposed: unit.transposed, p, r }).collect()
}

impl Dion {
    fn held(momentum: DType, product: DType) -> Held {
        match momentum {
            same if same == product => Held::State,
            wide if wide.bytes() > product.bytes() => Held::Narrower,
            _ => Held::Wider,
        }
    }

    /// Relative rounding of the momentum's elements as products of this type have them.
    pub(super) fn stored(&self, momentum: DType, product: DType) -> f64 {
        stored_epsilon(momentum).max(operand_epsilon(self.operand(product)))
    }

    /// Storage of the momentum, the same for all of the bucket's matrices.
    fn momentum_held(io: &StageIo<'_>) -> Result<Held> {
        let Some(unit) = io.units.first() else {
            return Ok(Held::State);
        };
        Ok(Self::held(unit.state[MOMENTUM].dtype(), io.buffers.get(P)?.flat.dtype()))
    }

    /// The momentum in product type, with the factors P and those in the buffer `right`.
    fn momentum<'s>(io: &'s mut StageIo<'_>, right: BufferId) -> Result<Vec<Factored<'s>>> {
        let held = Self::momentum_held(io)?;
        let StageIo { units, buffers, .. } = io;
        if held != Held::State {
            let [p, r, full] = buffers.several([P, right, FULL])?;
            let factors = [p.matrices(units)?, r.matrices(units)?];
            return Ok(factored(units, full.matrices(units)?, factors));
        }
        Self::with_factors(units, buffers, right, |unit| unit.state[MOMENTUM].reborrow())
    }

    /// A matrix of each unit with the factors P and those in the buffer `right`.
    fn with_factors<'s>(
        units: &'s mut [UnitIo<'_>],
        buffers: &'s mut Buffers<'_>,
        right: BufferId,
        stored: impl Fn(&'s mut UnitIo<'_>) -> MatrixViewMut<'s>,
    ) -> Result<Vec<Factored<'s>>> {
        let [p, r] = buffers.several([P, right])?;
        let all = p.matrices(units)?.into_iter().zip(r.matrices(units)?);
        let all = units.iter_mut().zip(all).map(|(unit, (p, r))| {
            let transposed = unit.transposed;
            Factored { stored: stored(unit), transposed, p, r }
        });
        Ok(all.collect())
    }

    pub(super) fn accumulate(io: &mut StageIo<'_>) -> Result<()> {
        let (grad_factor, held) = (io.grad_factor, Self::momentum_held(io)?);
        let StageIo { units, buffers, .. } = io;
        let add = kernels::Momentum { mu: 1.0, grad_factor, nesterov: false };
        match held {
            Held::State => {
                let all = units.iter_mut().map(|unit| ([unit.grad], [unit.state[MOMENTUM].reborrow()]));
                kernels::run(&add, &mut jobs(all))?;
            }
            Held::Narrower => {
                let full = buffers.get_mut(FULL)?.matrices(units)?;
                let all = units.iter_mut().zip(full);
                let all = all.map(|(unit, full)| ([unit.grad], [unit.state[MOMENTUM].reborrow(), full]));
                kernels::run(&add, &mut jobs(all))?;
            }
            Held::Wider => {
                // The momentum is stored once, after the feedback.
                let full = buffers.get_mut(FULL)?.matrices(units)?;
                let all = units.iter().zip(full);
                let all = all.map(|(unit, full)| ([unit.grad, unit.state[MOMENTUM].view()], [full]));
                kernels::run(&kernels::Accumulate { grad_factor }, &mut jobs(all))?;
            }
        }
        Self::load_basis(units, buffers)
    }

    /// Q, as wide as this bucket's rank, in the type of the products.
    fn load_basis(units: &[UnitIo<'_>], buffers: &mut Buffers<'_>) -> Result<()> {
        let all = units.iter().zip(buffers.get_mut(WORK)?.matrices(units)?).map(|(unit, work)| {
            let q = unit.state[Q].view().first_cols(work.shape()[1]);
            ([q], [work])
        });
        kernels::run(&kernels::Convert { factor: 1.0 }, &mut jobs(all))
    }

    /// `M ← M + G` where the momentum is stored.
    pub(super) fn accumulate_stored(io: &mut StageIo<'_>) -> Result<()> {
        let add = kernels::Momentum { mu: 1.0, grad_factor: io.grad_factor, nesterov: false };
        let all = io.units.iter_mut().map(|unit| ([unit.grad], [unit.state[MOMENTUM].reborrow()]));
        kernels::run(&add, &mut jobs(all))
    }

    /// Momentum and Q, in the type of the products.
    pub(super) fn load(io: &mut StageIo<'_>) -> Result<()> {
        let held = Self::momentum_held(io)?;
        let StageIo { units, buffers, .. } = io;
        if held != Held::State {
            let full = buffers.get_mut(FULL)?.matrices(units)?;
            let all = units.iter().zip(full).map(|(unit, full)| ([unit.state[MOMENTUM].view()], [full]));
            kernels::run(&kernels::Convert { factor: 1.0 }, &mut jobs(all))?;
        }
        Self::load_basis(units, buffers)
    }

    /// `P = B·Q` with Q in the given buffer.
    pub(super) fn project(io: &mut StageIo<'_>, q: BufferId) -> Result<()> {
        project(&mut Self::momentum(io, q)?)
    }

    pub(super) fn back_project(io: &mut StageIo<'_>) -> Result<()> {
        back_project(&mut Self::momentum(io, R)?)
    }

    pub(super) fn orthonormalize(&self, io: &mut StageIo<'_>, h: &Hyper, of: Size) -> Result<()> {
        let StageIo { units, buffers, probe, .. } = io;
        // Of whole matrices units have no state.
        let stored = self.stored(io.class.state[MOMENTUM], buffers.get(P)?.flat.dtype());
        let rounding = Rounding { of, stored };
        let mut p = buffers.get_mut(P)?.batch(units)?;
        let (tall, rank) = (p.size()[1], p.size()[2]);
        // Zero where a column of Q sees nothing of the momentum, or what others see: there is no direction of its own.
        let report = orthonormal_or_zero(&mut p, self.method(h[STEP]), rounding, |which| {
            let key = |unit: &UnitIo<'_>| (Key { seed: self.seed, stream: unit.stream }, unit.block_index);
            let keys: Vec<_> = which.iter().map(|&i| key(&units[i])).collect();
            let rows = usize::try_from(sketch_rows(rank, self.oversample, tall)).unwrap_or(0);
            #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // a step count
            let step = h[STEP] as u64;
            sketches(&keys, rows, usize::try_from(tall).unwrap_or(0), SKETCH_TAG, step)
        })?;
        if report.householder > 0 {
            let (count, all) = (report.householder, units.len());
            log::debug!(target: "oxidion.dion", "{count} of {all} matrices went to Householder QR");
        }
        drop(p);
        let p = buffers.get(P)?;
        for unit in &*units {
            record(probe, "orthogonality_error", unit, || orthogonality_error(&*p.read_tensor(unit)?))?;
        }
        Ok(())
    }

    /// Returns the buffer `r` (R or what replaces it) with a number for each of its columns and the factor made from it.
    pub(super) fn columns<'s>(
        units: &[UnitIo<'_>],
        buffers: &'s mut Buffers<'_>,
        r: BufferId,
    ) -> Result<Vec<Columns<'s>>> {
        let [r, norms, work] = buffers.several([r, NORMS, WORK])?;
        let all = r.flats(units)?.into_iter().zip(norms.flats(units)?).zip(work.flats(units)?);
        Ok(all.map(|((r, sums), scaled)| Columns { x: r.into_view(), sums, scaled }).collect())
    }

    pub(super) fn feedback(&self, io: &mut StageIo<'_>, h: &Hyper) -> Result<()> {
        if self.orthonormal {
            Self::keep_basis(io)?;
        }
        let (held, lost) = (Self::momentum_held(io)?, h[MU] - 1.0);
        // Of a narrower copy only the product is taken, which the exact momentum is then corrected by.
        let factor = if held == Held::Narrower { 1.0 } else { lost };
        kernels::squares_and_scaled(&mut Self::columns(&io.units, &mut io.buffers, R)?, factor)?;
        let StageIo { units, buffers, probe, .. } = &mut *io;
        for unit in &*units {
            record_stored(probe, "captured_energy", unit, MOMENTUM, || {
                let all = if held == Held::State {
                    energy(&unit.state[MOMENTUM].view())?
                } else {
                    measured_squares(&buffers.get(FULL)?.read(unit)?)?
                };
                Ok(measured_squares(&buffers.get(R)?.read(unit)?)? / all.max(f64::MIN_POSITIVE))
            })?;
        }
        let mut products = Self::momentum(io, WORK)?;
        if held == Held::Narrower {
            set_product(&mut products)?;
        } else {
            add_product(&mut products)?;
        }
        let StageIo { units, buffers, probe, .. } = io;
        if held != Held::State {
            let full = buffers.get_mut(FULL)?.matrices(units)?;
            let all = units.iter_mut().zip(full);
            let all = all.map(|(unit, full)| ([full.into_view()], [unit.state[MOMENTUM].reborrow()]));
            let mut all = jobs(all);
            if held == Held::Wider {
                kernels::run(&kernels::Convert { factor: 1.0 }, &mut all)?;
            } else {
                let correct = kernels::Momentum { mu: 1.0, grad_factor: lost, nesterov: false };
                kernels::run(&correct, &mut all)?;
            }
        }
        for unit in &*units {
            let momentum = unit.state[MOMENTUM].view();
            record_stored(probe, "error_feedback_norm", unit, MOMENTUM, || Ok(energy(&momentum)?.sqrt()))?;
        }
        Ok(())
    }

    pub(super) fn apply(&self, io: &mut StageIo<'_>, h: &Hyper) -> Result<()> {
        let kernels::Apply { rate, decay, .. } = self.last_step(io, h)?.free();
        let StageIo { units, buffers, class, .. } = io;
        if units.is_empty() {
            return Ok(());
        }
        let direct = !self.in_two_steps(class.weights, buffers.get(P)?.flat.dtype());
        self.normalize(units, buffers, h, direct.then_some(-rate))?;
        let own_decay = (h[WEIGHT_DECAY] != 0.0).then_some(decay);
        if direct && class.weights == class.param {
            let mut all = Self::with_factors(units, buffers, WORK, |unit| unit.param.reborrow())?;
            decay_and_add_product(&mut all, own_decay)
        } else if direct {
            // The output of the product must be a plain matrix: weights in two halves are joined before and split after it.
            let [p, work, full] = buffers.several([P, WORK, FULL])?;
            let pairs = units.iter().zip(full.matrices(units)?);
            let pairs = pairs.map(|(unit, full)| ([unit.param.view()], [full]));
            kernels::run(&kernels::Convert { factor: 1.0 }, &mut jobs(pairs))?;
            let factors = [p.matrices(units)?, work.matrices(units)?];
            decay_and_add_product(&mut factored(units, full.matrices(units)?, factors), own_decay)?;
            let pairs = full.matrices(units)?.into_iter().zip(units);
            let pairs = pairs.map(|(full, unit)| ([full.into_view()], [unit.param.reborrow()]));
            kernels::run(&kernels::Convert { factor: 1.0 }, &mut jobs(pairs))
        } else {
            let [p, work, full] = buffers.several([P, WORK, FULL])?;
            let factors = [p.matrices(units)?, work.matrices(units)?];
            set_product(&mut factored(units, full.matrices(units)?, factors))?;
            let step = self.last_step(io, h)?;
            apply(io, &step, FULL)
        }
    }

    /// Q, and the right factor of the update: the columns of R over their norms, or of their orthonormal basis, times a factor
    /// where one is given.
    fn normalize(
        &self,
        units: &mut [UnitIo<'_>],
        buffers: &mut Buffers<'_>,
        h: &Hyper,
        factor: Option<f64>,
    ) -> Result<()> {
        let own = units.iter().map(|unit| buffers.get(WORK)?.declared_cols(unit));
        let own = own.collect::<Result<Vec<_>>>()?;
        let (right, epsilon) = if self.orthonormal { (RIGHT, 0.0) } else { (R, h[EPSILON]) };
        if self.orthonormal {
            Self::store_basis(units, buffers, &own)?;
        }
        let columns = Self::columns(units, buffers, right)?;
        let kept = units.iter_mut().zip(columns).zip(own).map(|((unit, columns), own)| Kept {
            columns,
            q: unit.state[Q].reborrow().into_first_cols(own.len()),
            own,
        });
        let mut kept: Vec<_> = kept.collect();
        kernels::normalize_columns(&mut kept, epsilon, factor.unwrap_or(1.0), factor.is_some())
    }

    /// Q, and `U = P·Qᵀ` in the type of its buffer.
    pub(super) fn update(&self, io: &mut StageIo<'_>, h: &Hyper) -> Result<()> {
        let StageIo { units, buffers, .. } = io;
        self.normalize(units, buffers, h, None)?;
        let product = buffers.get(P)?.flat.dtype();
        let same = buffers.get(UPDATES)?.flat.dtype() == product;
        let [p, work, out] = buffers.several([P, WORK, if same { UPDATES } else { FULL }])?;
        let factors = [p.matrices(units)?, work.matrices(units)?];
        set_product(&mut factored(units, out.matrices(units)?, factors))?;
        if same {
            return Ok(());
        }
        let [full, updates] = buffers.several([FULL, UPDATES])?;
        let all = full.matrices(units)?.into_iter().zip(updates.matrices(units)?);
        let all = all.map(|(full, update)| ([full.into_view()], [update]));
        kernels::run(&kernels::Convert { factor: 1.0 }, &mut jobs(all))
    }
}
