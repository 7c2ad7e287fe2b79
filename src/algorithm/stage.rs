//! Inputs and outputs of an algorithm's stage.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::error::{Error, Result};
use crate::kernels::{self, Job};
use crate::program::{BufferId, BufferSpec};
use crate::spec::UnitShape;
use crate::tensor::{FlatView, FlatViewMut, Lent, LentMut, MatrixView, MatrixViewMut};

/// Most states that one algorithm keeps for a parameter.
pub const MAX_STATES: usize = 12;

/// One block with its gradient and states: matrices of one shape, or the block's part of a state of another shape.
#[derive(Debug)]
pub struct UnitIo<'a> {
    /// Index of the parameter.
    pub param_index: usize,
    /// Stream of the parameter's random numbers.
    pub stream: u64,
    /// Index of the block within the parameter.
    pub block_index: usize,
    /// Rows of the whole block.
    pub rows: usize,
    /// Columns of the whole block.
    pub cols: usize,
    /// Elements of the whole parameter.
    pub numel: usize,
    /// True if the algorithm works on the transpose.
    pub transposed: bool,
    /// Index of its own matrix in every buffer.
    pub position: usize,
    /// True if its parameter has a gradient. Stages on whole matrices have those without one too.
    pub active: bool,
    /// True if the guarded parts of the program, if any, run for its parameter in this step (`Algorithm::due`).
    pub due: bool,
    /// The steps that its parameter has taken before this one, where the session counts them (`Algorithm::counted`).
    pub steps: f64,
    /// The block's parameters.
    pub param: MatrixViewMut<'a>,
    /// The block's gradient; for a stage on whole matrices where this process has all of it.
    pub grad: MatrixView<'a>,
    /// The block's states in the order of `Algorithm::state`.
    pub state: [MatrixViewMut<'a>; MAX_STATES],
}

impl UnitIo<'_> {
    /// Empty unit.
    pub const EMPTY: Self = Self {
        param_index: 0,
        stream: 0,
        block_index: 0,
        rows: 0,
        cols: 0,
        numel: 0,
        transposed: false,
        position: 0,
        active: false,
        due: false,
        steps: 0.0,
        param: MatrixViewMut::EMPTY,
        grad: MatrixView::EMPTY,
        state: [const { MatrixViewMut::EMPTY }; MAX_STATES],
    };
}

impl<'a> UnitIo<'a> {
    /// Reborrows with a shorter lifetime; parts of the result can be taken.
    pub fn reborrow(&mut self) -> UnitIo<'_> {
        UnitIo {
            param: self.param.reborrow(),
            grad: self.grad,
            state: self.state.each_mut().map(MatrixViewMut::reborrow),
            ..*self
        }
    }

    /// A state, which is empty here from then on.
    pub fn take_state(&mut self, state: usize) -> MatrixViewMut<'a> {
        std::mem::replace(&mut self.state[state], MatrixViewMut::EMPTY)
    }
}

/// The first row of a state of each unit: all of one that is no matrix.
pub fn lines<'s>(units: &'s mut [UnitIo<'_>], state: usize) -> Vec<FlatViewMut<'s>> {
    units.iter_mut().map(|unit| unit.state[state].row(0)).collect()
}

/// Jobs for an elementwise kernel on operands of one shape each: one where all are contiguous, else one for each row.
pub fn jobs<'a, const R: usize, const W: usize>(
    operands: impl IntoIterator<Item = ([MatrixView<'a>; R], [MatrixViewMut<'a>; W])>,
) -> Vec<Job<'a, R, W>> {
    let operands = operands.into_iter();
    let mut jobs = Vec::with_capacity(operands.size_hint().0);
    for (read, write) in operands {
        if read.iter().all(MatrixView::is_flat) && write.iter().all(MatrixViewMut::is_flat) {
            jobs.push(Job { read: read.map(|x| x.all()), write: write.map(MatrixViewMut::into_all) });
            continue;
        }
        let rows = read.first().map_or_else(|| write[0].shape()[0], |x| x.shape()[0]);
        let mut write = write.map(MatrixViewMut::into_rows);
        for row in 0..rows {
            let write = write.each_mut().map(|rows| rows.next().unwrap_or(FlatViewMut::EMPTY));
            jobs.push(Job { read: read.map(|x| x.row(row)), write });
        }
    }
    jobs
}

/// Writes gradients of units, times `factor`, to a buffer.
///
/// # Errors
/// As [`kernels::run`].
pub fn gradients(units: &[UnitIo<'_>], out: &mut BufferIo<'_>, factor: f64) -> Result<()> {
    let all = units.iter().zip(out.matrices(units)?).map(|(unit, out)| ([unit.grad], [out]));
    kernels::run(&kernels::Convert { factor }, &mut jobs(all))
}

/// One matrix of a buffer as it is held for a stage.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MatrixShard {
    /// First element.
    pub offset: usize,
    /// Rows and columns.
    pub shape: [usize; 2],
    /// First row and column within the whole matrix.
    pub origin: [usize; 2],
    /// Columns that it has as declared, before evenly sharded ones were gathered.
    pub declared_cols: Range<usize>,
}

/// A buffer with its matrices as they are held for a stage.
#[derive(Debug)]
pub struct BufferIo<'a> {
    /// Declaration of the buffer.
    pub spec: &'a BufferSpec,
    /// Memory of the buffer.
    pub flat: FlatViewMut<'a>,
    /// Matrices of the buffer by position, one after the other; a scratch buffer has none.
    pub shards: &'a [MatrixShard],
}

impl BufferIo<'_> {
    fn shard(&self, unit: &UnitIo<'_>) -> Result<&MatrixShard> {
        let found = self.shards.get(unit.position);
        found.ok_or_else(|| Error::Internal(format!("no matrix {} of {}", unit.position, self.spec.name)))
    }

    /// Rows and columns of a unit's matrix.
    ///
    /// # Errors
    /// `Error::Internal` where there is none.
    pub fn shape(&self, unit: &UnitIo<'_>) -> Result<[usize; 2]> {
        Ok(self.shard(unit)?.shape)
    }

    /// The first row and column of a unit's matrix within the whole one.
    ///
    /// # Errors
    /// As `shape`.
    pub fn origin(&self, unit: &UnitIo<'_>) -> Result<[usize; 2]> {
        Ok(self.shard(unit)?.origin)
    }

    /// The columns that a unit's matrix has as declared, among all.
    ///
    /// # Errors
    /// As `shape`.
    pub fn declared_cols(&self, unit: &UnitIo<'_>) -> Result<Range<usize>> {
        Ok(self.shard(unit)?.declared_cols.clone())
    }

    /// A unit's matrix, as elements; all of a buffer that is shared.
    ///
    /// # Errors
    /// As `shape`.
    pub fn flat(&mut self, unit: &UnitIo<'_>) -> Result<FlatViewMut<'_>> {
        if self.spec.shared {
            return Ok(self.flat.reborrow());
        }
        let MatrixShard { offset, shape, .. } = *self.shard(unit)?;
        Ok(self.flat.part(offset, shape[0] * shape[1]))
    }

    /// As `flat`, to be read.
    ///
    /// # Errors
    /// As `shape`.
    pub fn read(&self, unit: &UnitIo<'_>) -> Result<FlatView<'_>> {
        if self.spec.shared {
            return Ok(self.flat.view());
        }
        let MatrixShard { offset, shape, .. } = *self.shard(unit)?;
        Ok(self.flat.view().part(offset, shape[0] * shape[1]))
    }

    /// A unit's matrix.
    ///
    /// # Errors
    /// As `shape`.
    pub fn matrix(&mut self, unit: &UnitIo<'_>) -> Result<MatrixViewMut<'_>> {
        let shape = self.shape(unit)?;
        Ok(self.flat(unit)?.into_matrix(0, shape, shape[1]))
    }

    /// A unit's matrix as a tensor `[rows, cols]`.
    ///
    /// # Errors
    /// As `shape`.
    pub fn tensor(&mut self, unit: &UnitIo<'_>) -> Result<LentMut<'_>> {
        let shape = self.shape(unit)?;
        self.flat(unit)?.into_tensor(&shape)
    }

    /// A unit's matrix as a tensor `[rows, cols]`, to be read.
    ///
    /// # Errors
    /// As `shape`.
    pub fn read_tensor(&self, unit: &UnitIo<'_>) -> Result<Lent<'_>> {
        self.read(unit)?.tensor(&self.shape(unit)?)
    }

    /// The matrices of all these units, in their order, as elements.
    ///
    /// # Errors
    /// As `shape`, and `Error::Internal` for units that are not in the order of their matrices.
    pub fn flats(&mut self, units: &[UnitIo<'_>]) -> Result<Vec<FlatViewMut<'_>>> {
        let (mut rest, mut done) = (self.flat.reborrow(), 0);
        let mut flats = Vec::with_capacity(units.len());
        for unit in units {
            let found = self.shards.get(unit.position).filter(|shard| shard.offset >= done);
            let Some(MatrixShard { offset, shape, .. }) = found else {
                return Err(Error::Internal(format!("no matrix {} of {}", unit.position, self.spec.name)));
            };
            let _others = rest.take_first(offset - done);
            flats.push(rest.take_first(shape[0] * shape[1]));
            done = offset + shape[0] * shape[1];
        }
        Ok(flats)
    }

    /// The matrices of all these units, in their order.
    ///
    /// # Errors
    /// As `flats`.
    pub fn matrices(&mut self, units: &[UnitIo<'_>]) -> Result<Vec<MatrixViewMut<'_>>> {
        let shapes = units.iter().map(|unit| self.shape(unit)).collect::<Result<Vec<_>>>()?;
        let flats = self.flats(units)?.into_iter().zip(shapes);
        Ok(flats.map(|(flat, shape)| flat.into_matrix(0, shape, shape[1])).collect())
    }

    /// Zeros the matrices of these units, which are in the order of their matrices, and all between the first and the last.
    ///
    /// # Errors
    /// As `shape`.
    pub fn clear(&mut self, units: &[UnitIo<'_>]) -> Result<()> {
        let (Some(first), Some(last)) = (units.first(), units.last()) else { return Ok(()) };
        let first = self.shard(first)?.offset;
        let MatrixShard { offset, shape, .. } = *self.shard(last)?;
        self.flat.part(first, offset + shape[0] * shape[1] - first).clear()
    }

    /// The matrices of these units, all of one shape and the first of the buffer, as a tensor `[count, rows, cols]`.
    ///
    /// # Errors
    /// As `shape`.
    pub fn batch(&mut self, units: &[UnitIo<'_>]) -> Result<LentMut<'_>> {
        let [rows, cols] = units.first().map_or(Ok([0, 0]), |unit| self.shape(unit))?;
        self.flat.part(0, units.len() * rows * cols).into_tensor(&[units.len(), rows, cols])
    }

    /// All of it as a flat tensor.
    ///
    /// # Errors
    /// Whatever libtorch says.
    pub fn all(&mut self) -> Result<LentMut<'_>> {
        self.flat.tensor(&[self.flat.len()])
    }
}

/// The buffers of a bucket by number.
#[derive(Debug)]
pub struct Buffers<'a>(pub(crate) Vec<BufferIo<'a>>);

impl<'a> Buffers<'a> {
    /// One of them.
    ///
    /// # Errors
    /// `Error::Internal` for a buffer that the program did not declare.
    pub fn get(&self, buffer: BufferId) -> Result<&BufferIo<'a>> {
        self.0.get(buffer).ok_or_else(|| Error::Internal(format!("no buffer {buffer}")))
    }

    /// One of them, to be written.
    ///
    /// # Errors
    /// As `get`.
    pub fn get_mut(&mut self, buffer: BufferId) -> Result<&mut BufferIo<'a>> {
        self.0.get_mut(buffer).ok_or_else(|| Error::Internal(format!("no buffer {buffer}")))
    }

    /// Several of them, to be written.
    ///
    /// # Errors
    /// As `get`, and for one buffer twice.
    pub fn several<const N: usize>(&mut self, buffers: [BufferId; N]) -> Result<[&mut BufferIo<'a>; N]> {
        self.0.get_disjoint_mut(buffers).map_err(|_| Error::Internal(format!("no buffers {buffers:?}")))
    }
}

/// Measurements of one step by name, each with its parameter's index. They are taken only on request.
pub type Probe = BTreeMap<&'static str, Vec<(usize, f64)>>;

/// The units of a stage, the bucket's buffers, and the step's common facts.
#[derive(Debug)]
pub struct StageIo<'a> {
    /// Units with a gradient, in bucket order; for a stage on whole matrices all units.
    pub units: Vec<UnitIo<'a>>,
    /// Class of the bucket: the facts that all units share.
    pub class: &'a UnitShape,
    /// Factor of every gradient: -1 to maximize, divided by the loss scale.
    pub grad_factor: f64,
    /// The group buffer of the buckets of the group in their order, none for this bucket's own; empty where its program has
    /// none.
    pub group: Vec<Option<FlatView<'a>>>,
    /// Map for measurements, when asked for.
    pub probe: Option<&'a mut Probe>,
    /// The memory that stages hand on.
    pub buffers: Buffers<'a>,
}

/// The group buffer of all buckets of a group ([`StageIo::group`]); `own` is this bucket's.
///
/// # Errors
/// As [`Buffers::get`].
pub fn group_buffers<'s>(
    group: &'s [Option<FlatView<'_>>],
    buffers: &'s Buffers<'_>,
    own: BufferId,
) -> Result<Vec<FlatView<'s>>> {
    group.iter().map(|one| one.map_or_else(|| Ok(buffers.get(own)?.flat.view()), Ok)).collect()
}

/// Records a measurement of the matrix of a unit, if measurements were requested and the whole of a state of its shape is
/// here: a part would give another number. The value is computed only then.
///
/// # Errors
/// Whatever `value` returns.
pub fn record_stored(
    probe: &mut Option<&mut Probe>,
    name: &'static str,
    unit: &UnitIo<'_>,
    state: usize,
    value: impl FnOnce() -> Result<f64>,
) -> Result<()> {
    if unit.state[state].shape() == [unit.rows, unit.cols] {
        record(probe, name, unit, value)
    } else {
        Ok(())
    }
}

/// Records a measurement of a unit, if measurements were requested. The value is computed only then.
///
/// # Errors
/// Whatever `value` returns.
pub fn record(
    probe: &mut Option<&mut Probe>,
    name: &'static str,
    unit: &UnitIo<'_>,
    value: impl FnOnce() -> Result<f64>,
) -> Result<()> {
    if let Some(probe) = probe.as_deref_mut() {
        let value = value()?;
        probe.entry(name).or_default().push((unit.param_index, value));
    }
    Ok(())
}
