//! Elements in the memory of a tensor or of the arena.

use std::marker::PhantomData;

use tch::Tensor;

use super::device::emulated_here;
use super::{DType, Device, Element, Encoding, FlatPtr, Lent, LentMut, prefetch, to_i64};
use crate::error::{Error, Result};

impl FlatPtr {
    /// A view that reads the elements.
    ///
    /// # Safety
    /// As long as the view lives, the elements are valid, and no code writes them or, where there is an encoding, the memory
    /// that it refers to.
    #[must_use]
    pub unsafe fn view(self, encoding: Option<&Encoding>) -> FlatView<'_> {
        FlatView { ptr: self, encoding, first: 0, of: PhantomData }
    }

    /// A view that writes the elements.
    ///
    /// # Safety
    /// As long as the view lives, the elements are valid, and no other code reads or writes them or, where there is an
    /// encoding, the memory that it refers to.
    #[must_use]
    pub unsafe fn view_mut(self, encoding: Option<&Encoding>) -> FlatViewMut<'_> {
        FlatViewMut { ptr: self, encoding, first: 0, of: PhantomData }
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

/// Elements of a tensor or of the arena, borrowed to be written by the owner of the view.
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
    /// No code writes them for all of `'a`. Other tensors of libtorch may own the same memory; they must not be used to write
    /// it.
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
    pub(super) fn q8(&self) -> &'a [u8] {
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
    /// No other code reads or writes them for all of `'a`. Other tensors of libtorch may own the same memory; they must not
    /// be used.
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

    /// Converts to a view that only reads the same elements.
    #[must_use]
    #[inline]
    pub fn into_view(self) -> FlatView<'a> {
        FlatView { ptr: self.ptr, encoding: self.encoding, first: self.first, of: PhantomData }
    }

    /// Reborrows with a shorter lifetime.
    #[must_use]
    #[inline]
    pub fn reborrow(&mut self) -> FlatViewMut<'_> {
        FlatViewMut { ptr: self.ptr, encoding: self.encoding, first: self.first, of: PhantomData }
    }

    /// Reborrows `len` elements from `offset` with a shorter lifetime, clamped to the end of the view.
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
        // SAFETY: type and device are checked. By `FlatPtr::view_mut` the elements are valid and exclusively borrowed for 'a,
        // and the view is consumed.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.pointer::<T>(), self.ptr.len) }
    }

    /// The elements of a float64 view of the host, none of another type.
    #[must_use]
    pub fn numbers(&mut self) -> &mut [f64] {
        if self.ptr.dtype == DType::F64 { self.slice_mut() } else { &mut [] }
    }

    /// The bytes of elements of one byte in memory of the host.
    #[must_use]
    pub(super) fn q8(&mut self) -> &mut [u8] {
        if self.ptr.len == 0 || !self.ptr.dtype.is_quantized() || self.ptr.device != Device::Cpu {
            return &mut [];
        }
        // SAFETY: bytes; by `FlatPtr::view_mut` they are valid and exclusively borrowed.
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
        // SAFETY: both ranges are inside this view, which is exclusively borrowed.
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
        // SAFETY: a view of device memory has the address only. The caller keeps the room until all work that uses it has
        // begun.
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
