//! Elements in the memory of a tensor or of the arena.

use std::marker::PhantomData;

use half::{bf16, f16};
use tch::Tensor;

use super::device::emulated_here;
use super::{DType, Device, Encoding, Lent, LentMut, prefetch, require_memory};
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

/// Pointer to elements. It borrows nothing and reads nothing: a [`FlatView`] or a [`FlatViewMut`] is made of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlatPtr {
    at: *mut u8,
    len: usize,
    dtype: DType,
    device: Device,
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

    /// Memory that libtorch has told; none where no element can be there.
    pub(super) fn told(at: *mut u8, len: usize, dtype: DType) -> Option<Self> {
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
    fn part(self, offset: usize, len: usize) -> Self {
        let offset = offset.min(self.len);
        let at = self.at.wrapping_add(offset * self.dtype.bytes());
        Self { at, len: len.min(self.len - offset), ..self }
    }

    /// A view that reads the elements.
    ///
    /// # Safety
    /// As long as the view lives, the elements are there, and nobody writes them or, where there is an encoding, what it refers to.
    #[must_use]
    pub unsafe fn view(self, encoding: Option<&Encoding>) -> FlatView<'_> {
        FlatView { ptr: self, encoding, first: 0, of: PhantomData }
    }

    /// A view that writes the elements.
    ///
    /// # Safety
    /// As long as the view lives, the elements are there, and nobody else reads or writes them or, where there is an encoding, what it
    /// refers to.
    #[must_use]
    pub unsafe fn view_mut(self, encoding: Option<&Encoding>) -> FlatViewMut<'_> {
        FlatViewMut { ptr: self, encoding, first: 0, of: PhantomData }
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
    unsafe fn shaped(&self, shape: &[usize]) -> Result<Tensor> {
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

    /// A matrix whose rows begin `step` elements apart, as a tensor.
    ///
    /// # Safety
    /// The result goes before the elements.
    unsafe fn strided(&self, [rows, cols]: [usize; 2], step: usize) -> Result<Tensor> {
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

/// Elements of a tensor or of the arena, borrowed to be read.
#[derive(Clone, Copy, Debug)]
pub struct FlatView<'a> {
    ptr: FlatPtr,
    /// Encoding of the elements, if they are more than numbers of their type.
    pub(super) encoding: Option<&'a Encoding>,
    /// Offset of the first element in the tensor that the encoding is about.
    first: usize,
    of: PhantomData<&'a [u8]>,
}

/// Elements of a tensor or of the arena, borrowed to be written by whoever has the view.
///
/// It is neither copied nor cloned, so no two views of one element are written; `unsound_uses.rs` has what does not compile.
#[derive(Debug)]
pub struct FlatViewMut<'a> {
    ptr: FlatPtr,
    encoding: Option<&'a Encoding>,
    first: usize,
    of: PhantomData<&'a mut [u8]>,
}

/// Accessors that both kinds of views have.
macro_rules! facts {
    ($view:ident) => {
        impl $view<'_> {
            /// Number of elements.
            #[must_use]
            #[inline]
            pub fn len(&self) -> usize {
                self.ptr.len
            }

            /// Tests whether there are no elements.
            #[must_use]
            pub fn is_empty(&self) -> bool {
                self.ptr.len == 0
            }

            /// Element type.
            #[must_use]
            #[inline]
            pub fn dtype(&self) -> DType {
                self.ptr.dtype
            }

            /// Device of the elements.
            #[must_use]
            pub fn device(&self) -> Device {
                self.ptr.device
            }

            /// Address of plain numbers, for a kernel of a device that knows no others.
            ///
            /// # Errors
            /// `Error::Cuda` for elements that are more than numbers of their type.
            pub fn device_address(&self) -> Result<usize> {
                if self.is_encoded() {
                    return Err(Error::Cuda(
                        "there is no kernel for 8-bit states or stochastic rounding in this device".into(),
                    ));
                }
                Ok(self.ptr.address())
            }

            /// Address of the elements, for a kernel of a device that heeds their encoding.
            #[must_use]
            pub fn encoded_address(&self) -> usize {
                self.ptr.address()
            }

            /// Tests whether the elements are more than numbers of their type.
            #[must_use]
            pub fn is_encoded(&self) -> bool {
                self.encoding.is_some()
            }

            /// Asks for the memory of the first `len` elements from `offset` on.
            #[inline]
            pub fn prefetch(&self, offset: usize, len: usize) {
                let part = self.ptr.part(offset, len);
                (part.address()..part.address() + part.bytes()).step_by(64).for_each(prefetch);
            }
        }
    };
}
facts!(FlatView);
facts!(FlatViewMut);

impl<'a> FlatView<'a> {
    /// No elements.
    pub const EMPTY: Self = Self { ptr: FlatPtr::EMPTY, encoding: None, first: 0, of: PhantomData };

    /// The elements of a contiguous tensor.
    ///
    /// # Safety
    /// Nobody writes them for all of `'a`: libtorch may know other owners of the memory, and who has one must not use it.
    ///
    /// # Errors
    /// As [`FlatPtr::of`].
    pub unsafe fn from_tensor(tensor: &'a Tensor) -> Result<Self> {
        // SAFETY: the tensor keeps its memory for 'a; the caller upholds the rest.
        Ok(unsafe { FlatPtr::of(tensor)?.view(None) })
    }

    /// Memory that is no tensor's, as elements of this type.
    #[must_use]
    pub fn over(memory: &'a [u64], dtype: DType) -> Self {
        let (at, len) = (memory.as_ptr().cast_mut().cast(), size_of_val(memory) / dtype.bytes());
        let ptr = FlatPtr { at, len, dtype, device: Device::Cpu };
        Self { ptr, encoding: None, first: 0, of: PhantomData }
    }

    /// The same elements, as memory of this device.
    #[must_use]
    pub fn on(self, device: Device) -> Self {
        Self { ptr: self.ptr.on(device), ..self }
    }

    /// `len` elements from `offset`, shortened to what there is.
    #[must_use]
    #[inline]
    pub fn part(&self, offset: usize, len: usize) -> Self {
        Self { ptr: self.ptr.part(offset, len), first: self.first + offset.min(self.ptr.len), ..*self }
    }

    /// The encoding of the elements, and the offset of the first one in the tensor that it is about.
    #[must_use]
    #[inline]
    pub fn encoding(&self) -> Option<(&'a Encoding, usize)> {
        self.encoding.map(|encoding| (encoding, self.first))
    }

    /// The elements, which are in memory of the host and of this type.
    ///
    /// # Errors
    /// `Error::Internal` where they are not.
    pub fn as_slice<T: Element>(&self) -> Result<&'a [T]> {
        checked::<T>(&self.ptr)?;
        Ok(self.slice())
    }

    /// As [`as_slice`](Self::as_slice), where the caller has looked.
    ///
    /// # Panics
    /// Panics if the elements are of another type, or on a device.
    #[must_use]
    #[inline]
    pub fn slice<T: Element>(&self) -> &'a [T] {
        // SAFETY: type and device are checked; `FlatPtr::view` says that the elements are there and not written for 'a.
        unsafe { std::slice::from_raw_parts(self.ptr.pointer::<T>(), self.ptr.len) }
    }

    /// The elements of a float64 view of the host, none of another type.
    #[must_use]
    pub fn numbers(&self) -> &'a [f64] {
        if self.ptr.dtype == DType::F64 { self.slice() } else { &[] }
    }

    /// The value of a float32 or float64 counter.
    #[must_use]
    pub fn count(&self) -> f64 {
        match (self.ptr.dtype, self.ptr.len) {
            (DType::F32, 1) => f64::from(self.slice::<f32>()[0]),
            (DType::F64, 1) => self.slice::<f64>()[0],
            _ => f64::NAN,
        }
    }

    /// The bytes of elements of one byte in memory of the host.
    #[must_use]
    pub(super) fn codes(&self) -> &'a [u8] {
        if self.ptr.len == 0 || !self.ptr.dtype.is_quantized() || self.ptr.device != Device::Cpu {
            return &[];
        }
        // SAFETY: bytes; `FlatPtr::view` says that they are there and not written for 'a.
        unsafe { std::slice::from_raw_parts(self.ptr.at, self.ptr.len) }
    }

    /// The first element of a type in memory of the host, to be read by kernels that take pointers.
    ///
    /// # Panics
    /// As `slice`.
    #[must_use]
    pub(super) fn pointer<T: Element>(&self) -> *const T {
        self.ptr.pointer()
    }

    /// The elements as a row-major tensor of this shape that shares their memory, to be read.
    ///
    /// # Errors
    /// `Error::Internal` when the shape has another number of elements.
    pub fn tensor(&self, shape: &[usize]) -> Result<Lent<'a>> {
        // SAFETY: the elements are there for 'a, and so is the result.
        Ok(unsafe { Lent::new(self.ptr.shaped(shape)?) })
    }

    pub(super) fn strided(&self, shape: [usize; 2], step: usize) -> Result<Lent<'a>> {
        // SAFETY: as in `tensor`.
        Ok(unsafe { Lent::new(self.ptr.strided(shape, step)?) })
    }

    pub(super) fn ptr(&self) -> FlatPtr {
        self.ptr
    }

    pub(super) fn first(&self) -> usize {
        self.first
    }
}

impl<'a> FlatViewMut<'a> {
    /// No elements.
    pub const EMPTY: Self = Self { ptr: FlatPtr::EMPTY, encoding: None, first: 0, of: PhantomData };

    /// The elements of a contiguous tensor.
    ///
    /// # Safety
    /// Nobody else reads or writes them for all of `'a`: libtorch may know other owners of the memory, and who has one must
    /// not use it.
    ///
    /// # Errors
    /// As [`FlatPtr::of`].
    pub unsafe fn from_tensor(tensor: &'a mut Tensor) -> Result<Self> {
        // SAFETY: the tensor keeps its memory for 'a; the caller upholds the rest.
        Ok(unsafe { FlatPtr::of(tensor)?.view_mut(None) })
    }

    /// Memory that is no tensor's, as elements of this type.
    #[must_use]
    pub fn over(memory: &'a mut [u64], dtype: DType) -> Self {
        Self { ptr: FlatPtr::over(memory, dtype), encoding: None, first: 0, of: PhantomData }
    }

    /// The same elements, as memory of this device.
    #[must_use]
    pub fn on(self, device: Device) -> Self {
        Self { ptr: self.ptr.on(device), ..self }
    }

    /// The same elements, read while the view is not used otherwise.
    #[must_use]
    #[inline]
    pub fn view(&self) -> FlatView<'_> {
        FlatView { ptr: self.ptr, encoding: self.encoding, first: self.first, of: PhantomData }
    }

    /// The same elements, which are only read from now on.
    #[must_use]
    #[inline]
    pub fn into_view(self) -> FlatView<'a> {
        FlatView { ptr: self.ptr, encoding: self.encoding, first: self.first, of: PhantomData }
    }

    /// The same elements for a while.
    #[must_use]
    #[inline]
    pub fn reborrow(&mut self) -> FlatViewMut<'_> {
        FlatViewMut { ptr: self.ptr, encoding: self.encoding, first: self.first, of: PhantomData }
    }

    /// `len` elements from `offset` for a while, shortened to what there is.
    #[must_use]
    #[inline]
    pub fn part(&mut self, offset: usize, len: usize) -> FlatViewMut<'_> {
        self.reborrow().into_part(offset, len)
    }

    /// `len` elements from `offset`, shortened to what there is.
    #[must_use]
    #[inline]
    pub fn into_part(self, offset: usize, len: usize) -> Self {
        Self { ptr: self.ptr.part(offset, len), first: self.first + offset.min(self.ptr.len), ..self }
    }

    /// The first `count` elements, and those behind them.
    #[must_use]
    #[inline]
    pub fn split_at(self, count: usize) -> (Self, Self) {
        let (ptr, encoding, first) = (self.ptr, self.encoding, self.first);
        let low = Self { ptr: ptr.part(0, count), encoding, first, of: PhantomData };
        let high = Self {
            ptr: ptr.part(count, ptr.len),
            encoding,
            first: first + count.min(ptr.len),
            of: PhantomData,
        };
        (low, high)
    }

    /// Takes the first `count` elements off.
    #[must_use]
    #[inline]
    pub fn take_first(&mut self, count: usize) -> Self {
        let (low, high) = std::mem::replace(self, Self::EMPTY).split_at(count);
        *self = high;
        low
    }

    /// Runs of `length` elements one after the other, the last one shorter.
    pub fn chunks(mut self, length: usize) -> impl Iterator<Item = Self> {
        std::iter::from_fn(move || (!self.is_empty()).then(|| self.take_first(length.max(1))))
    }

    /// The same memory as `len` elements of another type.
    ///
    /// # Errors
    /// As [`FlatPtr::carve`].
    pub fn retyped(self, len: usize, dtype: DType) -> Result<Self> {
        Ok(Self { ptr: self.ptr.carve(0, len, dtype)?, encoding: None, first: 0, of: PhantomData })
    }

    /// The encoding of the elements, and the offset of the first one in the tensor that it is about.
    #[must_use]
    #[inline]
    pub fn encoding(&self) -> Option<(&'a Encoding, usize)> {
        self.encoding.map(|encoding| (encoding, self.first))
    }

    /// The elements, which are in memory of the host and of this type.
    ///
    /// # Errors
    /// `Error::Internal` where they are not.
    pub fn as_mut_slice<T: Element>(&mut self) -> Result<&mut [T]> {
        checked::<T>(&self.ptr)?;
        Ok(self.slice_mut())
    }

    /// As [`as_mut_slice`](Self::as_mut_slice), where the caller has looked.
    ///
    /// # Panics
    /// Panics if the elements are of another type, or on a device.
    #[must_use]
    #[inline]
    pub fn slice_mut<T: Element>(&mut self) -> &mut [T] {
        self.reborrow().into_slice()
    }

    /// As `slice_mut`, for as long as the view was.
    ///
    /// # Panics
    /// As `slice_mut`.
    #[must_use]
    #[inline]
    pub fn into_slice<T: Element>(self) -> &'a mut [T] {
        // SAFETY: type and device are checked; `FlatPtr::view_mut` says that the elements are there and nobody else's for
        // 'a, and the view is gone.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.pointer::<T>(), self.ptr.len) }
    }

    /// The elements of a float64 view of the host, none of another type.
    #[must_use]
    pub fn numbers(&mut self) -> &mut [f64] {
        if self.ptr.dtype == DType::F64 { self.slice_mut() } else { &mut [] }
    }

    /// The bytes of elements of one byte in memory of the host.
    #[must_use]
    pub(super) fn codes(&mut self) -> &mut [u8] {
        if self.ptr.len == 0 || !self.ptr.dtype.is_quantized() || self.ptr.device != Device::Cpu {
            return &mut [];
        }
        // SAFETY: bytes; `FlatPtr::view_mut` says that they are there and nobody else's.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.at, self.ptr.len) }
    }

    /// The first element of a type in memory of the host, for kernels that take pointers.
    ///
    /// # Panics
    /// As `slice_mut`.
    #[must_use]
    pub(super) fn pointer<T: Element>(&mut self) -> *mut T {
        self.ptr.pointer()
    }

    /// Adds one to a float32 counter and returns the new value.
    #[must_use]
    pub fn increment(&mut self) -> f64 {
        if self.ptr.dtype != DType::F32 || self.ptr.len != 1 {
            return f64::NAN;
        }
        let counter = self.slice_mut::<f32>();
        counter[0] += 1.0;
        f64::from(counter[0])
    }

    /// Copies elements of the same type in memory of the host, as many as both have.
    ///
    /// # Panics
    /// As `slice_mut`.
    pub fn copy_from(&mut self, from: FlatView<'_>) {
        let count = self.len().min(from.len());
        self.check_copy(from.ptr);
        // SAFETY: both are live memory of the host of at least `count` elements of one type; what is written is this view's
        // alone, so they do not overlap.
        unsafe { std::ptr::copy_nonoverlapping(from.ptr.at, self.ptr.at, count * self.dtype().bytes()) };
    }

    /// Copies `count` elements from `from` to `to`, which may overlap.
    ///
    /// # Panics
    /// As `slice_mut`, and beyond the end.
    pub fn copy_within(&mut self, from: usize, to: usize, count: usize) {
        assert!(from.max(to) + count <= self.len(), "elements are moved beyond the end");
        self.check_copy(self.ptr);
        let each = self.dtype().bytes();
        let [from, to] = [from, to].map(|at| self.ptr.at.wrapping_add(at * each));
        // SAFETY: both lie in this view, which nobody else uses.
        unsafe { std::ptr::copy(from, to, count * each) };
    }

    fn check_copy(&self, other: FlatPtr) {
        assert!(
            self.ptr.device == Device::Cpu && other.device == Device::Cpu,
            "a kernel of the CPU was given memory of a device"
        );
        assert!(self.ptr.dtype == other.dtype, "elements were taken for those of another type");
    }

    /// Sets all elements to zero.
    ///
    /// # Errors
    /// Whatever libtorch says of memory of a device.
    pub fn clear(&mut self) -> Result<()> {
        if self.ptr.device != Device::Cpu {
            let _ = self.tensor(&[self.len()])?.f_zero_()?;
        } else if self.ptr.len > 0 {
            // SAFETY: live memory of this length, which is this view's alone.
            unsafe { std::ptr::write_bytes(self.ptr.at, 0, self.ptr.bytes()) };
        }
        Ok(())
    }

    /// The elements as a row-major tensor of this shape that shares their memory.
    ///
    /// # Errors
    /// `Error::Internal` when the shape has another number of elements.
    pub fn tensor(&mut self, shape: &[usize]) -> Result<LentMut<'_>> {
        self.reborrow().into_tensor(shape)
    }

    /// As `tensor`, for as long as the view was.
    ///
    /// # Errors
    /// As `tensor`.
    pub fn into_tensor(self, shape: &[usize]) -> Result<LentMut<'a>> {
        // SAFETY: the elements are there for 'a, and so is the result.
        Ok(unsafe { LentMut::new(self.ptr.shaped(shape)?) })
    }

    /// Room for elements of one step in memory of a device, with its owner. Torch's allocator gives it to others only after
    /// what is on the stream.
    ///
    /// # Errors
    /// `Error::Internal` for the host, and whatever libtorch says.
    pub fn room(elements: usize, dtype: DType, device: Device) -> Result<(Tensor, FlatViewMut<'static>)> {
        // Who works on an emulated device may ask by where a tensor itself is.
        let device = if device == Device::Cpu && super::is_emulated() { emulated_here() } else { device };
        if device == Device::Cpu {
            return Err(Error::Internal("scratch of a device on the host".into()));
        }
        let room = Tensor::f_empty([to_i64(elements)?], (dtype.kind(), device.torch()))?;
        // SAFETY: of memory of a device a view has the address only, and whoever works there keeps the room until it has begun
        // all that uses it.
        let all = unsafe { FlatPtr::typed(&room, dtype)?.on(device).view_mut(None) };
        Ok((room, all))
    }

    /// The same elements of a device once more, for a kernel and for what decodes and encodes them: those of one stream run
    /// one after the other.
    ///
    /// # Panics
    /// Panics if the elements are in memory of the host.
    #[must_use]
    pub fn for_kernels(&self) -> Self {
        assert!(self.ptr.device != Device::Cpu, "memory of the host was handed out twice");
        // SAFETY: of memory of a device a view has the address only.
        unsafe { self.alias() }
    }

    /// The same elements once more, for a matrix that has some of them and one that has others.
    ///
    /// # Safety
    /// No element is used through both.
    pub(super) unsafe fn alias(&self) -> Self {
        Self { ptr: self.ptr, encoding: self.encoding, first: self.first, of: PhantomData }
    }

    pub(super) fn strided(self, shape: [usize; 2], step: usize) -> Result<LentMut<'a>> {
        // SAFETY: as in `into_tensor`.
        Ok(unsafe { LentMut::new(self.ptr.strided(shape, step)?) })
    }
}

fn checked<T: Element>(ptr: &FlatPtr) -> Result<()> {
    if ptr.device != Device::Cpu || ptr.dtype != T::DTYPE {
        return Err(Error::Internal(format!("{ptr:?} as {} of the host", T::DTYPE.name())));
    }
    Ok(())
}

/// Address of the first element of a tensor.
#[must_use]
pub fn address_of(tensor: &Tensor) -> usize {
    tensor.data_ptr().addr()
}

/// A size as libtorch wants it.
///
/// # Errors
/// `Error::Value` beyond 2⁶³ - 1.
pub fn to_i64(n: usize) -> Result<i64> {
    i64::try_from(n).map_err(|_| Error::Value(format!("a size of {n} elements is too large")))
}
