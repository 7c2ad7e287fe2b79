//! The loops over the tiles of a product, and what is done with a tile that is complete.

use super::Outcome;
use super::types::{Call, MOST, Mirror, Number, Tile};
use crate::kernels::formula::Num as _;

/// Panels of rows that one task multiplies with a panel of columns.
const CHUNK: usize = 24;
/// Bytes of a result that are in the second-level cache anyway.
const CACHED: usize = 1 << 18;
/// Columns of the widest tile.
const WIDEST: usize = 32;

/// The sums of a tile, in whole lines of the cache.
#[repr(align(64))]
struct Sums<W>([W; MOST]);

impl<E: Number> Call<'_, E> {
    /// The number of tasks.
    pub(super) fn tasks<T: Tile>(&self) -> usize {
        self.size[1].div_ceil(T::COLS) * self.size[0].div_ceil(T::ROWS).div_ceil(CHUNK)
    }

    /// One panel of columns times some panels of rows.
    ///
    /// # Safety
    /// The machine has the tile's instruction set, and the pointers reach as far as [`super::Product`] says.
    #[inline(always)]
    #[allow(clippy::inline_always)] // must be compiled inside its caller's instruction set
    #[allow(clippy::many_single_char_names)] // the letters of a product
    pub(super) unsafe fn task<T: Tile<Element = E>>(&self, task: usize) {
        let [m, n, inner] = self.size;
        let panels = m.div_ceil(T::ROWS);
        let chunks = panels.div_ceil(CHUNK);
        let (column, chunk) = (task / chunks, task % chunks);
        // Of a symmetric product only tiles that reach below the diagonal.
        let first = if self.outcome == Outcome::Symmetric { column * T::COLS / T::ROWS } else { 0 };
        let last = panels.min((chunk + 1) * CHUNK);
        let depth = inner.next_multiple_of(T::DEPTH);
        let mut sums = Sums([E::Wide::default(); MOST]);
        let sums = &mut sums.0;
        for row in first.max(chunk * CHUNK)..last {
            // SAFETY: panel `row` of the rows and `column` of the columns are there, and `sums` has room for a tile.
            unsafe {
                let a = self.left.add(row * T::ROWS * depth * T::UNITS);
                let b = self.right.add(column * T::COLS * depth * T::UNITS);
                let place = [row * T::ROWS, column * T::COLS];
                let size = [T::ROWS.min(m - place[0]), T::COLS.min(n - place[1])];
                if self.size[0] * n * size_of::<E>() > CACHED {
                    self.fetch(place, size);
                }
                T::multiply(depth / T::DEPTH, a, b, sums.as_mut_ptr());
                if self.outcome == Outcome::Transposed {
                    let [rows, cols] = size;
                    let whole = Mirror { rows, cols, below: -cols.cast_signed(), stride: self.stride };
                    let to = self.out.add(place[1] * self.stride + place[0]);
                    T::mirror(sums.as_ptr(), &whole, to);
                    continue;
                }
                self.store::<T>(sums, place, size);
            }
        }
    }

    /// Asks for the memory that the tile will be written to, to be there after the products: its rows lie on pages of
    /// their own, and waiting for them costs a tenth of a product of size 1024.
    #[inline(always)]
    #[allow(clippy::inline_always)] // must be compiled inside its caller's instruction set
    fn fetch(&self, [top, left]: [usize; 2], [rows, cols]: [usize; 2]) {
        let line = 64 / size_of::<E>();
        let ask = |first: usize, [count, len]: [usize; 2]| {
            for i in 0..count {
                let row = self.out.wrapping_add(first + i * self.stride);
                for at in (0..len).step_by(line).chain([len - 1]) {
                    prefetch(row.wrapping_add(at));
                }
            }
        };
        if self.outcome != Outcome::Transposed {
            ask(top * self.stride + left, [rows, cols]);
        }
        if self.outcome != Outcome::General {
            ask(left * self.stride + top, [cols, rows]);
        }
    }

    /// `out <- factor sums + keep out + Σ weight addend + diagonal I` in the tile at `place`.
    ///
    /// # Safety
    /// As [`task`](Self::task).
    #[inline(always)]
    #[allow(clippy::inline_always)] // must be compiled inside its caller's instruction set
    unsafe fn store<T: Tile<Element = E>>(
        &self,
        sums: &mut [E::Wide; MOST],
        [top, left]: [usize; 2],
        [rows, cols]: [usize; 2],
    ) {
        let stride = self.stride;
        let symmetric = self.outcome == Outcome::Symmetric;
        let below = !symmetric || top + 1 >= left + cols;
        if symmetric && self.diagonal != 0.0 {
            // Where the tile meets the diagonal; `row` multiplies by the factor.
            let by = E::Wide::of(self.diagonal / self.factor);
            for i in left.saturating_sub(top)..rows.min((left + cols).saturating_sub(top)) {
                let sum = &mut sums[i * T::COLS + top + i - left];
                *sum = *sum + by;
            }
        }
        for i in 0..rows {
            let at = (top + i) * stride + left;
            // SAFETY: what is on and below the diagonal of this row is inside all matrices of the size of `out`. Most
            // rows have the full width, for which the loops have a length that is known.
            unsafe {
                if below && cols == T::COLS {
                    self.row::<T>(sums.as_mut_ptr().add(i * T::COLS), at, T::COLS);
                } else {
                    let width = if symmetric { (top + i + 1).saturating_sub(left) } else { cols };
                    self.row::<T>(sums.as_mut_ptr().add(i * T::COLS), at, width.min(cols));
                }
            }
        }
        if symmetric {
            let mirror = Mirror { rows, cols, below: left.cast_signed() - top.cast_signed(), stride };
            // SAFETY: the mirror image of what is below the diagonal in the tile: this task alone writes it.
            unsafe { T::mirror(sums.as_ptr(), &mirror, self.out.add(left * stride + top)) };
        }
    }

    /// The same in the first `width` elements of a row of the tile, which are left in `sums` too.
    ///
    /// # Safety
    /// `out` and all addends have `width` elements from `at` on, and `sums` has `COLS`.
    #[inline(always)]
    #[allow(clippy::inline_always)] // must be compiled inside its caller's instruction set
    unsafe fn row<T: Tile<Element = E>>(&self, sums: *mut E::Wide, at: usize, width: usize) {
        // Arrays of their own and a length that is known: compiled to a few vector instructions, without questions of
        // what overlaps.
        let mut wide = [E::Wide::default(); WIDEST];
        let mut other = [E::default(); WIDEST];
        // SAFETY: the caller's.
        unsafe { std::ptr::copy_nonoverlapping(sums, wide.as_mut_ptr(), T::COLS) };
        let factor = E::Wide::of(self.factor);
        wide[..T::COLS].iter_mut().for_each(|x| *x = factor * *x);
        let old = (self.keep != 0.0).then_some((self.keep, self.out.cast_const()));
        for (weight, matrix) in old.into_iter().chain(self.add.iter().copied()) {
            let weight = E::Wide::of(weight);
            // SAFETY: the caller's.
            unsafe { std::ptr::copy_nonoverlapping(matrix.add(at), other.as_mut_ptr(), width) };
            for (x, y) in wide[..T::COLS].iter_mut().zip(&other) {
                *x = *x + weight * y.widen();
            }
        }
        for (to, x) in other[..T::COLS].iter_mut().zip(&wide) {
            *to = E::narrow(*x);
        }
        // SAFETY: the caller's.
        unsafe {
            std::ptr::copy_nonoverlapping(other.as_ptr(), self.out.add(at), width);
            std::ptr::copy_nonoverlapping(wide.as_ptr(), sums, T::COLS);
        }
    }
}

fn prefetch<E>(at: *const E) {
    // SAFETY: a prefetch never faults, and every x86-64 has it.
    unsafe { std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(at.cast()) };
}
