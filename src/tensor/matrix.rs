//! Matrices inside the memory of tensors.

use tch::Tensor;

use super::{DType, FlatView};
use crate::error::Result;

/// A matrix inside the storage of a tensor: rows of equal length at equal distances.
#[derive(Clone, Copy, Debug)]
pub struct MatrixView {
    /// From its first element to its last.
    flat: FlatView,
    rows: usize,
    cols: usize,
    stride: usize,
}

impl FlatView {
    /// A matrix whose first element is element `offset` and whose rows begin `stride` elements apart.
    #[must_use]
    pub fn area(&self, offset: usize, [rows, cols]: [usize; 2], stride: usize) -> MatrixView {
        if rows * cols == 0 {
            return MatrixView { flat: self.part(0, 0), rows, cols, stride: cols };
        }
        MatrixView { flat: self.part(offset, (rows - 1) * stride + cols), rows, cols, stride }
    }
}

impl MatrixView {
    /// No elements.
    pub const EMPTY: Self = Self { flat: FlatView::EMPTY, rows: 0, cols: 0, stride: 0 };

    /// Rows and columns.
    #[must_use]
    pub fn shape(&self) -> [usize; 2] {
        [self.rows, self.cols]
    }

    /// Element type.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.flat.dtype
    }

    /// All elements in a row, where they lie together.
    #[must_use]
    pub fn flat(&self) -> Option<FlatView> {
        (self.stride == self.cols || self.rows <= 1).then_some(self.flat)
    }

    /// The elements in order, in as few runs as they lie in.
    pub fn runs(&self) -> impl Iterator<Item = FlatView> + use<> {
        let (flat, area) = (self.flat(), *self);
        let rows = if flat.is_some() { 0 } else { self.rows };
        flat.into_iter().chain((0..rows).map(move |row| area.row(row)))
    }

    /// All elements, from the first to the last: for an area whose elements lie together.
    #[must_use]
    pub fn all(&self) -> FlatView {
        debug_assert!(self.flat().is_some());
        self.flat
    }

    /// The elements from the first to the last, with what lies between the rows, and the distance of the rows.
    #[must_use]
    pub fn strided(&self) -> (FlatView, usize) {
        (self.flat, self.stride)
    }

    /// One row.
    #[must_use]
    pub fn row(&self, row: usize) -> FlatView {
        self.flat.part(row * self.stride, self.cols)
    }

    /// The first columns.
    #[must_use]
    pub fn first_cols(&self, cols: usize) -> Self {
        self.flat.area(0, [self.rows, cols.min(self.cols)], self.stride)
    }

    /// The elements as a tensor `[rows, cols]` that shares their memory.
    ///
    /// # Errors
    /// Whatever libtorch says.
    pub fn tensor(&self) -> Result<Tensor> {
        self.flat.strided([self.rows, self.cols], self.stride)
    }
}

/// Areas of one shape and type in one tensor or buffer, each as far behind the one before it.
#[derive(Clone, Copy, Debug)]
pub struct Stack {
    first: MatrixView,
    count: usize,
    /// Elements from one to the next; of a single one, 0.
    distance: usize,
}

impl Stack {
    /// One area.
    #[must_use]
    pub fn new(first: MatrixView) -> Self {
        Self { first, count: 1, distance: 0 }
    }

    /// The same with one more, where that lies as far behind the last as the others do. What is in another tensor does
    /// not, wherever that tensor happens to be: results would depend on it.
    #[must_use]
    pub fn with(self, next: &MatrixView) -> Option<Self> {
        let MatrixView { flat, rows, cols, stride } = self.first;
        let (other, bytes) = (next.flat, flat.dtype.bytes());
        let start = |flat: &FlatView| flat.address.wrapping_sub(flat.first * flat.dtype.bytes());
        let alike = [next.rows, next.cols, next.stride] == [rows, cols, stride]
            && (other.dtype, other.device, other.encoding) == (flat.dtype, flat.device, flat.encoding)
            && start(&other) == start(&flat)
            && rows * cols > 0;
        let last = flat.address + (self.count - 1) * self.distance * bytes;
        let behind = other.address.checked_sub(last).filter(|gap| alike && *gap > 0 && gap % bytes == 0)?;
        let fits = self.count == 1 || behind == self.distance * bytes;
        fits.then_some(Self { count: self.count + 1, distance: behind / bytes, ..self })
    }

    /// The elements as a tensor `[count, rows, cols]` that shares their memory.
    ///
    /// # Errors
    /// Whatever libtorch says.
    pub fn tensor(&self) -> Result<Tensor> {
        let MatrixView { flat, rows, cols, stride } = self.first;
        flat.stacked([self.count, rows, cols], [self.distance, stride])
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::disallowed_methods, reason = "a test may panic")]
mod tests {
    use super::*;

    #[test]
    fn stack_takes_areas_of_one_tensor_at_equal_distances() {
        let numbers = Tensor::arange(60, (tch::Kind::Double, tch::Device::Cpu));
        let all = FlatView::of(&numbers).unwrap();
        // Blocks of two columns of a matrix with six.
        let blocks = [0, 2, 4].map(|col| all.area(col, [3, 2], 6));
        let stack = Stack::new(blocks[0]).with(&blocks[1]).unwrap().with(&blocks[2]).unwrap();
        let expected = numbers.narrow(0, 0, 18).view([3, 3, 2]).transpose(0, 1);
        assert_eq!(stack.tensor().unwrap(), expected);
        assert!(Stack::new(blocks[1]).with(&blocks[0]).is_none());
        assert!(Stack::new(blocks[0]).with(&blocks[1]).unwrap().with(&all.area(5, [3, 2], 6)).is_none());
        assert!(Stack::new(blocks[0]).with(&all.area(20, [3, 2], 7)).is_none());
        let other = FlatView::of(&numbers.copy()).unwrap();
        let [low, high] = if other.address > all.address { [all, other] } else { [other, all] };
        assert!(Stack::new(low.area(0, [3, 2], 6)).with(&high.area(0, [3, 2], 6)).is_none());
    }
}
