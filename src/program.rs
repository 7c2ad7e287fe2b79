//! Program of an algorithm on a bucket: local stages, separated by placement changes of named buffers.

use crate::spec::{DimSharding, Side};
use crate::tensor::DType;

/// A local stage, by its number within the algorithm.
pub type Stage = usize;

/// A buffer, by its number within the program.
pub type BufferId = usize;

/// A buffer that holds one `rows × cols` matrix for each unit of the bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(clippy::struct_excessive_bools)] // facts that do not depend on each other
pub struct BufferSpec {
    /// Name for the printed plan.
    pub name: &'static str,
    /// Rows per unit.
    pub rows: usize,
    /// Columns per unit.
    pub cols: usize,
    /// Element type.
    pub dtype: DType,
    /// Element type in which contributions are sent to be added.
    pub wire: DType,
    /// True if all units use the same memory (scratch) instead of having a matrix each.
    pub shared: bool,
    /// True if scratch has a matrix for each of the whole ones that a process takes, at least one.
    pub taken: bool,
    /// Sharding of rows and columns, relative to the sides of the block.
    pub sharding: [DimSharding<Side>; 2],
    /// True for each of rows, columns and the matrices of a parameter over which stages sum: where that is sharded,
    /// they leave contributions.
    pub summed: [bool; 3],
    /// True if the sum goes over all parameters of the group too, which are then taken together.
    pub group: bool,
    /// True if the buffer has, in one row, the elements that are stored of a parameter that is taken whole.
    pub stored: bool,
    /// True if the values that stages leave are linear in the gradient, so that averaging them stands for averaging the
    /// gradient.
    pub linear: bool,
}

impl BufferSpec {
    /// Buffer of one matrix per unit that no side of the block shards.
    #[must_use]
    pub fn new(name: &'static str, rows: usize, cols: usize, dtype: DType) -> Self {
        Self {
            name,
            rows,
            cols,
            dtype,
            wire: dtype,
            shared: false,
            taken: false,
            sharding: [DimSharding::Replicated; 2],
            summed: [false; 3],
            stored: false,
            group: false,
            linear: false,
        }
    }

    /// Sets the sharding of rows and columns, relative to the sides of the block.
    #[must_use]
    pub fn sharded(self, rows: DimSharding<Side>, cols: DimSharding<Side>) -> Self {
        Self { sharding: [rows, cols], ..self }
    }

    /// Buffer of one element for each that is stored of a parameter that is taken whole.
    #[must_use]
    pub fn stored(name: &'static str, dtype: DType) -> Self {
        Self { stored: true, ..Self::new(name, 1, 0, dtype) }
    }

    /// Marks the buffer as left by stages that sum over all elements of a parameter that is taken whole.
    #[must_use]
    pub fn total(self) -> Self {
        Self { summed: [true; 3], ..self }
    }

    /// Marks the buffer as summed over all parameters of the group before the stages that follow read it.
    #[must_use]
    pub fn group(self) -> Self {
        Self { group: true, ..self }
    }

    /// Marks the buffer as left by stages that sum over a side of the block.
    #[must_use]
    pub fn summed(mut self, over: Side) -> Self {
        self.summed[over.index()] = true;
        self
    }

    /// Tests whether one of its dimensions is sharded like a side of the block.
    #[must_use]
    pub fn has_dim_of(&self, side: Side) -> bool {
        let along = |sharding| matches!(sharding, DimSharding::LikeParam(own) | DimSharding::Even(own) if own == side);
        self.sharding.into_iter().any(along)
    }

    /// Marks the buffer as linear in the gradient.
    #[must_use]
    pub fn linear(self) -> Self {
        Self { linear: true, ..self }
    }

    /// Sets the element type in which contributions are sent.
    #[must_use]
    pub fn wire(self, wire: DType) -> Self {
        Self { wire, ..self }
    }
}

/// Placement that a buffer must have for the stage that follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// Whole matrices, contributions added, sharded by owner.
    Whole,
    /// Placement that the buffer declares.
    Storage,
    /// Placement that the buffer declares, but with contributions added and evenly sharded dimensions gathered.
    Replicate,
}

/// One operation of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProgramOp {
    /// Run a stage on the units and shards that this process holds.
    Local {
        /// The stage.
        stage: Stage,
        /// Name of the stage for the printed plan.
        name: &'static str,
    },
    /// Redistribute a buffer.
    Redistribute {
        /// The buffer.
        buffer: BufferId,
        /// Placement to reach.
        to: Target,
    },
    /// Give a buffer the placement of another one, which was sharded by owner; its former contents are lost.
    SamePlacement {
        /// The buffer.
        buffer: BufferId,
        /// The other one.
        other: BufferId,
    },
    /// Drop the contents of a buffer: from here on its placement is as declared.
    Release {
        /// The buffer.
        buffer: BufferId,
    },
    /// Begin (true) or end (false) operations that are skipped in steps in which no unit of the bucket is scheduled
    /// (`Algorithm::due`).
    WhenDue(bool),
    /// Begin (true) or end (false) the operations of `Program::gathered`.
    Gathered(bool),
}

/// Buffers that are sent to the owners before the operations of `Program::gathered`, and back after them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Carried {
    /// The states that are read and written there, each with the buffer that stands for it.
    pub states: Vec<(BufferId, usize)>,
    /// Buffers that are filled there.
    pub results: Vec<BufferId>,
}

impl Carried {
    /// Returns all of these buffers.
    pub fn buffers(&self) -> impl Iterator<Item = BufferId> + '_ {
        self.states.iter().map(|(buffer, _)| *buffer).chain(self.results.iter().copied())
    }
}

/// A program with the buffers that it works in.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Program {
    /// Buffers by number.
    pub buffers: Vec<BufferSpec>,
    /// Operations in order.
    pub ops: Vec<ProgramOp>,
    /// True if every whole matrix has one owner, also where copies could repeat its work, because results may differ
    /// between machines in the last bits.
    pub exclusive: bool,
    /// Buffers that are sent for the operations of `Program::gathered`.
    pub carried: Carried,
    /// Owner-sharded states (ZeRO-1), by number: stages on whole matrices have them.
    pub owned: Vec<usize>,
    /// True if the owners do all that counts as work.
    pub by_owners: bool,
    /// States, by number, that are sums over a side of the block: where it is sharded, every process keeps what its part of the
    /// side adds, and the state is the sum of these.
    pub contributed: Vec<(usize, Side)>,
    /// Rows of the symmetric products of a matrix, if most of its operations are 16-bit products that compute one triangle
    /// only.
    pub triangle: Option<usize>,
}

impl Program {
    /// An empty program.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Declares the next buffer.
    #[must_use]
    pub fn buffer(mut self, spec: BufferSpec) -> Self {
        self.buffers.push(spec);
        self
    }

    /// Declares the next buffer: `elements` elements that the units use in turn.
    #[must_use]
    pub fn scratch(self, name: &'static str, elements: usize, dtype: DType) -> Self {
        self.buffer(BufferSpec { shared: true, ..BufferSpec::new(name, 1, elements, dtype) })
    }

    /// Declares the next buffer: scratch of `elements` elements for each of the whole matrices that a process takes.
    #[must_use]
    pub fn scratch_of_each(self, name: &'static str, elements: usize, dtype: DType) -> Self {
        let spec = BufferSpec::new(name, 1, elements, dtype);
        self.buffer(BufferSpec { shared: true, taken: true, ..spec })
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

    /// Tests whether a buffer stands for a state where states have been gathered.
    #[must_use]
    pub fn is_state(&self, buffer: BufferId) -> bool {
        self.carried.states.iter().any(|(own, _)| *own == buffer)
    }

    /// The buffer that is summed over all parameters of the group.
    #[must_use]
    pub fn group_buffer(&self) -> Option<BufferId> {
        self.buffers.iter().position(|spec| spec.group)
    }

    /// Gives a buffer the placement of another one that went to its owners; stages that follow fill it.
    #[must_use]
    pub fn same_placement_as(mut self, buffer: BufferId, other: BufferId) -> Self {
        self.ops.push(ProgramOp::SamePlacement { buffer, other });
        self
    }

    /// Releases the contents of a buffer that was sharded by owner.
    #[must_use]
    pub fn release(mut self, buffer: BufferId) -> Self {
        self.ops.push(ProgramOp::Release { buffer });
        self
    }

    /// Appends `part`, which is skipped in steps in which no unit is scheduled (`Algorithm::due`), and which ends with all
    /// buffers placed as they were.
    #[must_use]
    pub fn when_due(mut self, part: impl FnOnce(Self) -> Self) -> Self {
        self.ops.push(ProgramOp::WhenDue(true));
        self = part(self);
        self.ops.push(ProgramOp::WhenDue(false));
        self
    }

    /// Appends `part`, whose stages work at the owners on what the axes that are not gathered leave of each matrix. Their
    /// units have the buffers of `carried` for the states, and neither parameters nor gradients.
    #[must_use]
    pub fn gathered(mut self, carried: Carried, part: impl FnOnce(Self) -> Self) -> Self {
        self.ops.push(ProgramOp::Gathered(true));
        self.carried = carried;
        self = part(self);
        self.ops.push(ProgramOp::Gathered(false));
        self
    }

    /// Tests whether steps differ in the operations that they run.
    #[must_use]
    pub fn guarded(&self) -> bool {
        self.ops.contains(&ProgramOp::WhenDue(true))
    }

    /// Linear buffers that are gathered or summed, once for each time, with true where they become whole.
    pub fn linear_moves(&self) -> impl Iterator<Item = (BufferId, bool)> + '_ {
        self.ops.iter().filter_map(|op| match op {
            ProgramOp::Redistribute { buffer, to: to @ (Target::Whole | Target::Replicate) } => {
                self.buffers.get(*buffer).filter(|b| b.linear)?;
                Some((*buffer, *to == Target::Whole))
            }
            _ => None,
        })
    }
}
