//! The products of an iteration by kernels of our own, on one matrix in memory that the caller gives.

use std::ops::Range;

use super::products::Products;
use crate::error::{Error, Result};
use crate::kernels::{
    self, Combine, Job, Kernel, LEAST_DIVISOR, Operand, Outcome, Product, Scale, Side, WideSquares,
};
use crate::tensor::{FlatView, FlatViewMut};

/// Elements of the long side of `X` that go into panels at a time for `X Xᵀ`, where the sums are kept in the type of the
/// elements, and for `P X`: panels of the whole matrix would need its memory twice. Twice the blocks cost 4 % of `X Xᵀ`.
const BLOCK: usize = 2048;

/// Number of the symmetric matrix in panels; `X` and parts of it are brought there for every use.
type Held = Option<usize>;

/// One matrix and its workspace.
///
/// A symmetric matrix is `D + s I`, with only `D` in memory. In bfloat16 a product has the `s` that is usual on its diagonal:
/// a diagonal is far larger than the rest, and rounding it is most of the error of the Gram form. Largest singular values are
/// 1.150 without `s` and 1.142 with it where exact ones are 1.141.
pub(super) struct Packed<'a> {
    x: FlatViewMut<'a>,
    shape: [usize; 2],
    squares: Vec<FlatViewMut<'a>>,
    shifts: Vec<f64>,
    panels: Panels<'a>,
    /// Factor by which `X` is still to be multiplied.
    pending: f64,
}

/// The operands of a product in panels.
struct Panels<'a> {
    kernel: Kernel,
    memory: [FlatViewMut<'a>; 2],
    held: [Held; 2],
    spread: bool,
}

impl Panels<'_> {
    /// Brings a symmetric matrix of `k` rows into the panels of one side, where it is not there yet.
    fn hold(&mut self, side: Side, number: usize, square: &FlatViewMut<'_>, k: usize) -> Result<()> {
        let place = usize::from(side == Side::Right);
        if self.held[place] != Some(number) {
            // Rows are columns: the kernel says which it reads faster.
            let rows = rows(square.view(), k);
            let from = if self.kernel.prefers_rows() { rows } else { Operand { steps: [1, k], ..rows } };
            self.bring(side, &from)?;
            self.held[place] = Some(number);
        }
        Ok(())
    }

    /// Brings `X`, or a part of its rows, into panels of one side.
    fn bring(&mut self, side: Side, from: &Operand<'_>) -> Result<()> {
        let place = usize::from(side == Side::Right);
        self.held[place] = None;
        self.kernel.pack(side, from, &mut self.memory[place], self.spread)
    }

    /// Forgets panels of a matrix that is written.
    fn written(&mut self, number: usize) {
        for held in &mut self.held {
            if *held == Some(number) {
                *held = None;
            }
        }
    }

    fn multiply(&self, product: &mut Product<'_>) -> Result<()> {
        let [left, right] = &self.memory;
        self.kernel.multiply(&left.view(), &right.view(), product, self.spread)
    }

    /// A product whose result lacks what is usual on its diagonal, which `shift` becomes.
    fn multiply_shifted(
        &self,
        operands: [&Operand<'_>; 2],
        product: &mut Product<'_>,
        shift: &mut f64,
    ) -> Result<()> {
        product.diagonal += product.keep * *shift;
        let usual = product.usual_diagonal(operands);
        product.diagonal -= usual;
        *shift = usual;
        self.multiply(product)
    }
}

/// A symmetric matrix as an operand.
fn rows(square: FlatView<'_>, k: usize) -> Operand<'_> {
    Operand { x: square.into(), count: k, inner: k, steps: [k, 1] }
}

/// Alignment of the parts of a workspace, in bytes.
const ALIGN: usize = 64;

/// The range in parts of about the same size, none longer than `most`.
fn ranges(len: usize, most: usize) -> impl Iterator<Item = Range<usize>> {
    let parts = len.div_ceil(most);
    (0..parts).map(move |i| i * len / parts..(i + 1) * len / parts)
}

/// Elements of the panels of both operands, and of each square.
fn parts(kernel: Kernel, [rows, cols]: [usize; 2]) -> [usize; 3] {
    let (k, long) = (rows.min(cols), rows.max(cols));
    let block = long.min(BLOCK.max(k));
    let inner = if blocked(kernel) { block } else { long };
    // X Xᵀ, squares, and P X or X P.
    let need = |side, count| {
        kernel.elements(side, k, inner).max(kernel.elements(side, k, k)).max(kernel.elements(side, count, k))
    };
    let [left, right] = if rows > cols { [block, k] } else { [k, block] };
    let unit = ALIGN / kernel.dtype().bytes();
    [need(Side::Left, left), need(Side::Right, right), k * k].map(|n| n.next_multiple_of(unit))
}

/// Tests whether sums may be kept in the type of the elements.
fn blocked(kernel: Kernel) -> bool {
    kernel.dtype().arithmetic() == kernel.dtype()
}

impl<'a> Packed<'a> {
    /// Returns the elements of memory that a matrix of this shape needs with `squares` symmetric matrices.
    pub(super) fn elements(kernel: Kernel, shape: [usize; 2], squares: usize) -> usize {
        let [left, right, square] = parts(kernel, shape);
        left + right + squares * square
    }

    /// Workspace of the row-major matrix `x`. `spread` over the threads of the pool that the products run in.
    pub(super) fn new(
        kernel: Kernel,
        x: FlatViewMut<'a>,
        shape: [usize; 2],
        squares: usize,
        mut memory: FlatViewMut<'a>,
        spread: bool,
    ) -> Result<Self> {
        if x.len() != shape[0] * shape[1] || memory.len() < Self::elements(kernel, shape, squares) {
            return Err(Error::Internal(format!("{x:?} and {memory:?} for a matrix {shape:?}")));
        }
        let [left, right, square] = parts(kernel, shape);
        let k = shape[0].min(shape[1]);
        let panels = [memory.take_first(left), memory.take_first(right)];
        let shifts = vec![0.0; squares];
        let squares = (0..squares).map(|_| memory.take_first(square).into_part(0, k * k)).collect();
        let panels = Panels { kernel, memory: panels, held: [None; 2], spread };
        Ok(Self { x, shape, squares, shifts, panels, pending: 1.0 })
    }

    fn short(&self) -> usize {
        self.shape[0].min(self.shape[1])
    }

    /// `S[out] <- X Xᵀ`, as it is where not `shifts`.
    fn square_of_x(&mut self, out: usize, shifts: bool) -> Result<()> {
        let ([rows, cols], k) = (self.shape, self.short());
        let Self { x, squares, panels, shifts: known, .. } = self;
        let long = rows.max(cols);
        panels.written(out);
        known[out] = 0.0;
        for range in ranges(long, if blocked(panels.kernel) { BLOCK.max(k) } else { long }) {
            let (start, end) = (range.start, range.end);
            let (offset, steps) = if rows > cols { (start * cols, [1, cols]) } else { (start, [cols, 1]) };
            let x = x.view();
            let x = x.part(offset, x.len()).into();
            let from = Operand { x, count: k, inner: end - start, steps };
            panels.bring(Side::Left, &from)?;
            panels.bring(Side::Right, &from)?;
            let keep = if start == 0 { 0.0 } else { 1.0 };
            let size = [k, k, end - start];
            let plain = Product::plain(squares[out].reborrow(), size, k, Outcome::Symmetric);
            let mut product = Product { keep, ..plain };
            if shifts {
                panels.multiply_shifted([&from; 2], &mut product, &mut known[out])?;
            } else {
                panels.multiply(&mut product)?;
            }
        }
        Ok(())
    }

    /// Does something with `S[out]` and the others.
    fn with_square<T>(
        &mut self,
        out: usize,
        work: impl FnOnce(&mut Self, FlatViewMut<'_>) -> Result<T>,
    ) -> Result<T> {
        let mut square = std::mem::replace(&mut self.squares[out], FlatViewMut::EMPTY);
        let done = work(self, square.reborrow());
        self.squares[out] = square;
        done
    }
}

impl Products for Packed<'_> {
    fn gram(&mut self, out: usize) -> Result<()> {
        self.square_of_x(out, true)
    }

    fn multiply(&mut self, out: usize, [a, b]: [usize; 2], add: &[(f64, usize)], factor: f64) -> Result<()> {
        let k = self.short();
        self.panels.hold(Side::Left, a, &self.squares[a], k)?;
        self.panels.hold(Side::Right, b, &self.squares[b], k)?;
        self.panels.written(out);
        // (A + s I) (B + t I) = A B + t A + s B + s t I.
        let [of_a, of_b] = [a, b].map(|square| self.shifts[square]);
        let diagonal = of_a * of_b + add.iter().map(|&(weight, i)| weight * self.shifts[i]).sum::<f64>();
        let mut addends = add.to_vec();
        for (weight, square) in [(of_b, a), (of_a, b)] {
            match addends.iter_mut().find(|(_, addend)| *addend == square) {
                Some((sum, _)) => *sum += weight,
                None if weight != 0.0 => addends.push((weight, square)),
                None => {}
            }
        }
        self.with_square(out, |all, square| {
            let Self { squares, panels, shifts, .. } = all;
            let add = addends.into_iter().map(|(weight, i)| (weight * factor, squares[i].view().into()));
            let add: Vec<_> = add.collect();
            let plain = Product::plain(square, [k; 3], k, Outcome::Symmetric);
            let mut product = Product { factor, add: &add, diagonal: factor * diagonal, ..plain };
            let operands = [a, b].map(|i| rows(squares[i].view(), k));
            panels.multiply_shifted(operands.each_ref(), &mut product, &mut shifts[out])
        })
    }

    fn combine(&mut self, out: usize, keep: f64, a: usize, factor: f64) -> Result<()> {
        self.panels.written(out);
        self.shifts[out] = keep * self.shifts[out] + factor * self.shifts[a];
        self.with_square(out, |all, square| {
            let mut jobs = [Job { read: [all.squares[a].view()], write: [square] }];
            kernels::run_on_cpu(&Combine { keep, factor }, &mut jobs);
            Ok(())
        })
    }

    fn apply(&mut self, p: usize, keep: f64, factor: f64) -> Result<()> {
        let ([rows, cols], k) = (self.shape, self.short());
        let (factor, keep) = (self.pending * factor, self.pending * (keep + factor * self.shifts[p]));
        self.pending = 1.0;
        let Self { x, squares, panels, .. } = self;
        let tall = rows > cols;
        for range in ranges(rows.max(cols), BLOCK.max(k)) {
            // All of this part of X is in panels before the first element of the result is written over it.
            let (offset, count) = (range.start * if tall { cols } else { 1 }, range.len());
            let mut out = x.part(offset, usize::MAX);
            let part = |steps| Operand { x: out.view().into(), count, inner: k, steps };
            let size = if tall {
                panels.bring(Side::Left, &part([cols, 1]))?;
                panels.hold(Side::Right, p, &squares[p], k)?;
                [count, cols, k]
            } else {
                panels.hold(Side::Left, p, &squares[p], k)?;
                panels.bring(Side::Right, &part([1, cols]))?;
                [rows, count, k]
            };
            let plain = Product::plain(out.reborrow(), size, cols, Outcome::General);
            panels.multiply(&mut Product { factor, keep, ..plain })?;
        }
        Ok(())
    }

    fn divide(&mut self, _gram: usize, square: usize, factor: f64) -> Result<f64> {
        // Of D + s I.
        let (d, s) = (self.squares[square].view(), self.shifts[square]);
        let mut norm = norm(&d);
        if s != 0.0 {
            let k = self.short();
            #[expect(clippy::cast_precision_loss, reason = "sizes are far below 2^53")]
            let rows = k as f64;
            norm = (norm * norm + s * (2.0 * kernels::trace(&d, k) + rows * s)).max(0.0).sqrt();
        }
        let norm = norm.sqrt().sqrt();
        let by = (norm * factor).max(LEAST_DIVISOR).recip();
        self.pending *= by;
        Ok(by)
    }

    fn divide_rows(&mut self, gram: usize, factor: f64) -> Result<()> {
        self.square_of_x(gram, false)?;
        kernels::divide_rows(&mut self.x, self.shape, &self.squares[gram].view(), factor);
        Ok(())
    }
}

/// Frobenius norm, in float64.
pub(super) fn norm(x: &FlatView<'_>) -> f64 {
    kernels::fold_on_cpu(&WideSquares, &mut [Job { read: [*x], write: [] }])
        .first()
        .map_or(0.0, |[sum]| sum.sqrt())
}

/// `x <- factor x`.
pub(super) fn scale(x: FlatViewMut<'_>, factor: f64) {
    kernels::run_on_cpu(&Scale(factor), &mut [Job { read: [], write: [x] }]);
}
