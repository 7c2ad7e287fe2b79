//! Splits buckets so that their buffers fit a bound.

use super::GroupSpec;
use super::bucket::{Bucket, Unit};
use super::workspace;
use crate::error::Result;
use crate::program::BufferSpec;
use crate::spec::DimSharding;

/// Bytes of buffers that one bucket may take when the user sets no bound. Big matrices then go one by one,
/// through caches that their own buffers fit in; small ones go many at a time.
const DEFAULT_BATCH_BYTES: usize = 32 << 20;
/// Bytes of a bucket's own matrices where no other process waits for it: fewer at a time, but still several for every
/// core.
const ALONE_BATCH_BYTES: usize = 2 << 20;
/// Bytes of buffers of one bucket on a device, which small batches do not fill.
const DEVICE_BATCH_BYTES: usize = 256 << 20;
/// Bytes of buffers of one bucket where matrices are sharded by owner: it should have one for every process that could
/// take one.
const OWNER_BATCH_BYTES: usize = 1 << 30;

/// Bytes of buffers that one bucket of a group may take.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limit {
    /// Bound unless matrices are sharded by owner.
    most: usize,
    /// Bound where they are, within which every process that could take a matrix gets one.
    owner_sharded: usize,
    /// Bound of what a bucket's matrices do not share, where no other process has to do with it.
    alone: usize,
}

impl Limit {
    /// Reads the bound that the user sets with `max_batch_bytes`, or the defaults of the host and of devices.
    pub(super) fn of_group(group: &GroupSpec) -> Result<[Self; 2]> {
        let given = group.options.optional_count("max_batch_bytes")?;
        let defaults = [[DEFAULT_BATCH_BYTES, ALONE_BATCH_BYTES], [DEVICE_BATCH_BYTES, DEVICE_BATCH_BYTES]];
        Ok(defaults.map(|[usual, alone]| Self {
            most: given.unwrap_or(usual),
            owner_sharded: given.unwrap_or(OWNER_BATCH_BYTES),
            alone: given.unwrap_or(alone),
        }))
    }
}

/// Splits a bucket so that its buffers fit the bound; at least one unit each, and where whole matrices are sharded by
/// owner one for every process that could take one, within a wider bound. Counts with the largest shard that any
/// process has, so that all split alike.
///
/// On a device with `multiprocessors` multiprocessors (0 if unknown), products of matrices of its own fill whole waves.
///
/// Its workspace is within `cap`, with fewer matrices than processes to take one where `few` allows; else the bytes of one
/// matrix are the error.
pub(super) fn split(
    bucket: &Bucket,
    limit: Limit,
    multiprocessors: usize,
    (cap, few): (usize, bool),
) -> Result<std::result::Result<Vec<Bucket>, usize>> {
    // A part is made of this: copies of all units with each would cost their number squared.
    let frame = Bucket { units: Vec::new(), ..bucket.clone() };
    let part = |units: Vec<Unit>| Bucket { units, ..frame.clone() };
    if bucket.leading.is_none() || bucket.whole_parameter {
        return Ok(Ok(if bucket.gradient.is_some() {
            runs(&bucket.units, bucket.stacks, limit.most / bucket.shape.param.bytes())
                .into_iter()
                .map(|units| part(units.to_vec()))
                .collect()
        } else {
            vec![bucket.clone()]
        }));
    }
    let (all, sharding) = super::owners::takers(bucket);
    let gathered = super::owners::gathering(bucket);
    let (mut shared, mut each) = (0, 0);
    for (at, spec) in bucket.program.buffers.iter().enumerate() {
        let bytes = stored_bytes(bucket, at);
        match (spec.shared, spec.taken) {
            (true, false) => shared += bytes,
            (_, taken) => each += if taken { bytes.div_ceil(all) } else { bytes },
        }
    }
    // Messages of what is sent to owners and back, one at a time.
    each += bucket.program.carried.buffers().map(|b| stored_bytes(bucket, b)).max().unwrap_or(0);
    let fit = |limit: usize| limit.saturating_sub(shared).checked_div(each).unwrap_or(bucket.units.len());
    let wanted = fit(limit.most).max(1).next_multiple_of(all);
    let bound = fit(limit.owner_sharded).max(1).next_multiple_of(sharding);
    let wanted = if bucket.distributed() { wanted } else { wanted.min((limit.alone / each.max(1)).max(1)) };
    let most = if all == 1 { wanted } else { wanted.min(bound) };
    let stored = slots(&bucket.units).map(|slot| slot + 1).max().unwrap_or(1);
    let most = match bucket.program.triangle {
        Some(rows) if !bucket.distributed() => super::waves::filling(stored, most, rows, multiprocessors),
        _ => most,
    };
    let most = most.min(stored).max(1);
    let Some(most) = workspace::fitting(bucket, most, &[sharding, gathered], (cap, few))? else {
        return Ok(Err(workspace::bytes(bucket, 1)?));
    };
    let parts = stacks_of(&bucket.units, most).into_iter();
    Ok(Ok(parts.map(|(units, widest)| Bucket { widest, ..part(units) }).collect()))
}

/// Bytes per unit that a process averages when the linear buffers are averaged instead of the gradient; `None` when
/// no buffer is linear. What becomes whole is sharded by owner before, evenly over all who have a part or a contribution.
pub(super) fn linear_bytes(bucket: &Bucket) -> Option<usize> {
    let sharers: usize =
        bucket.axes.iter().filter(|a| a.shards.is_some()).map(|a| a.axis.ranks.len()).product();
    let bytes = |(buffer, whole): (usize, bool)| {
        if whole {
            let spec = &bucket.program.buffers[buffer];
            (spec.rows * spec.cols * spec.dtype.bytes()).div_ceil(sharers)
        } else {
            stored_bytes(bucket, buffer)
        }
    };
    bucket.program.linear_moves().map(bytes).reduce(|a, b| a + b)
}

/// Bytes that a process has of a matrix of a buffer, of the largest part; where the buffer is used at the owners alone, the
/// mean over the matrices.
fn stored_bytes(bucket: &Bucket, buffer: usize) -> usize {
    let spec = &bucket.program.buffers[buffer];
    let at_owners = bucket.only_gathered(buffer) && !spec.shared;
    let left_out = if at_owners { bucket.gathered.as_slice() } else { &[] };
    let bytes = largest(bucket, spec, 0, left_out) * largest(bucket, spec, 1, left_out) * spec.dtype.bytes();
    bytes.div_ceil(left_out.iter().map(|&a| bucket.axes[a].axis.ranks.len()).product())
}

/// Bytes of the buffer in which gradients would be averaged, of one matrix.
pub(super) fn gradient_bytes(bucket: &Bucket, spec: &BufferSpec) -> usize {
    largest(bucket, spec, 0, &[]) * largest(bucket, spec, 1, &[]) * spec.dtype.bytes()
}

/// The largest part of dimension `d` of a buffer's matrix that any process holds, with some axes left out.
fn largest(bucket: &Bucket, spec: &BufferSpec, d: usize, left_out: &[usize]) -> usize {
    let length = [spec.rows, spec.cols][d];
    match spec.sharding[d] {
        DimSharding::LikeParam(side) | DimSharding::Even(side) if !spec.shared => {
            let axes = bucket.sides[side.index()].1.iter().filter(|a| !left_out.contains(a));
            axes.fold(length, |part, &a| part.div_ceil(bucket.axes[a].axis.ranks.len()))
        }
        _ => length,
    }
}

/// The place of each unit among those that its process stores; those of each parameter follow those of the parameters before it.
fn slots(units: &[Unit]) -> impl Iterator<Item = usize> + '_ {
    let (mut base, mut next, mut param) = (0, 0, None);
    units.iter().map(move |unit| {
        if param != Some(unit.param) {
            (base, param) = (next, Some(unit.param));
        }
        let slot = base + unit.shard.slot;
        next = next.max(slot + 1);
        slot
    })
}

/// Splits units into groups such that no process stores more than `most` units of one. Returns each group with the most
/// units that a process stores.
fn stacks_of(units: &[Unit], most: usize) -> Vec<(Vec<Unit>, usize)> {
    let mut groups: Vec<(Vec<Unit>, usize)> = Vec::new();
    for (unit, slot) in units.iter().zip(slots(units)) {
        let group = slot / most;
        if groups.len() <= group {
            groups.resize(group + 1, (Vec::new(), 0));
        }
        let (params, widest) = &mut groups[group];
        params.push(unit.clone());
        *widest = (*widest).max(slot % most + 1);
    }
    groups
}

/// Runs of units of together at most `elements` elements on each of `parts` processes; one unit at least.
fn runs(units: &[Unit], parts: usize, elements: usize) -> Vec<&[Unit]> {
    let (mut runs, mut start, mut sum) = (Vec::new(), 0, 0);
    for (at, unit) in units.iter().enumerate() {
        let size = unit.shard.block.numel().div_ceil(parts);
        if at > start && sum + size > elements {
            runs.push(&units[start..at]);
            (start, sum) = (at, 0);
        }
        sum += size;
    }
    runs.push(&units[start..]);
    runs
}
