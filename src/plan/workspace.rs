//! Bounds of the workspace that no process exceeds, and the limit that a plan keeps.

use super::bucket::{Bucket, Unit};
use super::ir::{ALIGN, BufferShard, RedistributionKind, Step};
use super::owners::owner_axes;
use super::redistribute::segments;
use super::{GroupSpec, Param};
use crate::error::{Error, Result};
use crate::program::BufferSpec;
use crate::spec::DimSharding;

/// Bytes that a plan may take where the user sets no limit, however few parameters there are.
const LEAST_DEFAULT: usize = 1 << 30;

/// The limit of a plan's workspace.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limit {
    /// Bytes.
    pub bytes: usize,
    /// True if the user has set it: then it is kept or refused.
    pub given: bool,
}

impl Limit {
    /// The least `workspace_limit` of the groups, else half of what the largest share of the parameters takes.
    pub(super) fn of(groups: &[GroupSpec], params: &[Param]) -> Result<Self> {
        let mut least: Option<usize> = None;
        for group in groups {
            if let Some(bytes) = group.options.optional_count("workspace_limit")? {
                least = Some(least.map_or(bytes, |least| least.min(bytes)));
            }
        }
        let half = params.iter().map(largest_share).sum::<usize>() / 2;
        Ok(Self { bytes: least.unwrap_or(half.max(LEAST_DEFAULT)), given: least.is_some() })
    }

    /// Returns the fastest way to share the workspace, with the buckets that `close` makes for it. Arguments of `close` are
    /// the most bytes of a bucket, and whether it may have fewer matrices than there are processes to take one.
    ///
    /// # Errors
    /// `Error::Value` for a limit of the user's below what one matrix needs, of the parameter that `name` finds for a bucket.
    pub(super) fn share<'a>(
        mut self,
        close: impl Fn(usize, bool) -> Result<std::result::Result<Vec<Bucket>, (usize, usize)>>,
        name: impl Fn(usize) -> &'a str,
    ) -> Result<(Vec<Bucket>, Sharing)> {
        for _ in 0..2 {
            let mut excess = None;
            for sharing in Sharing::ALL {
                match close(sharing.cap(self), sharing.few)? {
                    Ok(buckets) => return Ok((buckets, sharing)),
                    Err(found) => excess = Some(found),
                }
            }
            let Some((number, least)) = excess else { break };
            if self.given {
                return Err(Error::Value(format!(
                    "workspace_limit must be at least {least} bytes, which one matrix of {} needs, got {}",
                    name(number),
                    self.bytes
                )));
            }
            // A little more than one matrix needs, so that one for each process needs no more where they divide unevenly.
            self.bytes = self.bytes.max(least.saturating_add(least / 8));
        }
        Err(Error::Internal("no way to share the workspace".into()))
    }
}

/// Bytes of a parameter on the process that stores most of it.
fn largest_share(param: &Param) -> usize {
    use crate::layout::Placement::{Shard, Strided};
    let mut shape = param.spec.shape.clone();
    for (axis, placement) in param.layout.distributed_axes() {
        if let Shard(dim) | Strided(dim) = placement {
            shape[dim] = shape[dim].div_ceil(axis.ranks.len());
        }
    }
    shape.iter().product::<usize>() * param.spec.dtype.bytes()
}

/// A way to share the workspace among buckets, the fastest first.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sharing {
    /// Buckets whose collectives are in flight at a time.
    pub lanes: usize,
    /// True if a bucket without communication may work at the same time.
    pub fillers: bool,
    /// True if a bucket may have fewer matrices than there are processes to take one.
    pub few: bool,
}

impl Sharing {
    pub(super) const ALL: [Self; 3] = [
        Self { lanes: 2, fillers: true, few: false },
        Self { lanes: 1, fillers: false, few: false },
        Self { lanes: 1, fillers: false, few: true },
    ];

    /// Bytes for each bucket.
    pub(super) fn cap(self, limit: Limit) -> usize {
        limit.bytes / (self.lanes + usize::from(self.fillers))
    }
}

/// Size of a buffer on the process that has most of it: `bytes` for each of the units that are left after `taken` owner
/// axes, or once for all units if `taken` is `None`.
#[derive(Clone, Copy, Debug)]
struct Piece {
    bytes: usize,
    taken: Option<usize>,
}

/// The workspace of a bucket of some number of units: a bound that no process exceeds.
#[derive(Clone, Debug)]
struct Demand {
    /// Pieces of each buffer and of the messages: the largest counts.
    buffers: Vec<Vec<Piece>>,
    /// For each buffer whether it is scratch, which lies where messages do.
    scratch: Vec<bool>,
    /// Ranks of the axes over which matrices are sharded by owner.
    ranks: Vec<usize>,
    /// Units that a process stores at most.
    units: usize,
}

impl Demand {
    /// Returns the demand of a bucket if no process stores more than `units` of it.
    ///
    /// # Errors
    /// As the lowering of its program.
    fn of(bucket: &Bucket, units: usize) -> Result<Self> {
        let trial = trial(bucket, units);
        let buffers = &trial.program.buffers;
        let messages = buffers.len();
        let ranks = trial.owner_axes.iter().map(|&a| trial.axes[a].axis.ranks.len()).collect();
        let scratch = buffers.iter().map(|spec| spec.shared).collect();
        let mut demand = Self { buffers: vec![Vec::new(); messages + 1], scratch, ranks, units };
        let stored = BufferShard::stored(&trial);
        for (at, spec) in buffers.iter().enumerate() {
            if spec.shared {
                let taken = spec.taken.then_some(demand.ranks.len());
                demand.add(at, spec.rows * spec.cols * spec.dtype.bytes(), taken);
            } else if !trial.only_gathered(at) {
                demand.add(at, largest(&trial, spec, &stored), Some(0));
            }
        }
        for segment in segments(&trial)? {
            for step in &segment.steps {
                if let Step::Stage(point) = step
                    && (point.gathered || point.whole)
                {
                    let held = buffers.iter().zip(&point.held).enumerate();
                    for (at, (spec, held)) in held.filter(|(_, (spec, _))| !spec.shared) {
                        demand.add(at, largest(&trial, spec, held), Some(held.taken));
                    }
                }
            }
            for moved in &segment.redistributions {
                let spec = &buffers[moved.buffer];
                let all = trial.axis(moved.axis).ranks.len();
                let (before, after) =
                    (largest(&trial, spec, &moved.before), largest(&trial, spec, &moved.after));
                let (few, many) = (Some(moved.before.taken), Some(moved.after.taken));
                demand.add(moved.buffer, before, few);
                demand.add(moved.buffer, after, many);
                match moved.kind {
                    RedistributionKind::ToOwner { .. } => demand.add(messages, after, many),
                    RedistributionKind::ReduceToOwner { .. } => demand.add(messages, after * all, many),
                    RedistributionKind::FromOwner { .. } => demand.add(messages, before, few),
                    RedistributionKind::GatherOwned { .. } => {
                        demand.add(messages, before * all, few);
                        demand.add(moved.buffer, before * all, few);
                    }
                    RedistributionKind::AllGather { .. } => {
                        demand.add(messages, before * all, few);
                    }
                    RedistributionKind::AllReduce { .. } if moved.staged(spec) => {
                        demand.add(messages, before / spec.dtype.bytes() * spec.wire.bytes(), few);
                    }
                    RedistributionKind::AllReduce { .. } | RedistributionKind::Slice => {}
                }
            }
        }
        Ok(demand)
    }

    fn add(&mut self, buffer: usize, bytes: usize, taken: Option<usize>) {
        self.buffers[buffer].push(Piece { bytes, taken });
    }

    /// Most units that a process has of `units` after those axes: they are owned evenly over the first of them, within each
    /// share over the next, and so on.
    fn most(&self, taken: usize) -> usize {
        self.units.div_ceil(self.ranks[..taken].iter().product()).max(1)
    }

    /// Bytes of the buffers and messages.
    fn total(&self) -> usize {
        let size =
            |piece: &Piece| piece.bytes.saturating_mul(piece.taken.map_or(1, |taken| self.most(taken)));
        let buffer = |pieces: &Vec<Piece>| pieces.iter().map(size).max().unwrap_or(0).next_multiple_of(ALIGN);
        let sizes: Vec<usize> = self.buffers.iter().map(buffer).collect();
        let Some((messages, own)) = sizes.split_last() else { return 0 };
        let part = |wanted: bool| {
            let chosen = own.iter().zip(&self.scratch).filter(move |(_, scratch)| **scratch == wanted);
            chosen.map(|(bytes, _)| bytes).sum::<usize>()
        };
        part(false) + part(true).max(*messages)
    }
}

/// Bytes that a bucket takes on any process, where none stores more than `units`.
///
/// # Errors
/// As the lowering of its program.
pub(super) fn bytes(bucket: &Bucket, units: usize) -> Result<usize> {
    Ok(Demand::of(bucket, units)?.total())
}

/// Returns the most units, at most `wanted`, with which a bucket is within the cap: a multiple of the first of `steps` that
/// has one that fits, else, with `few`, any number. Returns `None` where there is no such number.
///
/// # Errors
/// As `bytes`.
pub(super) fn fitting(
    bucket: &Bucket,
    wanted: usize,
    steps: &[usize],
    (cap, few): (usize, bool),
) -> Result<Option<usize>> {
    if bytes(bucket, wanted)? <= cap {
        return Ok(Some(wanted));
    }
    for step in steps.iter().copied().chain(few.then_some(1)) {
        let (mut low, mut high) = (0, wanted / step.max(1));
        while low < high {
            let middle = (low + high).div_ceil(2);
            if bytes(bucket, middle * step)? <= cap {
                low = middle;
            } else {
                high = middle - 1;
            }
        }
        if low > 0 {
            return Ok(Some(low * step));
        }
    }
    Ok(None)
}

/// Returns a bucket of one sample unit, with the axes over which matrices are sharded by owner if no process stores more
/// than `most`.
pub(super) fn trial(bucket: &Bucket, most: usize) -> Bucket {
    let mut trial = Bucket { units: Vec::new(), ..bucket.clone() };
    trial.owner_axes = owner_axes(&trial, most);
    let owner = vec![0; trial.owner_axes.len()];
    trial.units = bucket.units.first().map(|unit| Unit { owner, ..unit.clone() }).into_iter().collect();
    trial
}

/// Bytes of the largest part of a matrix that any process holds.
fn largest(bucket: &Bucket, spec: &BufferSpec, held: &BufferShard) -> usize {
    let length = |d: usize| {
        let whole = [spec.rows, spec.cols][d];
        let part = |side: crate::spec::Side, size: usize| {
            let axes = &bucket.sides[side.index()].1[..held.depth[side.index()]];
            axes.iter().fold(size, |part, &a| part.div_ceil(bucket.axis(a).ranks.len()))
        };
        match (spec.sharding[d], bucket.units.first()) {
            (DimSharding::LikeParam(side), Some(unit)) => {
                let extent = unit.extent(side);
                (part(side, extent.dim) * extent.scale).min(whole)
            }
            (DimSharding::Even(side), _) => part(side, whole),
            _ => whole,
        }
    };
    length(0) * length(1) * spec.dtype.bytes()
}
