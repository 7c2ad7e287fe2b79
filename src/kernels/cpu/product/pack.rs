//! Panels: operands in the order in which tiles read them.

use super::transpose::{interleave, transpose};
use super::types::{Rows, Tile};

/// Writes elements `range` of rows `start..start + WIDTH` as groups of `WIDTH` times `DEPTH` elements, zeros for what there
/// is not.
///
/// # Safety
/// The machine has the tile's instruction set; the rows are readable, and `to` has room for the panel.
#[inline(always)]
#[allow(clippy::inline_always)] // must be compiled inside its caller's instruction set
pub(super) unsafe fn panel<T: Tile, const WIDTH: usize>(
    x: &Rows<T::Element>,
    start: usize,
    range: [usize; 2],
    to: *mut T::Element,
) {
    let rows = WIDTH.min(x.count - start);
    let [mut done, end] = range;
    // SAFETY: below, all that is read lies in rows `start..start + rows` up to `inner`, all that is written in the panel.
    unsafe {
        let from = x.first.add(start * x.steps[0]);
        let unit = 16 * T::DEPTH;
        if x.steps[1] == 1 && T::TRANSPOSES {
            // 16 rows from one end to the other: more are too many streams for the prefetcher.
            let bytes = x.steps[0] * size_of::<T::Element>();
            let whole = done + (end - done) / unit * unit;
            for part in (0..WIDTH).step_by(16) {
                let size = [rows.saturating_sub(part).min(16), (WIDTH - part).min(16)];
                for p in (done..whole).step_by(unit) {
                    let first = from.wrapping_add(part * x.steps[0] + p).cast();
                    transpose(first, bytes, size, to.add(p * WIDTH).cast::<i32>().add(part), WIDTH);
                }
            }
            done = whole;
        } else if x.steps[0] == 1 && T::DEPTH == 1 {
            for p in done..end {
                let (row, group) = (from.add(p * x.steps[1]), to.add(p * WIDTH));
                if rows == WIDTH {
                    std::ptr::copy_nonoverlapping(row, group, WIDTH);
                } else {
                    std::ptr::copy_nonoverlapping(row, group, rows);
                    for i in rows..WIDTH {
                        *group.add(i) = T::Element::default();
                    }
                }
            }
            done = end;
        } else if x.steps[0] == 1 && T::TRANSPOSES && T::DEPTH == 2 {
            while done + T::DEPTH <= end {
                let row = from.add(done * x.steps[1]);
                let pair = [row, row.wrapping_add(x.steps[1])].map(<*const T::Element>::cast);
                interleave(pair, [rows, WIDTH], to.add(done * WIDTH).cast());
                done += T::DEPTH;
            }
        }
        rest::<T, WIDTH>(x, from, [done, end], rows, to);
    }
}

/// The same element by element.
///
/// # Safety
/// As [`panel`].
#[inline(always)]
#[allow(clippy::inline_always)] // must be compiled inside its caller's instruction set
unsafe fn rest<T: Tile, const WIDTH: usize>(
    x: &Rows<T::Element>,
    from: *const T::Element,
    [done, end]: [usize; 2],
    rows: usize,
    to: *mut T::Element,
) {
    for p in (done..end).step_by(T::DEPTH) {
        for i in 0..WIDTH {
            for q in p..p + T::DEPTH {
                // SAFETY: the element is read where it is inside the operand; the group is in the panel.
                unsafe {
                    let value = if i < rows && q < x.inner {
                        *from.add(i * x.steps[0] + q * x.steps[1])
                    } else {
                        T::Element::default()
                    };
                    *to.add(p * WIDTH + i * T::DEPTH + (q - p)) = value;
                }
            }
        }
    }
}

/// Elements of the panels of `count` rows of `inner` elements.
pub(super) fn elements(count: usize, width: usize, inner: usize, depth: usize) -> usize {
    count.div_ceil(width) * width * inner.next_multiple_of(depth)
}
