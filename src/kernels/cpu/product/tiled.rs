//! The loops over the tiles of a product, and what is done with a tile that is complete.

use std::arch::x86_64::{__m256bh, _mm512_cvtneps_pbh, _mm512_loadu_ps};
use std::ops::Range;

use super::Outcome;
use super::types::{Call, MOST, Mirror, Number, Tile};
use crate::kernels::formula::Num as _;

/// Bytes of a result that are in the second-level cache anyway.
const CACHED: usize = 1 << 18;

/// Columns of the widest tile.
const WIDEST: usize = 32;

/// The sums of a tile, in whole lines of the cache.
#[repr(align(64))]
pub(super) struct Sums<W>(pub(super) [W; MOST]);

/// A tile of a result and the panels that it is the product of.
pub(super) struct Spot<E> {
    /// The panel of rows.
    pub(super) a: *const E,
    /// The panel of columns.
    pub(super) b: *const E,
    /// First row and first column.
    place: [usize; 2],
    /// Rows and columns that there are.
    size: [usize; 2],
}

impl<E: Number> Call<'_, E> {
    /// The number of tasks.
    pub(super) fn tasks<T: Tile>(&self) -> usize {
        let [rows, columns] = self.block;
        self.size[0].div_ceil(T::ROWS).div_ceil(rows) * self.size[1].div_ceil(T::COLS).div_ceil(columns)
    }

    /// The number of tasks that have a tile to compute.
    fn working<T: Tile>(&self) -> usize {
        let works = |task: &usize| {
            let [rows, columns] = self.panels::<T>(*task);
            rows.end > self.first::<T>(columns.start)
        };
        (0..self.tasks::<T>()).filter(works).count()
    }

    /// The same call in smaller tasks where there are fewer than two for each of some threads.
    pub(super) fn for_threads<T: Tile>(mut self, threads: usize) -> Self {
        while self.working::<T>() < 2 * threads && self.block != [1, 1] {
            let larger = usize::from(self.block[1] > self.block[0]);
            self.block[larger] = self.block[larger].div_ceil(2);
        }
        self
    }

    /// Panels of rows and of columns of a task. Consecutive tasks share the panels of columns: a Muon step on 2048 x 2048 in
    /// float32 takes 1.05 to 1.1 times as long where they share those of rows, at one thread.
    #[inline(always)]
    #[allow(clippy::inline_always)] // must be compiled inside its caller's instruction set
    pub(super) fn panels<T: Tile>(&self, task: usize) -> [Range<usize>; 2] {
        let counts = [self.size[0].div_ceil(T::ROWS), self.size[1].div_ceil(T::COLS)];
        let chunks = counts[0].div_ceil(self.block[0]);
        let place = [task % chunks, task / chunks];
        [0, 1].map(|d| place[d] * self.block[d]..counts[d].min((place[d] + 1) * self.block[d]))
    }

    /// Returns the first panel of rows whose tile a panel of columns needs. For a symmetric product only tiles that reach
    /// below the diagonal are computed.
    #[inline(always)]
    #[allow(clippy::inline_always)] // must be compiled inside its caller's instruction set
    pub(super) fn first<T: Tile>(&self, column: usize) -> usize {
        if self.outcome == Outcome::Symmetric { column * T::COLS / T::ROWS } else { 0 }
    }

    /// Groups of `DEPTH` elements along the inner dimension.
    pub(super) fn steps<T: Tile>(&self) -> usize {
        self.size[2].div_ceil(T::DEPTH)
    }

    /// One panel of columns times some panels of rows.
    ///
    /// # Safety
    /// The machine has the tile's instruction set, and the pointers reach as far as [`super::Product`] says.
    #[inline(always)]
    #[allow(clippy::inline_always)] // must be compiled inside its caller's instruction set
    pub(super) unsafe fn task<T: Tile<Element = E>>(&self, task: usize) {
        let [rows, columns] = self.panels::<T>(task);
        let mut sums = Sums([E::Wide::default(); MOST]);
        for column in columns {
            for row in rows.start.max(self.first::<T>(column))..rows.end {
                // SAFETY: the panels are there, and `sums` has room for a tile.
                unsafe {
                    let spot = self.spot::<T>([row, column]);
                    self.fetch(&spot);
                    T::multiply(self.steps::<T>(), spot.a, spot.b, sums.0.as_mut_ptr());
                    self.finish::<T>(&mut sums, &spot);
                }
            }
        }
    }

    /// The tile at these panels of rows and columns.
    ///
    /// # Safety
    /// The panels are there.
    #[inline(always)]
    #[allow(clippy::inline_always)] // must be compiled inside its caller's instruction set
    pub(super) unsafe fn spot<T: Tile<Element = E>>(&self, [row, column]: [usize; 2]) -> Spot<E> {
        let [m, n, _] = self.size;
        let depth = self.steps::<T>() * T::DEPTH;
        let place = [row * T::ROWS, column * T::COLS];
        // SAFETY: the caller's.
        let [a, b] = unsafe {
            [self.left.add(place[0] * depth * T::UNITS), self.right.add(place[1] * depth * T::UNITS)]
        };
        Spot { a, b, place, size: [T::ROWS.min(m - place[0]), T::COLS.min(n - place[1])] }
    }

    /// Writes a tile whose sums are complete.
    ///
    /// # Safety
    /// As [`task`](Self::task).
    #[inline(always)]
    #[allow(clippy::inline_always)] // must be compiled inside its caller's instruction set
    pub(super) unsafe fn finish<T: Tile<Element = E>>(&self, sums: &mut Sums<E::Wide>, spot: &Spot<E>) {
        // SAFETY: the caller's.
        unsafe {
            if self.outcome == Outcome::Transposed {
                let [rows, cols] = spot.size;
                let whole = Mirror { rows, cols, below: -cols.cast_signed(), stride: self.stride };
                let to = self.out.add(spot.place[1] * self.stride + spot.place[0]);
                T::mirror(sums.0.as_ptr(), &whole, to);
            } else {
                self.store::<T>(&mut sums.0, spot.place, spot.size);
            }
        }
    }

    /// Asks for the memory that the tile will be written to, to be there after the products: its rows lie on pages of
    /// their own, and waiting for them costs a tenth of a product of size 1024.
    #[inline(always)]
    #[allow(clippy::inline_always)] // must be compiled inside its caller's instruction set
    fn fetch(&self, spot: &Spot<E>) {
        if self.size[0] * self.size[1] * size_of::<E>() <= CACHED {
            return;
        }
        let ([top, left], [rows, cols]) = (spot.place, spot.size);
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
        if !T::ROUNDS {
            for (to, x) in other[..T::COLS].iter_mut().zip(&wide) {
                *to = E::narrow(*x);
            }
        }
        // SAFETY: the caller's; sums are float32 and elements bfloat16 where the processor rounds.
        unsafe {
            for part in (0..T::COLS).step_by(16).filter(|_| T::ROUNDS) {
                let sums = _mm512_loadu_ps(wide.as_ptr().add(part).cast());
                other.as_mut_ptr().add(part).cast::<__m256bh>().write_unaligned(_mm512_cvtneps_pbh(sums));
            }
            std::ptr::copy_nonoverlapping(other.as_ptr(), self.out.add(at), width);
            std::ptr::copy_nonoverlapping(wide.as_ptr(), sums, T::COLS);
        }
    }
}

fn prefetch<E>(at: *const E) {
    // SAFETY: a prefetch never faults, and every x86-64 has it.
    unsafe { std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(at.cast()) };
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::super::amx::Bf16Amx;
    use super::*;

    #[test]
    fn tasks_of_any_number_of_threads_have_every_tile_once() {
        use Outcome::{General, Symmetric};
        for (size, threads, outcome) in [
            ([1024, 1024, 64], 2, General),
            ([1024, 1024, 64], 64, General),
            ([1024, 1024, 64], 8, Symmetric),
            ([33, 900, 8], 7, General),
            ([31, 2, 1], 8, General),
            ([520, 40, 3], 1, General),
        ] {
            let call = Call::<bf16> {
                left: std::ptr::null(),
                right: std::ptr::null(),
                out: std::ptr::null_mut(),
                size,
                stride: size[1],
                factor: 1.0,
                keep: 0.0,
                add: &[],
                diagonal: 0.0,
                outcome,
                block: Bf16Amx::BLOCK,
            };
            let call = call.for_threads::<Bf16Amx>(threads);
            let tiles = [size[0].div_ceil(Bf16Amx::ROWS), size[1].div_ceil(Bf16Amx::COLS)];
            assert!(
                call.working::<Bf16Amx>() >= (2 * threads).min(tiles[0] * tiles[1]),
                "{size:?} {threads}"
            );
            let mut found = vec![0; tiles[0] * tiles[1]];
            for task in 0..call.tasks::<Bf16Amx>() {
                let [rows, columns] = call.panels::<Bf16Amx>(task);
                for row in rows {
                    columns.clone().for_each(|column| found[row * tiles[1] + column] += 1);
                }
            }
            assert!(found.iter().all(|count| *count == 1), "{size:?} {threads}: {found:?}");
        }
    }
}
