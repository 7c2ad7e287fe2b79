//! Tiles and panels transposed in registers.

#[allow(clippy::wildcard_imports)] // seventeen names
use std::arch::x86_64::*;

use half::bf16;

use super::tiled::Mirror;
use super::tiles::Number;

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

/// The same, rounded.
///
/// # Safety
/// As [`Tile::mirror`], on a machine with AVX-512.
#[target_feature(enable = "avx512f,avx512vl,avx512bw")]
pub(super) unsafe fn mirror_bf16(sums: *const f32, width: usize, to: &Mirror, out: *mut bf16) {
    let mut wide = [0.0_f32; 16];
    let mut rounded = [bf16::default(); 16];
    for part in (0..to.cols).step_by(16) {
        // SAFETY: as in `mirror_f32`.
        unsafe {
            let columns = transposed(sums.add(part).cast(), width * 4, to.rows);
            for (j, column) in columns.iter().enumerate().take(to.cols - part) {
                _mm512_storeu_ps(wide.as_mut_ptr(), _mm512_castsi512_ps(*column));
                rounded.iter_mut().zip(&wide).for_each(|(to, x)| *to = bf16::narrow(*x));
                let mask = lanes(to.first(part + j), to.rows);
                let at = out.wrapping_add((part + j) * to.stride);
                _mm256_mask_storeu_epi16(at.cast(), mask, _mm256_loadu_si256(rounded.as_ptr().cast()));
            }
        }
    }
}

/// Stores 16 units of 32 bits of each of `rows <= 16` rows as 16 groups of `all` units, `width` units apart; units of rows
/// that there are not are zero.
///
/// # Safety
/// The machine has AVX-512F. `from` points at `rows` rows of 16 units, `stride` bytes apart, and `to` at 16 groups.
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

/// 16 units of 32 bits of each of `rows <= 16` rows, by their place in the row; zero for rows that there are not.
///
/// # Safety
/// The machine has AVX-512F. `from` points at `rows` rows of 16 units, `stride` bytes apart.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn transposed(from: *const u8, stride: usize, rows: usize) -> [__m512i; 16] {
    let mut r = [_mm512_setzero_si512(); 16];
    for (i, row) in r.iter_mut().enumerate().take(rows) {
        // SAFETY: the caller has this row.
        *row = unsafe { _mm512_loadu_si512(from.add(i * stride).cast()) };
    }
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
