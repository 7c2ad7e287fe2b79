//! Element conversions between storage types and the two arithmetic types.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::Real;
use crate::tensor::{DType, FlatView, FlatViewMut};

/// Round to nearest even, NaN kept; branch-free so that it vectorises.
#[inline(always)]
#[allow(clippy::inline_always, clippy::cast_possible_truncation)] // the shift leaves 16 bits
fn bf16_bits(x: f32) -> u16 {
    let bits = x.to_bits();
    let rounded = (bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16) as u16;
    let quiet = ((bits >> 16) | 0x40) as u16;
    if x.is_nan() { quiet } else { rounded }
}

/// Without the question whether it is NaN, which keeps a loop from being vectorized.
#[inline(always)]
#[allow(clippy::inline_always)] // must be compiled inside its caller's instruction set
pub(in crate::kernels) fn widen(x: bf16) -> f32 {
    f32::from_bits(u32::from(x.to_bits()) << 16)
}

/// Elements of any type into arithmetic type. `to` is as long as `from`.
#[inline(always)]
#[allow(clippy::inline_always)] // must be compiled inside its caller's instruction set
pub(in crate::kernels) fn load<C: Real>(from: &FlatView<'_>, to: &mut [C]) {
    match from.dtype() {
        DType::F32 => from.slice::<f32>().iter().zip(to).for_each(|(x, y)| *y = C::from_f32(*x)),
        DType::F64 => from.slice::<f64>().iter().zip(to).for_each(|(x, y)| *y = C::of(*x)),
        DType::BF16 if super::master::load(from, to) => {}
        DType::BF16 => {
            from.slice::<bf16>().iter().zip(to).for_each(|(&narrow, y)| *y = C::from_f32(widen(narrow)));
        }
        DType::F16 => {
            let mut wide = [0.0_f32; super::TILE];
            for (x, y) in from.slice::<f16>().chunks(super::TILE).zip(to.chunks_mut(super::TILE)) {
                x.convert_to_f32_slice(&mut wide[..x.len()]);
                wide.iter().zip(y).for_each(|(x, y)| *y = C::from_f32(*x));
            }
        }
        DType::Q8 | DType::UQ8 => super::blocks::load(from, to),
        DType::I16 => from.slice::<i16>().iter().zip(to).for_each(|(x, y)| *y = C::of(f64::from(*x))),
    }
}

/// Elements of arithmetic type into any type, rounded once: to nearest even unless `to` has another encoding. `to` is as
/// long as `from`, and whole blocks where it has blocks.
#[inline(always)]
#[allow(clippy::inline_always)] // must be compiled inside its caller's instruction set
pub(in crate::kernels) fn store<C: Real>(from: &[C], to: &mut FlatViewMut<'_>) {
    match to.dtype() {
        DType::F32 => to.slice_mut::<f32>().iter_mut().zip(from).for_each(|(y, x)| *y = x.to_f32()),
        DType::F64 => to.slice_mut::<f64>().iter_mut().zip(from).for_each(|(y, x)| *y = x.wide()),
        DType::BF16 if super::rounding::store(from, to) || super::master::store(from, to) => {}
        DType::BF16 => {
            let to = to.slice_mut::<bf16>().iter_mut();
            to.zip(from).for_each(|(y, x)| *y = bf16::from_bits(bf16_bits(x.to_f32())));
        }
        DType::F16 if super::rounding::store(from, to) => {}
        DType::F16 => {
            let mut narrow = [0.0_f32; super::TILE];
            for (y, x) in to.slice_mut::<f16>().chunks_mut(super::TILE).zip(from.chunks(super::TILE)) {
                narrow.iter_mut().zip(x).for_each(|(n, x)| *n = x.to_f32());
                y.convert_from_f32_slice(&narrow[..x.len()]);
            }
        }
        DType::Q8 | DType::UQ8 => super::blocks::store(from, to),
        #[allow(clippy::cast_possible_truncation)] // saturates
        DType::I16 => to.slice_mut::<i16>().iter_mut().zip(from).for_each(|(y, x)| *y = x.wide() as i16),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bf16_bits_any_value_equals_the_half_crate() {
        for i in 0..=u32::from(u16::MAX) {
            for low in [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                let x = f32::from_bits((i << 16) | low);
                let (ours, theirs) = (bf16::from_bits(bf16_bits(x)), bf16::from_f32(x));
                assert!(ours.to_bits() == theirs.to_bits() || (ours.is_nan() && theirs.is_nan()), "{x}");
            }
        }
    }
}
