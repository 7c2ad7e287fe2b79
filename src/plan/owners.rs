//! Owners of whole matrices among the processes that share them.

use std::collections::BTreeMap;

use super::bucket::Bucket;
use crate::program::{BufferSpec, ProgramOp, Target};
use crate::spec::Side;

/// Placement of a buffer along one axis before it is whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AxisPlacement {
    /// Shards of a side, still to be put together.
    Sharded(Side),
    /// Contributions to a sum over a side, still to be added.
    Summed(Side),
    /// Contributions still to be averaged.
    Averaged,
    /// Whole matrix already, on every rank.
    Replicated,
}

/// The buffers of a bucket's program that have to be whole for a stage, in the order in which they become it.
fn whole_buffers(bucket: &Bucket) -> impl Iterator<Item = usize> + '_ {
    bucket.program.ops.iter().filter_map(|op| match op {
        ProgramOp::Redistribute { buffer, to: Target::Whole } => Some(*buffer),
        _ => None,
    })
}

/// The buffer of a bucket's program that has to be whole for a stage first.
#[must_use]
pub(super) fn whole_buffer(bucket: &Bucket) -> Option<usize> {
    whole_buffers(bucket).next()
}

/// The axes along which a buffer changes, in the order that moves the fewest bytes: sums first, which make it
/// smaller, copies last. Nested shards are gathered from the inside.
#[must_use]
pub(super) fn axis_placements(bucket: &Bucket, spec: &BufferSpec) -> Vec<(usize, AxisPlacement)> {
    let mut axis_placements = Vec::new();
    for side in [Side::Rows, Side::Cols].into_iter().filter(|side| spec.summed[side.index()]) {
        axis_placements
            .extend(bucket.sides[side.index()].1.iter().rev().map(|&a| (a, AxisPlacement::Summed(side))));
    }
    // In the order of the sides, also where the dimensions are swapped: all buffers have their owners in one order. A buffer
    // is replicated along the axes of a side that shards none of its dimensions.
    for side in [Side::Rows, Side::Cols].into_iter().filter(|side| !spec.summed[side.index()]) {
        let along = spec.has_dim_of(side);
        let placement = if along { AxisPlacement::Sharded(side) } else { AxisPlacement::Replicated };
        axis_placements.extend(bucket.sides[side.index()].1.iter().rev().map(|&a| (a, placement)));
    }
    axis_placements.retain(|(a, _)| !bucket.gathered.contains(a));
    let averaged = |a: usize| bucket.axes[a].pending.is_some() && spec.linear && bucket.gradient.is_none();
    let copies = (0..bucket.axes.len()).filter(|&a| bucket.axes[a].shards.is_none());
    let (late, last): (Vec<usize>, Vec<usize>) = copies.partition(|&a| averaged(a));
    axis_placements.extend(late.into_iter().map(|a| (a, AxisPlacement::Averaged)));
    axis_placements.extend(last.into_iter().map(|a| (a, AxisPlacement::Replicated)));
    axis_placements
}

/// The number of processes that could take a matrix of the bucket, and of those among which its matrices are sharded.
#[must_use]
pub(super) fn takers(bucket: &Bucket) -> (usize, usize) {
    let Some(buffer) = whole_buffer(bucket) else {
        return (1, 1);
    };
    let ranks = |a: usize| bucket.axes[a].axis.ranks.len();
    let gathered: usize = bucket.gathered.iter().map(|&a| ranks(a)).product();
    let axis_placements = axis_placements(bucket, &bucket.program.buffers[buffer]);
    let sharded: usize = axis_placements
        .iter()
        .filter(|(_, placement)| matches!(placement, AxisPlacement::Sharded(_) | AxisPlacement::Summed(_)))
        .map(|(a, _)| ranks(*a))
        .product();
    let all: usize = axis_placements.iter().map(|(a, _)| ranks(*a)).product();
    (gathered * all, gathered * sharded)
}

/// The number of processes that each need a matrix of the bucket, so that none waits: those among which its matrices are
/// gathered, where they are, else those among which they are sharded by owner.
#[must_use]
pub(super) fn gathering(bucket: &Bucket) -> usize {
    if bucket.gathered.is_empty() {
        return takers(bucket).1;
    }
    bucket.gathered.iter().map(|&a| bucket.axes[a].axis.ranks.len()).product()
}

/// The axes over which the matrices of a bucket are sharded by owner, where no process stores more than `most` of them.
#[must_use]
pub(super) fn owner_axes(bucket: &Bucket, most: usize) -> Vec<usize> {
    let Some(buffer) = whole_buffer(bucket) else {
        return Vec::new();
    };
    let ranks = |a: usize| bucket.axes[a].axis.ranks.len();
    let mut axes = bucket.gathered.clone();
    let mut left = axes.iter().fold(most, |left, &a| left.div_ceil(ranks(a)));
    let sharded: Vec<usize> = whole_buffers(bucket)
        .flat_map(|buffer| axis_placements(bucket, &bucket.program.buffers[buffer]))
        .filter_map(|(a, placement)| matches!(placement, AxisPlacement::Sharded(_)).then_some(a))
        .collect();
    for (a, _) in axis_placements(bucket, &bucket.program.buffers[buffer]) {
        // Where each process has one matrix at most there is nothing to share any more: the copies repeat it.
        if left > 1 || sharded.contains(&a) || bucket.program.exclusive {
            axes.push(a);
            left = left.div_ceil(ranks(a));
        }
    }
    axes
}

/// Work that every process has taken so far, by what `Tally` says.
#[derive(Debug, Default)]
pub(super) struct Loads(BTreeMap<Key, Vec<f64>>);

impl Loads {
    /// Chooses the axes to shard by owner over and the owner of every unit, and sorts the units by owner. Every process
    /// gets its equal share; what is left over goes to those that have taken least so far. `cost` is the work on each.
    pub(super) fn assign(&mut self, bucket: &mut Bucket, cost: f64) {
        bucket.owner_axes = owner_axes(bucket, bucket.widest);
        if bucket.owner_axes.is_empty() {
            return;
        }
        let tally = Tally::of(bucket);
        let takers: usize = tally.sizes.iter().product();
        let loads = self.0.entry(tally.key.clone()).or_insert_with(|| vec![0.0; takers]);
        let taken: Vec<f64> =
            (0..takers).map(|taker| loads[tally.number(&digits(taker, &tally.sizes))]).collect();
        let counts = shares(bucket.units.len(), &tally.sizes, &taken);
        let mut units = bucket.units.iter_mut();
        for (taker, &count) in counts.iter().enumerate() {
            let place = digits(taker, &tally.sizes);
            #[allow(clippy::cast_precision_loss)] // a measure of work
            let work = count as f64 * cost;
            tally.add(loads, &place, work);
            for unit in units.by_ref().take(count) {
                unit.owner.clone_from(&place);
            }
        }
    }
}

/// The ranks of the axes over which matrices are sharded by owner; and of those along which the other processes that work
/// on a matrix have to find the same owner.
type Key = (Vec<Vec<u64>>, Vec<Vec<u64>>);

/// Processes that have work in common with those of a bucket, and their numbers, which do not depend on the bucket.
pub(super) struct Tally {
    /// Buckets of one key share their owners' work.
    pub key: Key,
    /// Ranks of the axes in `Bucket::owner_axes`.
    sizes: Vec<usize>,
    /// Positions in `owner_axes` with sizes, in the order of the key.
    order: Vec<(usize, usize)>,
    /// Number of these axes that are gathered: the processes along the others work on a matrix together.
    gathered: usize,
}

impl Tally {
    /// The tally of a bucket with its owner axes.
    pub(super) fn of(bucket: &Bucket) -> Self {
        let ranks = |a: usize| bucket.axes[a].axis.ranks.clone();
        let mut axes: Vec<(usize, Vec<u64>)> =
            bucket.owner_axes.iter().map(|&a| ranks(a)).enumerate().collect();
        let sizes = axes.iter().map(|(_, ranks)| ranks.len()).collect();
        axes.sort_by(|(_, a), (_, b)| a.cmp(b));
        let order = axes.iter().map(|(at, ranks)| (*at, ranks.len())).collect();
        let is_other = |a: &usize| !bucket.gathered.is_empty() && !bucket.owner_axes.contains(a);
        let mut others: Vec<Vec<u64>> = (0..bucket.axes.len()).filter(is_other).map(ranks).collect();
        others.sort_unstable();
        let key = (axes.into_iter().map(|(_, ranks)| ranks).collect(), others);
        Self { key, sizes, order, gathered: bucket.gathered.len() }
    }

    /// The number of a process by its positions along the owner axes.
    pub(super) fn number(&self, place: &[usize]) -> usize {
        self.order.iter().fold(0, |n, &(at, size)| n * size + place[at])
    }

    /// The number of processes.
    pub(super) fn count(&self) -> usize {
        self.sizes.iter().product()
    }

    /// Adds work on a matrix to its owner; where it is gathered along some axes only, to all who work on it.
    pub(super) fn add(&self, loads: &mut [f64], owner: &[usize], work: f64) {
        if self.gathered == 0 {
            loads[self.number(owner)] += work;
            return;
        }
        let mut place = owner.to_vec();
        let inner = &self.sizes[self.gathered..];
        for at_inner in 0..inner.iter().product() {
            place[self.gathered..].clone_from_slice(&digits(at_inner, inner));
            loads[self.number(&place)] += work;
        }
    }
}

/// Number of `units` that each process takes: equal shares, and what is left over one by one to where it keeps the
/// messages along each axis even, then to those that have taken least so far, with their neighbours and alone.
fn shares(units: usize, sizes: &[usize], loads: &[f64]) -> Vec<usize> {
    let takers = loads.len();
    let mut counts = vec![units / takers; takers];
    let places: Vec<Vec<usize>> = (0..takers).map(|taker| digits(taker, sizes)).collect();
    // Units given out below each prefix of digits, and along each axis alone.
    let mut below: Vec<Vec<usize>> =
        (1..=sizes.len()).map(|n| vec![0; sizes[..n].iter().product()]).collect();
    let mut along: Vec<Vec<usize>> = sizes.iter().map(|&size| vec![0; size]).collect();
    let prefix =
        |place: &[usize], n: usize| place[..n].iter().zip(sizes).fold(0, |at, (d, size)| at * size + d);
    let mut loads_below: Vec<Vec<f64>> = below.iter().map(|counts| vec![0.0; counts.len()]).collect();
    for (place, load) in places.iter().zip(loads) {
        (1..=sizes.len()).for_each(|n| loads_below[n - 1][prefix(place, n)] += load);
    }
    let lighter = |a: usize, b: usize| {
        let of = |taker: usize, n: usize| loads_below[n - 1][prefix(&places[taker], n)];
        let unequal = (1..=sizes.len()).map(|n| of(a, n).total_cmp(&of(b, n))).find(|order| order.is_ne());
        unequal.unwrap_or(std::cmp::Ordering::Equal)
    };
    for _ in 0..units % takers {
        let rank = |taker: usize| {
            let place = &places[taker];
            let nested: Vec<usize> = (1..=sizes.len()).map(|n| below[n - 1][prefix(place, n)]).collect();
            let at_inner: usize = place.iter().zip(&along).map(|(&d, used)| used[d]).sum();
            (nested, at_inner)
        };
        let best = (0..takers).min_by(|&a, &b| {
            let ((nested_a, inner_a), (nested_b, inner_b)) = (rank(a), rank(b));
            nested_a.cmp(&nested_b).then_with(|| lighter(a, b)).then(inner_a.cmp(&inner_b))
        });
        let Some(best) = best else { break };
        counts[best] += 1;
        for n in 1..=sizes.len() {
            below[n - 1][prefix(&places[best], n)] += 1;
            along[n - 1][places[best][n - 1]] += 1;
        }
    }
    counts
}

/// The digits of `number`, first size most significant.
fn digits(number: usize, sizes: &[usize]) -> Vec<usize> {
    let mut rest = number;
    let mut digits: Vec<usize> = sizes
        .iter()
        .rev()
        .map(|&size| {
            let digit = rest % size;
            rest /= size;
            digit
        })
        .collect();
    digits.reverse();
    digits
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_fewer_units_than_takers_spread_over_every_axis() {
        let counts = shares(8, &[16, 4], &[0.0; 64]);
        let taken: Vec<Vec<usize>> =
            (0..64).filter(|&t| counts[t] > 0).map(|t| digits(t, &[16, 4])).collect();
        let of = |axis: usize, digit: usize| taken.iter().filter(|place| place[axis] == digit).count();
        assert_eq!((0..16).map(|d| of(0, d)).max(), Some(1));
        assert_eq!((0..4).map(|d| of(1, d)).collect::<Vec<_>>(), [2, 2, 2, 2]);
    }

    #[test]
    fn shares_left_over_go_to_the_idle() {
        assert_eq!(shares(6, &[4], &[3.0, 0.0, 2.0, 1.0]), [1, 2, 1, 2]);
        assert_eq!(shares(8, &[4], &[3.0, 0.0, 2.0, 1.0]), [2, 2, 2, 2]);
    }
}
