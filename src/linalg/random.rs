//! Counter-based normal numbers: element `i` of a stream is a function of its key and of `i` alone.
//!
//! Generator: `Philox4x32-10`.

use crate::kernels::{gaussian, stream};

/// Name of one stream of numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Key {
    /// The user's seed.
    pub seed: u64,
    /// Number of the parameter that the numbers are for (`ParamSpec::stream`).
    pub stream: u64,
}

/// Writes standard normal numbers: `out[i]` depends only on `(key, tag, step, first_index + i)`.
///
/// `tag` separates uses of one stream (for example an initial value from a sketch) and `step` separates
/// times. Slices of one stream may be filled in any order, of any length, from any thread. Every value is
/// finite and at most 6.8 in absolute value.
pub fn fill_normal(out: &mut [f32], key: Key, tag: u32, step: u64, first_index: u64) {
    gaussian(out, stream([key.seed, key.stream, step], tag), first_index);
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: Key = Key { seed: 7, stream: 3 };

    fn filled(len: usize, key: Key, tag: u32, step: u64) -> Vec<f32> {
        let mut out = vec![0.0; len];
        fill_normal(&mut out, key, tag, step, 0);
        out
    }

    #[test]
    fn normals_do_not_depend_on_the_slicing() {
        let whole = filled(1000, KEY, 1, 5);
        for cuts in
            [vec![0, 1, 2, 3, 64, 65, 500, 1000], vec![0, 7, 333, 334, 998, 1000], vec![0, 63, 129, 1000]]
        {
            for pair in cuts.windows(2) {
                let mut part = vec![f32::NAN; pair[1] - pair[0]];
                fill_normal(&mut part, KEY, 1, 5, pair[0] as u64);
                assert_eq!(part, whole[pair[0]..pair[1]], "{pair:?}");
            }
        }
        // Beyond 2^32 blocks the upper counter word takes part.
        let mut near = [0.0; 8];
        let mut far = [0.0; 8];
        fill_normal(&mut near, KEY, 1, 5, 2);
        fill_normal(&mut far, KEY, 1, 5, (1 << 34) + 2);
        assert!(near.iter().zip(far).all(|(a, b)| a.to_bits() != b.to_bits()));
    }

    #[test]
    fn streams_differ_by_every_part_of_their_name() {
        let base = filled(64, KEY, 1, 5);
        let others = [
            filled(64, Key { seed: 8, ..KEY }, 1, 5),
            filled(64, Key { stream: 4, ..KEY }, 1, 5),
            filled(64, KEY, 2, 5),
            filled(64, KEY, 1, 6),
            filled(64, Key { seed: 7 + (1 << 32), ..KEY }, 1, 5),
            filled(64, Key { stream: 3 + (1 << 32), ..KEY }, 1, 5),
            filled(64, KEY, 1, 5 + (1 << 32)),
        ];
        for other in others {
            assert!(base.iter().zip(&other).all(|(a, b)| a.to_bits() != b.to_bits()));
        }
    }

    #[test]
    #[expect(clippy::cast_precision_loss, reason = "small counts")]
    fn normals_have_the_moments_of_a_normal_distribution() {
        let len = 1 << 20;
        let values = filled(len, KEY, 0, 0);
        let moment = |k: i32| values.iter().map(|&z| f64::from(z).powi(k)).sum::<f64>() / len as f64;
        // Bounds are five standard errors, sqrt(Var(z^k) / 2^20) with Var = 1, 2, 15, 96.
        for (k, expected, variance) in [(1, 0.0, 1.0), (2, 1.0, 2.0), (3, 0.0, 15.0), (4, 3.0, 96.0)] {
            let bound = 5.0 * f64::sqrt(variance / len as f64);
            assert!((moment(k) - expected).abs() < bound, "moment {k} = {}", moment(k));
        }
        // Neighbours (the two halves of a pair, and of two pairs) are uncorrelated.
        for lag in 1..=4 {
            let product: f64 =
                values.iter().zip(&values[lag..]).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum();
            assert!((product / len as f64).abs() < 5.0 / (len as f64).sqrt(), "lag {lag}");
        }
        // P(|z| > 3) = 0.0026998.
        let tails = values.iter().filter(|z| z.abs() > 3.0).count() as f64 / len as f64;
        assert!((tails - 0.002_699_8).abs() < 5.0 * (0.0027_f64 / len as f64).sqrt(), "{tails}");
    }
}
