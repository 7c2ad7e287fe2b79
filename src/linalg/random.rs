//! Counter-based normal numbers: element `i` of a stream is a function of its key and of `i` alone.
//!
//! Generator: `Philox4x32-10`.
//! Normals come from Box–Muller with polynomial logarithm, sine and cosine made of single-precision additions
//! and multiplications, so every machine and every slicing of a stream gives the same bits.

use crate::kernels::{philox, stream};

/// Names one stream of numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Key {
    /// The user's seed.
    pub seed: u64,
    /// Index of the parameter that the numbers are for.
    pub stream: u64,
}

/// Numbers of one block of the generator.
const LANES: u64 = 4;
/// Blocks computed together; the loops over them vectorize.
const WIDTH: usize = 16;

/// Low and high word.
#[inline]
#[expect(clippy::cast_possible_truncation, reason = "the two words of a 64-bit number")]
fn words(x: u64) -> [u32; 2] {
    [x as u32, (x >> 32) as u32]
}

/// Writes standard normal numbers: `out[i]` depends only on `(key, tag, step, first_index + i)`.
///
/// `tag` separates uses of one stream (for example an initial value from a sketch) and `step` separates
/// times. Slices of one stream may be filled in any order, of any length, from any thread. Every value is
/// finite and at most 6.8 in absolute value.
pub fn fill_normal(out: &mut [f32], key: Key, tag: u32, step: u64, first_index: u64) {
    let source = Source::new(key, tag, step);
    let mut index = first_index;
    let mut rest = out;
    while !rest.is_empty() {
        let skip = (index % LANES) as usize;
        let numbers = source.normals(index / LANES);
        let count = (numbers.len() - skip).min(rest.len());
        let (now, later) = rest.split_at_mut(count);
        now.copy_from_slice(&numbers[skip..skip + count]);
        index = index.wrapping_add(count as u64);
        rest = later;
    }
}

/// `(key, tag, step)` folded into a Philox key and the upper half of its counter.
struct Source {
    key: [u32; 2],
    high: [u32; 2],
}

impl Source {
    fn new(key: Key, tag: u32, step: u64) -> Self {
        let [key0, key1, high0, high1] = stream([key.seed, key.stream, step], tag);
        Self { key: [key0, key1], high: [high0, high1] }
    }

    /// The normals of `WIDTH` blocks, from `first_block` on.
    fn normals(&self, first_block: u64) -> [f32; 4 * WIDTH] {
        let mut bits = [[0_u32; WIDTH]; 4];
        let mut block = first_block;
        for lane in 0..WIDTH {
            let [low, high] = words(block);
            let values = philox([low, high, self.high[0], self.high[1]], self.key);
            for (row, value) in bits.iter_mut().zip(values) {
                row[lane] = value;
            }
            block = block.wrapping_add(1);
        }
        let mut out = [0.0; 4 * WIDTH];
        for lane in 0..WIDTH {
            let (z0, z1) = box_muller(bits[0][lane], bits[1][lane]);
            let (z2, z3) = box_muller(bits[2][lane], bits[3][lane]);
            out[4 * lane..4 * lane + 4].copy_from_slice(&[z0, z1, z2, z3]);
        }
        out
    }
}

/// `sqrt(-2 ln u) (cos 2πv, sin 2πv)` with `u = (x + 1/2) / 2³²` and `v = y / 2³²`.
#[inline]
#[expect(clippy::cast_precision_loss, reason = "u and the angle keep 24 bits")]
fn box_muller(x: u32, y: u32) -> (f32, f32) {
    let radius = (-2.0 * ln_unit((x as f32 + 0.5) * (1.0 / 4_294_967_296.0))).sqrt();
    // Nearest quarter turn, and the rest as an angle in [-π/4, π/4].
    let quarter = y.wrapping_add(1 << 29) >> 30;
    let angle =
        (y.wrapping_sub(quarter << 30).cast_signed()) as f32 * (std::f32::consts::TAU / 4_294_967_296.0);
    let (sin, cos) = sin_cos_eighth(angle);
    let (s, c) = if quarter & 1 == 0 { (sin, cos) } else { (cos, sin) };
    let cos = if quarter == 1 || quarter == 2 { -c } else { c };
    let sin = if quarter & 2 == 0 { s } else { -s };
    (radius * cos, radius * sin)
}

/// Natural logarithm on `(0, 1]`, at most 0, relative error about 1e-7.
#[inline]
fn ln_unit(u: f32) -> f32 {
    // u = mantissa * 2^exponent with the mantissa in [sqrt(1/2), sqrt(2)).
    let bits = u.to_bits().wrapping_add(0x3F80_0000 - 0x3F35_04F3);
    #[expect(clippy::cast_precision_loss, reason = "an exponent has 8 bits")]
    let exponent = ((bits >> 23).cast_signed() - 127) as f32;
    let f = f32::from_bits((bits & 0x007F_FFFF) + 0x3F35_04F3) - 1.0;
    // ln(1 + f) = 2 artanh(s) with s = f / (2 + f), |s| < 0.172: the next term of the series is below 4e-9.
    let s = f / (2.0 + f);
    let square = s * s;
    let tail = square * (1.0 / 3.0 + square * (0.2 + square * (1.0 / 7.0 + square * (1.0 / 9.0))));
    (exponent * std::f32::consts::LN_2 + 2.0 * (s + s * tail)).min(0.0)
}

/// Sine and cosine of an angle in `[-π/4, π/4]` by Taylor series, absolute error below 1e-7.
#[inline]
fn sin_cos_eighth(angle: f32) -> (f32, f32) {
    let square = angle * angle;
    let sin = 1.0 - square / 6.0 * (1.0 - square / 20.0 * (1.0 - square / 42.0 * (1.0 - square / 72.0)));
    let cos = 1.0 - square / 2.0 * (1.0 - square / 12.0 * (1.0 - square / 30.0 * (1.0 - square / 56.0)));
    (angle * sin, cos)
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

    #[test]
    fn box_muller_agrees_with_double_precision() {
        let corners = [0, 1, 2, 1 << 29, (1 << 29) - 1, 1 << 30, 3 << 30, 1 << 31, u32::MAX - 1, u32::MAX];
        let spread = (0..4000_u32).map(|i| i.wrapping_mul(0x9E37_79B9));
        let samples: Vec<u32> = corners.into_iter().chain(spread).collect();
        for (i, &x) in samples.iter().enumerate() {
            let y = samples[(i * 7 + 3) % samples.len()];
            #[expect(clippy::cast_precision_loss, reason = "the same 24-bit uniform")]
            let u = f64::from((x as f32 + 0.5) * (1.0 / 4_294_967_296.0));
            let radius = (-2.0 * u.ln()).sqrt();
            let angle = std::f64::consts::TAU * f64::from(y) / 4_294_967_296.0;
            let (z0, z1) = box_muller(x, y);
            assert!((f64::from(z0) - radius * angle.cos()).abs() < 2e-6, "{x} {y}: {z0}");
            assert!((f64::from(z1) - radius * angle.sin()).abs() < 2e-6, "{x} {y}: {z1}");
            assert!(z0.abs() < 6.8 && z1.abs() < 6.8);
        }
    }
}
