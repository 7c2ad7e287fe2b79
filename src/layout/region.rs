//! Which part of a tensor a rank holds: DTensor's contiguous chunks, uneven and empty ones included.

use super::{Layout, Placement};

/// Offset and length of chunk `index` when `size` elements are cut for `parts` ranks.
///
/// Chunks have ⌈size / parts⌉ elements; the last ones are shorter or empty.
#[must_use]
pub fn chunk(size: usize, parts: usize, index: usize) -> (usize, usize) {
    let full = size.div_ceil(parts.max(1));
    let start = (full * index).min(size);
    (start, full.min(size - start))
}

/// The shape that this process holds of a tensor of shape `shape`: axes cut in order, outermost first.
#[must_use]
pub fn local_shape(shape: &[usize], layout: &Layout) -> Vec<usize> {
    let mut local = shape.to_vec();
    for (axis, placement) in layout.mesh.axes.iter().zip(&layout.placements) {
        if let Placement::Shard(dim) = placement
            && let Some(size) = local.get_mut(*dim)
        {
            *size = chunk(*size, axis.ranks.len(), axis.coordinate).1;
        }
    }
    local
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
                        mesh: Mesh { axes: vec![axis(a, i), axis(b, j)] },
                        placements: vec![Placement::Shard(0), Placement::Shard(1)],
                    };
                    total += local_shape(&[rows, cols], &layout).iter().product::<usize>();
                }
            }
            prop_assert_eq!(total, rows * cols);
        }
    }
}
