//! Places the buffers of all buckets in one block of bytes.

use super::bucket::Bucket;

/// Alignment of every buffer: a cache line, and enough for every vector load.
const ALIGN: usize = 64;

/// A buffer's bytes in the arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// First byte.
    pub offset: usize,
    /// Length in bytes.
    pub bytes: usize,
}

impl Place {
    /// Whether two places share a byte.
    #[must_use]
    pub fn overlaps(&self, other: &Self) -> bool {
        self.bytes > 0
            && other.bytes > 0
            && self.offset < other.offset + other.bytes
            && other.offset < self.offset + self.bytes
    }
}

/// Where every buffer of every bucket lies.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Arena {
    /// `places[bucket][buffer]`.
    pub places: Vec<Vec<Place>>,
    /// Size of the arena in bytes.
    pub bytes: usize,
}

impl Arena {
    /// Lays out the buffers. Buckets that run one after the other (`slot` gives each bucket's slot) share memory
    /// when they share a slot.
    #[must_use]
    pub fn lay_out(buckets: &[Bucket], slots: &[usize]) -> Self {
        let extent = |bucket: &Bucket| {
            bucket
                .program
                .buffers
                .iter()
                .map(|b| b.bytes(bucket.units.len()).next_multiple_of(ALIGN))
                .sum::<usize>()
        };
        let count = slots.iter().max().map_or(0, |m| m + 1);
        let sizes: Vec<usize> = (0..count)
            .map(|slot| {
                buckets
                    .iter()
                    .zip(slots)
                    .filter(|(_, s)| **s == slot)
                    .map(|(b, _)| extent(b))
                    .max()
                    .unwrap_or(0)
            })
            .collect();
        let places = buckets
            .iter()
            .zip(slots)
            .map(|(bucket, &slot)| {
                let mut offset: usize = sizes[..slot].iter().sum();
                bucket
                    .program
                    .buffers
                    .iter()
                    .map(|buffer| {
                        let place = Place { offset, bytes: buffer.bytes(bucket.units.len()) };
                        offset += place.bytes.next_multiple_of(ALIGN);
                        place
                    })
                    .collect()
            })
            .collect();
        Self { places, bytes: sizes.iter().sum() }
    }
}
