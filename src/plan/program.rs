//! What an algorithm does to a bucket: local stages, separated by placement changes of named buffers.

use crate::dtype::DType;

/// A local stage, by its number within the algorithm.
pub type Stage = usize;

/// A buffer, by its number within the program.
pub type BufferId = usize;

/// A buffer that holds one `rows × cols` matrix for each unit of the bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BufferSpec {
    /// Name for the printed plan.
    pub name: &'static str,
    /// Rows per unit.
    pub rows: usize,
    /// Columns per unit.
    pub cols: usize,
    /// Element type.
    pub dtype: DType,
    /// Whether all units share one matrix (scratch) instead of having one each.
    pub shared: bool,
}

impl BufferSpec {
    /// Bytes for `units` units.
    #[must_use]
    pub fn bytes(&self, units: usize) -> usize {
        self.rows * self.cols * self.dtype.bytes() * if self.shared { 1 } else { units }
    }
}

/// Where a buffer has to be for the stage that follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// Whole matrices, dealt out over the ranks.
    Whole,
    /// As the parameter is stored.
    Storage,
    /// The same on every rank, contributions added.
    Replicate,
}

/// One operation of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProgramOp {
    /// Run a stage on what this process holds.
    Local {
        /// The stage.
        stage: Stage,
        /// Its name for the printed plan.
        name: &'static str,
    },
    /// Move a buffer.
    Redistribute {
        /// The buffer.
        buffer: BufferId,
        /// Where to.
        to: Target,
    },
}

/// A program with the buffers that it works in.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Program {
    /// Buffers by number.
    pub buffers: Vec<BufferSpec>,
    /// Operations in order.
    pub ops: Vec<ProgramOp>,
}

impl Program {
    /// An empty program.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Declares the next buffer: one matrix for each unit.
    #[must_use]
    pub fn buffer(mut self, name: &'static str, rows: usize, cols: usize, dtype: DType) -> Self {
        self.buffers.push(BufferSpec { name, rows, cols, dtype, shared: false });
        self
    }

    /// Declares the next buffer: `elements` elements that the units use in turn.
    #[must_use]
    pub fn scratch(mut self, name: &'static str, elements: usize, dtype: DType) -> Self {
        self.buffers.push(BufferSpec { name, rows: 1, cols: elements, dtype, shared: true });
        self
    }

    /// Appends a stage.
    #[must_use]
    pub fn local(mut self, stage: Stage, name: &'static str) -> Self {
        self.ops.push(ProgramOp::Local { stage, name });
        self
    }

    /// Appends a placement change.
    #[must_use]
    pub fn redistribute(mut self, buffer: BufferId, to: Target) -> Self {
        self.ops.push(ProgramOp::Redistribute { buffer, to });
        self
    }
}
