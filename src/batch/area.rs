//! Matrices inside the memory of tensors.

use tch::Tensor;

use super::Slab;
use crate::dtype::DType;
use crate::error::Result;

/// A matrix inside the storage of a tensor: rows of equal length at equal distances.
#[derive(Clone, Copy, Debug)]
pub struct Area {
    /// From its first element to its last.
    slab: Slab,
    rows: usize,
    cols: usize,
    stride: usize,
}

impl Slab {
    /// A matrix whose first element is element `offset` and whose rows begin `stride` elements apart.
    #[must_use]
    pub fn area(&self, offset: usize, [rows, cols]: [usize; 2], stride: usize) -> Area {
        if rows * cols == 0 {
            return Area { slab: self.part(0, 0), rows, cols, stride: cols };
        }
        Area { slab: self.part(offset, (rows - 1) * stride + cols), rows, cols, stride }
    }
}

impl Area {
    /// No elements.
    pub const EMPTY: Self = Self { slab: Slab::EMPTY, rows: 0, cols: 0, stride: 0 };

    /// Rows and columns.
    #[must_use]
    pub fn shape(&self) -> [usize; 2] {
        [self.rows, self.cols]
    }

    /// Element type.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.slab.dtype
    }

    /// All elements in a row, where they lie together.
    #[must_use]
    pub fn flat(&self) -> Option<Slab> {
        (self.stride == self.cols || self.rows <= 1).then_some(self.slab)
    }

    /// The elements in order, in as few runs as they lie in.
    pub fn runs(&self) -> impl Iterator<Item = Slab> + use<> {
        let (flat, area) = (self.flat(), *self);
        let rows = if flat.is_some() { 0 } else { self.rows };
        flat.into_iter().chain((0..rows).map(move |row| area.row(row)))
    }

    /// All elements, from the first to the last: for an area whose elements lie together.
    #[must_use]
    pub fn all(&self) -> Slab {
        debug_assert!(self.flat().is_some());
        self.slab
    }

    /// The elements from the first to the last, with what lies between the rows, and the distance of the rows.
    #[must_use]
    pub fn strided(&self) -> (Slab, usize) {
        (self.slab, self.stride)
    }

    /// One row.
    #[must_use]
    pub fn row(&self, row: usize) -> Slab {
        self.slab.part(row * self.stride, self.cols)
    }

    /// The first columns.
    #[must_use]
    pub fn first_cols(&self, cols: usize) -> Self {
        self.slab.area(0, [self.rows, cols.min(self.cols)], self.stride)
    }

    /// The elements as a tensor `[rows, cols]` that shares their memory.
    ///
    /// # Errors
    /// Whatever libtorch says.
    pub fn tensor(&self) -> Result<Tensor> {
        self.slab.strided([self.rows, self.cols], self.stride)
    }
}
