//! Lays out the buffers of all buckets in one block of bytes.

use super::bucket::Bucket;
use super::coalesce::Coalesced;
use super::redistribute::{BufferShard, Redistribution, RedistributionKind, Segment, Step, shared};
use super::route::{Counts, Route};
use crate::tensor::Device;

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

/// Byte ranges of every buffer of every bucket.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Arena {
    /// Ranges `places[bucket][buffer]`; after the buffers comes the range in which messages are put together, and then
    /// the parts of the messages that the bucket shares with others.
    pub places: Vec<Vec<ArenaRange>>,
    /// Common messages of each set of coalesced buckets.
    pub(super) common: Vec<Vec<ArenaRange>>,
    /// The devices, each with its part of the arena, which is memory there.
    pub parts: Vec<(Device, ArenaRange)>,
    /// Size of the arena in bytes.
    pub bytes: usize,
}

/// Bytes of each buffer of a bucket and of its messages.
#[must_use]
pub(super) fn sizes(bucket: &Bucket, segments: &[Segment]) -> Vec<usize> {
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

impl Arena {
    /// Lays out the buffers of all sets of coalesced buckets. Sets that run one after the other (`slots` gives the slot
    /// of each) share memory when they share a slot. What is on a device, by the devices of the buckets, lies together.
    #[must_use]
    pub(super) fn lay_out(
        coalesced: &[Coalesced],
        slots: &[usize],
        (of_buckets, devices): (&[Device], &[Device]),
    ) -> Self {
        let count = slots.iter().max().map_or(0, |m| m + 1);
        let mut arena = Self { places: vec![Vec::new(); of_buckets.len()], ..Self::default() };
        for &device in devices {
            let there: Vec<_> =
                coalesced.iter().map(|one| one.only(|bucket| of_buckets[bucket] == device)).collect();
            let mut extents = vec![0; count];
            for (one, &slot) in there.iter().zip(slots) {
                let (_, _, end) = one.places(0, ALIGN);
                extents[slot] = end.max(extents[slot]);
            }
            let start = arena.bytes;
            arena.common.clear();
            for (one, &slot) in there.iter().zip(slots) {
                let (own, messages, _) = one.places(start + extents[..slot].iter().sum::<usize>(), ALIGN);
                for (&bucket, own) in one.buckets.iter().zip(own) {
                    arena.places[bucket] = own;
                }
                // Where there are several devices nothing is sent.
                arena.common.push(messages);
            }
            let bytes = extents.iter().sum();
            arena.parts.push((device, ArenaRange { offset: start, bytes }));
            arena.bytes += bytes;
        }
        arena
    }
}
