//! The loops over the tiles of a product, and what is done with a tile that is complete.

use super::super::Real;
use super::tiles::{MOST, Number, Tile};

/// Panels of rows that one task multiplies with a panel of columns.
const CHUNK: usize = 24;

/// Operands as panels, and the rest of [`super::Product`] as pointers.
pub(super) struct Call<'a, E> {
    pub(super) left: *const E,
    pub(super) right: *const E,
    pub(super) out: *mut E,
    /// Rows, columns, elements that are summed.
    pub(super) size: [usize; 3],
    pub(super) factor: f64,
    pub(super) keep: f64,
    pub(super) add: &'a [(f64, *const E)],
    pub(super) symmetric: bool,
}

// SAFETY: tasks read the operands and write tiles of their own.
unsafe impl<E> Sync for Call<'_, E> {}

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
    pub(super) unsafe fn task<T: Tile<Element = E>>(&self, task: usize) {
        let [m, n, k] = self.size;
        let panels = m.div_ceil(T::ROWS);
        let chunks = panels.div_ceil(CHUNK);
        let (column, chunk) = (task / chunks, task % chunks);
        // Of a symmetric product only tiles that reach below the diagonal.
        let first = if self.symmetric { column * T::COLS / T::ROWS } else { 0 };
        let last = panels.min((chunk + 1) * CHUNK);
        let depth = k.next_multiple_of(T::DEPTH);
        let mut sums = [E::Wide::default(); MOST];
        for row in first.max(chunk * CHUNK)..last {
            // SAFETY: panel `row` of the rows and `column` of the columns are there, and `sums` has room for a tile.
            unsafe {
                let a = self.left.add(row * T::ROWS * depth);
                let b = self.right.add(column * T::COLS * depth);
                T::multiply(depth / T::DEPTH, a, b, sums.as_mut_ptr());
                let place = [row * T::ROWS, column * T::COLS];
                let size = [T::ROWS.min(m - place[0]), T::COLS.min(n - place[1])];
                self.store::<T>(&sums, place, size);
            }
        }
    }

    /// `out <- factor sums + keep out + Σ weight addend` in the tile at `place`.
    ///
    /// # Safety
    /// As [`task`](Self::task).
    #[inline(always)]
    #[allow(clippy::inline_always)] // must be compiled inside its caller's instruction set
    unsafe fn store<T: Tile<Element = E>>(
        &self,
        sums: &[E::Wide; MOST],
        [top, left]: [usize; 2],
        [rows, cols]: [usize; 2],
    ) {
        let n = self.size[1];
        let (factor, keep) = (E::Wide::of(self.factor), E::Wide::of(self.keep));
        let mut tile = [E::default(); MOST];
        for i in 0..rows {
            let width = if self.symmetric { (top + i + 1).saturating_sub(left).min(cols) } else { cols };
            let at = (top + i) * n + left;
            // SAFETY: `width` elements of this row are inside all matrices of the size of `out`.
            let out = unsafe { std::slice::from_raw_parts_mut(self.out.add(at), width) };
            let mut wide = [E::Wide::default(); 32];
            for (x, sum) in wide.iter_mut().zip(&sums[i * T::COLS..][..width]) {
                *x = factor * *sum;
            }
            if self.keep != 0.0 {
                wide.iter_mut().zip(&*out).for_each(|(x, old)| *x = *x + keep * old.widen());
            }
            for &(weight, addend) in self.add {
                let weight = E::Wide::of(weight);
                // SAFETY: as for `out`, which it is not.
                let addend = unsafe { std::slice::from_raw_parts(addend.add(at), width) };
                wide.iter_mut().zip(addend).for_each(|(x, y)| *x = *x + weight * y.widen());
            }
            for (to, x) in out.iter_mut().zip(&wide) {
                *to = E::narrow(*x);
            }
            if self.symmetric {
                tile[i * T::COLS..][..width].copy_from_slice(out);
            }
        }
        if self.symmetric {
            for j in 0..cols {
                let start = (left + j).saturating_sub(top).min(rows);
                let at = (left + j) * n + top;
                // SAFETY: the mirror image of a column of the tile on and below the diagonal: this task alone writes it.
                let out = unsafe { std::slice::from_raw_parts_mut(self.out.add(at + start), rows - start) };
                for (i, to) in out.iter_mut().enumerate() {
                    *to = tile[(start + i) * T::COLS + j];
                }
            }
        }
    }
}
