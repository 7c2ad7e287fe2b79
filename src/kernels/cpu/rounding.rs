//! Random bits for rounding at random: a hash of an element's position under a key, so that they depend on nothing else.

use half::{bf16, f16};

use super::Real;
use crate::tensor::{DType, Encoding, FlatViewMut, RoundedFrom};

/// Random numbers that are made before they are used; the loops over them vectorise.
const AT_ONCE: usize = 256;
/// 2⁻¹⁴, the smallest float16 that is not subnormal.
const LEAST_NORMAL: f32 = 1.0 / 16384.0;

/// Rounds stochastically to bfloat16, so that the mean is the number: 16 random bits are added to those that are cut off.
/// Bfloat16 numbers, infinities and NaN are unchanged.
#[inline(always)]
#[allow(clippy::inline_always, clippy::cast_possible_truncation)] // inside its caller's instruction set; 16 bits
fn bits(x: f32, random: u16) -> u16 {
    let bits = x.to_bits();
    let rounded = (bits.wrapping_add(u32::from(random)) >> 16) as u16;
    let quiet = ((bits >> 16) | 0x40) as u16;
    if x.is_nan() { quiet } else { rounded }
}

/// Rounds stochastically to float16, as `bits` does: the lower 13 bits of a float32 are cut off. `least` holds the bits of
/// the smallest magnitude that a nonzero number can become.
#[inline(always)]
#[allow(clippy::inline_always, clippy::cast_possible_truncation)] // inside its caller's instruction set; 16 bits
fn half_bits(x: f32, random: u16, least: u16) -> u16 {
    const BIAS: u32 = (127 - 15) << 10;
    let (size, sign) = (x.abs(), (x.to_bits() >> 16) as u16 & 0x8000);
    // Subnormal numbers have the same spacing as those that begin at 2⁻¹⁴. Adding 2⁻¹⁴ moves them there.
    let is_small = size < LEAST_NORMAL;
    let moved = if is_small { size + LEAST_NORMAL } else { size };
    let cut = (moved.to_bits().wrapping_add(u32::from(random >> 3)) >> 13).wrapping_sub(BIAS);
    let cut = if is_small { cut.wrapping_sub(1 << 10) } else { cut };
    let finite = cut.min(0x7c00) as u16;
    let kept = if size > 0.0 { finite.max(least) } else { 0 };
    sign | if x.is_nan() { 0x7e00 } else { kept }
}

/// Word `at` under a key: three rounds of a multiplication and shifts, which leave no bit of the result related to one of `at`
/// (`triple32` of C. Wellons' hash-prospector). The step of the group is in the key.
#[inline(always)]
#[allow(clippy::inline_always)] // inside its caller's instruction set
const fn word(at: u64, [key, tag]: [u32; 2]) -> u32 {
    #[allow(clippy::cast_possible_truncation)] // the two words
    let (low, high) = (at as u32, (at >> 32) as u32);
    let mut x = low.wrapping_add(key);
    x = (x ^ (x >> 17)).wrapping_mul(0xED5A_D4BB);
    x = x.wrapping_add(tag).wrapping_add(high.wrapping_mul(0x9E37_79B9));
    x = (x ^ (x >> 11)).wrapping_mul(0xAC4C_1B51);
    x = (x ^ (x >> 15)).wrapping_mul(0x3184_8BAB);
    x ^ (x >> 14)
}

/// The random numbers of the elements of a part.
#[inline(always)]
#[allow(clippy::inline_always, clippy::cast_possible_truncation)] // inside its caller's instruction set; 16 bits
pub(super) fn fill(from: RoundedFrom<'_>, random: &mut [u16]) {
    let RoundedFrom { rounding, first } = from;
    let mut at = 0;
    while at < random.len() {
        let (place, run) = rounding.places.find(first + at);
        let end = at + run.min(random.len() - at);
        // The second number of a word may be the first one of a run.
        let skip = usize::from(place % 2 == 1 && at < end);
        if skip == 1 {
            random[at] = (word(place / 2, rounding.key) >> 16) as u16;
        }
        let (pairs, start) = (&mut random[at + skip..end], place.div_ceil(2));
        let count = pairs.len() as u64 / 2;
        let mut pairs = pairs.chunks_exact_mut(2);
        for (lane, pair) in pairs.by_ref().enumerate() {
            let word = word(start.wrapping_add(lane as u64), rounding.key);
            (pair[0], pair[1]) = (word as u16, (word >> 16) as u16);
        }
        if let [last] = pairs.into_remainder() {
            *last = word(start.wrapping_add(count), rounding.key) as u16;
        }
        at = end;
    }
}

/// Rounds numbers at random into a view of 16 bits; false, and nothing done, where it has no such encoding.
#[inline(always)]
#[allow(clippy::inline_always)] // inside its caller's instruction set
pub(in crate::kernels) fn store<C: Real>(from: &[C], to: &mut FlatViewMut<'_>) -> bool {
    let Some((Encoding::Rounding(rounding), first)) = to.encoding() else { return false };
    let (is_half, least, count) = (to.dtype() == DType::F16, u16::from(rounding.stays_positive), to.len());
    let mut random = [0; AT_ONCE];
    for at in (0..count).step_by(AT_ONCE) {
        let end = (at + AT_ONCE).min(count);
        let random = &mut random[..end - at];
        fill(RoundedFrom { rounding, first: first + at }, random);
        if is_half {
            for ((y, x), r) in to.slice_mut::<f16>()[at..end].iter_mut().zip(&from[at..]).zip(random) {
                *y = f16::from_bits(half_bits(x.to_f32(), *r, least));
            }
        } else {
            for ((y, x), r) in to.slice_mut::<bf16>()[at..end].iter_mut().zip(&from[at..]).zip(random) {
                *y = bf16::from_bits(bits(x.to_f32(), *r));
            }
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::{Places, Rounding};

    #[test]
    fn bits_representable_infinite_and_nan_stay() {
        for high in 0..=u16::MAX {
            let (x, y) = (f32::from_bits(u32::from(high) << 16), f16::from_bits(high));
            for random in [0, 1, 0x7fff, 0x8000, 0xffff] {
                let got = bits(x, random);
                assert!(got == high || (x.is_nan() && bf16::from_bits(got).is_nan()), "{x} {random}");
                let got = half_bits(y.to_f32(), random, 0);
                assert!(got == high || (y.is_nan() && f16::from_bits(got).is_nan()), "{y} {random} {got:x}");
            }
        }
        assert!(bf16::from_bits(bits(f32::from_bits(0x7f80_0001), 0xffff)).is_nan());
    }

    #[test]
    fn bits_over_all_random_numbers_have_the_mean_of_the_number() {
        for x in [1.000_123_f32, -3.217_01, 1.1e-30, 0.999_999] {
            let sum: f64 = (0..=u16::MAX).map(|r| f64::from(f32::from(bf16::from_bits(bits(x, r))))).sum();
            assert!((sum / 65536.0 / f64::from(x) - 1.0).abs() < 1e-9, "{x}");
        }
        for x in [1.000_123_f32, -3.217_01, 6.1e-5, 6.09e-5, 1.1e-6, -3.3e-8, 65_000.0] {
            let one = |r| f64::from(f32::from(f16::from_bits(half_bits(x, r, 0))));
            let sum: f64 = (0..=u16::MAX).map(one).sum();
            assert!((sum / 65536.0 / f64::from(x) - 1.0).abs() < 2e-4, "{x} {sum}");
        }
        assert_eq!(f16::from_bits(half_bits(1e6, 0, 0)), f16::INFINITY);
        assert_eq!(f16::from_bits(half_bits(-1e6, 0, 0)), f16::NEG_INFINITY);
    }

    #[test]
    fn a_second_moment_in_float16_never_becomes_zero() {
        for random in [0, 1, 0x7fff, 0xffff] {
            for x in [1e-12_f32, 1e-8, 5.9e-8, f32::MIN_POSITIVE] {
                assert_eq!(half_bits(x, random, 1), 1, "{x}");
            }
            assert_eq!((half_bits(0.0, random, 1), half_bits(-0.0, random, 0)), (0, 0x8000));
        }
        assert_eq!(half_bits(1e-12, 0, 0), 0);
    }

    #[test]
    fn numbers_do_not_depend_on_where_a_run_begins() {
        // Rows 1 to 3 and columns 3 to 15 of a tensor of 7 x 21.
        let numbers = |places: Places, first: usize, count: usize| {
            let mut random = vec![0; count];
            let rounding = Rounding { key: [1, 2], places, stays_positive: false };
            fill(RoundedFrom { rounding: &rounding, first }, &mut random);
            random
        };
        let all = numbers(Places::new(&[7, 21], &[(0, 7), (0, 21)]), 0, 147);
        let expected: Vec<_> =
            (0..147_u64).map(|at| ((word(at / 2, [1, 2]) >> (16 * (at % 2))) & 0xffff) as u16).collect();
        assert_eq!(all, expected);
        let part = || Places::new(&[7, 21], &[(1, 3), (3, 13)]);
        let expected: Vec<_> = (1..4).flat_map(|row| all[21 * row + 3..][..13].to_vec()).collect();
        for first in 0..expected.len() {
            for count in 0..=expected.len() - first {
                assert_eq!(numbers(part(), first, count), expected[first..first + count], "{first} {count}");
            }
        }
        let mut sorted = all.clone();
        sorted.sort_unstable();
        assert!(sorted.windows(2).filter(|w| w[0] == w[1]).count() < 4);
        let far = numbers(Places::new(&[1 << 50], &[(1 << 40, 147)]), 0, 147);
        assert!(all.iter().zip(&far).filter(|(a, b)| a == b).count() < 3);
    }

    #[test]
    fn words_are_those_of_the_definition() {
        let found = [word(0, [0, 0]), word(1, [0, 0]), word(7, [5, 3]), word((3 << 32) + 9, [11, 1])];
        assert_eq!(found, [0x0000_0000, 0x0427_41D6, 0x255A_2FD0, 0x4A14_7E41]);
    }
}
