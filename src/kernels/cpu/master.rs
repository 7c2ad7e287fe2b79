//! Float32 weights in two halves of 16 bits: a bfloat16 parameter, and the low half of the weight.
//!
//! The parameter is the weight rounded to the nearest, of two that are equally near the one of larger magnitude: the high half
//! plus one where the low half is 2^15 or more, which is where its sign bit as an `i16` is set. So the low half says whether
//! one was added, and every weight is found again bit by bit: those that round up to the next power of two or to infinity,
//! zeros of either sign, subnormal numbers and infinities. A NaN is found as a NaN, with the low half 0.
//!
//! To round such ties to even, as elsewhere, would lose weights: an even number would stand for 2^16 + 1 of them.
//!
//! Other code may write the parameter and leave the low half. Such a write is changed by half a unit in the last place at
//! most. A zero remains zero if the low half is negative, and an infinity remains infinite if it is positive. An infinity
//! with a negative low half stands for a finite number that rounds to it.

use half::bf16;

use super::Real;
use crate::tensor::{FlatView, FlatViewMut};

/// Joins a parameter and its low half to the float32 weight.
#[inline(always)]
#[allow(clippy::inline_always)] // inside its caller's instruction set
fn join(high: u16, low: i16) -> f32 {
    let high = u32::from(high) << 16;
    // With its sign the low half takes back the one that was added.
    let weight = f32::from_bits(high.wrapping_add(i32::from(low).cast_unsigned()));
    // A low half that is not the parameter's can lead from a zero or an infinity to NaN.
    if weight.is_nan() { f32::from_bits(high) } else { weight }
}

/// The parameter and the low half of a weight.
#[inline(always)]
#[allow(clippy::inline_always, clippy::cast_possible_truncation)] // inside its caller's instruction set; 16 bits
fn split(weight: f32) -> (u16, i16) {
    let bits = weight.to_bits();
    let quiet = ((bits >> 16) | 0x40) as u16;
    if weight.is_nan() {
        (quiet, 0)
    } else {
        ((bits.wrapping_add(0x8000) >> 16) as u16, (bits as u16).cast_signed())
    }
}

/// Reads weights in two halves; false, and nothing done, where the elements have no such encoding.
#[inline(always)]
#[allow(clippy::inline_always)] // inside its caller's instruction set
pub(in crate::kernels) fn load<C: Real>(from: &FlatView<'_>, to: &mut [C]) -> bool {
    let Some(low) = from.remainders() else { return false };
    let halves = from.slice::<bf16>().iter().zip(low.slice::<i16>());
    halves.zip(to).for_each(|((high, low), y)| *y = C::from_f32(join(high.to_bits(), *low)));
    true
}

/// Writes weights in two halves; false, and nothing done, where the elements have no such encoding.
#[inline(always)]
#[allow(clippy::inline_always)] // inside its caller's instruction set
pub(in crate::kernels) fn store<C: Real>(from: &[C], to: &mut FlatViewMut<'_>) -> bool {
    let Some([mut high, mut low]) = to.halves() else { return false };
    let halves = high.slice_mut::<bf16>().iter_mut().zip(low.slice_mut::<i16>());
    for ((high, low), x) in halves.zip(from) {
        let (upper, lower) = split(x.to_f32());
        (*high, *low) = (bf16::from_bits(upper), lower);
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All high halves, each with low halves around those at which something changes, and some between.
    fn weights() -> impl Iterator<Item = f32> {
        let lows = (0..0x1_0000_u32).filter(|low| {
            let near = |at: u32| low.abs_diff(at) < 3;
            near(0) || near(0x7fff) || near(0x8000) || near(0xffff) || low % 4093 == 17
        });
        let lows: Vec<u32> = lows.collect();
        (0..=0xffff_u32)
            .flat_map(move |high| lows.clone().into_iter().map(move |low| f32::from_bits((high << 16) | low)))
    }

    #[test]
    fn join_finds_every_weight_again() {
        for weight in weights() {
            let (high, low) = split(weight);
            let found = join(high, low);
            let same = found.to_bits() == weight.to_bits() || (weight.is_nan() && found.is_nan());
            assert!(same, "{:#x} became {:#x}", weight.to_bits(), found.to_bits());
            assert_eq!(bf16::from_bits(high).is_nan(), weight.is_nan());
        }
    }

    #[test]
    fn split_rounds_to_the_nearest_and_ties_away_from_zero() {
        for weight in weights().filter(|weight| !weight.is_nan()) {
            let (bits, (high, low)) = (weight.to_bits(), split(weight));
            let even = bf16::from_f32(weight).to_bits();
            let is_tie = bits & 0xffff == 0x8000;
            let wanted = if is_tie { (bits >> 16) + 1 } else { u32::from(even) };
            assert_eq!(u32::from(high), wanted, "{bits:#x}");
            assert!(!is_tie || high - even <= 1);
            assert_eq!(u32::from(low.cast_unsigned()), bits & 0xffff);
        }
    }

    #[test]
    fn what_others_write_is_moved_by_half_a_unit_at_most() {
        for high in 0..=u16::MAX {
            let own = bf16::from_bits(high).to_f32();
            for low in [i16::MIN, i16::MIN + 1, -1, 0, 1, i16::MAX] {
                let found = join(high, low);
                if own.is_nan() {
                    assert!(found.is_nan());
                } else if own == 0.0 && low < 0 {
                    assert_eq!(found.to_bits(), own.to_bits());
                } else if own.is_infinite() {
                    assert!(if low < 0 {
                        found.is_finite() && found.abs() > 3.39e38
                    } else {
                        found.to_bits() == own.to_bits()
                    });
                } else {
                    let unit =
                        f64::from(f32::from_bits((u32::from(high) & 0x7f80) << 16).max(f32::MIN_POSITIVE))
                            / 128.0;
                    assert!((f64::from(found) - f64::from(own)).abs() <= unit / 2.0, "{high:#x} {low}");
                    assert_eq!(found.is_sign_negative(), own.is_sign_negative());
                }
            }
        }
    }
}
