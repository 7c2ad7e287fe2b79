//! States of one byte: encoding and decoding, and the code book of numbers of either sign, the dynamic one of Dettmers et al.
//! (2022, arXiv:2110.02861). That of numbers that are not negative is in `positive.rs`.
//!
//! A block is stored as its largest absolute value, its scale, and a code for each element: that of an entry of the code
//! book next to `(x·s)·(1 / (scale·s))`, in float32, products and quotient rounded one by one, with `s` a power of two
//! that keeps them normal. All is fixed but the way of the search, so that another machine finds the same codes.
//!
//! The signed book has -e, 0 and e for e in decade i = 0..6 (2ⁱ entries each), and 1. Entry j of a decade is the middle of
//! part j of [0.1, 1] in equal parts, times 10^(i-6). The nearest entry is taken, of two that are equally near the one
//! nearer to 0, so that the codes of -x mirror those of x. A scale that is not finite makes its whole block NaN.

#[cfg(all(target_arch = "x86_64", not(miri)))]
use super::search::{Tables, decode, search};
use super::{Real, TILE, positive, rounding};
use crate::spec::storage::MOST_BLOCK;
use crate::tensor::{DType, Encoding, FlatView, FlatViewMut, RoundedFrom};

/// Decades of a code book.
pub(in crate::kernels) const DECADES: usize = 7;
/// 10^(i-6).
const POWERS: [f64; DECADES] = [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0];
/// 1.5·2²³: added to a float32 of less than 2²², it leaves the nearest integer in the lowest bits.
const TO_INTEGER: f32 = 12_582_912.0;
/// Distance to a bound, in entries, up to which the fast search is in doubt: its own error is below 4e-5.
pub(in crate::kernels) const DOUBT: f32 = 5e-5;

/// Number of the entry 0.
const ZERO: u8 = 127;

/// The code book of numbers of either sign and what finds an entry in it.
pub(in crate::kernels) struct Book {
    /// Entries in ascending order.
    values: [f32; 256],
    /// The largest float32 that is at most the middle of two neighbours: above 0, between decades, below 1.
    pub(super) bounds: [f32; DECADES + 1],
    /// For what lies above the bound of the same number: entry `round(factor·a + shift)`, counted from 0.
    pub(super) lines: [(f32, f32); DECADES + 1],
}

static BOOK: Book = Book::new();
#[cfg(all(target_arch = "x86_64", not(miri)))]
static TABLES: Tables = Tables::new(&BOOK);

impl Book {
    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_precision_loss,
        clippy::cast_sign_loss,
        clippy::cast_lossless
    )] // small numbers, rounded on purpose
    const fn new() -> Self {
        let zero = ZERO as usize;
        let mut values = [0.0; 256];
        let mut lines = [(0.0, 0.0); DECADES + 1];
        let mut first = [0; DECADES + 1];
        let mut next = zero + 1;
        let mut i = 0;
        while i < DECADES {
            let count = 1_usize << i;
            lines[i].0 = (count as f64 / (0.9 * POWERS[i])) as f32;
            lines[i].1 = (count as f64 - count as f64 / 9.0 - 0.5) as f32;
            first[i] = next;
            let mut j = 0;
            while j < count {
                let value = (POWERS[i] * (0.1 + 0.9 * (j as f64 + 0.5) / count as f64)) as f32;
                values[next] = value;
                values[2 * zero - next] = -value;
                (next, j) = (next + 1, j + 1);
            }
            i += 1;
        }
        (values[255], first[DECADES]) = (1.0, 255);
        lines[DECADES].1 = (1_usize << DECADES) as f32;
        let mut bounds = [0.0; DECADES + 1];
        let mut k = 0;
        while k <= DECADES {
            let middle = f64::midpoint(values[first[k] - 1] as f64, values[first[k]] as f64);
            let near = middle as f32;
            bounds[k] = if near as f64 <= middle { near } else { near.next_down() };
            k += 1;
        }
        Self { values, bounds, lines }
    }

    /// The nearest entry to a number, by the definition.
    fn nearest(&self, q: f32) -> u8 {
        let (zero, negative) = (usize::from(ZERO), q < 0.0);
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
pub(in crate::kernels) fn book(dtype: DType) -> (&'static [f32; 256], u8) {
    if dtype == DType::UQ8 { (&positive::VALUES, 0) } else { (&BOOK.values, ZERO) }
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

/// The factors by which the numbers of a block become those of the code book; none where there is nothing to tell apart.
#[inline(always)]
#[allow(clippy::inline_always)] // inside its caller's instruction set
fn factors(scale: f32) -> Option<(f32, f32)> {
    let power = shift(scale);
    (scale > 0.0 && scale.is_finite()).then(|| (power, 1.0 / (scale * power)))
}

/// The codes of numbers that are not negative: rounded at random, or to the nearest.
#[inline(always)]
#[allow(clippy::inline_always)] // inside its caller's instruction set
fn unsigned<C: Real>(values: &[C], factors: (f32, f32), from: Option<RoundedFrom<'_>>, codes: &mut [u8]) {
    let mut random = [1 << 15; MOST_BLOCK];
    if let Some(from) = from {
        rounding::fill(from, &mut random[..codes.len()]);
    }
    positive::encode(values, factors, &random, codes);
}

/// The codes of numbers of either sign.
#[inline(always)]
#[allow(clippy::inline_always)] // inside its caller's instruction set
fn signed<C: Real>(values: &[C], (power, inverse): (f32, f32), codes: &mut [u8]) {
    let Book { bounds, lines, .. } = &BOOK;
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    if let Some(values) = C::as_f32(values) {
        let again = |x: &[f32], codes: &mut [u8]| refine(x, power, inverse, codes);
        if search(&BOOK, &TABLES, values, (power, inverse), codes, again) {
            return;
        }
    }
    let mut doubt = 0_u32;
    for (code, x) in codes.iter_mut().zip(values) {
        let q = (x.to_f32() * power) * inverse;
        let a = q.abs();
        let (mut factor, mut add) = (0.0, 0.0);
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
        // -1 has no entry of its own.
        let number = if q < 0.0 { 127 - number.min(127) } else { 127 + number };
        #[allow(clippy::cast_possible_truncation)] // at most 255
        {
            *code = number as u8;
        }
    }
    if doubt != 0 {
        refine(values, power, inverse, codes);
    }
}

/// Searches again for those codes whose number is next to a middle of two entries.
#[cold]
#[inline(never)]
fn refine<C: Real>(values: &[C], power: f32, inverse: f32, codes: &mut [u8]) {
    let book = &BOOK;
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
    let (values, _) = book(from.dtype());
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
pub(in crate::kernels) fn store<C: Real>(numbers: &[C], to: &mut FlatViewMut<'_>) {
    let dtype = to.dtype();
    let Some(mut stored) = to.coded() else { return };
    let mut at = 0;
    while at < stored.len() {
        let from = stored.rounded_from(at);
        let Some((codes, scale)) = stored.block(at) else {
            debug_assert!(false, "a part of a block was stored");
            return;
        };
        let values = &numbers[at..at + codes.len()];
        at += codes.len();
        *scale = largest(values);
        match factors(*scale) {
            None => codes.fill(book(dtype).1),
            Some(factors) if dtype == DType::Q8 => signed(values, factors, codes),
            Some(factors) => unsigned(values, factors, from, codes),
        }
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
