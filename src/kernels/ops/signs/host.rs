//! Sparse sign matrices from counters, and products with them (Cohen, "Nearly tight oblivious subspace embeddings by trace
//! inequalities", SODA 2016).
//!
//! Ω `[d, s]` has up to eight entries in each row, 1 or -1: the columns are split into eight blocks of equal length to
//! one, and each has one of them, at a random place, but row i has it in column i if there is one: where there are as
//! many rows as columns none is empty. Row i is made of the blocks 2 i and 2 i + 1 of the generator.

use std::sync::{Mutex, PoisonError};

use crate::kernels::cpu::philox::philox;
use crate::kernels::cpu::{Real, isa};
use crate::tensor::{FlatView, FlatViewMut, MatrixViewMut};
use crate::threads;

/// Entries of a row that are not zero, if there are as many columns.
pub const NONZEROS: usize = 8;

/// Columns of a product that are added up together.
const WIDTH: usize = 16;
/// Rows that are prefetched ahead: their distance is too large for the hardware to do so.
const AHEAD: usize = 12;
/// Columns of a transposed matrix that are brought into order together.
const GROUP: usize = 8;

/// A sparse sign matrix.
#[derive(Clone, Debug)]
pub struct Signs {
    shape: [usize; 2],
    /// For each column the rows where it is 1, then those where it is -1.
    rows: Vec<u32>,
    /// End of each of these lists.
    ends: Vec<usize>,
}

impl Signs {
    /// `rows` rows of `cols` columns: those from row `first` on of all that belong to a stream ([`crate::kernels::cpu::philox::stream`]).
    #[must_use]
    pub fn new(shape @ [rows, cols]: [usize; 2], stream: [u32; 4], first: u64) -> Self {
        let starts = starts(cols);
        let lists = |row: u64| {
            let words = words(stream, first.wrapping_add(row));
            starts.windows(2).zip(words).map(move |(block, word)| list([block[0], block[1]], row, word))
        };
        let mut ends = vec![0; 2 * cols];
        (0..rows as u64).flat_map(lists).for_each(|list| ends[list] += 1);
        let mut before = 0;
        for end in &mut ends {
            (*end, before) = (before, before + *end);
        }
        let mut all = vec![0; before];
        for row in 0..u32::try_from(rows).unwrap_or(u32::MAX) {
            for list in lists(u64::from(row)) {
                all[ends[list]] = row;
                ends[list] += 1;
            }
        }
        Self { shape, rows: all, ends }
    }

    /// The rows where a column is 1, and those where it is -1.
    #[inline(always)]
    #[allow(clippy::inline_always)] // must be compiled inside its caller's instruction set
    fn of(&self, column: usize) -> [&[u32]; 2] {
        let end = |list: usize| if list == 0 { 0 } else { self.ends[list - 1] };
        let middle = self.ends[2 * column];
        [&self.rows[end(2 * column)..middle], &self.rows[middle..self.ends[2 * column + 1]]]
    }

    /// All entries of Ω, row by row, with zeros.
    pub fn write(&self, out: &mut [f64]) {
        out.fill(0.0);
        for column in 0..self.shape[1] {
            for (rows, sign) in self.of(column).into_iter().zip([1.0, -1.0]) {
                for &row in rows {
                    out[row as usize * self.shape[1] + column] = sign;
                }
            }
        }
    }

    /// `out = Ωᵀ A`, `[s, w]`, for `A` `[d, w]`, or `turned` its transpose, all float64.
    pub fn product(&self, out: FlatViewMut<'_>, a: &FlatView<'_>, turned: bool) {
        let [d, s] = self.shape;
        if s == 0 || a.is_empty() {
            return;
        }
        let w = a.len() / d;
        debug_assert_eq!(out.len(), s * w);
        let tasks = w.div_ceil(WIDTH);
        let slots = if a.len() < 1 << 14 { 1 } else { threads::get().min(tasks) };
        // One for each slot, which works on one task at a time.
        let tiles: Vec<_> = (0..slots).map(|_| Mutex::new(vec![Row([0.0; WIDTH]); d])).collect();
        let outs: Vec<_> = out.into_matrix(0, [s, w], w).into_col_groups(WIDTH).map(Mutex::new).collect();
        threads::share(slots, tasks, |slot, task| {
            let mut out = outs[task].lock().unwrap_or_else(PoisonError::into_inner);
            let mut tile = tiles[slot].lock().unwrap_or_else(PoisonError::into_inner);
            let columns = Columns { a: *a, turned, d, w, first: task * WIDTH, count: out.shape()[1] };
            isa::vectorised::<f64, _>(Part { signs: self, columns, tile: &mut tile, out: &mut out });
        });
    }
}

/// Elements of some columns of A in one of its rows.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Row([f64; WIDTH]);

/// Some columns of A.
struct Columns<'a> {
    a: FlatView<'a>,
    turned: bool,
    d: usize,
    w: usize,
    first: usize,
    count: usize,
}

impl Columns<'_> {
    /// Brings these columns of A into order.
    #[inline(always)]
    #[allow(clippy::inline_always)] // must be compiled inside its caller's instruction set
    fn load(&self, tile: &mut [Row]) {
        let Self { a, turned, d, w, first, count } = *self;
        if !turned {
            for (row, to) in tile.iter_mut().enumerate() {
                a.prefetch((row + AHEAD) * w + first, count);
                let from = a.part(row * w + first, count).slice::<f64>();
                to.0[..count].copy_from_slice(from);
            }
            return;
        }
        for group in (0..count).step_by(GROUP) {
            let line = |k: usize| a.part((first + group + k) * d, d).slice::<f64>();
            if count - group < GROUP {
                for k in 0..count - group {
                    tile.iter_mut().zip(line(k)).for_each(|(to, x)| to.0[group + k] = *x);
                }
                return;
            }
            let lines: [&[f64]; GROUP] = std::array::from_fn(line);
            for (row, to) in tile.iter_mut().enumerate() {
                for (to, line) in to.0[group..group + GROUP].iter_mut().zip(lines) {
                    *to = line[row];
                }
            }
        }
    }
}

/// Some columns of a product.
struct Part<'t, 'a> {
    signs: &'t Signs,
    columns: Columns<'a>,
    tile: &'t mut [Row],
    out: &'t mut MatrixViewMut<'a>,
}

impl isa::Work for Part<'_, '_> {
    type Out = ();

    #[inline(always)]
    #[allow(clippy::inline_always)] // must be compiled inside its caller's instruction set
    fn run<C: Real>(self) {
        let Self { signs, columns, tile, out } = self;
        columns.load(tile);
        for column in 0..signs.shape[1] {
            let [plus, minus] = signs.of(column);
            let (plus, minus) = (sum(tile, plus), sum(tile, minus));
            let mut row = out.row(column);
            for ((to, plus), minus) in row.slice_mut::<f64>().iter_mut().zip(plus).zip(minus) {
                *to = plus - minus;
            }
        }
    }
}

/// The sum of some rows, two at a time: one sum alone waits for each of its additions.
#[inline(always)]
#[allow(clippy::inline_always)] // inside its caller's instruction set
fn sum(tile: &[Row], rows: &[u32]) -> [f64; WIDTH] {
    let mut sums = [[0.0; WIDTH]; 2];
    let (pairs, rest) = rows.as_chunks::<2>();
    for pair in pairs {
        for (sum, &row) in sums.iter_mut().zip(pair) {
            let row = &tile[row as usize].0;
            for (sum, x) in sum.iter_mut().zip(row) {
                *sum += x;
            }
        }
    }
    for &row in rest {
        let row = &tile[row as usize].0;
        for (sum, x) in sums[0].iter_mut().zip(row) {
            *sum += x;
        }
    }
    let [mut all, second] = sums;
    for (sum, x) in all.iter_mut().zip(second) {
        *sum += x;
    }
    all
}

/// The first columns of the blocks that have an entry in each row, and the number of columns.
fn starts(cols: usize) -> Vec<usize> {
    let blocks = cols.min(NONZEROS);
    (0..=blocks).map(|block| (block * cols).checked_div(blocks).unwrap_or(0)).collect()
}

/// The random words of a row.
#[expect(clippy::cast_possible_truncation, reason = "the two words of a 64-bit number")]
fn words([key0, key1, high0, high1]: [u32; 4], row: u64) -> [u32; NONZEROS] {
    let mut words = [0; NONZEROS];
    for (four, half) in words.chunks_exact_mut(4).zip(0..) {
        let block = row.wrapping_mul(2).wrapping_add(half);
        four.copy_from_slice(&philox([block as u32, (block >> 32) as u32, high0, high1], [key0, key1]));
    }
    words
}

/// Twice the column between two where a row has its entry, plus 1 where that is -1: that of the row if it is there, else
/// the one that the upper bits of a word name, whose last bit is the sign.
fn list([first, end]: [usize; 2], row: u64, word: u32) -> usize {
    let own = usize::try_from(row).ok().filter(|row| (first..end).contains(row));
    let column = own.unwrap_or_else(|| first + ((u64::from(word) * (end - first) as u64) >> 32) as usize);
    2 * column + (word & 1) as usize
}

#[cfg(test)]
#[expect(clippy::cast_precision_loss, reason = "small counts")]
mod tests {
    use super::*;
    use crate::tensor::DType;

    const STREAM: [u32; 4] = [1, 2, 3, 4];

    fn dense(shape: [usize; 2], first: u64) -> Vec<f64> {
        let mut out = vec![f64::NAN; shape[0] * shape[1]];
        Signs::new(shape, STREAM, first).write(&mut out);
        out
    }

    #[test]
    fn each_block_of_columns_has_an_entry_in_each_row() {
        for cols in [1, 2, 7, 8, 9, 20, 144] {
            let omega = dense([500, cols], 0);
            let starts = starts(cols);
            for row in omega.chunks_exact(cols) {
                for block in starts.windows(2) {
                    let sizes = row[block[0]..block[1]].iter().map(|x| x.abs()).collect::<Vec<_>>();
                    assert!((sizes.iter().sum::<f64>() - 1.0).abs() < 1e-15, "{cols}: {sizes:?}");
                }
            }
            // Five standard errors of the sum of signs.
            let sum: f64 = omega.iter().sum();
            assert!(sum.abs() < 5.0 * (500.0 * cols.min(NONZEROS) as f64).sqrt(), "{cols}: {sum}");
            // Each column has the entry of its row. Places are even: each column of a block has its share of the rows, to five standard errors.
            for block in starts.windows(2) {
                let share = 1.0 / (block[1] - block[0]) as f64;
                for column in block[0]..block[1] {
                    let count: f64 = omega.iter().skip(column).step_by(cols).map(|x| x.abs()).sum();
                    assert!(omega[column * cols + column].abs() > 0.0, "{cols} {column}");
                    let error = 5.0 * (500.0 * share * (1.0 - share)).sqrt();
                    assert!((count - 500.0 * share).abs() <= error, "{cols} {column}: {count}");
                }
            }
        }
    }

    #[test]
    fn rows_beyond_the_columns_do_not_depend_on_the_matrix_start() {
        let whole = dense([80, 30], 7);
        for first in [0, 1, 17, 49] {
            let part = dense([80 - first, 30], 7 + first as u64);
            let rows = part[30 * 30..].iter().zip(&whole[(30 + first) * 30..]);
            assert!(rows.into_iter().all(|(a, b)| a.to_bits() == b.to_bits()));
        }
        assert!(dense([80, 30], 8).iter().zip(&whole).any(|(a, b)| a.to_bits() != b.to_bits()));
    }

    #[test]
    fn products_are_those_of_the_matrix_with_its_zeros() {
        for ([d, w], s) in [([5, 3], 4), ([70, 33], 20), ([130, 64], 9), ([64, 200], 1), ([300, 100], 24)] {
            let signs = Signs::new([d, s], STREAM, 3);
            let omega = dense([d, s], 3);
            let a: Vec<f64> = (0..d * w).map(|i| (i as f64 * 0.7).sin()).collect();
            let turned: Vec<f64> = (0..d * w).map(|i| a[i % d * w + i / d]).collect();
            for (from, turned) in [(a.clone(), false), (turned, true)] {
                let memory: Vec<u64> = from.iter().map(|x| x.to_bits()).collect();
                let mut found = vec![0_u64; s * w];
                let out = FlatViewMut::over(&mut found, DType::F64);
                signs.product(out, &FlatView::over(&memory, DType::F64), turned);
                for row in 0..s {
                    for col in 0..w {
                        let expected: f64 = (0..d).map(|i| omega[i * s + row] * a[i * w + col]).sum();
                        let found = f64::from_bits(found[row * w + col]);
                        assert!((found - expected).abs() < 1e-12, "{d} {w} {s} {row} {col}");
                    }
                }
            }
        }
    }
}
