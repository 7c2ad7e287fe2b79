//! Matrices inside the memory of tensors.

use tch::Tensor;

use super::{DType, Slab};
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

/// Areas of one shape and type in one tensor or buffer, each as far behind the one before it.
#[derive(Clone, Copy, Debug)]
pub struct Stack {
    first: Area,
    count: usize,
    /// Elements from one to the next; of a single one, 0.
    distance: usize,
}

impl Stack {
    /// One area.
    #[must_use]
    pub fn new(first: Area) -> Self {
        Self { first, count: 1, distance: 0 }
    }

    /// The same with one more, where that lies as far behind the last as the others do. What is in another tensor does
    /// not, wherever that tensor happens to be: results would depend on it.
    #[must_use]
    pub fn with(self, next: &Area) -> Option<Self> {
        let Area { slab, rows, cols, stride } = self.first;
        let (other, bytes) = (next.slab, slab.dtype.bytes());
        let start = |slab: &Slab| slab.address.wrapping_sub(slab.first * slab.dtype.bytes());
        let alike = [next.rows, next.cols, next.stride] == [rows, cols, stride]
            && (other.dtype, other.device, other.form) == (slab.dtype, slab.device, slab.form)
            && start(&other) == start(&slab)
            && rows * cols > 0;
        let last = slab.address + (self.count - 1) * self.distance * bytes;
        let behind = other.address.checked_sub(last).filter(|gap| alike && *gap > 0 && gap % bytes == 0)?;
        let fits = self.count == 1 || behind == self.distance * bytes;
        fits.then_some(Self { count: self.count + 1, distance: behind / bytes, ..self })
    }

    /// The elements as a tensor `[count, rows, cols]` that shares their memory.
    ///
    /// # Errors
    /// Whatever libtorch says.
    pub fn tensor(&self) -> Result<Tensor> {
        let Area { slab, rows, cols, stride } = self.first;
        slab.stacked([self.count, rows, cols], [self.distance, stride])
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::disallowed_methods, reason = "a test may panic")]
mod tests {
    use super::*;

    #[test]
    fn stack_takes_areas_of_one_tensor_at_equal_distances() {
        let numbers = Tensor::arange(60, (tch::Kind::Double, tch::Device::Cpu));
        let all = Slab::of(&numbers).unwrap();
        // Blocks of two columns of a matrix with six.
        let blocks = [0, 2, 4].map(|col| all.area(col, [3, 2], 6));
        let stack = Stack::new(blocks[0]).with(&blocks[1]).unwrap().with(&blocks[2]).unwrap();
        let expected = numbers.narrow(0, 0, 18).view([3, 3, 2]).transpose(0, 1);
        assert_eq!(stack.tensor().unwrap(), expected);
        assert!(Stack::new(blocks[1]).with(&blocks[0]).is_none());
        assert!(Stack::new(blocks[0]).with(&blocks[1]).unwrap().with(&all.area(5, [3, 2], 6)).is_none());
        assert!(Stack::new(blocks[0]).with(&all.area(20, [3, 2], 7)).is_none());
        let other = Slab::of(&numbers.copy()).unwrap();
        let [low, high] = if other.address > all.address { [all, other] } else { [other, all] };
        assert!(Stack::new(low.area(0, [3, 2], 6)).with(&high.area(0, [3, 2], 6)).is_none());
    }
}
