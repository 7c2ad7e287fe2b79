//! Dequantization with AVX-512, sixteen values at a time.

use std::arch::x86_64::{
    _mm_maskz_loadu_epi8, _mm512_cvtepu8_epi32, _mm512_i32gather_ps, _mm512_mask_storeu_ps, _mm512_mul_ps,
    _mm512_set1_ps,
};

use super::isa::{self, Isa};

/// Numbers looked up at a time.
const LANES: usize = 16;

/// As the loop of `blocks::load`; false, with nothing done, where the processor has no AVX-512.
#[inline(always)]
#[allow(clippy::inline_always)] // inside its caller's instruction set
pub(in crate::kernels) fn decode(values: &[f32; 256], scale: f32, q8: &[u8], to: &mut [f32]) -> bool {
    if isa::best() < Isa::Avx512 {
        return false;
    }
    // SAFETY: `isa::best` found the features in this processor.
    unsafe { decode_there(values, scale, q8, &mut to[..q8.len()]) };
    true
}

#[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw")]
fn decode_there(values: &[f32; 256], scale: f32, q8: &[u8], to: &mut [f32]) {
    let scale = _mm512_set1_ps(scale);
    for (part, out) in q8.chunks(LANES).zip(to.chunks_mut(LANES)) {
        let mask = u16::MAX >> (LANES - part.len());
        // SAFETY: the mask leaves out what is behind the parts; a byte is the number of a value.
        unsafe {
            let numbers = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(mask, part.as_ptr().cast()));
            let found = _mm512_i32gather_ps::<4>(numbers, values.as_ptr());
            _mm512_mask_storeu_ps(out.as_mut_ptr(), mask, _mm512_mul_ps(found, scale));
        }
    }
}
