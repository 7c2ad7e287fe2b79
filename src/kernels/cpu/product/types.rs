//! Types of products by tiles: elements, operands, tiles, and the arguments of a task.

use half::bf16;

use super::super::{Real, convert};
use super::Outcome;
use crate::tensor::Element;

/// The largest tile.
pub(super) const MOST: usize = 32 * 32;

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
        convert::widen(self)
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
    /// Elements of a panel's memory that one of the operand takes there: 2 where it is widened.
    const UNITS: usize = 1;
    /// Most panels of rows and of columns of a task.
    const BLOCK: [usize; 2] = [24, 1];
    /// True if rows of 16 units of 32 bits are transposed in registers.
    const TRANSPOSES: bool;
    /// True if the processor rounds sums to bfloat16.
    const ROUNDS: bool = false;

    /// `out[i][j] = Σ a[p][i] b[p][j]` over `steps` groups of `DEPTH` products.
    ///
    /// # Safety
    /// The machine has the instruction set; `a`, `b` and `out` point at `steps * ROWS * DEPTH`, `steps * COLS * DEPTH`
    /// and `ROWS * COLS` elements, `UNITS` times as many in panels.
    unsafe fn multiply(
        steps: usize,
        a: *const Self::Element,
        b: *const Self::Element,
        out: *mut <Self::Element as Number>::Wide,
    );

    /// Writes elements `range` of the panel of rows, or of columns where not `left`, that begins with row `start`.
    ///
    /// # Safety
    /// As [`panel`](super::pack::panel).
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

/// The rows of an operand that are multiplied along their elements: element `p` of row `i` is
/// `i * steps[0] + p * steps[1]` elements behind the first.
#[derive(Clone, Copy)]
pub(super) struct Rows<E> {
    pub(super) first: *const E,
    pub(super) count: usize,
    pub(super) inner: usize,
    pub(super) steps: [usize; 2],
}

/// Operands as panels, and the rest of [`super::Product`] as pointers.
pub(super) struct Call<'a, E> {
    pub(super) left: *const E,
    pub(super) right: *const E,
    pub(super) out: *mut E,
    /// Rows, columns, elements that are summed.
    pub(super) size: [usize; 3],
    /// Distance of the rows of the result and of what is added.
    pub(super) stride: usize,
    pub(super) factor: f64,
    pub(super) keep: f64,
    pub(super) add: &'a [(f64, *const E)],
    pub(super) diagonal: f64,
    pub(super) outcome: Outcome,
    /// Panels of rows and of columns of a task.
    pub(super) block: [usize; 2],
}

// SAFETY: tasks read the operands and write tiles of their own.
unsafe impl<E> Sync for Call<'_, E> {}

/// Destination of the transposed tile.
pub(super) struct Mirror {
    /// Of the tile.
    pub(super) rows: usize,
    /// Of the tile.
    pub(super) cols: usize,
    /// Of column `j` only rows from `j + below` on are on or below the diagonal.
    pub(super) below: isize,
    /// Distance of rows in the result.
    pub(super) stride: usize,
}

impl Mirror {
    /// The first row of column `j` that is written.
    #[inline(always)]
    #[allow(clippy::inline_always)] // must be compiled inside its caller's instruction set
    pub(super) fn first(&self, j: usize) -> usize {
        usize::try_from(j.cast_signed() + self.below).unwrap_or(0).min(self.rows)
    }
}
