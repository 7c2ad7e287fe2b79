//! Tiles: the innermost loop of a product, one for each element type and instruction set.
//!
//! A tile of `ROWS x COLS` sums stays in registers while the whole inner dimension passes by.

#[allow(clippy::wildcard_imports)] // nearly forty names
use std::arch::x86_64::*;

use half::bf16;

use super::pack::panel;
use super::transpose::{mirror_any, mirror_bf16, mirror_f32};
use super::types::{Call, Mirror, Rows, Tile};

/// The same bits as pairs of bfloat16.
#[inline]
#[target_feature(enable = "avx512f")]
fn pairs(x: __m512i) -> __m512bh {
    // SAFETY: both are 512 bits without a value that is not allowed.
    unsafe { std::mem::transmute::<__m512i, __m512bh>(x) }
}

/// Distance from its use at which the panel of columns is fetched, in steps.
const AHEAD: usize = 12;

/// A tile of two vectors by `$rows`: every row's element is broadcast and multiplied with both.
macro_rules! tile {
    ($name:ident, $element:ty, $wide:ty, $rows:literal, $lanes:literal, $depth:literal, $transposes:literal,
     $features:literal, $mirror:ident, $zero:expr, $load:expr, $broadcast:expr, $fused:expr, $store:expr
     $(, $own:item)?) => {
        pub(super) struct $name;

        impl Tile for $name {
            type Element = $element;
            const ROWS: usize = $rows;
            const COLS: usize = 2 * $lanes;
            const DEPTH: usize = $depth;
            const TRANSPOSES: bool = $transposes;
            $( $own )?

            /// # Safety
            /// As the trait says.
            #[target_feature(enable = $features)]
            unsafe fn multiply(
                steps: usize,
                mut a: *const $element,
                mut b: *const $element,
                out: *mut $wide,
            ) {
                // SAFETY: the caller has the features, and as many elements behind the pointers as are read and written.
                // A prefetch may go beyond the end: it never faults.
                unsafe {
                    let mut sums = [[$zero; 2]; $rows];
                    for _ in 0..steps {
                        let columns = [$load(b), $load(b.add($lanes * $depth))];
                        let ahead = b.wrapping_add(AHEAD * 2 * $lanes * $depth);
                        _mm_prefetch::<_MM_HINT_T0>(ahead.cast());
                        _mm_prefetch::<_MM_HINT_T0>(ahead.wrapping_add($lanes * $depth).cast());
                        for i in 0..$rows {
                            let row = $broadcast(a.add(i * $depth));
                            sums[i][0] = $fused(row, columns[0], sums[i][0]);
                            sums[i][1] = $fused(row, columns[1], sums[i][1]);
                        }
                        a = a.add($rows * $depth);
                        b = b.add(2 * $lanes * $depth);
                    }
                    for i in 0..$rows {
                        $store(out.add(2 * $lanes * i), sums[i][0]);
                        $store(out.add(2 * $lanes * i + $lanes), sums[i][1]);
                    }
                }
            }

            /// # Safety
            /// As the trait says.
            #[target_feature(enable = $features)]
            unsafe fn pack(
                left: bool,
                x: &Rows<$element>,
                start: usize,
                range: [usize; 2],
                to: *mut $element,
            ) {
                // SAFETY: the caller's.
                unsafe {
                    if left {
                        panel::<Self, { $rows }>(x, start, range, to);
                    } else {
                        panel::<Self, { 2 * $lanes }>(x, start, range, to);
                    }
                }
            }

            /// # Safety
            /// As the trait says.
            #[target_feature(enable = $features)]
            unsafe fn mirror(sums: *const $wide, to: &Mirror, out: *mut $element) {
                // SAFETY: the caller's.
                unsafe { $mirror(sums, 2 * $lanes, to, out) };
            }

            /// # Safety
            /// As the trait says.
            #[target_feature(enable = $features)]
            unsafe fn task(call: &Call<'_, $element>, task: usize) {
                // SAFETY: the caller's.
                unsafe { call.task::<Self>(task) };
            }
        }
    };
}

// 13 rows of two vectors are 26 of the 32 registers, and 64, 128, 256, ... rows leave little of the last tile empty.
tile!(
    F32Avx512,
    f32,
    f32,
    13,
    16,
    1,
    true,
    "avx512f,avx512vl,avx512bw,avx512dq",
    mirror_f32,
    _mm512_setzero_ps(),
    |p| _mm512_loadu_ps(p),
    |p: *const f32| _mm512_set1_ps(*p),
    |a, b, c| _mm512_fmadd_ps(a, b, c),
    |p, x| _mm512_storeu_ps(p, x)
);
tile!(
    F64Avx512,
    f64,
    f64,
    13,
    8,
    1,
    false,
    "avx512f,avx512vl,avx512bw,avx512dq",
    mirror_any,
    _mm512_setzero_pd(),
    |p| _mm512_loadu_pd(p),
    |p: *const f64| _mm512_set1_pd(*p),
    |a, b, c| _mm512_fmadd_pd(a, b, c),
    |p, x| _mm512_storeu_pd(p, x)
);
// Pairs of neighbours along the inner dimension are multiplied and summed at once.
tile!(
    Bf16Avx512,
    bf16,
    f32,
    13,
    16,
    2,
    true,
    "avx512f,avx512vl,avx512bw,avx512dq,avx512bf16",
    mirror_bf16,
    _mm512_setzero_ps(),
    |p: *const bf16| _mm512_loadu_si512(p.cast()),
    |p: *const bf16| _mm512_set1_epi32(p.cast::<i32>().read_unaligned()),
    |a: __m512i, b: __m512i, c| _mm512_dpbf16_ps(c, pairs(a), pairs(b)),
    |p, x| _mm512_storeu_ps(p, x),
    const ROUNDS: bool = true;
);
tile!(
    F32Avx2,
    f32,
    f32,
    6,
    8,
    1,
    false,
    "avx2,fma",
    mirror_any,
    _mm256_setzero_ps(),
    |p| _mm256_loadu_ps(p),
    |p: *const f32| _mm256_set1_ps(*p),
    |a, b, c| _mm256_fmadd_ps(a, b, c),
    |p, x| _mm256_storeu_ps(p, x)
);
tile!(
    F64Avx2,
    f64,
    f64,
    6,
    4,
    1,
    false,
    "avx2,fma",
    mirror_any,
    _mm256_setzero_pd(),
    |p| _mm256_loadu_pd(p),
    |p: *const f64| _mm256_set1_pd(*p),
    |a, b, c| _mm256_fmadd_pd(a, b, c),
    |p, x| _mm256_storeu_pd(p, x)
);
