//! Normalization of the neurons of an orthonormalized update by a running mean of their squares (`NorMuon`, Li et al.
//! 2025, arXiv:2510.05491).
//!
//! With v the mean square of a row of U: V ← β₂V + (1-β₂)v, U ← U / (√V + 1e-8) by row, then U is brought back to
//! the Frobenius norm that it had. V starts at zero and is not corrected for that.
//!
//! A neuron is a row over the parameter's last dimension and the norm is that of a matrix over its last two, of a
//! flattened parameter too.

use super::orthonormal::{Orthonormal, U};
use super::stage::{BufferIo, StageIo, UnitIo};
use crate::error::Result;
use crate::kernels;
use crate::kernels::{Chosen, Neurons};
use crate::program::{BufferId, BufferSpec, Program, Stage, Target};
use crate::spec::{
    Block, DimSharding, Init, Matrices, Options, ParamSpec, Share, Side, StateSpec, UnitShape,
};
use crate::tensor::DType;

pub(super) const OPTIONS: [&str; 1] = ["norm_scope"];

/// Stage numbers behind those of all orthonormalized updates.
pub(super) const SQUARES: Stage = 10;
pub(super) const NORMALIZE: Stage = 11;

const VARIANCE: usize = 1;

impl Orthonormal {
    /// The momentum, and V where neurons are normalized.
    pub(super) fn states(&self, p: &ParamSpec, blocks: &[Block], neuron: Option<&Neuron>) -> Vec<StateSpec> {
        let momentum = self.storage.momentum(p, self.momentum_dtype);
        let variance = neuron.map(|_| Neuron::state(p, &self.view, blocks));
        [momentum].into_iter().chain(variance).collect()
    }
}

#[derive(Debug)]
pub(super) struct Neuron {
    /// True if norms are those of the shards that one process stores.
    shard: bool,
    /// The first of the two buffers.
    squares: BufferId,
}

impl Neuron {
    /// Number of buffers that it declares.
    pub(super) const BUFFERS: usize = 2;

    pub(super) fn new(options: &Options, squares: BufferId) -> Result<Self> {
        let shard = options.either("norm_scope", "global", "shard")?;
        Ok(Self { shard, squares })
    }

    /// State V: one number for each row over the last dimension; each column block has its own.
    pub(super) fn state(p: &ParamSpec, view: &Matrices, blocks: &[Block]) -> StateSpec {
        let split = view.splits() == Some(Side::Cols);
        let mut spec = StateSpec::like("variance_neuron", p, p.dtype.arithmetic());
        if let (Some(last), Some(sharding)) = (spec.shape.last_mut(), spec.sharding.last_mut()) {
            (*last, *sharding) =
                (if split { view.per_matrix(p, blocks.len()) } else { 1 }, DimSharding::Replicated);
        }
        let share = Share::Side { side: Side::Rows, leading: view.leading(p), column: split };
        StateSpec { init: Init::Zeros, share, ..spec }
    }

    /// Declares the buffers: sums of squares by neuron, and the squared norms before and after. `rows` and `sharding` are
    /// those of the rows of `U` that are stored.
    pub(super) fn buffers(
        program: Program,
        shape: &UnitShape,
        rows: usize,
        sharding: DimSharding<Side>,
    ) -> Program {
        let new = |name, rows, cols| BufferSpec::new(name, rows, cols, DType::F64);
        let (squares, totals) = match shape.inner.as_slice() {
            [_, middle @ .., _] if !middle.is_empty() => {
                let neurons: usize = middle.iter().product();
                let groups: usize = middle[..middle.len() - 1].iter().product();
                let squares = new("squares", rows, neurons).sharded(sharding, DimSharding::Replicated);
                (
                    squares,
                    new("totals", rows, 2 * groups)
                        .sharded(sharding, DimSharding::Replicated)
                        .summed(Side::Cols),
                )
            }
            _ => {
                let squares =
                    new("squares", rows, 1).sharded(sharding, DimSharding::Replicated).summed(Side::Cols);
                (squares, new("totals", 1, 2).summed(Side::Rows))
            }
        };
        program.buffer(squares).buffer(totals)
    }

    /// Appends the stages before the update.
    pub(super) fn stages(&self, program: Program, shape: &UnitShape) -> Program {
        let (squares, totals) = (self.squares, self.squares + 1);
        let mut program = program.local(SQUARES, "squares");
        // Of a flattened parameter only the first dimension behind the rows can be sharded.
        if shape.inner.len() == 2 {
            program = program.redistribute(squares, Target::Replicate);
        }
        program = program.local(NORMALIZE, "normalize");
        if !self.shard && shape.inner.len() <= 3 {
            program = program.redistribute(totals, Target::Replicate);
        }
        program
    }

    /// Elements of `U` by neuron as stored here, and neurons by norm.
    fn sizes(class: &UnitShape, [rows, cols]: [usize; 2]) -> (usize, usize) {
        match class.inner.as_slice() {
            [.., length] if class.inner.len() == 3 => (*length, cols / length.max(&1)),
            [.., group, length] if class.inner.len() > 3 => (*length, *group),
            _ => (cols, rows),
        }
    }

    /// `U` of all units with its neurons. `rows` says which rows of the parameter it has; none: all.
    fn all<'s>(&self, io: &'s mut StageIo<'_>, rows: Option<ChosenRows>) -> Result<Vec<Neurons<'s>>> {
        let StageIo { units, buffers, class, .. } = io;
        let (squares, totals) = (self.squares, self.squares + 1);
        let (chosen, [u, squares, totals]) = match rows {
            None => (units.iter().map(|_| None).collect(), buffers.several([U, squares, totals])?),
            Some(rows) => {
                let [u, squares, totals, chosen] = buffers.several([U, squares, totals, rows.buffer])?;
                let one = |unit: &UnitIo<'_>| Ok(Some(rows.of(u, chosen, unit)?));
                (units.iter().map(one).collect::<Result<Vec<_>>>()?, [u, squares, totals])
            }
        };
        let updates = u.matrices(units)?.into_iter().zip(chosen);
        let sums = squares.flats(units)?.into_iter().zip(totals.flats(units)?);
        let all = units.iter_mut().zip(updates).zip(sums);
        let neurons = all.map(|((unit, (u, chosen)), (squares, totals))| {
            let (length, group) = Self::sizes(class, u.shape());
            Neurons { u, chosen, length, group, variance: unit.state[VARIANCE].reborrow(), squares, totals }
        });
        Ok(neurons.collect())
    }

    /// Sums of squares by neuron.
    pub(super) fn squares(&self, io: &mut StageIo<'_>, rows: Option<ChosenRows>) -> Result<()> {
        kernels::neuron_squares(&mut self.all(io, rows)?)
    }

    /// Updates V and sums up the squared norms with and without it.
    pub(super) fn update(&self, io: &mut StageIo<'_>, beta2: f64, rows: Option<ChosenRows>) -> Result<()> {
        let Some(unit) = io.units.first() else {
            return Ok(());
        };
        let length = match io.class.inner.as_slice() {
            [.., length] if io.class.inner.len() != 2 => *length,
            _ => unit.cols,
        };
        kernels::neuron_variance(beta2, length, &mut self.all(io, rows)?)
    }

    /// Divides every neuron of `U` by the root of its V and brings the norm back.
    pub(super) fn scale(&self, io: &mut StageIo<'_>, rows: Option<ChosenRows>) -> Result<()> {
        kernels::normalize_neurons(&mut self.all(io, rows)?)
    }
}

/// Rows of a parameter that are in `U`.
#[derive(Clone, Copy, Debug)]
pub(super) struct ChosenRows {
    /// The buffer with their numbers.
    pub(super) buffer: BufferId,
    /// True if the rows have the positions in `U` that they have in the parameter.
    pub(super) in_place: bool,
    /// Side of the matrix on which they are chosen: rows or columns.
    pub(super) side: Side,
}

impl ChosenRows {
    /// Chosen rows of a unit.
    pub(super) fn of<'s>(
        &self,
        u: &BufferIo<'_>,
        chosen: &'s BufferIo<'_>,
        unit: &UnitIo<'_>,
    ) -> Result<Chosen<'s>> {
        let numbers = chosen.read(unit)?;
        if !self.in_place {
            return Ok(Chosen::packed(numbers));
        }
        Ok(Chosen::in_place(numbers, u.origin(unit)?[self.side.index()]))
    }
}
