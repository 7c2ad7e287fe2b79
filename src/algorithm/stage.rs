//! Inputs and outputs of an algorithm's stage.

use std::collections::BTreeMap;
use std::ops::Range;

use tch::Tensor;

use crate::error::{Error, Result};
use crate::program::{BufferId, BufferSpec};
use crate::spec::UnitShape;
use crate::tensor::{FlatView, MatrixView};

/// Most states that one algorithm keeps for a parameter.
pub const MAX_STATES: usize = 8;

/// One block with its gradient and states: areas of one shape, or the block's part of a state of another shape.
#[derive(Clone, Copy, Debug)]
pub struct UnitIo {
    /// Index of the parameter: also the stream of its random numbers.
    pub param_index: usize,
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
    /// True if its parameter is due (`Algorithm::due`), where a part of the program waits for that.
    pub due: bool,
    /// The steps that its parameter has taken before this one, where the session counts them (`Algorithm::counted`).
    pub steps: f64,
    /// The block's parameters, written in place.
    pub param: MatrixView,
    /// The block's gradient, read only; for a stage on whole matrices where this process has all of it.
    pub grad: MatrixView,
    /// The block's states in the order of `Algorithm::state`, written in place.
    pub state: [MatrixView; MAX_STATES],
}

impl UnitIo {
    /// Nothing.
    pub const EMPTY: Self = Self {
        param_index: 0,
        block_index: 0,
        rows: 0,
        cols: 0,
        numel: 0,
        transposed: false,
        position: 0,
        due: false,
        steps: 0.0,
        param: MatrixView::EMPTY,
        grad: MatrixView::EMPTY,
        state: [MatrixView::EMPTY; MAX_STATES],
    };
}

/// Jobs for an elementwise kernel on operands of one shape each: one where all lie together, else one for each row.
///
/// # Errors
/// Whatever an operand's lookup returned.
pub fn jobs<const N: usize>(
    operands: impl IntoIterator<Item = Result<[MatrixView; N]>>,
) -> Result<Vec<[FlatView; N]>> {
    let operands = operands.into_iter();
    let mut jobs = Vec::with_capacity(operands.size_hint().0);
    for areas in operands {
        let areas = areas?;
        if areas.iter().all(|a| a.flat().is_some()) {
            jobs.push(areas.map(|a| a.all()));
        } else {
            jobs.extend((0..areas[0].shape()[0]).map(|row| areas.map(|a| a.row(row))));
        }
    }
    Ok(jobs)
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
#[derive(Clone, Copy, Debug)]
pub struct BufferIo<'a> {
    /// Declaration of the buffer.
    pub spec: &'a BufferSpec,
    /// Its memory.
    pub flat: FlatView,
    /// Its matrices by position; a scratch buffer has none.
    pub shards: &'a [MatrixShard],
}

/// Measurements of one step by name, each with its parameter's index. Taken only when somebody asks.
pub type Probe = BTreeMap<&'static str, Vec<(usize, f64)>>;

/// The units of a stage, the bucket's buffers, and the step's common facts.
#[derive(Debug)]
pub struct StageIo<'a> {
    /// Units with a gradient, in bucket order; for a stage on whole matrices all units.
    pub units: &'a [UnitIo],
    /// What all units have in common.
    pub class: &'a UnitShape,
    /// Factor of every gradient: -1 to maximize, divided by the loss scale.
    pub grad_factor: f64,
    /// The bucket's group buffer of all parameters of the group, where its program has one.
    pub group: Vec<FlatView>,
    /// Where measurements go, when asked for.
    pub probe: Option<&'a mut Probe>,
    pub(crate) buffers: &'a [BufferIo<'a>],
}

impl StageIo<'_> {
    fn buffer(&self, buffer: BufferId) -> Result<&BufferIo<'_>> {
        self.buffers.get(buffer).ok_or_else(|| Error::Internal(format!("no buffer {buffer}")))
    }

    fn shard(&self, buffer: BufferId, unit: usize) -> Result<&MatrixShard> {
        let shards = self.buffer(buffer)?.shards;
        let position = self.units.get(unit).map(|u| u.position);
        position.and_then(|p| shards.get(p)).ok_or_else(|| Error::Internal(format!("no matrix {unit}")))
    }

    /// Unit `unit`'s matrix of a buffer, as elements; all of a buffer that is shared.
    ///
    /// # Errors
    /// `Error::Internal` for a buffer that the program did not declare.
    pub fn flat(&self, buffer: BufferId, unit: usize) -> Result<FlatView> {
        let io = self.buffer(buffer)?;
        if io.spec.shared {
            return Ok(io.flat);
        }
        let MatrixShard { offset, shape, .. } = self.shard(buffer, unit)?;
        Ok(io.flat.part(*offset, shape[0] * shape[1]))
    }

    /// Rows and columns of unit `unit`'s matrix of a buffer.
    ///
    /// # Errors
    /// As `view`.
    pub fn shape(&self, buffer: BufferId, unit: usize) -> Result<[usize; 2]> {
        Ok(self.shard(buffer, unit)?.shape)
    }

    /// The first row and column of unit `unit`'s matrix of a buffer within the whole one.
    ///
    /// # Errors
    /// As `view`.
    pub fn origin(&self, buffer: BufferId, unit: usize) -> Result<[usize; 2]> {
        Ok(self.shard(buffer, unit)?.origin)
    }

    /// Unit `unit`'s matrix of a buffer, as an area.
    ///
    /// # Errors
    /// As `view`.
    pub fn area(&self, buffer: BufferId, unit: usize) -> Result<MatrixView> {
        let shape = self.shape(buffer, unit)?;
        Ok(self.flat(buffer, unit)?.area(0, shape, shape[1]))
    }

    /// The columns that unit `unit`'s matrix of a buffer has as declared, among all.
    ///
    /// # Errors
    /// As `view`.
    pub fn declared_cols(&self, buffer: BufferId, unit: usize) -> Result<Range<usize>> {
        Ok(self.shard(buffer, unit)?.declared_cols.clone())
    }

    /// Unit `unit`'s matrix of a buffer, as a tensor `[rows, cols]`.
    ///
    /// # Errors
    /// As `view`.
    pub fn matrix(&self, buffer: BufferId, unit: usize) -> Result<Tensor> {
        self.flat(buffer, unit)?.tensor(&self.shape(buffer, unit)?)
    }

    /// The matrices of the first `count` units of a buffer, all of one shape, as a tensor `[count, rows, cols]`.
    ///
    /// # Errors
    /// As `view`.
    pub fn matrices(&self, buffer: BufferId, count: usize) -> Result<Tensor> {
        let [rows, cols] = if count == 0 { [0, 0] } else { self.shape(buffer, 0)? };
        self.buffer(buffer)?.flat.part(0, count * rows * cols).tensor(&[count, rows, cols])
    }

    /// A shared buffer as a flat tensor.
    ///
    /// # Errors
    /// As `view`.
    pub fn scratch(&self, buffer: BufferId) -> Result<Tensor> {
        let flat = self.flat(buffer, 0)?;
        flat.tensor(&[flat.len()])
    }

    /// Notes a measurement of the stored matrix of unit `unit`, when somebody asked for them and all of the matrix is
    /// stored here: a part would give another number. The value is computed only then.
    ///
    /// # Errors
    /// Whatever `value` returns.
    pub fn record_stored(
        &mut self,
        name: &'static str,
        unit: usize,
        value: impl FnOnce() -> Result<f64>,
    ) -> Result<()> {
        let UnitIo { rows, cols, param, .. } = self.units[unit];
        if param.shape() == [rows, cols] { self.record(name, unit, value) } else { Ok(()) }
    }

    /// Notes a measurement of unit `unit`, when somebody asked for them. The value is computed only then.
    ///
    /// # Errors
    /// Whatever `value` returns.
    pub fn record(
        &mut self,
        name: &'static str,
        unit: usize,
        value: impl FnOnce() -> Result<f64>,
    ) -> Result<()> {
        if let Some(probe) = self.probe.as_deref_mut() {
            let value = value()?;
            probe.entry(name).or_default().push((self.units[unit].param_index, value));
        }
        Ok(())
    }
}
