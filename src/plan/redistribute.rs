//! Turns a bucket's program into local steps and collectives along one axis each.

use std::ops::Range;

use super::bucket::{Bucket, Unit};
use super::owners::{Way, ways};
use crate::error::{Error, Result};
use crate::layout::{Collective, Placement, Reduction, lower};
use crate::program::{BufferId, BufferSpec, ProgramOp, Stage, Target};
use crate::spec::{Cut, Side};
use crate::tensor::DType;

/// What this process holds of a buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Held {
    /// Which units of the bucket.
    pub units: Range<usize>,
    /// How many times each side is cut.
    pub depth: [usize; 2],
}

/// A change of one buffer along one axis.
#[derive(Clone, Debug, PartialEq)]
pub struct Hop {
    /// The buffer.
    pub buffer: BufferId,
    /// The axis, by its number in the bucket.
    pub axis: usize,
    /// What happens.
    pub kind: HopKind,
    /// What is held before.
    pub before: Held,
    /// What is held after.
    pub after: Held,
    /// Which of the bucket's places for messages it uses.
    pub message: usize,
    /// Whether this process contributes nothing: another one with the same copy does.
    pub silent: bool,
    /// Whether it is left out where no unit is due.
    pub guarded: bool,
}

/// The kinds of change. A cut is named by its side and its number among the cuts of that side; `at` is the position of
/// the axis in the owners of the units.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HopKind {
    /// The parts of each unit go to its owner: all-to-all.
    Deal {
        /// The cut that is undone.
        side: Side,
        /// Its number.
        level: usize,
        /// Position in `owner`.
        at: usize,
    },
    /// The owner cuts each unit again and sends the parts home: all-to-all.
    Undeal {
        /// The cut that is made.
        side: Side,
        /// Its number.
        level: usize,
        /// Position in `owner`.
        at: usize,
    },
    /// Contributions go to the owner, which adds them in the order of the ranks: all-to-all.
    ReduceDeal {
        /// Whether the mean is wanted.
        how: Reduction,
        /// Position in `owner`.
        at: usize,
    },
    /// Every process keeps the units that it owns: no communication.
    Slice,
    /// Owners give everybody their units: all-gather, or where most messages would be padding, all-to-all.
    Collect {
        /// Position in `owner`.
        at: usize,
        /// Whether every message has its own length.
        exact: bool,
    },
    /// Everybody gets all parts: all-gather.
    Gather {
        /// The cut that is undone.
        side: Side,
        /// Its number.
        level: usize,
    },
    /// Contributions are added for everybody: all-reduce.
    AllReduce {
        /// Whether the mean is wanted.
        how: Reduction,
    },
}

impl HopKind {
    /// The collective that carries it out.
    #[must_use]
    pub fn collective(self) -> Collective {
        match self {
            Self::Deal { .. } | Self::Undeal { .. } | Self::Collect { exact: true, .. } => {
                Collective::AllToAll
            }
            Self::ReduceDeal { how, .. } => Collective::ReduceScatter(how),
            Self::Slice => Collective::Slice,
            Self::Collect { .. } | Self::Gather { .. } => Collective::AllGather,
            Self::AllReduce { how } => Collective::AllReduce(how),
        }
    }
}

/// A stage with what it works on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StagePoint {
    /// The stage.
    pub stage: Stage,
    /// Its name for the printed plan.
    pub name: &'static str,
    /// Whether it works on whole matrices; then it takes those without a gradient too, so that they lie together.
    pub whole: bool,
    /// The units that it takes.
    pub units: Range<usize>,
    /// What is held of each buffer.
    pub held: Vec<Held>,
    /// Whether it is left out where no unit is due.
    pub guarded: bool,
}

/// A step of a bucket.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    /// Gradients go into the buffer in which they are averaged.
    Gradients,
    /// A hop begins: what is sent is put together.
    Pack(Hop),
    /// A hop ends: what came is put where it belongs.
    Unpack(Hop),
    /// A stage of the algorithm.
    Stage(StagePoint),
}

impl Step {
    /// Whether it is left out where no unit is due.
    #[must_use]
    pub fn guarded(&self) -> bool {
        match self {
            Self::Gradients => false,
            Self::Pack(hop) | Self::Unpack(hop) => hop.guarded,
            Self::Stage(point) => point.guarded,
        }
    }
}

/// The steps of a bucket until something is sent, and the hops that then are in flight.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Segment {
    /// The steps.
    pub steps: Vec<Step>,
    /// The hops.
    pub hops: Vec<Hop>,
    /// Where buckets that go together meet: the number of the placement changes between two stages, and that of the
    /// round within them.
    pub at: (usize, usize),
}

struct Writer<'a> {
    bucket: &'a Bucket,
    held: Vec<Held>,
    whole: bool,
    guarded: bool,
    segments: Vec<Segment>,
    steps: Vec<Step>,
}

/// Lowers the program of a bucket.
///
/// # Errors
/// `Error::Internal` for a placement change that no collective makes.
pub(super) fn segments(bucket: &Bucket) -> Result<Vec<Segment>> {
    if bucket.joint {
        return super::reductions::segments(bucket);
    }
    let stored = Held { units: 0..bucket.units.len(), depth: bucket.depth() };
    let held = vec![stored.clone(); bucket.program.buffers.len()];
    let mut writer =
        Writer { bucket, held, whole: false, guarded: false, segments: Vec::new(), steps: Vec::new() };
    if let Some(buffer) = bucket.gradient {
        writer.steps.push(Step::Gradients);
        for axis in (0..bucket.axes.len()).filter(|&a| bucket.axes[a].pending) {
            writer.hop(buffer, axis, HopKind::AllReduce { how: Reduction::Avg })?;
        }
    }
    for op in &bucket.program.ops {
        match *op {
            ProgramOp::Local { stage, name } => writer.stage(stage, name),
            ProgramOp::Redistribute { buffer, to } => writer.redistribute(buffer, to)?,
            ProgramOp::Beside { buffer, other } => writer.held[buffer] = writer.held[other].clone(),
            ProgramOp::Release { buffer } => writer.held[buffer] = stored.clone(),
            ProgramOp::WhenDue(on) => writer.guarded = on,
        }
    }
    let Writer { mut segments, steps, .. } = writer;
    segments.push(Segment { steps, ..Segment::default() });
    Ok(segments)
}

impl Writer<'_> {
    fn stage(&mut self, stage: Stage, name: &'static str) {
        let all = 0..self.bucket.units.len();
        let units = self.held.iter().map(|h| &h.units).find(|u| **u != all).cloned().unwrap_or(all);
        let held = self.held.clone();
        let (whole, guarded) = (self.whole, self.guarded);
        self.steps.push(Step::Stage(StagePoint { stage, name, whole, units, held, guarded }));
    }

    fn redistribute(&mut self, buffer: BufferId, to: Target) -> Result<()> {
        let bucket = self.bucket;
        let spec = bucket.program.buffers[buffer];
        let at = |axis: usize| bucket.dealt.iter().position(|&a| a == axis);
        match to {
            Target::Whole => {
                for (axis, way) in ways(bucket, &spec) {
                    let kind = match (way, at(axis)) {
                        (Way::Cut(side), Some(at)) => {
                            let level = self.held[buffer].depth[side.index()] - 1;
                            HopKind::Deal { side, level, at }
                        }
                        (Way::Summed(_), Some(at)) => HopKind::ReduceDeal { how: Reduction::Sum, at },
                        (Way::Averaged, Some(at)) => HopKind::ReduceDeal { how: Reduction::Avg, at },
                        (Way::Summed(_), None) => HopKind::AllReduce { how: Reduction::Sum },
                        (Way::Averaged, None) => HopKind::AllReduce { how: Reduction::Avg },
                        (Way::Copied, Some(_)) => HopKind::Slice,
                        (Way::Copied, None) => continue,
                        (Way::Cut(_), None) => {
                            return Err(Error::Internal("a cut side was not dealt".into()));
                        }
                    };
                    self.hop(buffer, axis, kind)?;
                }
                self.whole = true;
            }
            Target::Storage => {
                let ways = ways(bucket, &spec);
                for (at, &axis) in bucket.dealt.iter().enumerate().rev() {
                    let kind = match ways.iter().find(|(a, _)| *a == axis) {
                        Some((_, Way::Cut(side))) => {
                            HopKind::Undeal { side: *side, level: self.held[buffer].depth[side.index()], at }
                        }
                        // Also where it goes along with no side that the axis cuts.
                        _ => HopKind::Collect { at, exact: sparse(bucket, at) },
                    };
                    self.hop(buffer, axis, kind)?;
                }
                self.whole = false;
            }
            Target::Replicate => {
                for (axis, way) in ways(bucket, &spec) {
                    let kind = match way {
                        Way::Summed(_) => HopKind::AllReduce { how: Reduction::Sum },
                        Way::Averaged => HopKind::AllReduce { how: Reduction::Avg },
                        Way::Cut(side) if spec.cuts.contains(&Cut::Spread(side)) => {
                            let level = self.held[buffer].depth[side.index()] - 1;
                            HopKind::Gather { side, level }
                        }
                        Way::Cut(_) | Way::Copied => continue,
                    };
                    self.hop(buffer, axis, kind)?;
                }
            }
        }
        Ok(())
    }

    fn hop(&mut self, buffer: BufferId, axis: usize, kind: HopKind) -> Result<()> {
        let bucket = self.bucket;
        let spec = &bucket.program.buffers[buffer];
        check(spec, bucket, axis, kind)?;
        let before = self.held[buffer].clone();
        let mut after = before.clone();
        match kind {
            HopKind::Deal { side, level, at } => {
                after.depth[side.index()] = level;
                after.units = owned(bucket, &before.units, at);
            }
            HopKind::ReduceDeal { at, .. } => after.units = owned(bucket, &before.units, at),
            HopKind::Slice => {
                let at = bucket.dealt.iter().position(|&a| a == axis).unwrap_or(0);
                after.units = owned(bucket, &before.units, at);
            }
            HopKind::Undeal { side, level, at } => {
                after.depth[side.index()] = level + 1;
                after.units = shared(bucket, at);
            }
            HopKind::Collect { at, .. } => after.units = shared(bucket, at),
            HopKind::Gather { side, level } => after.depth[side.index()] = level,
            HopKind::AllReduce { .. } => {}
        }
        self.held[buffer] = after.clone();
        let hop = Hop { buffer, axis, kind, before, after, message: 0, silent: false, guarded: self.guarded };
        if kind == HopKind::Slice {
            self.steps.push(Step::Unpack(hop));
            return Ok(());
        }
        let converted = spec.wire != spec.dtype;
        let (packed, unpacked) = match kind {
            HopKind::Undeal { .. } => (true, false),
            HopKind::Collect { exact, .. } => (true, !exact),
            HopKind::AllReduce { how } => (how == Reduction::Avg || converted, converted),
            _ => (false, true),
        };
        if packed {
            self.steps.push(Step::Pack(hop.clone()));
        }
        let next = if unpacked { vec![Step::Unpack(hop.clone())] } else { Vec::new() };
        let steps = std::mem::replace(&mut self.steps, next);
        self.segments.push(Segment { steps, hops: vec![hop], at: (0, 0) });
        Ok(())
    }
}

/// Holds a hop against the table of placement changes.
fn check(spec: &BufferSpec, bucket: &Bucket, axis: usize, kind: HopKind) -> Result<()> {
    use Placement::{Dealt, Partial, Replicate, Shard};
    let (from, to) = match kind {
        HopKind::Deal { side, .. } => (Shard(side.index()), Dealt),
        HopKind::Undeal { side, .. } => (Dealt, Shard(side.index())),
        HopKind::ReduceDeal { how, .. } => (Partial(how), Dealt),
        HopKind::Slice => (Replicate, Dealt),
        HopKind::Collect { .. } => (Dealt, Replicate),
        HopKind::Gather { side, .. } => (Shard(side.index()), Replicate),
        HopKind::AllReduce { how } => (Partial(how), Replicate),
    };
    let ranks = bucket.axis(axis).ranks.len();
    let collective = match kind {
        HopKind::Collect { .. } => Collective::AllGather,
        other => other.collective(),
    };
    if lower(from, to, ranks) == Some(collective) {
        return Ok(());
    }
    Err(Error::Internal(format!("buffer {} cannot go from {from:?} to {to:?} over {ranks} ranks", spec.name)))
}

/// The units among `units` that this process owns along the axis at position `at`. They are sorted by owner.
fn owned(bucket: &Bucket, units: &Range<usize>, at: usize) -> Range<usize> {
    let me = bucket.axes[bucket.dealt[at]].axis.coordinate;
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

/// Whether an all-gather along the axis at position `at` would carry more padding than units.
fn sparse(bucket: &Bucket, at: usize) -> bool {
    let units = shared(bucket, at);
    let ranks = bucket.axes[bucket.dealt[at]].axis.ranks.len();
    let most = (0..ranks).map(|owner| owned_by(bucket, &units, at, owner).len()).max().unwrap_or(0);
    most * ranks > 2 * units.len()
}

impl Hop {
    /// Whether contributions travel apart from the buffer: in another type, or with those of other buffers.
    #[must_use]
    pub fn staged(&self, spec: &BufferSpec) -> bool {
        spec.wire != spec.dtype || self.message > 0
    }

    /// The type that travels: contributions to be added have one of their own.
    #[must_use]
    pub fn dtype(&self, spec: &BufferSpec) -> DType {
        if matches!(self.kind, HopKind::AllReduce { .. }) { spec.wire } else { spec.dtype }
    }

    /// Rows and columns that this process holds of a unit.
    #[must_use]
    pub fn size(bucket: &Bucket, spec: &BufferSpec, unit: &Unit, depth: [usize; 2]) -> [usize; 2] {
        [0, 1].map(|d| bucket.span(unit, spec, d, depth).len())
    }

    /// Elements that this process holds.
    #[must_use]
    pub fn area(bucket: &Bucket, spec: &BufferSpec, held: &Held) -> usize {
        if spec.shared {
            return spec.rows * spec.cols;
        }
        let sizes = bucket.units[held.units.clone()].iter().map(|u| Self::size(bucket, spec, u, held.depth));
        sizes.map(|[rows, cols]| rows * cols).sum()
    }
}
