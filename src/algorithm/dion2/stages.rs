//! The stages of Dion2 on one bucket.

use super::super::orthonormal::{MOMENTUM, SCRATCH, U};
use super::{CHOSEN, Dion2, NEURON_BUFFERS, SCORES, SUBMATRIX, SUMS, Selection};
use crate::algorithm::neuron::ChosenRows;
use crate::algorithm::orthonormal::Orthonormal;
use crate::algorithm::stage::{BufferIo, StageIo, UnitIo, jobs, record};
use crate::error::Result;
use crate::kernels;
use crate::kernels::{Chosen, Job, Sliced};
use crate::linalg::orthogonality::{expected_orthogonality_error, orthogonality_error};
use crate::program::BufferId;
use crate::spec::{Hyper, Side};
use crate::tensor::{FlatViewMut, MatrixViewMut};

/// Tests whether the momentum is quantized: a step dequantizes and quantizes it once, and works on it in a buffer.
fn is_quantized(units: &[UnitIo<'_>]) -> bool {
    units.first().is_some_and(|unit| unit.state[MOMENTUM].dtype().is_quantized())
}

/// Matrices with slices of theirs that are chosen, and `U`.
fn sliced<'s>(
    rows: ChosenRows,
    units: &[UnitIo<'_>],
    x: Vec<MatrixViewMut<'s>>,
    u: &'s mut BufferIo<'_>,
    chosen: &'s BufferIo<'_>,
) -> Result<Vec<Sliced<'s>>> {
    let chosen = units.iter().map(|unit| rows.of(u, chosen, unit)).collect::<Result<Vec<_>>>()?;
    let all = x.into_iter().zip(chosen).zip(u.matrices(units)?);
    Ok(all.map(|((x, chosen), u)| Sliced { x, chosen, u }).collect())
}

/// Chosen slices of whole matrices, and memory for matrices of them alone.
fn compact<'s>(
    part: &'s mut [(&UnitIo<'_>, MatrixViewMut<'_>, Chosen<'_>)],
    memory: FlatViewMut<'s>,
    shape: [usize; 2],
) -> Vec<Sliced<'s>> {
    let all = part.iter_mut().zip(memory.chunks(shape[0] * shape[1]));
    let one =
        |((_, x, chosen), u): (&'s mut (&UnitIo<'_>, MatrixViewMut<'_>, Chosen<'_>), FlatViewMut<'s>)| {
            Sliced { x: x.reborrow(), chosen: *chosen, u: u.into_matrix(0, shape, shape[1]) }
        };
    all.map(one).collect()
}

impl Dion2 {
    /// The buffer with the momentum in a step, where it is quantized, and later with the update of all slices.
    pub(super) fn full(&self) -> BufferId {
        NEURON_BUFFERS + if self.neuron.is_some() { 2 } else { 0 }
    }

    pub(super) fn prepare(&self, io: &mut StageIo<'_>, side: Side) -> Result<()> {
        let grad_factor = io.grad_factor;
        let StageIo { units, buffers, .. } = io;
        if is_quantized(units) {
            let [sums, full] = buffers.several([SUMS, self.full()])?;
            let (mut sums, mut momenta) = (sums.flats(units)?, full.matrices(units)?);
            let all = units.iter().zip(&mut momenta);
            let all = all.map(|(unit, full)| ([unit.grad, unit.state[MOMENTUM].view()], [full.reborrow()]));
            kernels::run(&kernels::Accumulate { grad_factor }, &mut jobs(all))?;
            let all = momenta.iter().map(MatrixViewMut::view).zip(&mut sums);
            let mut all: Vec<_> = all.map(|(m, sums)| (m, sums.reborrow())).collect();
            return kernels::absolute_sums(side, &mut all);
        }
        let sums = buffers.get_mut(SUMS)?.flats(units)?;
        let all = units.iter_mut().zip(sums);
        let mut all: Vec<_> =
            all.map(|(unit, sums)| (unit.grad, unit.state[MOMENTUM].reborrow(), sums)).collect();
        if kernels::add_with_absolute_sums(side, grad_factor, &mut all) {
            return Ok(());
        }
        let add = kernels::Momentum { mu: 1.0, grad_factor, nesterov: false };
        kernels::run(&add, &mut jobs(all.iter_mut().map(|(g, m, _)| ([*g], [m.reborrow()]))))?;
        let all = all.into_iter().map(|(_, m, sums)| (m.into_view(), sums));
        kernels::absolute_sums(side, &mut all.collect::<Vec<_>>())
    }

    /// Writes the sums of the stored slices at their offsets among all.
    pub(super) fn spread(io: &mut StageIo<'_>, side: Side) -> Result<()> {
        let StageIo { units, buffers, .. } = io;
        let [sums, scores] = buffers.several([SUMS, SCORES])?;
        let each = units.iter().zip(scores.flats(units)?).map(|(unit, mut scores)| {
            let sums_of_unit = sums.read(unit)?;
            scores.clear()?;
            let place = scores.into_part(sums.origin(unit)?[side.index()], sums_of_unit.len());
            Ok(Job { read: [sums_of_unit], write: [place] })
        });
        kernels::run(&kernels::Convert { factor: 1.0 }, &mut each.collect::<Result<Vec<_>>>()?)
    }

    pub(super) fn choose(&self, io: &mut StageIo<'_>, selection: &Selection, keep: f64) -> Result<()> {
        let StageIo { units, buffers, .. } = io;
        let [scores, chosen] = buffers.several([if selection.global { SCORES } else { SUMS }, CHOSEN])?;
        let pairs = units.iter().zip(chosen.flats(units)?).map(|(unit, to)| Ok((scores.read(unit)?, to)));
        kernels::choose(selection.count, &mut pairs.collect::<Result<Vec<_>>>()?)?;
        let (side, rows) = (selection.side, selection.rows());
        if !is_quantized(units) {
            let [u, chosen] = buffers.several([U, CHOSEN])?;
            let chosen = units.iter().map(|unit| rows.of(u, chosen, unit)).collect::<Result<Vec<_>>>()?;
            let all = chosen.into_iter().zip(u.matrices(units)?);
            let all = units.iter_mut().zip(all);
            let all = all.map(|(unit, (chosen, u))| Sliced { x: unit.state[MOMENTUM].reborrow(), chosen, u });
            return kernels::take(side, keep, &mut all.collect::<Vec<_>>());
        }
        let [u, chosen, full] = buffers.several([U, CHOSEN, self.full()])?;
        let mut all = sliced(rows, units, full.matrices(units)?, u, chosen)?;
        kernels::take(side, keep, &mut all)?;
        let back = units.iter_mut().zip(&all);
        let back = back.map(|(unit, one)| ([one.x.view()], [unit.state[MOMENTUM].reborrow()]));
        kernels::run(&kernels::Convert { factor: 1.0 }, &mut jobs(back))
    }

    /// Orthonormalizes the chosen slices of whole matrices whose others are zero.
    pub(super) fn orthonormalize_chosen(
        &self,
        io: &mut StageIo<'_>,
        selection: &Selection,
        epsilon: f64,
    ) -> Result<()> {
        let StageIo { units, buffers, probe, class, .. } = io;
        let [u, chosen, submatrix, scratch] = buffers.several([U, CHOSEN, SUBMATRIX, SCRATCH])?;
        let mut due = Vec::with_capacity(units.len());
        for (unit, whole) in units.iter().zip(u.matrices(units)?) {
            let chosen = Chosen::packed(chosen.read(unit)?);
            if !chosen.is_known_empty() {
                due.push((unit, whole, chosen)); // others are without a gradient
            }
        }
        let Some([rows, cols]) = due.first().map(|(_, whole, _)| whole.shape()) else { return Ok(()) };
        let (side, count) = (selection.side, selection.count);
        let shape = if side == Side::Rows { [count, cols] } else { [rows, count] };
        let len = shape[0] * shape[1];
        let at_once = Orthonormal::at_once(class, due.len());
        for part in due.chunks_mut(at_once) {
            let mut memory = submatrix.flat.part(0, part.len() * len);
            kernels::take(side, 0.0, &mut compact(part, memory.reborrow(), shape))?;
            for (at, (unit, ..)) in part.iter().enumerate() {
                let one = memory.view().part(at * len, len);
                record(probe, "expected", unit, || expected_orthogonality_error(&*one.tensor(&shape)?))?;
            }
            let mut batch = memory.tensor(&[part.len(), shape[0], shape[1]])?;
            self.common.run(&mut batch, epsilon, &mut *scratch.all()?)?;
            drop(batch);
            kernels::put_back(side, &mut compact(part, memory.reborrow(), shape))?;
            for (at, (unit, ..)) in part.iter().enumerate() {
                let one = memory.view().part(at * len, len);
                record(probe, "orthogonality_error", unit, || orthogonality_error(&*one.tensor(&shape)?))?;
            }
        }
        Ok(())
    }

    /// Brings the update of chosen slices to their places among all.
    pub(super) fn bring_to_places(&self, io: &mut StageIo<'_>, selection: &Selection) -> Result<()> {
        let StageIo { units, buffers, .. } = io;
        let [u, chosen, full] = buffers.several([U, CHOSEN, self.full()])?;
        full.clear(units)?;
        let mut all = sliced(selection.rows(), units, full.matrices(units)?, u, chosen)?;
        kernels::put_back(selection.side, &mut all)
    }

    pub(super) fn apply(&self, io: &mut StageIo<'_>, selection: &Selection, h: &Hyper) -> Result<()> {
        let StageIo { units, buffers, class, .. } = io;
        let update = self.common.last_step(class, h).free();
        let ([u, chosen], rows) = (buffers.several([U, CHOSEN])?, selection.rows());
        let chosen = units.iter().map(|unit| rows.of(u, chosen, unit)).collect::<Result<Vec<_>>>()?;
        let all = chosen.into_iter().zip(u.matrices(units)?);
        let all = units.iter_mut().zip(all);
        let all = all.map(|(unit, (chosen, u))| Sliced { x: unit.param.reborrow(), chosen, u });
        kernels::apply_slices(selection.side, &update, &mut all.collect::<Vec<_>>())
    }
}
