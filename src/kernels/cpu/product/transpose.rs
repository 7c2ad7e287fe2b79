//! Tiles and panels transposed in registers.

#[allow(clippy::wildcard_imports)] // seventeen names
use std::arch::x86_64::*;

use half::bf16;

use super::types::{Mirror, Number};

/// Element by element.
///
/// # Safety
/// As [`Tile::mirror`].
#[inline(always)]
#[allow(clippy::inline_always)] // must be compiled inside its caller's instruction set
pub(super) unsafe fn mirror_any<E: Number>(sums: *const E::Wide, width: usize, to: &Mirror, out: *mut E) {
    for j in 0..to.cols {
        for i in to.first(j)..to.rows {
            // SAFETY: inside the tile, and inside the mirror image of what is below the diagonal.
            unsafe { *out.add(j * to.stride + i) = E::narrow(*sums.add(i * width + j)) };
        }
    }
}

/// Lanes `first..rows` of 16.
fn lanes(first: usize, rows: usize) -> u16 {
    let below = |n: usize| if n >= 16 { u16::MAX } else { (1 << n) - 1 };
    below(rows) & !below(first)
}

/// By 16 columns at a time, transposed in registers.
///
/// # Safety
/// As [`Tile::mirror`], on a machine with AVX-512.
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn mirror_f32(sums: *const f32, width: usize, to: &Mirror, out: *mut f32) {
    for part in (0..to.cols).step_by(16) {
        // SAFETY: the tile has `rows` rows of `width` sums, and the masks leave out what is not to be written.
        unsafe {
            let columns = transposed(sums.add(part).cast(), width * 4, to.rows);
            for (j, column) in columns.iter().enumerate().take(to.cols - part) {
                let mask = lanes(to.first(part + j), to.rows);
                let at = out.wrapping_add((part + j) * to.stride);
                _mm512_mask_storeu_ps(at, mask, _mm512_castsi512_ps(*column));
            }
        }
    }
}

/// The same, rounded to the nearest, ties to even; subnormal numbers become zero.
///
/// # Safety
/// As [`Tile::mirror`], on a machine with AVX512-BF16.
#[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512bf16")]
pub(super) unsafe fn mirror_bf16(sums: *const f32, width: usize, to: &Mirror, out: *mut bf16) {
    for part in (0..to.cols).step_by(16) {
        // SAFETY: as in `mirror_f32`.
        unsafe {
            let columns = transposed(sums.add(part).cast(), width * 4, to.rows);
            for (j, column) in columns.iter().enumerate().take(to.cols - part) {
                let mask = lanes(to.first(part + j), to.rows);
                let at = out.wrapping_add((part + j) * to.stride);
                let rounded = _mm512_cvtneps_pbh(_mm512_castsi512_ps(*column));
                let bits = std::mem::transmute::<__m256bh, __m256i>(rounded);
                _mm256_mask_storeu_epi16(at.cast(), mask, bits);
            }
        }
    }
}

/// Stores `all` pairs of an element of one row and the element below it, in the next row; zeros for all but the first
/// `count`.
///
/// # Safety
/// The machine has AVX-512. `count` elements are behind both rows and `all` pairs behind `to`.
#[target_feature(enable = "avx512f,avx512vl,avx512bw")]
pub(super) unsafe fn interleave(rows: [*const u16; 2], [count, all]: [usize; 2], to: *mut i32) {
    for part in (0..all).step_by(16) {
        let there = lanes(0, count.saturating_sub(part));
        // SAFETY: the masks leave out what is beyond the rows and the pairs.
        unsafe {
            let upper = _mm256_maskz_loadu_epi16(there, rows[0].wrapping_add(part).cast());
            let lower = _mm256_maskz_loadu_epi16(there, rows[1].wrapping_add(part).cast());
            let (low, high) = (_mm512_cvtepu16_epi32(upper), _mm512_cvtepu16_epi32(lower));
            let pairs = _mm512_or_si512(low, _mm512_slli_epi32::<16>(high));
            _mm512_mask_storeu_epi32(to.add(part), lanes(0, all - part), pairs);
        }
    }
}

/// Stores 16 units of 32 bits of each of `rows <= 16` rows as 16 groups of `all` units. The groups have a stride of `width`
/// units; units of missing rows are zero.
///
/// # Safety
/// The machine has AVX-512F. `from` points at `rows` rows of 16 units with a stride of `stride` bytes, and `to` at 16 groups.
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn transpose(
    from: *const u8,
    stride: usize,
    [rows, all]: [usize; 2],
    to: *mut i32,
    width: usize,
) {
    // SAFETY: the caller has the rows.
    let groups = unsafe { transposed(from, stride, rows) };
    let mask = lanes(0, all);
    for (i, group) in groups.iter().enumerate() {
        // SAFETY: the caller has this group; the mask leaves out what is beyond it.
        unsafe { _mm512_mask_storeu_epi32(to.add(i * width), mask, *group) };
    }
}

/// Returns 16 units of 32 bits of each of `rows <= 16` rows, by their place in the row, with zeros for missing rows.
///
/// # Safety
/// The machine has AVX-512F. `from` points at `rows` rows of 16 units with a stride of `stride` bytes.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn transposed(from: *const u8, stride: usize, rows: usize) -> [__m512i; 16] {
    // SAFETY: the caller upholds it. The rows are kept in registers where their number is a constant, as for a panel of
    // columns and for one of rows.
    unsafe {
        match rows {
            16 => exchanged(loaded(from, stride, 16)),
            13 => exchanged(loaded(from, stride, 13)),
            _ => exchanged(loaded(from, stride, rows)),
        }
    }
}

/// Rows, with zeros for those that there are not.
///
/// # Safety
/// As [`transposed`].
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn loaded(from: *const u8, stride: usize, rows: usize) -> [__m512i; 16] {
    let mut r = [_mm512_setzero_si512(); 16];
    for (i, row) in r.iter_mut().enumerate().take(rows) {
        // SAFETY: the caller has this row.
        *row = unsafe { _mm512_loadu_si512(from.add(i * stride).cast()) };
    }
    r
}

/// Rows for columns.
#[inline]
#[target_feature(enable = "avx512f")]
fn exchanged(mut r: [__m512i; 16]) -> [__m512i; 16] {
    let mut t = [_mm512_setzero_si512(); 16];
    for i in 0..8 {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    for i in 0..4 {
        for half in 0..2 {
            let (low, high) = (t[4 * i + half], t[4 * i + 2 + half]);
            r[4 * i + 2 * half] = _mm512_unpacklo_epi64(low, high);
            r[4 * i + 2 * half + 1] = _mm512_unpackhi_epi64(low, high);
        }
    }
    for i in 0..4 {
        for half in 0..2 {
            let (low, high) = (r[8 * half + i], r[8 * half + 4 + i]);
            t[8 * half + i] = _mm512_shuffle_i32x4::<0x88>(low, high);
            t[8 * half + 4 + i] = _mm512_shuffle_i32x4::<0xdd>(low, high);
        }
    }
    for i in 0..8 {
        r[i] = _mm512_shuffle_i32x4::<0x88>(t[i], t[8 + i]);
        r[8 + i] = _mm512_shuffle_i32x4::<0xdd>(t[i], t[8 + i]);
    }
    r
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::cpu::product::Features;
    use crate::tensor::DType;

    /// Ties, all exponents, subnormal numbers, infinities and NaN of both signs, with lower halves around a half.
    fn numbers() -> Vec<f32> {
        let lower = [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff];
        (0..=u16::MAX)
            .step_by(61)
            .chain([0x7f80, 0xff80, 0x7fff, 0xffff, 0x7f7f, 1, 0x8000])
            .flat_map(|upper| lower.map(|low| f32::from_bits(u32::from(upper) << 16 | low)))
            .collect()
    }

    #[test]
    fn a_mirrored_tile_is_rounded_as_every_other() {
        if !Features::detect(DType::F32).avx512_bf16 {
            return;
        }
        let numbers = numbers();
        for (tile, [rows, cols]) in
            numbers.chunks_exact(16 * 32).zip([[13, 32], [16, 32], [5, 17]].iter().cycle())
        {
            let to = Mirror { rows: *rows, cols: *cols, below: -cols.cast_signed(), stride: 16 };
            let mut out = [bf16::from_bits(7); 16 * 32];
            // SAFETY: the machine has AVX-512; the tile has 16 rows of 32 sums, `out` 32 rows of 16.
            unsafe { mirror_bf16(tile.as_ptr(), 32, &to, out.as_mut_ptr()) };
            for (place, found) in out.iter().enumerate() {
                let (j, i) = (place / 16, place % 16);
                let inside = i < *rows && j < *cols;
                let sum = tile[i * 32 + j];
                let normal = if sum.is_subnormal() { 0.0 * sum } else { sum };
                let expected = if inside { bf16::narrow(normal) } else { bf16::from_bits(7) };
                let are_nan = inside && sum.is_nan() && found.is_nan();
                assert!(are_nan || found.to_bits() == expected.to_bits(), "{sum:?} {i} {j}: {found:?}");
            }
        }
    }
}
