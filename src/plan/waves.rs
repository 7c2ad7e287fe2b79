//! Buckets that fill a device: as many matrices as make whole waves of tiles.

/// Rows and columns of the tiles in which devices compute symmetric products.
const TILE: usize = 128;

/// Returns the number of matrices per bucket, out of `all`, with which the tiles of their triangles of `rows` rows take the
/// fewest waves of all multiprocessors. It is between half of `most` and `most`, and of equals the largest. Returns `most`
/// where that saves less than a tenth: more buckets are more launches. For 64 matrices of 1024 x 4096 and `most` = 8, it
/// returns 7: 19 waves of 132 multiprocessors instead of 24.
pub(super) fn filling(all: usize, most: usize, rows: usize, multiprocessors: usize) -> usize {
    if all <= most || multiprocessors == 0 {
        return most;
    }
    let down = rows.div_ceil(TILE);
    let waves = |matrices: usize| (matrices * (down * (down + 1) / 2)).div_ceil(multiprocessors);
    let turns = |each: usize| all / each * waves(each) + waves(all % each);
    let best = (most.div_ceil(2)..=most).rev().min_by_key(|&each| turns(each)).unwrap_or(most);
    if 10 * turns(best) <= 9 * turns(most) { best } else { most }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Waves of buckets of `each` matrices, one bucket after the other.
    fn turns(mut all: usize, each: usize, rows: usize, multiprocessors: usize) -> usize {
        let (mut turns, mut down) = (0, 0);
        let tiles: usize = std::iter::repeat_with(|| {
            down += 1;
            down
        })
        .take(rows.div_ceil(TILE))
        .sum();
        while all > 0 {
            let matrices = all.min(each);
            turns += (matrices * tiles).div_ceil(multiprocessors);
            all -= matrices;
        }
        turns
    }

    #[test]
    fn buckets_take_the_fewest_turns_that_their_bound_allows() {
        for (all, most, rows) in
            [(64, 8, 1024), (100, 24, 768), (40, 7, 2048), (9, 2, 4096), (33, 16, 130), (5, 4, 1)]
        {
            let chosen = filling(all, most, rows, 132);
            assert!((most.div_ceil(2)..=most).contains(&chosen));
            let (own, fullest) = (turns(all, chosen, rows, 132), turns(all, most, rows, 132));
            assert!(chosen == most || 10 * own <= 9 * fullest);
            for each in most.div_ceil(2)..=most {
                let other = turns(all, each, rows, 132);
                let is_best = own < other || own == other && chosen >= each;
                let saves_little = chosen == most && 10 * other > 9 * fullest;
                assert!(is_best || saves_little, "{all} {most} {rows}: {chosen}, not {each}");
            }
        }
    }

    #[test]
    fn a_bucket_that_takes_all_or_has_no_device_is_left() {
        assert_eq!(filling(8, 8, 1024, 132), 8);
        assert_eq!(filling(64, 8, 1024, 0), 8);
        // 36 tiles each: seven fill 1.9 waves of 132, eight 2.2.
        assert_eq!(filling(63, 8, 1024, 132), 7);
    }
}
