//! Lays out the buffers of all buckets in one block of bytes.

use super::coalesce::Coalesced;
use super::ir::{ALIGN, ArenaRange};
use crate::tensor::Device;

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
