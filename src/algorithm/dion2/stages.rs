//! The stages of Dion2 on one bucket.

use super::super::orthonormal::{MOMENTUM, SCRATCH, U};
use super::{CHOSEN, Dion2, NEURON_BUFFERS, SCORES, SUBMATRIX, SUMS, Selection};
use crate::batch::Area;
use crate::error::Result;
use crate::hyper::Hyper;
use crate::kernels;
use crate::spec::Side;
use crate::stage::{StageIo, jobs, orthogonality_error};

/// Pairs of a slice of the stored parameter and a slice of `U`.
type Pairs = Vec<(usize, usize)>;

impl Dion2 {
    /// The chosen slices that are stored here.
    pub(super) fn pairs(io: &StageIo<'_>, i: usize, selection: &Selection) -> Result<Pairs> {
        let chosen = kernels::chosen(&io.slab(CHOSEN, i)?);
        if !selection.global {
            return Ok(chosen.into_iter().enumerate().map(|(to, from)| (from, to)).collect());
        }
        let d = selection.side.index();
        let (first, stored) = (io.origin(U, i)?[d], io.shape(U, i)?[d]);
        let here = chosen.into_iter().filter_map(|k| k.checked_sub(first).filter(|k| *k < stored));
        Ok(here.map(|k| (k, k)).collect())
    }

    /// The momentum while a step works on it: codes are read once and written once, so it is in a buffer then.
    fn momentum(&self, io: &StageIo<'_>, i: usize) -> Result<Area> {
        let stored = io.units[i].state[MOMENTUM];
        let full = NEURON_BUFFERS + if self.neuron.is_some() { 2 } else { 0 };
        if stored.dtype().is_coded() { io.area(full, i) } else { Ok(stored) }
    }

    pub(super) fn prepare(&self, io: &StageIo<'_>, side: Side) -> Result<()> {
        let units = 0..io.units.len();
        if io.units.first().is_some_and(|u| u.state[MOMENTUM].dtype().is_coded()) {
            let add = kernels::Accumulate { grad_factor: io.grad_factor };
            let each = |i: usize| Ok([io.units[i].grad, io.units[i].state[MOMENTUM], self.momentum(io, i)?]);
            kernels::run(&add, &jobs(units.clone().map(each))?)?;
        } else {
            let add = kernels::Momentum { mu: 1.0, grad_factor: io.grad_factor, nesterov: false };
            kernels::run(&add, &jobs(io.units.iter().map(|u| Ok([u.grad, u.state[MOMENTUM]])))?)?;
        }
        units.into_iter().try_for_each(|i| {
            kernels::absolute_sums(&self.momentum(io, i)?, side, &io.slab(SUMS, i)?);
            Ok(())
        })
    }

    /// Puts the sums of the stored slices at their places among all.
    pub(super) fn spread(io: &StageIo<'_>, side: Side) -> Result<()> {
        (0..io.units.len()).try_for_each(|i| {
            let (sums, scores) = (io.slab(SUMS, i)?, io.slab(SCORES, i)?);
            scores.clear()?;
            sums.copy_to(&scores.part(io.origin(SUMS, i)?[side.index()], sums.len()));
            Ok(())
        })
    }

    pub(super) fn choose(&self, io: &StageIo<'_>, selection: &Selection, keep: f64) -> Result<()> {
        let scores = if selection.global { SCORES } else { SUMS };
        (0..io.units.len()).try_for_each(|i| {
            kernels::choose(&io.slab(scores, i)?, selection.count, &io.slab(CHOSEN, i)?);
            io.slab(U, i)?.clear()?;
            let pairs = Self::pairs(io, i, selection)?;
            let (momentum, stored) = (self.momentum(io, i)?, io.units[i].state[MOMENTUM]);
            kernels::take(&momentum, selection.side, &pairs, keep, &io.area(U, i)?);
            if stored.dtype().is_coded() {
                kernels::run(&kernels::Convert { factor: 1.0 }, &jobs([Ok([momentum, stored])])?)?;
            }
            Ok(())
        })
    }

    /// Orthonormalizes the chosen slices of whole matrices whose others are zero.
    pub(super) fn orthonormalize_chosen(
        &self,
        io: &mut StageIo<'_>,
        selection: &Selection,
        epsilon: f64,
    ) -> Result<()> {
        for i in 0..io.units.len() {
            let whole = io.area(U, i)?;
            let chosen = kernels::chosen(&io.slab(CHOSEN, i)?);
            if chosen.is_empty() {
                continue; // without a gradient
            }
            let [rows, cols] = whole.shape();
            let shape =
                if selection.side == Side::Rows { [chosen.len(), cols] } else { [rows, chosen.len()] };
            let memory = io.slab(SUBMATRIX, i)?.area(0, shape, shape[1]);
            let there: Pairs = chosen.iter().enumerate().map(|(to, from)| (*from, to)).collect();
            kernels::take(&whole, selection.side, &there, 0.0, &memory);
            let matrix = memory.tensor()?;
            self.common.run(&mut matrix.f_unsqueeze(0)?, epsilon, &io.scratch(SCRATCH)?)?;
            let back: Pairs = there.into_iter().map(|(from, to)| (to, from)).collect();
            kernels::take(&memory, selection.side, &back, 1.0, &whole);
            io.record("orthogonality_error", i, || orthogonality_error(&matrix))?;
        }
        Ok(())
    }

    pub(super) fn apply(&self, io: &StageIo<'_>, selection: &Selection, h: &Hyper) -> Result<()> {
        (0..io.units.len()).try_for_each(|i| {
            let unit = &io.units[i];
            let update = self.common.update(unit, h);
            let pairs = Self::pairs(io, i, selection)?;
            kernels::put(&unit.param, selection.side, &pairs, &io.area(U, i)?, &update);
            Ok(())
        })
    }
}
