//! Data that the passes hand on: shards of buffers, redistributions, steps of a bucket, ranges of the arena.

use std::ops::Range;

use super::bucket::{Bucket, Unit};
use crate::layout::{Collective, Reduction};
use crate::program::{BufferId, BufferSpec, Stage};
use crate::spec::Side;
use crate::tensor::DType;

/// Alignment of every buffer: a cache line, and enough for every vector load.
pub(super) const ALIGN: usize = 64;

/// Bytes of a buffer in the arena.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ArenaRange {
    /// First byte.
    pub offset: usize,
    /// Length in bytes.
    pub bytes: usize,
}

impl ArenaRange {
    /// Tests whether two ranges share a byte.
    #[must_use]
    pub fn overlaps(&self, other: &Self) -> bool {
        self.bytes > 0
            && other.bytes > 0
            && self.offset < other.offset + other.bytes
            && other.offset < self.offset + self.bytes
    }
}

/// Shard of a buffer that this process holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BufferShard {
    /// Range of the bucket's units.
    pub units: Range<usize>,
    /// Number of axes along which these are the units that this process owns.
    pub taken: usize,
    /// Number of times that each side is sharded.
    pub depth: [usize; 2],
}

impl BufferShard {
    /// All that this process stores.
    #[must_use]
    pub fn stored(bucket: &Bucket) -> Self {
        Self { units: 0..bucket.units.len(), taken: 0, depth: bucket.depth() }
    }

    /// Leaves the units that this process owns along the axis at position `at` too.
    pub(super) fn own(&mut self, bucket: &Bucket, at: usize) {
        (self.units, self.taken) = (owned(bucket, &self.units, at), at + 1);
    }
}

/// A change of one buffer along one axis.
#[derive(Clone, Debug, PartialEq)]
pub struct Redistribution {
    /// The buffer.
    pub buffer: BufferId,
    /// The axis, by its number in the bucket.
    pub axis: usize,
    /// Kind of the change.
    pub kind: RedistributionKind,
    /// Shard that is held before.
    pub before: BufferShard,
    /// Shard that is held after.
    pub after: BufferShard,
    /// Index of the message range that it uses among those of the bucket.
    pub message: usize,
    /// True if this process contributes nothing: another one with the same copy does.
    pub silent: bool,
    /// True if the change is left out where no unit is scheduled.
    pub guarded: bool,
}

impl Redistribution {
    /// Tests whether contributions are sent from a copy of the buffer: in another type, or with those of other buffers.
    #[must_use]
    pub fn staged(&self, spec: &BufferSpec) -> bool {
        spec.wire != spec.dtype || self.message > 0
    }

    /// Element type that is sent: contributions to be added have one of their own.
    #[must_use]
    pub fn dtype(&self, spec: &BufferSpec) -> DType {
        if matches!(self.kind, RedistributionKind::AllReduce { .. }) { spec.wire } else { spec.dtype }
    }

    /// Rows and columns that this process holds of a unit.
    #[must_use]
    pub fn size(bucket: &Bucket, spec: &BufferSpec, unit: &Unit, depth: [usize; 2]) -> [usize; 2] {
        [0, 1].map(|d| bucket.span(unit, spec, d, depth).len())
    }

    /// Elements that this process holds.
    #[must_use]
    pub fn area(bucket: &Bucket, spec: &BufferSpec, held: &BufferShard) -> usize {
        if spec.shared {
            return spec.rows * spec.cols;
        }
        let sizes = bucket.units[held.units.clone()].iter().map(|u| Self::size(bucket, spec, u, held.depth));
        sizes.map(|[rows, cols]| rows * cols).sum()
    }
}

/// Kinds of change. A shard is named by its side and the number of its axis among those that shard that side; `at` is
/// the position of the axis in the owners of the units.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RedistributionKind {
    /// The parts of each unit go to its owner: all-to-all.
    ToOwner {
        /// The side that is gathered.
        side: Side,
        /// Number of its axis among those that shard the side.
        level: usize,
        /// Position in `owner`.
        at: usize,
    },
    /// The owner shards each unit again and sends the parts home: all-to-all.
    FromOwner {
        /// The side that is sharded.
        side: Side,
        /// Number of its axis among those that shard the side.
        level: usize,
        /// Position in `owner`.
        at: usize,
    },
    /// Contributions go to the owner, which adds them in the order of the ranks: all-to-all.
    ReduceToOwner {
        /// Sum or mean.
        how: Reduction,
        /// Position in `owner`.
        at: usize,
    },
    /// Every process keeps the units that it owns: no communication.
    Slice,
    /// Owners give all ranks their units: all-gather, or where most messages would be padding, all-to-all.
    GatherOwned {
        /// Position in `owner`.
        at: usize,
        /// True if every message has its own length.
        exact: bool,
    },
    /// All ranks get all parts: all-gather.
    AllGather {
        /// The side that is gathered.
        side: Side,
        /// Number of its axis among those that shard the side.
        level: usize,
    },
    /// Contributions are added for all ranks: all-reduce.
    AllReduce {
        /// Sum or mean.
        how: Reduction,
    },
}

impl RedistributionKind {
    /// The collective that carries it out.
    #[must_use]
    pub fn collective(self) -> Collective {
        match self {
            Self::ToOwner { .. } | Self::FromOwner { .. } | Self::GatherOwned { exact: true, .. } => {
                Collective::AllToAll
            }
            Self::ReduceToOwner { how, .. } => Collective::ReduceScatter(how),
            Self::Slice => Collective::Slice,
            Self::GatherOwned { .. } | Self::AllGather { .. } => Collective::AllGather,
            Self::AllReduce { how } => Collective::AllReduce(how),
        }
    }
}

/// Stage with the units and shards that it works on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StagePoint {
    /// The stage.
    pub stage: Stage,
    /// Name of the stage for the printed plan.
    pub name: &'static str,
    /// True if the stage works on whole matrices; then it takes those without a gradient too, so that they lie
    /// together.
    pub whole: bool,
    /// The units that it takes.
    pub units: Range<usize>,
    /// True if the stage works at the owners, on buffers instead of states (`Program::gathered`).
    pub gathered: bool,
    /// Shard that a buffer has here as declared.
    pub base: BufferShard,
    /// Shard of each buffer that is held.
    pub held: Vec<BufferShard>,
    /// True if the stage is left out where no unit is scheduled.
    pub guarded: bool,
}

/// A step of a bucket.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    /// Gradients go into the buffer in which they are averaged.
    Gradients,
    /// States go into the buffers that are sent instead of them.
    Load,
    /// States are written from the buffers that were sent instead of them.
    Store,
    /// A redistribution begins: what is sent is put together.
    Pack(Redistribution),
    /// A redistribution ends: what came is put where it belongs.
    Unpack(Redistribution),
    /// A stage of the algorithm.
    Stage(StagePoint),
}

impl Step {
    /// Tests whether the step is left out where no unit is scheduled.
    #[must_use]
    pub fn guarded(&self) -> bool {
        match self {
            Self::Gradients | Self::Load | Self::Store => false,
            Self::Pack(redistribution) | Self::Unpack(redistribution) => redistribution.guarded,
            Self::Stage(point) => point.guarded,
        }
    }
}

/// The steps of a bucket until something is sent, and the redistributions that then are in flight.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Segment {
    /// The steps.
    pub steps: Vec<Step>,
    /// The redistributions.
    pub redistributions: Vec<Redistribution>,
    /// Meeting point of coalesced buckets: the number of the placement changes between two stages, and that of the
    /// round within them.
    pub at: (usize, usize),
}

/// The axes along which gradients have still to be reduced, each with how.
pub(super) fn pending(bucket: &Bucket) -> impl Iterator<Item = (usize, Reduction)> {
    bucket.axes.iter().enumerate().filter_map(|(at, axis)| axis.pending.map(|how| (at, how)))
}

/// The units among `units` that this process owns along the axis at position `at`. They are sorted by owner.
fn owned(bucket: &Bucket, units: &Range<usize>, at: usize) -> Range<usize> {
    let me = bucket.axes[bucket.owner_axes[at]].axis.coordinate;
    owned_by(bucket, units, at, me)
}

/// The units among `units` that rank `owner` of the axis at position `at` owns.
#[must_use]
pub fn owned_by(bucket: &Bucket, units: &Range<usize>, at: usize, owner: usize) -> Range<usize> {
    let among = &bucket.units[units.clone()];
    let first = among.partition_point(|u| u.owner[at] < owner);
    let end = among.partition_point(|u| u.owner[at] <= owner);
    units.start + first..units.start + end
}

/// The units that were shared along the axis at position `at`: all whose owners before it are mine.
pub(super) fn shared(bucket: &Bucket, at: usize) -> Range<usize> {
    (0..at).fold(0..bucket.units.len(), |units, earlier| owned(bucket, &units, earlier))
}
