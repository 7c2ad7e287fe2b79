//! States of one byte: the dynamic code books (Dettmers et al. 2022, arXiv:2110.02861), encoding and decoding.
//!
//! A block is stored as its largest absolute value, its scale, and a code for each element: the nearest entry of the
//! code book to `(x·s)·(1 / (scale·s))`, in float32, products and quotient rounded one by one, with `s` a power of two
//! that keeps them normal. Of two entries that are equally near the one nearer to 0 is taken, so that the codes of -x
//! mirror those of x. All is fixed but the way of the search, so that another machine finds the same codes.
//!
//! The signed book has -e, 0 and e for e in decade i = 0..6 (2ⁱ entries each), and 1; the unsigned one 0, twice as many e
//! in each decade, and 1. Entry j of a decade is the middle of part j of [0.1, 1] in equal parts, times 10^(i-6).
//! A scale that is not finite makes its whole block NaN.

#[cfg(all(target_arch = "x86_64", not(miri)))]
use super::search::{Tables, decode, search};
use super::{Real, TILE};
use crate::spec::storage::MOST_BLOCK;
use crate::tensor::{DType, Encoding, FlatView, FlatViewMut};

/// Decades of a code book.
pub(in crate::kernels) const DECADES: usize = 7;
/// 10^(i-6).
const POWERS: [f64; DECADES] = [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0];
/// 1.5·2²³: added to a float32 of less than 2²², it leaves the nearest integer in the lowest bits.
const TO_INTEGER: f32 = 12_582_912.0;
/// Distance to a bound, in entries, up to which the fast search is in doubt: its own error is below 4e-5.
pub(in crate::kernels) const DOUBT: f32 = 5e-5;

/// A code book and what finds an entry in it.
pub(in crate::kernels) struct Book {
    /// Entries in ascending order.
    values: [f32; 256],
    /// Number of the entry 0.
    zero: u32,
    /// The largest float32 that is at most the middle of two neighbours: above 0, between decades, below 1.
    pub(super) bounds: [f32; DECADES + 1],
    /// For what lies above the bound of the same number: entry `round(factor·a + shift)`, counted from `base`.
    pub(super) lines: [(f32, f32); DECADES + 1],
    /// Start of the count of entries: an entry's count minus this is its distance from 0.
    base: u32,
}

static SIGNED: Book = Book::new(true);
static UNSIGNED: Book = Book::new(false);
#[cfg(all(target_arch = "x86_64", not(miri)))]
static TABLES: [Tables; 2] = [Tables::new(&SIGNED), Tables::new(&UNSIGNED)];

impl Book {
    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_precision_loss,
        clippy::cast_sign_loss,
        clippy::cast_lossless
    )] // small numbers, rounded on purpose
    const fn new(signed: bool) -> Self {
        let zero = if signed { 127 } else { 0 };
        let mut values = [0.0; 256];
        let mut lines = [(0.0, 0.0); DECADES + 1];
        let mut first = [0; DECADES + 1];
        // Counted so that the entries of a decade begin at a power of two.
        let base = if signed { 0 } else { 1 };
        let mut next = zero + 1;
        let mut i = 0;
        while i < DECADES {
            let count = 1_usize << (i + base);
            lines[i].0 = (count as f64 / (0.9 * POWERS[i])) as f32;
            lines[i].1 = (count as f64 - count as f64 / 9.0 - 0.5) as f32;
            first[i] = next;
            let mut j = 0;
            while j < count {
                let value = (POWERS[i] * (0.1 + 0.9 * (j as f64 + 0.5) / count as f64)) as f32;
                values[next] = value;
                if signed {
                    values[2 * zero - next] = -value;
                }
                (next, j) = (next + 1, j + 1);
            }
            i += 1;
        }
        (values[255], first[DECADES]) = (1.0, 255);
        lines[DECADES].1 = (1_usize << (DECADES + base)) as f32;
        let mut bounds = [0.0; DECADES + 1];
        let mut k = 0;
        while k <= DECADES {
            let middle = f64::midpoint(values[first[k] - 1] as f64, values[first[k]] as f64);
            let near = middle as f32;
            bounds[k] = if near as f64 <= middle { near } else { near.next_down() };
            k += 1;
        }
        Self { values, zero: zero as u32, bounds, lines, base: base as u32 }
    }

    /// Count that is found below all bounds.
    #[allow(clippy::cast_precision_loss)] // 0 or 1
    pub(in crate::kernels) const fn none(&self) -> f32 {
        self.base as f32
    }

    fn of(dtype: DType) -> &'static Self {
        if dtype == DType::UQ8 { &UNSIGNED } else { &SIGNED }
    }

    /// The nearest entry to a number, by the definition.
    fn nearest(&self, q: f32) -> u8 {
        let (zero, negative) = (self.zero as usize, q < 0.0);
        let most = if negative { zero } else { 255 - zero };
        let a = f64::from(q.abs());
        // Among the entries on q's side of 0, counted from there.
        let (mut low, mut high) = (0, most);
        while low < high {
            let at = usize::midpoint(low, high);
            let [own, next] = [at, at + 1].map(|n| f64::from(self.values[zero + n]));
            (low, high) = if a > f64::midpoint(own, next) { (at + 1, high) } else { (low, at) };
        }
        #[allow(clippy::cast_possible_truncation)] // at most 255
        let code = if negative { zero - low } else { zero + low } as u8;
        code
    }
}

/// The entries of the code book of a type in ascending order, and the number of the entry 0.
pub(in crate::kernels) fn book(dtype: DType) -> ([f32; 256], i64) {
    let book = Book::of(dtype);
    (book.values, i64::from(book.zero))
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

/// Encodes one block; returns its scale.
#[inline(always)]
#[allow(clippy::inline_always)] // inside its caller's instruction set
fn encode<C: Real, const SIGN: bool>(values: &[C], codes: &mut [u8]) -> f32 {
    let book = if SIGN { &SIGNED } else { &UNSIGNED };
    let scale = largest(values);
    #[allow(clippy::cast_possible_truncation)] // at most 127
    let zero = book.zero as u8;
    if scale == 0.0 || !scale.is_finite() {
        codes.fill(zero);
        return scale;
    }
    let power = shift(scale);
    let inverse = 1.0 / (scale * power);
    let Book { bounds, lines, base, .. } = book;
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    if let Some(values) = C::as_f32(values) {
        let tables = if SIGN { &TABLES[0] } else { &TABLES[1] };
        let again = |x: &[f32], codes: &mut [u8]| refine(book, x, power, inverse, codes);
        if search::<SIGN>(book, tables, values, (power, inverse), codes, again) {
            return scale;
        }
    }
    let mut doubt = 0_u32;
    for (code, x) in codes.iter_mut().zip(values) {
        let q = (x.to_f32() * power) * inverse;
        let a = if SIGN { q.abs() } else { q };
        let (mut factor, mut add) = (0.0, book.none());
        for (bound, line) in bounds.iter().zip(lines) {
            let above = a > *bound;
            factor = if above { line.0 } else { factor };
            add = if above { line.1 } else { add };
        }
        let found = factor * a + add;
        // What lies between a decade's end and the bound above it belongs to the decade's last entry.
        let last = add * 2.25 + 0.125;
        let found = if found > last { last } else { found };
        let (sum, whole) = (found + TO_INTEGER, found + TO_INTEGER - TO_INTEGER);
        doubt |= u32::from((found - whole).abs() > 0.5 - DOUBT);
        let number = sum.to_bits() & 0x1ff;
        let number = if SIGN {
            // -1 has no entry of its own.
            if q < 0.0 { 127 - number.min(127) } else { 127 + number }
        } else {
            number - base
        };
        #[allow(clippy::cast_possible_truncation)] // at most 255
        {
            *code = number as u8;
        }
    }
    if doubt != 0 {
        refine(book, values, power, inverse, codes);
    }
    scale
}

/// Searches again for those codes whose number is next to a middle of two entries.
#[cold]
#[inline(never)]
fn refine<C: Real>(book: &Book, values: &[C], power: f32, inverse: f32, codes: &mut [u8]) {
    for (code, x) in codes.iter_mut().zip(values) {
        let q = (x.to_f32() * power) * inverse;
        let at = usize::from(*code);
        let (own, width) = (book.values[at], 2.5e-3 * q.abs());
        let near = |other: Option<&f32>| other.is_some_and(|v| (f32::midpoint(own, *v) - q).abs() <= width);
        if near(book.values.get(at + 1)) || near(at.checked_sub(1).and_then(|at| book.values.get(at))) {
            *code = book.nearest(q);
        }
    }
}

/// Decodes elements of any part of the blocks. Codes without an encoding decode to NaN: they have no meaning.
#[inline(always)]
#[allow(clippy::inline_always)] // inside its caller's instruction set
pub(in crate::kernels) fn load<C: Real>(from: &FlatView<'_>, to: &mut [C]) {
    let Some(stored) = from.coded() else {
        return to.fill(C::from_f32(f32::NAN));
    };
    let values = &Book::of(from.dtype()).values;
    let mut at = 0;
    while at < stored.codes.len() {
        let (codes, scale) = stored.block(at);
        let (begin, end) = (at, at + codes.len());
        at = end;
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        if let Some(to) = C::as_f32_mut(&mut to[begin..end])
            && decode(values, scale, codes, to)
        {
            continue;
        }
        for (code, y) in codes.iter().zip(&mut to[begin..end]) {
            *y = C::from_f32(values[usize::from(*code)] * scale);
        }
    }
}

/// Encodes elements that are whole blocks. Others keep what they have: nobody else may know their neighbours.
#[inline(always)]
#[allow(clippy::inline_always)] // inside its caller's instruction set
pub(in crate::kernels) fn store<C: Real>(from: &[C], to: &mut FlatViewMut<'_>) {
    let is_signed = to.dtype() == DType::Q8;
    let Some(mut stored) = to.coded() else { return };
    let mut at = 0;
    while at < stored.len() {
        let Some((codes, scale)) = stored.block(at) else {
            debug_assert!(false, "a part of a block was stored");
            return;
        };
        let values = &from[at..at + codes.len()];
        at += codes.len();
        *scale = if is_signed { encode::<C, true>(values, codes) } else { encode::<C, false>(values, codes) };
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
