//! Matrices inside the memory of tensors.

use super::{DType, Device, Element, Encoding, FlatPtr, FlatView, FlatViewMut, Lent, LentMut};
use crate::error::{Error, Result};

/// A matrix inside the storage of a tensor, borrowed to be read: rows of equal length with a fixed stride. The memory between
/// its rows may belong to others.
#[derive(Clone, Copy, Debug)]
pub struct MatrixView<'a> {
    /// From its first element to its last. No slice is made of it but of one row, or where there is nothing between rows.
    flat: FlatView<'a>,
    rows: usize,
    cols: usize,
    stride: usize,
}

/// A matrix inside the storage of a tensor, borrowed to be written; as [`MatrixView`].
#[derive(Debug)]
pub struct MatrixViewMut<'a> {
    flat: FlatViewMut<'a>,
    rows: usize,
    cols: usize,
    stride: usize,
}

/// Elements from the first to the last of a matrix, with what lies between its rows: they have an address and no slice.
#[derive(Clone, Copy, Debug)]
pub struct Strided<'a>(FlatView<'a>);

/// The same of a matrix that is written.
#[derive(Debug)]
pub struct StridedMut<'a>(FlatViewMut<'a>);

/// Elements that a matrix takes in memory.
fn extent([rows, cols]: [usize; 2], stride: usize) -> usize {
    if rows * cols == 0 {
        return 0;
    }
    (rows - 1) * stride + cols
}

impl<'a> FlatView<'a> {
    /// Returns the matrix that begins with element `offset` and has a row stride of `stride` elements.
    ///
    /// # Panics
    /// Panics if the matrix is not inside.
    #[must_use]
    #[inline]
    pub fn matrix(&self, offset: usize, shape @ [rows, cols]: [usize; 2], stride: usize) -> MatrixView<'a> {
        let stride = if rows * cols == 0 { cols } else { stride };
        let (flat, extent) = (self.part(offset, usize::MAX), extent(shape, stride));
        assert!(extent <= flat.len(), "a matrix beyond the end of its memory");
        MatrixView { flat: flat.part(0, extent), rows, cols, stride }
    }
}

impl<'a> FlatViewMut<'a> {
    /// Returns the matrix that begins with element `offset` and has a row stride of `stride` elements.
    ///
    /// # Panics
    /// Panics if the matrix is not inside, or its rows share elements.
    #[must_use]
    #[inline]
    pub fn into_matrix(
        self,
        offset: usize,
        shape @ [rows, cols]: [usize; 2],
        stride: usize,
    ) -> MatrixViewMut<'a> {
        let stride = if rows * cols == 0 { cols } else { stride };
        let (flat, extent) = (self.into_part(offset, usize::MAX), extent(shape, stride));
        assert!(extent <= flat.len(), "a matrix beyond the end of its memory");
        assert!(rows <= 1 || stride >= cols, "a matrix is written whose rows share elements");
        MatrixViewMut { flat: flat.into_part(0, extent), rows, cols, stride }
    }

    /// Several matrices at once.
    ///
    /// # Errors
    /// `Error::Internal` for matrices that share an element, or are not inside.
    pub fn into_matrices(self, places: &[Rect]) -> Result<Vec<MatrixViewMut<'a>>> {
        let mut order: Vec<&Rect> = places.iter().filter(|place| place.end() > place.offset).collect();
        order.sort_unstable_by_key(|place| place.offset);
        let mut open: Vec<&Rect> = Vec::new();
        for place in order {
            open.retain(|before| before.end() > place.offset);
            if place.end() > self.len() || open.iter().any(|before| before.shares(place)) {
                return Err(Error::Internal(format!("matrices that overlap in a buffer: {place:?}")));
            }
            open.push(place);
        }
        let one = |&Rect { offset, rows, cols, stride }: &Rect| {
            // SAFETY: no two of them have an element both, as was seen above.
            unsafe { self.alias() }.into_matrix(offset, [rows, cols], stride)
        };
        Ok(places.iter().map(one).collect())
    }
}

/// Matrix inside row-major storage: its first element, size, and the distance of its rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rect {
    /// First element.
    pub offset: usize,
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
    /// Elements from one row to the next.
    pub stride: usize,
}

impl Rect {
    /// A matrix whose elements all lie together.
    #[must_use]
    pub fn packed(offset: usize, rows: usize, cols: usize) -> Self {
        Self { offset, rows, cols, stride: cols }
    }

    /// Number of elements.
    #[must_use]
    pub fn numel(&self) -> usize {
        self.rows * self.cols
    }
}

impl Rect {
    fn end(&self) -> usize {
        self.offset + extent([self.rows, self.cols], self.stride)
    }

    /// Tests whether an element is in both matrices.
    fn shares(&self, other: &Self) -> bool {
        let [rows, cols, other_rows, other_cols] = [self.rows, self.cols, other.rows, other.cols];
        if self.stride == other.stride && self.stride > 0 {
            let [col, other_col] = [self, other].map(|place| place.offset % place.stride);
            let inside = col + cols <= self.stride && other_col + other_cols <= self.stride;
            if inside && (col + cols <= other_col || other_col + other_cols <= col) {
                return false;
            }
        }
        // The first row of the other one that ends behind the beginning of each row.
        let step = other.stride.max(1);
        (0..rows).map(|row| self.offset + row * self.stride).any(|start| {
            let behind = (start + 1).saturating_sub(other.offset + other_cols);
            let row = behind.div_ceil(step);
            row < other_rows && other.offset + row * other.stride < start + cols
        })
    }
}

impl FlatPtr {
    /// Returns a matrix as [`FlatViewMut::into_matrix`] does, from memory whose other elements are written by others.
    ///
    /// # Safety
    /// As [`FlatPtr::view_mut`], of the matrix' own elements alone.
    #[must_use]
    #[inline]
    pub unsafe fn matrix_mut(
        self,
        encoding: Option<&Encoding>,
        offset: usize,
        shape: [usize; 2],
        stride: usize,
    ) -> MatrixViewMut<'_> {
        // SAFETY: a `MatrixViewMut` gives access to its own elements only, which the caller answers for.
        unsafe { self.view_mut(encoding) }.into_matrix(offset, shape, stride)
    }
}

/// Accessors that both kinds of matrices have.
macro_rules! facts {
    ($matrix:ident) => {
        impl $matrix<'_> {
            /// Rows and columns.
            #[must_use]
            #[inline]
            pub fn shape(&self) -> [usize; 2] {
                [self.rows, self.cols]
            }

            /// Element type.
            #[must_use]
            #[inline]
            pub fn dtype(&self) -> DType {
                self.flat.dtype()
            }

            /// Device of the elements.
            #[must_use]
            pub fn device(&self) -> Device {
                self.flat.device()
            }

            /// Tests whether the elements are more than numbers of their type.
            #[must_use]
            pub fn is_encoded(&self) -> bool {
                self.flat.is_encoded()
            }

            /// Tests whether all elements are contiguous.
            #[must_use]
            #[inline]
            pub fn is_flat(&self) -> bool {
                self.stride == self.cols || self.rows <= 1
            }
        }
    };
}
facts!(MatrixView);
facts!(MatrixViewMut);

impl<'a> MatrixView<'a> {
    /// No elements.
    pub const EMPTY: Self = Self { flat: FlatView::EMPTY, rows: 0, cols: 0, stride: 0 };

    /// As [`FlatView::to_read`].
    #[must_use]
    pub fn to_read(self) -> Self {
        Self { flat: self.flat.to_read(), ..self }
    }

    /// All elements in a row, where they lie together.
    #[must_use]
    pub fn flat(&self) -> Option<FlatView<'a>> {
        self.is_flat().then_some(self.flat)
    }

    /// The elements in order, in as few runs as they lie in.
    pub fn runs(&self) -> impl Iterator<Item = FlatView<'a>> + use<'a> {
        let (flat, matrix) = (self.flat(), *self);
        let rows = if flat.is_some() { 0 } else { self.rows };
        flat.into_iter().chain((0..rows).map(move |row| matrix.row(row)))
    }

    /// All elements, from the first to the last: for a matrix whose elements lie together.
    ///
    /// # Panics
    /// Panics if the elements are not contiguous.
    #[must_use]
    pub fn all(&self) -> FlatView<'a> {
        assert!(self.is_flat(), "a matrix with something between its rows was taken for one without");
        self.flat
    }

    /// The elements from the first to the last, with what lies between the rows, and the distance of the rows.
    #[must_use]
    pub fn strided(&self) -> (Strided<'a>, usize) {
        (Strided(self.flat), self.stride)
    }

    /// One row.
    #[must_use]
    #[inline]
    pub fn row(&self, row: usize) -> FlatView<'a> {
        if row >= self.rows { self.flat.part(0, 0) } else { self.flat.part(row * self.stride, self.cols) }
    }

    /// Some rows.
    #[must_use]
    pub fn rows(&self, first: usize, count: usize) -> Self {
        let first = first.min(self.rows);
        self.flat.matrix(first * self.stride, [count.min(self.rows - first), self.cols], self.stride)
    }

    /// The first columns.
    #[must_use]
    pub fn first_cols(&self, cols: usize) -> Self {
        self.flat.matrix(0, [self.rows, cols.min(self.cols)], self.stride)
    }

    /// The elements as a tensor `[rows, cols]` that shares their memory, to be read.
    ///
    /// # Errors
    /// Whatever libtorch says.
    pub fn tensor(&self) -> Result<Lent<'a>> {
        self.flat.strided([self.rows, self.cols], self.stride)
    }
}

impl<'a> MatrixViewMut<'a> {
    /// No elements.
    pub const EMPTY: Self = Self { flat: FlatViewMut::EMPTY, rows: 0, cols: 0, stride: 0 };

    /// The same, read while it is not used otherwise.
    #[must_use]
    pub fn view(&self) -> MatrixView<'_> {
        let Self { rows, cols, stride, .. } = *self;
        MatrixView { flat: self.flat.view(), rows, cols, stride }
    }

    /// Converts to a view that only reads the same matrix.
    #[must_use]
    pub fn into_view(self) -> MatrixView<'a> {
        let Self { flat, rows, cols, stride } = self;
        MatrixView { flat: flat.into_view(), rows, cols, stride }
    }

    /// Reborrows with a shorter lifetime.
    #[must_use]
    #[inline]
    pub fn reborrow(&mut self) -> MatrixViewMut<'_> {
        let Self { rows, cols, stride, .. } = *self;
        MatrixViewMut { flat: self.flat.reborrow(), rows, cols, stride }
    }

    /// All elements, from the first to the last: for a matrix whose elements lie together.
    ///
    /// # Panics
    /// Panics if the elements are not contiguous.
    #[must_use]
    #[inline]
    pub fn into_all(self) -> FlatViewMut<'a> {
        assert!(self.is_flat(), "a matrix with something between its rows was taken for one without");
        self.flat
    }

    /// Reborrows all elements as `into_all` does, with a shorter lifetime.
    ///
    /// # Panics
    /// As `into_all`.
    #[must_use]
    #[inline]
    pub fn all(&mut self) -> FlatViewMut<'_> {
        self.reborrow().into_all()
    }

    /// The rows one after the other.
    pub fn into_rows(self) -> impl Iterator<Item = FlatViewMut<'a>> {
        let Self { mut flat, rows, cols, stride } = self;
        (0..rows).map(move |_| {
            let row = flat.take_first(cols);
            let _between = flat.take_first(stride - cols);
            row
        })
    }

    /// The elements in order, in as few runs as they lie in.
    pub fn into_runs(self) -> impl Iterator<Item = FlatViewMut<'a>> {
        let (flat, strided) = if self.is_flat() { (Some(self.flat), None) } else { (None, Some(self)) };
        flat.into_iter().chain(strided.into_iter().flat_map(Self::into_rows))
    }

    /// Groups of `count` rows, the last one shorter.
    pub fn into_groups(self, count: usize) -> impl Iterator<Item = Self> {
        let Self { mut flat, mut rows, cols, stride } = self;
        std::iter::from_fn(move || {
            let here = rows.min(count.max(1));
            rows -= here;
            (here > 0).then(|| flat.take_first(here * stride).into_matrix(0, [here, cols], stride))
        })
    }

    /// Groups of `count` columns, the last one narrower.
    pub fn into_col_groups(self, count: usize) -> impl Iterator<Item = Self> {
        let (rows, cols, stride, count) = (self.rows, self.cols, self.stride, count.max(1));
        (0..cols.div_ceil(count)).map(move |group| {
            let first = group * count;
            // SAFETY: a matrix gives access to its own elements only, and no two groups have one of them both.
            unsafe { self.flat.alias() }.into_matrix(first, [rows, count.min(cols - first)], stride)
        })
    }

    /// Reborrows one row with a shorter lifetime.
    #[must_use]
    #[inline]
    pub fn row(&mut self, row: usize) -> FlatViewMut<'_> {
        self.reborrow().into_row(row)
    }

    /// One row.
    #[must_use]
    #[inline]
    pub fn into_row(self, row: usize) -> FlatViewMut<'a> {
        let Self { flat, rows, cols, stride } = self;
        if row >= rows { flat.into_part(0, 0) } else { flat.into_part(row * stride, cols) }
    }

    /// The first columns.
    #[must_use]
    pub fn into_first_cols(self, cols: usize) -> Self {
        let shape = [self.rows, cols.min(self.cols)];
        self.flat.into_matrix(0, shape, self.stride)
    }

    /// The elements from the first to the last, with what lies between the rows, and the distance of the rows.
    #[must_use]
    pub fn strided(&mut self) -> (StridedMut<'_>, usize) {
        (StridedMut(self.flat.reborrow()), self.stride)
    }

    /// As `strided`, for as long as the matrix was.
    #[must_use]
    pub fn into_strided(self) -> (StridedMut<'a>, usize) {
        (StridedMut(self.flat), self.stride)
    }

    /// The elements as a tensor `[rows, cols]` that shares their memory.
    ///
    /// # Errors
    /// Whatever libtorch says.
    pub fn tensor(&mut self) -> Result<LentMut<'_>> {
        let (shape, stride) = ([self.rows, self.cols], self.stride);
        self.flat.reborrow().strided(shape, stride)
    }
}

impl<'a> From<FlatView<'a>> for Strided<'a> {
    fn from(flat: FlatView<'a>) -> Self {
        Self(flat)
    }
}

impl<'a> From<FlatViewMut<'a>> for StridedMut<'a> {
    fn from(flat: FlatViewMut<'a>) -> Self {
        Self(flat)
    }
}

macro_rules! strided {
    ($strided:ident) => {
        #[allow(dead_code, reason = "of both kinds the same")]
        impl $strided<'_> {
            /// Elements from the first to the last.
            #[must_use]
            pub fn len(&self) -> usize {
                self.0.len()
            }

            /// Tests whether there are no elements.
            #[must_use]
            pub fn is_empty(&self) -> bool {
                self.0.is_empty()
            }

            /// Element type.
            #[must_use]
            pub fn dtype(&self) -> DType {
                self.0.dtype()
            }

            /// Device of the elements.
            #[must_use]
            pub fn device(&self) -> Device {
                self.0.device()
            }

            /// As [`FlatView::device_address`].
            ///
            /// # Errors
            /// As there.
            pub fn device_address(&self) -> Result<usize> {
                self.0.device_address()
            }

            /// As [`FlatView::encoded_address`].
            #[must_use]
            pub fn encoded_address(&self) -> usize {
                self.0.encoded_address()
            }
        }
    };
}
strided!(Strided);
strided!(StridedMut);

impl Strided<'_> {
    /// `len` elements from `offset`, shortened to what there is.
    #[must_use]
    pub fn part(&self, offset: usize, len: usize) -> Self {
        Self(self.0.part(offset, len))
    }

    /// The first element of a type in memory of the host, to be read by kernels that take pointers.
    ///
    /// # Panics
    /// As [`FlatView::slice`].
    #[must_use]
    pub fn pointer<T: Element>(&self) -> *const T {
        self.0.pointer()
    }
}

impl StridedMut<'_> {
    /// `len` elements from `offset`, shortened to what there is.
    #[must_use]
    pub fn into_part(self, offset: usize, len: usize) -> Self {
        Self(self.0.into_part(offset, len))
    }

    /// Reborrows with a shorter lifetime.
    #[must_use]
    pub fn reborrow(&mut self) -> StridedMut<'_> {
        StridedMut(self.0.reborrow())
    }

    /// The same, read while it is not used otherwise.
    #[must_use]
    pub fn view(&self) -> Strided<'_> {
        Strided(self.0.view())
    }

    /// The first element of a type in memory of the host, for kernels that take pointers.
    ///
    /// # Panics
    /// As [`FlatViewMut::slice_mut`].
    #[must_use]
    pub fn pointer<T: Element>(&mut self) -> *mut T {
        self.0.pointer()
    }
}

/// Matrices of one shape and type in one tensor or buffer, each as far behind the one before it.
#[derive(Clone, Copy, Debug)]
pub struct Stack {
    first: FlatPtr,
    /// The first element of the tensor.
    start: usize,
    shape: [usize; 2],
    stride: usize,
    count: usize,
    /// Elements from one to the next; of a single one, 0.
    distance: usize,
}

impl Stack {
    /// One matrix.
    #[must_use]
    pub fn new(one: &MatrixView<'_>) -> Self {
        let first = one.flat.ptr();
        let start = first.address().wrapping_sub(one.flat.first() * one.dtype().bytes());
        Self { first, start, shape: one.shape(), stride: one.stride, count: 1, distance: 0 }
    }

    /// The same with one more, where that lies as far behind the last as the others do. What is in another tensor does
    /// not, wherever that tensor happens to be: results would depend on it.
    #[must_use]
    pub fn with(self, next: &MatrixView<'_>) -> Option<Self> {
        let (one, bytes) = (Self::new(next), self.first.dtype().bytes());
        let alike = (one.shape, one.stride, one.start) == (self.shape, self.stride, self.start)
            && (one.first.dtype(), one.first.device()) == (self.first.dtype(), self.first.device())
            && self.shape[0] * self.shape[1] > 0;
        let last = self.first.address() + (self.count - 1) * self.distance * bytes;
        let behind =
            one.first.address().checked_sub(last).filter(|gap| alike && *gap > 0 && gap % bytes == 0)?;
        let fits = self.count == 1 || behind == self.distance * bytes;
        fits.then_some(Self { count: self.count + 1, distance: behind / bytes, ..self })
    }

    fn of<'a>(mut all: impl Iterator<Item = MatrixView<'a>>) -> Result<Self> {
        let none = || Error::Internal("matrices that are no stack".into());
        let first = all.next().ok_or_else(none)?;
        all.try_fold(Self::new(&first), |stack, next| stack.with(&next)).ok_or_else(none)
    }

    fn sizes(&self) -> ([usize; 3], [usize; 2]) {
        ([self.count, self.shape[0], self.shape[1]], [self.distance, self.stride])
    }
}

/// Matrices that are a [`Stack`], as a tensor `[count, rows, cols]` that shares their memory, to be read.
///
/// # Errors
/// `Error::Internal` for others.
pub fn stacked<'a>(all: impl Iterator<Item = MatrixView<'a>>) -> Result<Lent<'a>> {
    let stack = Stack::of(all)?;
    let (sizes, steps) = stack.sizes();
    // SAFETY: each of the matrices is borrowed for as long as the result.
    Ok(unsafe { Lent::new(stack.first.over_stack(sizes, steps)?) })
}

/// The same of matrices that are written.
///
/// # Errors
/// As [`stacked`].
#[allow(clippy::needless_pass_by_value)] // borrowed as long as the result
pub fn stacked_mut<'s, 'm: 's>(all: Vec<&'s mut MatrixViewMut<'m>>) -> Result<LentMut<'s>> {
    let stack = Stack::of(all.iter().map(|one| one.view()))?;
    let (sizes, steps) = stack.sizes();
    // SAFETY: each of the matrices is borrowed to be written for as long as the result.
    Ok(unsafe { LentMut::new(stack.first.over_stack(sizes, steps)?) })
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::disallowed_methods, reason = "a test may panic")]
mod tests {
    use tch::Tensor;

    use super::*;
    use crate::tensor::test_views::view;

    #[test]
    fn stack_takes_matrices_of_one_tensor_at_equal_distances() {
        let numbers = Tensor::arange(60, (tch::Kind::Double, tch::Device::Cpu));
        let all = view(&numbers);
        // Blocks of two columns of a matrix with six.
        let blocks = [0, 2, 4].map(|col| all.matrix(col, [3, 2], 6));
        let expected = numbers.narrow(0, 0, 18).view([3, 3, 2]).transpose(0, 1);
        assert_eq!(*stacked(blocks.into_iter()).unwrap(), expected);
        assert!(Stack::new(&blocks[1]).with(&blocks[0]).is_none());
        let two = Stack::new(&blocks[0]).with(&blocks[1]).unwrap();
        assert!(two.with(&all.matrix(5, [3, 2], 6)).is_none());
        assert!(Stack::new(&blocks[0]).with(&all.matrix(20, [3, 2], 7)).is_none());
        let copy = numbers.copy();
        let other = view(&copy);
        let [low, high] =
            if other.encoded_address() > all.encoded_address() { [all, other] } else { [other, all] };
        assert!(Stack::new(&low.matrix(0, [3, 2], 6)).with(&high.matrix(0, [3, 2], 6)).is_none());
    }

    #[test]
    fn rows_and_groups_of_a_matrix_with_gaps_are_its_own_elements() {
        let mut memory = vec![0_u64; 20];
        let matrix = || [1.0, 2.0, 3.0];
        for (row, value) in
            FlatViewMut::over(&mut memory, DType::F64).into_matrix(2, [3, 4], 6).into_rows().zip(matrix())
        {
            row.into_slice::<f64>().fill(value);
        }
        let found: Vec<f64> = memory.iter().map(|x| f64::from_bits(*x)).collect();
        assert_eq!(found[..8], [0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0]);
        assert_eq!(found[12..], [0.0, 0.0, 3.0, 3.0, 3.0, 3.0, 0.0, 0.0]);
        let shapes = FlatViewMut::over(&mut memory, DType::F64).into_matrix(2, [3, 4], 6).into_groups(2);
        assert_eq!(shapes.map(|group| group.shape()).collect::<Vec<_>>(), [[2, 4], [1, 4]]);
    }

    #[test]
    fn matrices_are_refused_exactly_where_they_share_an_element() {
        let place = |offset, [rows, cols]: [usize; 2], stride| Rect { offset, rows, cols, stride };
        let elements = |p: &Rect| {
            let rows = (0..p.rows).map(|row| p.offset + row * p.stride);
            let cols = p.cols;
            rows.flat_map(move |start| start..start + cols).collect::<Vec<_>>()
        };
        let (mut refused, mut taken) = (0, 0);
        for (offset, rows, cols, stride) in (0..14).flat_map(|o| {
            (0..4).flat_map(move |r| (1..4).flat_map(move |c| (c..7).map(move |s| (o, r, c, s))))
        }) {
            for one in [place(3, [3, 2], 6), place(4, [1, 5], 5), place(2, [4, 3], 4), place(5, [2, 2], 2)] {
                let other = place(offset, [rows, cols], stride);
                let mut memory = vec![0_u64; 40];
                let found = FlatViewMut::over(&mut memory, DType::F64).into_matrices(&[one, other]);
                let shared = elements(&one).iter().any(|at| elements(&other).contains(at));
                assert_eq!(found.is_err(), shared, "{one:?} {other:?}");
                if shared { refused += 1 } else { taken += 1 }
            }
        }
        assert!(refused > 100 && taken > 100);
        let mut memory = vec![0_u64; 4];
        let beyond = FlatViewMut::over(&mut memory, DType::F64).into_matrices(&[place(0, [2, 2], 3)]);
        assert!(beyond.is_err());
    }
}
