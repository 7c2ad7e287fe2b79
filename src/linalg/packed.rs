//! The products of an iteration by kernels of our own, on one matrix in memory that the caller gives.

use std::ops::Range;

use super::products::Products;
use crate::error::{Error, Result};
use crate::kernels::{self, Combine, Kernel, Operand, Outcome, Product, Scale, Side, WideSquares};
use crate::tensor::FlatView;

/// Elements of the long side of `X` that go into panels at a time for `X Xᵀ`, where the sums are kept in the type of the
/// elements, and for `P X`: panels of the whole matrix would need its memory twice. Twice the blocks cost 4 % of `X Xᵀ`.
const BLOCK: usize = 2048;

/// Which symmetric matrix is in panels; `X` and parts of it are brought there for every use.
type BufferShard = Option<usize>;

/// One matrix and its workspace.
///
/// A symmetric matrix is `D + s I`, of which `D` is in memory. In bfloat16 a product has the `s` that is usual on its diagonal:
/// a diagonal is far larger than the rest, and rounding it is most of the error of the Gram form. Largest singular values are
/// 1.150 without `s` and 1.142 with it where exact ones are 1.141.
pub(super) struct Packed {
    kernel: Kernel,
    x: FlatView,
    shape: [usize; 2],
    squares: Vec<FlatView>,
    shifts: Vec<f64>,
    panels: [FlatView; 2],
    held: [BufferShard; 2],
    /// What `X` is still to be multiplied by.
    pending: f64,
    spread: bool,
}

/// Multiples of which the parts of a workspace are, in bytes.
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

impl Packed {
    /// Elements of memory that a matrix of this shape needs with so many symmetric matrices beside it.
    pub(super) fn elements(kernel: Kernel, shape: [usize; 2], squares: usize) -> usize {
        let [left, right, square] = parts(kernel, shape);
        left + right + squares * square
    }

    /// Workspace of the row-major matrix `x`. `spread` over the threads of the pool that the products run in.
    pub(super) fn new(
        kernel: Kernel,
        x: FlatView,
        shape: [usize; 2],
        squares: usize,
        memory: &FlatView,
        spread: bool,
    ) -> Result<Self> {
        if x.len() != shape[0] * shape[1] || memory.len() < Self::elements(kernel, shape, squares) {
            return Err(Error::Internal(format!("{x:?} and {memory:?} for a matrix {shape:?}")));
        }
        let [left, right, square] = parts(kernel, shape);
        let k = shape[0].min(shape[1]);
        let panels = [memory.part(0, left), memory.part(left, right)];
        let shifts = vec![0.0; squares];
        let squares = (0..squares).map(|i| memory.part(left + right + i * square, k * k)).collect();
        Ok(Self { kernel, x, shape, squares, shifts, panels, held: [None; 2], pending: 1.0, spread })
    }

    fn short(&self) -> usize {
        self.shape[0].min(self.shape[1])
    }

    /// Brings a symmetric matrix into the panels of one side, where it is not there yet.
    fn hold(&mut self, side: Side, square: usize) -> Result<()> {
        let k = self.short();
        let place = usize::from(side == Side::Right);
        if self.held[place] != Some(square) {
            // Rows are columns: the kernel says which it reads faster.
            let rows = self.rows(square);
            let from = if self.kernel.prefers_rows() { rows } else { Operand { steps: [1, k], ..rows } };
            self.kernel.pack(side, &from, &self.panels[place], self.spread)?;
            self.held[place] = Some(square);
        }
        Ok(())
    }

    /// Brings `X`, or a part of its rows, into panels of one side.
    fn bring(&mut self, side: Side, from: &Operand) -> Result<()> {
        let place = usize::from(side == Side::Right);
        self.held[place] = None;
        self.kernel.pack(side, from, &self.panels[place], self.spread)
    }

    /// Forgets panels of a matrix that is written.
    fn written(&mut self, square: usize) {
        for held in &mut self.held {
            if *held == Some(square) {
                *held = None;
            }
        }
    }

    fn rows(&self, square: usize) -> Operand {
        let k = self.short();
        Operand { x: self.squares[square], count: k, inner: k, steps: [k, 1] }
    }

    /// Writes to `S[out]` a product whose operands are in panels, less what is usual on its diagonal.
    fn shifted(&mut self, out: usize, operands: [&Operand; 2], mut product: Product<'_>) -> Result<()> {
        product.diagonal += product.keep * self.shifts[out];
        let shift = product.usual_diagonal(operands);
        product.diagonal -= shift;
        self.shifts[out] = shift;
        self.product(&product)
    }

    /// `S[out] <- X Xᵀ`, as it is where not `shifts`.
    fn square_of_x(&mut self, out: usize, shifts: bool) -> Result<()> {
        let ([rows, cols], k) = (self.shape, self.short());
        let long = rows.max(cols);
        self.written(out);
        self.shifts[out] = 0.0;
        for range in ranges(long, if blocked(self.kernel) { BLOCK.max(k) } else { long }) {
            let (start, end) = (range.start, range.end);
            let (offset, steps) = if rows > cols { (start * cols, [1, cols]) } else { (start, [cols, 1]) };
            let x = self.x.part(offset, self.x.len());
            let from = Operand { x, count: k, inner: end - start, steps };
            self.bring(Side::Left, &from)?;
            self.bring(Side::Right, &from)?;
            let keep = if start == 0 { 0.0 } else { 1.0 };
            let plain = Product::plain(self.squares[out], [k, k, end - start], k, Outcome::Symmetric);
            let product = Product { keep, ..plain };
            if shifts {
                self.shifted(out, [&from; 2], product)?;
            } else {
                self.product(&product)?;
            }
        }
        Ok(())
    }

    fn product(&self, product: &Product<'_>) -> Result<()> {
        self.kernel.multiply(&self.panels[0], &self.panels[1], product, self.spread)
    }
}

impl Products for Packed {
    fn gram(&mut self, out: usize) -> Result<()> {
        self.square_of_x(out, true)
    }

    fn multiply(&mut self, out: usize, [a, b]: [usize; 2], add: &[(f64, usize)], factor: f64) -> Result<()> {
        let k = self.short();
        self.hold(Side::Left, a)?;
        self.hold(Side::Right, b)?;
        self.written(out);
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
        let addends: Vec<_> =
            addends.into_iter().map(|(weight, square)| (weight * factor, self.squares[square])).collect();
        let plain = Product::plain(self.squares[out], [k; 3], k, Outcome::Symmetric);
        let product = Product { factor, add: &addends, diagonal: factor * diagonal, ..plain };
        let (a, b) = (self.rows(a), self.rows(b));
        self.shifted(out, [&a, &b], product)
    }

    fn combine(&mut self, out: usize, keep: f64, a: usize, factor: f64) -> Result<()> {
        self.written(out);
        self.shifts[out] = keep * self.shifts[out] + factor * self.shifts[a];
        kernels::run_on_cpu(&Combine { keep, factor }, &[[self.squares[out], self.squares[a]]]);
        Ok(())
    }

    fn apply(&mut self, p: usize, keep: f64, factor: f64) -> Result<()> {
        let ([rows, cols], k) = (self.shape, self.short());
        let (factor, keep) = (self.pending * factor, self.pending * (keep + factor * self.shifts[p]));
        self.pending = 1.0;
        let tall = rows > cols;
        for range in ranges(rows.max(cols), BLOCK.max(k)) {
            // All of this part of X is in panels before the first element of the result is written over it.
            let (offset, count) = (range.start * if tall { cols } else { 1 }, range.len());
            let out = self.x.part(offset, self.x.len() - offset);
            let part = |steps| Operand { x: out, count, inner: k, steps };
            let size = if tall {
                self.bring(Side::Left, &part([cols, 1]))?;
                self.hold(Side::Right, p)?;
                [count, cols, k]
            } else {
                self.hold(Side::Left, p)?;
                self.bring(Side::Right, &part([1, cols]))?;
                [rows, count, k]
            };
            self.product(&Product { factor, keep, ..Product::plain(out, size, cols, Outcome::General) })?;
        }
        Ok(())
    }

    fn divide(&mut self, _gram: usize, square: usize, factor: f64) -> Result<f64> {
        // Of D + s I.
        let (d, s) = (&self.squares[square], self.shifts[square]);
        let mut norm = norm(d);
        if s != 0.0 {
            let k = self.short();
            #[expect(clippy::cast_precision_loss, reason = "sizes are far below 2^53")]
            let rows = k as f64;
            norm = (norm * norm + s * (2.0 * kernels::trace(d, k) + rows * s)).max(0.0).sqrt();
        }
        let norm = norm.sqrt().sqrt();
        let by = (norm * factor).max(TINY).recip();
        self.pending *= by;
        Ok(by)
    }

    fn divide_rows(&mut self, gram: usize, factor: f64) -> Result<()> {
        self.square_of_x(gram, false)?;
        kernels::divide_rows(&self.x, self.shape, &self.squares[gram], factor);
        Ok(())
    }
}

/// The smallest divisor, whose reciprocal is a float32: a zero matrix stays zero.
pub(super) const TINY: f64 = 1e-37;

/// Frobenius norm, in float64.
pub(super) fn norm(x: &FlatView) -> f64 {
    kernels::fold_on_cpu(&WideSquares, &[[*x]]).first().map_or(0.0, |[sum]| sum.sqrt())
}

/// `x <- factor x`.
pub(super) fn scale(x: &FlatView, factor: f64) {
    kernels::run_on_cpu(&Scale(factor), &[[*x]]);
}
