//! The stages of Dion2 on one bucket.

use super::super::orthonormal::{MOMENTUM, SCRATCH, U};
use super::{CHOSEN, Dion2, NEURON_BUFFERS, SCORES, SUBMATRIX, SUMS, Selection};
use crate::algorithm::orthonormal::Orthonormal;
use crate::algorithm::stage::{StageIo, jobs};
use crate::error::Result;
use crate::kernels;
use crate::kernels::{Chosen, Sliced};
use crate::linalg::orthogonality::orthogonality_error;
use crate::spec::{Hyper, Side};
use crate::tensor::MatrixView;

impl Dion2 {
    /// The chosen slices that are stored here.
    pub(super) fn chosen(io: &StageIo<'_>, i: usize, selection: &Selection) -> Result<Chosen> {
        let numbers = io.flat(CHOSEN, i)?;
        if !selection.global {
            return Ok(Chosen::packed(numbers));
        }
        Ok(Chosen::in_place(numbers, io.origin(U, i)?[selection.side.index()]))
    }

    /// The momentum while a step works on it: codes are read once and written once, so it is in a buffer then.
    fn momentum(&self, io: &StageIo<'_>, i: usize) -> Result<MatrixView> {
        let stored = io.units[i].state[MOMENTUM];
        let full = NEURON_BUFFERS + if self.neuron.is_some() { 2 } else { 0 };
        if stored.dtype().is_quantized() { io.area(full, i) } else { Ok(stored) }
    }

    pub(super) fn prepare(&self, io: &StageIo<'_>, side: Side) -> Result<()> {
        let units = 0..io.units.len();
        if io.units.first().is_some_and(|u| u.state[MOMENTUM].dtype().is_quantized()) {
            let add = kernels::Accumulate { grad_factor: io.grad_factor };
            let each = |i: usize| Ok([io.units[i].grad, io.units[i].state[MOMENTUM], self.momentum(io, i)?]);
            kernels::run(&add, &jobs(units.clone().map(each))?)?;
        } else {
            let each =
                units.clone().map(|i| Ok((io.units[i].grad, self.momentum(io, i)?, io.flat(SUMS, i)?)));
            if kernels::add_with_absolute_sums(side, io.grad_factor, &each.collect::<Result<Vec<_>>>()?) {
                return Ok(());
            }
            let add = kernels::Momentum { mu: 1.0, grad_factor: io.grad_factor, nesterov: false };
            kernels::run(&add, &jobs(io.units.iter().map(|u| Ok([u.grad, u.state[MOMENTUM]])))?)?;
        }
        let sums = units.map(|i| Ok((self.momentum(io, i)?, io.flat(SUMS, i)?)));
        kernels::absolute_sums(side, &sums.collect::<Result<Vec<_>>>()?)
    }

    /// Puts the sums of the stored slices at their places among all.
    pub(super) fn spread(io: &StageIo<'_>, side: Side) -> Result<()> {
        let each = (0..io.units.len()).map(|i| {
            let (sums, scores) = (io.flat(SUMS, i)?, io.flat(SCORES, i)?);
            scores.clear()?;
            Ok([sums, scores.part(io.origin(SUMS, i)?[side.index()], sums.len())])
        });
        kernels::run(&kernels::Convert { factor: 1.0 }, &each.collect::<Result<Vec<_>>>()?)
    }

    pub(super) fn choose(&self, io: &StageIo<'_>, selection: &Selection, keep: f64) -> Result<()> {
        let scores = if selection.global { SCORES } else { SUMS };
        let units = 0..io.units.len();
        let pairs = units.clone().map(|i| Ok((io.flat(scores, i)?, io.flat(CHOSEN, i)?)));
        kernels::choose(selection.count, &pairs.collect::<Result<Vec<_>>>()?)?;
        let one = |i| {
            let (x, u) = (self.momentum(io, i)?, io.area(U, i)?);
            Ok(Sliced { x, chosen: Self::chosen(io, i, selection)?, u })
        };
        kernels::take(selection.side, keep, &units.clone().map(one).collect::<Result<Vec<_>>>()?)?;
        if io.units.first().is_some_and(|u| u.state[MOMENTUM].dtype().is_quantized()) {
            let back = units.map(|i| Ok([self.momentum(io, i)?, io.units[i].state[MOMENTUM]]));
            kernels::run(&kernels::Convert { factor: 1.0 }, &jobs(back)?)?;
        }
        Ok(())
    }

    /// Orthonormalizes the chosen slices of whole matrices whose others are zero.
    pub(super) fn orthonormalize_chosen(
        &self,
        io: &mut StageIo<'_>,
        selection: &Selection,
        epsilon: f64,
    ) -> Result<()> {
        let mut due = Vec::with_capacity(io.units.len());
        for i in 0..io.units.len() {
            let chosen = Chosen::packed(io.flat(CHOSEN, i)?);
            if !chosen.is_known_empty() {
                due.push((i, io.area(U, i)?, chosen)); // others are without a gradient
            }
        }
        let Some([rows, cols]) = due.first().map(|(_, whole, _)| whole.shape()) else { return Ok(()) };
        let count = selection.count;
        let shape = if selection.side == Side::Rows { [count, cols] } else { [rows, count] };
        let len = shape[0] * shape[1];
        for part in due.chunks(Orthonormal::at_once(io.class, due.len())) {
            let memory = io.flat(SUBMATRIX, 0)?.part(0, part.len() * len);
            let sliced = part.iter().enumerate().map(|(at, &(_, x, chosen))| {
                let u = memory.part(at * len, len).area(0, shape, shape[1]);
                Sliced { x, chosen, u }
            });
            let sliced: Vec<_> = sliced.collect();
            kernels::take(selection.side, 0.0, &sliced)?;
            let mut batch = memory.tensor(&[part.len(), shape[0], shape[1]])?;
            self.common.run(&mut batch, epsilon, &io.scratch(SCRATCH)?)?;
            kernels::put_back(selection.side, &sliced)?;
            for (&(i, ..), one) in part.iter().zip(&sliced) {
                io.record("orthogonality_error", i, || orthogonality_error(&one.u.tensor()?))?;
            }
        }
        Ok(())
    }

    pub(super) fn apply(&self, io: &StageIo<'_>, selection: &Selection, h: &Hyper) -> Result<()> {
        let Some(unit) = io.units.first() else {
            return Ok(());
        };
        let update = self.common.update(unit, h);
        let one = |i: usize| {
            let (x, u) = (io.units[i].param, io.area(U, i)?);
            Ok(Sliced { x, chosen: Self::chosen(io, i, selection)?, u })
        };
        let all = (0..io.units.len()).map(one).collect::<Result<Vec<_>>>()?;
        kernels::apply_slices(selection.side, &update, &all)
    }
}
