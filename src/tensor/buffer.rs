//! Elements in the memory of a tensor or of the arena.

use half::{bf16, f16};
use tch::Tensor;

use super::{DType, Device, Encoding, prefetch};
use crate::error::{Error, Result};

/// A contiguous run of elements, borrowed from a tensor that the session keeps alive.
#[derive(Clone, Copy, Debug)]
pub struct FlatView {
    pub(super) address: usize,
    pub(super) len: usize,
    pub(super) dtype: DType,
    pub(super) device: Device,
    /// Address of a `Encoding`, where the elements are more than numbers of their type; else 0.
    pub(super) encoding: usize,
    /// Place of the first element in the tensor that the encoding is about.
    pub(super) first: usize,
}

/// An element type of Rust that stands for a `DType`.
pub trait Element: Copy + Send + Sync + 'static {
    /// The type it stands for.
    const DTYPE: DType;
}
impl Element for f16 {
    const DTYPE: DType = DType::F16;
}
impl Element for bf16 {
    const DTYPE: DType = DType::BF16;
}
impl Element for f32 {
    const DTYPE: DType = DType::F32;
}
impl Element for f64 {
    const DTYPE: DType = DType::F64;
}

impl FlatView {
    /// No elements.
    pub const EMPTY: Self =
        Self { address: 0, len: 0, dtype: DType::F32, device: Device::Cpu, encoding: 0, first: 0 };

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
        let address = address_of(tensor);
        let flat = Self { address, len: tensor.numel(), dtype, device, ..Self::EMPTY };
        if flat.address == 0 && flat.len > 0 {
            return Err(Error::Value("a tensor without memory cannot be used: its storage was freed".into()));
        }
        Ok(flat)
    }

    /// Memory that is no tensor's, as elements of this type. It outlives the view.
    #[must_use]
    pub fn over(memory: &mut [u64], dtype: DType) -> Self {
        let (address, len) = (memory.as_mut_ptr() as usize, size_of_val(memory) / dtype.bytes());
        Self { address, len, dtype, ..Self::EMPTY }
    }

    /// `len` elements of another type from byte `offset` of this memory: how buffers lie in the arena.
    ///
    /// # Errors
    /// `Error::Internal` beyond the end or for an address that the type cannot have.
    pub fn carve(&self, offset: usize, len: usize, dtype: DType) -> Result<Self> {
        let address = self.address + offset;
        if offset + len * dtype.bytes() > self.len * self.dtype.bytes()
            || !address.is_multiple_of(dtype.bytes())
        {
            return Err(Error::Internal(format!(
                "a buffer of {len} elements at byte {offset} is outside the arena"
            )));
        }
        Ok(Self { address, len, dtype, device: self.device, ..Self::EMPTY })
    }

    /// Number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Element type.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Where the elements are.
    #[must_use]
    pub fn device(&self) -> Device {
        self.device
    }

    /// The same elements, as memory of this place.
    #[must_use]
    pub fn at(&self, device: Device) -> Self {
        Self { device, ..*self }
    }

    /// Where plain numbers are, for a kernel of a device that knows no others.
    ///
    /// # Errors
    /// `Error::Cuda` for elements that are more than numbers of their type.
    pub fn device_address(&self) -> Result<usize> {
        if self.encoding != 0 {
            return Err(Error::Cuda(
                "there is no kernel for 8-bit states or stochastic rounding in this device".into(),
            ));
        }
        Ok(self.address)
    }

    /// Where the elements are, for a kernel of a device that heeds their encoding.
    #[must_use]
    pub fn encoded_address(&self) -> usize {
        self.address
    }

    /// Whether the elements are more than numbers of their type.
    #[must_use]
    pub fn is_encoded(&self) -> bool {
        self.encoding != 0
    }

    /// A slice may be made of memory of the host only.
    #[inline]
    fn check_place(&self) {
        assert!(self.device == Device::Cpu, "a kernel of the CPU was given memory of a device");
    }

    /// `len` elements from `offset`, cut to what there is.
    #[must_use]
    pub fn part(&self, offset: usize, len: usize) -> Self {
        let offset = offset.min(self.len);
        Self {
            address: self.address + offset * self.dtype.bytes(),
            len: len.min(self.len - offset),
            first: self.first + offset,
            ..*self
        }
    }

    /// The same elements, which begin the tensor that `encoding` describes.
    #[must_use]
    pub fn encoded_as(&self, encoding: &Encoding) -> Self {
        Self { encoding: std::ptr::from_ref(encoding) as usize, first: 0, ..*self }
    }

    /// The encoding of the elements, and the place of the first one in the tensor that it is about.
    ///
    /// # Safety
    /// The encoding given to `encoded_as` is alive where it was, and `'a` ends before it does.
    #[must_use]
    pub unsafe fn encoding<'a>(&self) -> Option<(&'a Encoding, usize)> {
        // SAFETY: `encoded_as` took the address of an encoding; the caller upholds its lifetime.
        let encoding = unsafe { (self.encoding as *const Encoding).as_ref() };
        encoding.map(|encoding| (encoding, self.first))
    }

    /// The elements of a type of one byte.
    ///
    /// # Safety
    /// As `slice`.
    #[must_use]
    #[allow(clippy::mut_from_ref)] // the flat is a pointer, not the owner
    pub unsafe fn codes<'a>(&self) -> &'a mut [u8] {
        if self.len == 0 || !self.dtype.is_quantized() {
            return &mut [];
        }
        self.check_place();
        // SAFETY: `typed` checked type and contiguity; the caller upholds lifetime and exclusivity.
        unsafe { std::slice::from_raw_parts_mut(self.address as *mut u8, self.len) }
    }

    /// Asks for a number that is alone, as a counter is.
    #[inline]
    pub fn prefetch_number(&self) {
        if self.len == 1 {
            prefetch(self.address);
        }
    }

    /// Asks for the memory of the first `len` elements from `offset` on.
    #[inline]
    pub fn prefetch(&self, offset: usize, len: usize) {
        let part = self.part(offset, len);
        let end = part.address + part.len * part.dtype.bytes();
        (part.address..end).step_by(64).for_each(prefetch);
    }

    /// Adds one to a float32 counter and returns the new value.
    #[must_use]
    pub fn increment(&self) -> f64 {
        if self.dtype != DType::F32 || self.len != 1 {
            return f64::NAN;
        }
        // SAFETY: `of` checked type and device; the stage that counts owns the state.
        let counter = unsafe { self.slice::<f32>() };
        counter[0] += 1.0;
        f64::from(counter[0])
    }

    /// The value of a float32 counter.
    #[must_use]
    pub fn count(&self) -> f64 {
        if self.dtype != DType::F32 || self.len != 1 {
            return f64::NAN;
        }
        // SAFETY: as in `increment`.
        f64::from(unsafe { self.slice::<f32>() }[0])
    }

    /// The elements of a float64 view, none of another.
    #[must_use]
    pub fn numbers<'a>(&self) -> &'a mut [f64] {
        if self.dtype != DType::F64 {
            return &mut [];
        }
        // SAFETY: the type was checked; buffers of numbers belong to the stage that runs.
        unsafe { self.slice::<f64>() }
    }

    /// Copies the elements to a view of the same type and length; the two may overlap.
    pub fn copy_to(&self, to: &Self) {
        debug_assert!(self.len == to.len && self.dtype == to.dtype);
        self.check_place();
        to.check_place();
        let bytes = self.len.min(to.len) * self.dtype.bytes();
        if bytes > 0 {
            // SAFETY: both views are live memory of at least `bytes` bytes, which the running step alone uses.
            unsafe { std::ptr::copy(self.address as *const u8, to.address as *mut u8, bytes) };
        }
    }

    /// Sets all elements to zero.
    ///
    /// # Errors
    /// Whatever libtorch says of memory of a device.
    pub fn clear(&self) -> Result<()> {
        if self.device != Device::Cpu {
            let _ = self.tensor(&[self.len])?.f_zero_()?;
        } else if self.len > 0 {
            // SAFETY: the view is live memory of this length, which the running step alone uses.
            unsafe { std::ptr::write_bytes(self.address as *mut u8, 0, self.len * self.dtype.bytes()) };
        }
        Ok(())
    }

    /// The elements as a slice.
    ///
    /// # Safety
    /// The tensor behind the view is alive, nobody else reads or writes these elements while the slice
    /// lives, and `'a` ends before the stage does.
    #[must_use]
    #[allow(clippy::mut_from_ref)] // the flat is a pointer, not the owner
    pub unsafe fn slice<'a, T: Element>(&self) -> &'a mut [T] {
        debug_assert_eq!(T::DTYPE, self.dtype);
        if self.len == 0 {
            return &mut [];
        }
        self.check_place();
        // SAFETY: `of` checked type and contiguity; the caller upholds lifetime and exclusivity.
        unsafe { std::slice::from_raw_parts_mut(self.address as *mut T, self.len) }
    }

    /// A matrix whose rows begin `step` elements apart, as a tensor that shares its memory.
    pub(super) fn strided(&self, [rows, cols]: [usize; 2], step: usize) -> Result<Tensor> {
        let size = [to_i64(rows)?, to_i64(cols)?];
        if rows * cols == 0 {
            return Ok(Tensor::f_empty(size, (self.dtype.kind(), self.device.torch()))?);
        }
        if (rows - 1) * step + cols > self.len {
            return Err(Error::Internal(format!("{} elements viewed as {size:?}", self.len)));
        }
        let stride = [to_i64(step)?, 1];
        // SAFETY: as in `tensor`; the last element was checked to be inside.
        unsafe { self.view(&size, &stride) }
    }

    /// The first of matrices that begin `distance` elements apart in one tensor, with the others: `[count, rows, cols]`.
    pub(super) fn stacked(&self, sizes: [usize; 3], [distance, step]: [usize; 2]) -> Result<Tensor> {
        let [count, rows, cols] = sizes.map(to_i64);
        let (size, stride) = ([count?, rows?, cols?], [to_i64(distance)?, to_i64(step)?, 1]);
        // SAFETY: as in `tensor`; a `Stack` has been given each of the matrices as a view of the same tensor.
        unsafe { self.view(&size, &stride) }
    }

    /// The memory as a tensor of these sizes and strides.
    ///
    /// # Safety
    /// All of it lies within the view, whose tensor outlives the result.
    unsafe fn view(&self, size: &[i64], stride: &[i64]) -> Result<Tensor> {
        let (data, kind) = (self.address as *const u8, self.dtype.kind());
        // SAFETY: the caller upholds it.
        Ok(unsafe { Tensor::f_from_blob(data, size, stride, kind, self.device.torch()) }?)
    }

    /// The elements as a row-major tensor of this shape that shares their memory.
    ///
    /// # Errors
    /// `Error::Internal` when the shape has another number of elements.
    pub fn tensor(&self, shape: &[usize]) -> Result<Tensor> {
        if shape.iter().product::<usize>() != self.len {
            return Err(Error::Internal(format!("{} elements viewed as {shape:?}", self.len)));
        }
        let size = shape.iter().map(|&d| to_i64(d)).collect::<Result<Vec<_>>>()?;
        if self.len == 0 {
            return Ok(Tensor::f_empty(&size, (self.dtype.kind(), self.device.torch()))?);
        }
        let mut stride = vec![1_i64; size.len()];
        for d in (1..size.len()).rev() {
            stride[d - 1] = stride[d] * size[d];
        }
        // SAFETY: the view's tensor outlives the stage (the session holds it) and the result does not leave it.
        unsafe { self.view(&size, &stride) }
    }
}

/// Where the first element of a tensor is.
#[must_use]
pub fn address_of(tensor: &Tensor) -> usize {
    tensor.data_ptr() as usize
}

/// A size as libtorch wants it.
///
/// # Errors
/// `Error::Value` beyond 2⁶³ - 1.
pub fn to_i64(n: usize) -> Result<i64> {
    i64::try_from(n).map_err(|_| Error::Value(format!("a size of {n} elements is too large")))
}
