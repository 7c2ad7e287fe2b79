//! Codes with AVX-512: sixteen at a time, what depends on the decade from tables in registers.

use std::arch::x86_64::{
    _CMP_GT_OQ, _mm_maskz_loadu_epi8, _mm512_abs_ps, _mm512_add_epi32, _mm512_castps_si512,
    _mm512_cmp_ps_mask, _mm512_cvtepi32_ps, _mm512_cvtepu8_epi32, _mm512_cvtps_epi32, _mm512_fmadd_ps,
    _mm512_i32gather_ps, _mm512_loadu_epi32, _mm512_loadu_ps, _mm512_mask_add_epi32,
    _mm512_mask_cvtepi32_storeu_epi8, _mm512_mask_storeu_ps, _mm512_mask_sub_epi32, _mm512_maskz_loadu_ps,
    _mm512_max_ps, _mm512_min_ps, _mm512_movepi32_mask, _mm512_mul_ps, _mm512_permutex2var_epi32,
    _mm512_permutex2var_ps, _mm512_permutexvar_ps, _mm512_set1_epi32, _mm512_set1_ps, _mm512_srli_epi32,
    _mm512_sub_ps,
};

use super::blocks::{Book, DECADES, DOUBT};
use super::isa::{self, Isa};

/// Numbers searched for at a time.
const LANES: usize = 16;
/// The exponent of 2⁻²³, which is below every bound between entries: the smallest one with a place in the tables.
const LEAST: u32 = 104;

/// Tables of what depends on the decade, by the last five bits of an exponent and by the number of bounds that are
/// exceeded.
pub(in crate::kernels) struct Tables {
    /// The bound between two numbers of this exponent; infinite where there is none.
    bounds: [f32; 32],
    /// Number of bounds below all numbers of this exponent.
    below: [i32; 32],
    factor: [f32; LANES],
    shift: [f32; LANES],
}

impl Tables {
    pub(in crate::kernels) const fn new(book: &Book) -> Self {
        let (mut bounds, mut below) = ([f32::INFINITY; 32], [0; 32]);
        let (mut factor, mut shift) = ([0.0; LANES], [0.0; LANES]);
        let mut exponent = LEAST;
        while exponent <= 127 {
            let (first, next) = (f32::from_bits(exponent << 23), f32::from_bits((exponent + 1) << 23));
            let (at, mut k) = ((exponent & 31) as usize, 0);
            while k <= DECADES {
                if book.bounds[k] < first {
                    below[at] += 1;
                } else if book.bounds[k] < next {
                    bounds[at] = book.bounds[k];
                }
                k += 1;
            }
            exponent += 1;
        }
        let mut k = 0;
        while k <= DECADES {
            (factor[k + 1], shift[k + 1]) = book.lines[k];
            k += 1;
        }
        Self { bounds, below, factor, shift }
    }
}

/// As the loop of `blocks::load`; false, with nothing done, where the processor has no AVX-512.
#[inline(always)]
#[allow(clippy::inline_always)] // inside its caller's instruction set
pub(in crate::kernels) fn decode(values: &[f32; 256], scale: f32, codes: &[u8], to: &mut [f32]) -> bool {
    if isa::best() < Isa::Avx512 {
        return false;
    }
    // SAFETY: `isa::best` found the features in this processor.
    unsafe { decode_there(values, scale, codes, &mut to[..codes.len()]) };
    true
}

/// As the loop of `blocks::signed`; calls `refine` for the lanes from some element on where one is doubtful. False, with
/// nothing done, where the processor has no AVX-512.
#[inline(always)]
#[allow(clippy::inline_always)] // inside its caller's instruction set
pub(in crate::kernels) fn search(
    book: &Book,
    tables: &Tables,
    values: &[f32],
    factors: (f32, f32),
    codes: &mut [u8],
    refine: impl Fn(&[f32], &mut [u8]),
) -> bool {
    if isa::best() < Isa::Avx512 {
        return false;
    }
    // SAFETY: `isa::best` found the features in this processor.
    unsafe { search_there(book, tables, values, factors, &mut codes[..values.len()], refine) };
    true
}

#[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw")]
fn decode_there(values: &[f32; 256], scale: f32, codes: &[u8], to: &mut [f32]) {
    let scale = _mm512_set1_ps(scale);
    for (part, out) in codes.chunks(LANES).zip(to.chunks_mut(LANES)) {
        let mask = u16::MAX >> (LANES - part.len());
        // SAFETY: the mask leaves out what is behind the parts; a byte is the number of a value.
        unsafe {
            let numbers = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(mask, part.as_ptr().cast()));
            let found = _mm512_i32gather_ps::<4>(numbers, values.as_ptr());
            _mm512_mask_storeu_ps(out.as_mut_ptr(), mask, _mm512_mul_ps(found, scale));
        }
    }
}

#[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw")]
fn search_there(
    book: &Book,
    tables: &Tables,
    values: &[f32],
    (power, inverse): (f32, f32),
    codes: &mut [u8],
    refine: impl Fn(&[f32], &mut [u8]),
) {
    let load = |table: &[f32]| {
        debug_assert!(table.len() >= LANES);
        // SAFETY: the callers below pass sixteen numbers.
        unsafe { _mm512_loadu_ps(table.as_ptr()) }
    };
    let (low_bounds, high_bounds) = (load(&tables.bounds[..LANES]), load(&tables.bounds[LANES..]));
    let (slopes, shifts) = (load(&tables.factor), load(&tables.shift));
    // SAFETY: thirty-two numbers.
    let (less_low, less_high) = unsafe {
        (_mm512_loadu_epi32(tables.below.as_ptr()), _mm512_loadu_epi32(tables.below[LANES..].as_ptr()))
    };
    let (power, inverse) = (_mm512_set1_ps(power), _mm512_set1_ps(inverse));
    let floor = _mm512_set1_ps(f32::from_bits(LEAST << 23));
    // -1 has no entry of its own.
    let most = _mm512_set1_ps(-book.bounds[DECADES]);
    let zero = _mm512_set1_epi32(127);
    for (part, out) in values.chunks(LANES).zip(codes.chunks_mut(LANES)) {
        let mask = u16::MAX >> (LANES - part.len());
        // SAFETY: the mask leaves out what is behind the part.
        let x = unsafe { _mm512_maskz_loadu_ps(mask, part.as_ptr()) };
        let q = _mm512_mul_ps(_mm512_mul_ps(x, power), inverse);
        let q = _mm512_max_ps(q, most);
        let a = _mm512_max_ps(_mm512_abs_ps(q), floor);
        let exponent = _mm512_srli_epi32::<23>(_mm512_castps_si512(a));
        let bound = _mm512_permutex2var_ps(low_bounds, exponent, high_bounds);
        let under = _mm512_permutex2var_epi32(less_low, exponent, less_high);
        let exceeds = _mm512_cmp_ps_mask::<_CMP_GT_OQ>(a, bound);
        let line = _mm512_mask_add_epi32(under, exceeds, under, _mm512_set1_epi32(1));
        let (slope, shift) = (_mm512_permutexvar_ps(line, slopes), _mm512_permutexvar_ps(line, shifts));
        // Other roundings than in the loop: only doubtful numbers could tell.
        let found = _mm512_fmadd_ps(slope, a, shift);
        let last = _mm512_fmadd_ps(shift, _mm512_set1_ps(2.25), _mm512_set1_ps(0.125));
        let found = _mm512_min_ps(found, last);
        let number = _mm512_cvtps_epi32(found);
        let off = _mm512_abs_ps(_mm512_sub_ps(found, _mm512_cvtepi32_ps(number)));
        let doubt = _mm512_cmp_ps_mask::<_CMP_GT_OQ>(off, _mm512_set1_ps(0.5 - DOUBT));
        let negative = _mm512_movepi32_mask(_mm512_castps_si512(q));
        let code = _mm512_mask_sub_epi32(_mm512_add_epi32(number, zero), negative, zero, number);
        // SAFETY: the mask leaves out what is behind the part.
        unsafe { _mm512_mask_cvtepi32_storeu_epi8(out.as_mut_ptr().cast(), mask, code) };
        if doubt != 0 {
            refine(part, out);
        }
    }
}
