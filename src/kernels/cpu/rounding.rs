//! Random bits for stochastic rounding: counter-based, so that an element's bits depend on its position alone.

use half::bf16;

use super::{Real, philox};
use crate::tensor::{Encoding, FlatViewMut, Rounding};

/// Numbers of 16 bits that one block of the generator gives.
const LANES: usize = 8;
/// Blocks of the generator made at a time; the loops over them vectorise.
const WIDTH: usize = 16;

/// Rounds to bfloat16 up or down so that the mean is the number: 16 random bits are added to those that are cut off.
/// Bfloat16 numbers, infinities and NaN stay what they are.
#[inline(always)]
#[allow(clippy::inline_always, clippy::cast_possible_truncation)] // inside its caller's instruction set; 16 bits
fn bits(x: f32, random: u16) -> u16 {
    let bits = x.to_bits();
    let rounded = (bits.wrapping_add(u32::from(random)) >> 16) as u16;
    let quiet = ((bits >> 16) | 0x40) as u16;
    if x.is_nan() { quiet } else { rounded }
}

/// The random numbers of `LANES · WIDTH` elements of the whole tensor, of which the first is a multiple of `LANES`.
#[inline(always)]
#[allow(clippy::inline_always, clippy::cast_possible_truncation)] // inside its caller's instruction set; 16 bits
fn numbers(rounding: &Rounding, first: u64) -> [u16; LANES * WIDTH] {
    let [key0, key1, high0, high1] = rounding.key;
    let mut words = [[0_u32; WIDTH]; 4];
    for lane in 0..WIDTH {
        let block = (first / LANES as u64).wrapping_add(lane as u64);
        let values = philox([block as u32, (block >> 32) as u32, high0, high1], [key0, key1]);
        for (row, value) in words.iter_mut().zip(values) {
            row[lane] = value;
        }
    }
    let mut out = [0; LANES * WIDTH];
    for lane in 0..WIDTH {
        for (at, row) in words.iter().enumerate() {
            out[lane * LANES + 2 * at] = row[lane] as u16;
            out[lane * LANES + 2 * at + 1] = (row[lane] >> 16) as u16;
        }
    }
    out
}

/// Rounds numbers at random into a view of bfloat16; false, and nothing done, where it has no such encoding.
#[inline(always)]
#[allow(clippy::inline_always)] // inside its caller's instruction set
pub(in crate::kernels) fn store<C: Real>(from: &[C], to: &mut FlatViewMut<'_>) -> bool {
    let Some((Encoding::Rounding(rounding), first)) = to.encoding() else { return false };
    let to = to.slice_mut::<bf16>();
    let mut at = 0;
    while at < to.len() {
        let (place, run) = rounding.places.find(first + at);
        #[allow(clippy::cast_possible_truncation)] // below LANES
        let skip = (place % LANES as u64) as usize;
        let count = (LANES * WIDTH - skip).min(run).min(to.len() - at);
        let random = numbers(rounding, place - skip as u64);
        for ((y, x), r) in to[at..at + count].iter_mut().zip(&from[at..]).zip(&random[skip..]) {
            *y = bf16::from_bits(bits(x.to_f32(), *r));
        }
        at += count;
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::Places;

    #[test]
    fn bits_representable_infinite_and_nan_stay() {
        for high in 0..=u16::MAX {
            let x = f32::from_bits(u32::from(high) << 16);
            for random in [0, 1, 0x7fff, 0x8000, 0xffff] {
                let got = bits(x, random);
                assert!(got == high || (x.is_nan() && bf16::from_bits(got).is_nan()), "{x} {random}");
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
    }

    #[test]
    fn numbers_do_not_depend_on_where_a_run_begins() {
        let rounding = Rounding { key: [1, 2, 3, 4], places: Places::new(&[1000], &[(0, 1000)]) };
        let (one, other) = (numbers(&rounding, 0), numbers(&rounding, 64));
        assert_eq!(one[64..], other[..64]);
        let mut sorted = one;
        sorted.sort_unstable();
        assert!(sorted.windows(2).filter(|w| w[0] == w[1]).count() < 4);
    }
}
