//! The device that a thread works on: whether it does, how operations are computed there, and the learning rate that lies there.

use std::cell::Cell;
use std::ffi::c_void;
use std::marker::PhantomData;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU8, Ordering};

use tch::{Kind, Tensor};

use super::cuda;
#[cfg(feature = "cuda")]
pub(super) use super::cuda::{scratch, scratch_mut};
use crate::error::Result;
use crate::tensor::{DType, FlatPtr, FlatView, is_emulated, work_on_emulated};
#[cfg(not(feature = "cuda"))]
use crate::tensor::{Device, FlatViewMut};

/// Ways to compute on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tier {
    /// By kernels where they can be had, else by libtorch.
    Auto,
    /// By libtorch alone.
    Libtorch,
    /// By kernels where they can be had, also where the library is likely to take less time: to compare the two.
    Compare,
    /// By kernels alone: where one cannot be had, the step fails.
    Kernels,
}

impl Tier {
    /// The one of this name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        match name {
            "auto" => Some(Self::Auto),
            "libtorch" => Some(Self::Libtorch),
            "compare" => Some(Self::Compare),
            "kernels" => Some(Self::Kernels),
            _ => None,
        }
    }

    /// Has devices compute in this way.
    pub fn set(self) {
        TIER.store(self as u8, Ordering::Relaxed);
    }

    /// The one that was asked for.
    pub(super) fn wanted() -> Self {
        let wanted = TIER.load(Ordering::Relaxed);
        [Self::Libtorch, Self::Compare, Self::Kernels]
            .into_iter()
            .find(|tier| *tier as u8 == wanted)
            .unwrap_or(Self::Auto)
    }
}

/// The way in which devices compute.
static TIER: AtomicU8 = AtomicU8::new(Tier::Auto as u8);

thread_local! {
    /// True while the thread works on a device.
    static ON_DEVICE: Cell<bool> = const { Cell::new(false) };
    /// The learning rate that is on the device.
    static RATE: Cell<Option<FlatPtr>> = const { Cell::new(None) };
    /// True while products of float32 matrices are in TF32.
    static TF32: Cell<bool> = const { Cell::new(false) };
}

/// Mark of a thread that works on a device, until it is dropped.
#[derive(Debug)]
pub(super) struct DeviceGuard {
    /// It belongs to the thread.
    _thread: PhantomData<*const ()>,
    outer: (bool, u8),
}

impl DeviceGuard {
    /// Marks this thread as working on the device of this number.
    pub(super) fn on(ordinal: usize) -> Self {
        let number = work_on_emulated(u8::try_from(ordinal).unwrap_or(0));
        Self { _thread: PhantomData, outer: (ON_DEVICE.replace(true), number) }
    }
}

impl Drop for DeviceGuard {
    fn drop(&mut self) {
        ON_DEVICE.set(self.outer.0);
        let _ = work_on_emulated(self.outer.1);
    }
}

/// Tests whether this thread works on a device.
#[must_use]
pub fn on_device() -> bool {
    ON_DEVICE.get()
}

/// Guard of operations at a learning rate that is on the device, until it is dropped.
#[derive(Debug)]
pub struct RateGuard {
    outer: Option<FlatPtr>,
    _kernels: cuda::RateGuard,
}

/// Has operations of this thread multiply what is for each unit of the learning rate by the number that is in `rate` when
/// they run. None: by nothing.
#[must_use]
pub fn follow(rate: Option<&FlatPtr>) -> RateGuard {
    RateGuard { outer: RATE.replace(rate.copied()), _kernels: cuda::follow(rate) }
}

impl Drop for RateGuard {
    fn drop(&mut self) {
        RATE.set(self.outer);
    }
}

// SAFETY: as `src/torch_shim.cpp` defines them.
unsafe extern "C" {
    /// Has devices of CUDA multiply matrices of float32 in TF32, or keeps them from it; returns what
    /// `oxidion_products_as_before` is to undo, or null.
    fn oxidion_products(tf32: bool) -> *mut c_void;
    fn oxidion_products_as_before(before: *mut c_void);
}

/// Guard of libtorch's products of float32 matrices on a device, until it is dropped: in TF32, with operands of 11 bits,
/// whatever torch is set to; or not. On an emulated device the operands are rounded.
#[derive(Debug)]
pub struct Products {
    outer: bool,
    before: *mut c_void,
}

impl Products {
    /// The guard, which does nothing on the CPU.
    #[must_use]
    pub fn begin(tf32: bool) -> Self {
        let before = if on_device() && !is_emulated() {
            // SAFETY: it sets what torch has for products, and a number of this thread.
            unsafe { oxidion_products(tf32) }
        } else {
            null_mut()
        };
        Self { outer: TF32.replace(tf32 && on_device()), before }
    }
}

impl Drop for Products {
    fn drop(&mut self) {
        TF32.set(self.outer);
        if !self.before.is_null() {
            // SAFETY: it was made on this thread, which a raw pointer does not leave, and is given back once.
            unsafe { oxidion_products_as_before(self.before) }
        }
    }
}

/// The type whose bits the operands of products of matrices of this type have: float16 for float32 in TF32.
pub(super) fn operands(dtype: DType) -> DType {
    if dtype == DType::F32 && TF32.get() { DType::F16 } else { dtype }
}

/// An operand of a product as an emulated device takes it in TF32: rounded. None where it is used as it is.
///
/// # Errors
/// Whatever libtorch says.
pub fn rounded(x: &Tensor) -> Result<Option<Tensor>> {
    const HALF: i64 = 1 << 12;
    if !TF32.get() || !is_emulated() || x.f_kind()? != Kind::Float {
        return Ok(None);
    }
    let bits = x.f_contiguous()?.f_view_dtype(Kind::Int)?.f_add_scalar(HALF)?.f_bitwise_and(-2 * HALF)?;
    Ok(Some(bits.f_view_dtype(Kind::Float)?))
}

/// The learning rate that is on the device, if there is one.
pub(super) fn rate() -> Option<FlatView<'static>> {
    // SAFETY: the caller of `follow` keeps it until the guard is dropped.
    RATE.get().map(|rate| unsafe { rate.view(None) })
}

/// Room for elements of one step: what owns it, and where it is. Torch's allocator gives it to others only after what is
/// on the stream.
#[cfg(not(feature = "cuda"))]
pub(super) fn scratch(elements: usize, dtype: DType, device: Device) -> Result<(Tensor, FlatView<'static>)> {
    scratch_mut(elements, dtype, device).map(|(room, all)| (room, all.into_view()))
}

/// Allocates scratch memory as [`scratch`] does, with a writable view.
#[cfg(not(feature = "cuda"))]
pub(super) fn scratch_mut(
    elements: usize,
    dtype: DType,
    device: Device,
) -> Result<(Tensor, FlatViewMut<'static>)> {
    FlatViewMut::room(elements, dtype, device)
}
