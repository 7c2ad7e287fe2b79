//! Coalesced buckets: their sums are made at the same points of their programs and share a message.

use super::bucket::Bucket;
use super::ir::{ArenaRange, BufferShard, Redistribution, RedistributionKind, Segment, Step, shared};
use super::route::{Counts, Route};
use crate::layout::{Axis, Reduction};
use crate::tensor::DType;

/// A collective: one redistribution, or the sums of several buffers in one message.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct CoalescedCollective {
    /// The redistributions, each with its bucket.
    pub(super) redistributions: Vec<(usize, Redistribution)>,
    /// The axis over which it communicates.
    pub(super) axis: Axis,
    /// The ranks of the axes of the mesh over which it communicates.
    pub(super) lines: Vec<Vec<u64>>,
    /// The dtype of a message of several buffers.
    pub(super) dtype: DType,
    /// Number of the common message among those of the coalesced buckets, if the collective has one.
    pub(super) message: Option<usize>,
}

/// Synchronization point: the steps until something is sent, and the collectives that then are in flight.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct SyncPoint {
    /// The steps of buckets.
    pub(super) computes: Vec<(usize, Vec<Step>)>,
    /// The collectives.
    pub(super) collectives: Vec<CoalescedCollective>,
}

/// A bucket, or several that go together.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Coalesced {
    /// The buckets.
    pub(super) buckets: Vec<usize>,
    /// Bytes of the buffers and messages of each.
    pub(super) sizes: Vec<Vec<usize>>,
    /// For each buffer whether it is scratch that may share memory with the bucket's messages: no stage runs between
    /// packing and unpacking a message.
    pub(super) scratch: Vec<Vec<bool>>,
    /// Common messages, each as its parts: index of the bucket in `buckets`, number that the redistribution gives the
    /// part, and bytes.
    pub(super) messages: Vec<Vec<(usize, usize, usize)>>,
    /// Synchronization points in order.
    pub(super) sync_points: Vec<SyncPoint>,
}

/// Coalesces buckets: those that take parameters whole and have to meet into one set, at the position of the first of
/// them; every other bucket into a set of its own.
#[must_use]
pub(super) fn coalesce(buckets: &[Bucket], segments: &[Vec<Segment>]) -> Vec<Coalesced> {
    let together: Vec<usize> =
        (0..buckets.len()).filter(|&b| buckets[b].whole_parameter && segments[b].len() > 1).collect();
    let mut coalesced = Vec::new();
    for bucket in 0..buckets.len() {
        if together.first() == Some(&bucket) {
            coalesced.push(coalesce_buckets(buckets, segments, &together));
        } else if !together.contains(&bucket) {
            coalesced.push(coalesce_buckets(buckets, segments, &[bucket]));
        }
    }
    coalesced
}

/// The buffers of a bucket that may lie where its messages do.
fn scratch(bucket: &Bucket) -> Vec<bool> {
    bucket.program.buffers.iter().map(|spec| spec.shared && !bucket.whole_parameter).collect()
}

/// Bytes of each buffer of a bucket and of its messages.
#[must_use]
fn sizes(bucket: &Bucket, segments: &[Segment]) -> Vec<usize> {
    let buffers = &bucket.program.buffers;
    let mut sizes = vec![0; buffers.len() + 1];
    let mut grow = |at: usize, bytes: usize| sizes[at] = bytes.max(sizes[at]);
    let messages = buffers.len();
    let stored = BufferShard::stored(bucket);
    for (at, spec) in buffers.iter().enumerate() {
        if bucket.only_gathered(at) && !spec.shared {
            continue;
        }
        let times = if spec.taken { shared(bucket, bucket.owner_axes.len()).len().max(1) } else { 1 };
        grow(at, times * Redistribution::area(bucket, spec, &stored) * spec.dtype.bytes());
    }
    let points = segments.iter().flat_map(|s| &s.steps).filter_map(|step| match step {
        Step::Stage(point) if point.gathered || point.whole => Some(point),
        _ => None,
    });
    for point in points {
        for (at, (spec, held)) in buffers.iter().zip(&point.held).enumerate() {
            if !spec.shared {
                grow(at, Redistribution::area(bucket, spec, held) * spec.dtype.bytes());
            }
        }
    }
    let slices = segments.iter().flat_map(|s| &s.steps).filter_map(|step| match step {
        Step::Unpack(redistribution) if redistribution.kind == RedistributionKind::Slice => {
            Some(redistribution)
        }
        _ => None,
    });
    for redistribution in segments.iter().flat_map(|s| &s.redistributions).chain(slices) {
        let spec = &buffers[redistribution.buffer];
        let each = spec.dtype.bytes();
        for held in [&redistribution.before, &redistribution.after] {
            grow(redistribution.buffer, Redistribution::area(bucket, spec, held) * each);
        }
        let Counts { send, recv } = Route::new(bucket, redistribution).counts();
        let (send, recv) = (send.iter().sum::<usize>(), recv.iter().sum::<usize>());
        match redistribution.kind {
            RedistributionKind::ToOwner { .. } | RedistributionKind::ReduceToOwner { .. } => {
                grow(messages, recv * each);
            }
            RedistributionKind::FromOwner { .. } => grow(messages, send * each),
            RedistributionKind::GatherOwned { .. } => {
                grow(redistribution.buffer, recv * each);
                grow(messages, send * each);
            }
            RedistributionKind::AllGather { .. } => {
                grow(redistribution.buffer, send * each);
                grow(messages, recv * each);
            }
            RedistributionKind::AllReduce { .. }
                if redistribution.staged(spec) && redistribution.message == 0 =>
            {
                grow(messages, send * spec.wire.bytes());
            }
            RedistributionKind::AllReduce { .. } | RedistributionKind::Slice => {}
        }
    }
    sizes
}

fn coalesce_buckets(buckets: &[Bucket], segments: &[Vec<Segment>], together: &[usize]) -> Coalesced {
    let mut one = Coalesced {
        buckets: together.to_vec(),
        sizes: together.iter().map(|&b| sizes(&buckets[b], &segments[b])).collect(),
        scratch: together.iter().map(|&b| scratch(&buckets[b])).collect(),
        ..Coalesced::default()
    };
    if let [alone] = together
        && !buckets[*alone].whole_parameter
    {
        let collective =
            |redistribution: &Redistribution| Sum::of(&buckets[*alone], *alone, redistribution).alone();
        let sync_point = |s: &Segment| SyncPoint {
            computes: if s.steps.is_empty() { Vec::new() } else { vec![(*alone, s.steps.clone())] },
            collectives: s.redistributions.iter().map(collective).collect(),
        };
        one.sync_points = segments[*alone].iter().map(sync_point).collect();
        return one;
    }
    let mut meetings: Vec<(usize, usize)> =
        together.iter().flat_map(|&b| segments[b].iter().map(|s| s.at)).collect();
    meetings.sort_unstable();
    meetings.dedup();
    for at in meetings {
        let here = |&b: &usize| Some((b, segments[b].iter().find(|s| s.at == at)?));
        let joining: Vec<(usize, &Segment)> = together.iter().filter_map(here).collect();
        let mut sync_point = SyncPoint { computes: computes(buckets, &joining), ..SyncPoint::default() };
        let sums: Vec<Sum> = joining
            .iter()
            .flat_map(|(b, s)| {
                s.redistributions.iter().map(|redistribution| Sum::of(&buckets[*b], *b, redistribution))
            })
            .collect();
        for sum in &sums {
            one.collective(&mut sync_point, sum, &sums);
        }
        one.sync_points.push(sync_point);
    }
    one
}

/// The steps of buckets at a synchronization point. Where one sums over its group, all have what came before any goes
/// on.
fn computes(buckets: &[Bucket], joining: &[(usize, &Segment)]) -> Vec<(usize, Vec<Step>)> {
    let groups = joining.iter().any(|(b, _)| buckets[*b].program.group_buffer().is_some());
    let arrivals = |segment: &Segment| match segment.steps.iter().position(|s| !matches!(s, Step::Unpack(_)))
    {
        Some(first) if groups => first,
        _ => 0,
    };
    let first = joining.iter().map(|(b, segment)| (*b, segment.steps[..arrivals(segment)].to_vec()));
    let then = joining.iter().map(|(b, segment)| (*b, segment.steps[arrivals(segment)..].to_vec()));
    first.chain(then).filter(|(_, steps)| !steps.is_empty()).collect()
}

/// Redistribution of one of the coalesced buckets.
struct Sum<'a> {
    bucket: usize,
    redistribution: &'a Redistribution,
    /// The axis over which it communicates.
    axis: Axis,
    /// The ranks of each axis of the mesh that `axis` stands for.
    lines: Vec<Vec<u64>>,
    /// Axes along which there are copies.
    copies: &'a [Axis],
    dtype: DType,
    bytes: usize,
}

impl<'a> Sum<'a> {
    fn of(bucket: &'a Bucket, number: usize, redistribution: &'a Redistribution) -> Self {
        let dtype = redistribution.dtype(&bucket.program.buffers[redistribution.buffer]);
        let elements: usize = Route::new(bucket, redistribution).counts().send.iter().sum();
        let (axis, copies) = (bucket.axis(redistribution.axis).clone(), bucket.copies.as_slice());
        let lines =
            match redistribution.axis.checked_sub(bucket.axes.len()).and_then(|at| bucket.joined.get(at)) {
                Some((set, _)) => set.iter().map(|&a| bucket.axes[a].axis.ranks.clone()).collect(),
                None => vec![axis.ranks.clone()],
            };
        Self { bucket: number, redistribution, axis, lines, copies, dtype, bytes: elements * dtype.bytes() }
    }

    /// The collective of this sum alone.
    fn alone(&self) -> CoalescedCollective {
        let redistributions = vec![(self.bucket, self.redistribution.clone())];
        CoalescedCollective {
            redistributions,
            axis: self.axis.clone(),
            lines: self.lines.clone(),
            dtype: self.dtype,
            message: None,
        }
    }

    /// Returns the axes of replicas that extend this sum to `wide`, if it can be extended.
    fn reaches(&self, wide: &Axis) -> Option<Vec<&'a Axis>> {
        let inside = |copies: &&Axis| copies.ranks.iter().all(|rank| wide.ranks.contains(rank));
        let added: Vec<&Axis> = self.copies.iter().filter(inside).collect();
        let joined = Axis::joined(&added.iter().copied().chain([&self.axis]).collect::<Vec<_>>());
        (joined.ranks == wide.ranks).then_some(added)
    }
}

impl Coalesced {
    /// The buckets that are wanted, with their memory; their work is left out.
    pub(super) fn only(&self, wanted: impl Fn(usize) -> bool) -> Self {
        let kept = |at: &usize| wanted(self.buckets[*at]);
        let all = || (0..self.buckets.len()).filter(kept);
        Self {
            buckets: all().map(|at| self.buckets[at]).collect(),
            sizes: all().map(|at| self.sizes[at].clone()).collect(),
            scratch: all().map(|at| self.scratch[at].clone()).collect(),
            messages: self.messages.clone(),
            sync_points: Vec::new(),
        }
    }

    /// Adds a sum to a collective over the same axis, or begins one. Where another sum has more ranks, and those beyond the
    /// own axis are replicas, it joins that collective, and one of the replicas contributes.
    fn collective(&mut self, sync_point: &mut SyncPoint, sum: &Sum<'_>, all: &[Sum<'_>]) {
        if sum.redistribution.kind != (RedistributionKind::AllReduce { how: Reduction::Sum }) {
            sync_point.collectives.push(sum.alone());
            return;
        }
        let wider = all
            .iter()
            .filter(|other| other.dtype == sum.dtype && other.redistribution.kind == sum.redistribution.kind);
        let candidates = wider.filter_map(|other| Some((other, sum.reaches(&other.axis)?)));
        let (wider_sum, added) =
            candidates.max_by_key(|(other, _)| other.axis.ranks.len()).unwrap_or((sum, Vec::new()));
        let silent = added.iter().any(|copies| copies.coordinate != 0);
        let own = sync_point.computes.iter_mut().filter(|(bucket, _)| *bucket == sum.bucket);
        for step in own.flat_map(|(_, steps)| steps) {
            match step {
                Step::Pack(redistribution) if redistribution == sum.redistribution => {
                    redistribution.silent = silent;
                }
                _ => {}
            }
        }
        let place = self.buckets.iter().position(|&b| b == sum.bucket).unwrap_or(0);
        let part = (place, sum.redistribution.message, sum.bytes);
        let same = |collective: &&mut CoalescedCollective| {
            collective.message.is_some() && collective.axis == wider_sum.axis && collective.dtype == sum.dtype
        };
        if let Some(collective) = sync_point.collectives.iter_mut().find(same) {
            collective.redistributions.push((sum.bucket, sum.redistribution.clone()));
            self.messages[collective.message.unwrap_or(0)].push(part);
        } else {
            let message = Some(self.messages.len());
            let (axis, lines) = (wider_sum.axis.clone(), wider_sum.lines.clone());
            sync_point.collectives.push(CoalescedCollective { axis, lines, message, ..sum.alone() });
            self.messages.push(vec![part]);
        }
    }

    /// Ranges of every bucket's buffers and messages from byte `offset` on, by bucket, those of the common messages,
    /// and the end.
    pub(super) fn places(
        &self,
        mut offset: usize,
        align: usize,
    ) -> (Vec<Vec<ArenaRange>>, Vec<ArenaRange>, usize) {
        let mut places: Vec<Vec<ArenaRange>> = Vec::with_capacity(self.sizes.len());
        for (sizes, scratch) in self.sizes.iter().zip(&self.scratch) {
            let mut own = vec![ArenaRange::default(); sizes.len()];
            let (messages, buffers) = (sizes.len() - 1, 0..sizes.len() - 1);
            for at in buffers.clone().filter(|&at| !scratch[at]) {
                own[at] = ArenaRange { offset, bytes: sizes[at] };
                offset += sizes[at].next_multiple_of(align);
            }
            own[messages] = ArenaRange { offset, bytes: sizes[messages] };
            let mut end = offset;
            for at in buffers.filter(|&at| scratch[at]) {
                own[at] = ArenaRange { offset: end, bytes: sizes[at] };
                end += sizes[at].next_multiple_of(align);
            }
            offset = end.max(offset + sizes[messages].next_multiple_of(align));
            places.push(own);
        }
        let mut take = |bytes: usize| {
            let place = ArenaRange { offset, bytes };
            offset += bytes.next_multiple_of(align);
            place
        };
        let mut common = Vec::with_capacity(self.messages.len());
        let mut parts: Vec<(usize, usize, ArenaRange)> = Vec::new();
        for message in &self.messages {
            let whole = take(message.iter().map(|(_, _, bytes)| bytes).sum());
            let mut at = whole.offset;
            for &(bucket, number, bytes) in message {
                parts.push((bucket, number, ArenaRange { offset: at, bytes }));
                at += bytes;
            }
            common.push(whole);
        }
        // A redistribution's message `number` is at that index behind the bucket's own messages.
        parts.sort_by_key(|(bucket, number, _)| (*bucket, *number));
        for (bucket, _, place) in parts {
            places[bucket].push(place);
        }
        (places, common, offset)
    }
}
