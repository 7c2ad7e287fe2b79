//! Tiles: the innermost loop of a product, one for each element type and instruction set.
//!
//! A tile of `ROWS x COLS` sums stays in registers while the whole inner dimension passes by.

#[allow(clippy::wildcard_imports)] // nearly forty names
use std::arch::x86_64::*;

use half::bf16;

use super::super::Real;
use super::pack::{Rows, panel};
use super::tiled::{Call, Mirror};
use crate::batch::Element;

/// The largest tile.
pub(super) const MOST: usize = 13 * 32;

/// An element of matrices and the type in which its products are summed.
pub(super) trait Number: Element + Default {
    type Wide: Real;
    fn widen(self) -> Self::Wide;
    fn narrow(x: Self::Wide) -> Self;
}

impl Number for f32 {
    type Wide = Self;
    fn widen(self) -> Self {
        self
    }
    fn narrow(x: Self) -> Self {
        x
    }
}

impl Number for f64 {
    type Wide = Self;
    fn widen(self) -> Self {
        self
    }
    fn narrow(x: Self) -> Self {
        x
    }
}

impl Number for bf16 {
    type Wide = f32;
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }
    /// To the nearest, ties to even, without a branch.
    #[allow(clippy::cast_possible_truncation)] // the upper half
    fn narrow(x: f32) -> Self {
        let bits = x.to_bits();
        let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
        Self::from_bits(if x.is_nan() { 0x7fc0 } else { rounded as u16 })
    }
}

/// A way to compute a tile.
pub(super) trait Tile: Sized {
    type Element: Number;
    const ROWS: usize;
    const COLS: usize;
    /// Neighbours along the inner dimension that lie together in a panel.
    const DEPTH: usize;
    /// Whether rows of 16 units of 32 bits are transposed in registers.
    const TRANSPOSES: bool;

    /// `out[i][j] = Σ a[p][i] b[p][j]` over `steps` groups of `DEPTH` products.
    ///
    /// # Safety
    /// The machine has the instruction set; `a`, `b` and `out` point at `steps * ROWS * DEPTH`, `steps * COLS * DEPTH`
    /// and `ROWS * COLS` elements.
    unsafe fn multiply(
        steps: usize,
        a: *const Self::Element,
        b: *const Self::Element,
        out: *mut <Self::Element as Number>::Wide,
    );

    /// Writes elements `range` of the panel of rows, or of columns where not `left`, that begins with row `start`.
    ///
    /// # Safety
    /// As [`panel`].
    unsafe fn pack(
        left: bool,
        x: &Rows<Self::Element>,
        start: usize,
        range: [usize; 2],
        to: *mut Self::Element,
    );

    /// Writes column `j` of a tile to row `j` behind `out`.
    ///
    /// # Safety
    /// As [`Call::task`]; `sums` is a tile.
    unsafe fn mirror(sums: *const <Self::Element as Number>::Wide, to: &Mirror, out: *mut Self::Element);

    /// One task of a product.
    ///
    /// # Safety
    /// As [`Call::task`].
    unsafe fn task(call: &Call<'_, Self::Element>, task: usize);
}

/// The same bits as pairs of bfloat16.
#[inline]
#[target_feature(enable = "avx512f")]
fn pairs(x: __m512i) -> __m512bh {
    // SAFETY: both are 512 bits without a value that is not allowed.
    unsafe { std::mem::transmute::<__m512i, __m512bh>(x) }
}

/// How far ahead of its use the panel of columns is fetched, in steps.
const AHEAD: usize = 12;

/// A tile of two vectors by `$rows`: every row's element is broadcast and multiplied with both.
macro_rules! tile {
    ($name:ident, $element:ty, $wide:ty, $rows:literal, $lanes:literal, $depth:literal, $transposes:literal,
     $features:literal, $mirror:ident, $zero:expr, $load:expr, $broadcast:expr, $fused:expr, $store:expr) => {
        pub(super) struct $name;

        impl Tile for $name {
            type Element = $element;
            const ROWS: usize = $rows;
            const COLS: usize = 2 * $lanes;
            const DEPTH: usize = $depth;
            const TRANSPOSES: bool = $transposes;

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
    |p, x| _mm512_storeu_ps(p, x)
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

/// Element by element.
///
/// # Safety
/// As [`Tile::mirror`].
#[inline(always)]
#[allow(clippy::inline_always)] // must be compiled inside its caller's instruction set
unsafe fn mirror_any<E: Number>(sums: *const E::Wide, width: usize, to: &Mirror, out: *mut E) {
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
unsafe fn mirror_f32(sums: *const f32, width: usize, to: &Mirror, out: *mut f32) {
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
unsafe fn mirror_bf16(sums: *const f32, width: usize, to: &Mirror, out: *mut bf16) {
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
