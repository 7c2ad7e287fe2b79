//! Turns a bucket's program into local steps and collectives along one axis each.

use super::bucket::Bucket;
use super::ir::{
    BufferShard, Redistribution, RedistributionKind, Segment, StagePoint, Step, owned_by, pending, shared,
};
use super::owners::{AxisPlacement, axis_placements};
use crate::error::{Error, Result};
use crate::layout::{Collective, Placement, Reduction, lower};
use crate::program::{BufferId, BufferSpec, ProgramOp, Stage, Target};
use crate::spec::DimSharding;

struct Writer<'a> {
    bucket: &'a Bucket,
    /// Shard of a buffer as declared: what is stored, or what is left of it at the owners.
    base: BufferShard,
    held: Vec<BufferShard>,
    /// True between the ends of `Program::gathered`.
    gathered: bool,
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
    if bucket.whole_parameter {
        return super::reductions::segments(bucket);
    }
    let base = BufferShard::stored(bucket);
    let held = vec![base.clone(); bucket.program.buffers.len()];
    let mut writer = Writer {
        bucket,
        base,
        held,
        gathered: false,
        whole: false,
        guarded: false,
        segments: Vec::new(),
        steps: Vec::new(),
    };
    writer.leave_out();
    if let Some(buffer) = bucket.gradient {
        writer.steps.push(Step::Gradients);
        for (axis, how) in pending(bucket) {
            writer.redistribution(buffer, axis, RedistributionKind::AllReduce { how })?;
        }
    }
    for op in &bucket.program.ops {
        match *op {
            ProgramOp::Local { stage, name } => writer.stage(stage, name),
            ProgramOp::Redistribute { buffer, to } => writer.redistribute(buffer, to)?,
            ProgramOp::SamePlacement { buffer, other } => writer.held[buffer] = writer.held[other].clone(),
            ProgramOp::Release { buffer } => writer.held[buffer] = writer.base.clone(),
            ProgramOp::WhenDue(on) => writer.guarded = on,
            ProgramOp::Gathered(true) => writer.gather()?,
            ProgramOp::Gathered(false) => writer.scatter()?,
        }
    }
    let Writer { mut segments, steps, .. } = writer;
    segments.push(Segment { steps, ..Segment::default() });
    Ok(segments)
}

/// The same with the axes over which matrices are sharded by owner in the order of these: that of the first buffer that becomes
/// whole, whose sums go first.
fn in_order_of_owners(
    bucket: &Bucket,
    mut placements: Vec<(usize, AxisPlacement)>,
) -> Vec<(usize, AxisPlacement)> {
    let at = |axis: usize| bucket.owner_axes.iter().position(|&a| a == axis);
    let places: Vec<usize> = (0..placements.len()).filter(|&i| at(placements[i].0).is_some()).collect();
    let mut sorted: Vec<_> = places.iter().map(|&i| placements[i]).collect();
    sorted.sort_by_key(|(axis, _)| at(*axis));
    for (i, placement) in places.into_iter().zip(sorted) {
        placements[i] = placement;
    }
    placements
}

impl Writer<'_> {
    fn stage(&mut self, stage: Stage, name: &'static str) {
        let base = self.base.clone();
        let units = self.held.iter().find(|h| h.taken > base.taken).unwrap_or(&base).units.clone();
        let (whole, guarded, gathered) = (self.whole, self.guarded, self.gathered);
        let held = self.held.clone();
        self.steps.push(Step::Stage(StagePoint { stage, name, whole, units, gathered, base, held, guarded }));
    }

    /// Outside of `Program::gathered`, buffers that are used only there have no matrices.
    fn leave_out(&mut self) {
        let Self { bucket, base, held, .. } = self;
        for (buffer, held) in held.iter_mut().enumerate() {
            if bucket.only_gathered(buffer) {
                *held = BufferShard { units: 0..0, ..base.clone() };
            }
        }
    }

    /// States go to the owners along the axes that are gathered.
    fn gather(&mut self) -> Result<()> {
        let bucket = self.bucket;
        self.steps.push(Step::Load);
        for &(buffer, _) in &bucket.program.carried.states {
            for (at, &axis) in bucket.gathered.iter().enumerate() {
                let spec = &bucket.program.buffers[buffer];
                let kind = match bucket.axes[axis].shards.filter(|&side| spec.has_dim_of(side)) {
                    Some(side) => {
                        let level = self.held[buffer].depth[side.index()] - 1;
                        RedistributionKind::ToOwner { side, level, at }
                    }
                    None => RedistributionKind::Slice,
                };
                self.redistribution(buffer, axis, kind)?;
            }
        }
        let taken = bucket.gathered.len();
        self.base = BufferShard { units: shared(bucket, taken), taken, depth: bucket.kept_depth() };
        self.held.fill(self.base.clone());
        if let Some(gradient) = bucket.gradient {
            self.held[gradient].units = 0..0;
        }
        self.gathered = true;
        Ok(())
    }

    /// States and results go home from the owners.
    fn scatter(&mut self) -> Result<()> {
        let bucket = self.bucket;
        for buffer in bucket.program.carried.buffers() {
            for (at, &axis) in bucket.gathered.iter().enumerate().rev() {
                let spec = &bucket.program.buffers[buffer];
                let kind = match bucket.axes[axis].shards.filter(|&side| spec.has_dim_of(side)) {
                    Some(side) => {
                        let level = self.held[buffer].depth[side.index()];
                        RedistributionKind::FromOwner { side, level, at }
                    }
                    None => RedistributionKind::GatherOwned { at, exact: sparse(bucket, at) },
                };
                self.redistribution(buffer, axis, kind)?;
            }
        }
        self.steps.push(Step::Store);
        (self.gathered, self.base) = (false, BufferShard::stored(bucket));
        self.held.fill(self.base.clone());
        self.leave_out();
        Ok(())
    }

    fn redistribute(&mut self, buffer: BufferId, to: Target) -> Result<()> {
        let bucket = self.bucket;
        let spec = bucket.program.buffers[buffer];
        let at = |axis: usize| bucket.owner_axes.iter().position(|&a| a == axis);
        match to {
            Target::Whole => {
                for (axis, placement) in in_order_of_owners(bucket, axis_placements(bucket, &spec)) {
                    let kind = match (placement, at(axis)) {
                        (AxisPlacement::Sharded(side), Some(at)) => {
                            let level = self.held[buffer].depth[side.index()] - 1;
                            RedistributionKind::ToOwner { side, level, at }
                        }
                        (AxisPlacement::Summed(_), Some(at)) => {
                            RedistributionKind::ReduceToOwner { how: Reduction::Sum, at }
                        }
                        (AxisPlacement::Averaged, Some(at)) => {
                            RedistributionKind::ReduceToOwner { how: Reduction::Avg, at }
                        }
                        (AxisPlacement::Summed(_), None) => {
                            RedistributionKind::AllReduce { how: Reduction::Sum }
                        }
                        (AxisPlacement::Averaged, None) => {
                            RedistributionKind::AllReduce { how: Reduction::Avg }
                        }
                        (AxisPlacement::Replicated, Some(_)) => RedistributionKind::Slice,
                        (AxisPlacement::Replicated, None) => continue,
                        (AxisPlacement::Sharded(_), None) => {
                            return Err(Error::Internal("a sharded side was not sharded by owner".into()));
                        }
                    };
                    self.redistribution(buffer, axis, kind)?;
                }
                self.whole = true;
            }
            Target::Storage => {
                let axis_placements = axis_placements(bucket, &spec);
                for (at, &axis) in bucket.owner_axes.iter().enumerate().skip(bucket.gathered.len()).rev() {
                    let kind = match axis_placements.iter().find(|(a, _)| *a == axis) {
                        Some((_, AxisPlacement::Sharded(side))) => RedistributionKind::FromOwner {
                            side: *side,
                            level: self.held[buffer].depth[side.index()],
                            at,
                        },
                        // Also where none of its dimensions is sharded by the axis.
                        _ => RedistributionKind::GatherOwned { at, exact: sparse(bucket, at) },
                    };
                    self.redistribution(buffer, axis, kind)?;
                }
                self.whole = false;
            }
            Target::Replicate => {
                for (axis, placement) in axis_placements(bucket, &spec) {
                    let kind = match placement {
                        AxisPlacement::Summed(_) => RedistributionKind::AllReduce { how: Reduction::Sum },
                        AxisPlacement::Averaged => RedistributionKind::AllReduce { how: Reduction::Avg },
                        AxisPlacement::Sharded(side) if spec.sharding.contains(&DimSharding::Even(side)) => {
                            let level = self.held[buffer].depth[side.index()] - 1;
                            RedistributionKind::AllGather { side, level }
                        }
                        AxisPlacement::Sharded(_) | AxisPlacement::Replicated => continue,
                    };
                    self.redistribution(buffer, axis, kind)?;
                }
            }
        }
        Ok(())
    }

    fn redistribution(&mut self, buffer: BufferId, axis: usize, kind: RedistributionKind) -> Result<()> {
        let bucket = self.bucket;
        let spec = &bucket.program.buffers[buffer];
        check(spec, bucket, axis, kind)?;
        let before = self.held[buffer].clone();
        let mut after = before.clone();
        match kind {
            RedistributionKind::ToOwner { side, level, at } => {
                after.depth[side.index()] = level;
                after.own(bucket, at);
            }
            RedistributionKind::ReduceToOwner { at, .. } => after.own(bucket, at),
            RedistributionKind::Slice => {
                after.own(bucket, bucket.owner_axes.iter().position(|&a| a == axis).unwrap_or(0));
            }
            RedistributionKind::FromOwner { side, level, at } => {
                after.depth[side.index()] = level + 1;
                (after.units, after.taken) = (shared(bucket, at), at);
            }
            RedistributionKind::GatherOwned { at, .. } => {
                (after.units, after.taken) = (shared(bucket, at), at);
            }
            RedistributionKind::AllGather { side, level } => after.depth[side.index()] = level,
            RedistributionKind::AllReduce { .. } => {}
        }
        self.held[buffer] = after.clone();
        let redistribution = Redistribution {
            buffer,
            axis,
            kind,
            before,
            after,
            message: 0,
            silent: false,
            guarded: self.guarded,
        };
        if kind == RedistributionKind::Slice {
            self.steps.push(Step::Unpack(redistribution));
            return Ok(());
        }
        let converted = spec.wire != spec.dtype;
        let (packed, unpacked) = match kind {
            RedistributionKind::FromOwner { .. } => (true, false),
            RedistributionKind::GatherOwned { exact, .. } => (true, !exact),
            RedistributionKind::AllReduce { how } => (how == Reduction::Avg || converted, converted),
            _ => (false, true),
        };
        if packed {
            self.steps.push(Step::Pack(redistribution.clone()));
        }
        let next = if unpacked { vec![Step::Unpack(redistribution.clone())] } else { Vec::new() };
        let steps = std::mem::replace(&mut self.steps, next);
        self.segments.push(Segment { steps, redistributions: vec![redistribution], at: (0, 0) });
        Ok(())
    }
}

/// Checks a redistribution against the table of placement changes.
fn check(spec: &BufferSpec, bucket: &Bucket, axis: usize, kind: RedistributionKind) -> Result<()> {
    use Placement::{OwnerSharded, Partial, Replicate, Shard};
    let (from, to) = match kind {
        RedistributionKind::ToOwner { side, .. } => (Shard(side.index()), OwnerSharded),
        RedistributionKind::FromOwner { side, .. } => (OwnerSharded, Shard(side.index())),
        RedistributionKind::ReduceToOwner { how, .. } => (Partial(how), OwnerSharded),
        RedistributionKind::Slice => (Replicate, OwnerSharded),
        RedistributionKind::GatherOwned { .. } => (OwnerSharded, Replicate),
        RedistributionKind::AllGather { side, .. } => (Shard(side.index()), Replicate),
        RedistributionKind::AllReduce { how } => (Partial(how), Replicate),
    };
    let ranks = bucket.axis(axis).ranks.len();
    let collective = match kind {
        RedistributionKind::GatherOwned { .. } => Collective::AllGather,
        other => other.collective(),
    };
    if lower(from, to, ranks) == Some(collective) {
        return Ok(());
    }
    Err(Error::Internal(format!("buffer {} cannot go from {from:?} to {to:?} over {ranks} ranks", spec.name)))
}

/// Tests whether an all-gather along the axis at position `at` would carry more padding than units.
fn sparse(bucket: &Bucket, at: usize) -> bool {
    let units = shared(bucket, at);
    let ranks = bucket.axes[bucket.owner_axes[at]].axis.ranks.len();
    let most = (0..ranks).map(|owner| owned_by(bucket, &units, at, owner).len()).max().unwrap_or(0);
    most * ranks > 2 * units.len()
}
