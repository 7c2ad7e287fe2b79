//! Regions of a tensor that ranks hold: DTensor's contiguous chunks, uneven and empty ones included.

use super::{Layout, Placement};

/// Offset and length of chunk `index` when `size` elements are sharded for `parts` ranks.
///
/// Chunks have ⌈size / parts⌉ elements; the last ones are shorter or empty.
#[must_use]
pub fn chunk(size: usize, parts: usize, index: usize) -> (usize, usize) {
    let full = size.div_ceil(parts.max(1));
    let start = (full * index).min(size);
    (start, full.min(size - start))
}

/// Axes that shard one dimension, outermost first: number of ranks, and coordinate of this process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ShardingAxes(Vec<(usize, usize)>);

impl ShardingAxes {
    /// The axes of a layout that shard dimension `dim`, with their positions in the mesh.
    #[must_use]
    pub fn of(layout: &Layout, dim: usize) -> (Self, Vec<usize>) {
        let matching = |wanted: Placement| {
            let all = layout.mesh.axes.iter().zip(&layout.placements).enumerate();
            all.filter(move |(_, (axis, placement))| **placement == wanted && axis.ranks.len() > 1)
        };
        let found = matching(Placement::Shard(dim)).chain(matching(Placement::Strided(dim)));
        let (sharded, axes) = found.map(|(i, (axis, _))| ((axis.ranks.len(), axis.coordinate), i)).unzip();
        (Self(sharded), axes)
    }

    /// Number of axes.
    #[must_use]
    pub fn depth(&self) -> usize {
        self.0.len()
    }

    /// Number of processes over which the dimension is sharded.
    #[must_use]
    pub fn num_shards(&self) -> usize {
        self.0.iter().map(|(parts, _)| parts).product()
    }

    /// Offset and length of what this process holds of `size` elements after the first `depth` axes.
    #[must_use]
    pub fn span(&self, size: usize, depth: usize) -> (usize, usize) {
        self.0.iter().take(depth).fold((0, size), |(start, len), &(parts, at)| {
            let (offset, len) = chunk(len, parts, at);
            (start + offset, len)
        })
    }

    /// Offset and length of every process's part of `size` elements.
    #[must_use]
    pub fn all(&self, size: usize) -> Vec<(usize, usize)> {
        self.0.iter().fold(vec![(0, size)], |all, &(parts, _)| {
            let shard = |(start, len): (usize, usize)| {
                (0..parts)
                    .map(move |at| chunk(len, parts, at))
                    .map(move |(offset, len)| (start + offset, len))
            };
            let mut all: Vec<_> = all.into_iter().flat_map(shard).collect();
            all.dedup();
            all
        })
    }

    /// Offset of element `index` of `size` within the part that holds it, and the length of the largest part.
    #[must_use]
    pub fn offset_of(&self, size: usize, index: usize) -> (usize, usize) {
        let (mut len, mut at, mut largest) = (size, index, size);
        for (parts, _) in &self.0 {
            let full = len.div_ceil((*parts).max(1)).max(1);
            len = full.min(len - at / full * full);
            at %= full;
            largest = largest.div_ceil((*parts).max(1));
        }
        (at, largest)
    }

    /// Offset and length of the part that rank `peer` of axis number `level` gets of what this process holds before it.
    #[must_use]
    pub fn part(&self, size: usize, level: usize, peer: usize) -> (usize, usize) {
        let (start, len) = self.span(size, level);
        let (offset, len) = chunk(len, self.0.get(level).map_or(1, |(parts, _)| *parts), peer);
        (start + offset, len)
    }
}

/// Offset and length of what this process holds, for each dimension of a tensor of shape `shape`.
#[must_use]
pub fn spans(shape: &[usize], layout: &Layout) -> Vec<(usize, usize)> {
    let shard = |(dim, &size)| {
        let (sharding, _) = ShardingAxes::of(layout, dim);
        sharding.span(size, sharding.depth())
    };
    shape.iter().enumerate().map(shard).collect()
}

/// The shape that this process holds of a tensor of shape `shape`.
#[must_use]
pub fn local_shape(shape: &[usize], layout: &Layout) -> Vec<usize> {
    spans(shape, layout).into_iter().map(|(_, len)| len).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::layout::{Axis, Mesh};

    #[test]
    fn chunk_known_cases_equal_the_table() {
        let lengths = |size, parts| (0..parts).map(|i| chunk(size, parts, i).1).collect::<Vec<_>>();
        assert_eq!(lengths(18, 8), [3, 3, 3, 3, 3, 3, 0, 0]);
        assert_eq!(lengths(5, 4), [2, 2, 1, 0]);
        assert_eq!(lengths(17, 4), [5, 5, 5, 2]);
        assert_eq!(lengths(1, 2), [1, 0]);
    }

    proptest! {
        #[test]
        fn chunk_any_size_covers_without_overlap(size in 0_usize..500, parts in 1_usize..70) {
            let mut next = 0;
            for index in 0..parts {
                let (start, len) = chunk(size, parts, index);
                prop_assert_eq!(start, next);
                next = start + len;
            }
            prop_assert_eq!(next, size);
        }

        #[test]
        fn local_shape_summed_over_ranks_is_the_global_size(rows in 0_usize..60, cols in 1_usize..30, a in 1_usize..7, b in 1_usize..5) {
            let axis = |n: usize, i| Axis { name: "x".into(), ranks: (0..n as u64).collect(), coordinate: i };
            let mut total = 0;
            for i in 0..a {
                for j in 0..b {
                    let layout = Layout {
                        mesh: Mesh { axes: vec![axis(a, i), axis(b, j)], ..Mesh::default() },
                        placements: vec![Placement::Shard(0), Placement::Shard(1)],
                    };
                    total += local_shape(&[rows, cols], &layout).iter().product::<usize>();
                }
            }
            prop_assert_eq!(total, rows * cols);
        }

        #[test]
        fn strided_axis_cuts_what_the_plain_one_leaves(size in 0_usize..60, a in 1_usize..7, b in 1_usize..5) {
            let axis = |n: usize, i| Axis { name: "x".into(), ranks: (0..n as u64).collect(), coordinate: i };
            let mut next = 0;
            for j in 0..b {
                for i in 0..a {
                    let layout = Layout {
                        mesh: Mesh { axes: vec![axis(a, i), axis(b, j)], ..Mesh::default() },
                        placements: vec![Placement::Strided(0), Placement::Shard(0)],
                    };
                    let (start, len) = spans(&[size], &layout)[0];
                    prop_assert!(len == 0 || start == next);
                    next += len;
                }
            }
            prop_assert_eq!(next, size);
        }
    }
}
