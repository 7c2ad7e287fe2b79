//! Addresses of elements in the memory of a tensor or of the arena.

use half::{bf16, f16};
use tch::Tensor;

use super::storage::{prefetch, require_memory};
use super::{DType, Device};
use crate::error::{Error, Result};

/// An element type of Rust that stands for a `DType`.
///
/// # Safety
/// It has the size of `DTYPE`, and every pattern of bits is a value of it.
pub unsafe trait Element: Copy + Send + Sync + 'static {
    /// The type it stands for.
    const DTYPE: DType;
}
// SAFETY: 16 bits, all of them values.
unsafe impl Element for f16 {
    const DTYPE: DType = DType::F16;
}
// SAFETY: 16 bits, all of them values.
unsafe impl Element for bf16 {
    const DTYPE: DType = DType::BF16;
}
// SAFETY: 32 bits, all of them values.
unsafe impl Element for f32 {
    const DTYPE: DType = DType::F32;
}
// SAFETY: 64 bits, all of them values.
unsafe impl Element for f64 {
    const DTYPE: DType = DType::F64;
}

// SAFETY: 16 bits, all of them values.
unsafe impl Element for i16 {
    const DTYPE: DType = DType::I16;
}

/// Pointer to elements. It borrows nothing and reads nothing: a [`FlatView`](super::FlatView) or a [`FlatViewMut`](super::FlatViewMut) is made
/// of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlatPtr {
    pub(super) at: *mut u8,
    pub(super) len: usize,
    pub(super) dtype: DType,
    pub(super) device: Device,
}

// SAFETY: an address and a length. What reads or writes there is a view, and `view` and `view_mut` say who may have one:
// a `FlatView` is shared like a slice of numbers, a `FlatViewMut` is handed on like an exclusive one.
unsafe impl Send for FlatPtr {}
// SAFETY: an address and a length: who shares one can read and write nothing by it but through `view` and `view_mut`,
// which say who may.
unsafe impl Sync for FlatPtr {}

impl FlatPtr {
    /// No elements.
    pub const EMPTY: Self = Self { at: std::ptr::null_mut(), len: 0, dtype: DType::F32, device: Device::Cpu };

    /// The elements of a contiguous tensor.
    ///
    /// # Errors
    /// `Error::Internal` for another kind of device, type or a strided tensor: the session stages those first.
    pub fn of(tensor: &Tensor) -> Result<Self> {
        let dtype = DType::from_kind(tensor.f_kind()?).ok_or_else(|| {
            Error::Internal("a tensor without a floating-point type reached a kernel".into())
        })?;
        Self::typed(tensor, dtype)
    }

    /// As `of`, where the tensor's elements are known to be of this type: a tensor of bytes may hold either code.
    ///
    /// # Errors
    /// As `of`.
    pub fn typed(tensor: &Tensor, dtype: DType) -> Result<Self> {
        if tensor.f_kind()? != dtype.kind() {
            return Err(Error::Internal(format!(
                "a tensor that is not of {} reached a kernel",
                dtype.name()
            )));
        }
        let device = Device::of(tensor)?;
        if !tensor.is_contiguous() {
            return Err(Error::Internal("a tensor that is not contiguous reached a kernel".into()));
        }
        require_memory(tensor)?;
        let found = Self { at: tensor.data_ptr().cast(), len: tensor.numel(), dtype, device };
        if !found.is_aligned() {
            return Err(Error::Value(format!(
                "a tensor's memory must begin at a multiple of its element's size ({} bytes), got address {:#x}. Use \
                 .clone()",
                dtype.bytes(),
                found.address()
            )));
        }
        Ok(found)
    }

    /// Memory that is no tensor's, as elements of this type.
    #[must_use]
    pub fn over(memory: &mut [u64], dtype: DType) -> Self {
        let (len, at) = (size_of_val(memory) / dtype.bytes(), memory.as_mut_ptr().cast());
        Self { at, len, dtype, device: Device::Cpu }
    }

    /// Returns memory at an address from libtorch, or `None` where no element can be there.
    pub(super) fn checked(at: *mut u8, len: usize, dtype: DType) -> Option<Self> {
        let found = Self { at, len, dtype, device: Device::Cpu };
        (!at.is_null() && len > 0 && found.is_aligned()).then_some(found)
    }

    fn is_aligned(&self) -> bool {
        self.at.addr().is_multiple_of(self.dtype.bytes())
    }

    /// `len` elements of another type from byte `offset` of this memory: how buffers lie in the arena.
    ///
    /// # Errors
    /// `Error::Internal` beyond the end or for an address that the type cannot have.
    pub fn carve(&self, offset: usize, len: usize, dtype: DType) -> Result<Self> {
        let carved = Self { at: self.at.wrapping_add(offset), len, dtype, device: self.device };
        if offset + len * dtype.bytes() > self.bytes() || !carved.is_aligned() {
            return Err(Error::Internal(format!(
                "a buffer of {len} elements at byte {offset} is outside the arena"
            )));
        }
        Ok(carved)
    }

    /// Number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Tests whether there are no elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Element type.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Device of the elements.
    #[must_use]
    pub fn device(&self) -> Device {
        self.device
    }

    /// Their bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.len * self.dtype.bytes()
    }

    /// The address of the first one.
    #[must_use]
    pub fn address(&self) -> usize {
        self.at.addr()
    }

    /// Tests whether an element has a byte that one of the others has too.
    #[must_use]
    pub fn overlaps(&self, other: &Self) -> bool {
        self.len > 0
            && other.len > 0
            && self.address() < other.address() + other.bytes()
            && other.address() < self.address() + self.bytes()
    }

    /// The same elements, as memory of this device.
    #[must_use]
    pub fn on(self, device: Device) -> Self {
        Self { device, ..self }
    }

    /// Asks for a number that is alone, as a counter is.
    #[inline]
    pub fn prefetch_number(&self) {
        if self.len == 1 {
            prefetch(self.address());
        }
    }

    /// `len` elements from `offset`, shortened to what there is.
    pub(super) fn part(self, offset: usize, len: usize) -> Self {
        let offset = offset.min(self.len);
        let at = self.at.wrapping_add(offset * self.dtype.bytes());
        Self { at, len: len.min(self.len - offset), ..self }
    }

    /// The pointer, for elements of this type in memory of the host.
    #[inline]
    pub(super) fn pointer<T: Element>(&self) -> *mut T {
        assert!(self.device == Device::Cpu, "a kernel of the CPU was given memory of a device");
        assert!(self.dtype == T::DTYPE, "elements were taken for those of another type");
        if self.len == 0 { std::ptr::NonNull::dangling().as_ptr() } else { self.at.cast() }
    }

    /// A tensor of these sizes and strides over the memory.
    ///
    /// # Safety
    /// All of it lies within these elements, and the result goes before them.
    unsafe fn tensor(&self, size: &[i64], stride: &[i64]) -> Result<Tensor> {
        // SAFETY: the caller upholds it.
        Ok(unsafe { Tensor::f_from_blob(self.at, size, stride, self.dtype.kind(), self.device.torch()) }?)
    }

    fn none(&self, size: &[i64]) -> Result<Tensor> {
        Ok(Tensor::f_empty(size, (self.dtype.kind(), self.device.torch()))?)
    }

    /// The elements as a row-major tensor of this shape.
    ///
    /// # Safety
    /// The result goes before the elements.
    pub(super) unsafe fn shaped(&self, shape: &[usize]) -> Result<Tensor> {
        if shape.iter().product::<usize>() != self.len {
            return Err(Error::Internal(format!("{} elements viewed as {shape:?}", self.len)));
        }
        let size = shape.iter().map(|&d| to_i64(d)).collect::<Result<Vec<_>>>()?;
        if self.len == 0 {
            return self.none(&size);
        }
        let mut stride = vec![1_i64; size.len()];
        for d in (1..size.len()).rev() {
            stride[d - 1] = stride[d] * size[d];
        }
        // SAFETY: as many elements; the caller upholds the rest.
        unsafe { self.tensor(&size, &stride) }
    }

    /// The first of matrices in one tensor, with the others, as a tensor.
    ///
    /// # Safety
    /// The matrices are there, and the result goes before them.
    pub(super) unsafe fn over_stack(
        &self,
        sizes: [usize; 3],
        [distance, step]: [usize; 2],
    ) -> Result<Tensor> {
        let [count, rows, cols] = sizes.map(to_i64);
        let (size, stride) = ([count?, rows?, cols?], [to_i64(distance)?, to_i64(step)?, 1]);
        // SAFETY: the caller upholds it.
        unsafe { self.tensor(&size, &stride) }
    }

    /// Returns a matrix with a row stride of `step` elements as a tensor.
    ///
    /// # Safety
    /// The result is dropped before the elements are freed.
    pub(super) unsafe fn strided(&self, [rows, cols]: [usize; 2], step: usize) -> Result<Tensor> {
        let size = [to_i64(rows)?, to_i64(cols)?];
        if rows * cols == 0 {
            return self.none(&size);
        }
        if (rows - 1) * step + cols > self.len {
            return Err(Error::Internal(format!("{} elements viewed as {size:?}", self.len)));
        }
        // SAFETY: the last element was checked to be inside; the caller upholds the rest.
        unsafe { self.tensor(&size, &[to_i64(step)?, 1]) }
    }
}

/// A size as libtorch wants it.
///
/// # Errors
/// `Error::Value` beyond 2⁶³ - 1.
pub fn to_i64(n: usize) -> Result<i64> {
    i64::try_from(n).map_err(|_| Error::Value(format!("a size of {n} elements is too large")))
}
