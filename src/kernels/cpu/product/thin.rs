//! Products with a thin matrix, or with one of any rank where libtorch is slower. Those of the transpose of a large row-major
//! one libraries are slow at: they bring the large one into another order first.

use std::cell::RefCell;
use std::thread::LocalKey;

use super::{Kernel, Operand, Outcome, Product, Side, TOGETHER};
use crate::error::{Error, Result};
use crate::tensor::{FlatViewMut, MatrixView, MatrixViewMut};
use crate::threads;

/// Bytes of the columns or rows of the large factor that one task brings into panels: a part of the second-level cache.
const PIECE: usize = 1 << 19;
/// Words of a line of the cache.
const LINE: usize = 8;
/// Rows of a result at most that are one task's.
const ROWS: usize = 256;
/// Tiles of rows that are one task's where the result is read too: its pages then are few at a time. Of 4096 x 1024 with
/// an inner dimension of 48, 1 to 3 take 3.0 to 3.2 ms, 19 take 4.0.
const TILES_READ: usize = 2;

thread_local! {
    // Memory of the panels of both factors: all panels of the factor that every task reads, and a part of the other one. The
    // thread keeps its pages from one step to the next.
    static WHOLE: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
    static PART: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
}

/// `out ← keep·out + left·right`, each factor as it is stored or transposed.
#[derive(Debug)]
pub struct ThinProduct<'a> {
    /// The result.
    pub out: MatrixViewMut<'a>,
    /// The left factor, and whether it is transposed.
    pub left: (MatrixView<'a>, bool),
    /// The right factor, and whether it is transposed.
    pub right: (MatrixView<'a>, bool),
    /// Factor of what is in `out`, which is not read where this is zero.
    pub keep: f64,
}

impl ThinProduct<'_> {
    /// The dimension that is summed over.
    #[must_use]
    pub fn inner(&self) -> usize {
        let (left, transposed) = self.left;
        left.shape()[usize::from(!transposed)]
    }

    /// Tests whether this is the product of a transpose alone, which replaces what is in `out`.
    #[must_use]
    pub fn is_turned(&self) -> bool {
        self.left.1 && !self.right.1 && self.keep == 0.0
    }

    /// Multiplications.
    #[must_use]
    pub fn work(&self) -> usize {
        self.out.shape().iter().product::<usize>() * self.inner()
    }
}

impl Kernel {
    /// Computes products that are turned, or whose left factor is not transposed, one after the other, each by all threads.
    /// Work is split by sizes alone, so neither the number of threads nor the other products change a bit.
    ///
    /// # Errors
    /// `Error::Internal` for another product or another type.
    pub fn thin_products(self, products: &mut [ThinProduct<'_>]) -> Result<()> {
        let spread = threads::get() > 1 && products.iter().map(ThinProduct::work).sum::<usize>() >= TOGETHER;
        let mut all = || {
            products.iter_mut().try_for_each(|product| match product.left.1 {
                false => self.straight(product, spread),
                true if product.is_turned() => self.turned(product, spread),
                true => Err(Error::Internal(format!("{product:?} is no product of a transpose alone"))),
            })
        };
        if spread { threads::run(all) } else { all() }
    }

    fn straight(self, product: &mut ThinProduct<'_>, spread: bool) -> Result<()> {
        let ([_, cols], inner, keep, left) =
            (product.out.shape(), product.inner(), product.keep, product.left.0);
        let (right, transposed) = product.right;
        let right =
            if transposed { lines(right, [0, cols], inner) } else { columns(right, [0, cols], inner) };
        with(&WHOLE, self.elements(Side::Right, cols, inner), self, |mut whole| {
            self.pack(Side::Right, &right, &mut whole, spread)?;
            let (unit, whole) = (self.tile_rows(), whole.view());
            let most = if keep == 0.0 { ROWS } else { TILES_READ * unit };
            let height = (PIECE / (inner * self.dtype().bytes()).max(1)).min(most) / unit;
            let height = height.max(1) * unit;
            try_each(product.out.reborrow().into_groups(height), spread, |i, out| {
                let count = out.shape()[0];
                with(&PART, self.elements(Side::Left, count, inner), self, |mut part| {
                    self.pack(Side::Left, &lines(left, [i * height, count], inner), &mut part, false)?;
                    let (out, stride) = out.strided();
                    let plain = Product::plain(out, [count, cols, inner], stride, Outcome::General);
                    self.multiply(&part.view(), &whole, &mut Product { keep, ..plain }, false)
                })
            })
        })
    }

    fn turned(self, product: &mut ThinProduct<'_>, spread: bool) -> Result<()> {
        let ([_, cols], inner, left) = (product.out.shape(), product.inner(), product.left.0);
        // The transposed product: columns of the thin factor times columns of the large one.
        with(&WHOLE, self.elements(Side::Left, cols, inner), self, |mut thin| {
            self.pack(Side::Left, &columns(product.right.0, [0, cols], inner), &mut thin, spread)?;
            let (unit, thin) = (self.tile_cols(), thin.view());
            let width = (PIECE / (inner * self.dtype().bytes()).max(1) / unit).max(1) * unit;
            try_each(product.out.reborrow().into_groups(width), spread, |i, out| {
                let count = out.shape()[0];
                with(&PART, self.elements(Side::Right, count, inner), self, |mut large| {
                    self.pack(Side::Right, &columns(left, [i * width, count], inner), &mut large, false)?;
                    let (out, stride) = out.strided();
                    let mut product = Product::plain(out, [cols, count, inner], stride, Outcome::Transposed);
                    self.multiply(&thin, &large.view(), &mut product, false)
                })
            })
        })
    }
}

/// Some rows of a matrix.
fn lines(matrix: MatrixView<'_>, [first, count]: [usize; 2], inner: usize) -> Operand<'_> {
    let (x, stride) = matrix.strided();
    let start = (first * stride).min(x.len());
    Operand { x: x.part(start, x.len() - start), count, inner, steps: [stride, 1] }
}

/// Some columns of a matrix.
fn columns(matrix: MatrixView<'_>, [first, count]: [usize; 2], inner: usize) -> Operand<'_> {
    let (x, stride) = matrix.strided();
    Operand { x: x.part(first, x.len() - first.min(x.len())), count, inner, steps: [1, stride] }
}

/// Runs tasks on parts of a matrix, all of them, and returns an error of one that failed.
fn try_each<'m>(
    parts: impl Iterator<Item = MatrixViewMut<'m>>,
    spread: bool,
    task: impl Fn(usize, &mut MatrixViewMut<'m>) -> Result<()> + Sync,
) -> Result<()> {
    let mut parts: Vec<_> = parts.map(|part| (part, Ok(()))).collect();
    if spread {
        threads::chunks(&mut parts, 1, |i, part| {
            for (part, done) in part {
                *done = task(i, part);
            }
        });
    } else {
        for (i, (part, done)) in parts.iter_mut().enumerate() {
            *done = task(i, part);
        }
    }
    parts.into_iter().try_for_each(|(_, done)| done)
}

/// Lends memory that the calling thread keeps.
fn with<R>(
    kept: &'static LocalKey<RefCell<Vec<u64>>>,
    elements: usize,
    kernel: Kernel,
    work: impl FnOnce(FlatViewMut<'_>) -> R,
) -> R {
    let mut memory = kept.take();
    // From the first whole line of the cache on: a register of AMX is loaded in lines.
    let words = (elements * kernel.dtype().bytes()).div_ceil(size_of::<u64>());
    if memory.len() < words + LINE {
        memory.resize(words + LINE, 0);
    }
    let start = memory.as_ptr().align_offset(LINE * size_of::<u64>()).min(LINE);
    let result = work(FlatViewMut::over(&mut memory[start..], kernel.dtype()));
    kept.set(memory);
    result
}
