//! 8-bit states: blockwise quantization and dequantization.
//!
//! A block is stored as its absmax (the scale) and one 8-bit value for each element: the index of the codebook entry
//! (`minifloat.rs`) next to `(x·s)·(1 / (scale·s))`. This is computed in float32, where products and quotient are rounded one
//! by one, and `s` is a power of two that keeps them normal. All steps are fixed, so that every machine finds the same 8-bit
//! values. A scale that is not finite makes its whole block NaN.

#[cfg(all(target_arch = "x86_64", not(miri)))]
use super::lookup::decode;
use super::minifloat::{self, POSITIVE_VALUES, SIGNED_VALUES, ZERO};
use super::{Real, TILE, rounding};
use crate::spec::storage::MOST_BLOCK;
use crate::tensor::{DType, Encoding, FlatView, FlatViewMut};

static POSITIVE: [f32; 256] = POSITIVE_VALUES;
static SIGNED: [f32; 256] = SIGNED_VALUES;

/// The entries of the code book of a type in ascending order, and the number of the entry 0.
pub(in crate::kernels) fn book(dtype: DType) -> (&'static [f32; 256], u8) {
    if dtype == DType::UQ8 { (&POSITIVE, 0) } else { (&SIGNED, ZERO) }
}

/// The largest absolute value, float32; NaN where there is one.
#[inline(always)]
#[allow(clippy::inline_always)] // must be compiled inside its caller's instruction set
fn largest<C: Real>(values: &[C]) -> f32 {
    // Bits of absolute values are in the order of the values, NaN last.
    let bits = values.iter().fold(0, |most: u32, x| most.max(x.to_f32().to_bits() & 0x7fff_ffff));
    f32::from_bits(bits)
}

/// A power of two for numbers up to `scale` so that products with it, and its inverse, are normal numbers.
fn shift(scale: f32) -> f32 {
    const UP: f32 = 18_446_744_073_709_551_616.0; // 2⁶⁴
    if scale < 1.0 / 1_152_921_504_606_846_976.0 {
        UP
    } else if scale > 1_152_921_504_606_846_976.0 {
        1.0 / UP
    } else {
        1.0
    }
}

/// Returns the factors that map a block's numbers to the range of the codebook, or `None` unless the scale is positive and
/// finite.
#[inline(always)]
#[allow(clippy::inline_always)] // inside its caller's instruction set
fn factors(scale: f32) -> Option<(f32, f32)> {
    let power = shift(scale);
    (scale > 0.0 && scale.is_finite()).then(|| (power, 1.0 / (scale * power)))
}

/// Dequantizes elements of any part of the blocks. Writes NaN for 8-bit values without an encoding, as they have no meaning.
#[inline(always)]
#[allow(clippy::inline_always)] // inside its caller's instruction set
pub(in crate::kernels) fn load<C: Real>(from: &FlatView<'_>, to: &mut [C]) {
    let Some(stored) = from.quantized() else {
        return to.fill(C::from_f32(f32::NAN));
    };
    let (values, _) = book(from.dtype());
    let mut at = 0;
    while at < stored.q8.len() {
        let (q8, scale) = stored.block(at);
        let (begin, end) = (at, at + q8.len());
        at = end;
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        if let Some(to) = C::as_f32_mut(&mut to[begin..end])
            && decode(values, scale, q8, to)
        {
            continue;
        }
        for (code, y) in q8.iter().zip(&mut to[begin..end]) {
            *y = C::from_f32(values[usize::from(*code)] * scale);
        }
    }
}

/// Quantizes elements that are whole blocks. Parts of blocks are not written: the rest may belong to another view that reads
/// the scale.
#[inline(always)]
#[allow(clippy::inline_always)] // inside its caller's instruction set
pub(in crate::kernels) fn store<C: Real>(numbers: &[C], to: &mut FlatViewMut<'_>) {
    let dtype = to.dtype();
    let Some(mut stored) = to.quantized() else { return };
    let mut at = 0;
    while at < stored.len() {
        let from = stored.rounded_from(at);
        let Some((q8, scale)) = stored.block(at) else {
            debug_assert!(false, "a part of a block was stored");
            return;
        };
        let values = &numbers[at..at + q8.len()];
        at += q8.len();
        *scale = largest(values);
        let Some(factors) = factors(*scale) else {
            q8.fill(book(dtype).1);
            continue;
        };
        // Without random numbers the nearest entry is taken.
        let mut random = [1 << 15; MOST_BLOCK];
        if let Some(from) = from {
            rounding::fill(from, &mut random[..q8.len()]);
        }
        minifloat::encode(dtype == DType::Q8, values, factors, &random, q8);
    }
}

/// Number of elements from the first one on that may be handled at a time, `most` at most, without splitting blocks;
/// none where there are no blocks.
pub(in crate::kernels) fn cut(operand: &FlatView<'_>, most: usize) -> Option<usize> {
    let Some((Encoding::Blocks(blocks), first)) = operand.encoding() else { return None };
    Some(if operand.is_empty() { most } else { blocks.cut(first, most) - first })
}

/// A block is handled in one tile.
const _: () = assert!(MOST_BLOCK <= TILE);
