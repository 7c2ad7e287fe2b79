//! A thread's stay on a device, and by what its operations are computed there: kernels, or libtorch.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Mutex, PoisonError};

#[cfg(not(feature = "cuda"))]
use tch::Tensor;

use super::cuda;
#[cfg(not(feature = "cuda"))]
use super::cuda::{enter as enter_kernels, enter_with};
#[cfg(feature = "cuda")]
pub(super) use super::cuda::{scratch, scratch_mut};
use super::libtorch::value::Value;
#[cfg(feature = "cuda")]
use super::sources::{enter as enter_kernels, enter_with};
use crate::error::Result;
#[cfg(not(feature = "cuda"))]
use crate::tensor::{DType, Device, FlatView, FlatViewMut};
use crate::tensor::{FlatPtr, work_on_emulated};

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

    /// Has devices compute in this way from now on.
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
    static HERE: Cell<bool> = const { Cell::new(false) };
    /// The learning rate that is on the device.
    static RATE: Cell<Option<FlatPtr>> = const { Cell::new(None) };
}

/// A thread's stay on a device, until it is dropped.
#[derive(Debug)]
pub struct Entered {
    /// It belongs to the thread.
    _thread: PhantomData<*const ()>,
    outer: (bool, u8),
    /// None where libtorch computes.
    _kernels: Option<cuda::Entered>,
}

/// Has the operations of this thread run on a stream of a device, which is torch's current one. These sources of kernels are
/// loaded together where they are missing, others when an operation asks for them; where kernels alone are to compute, all
/// are, and `encoded` says whether also those for what is more than numbers of its type.
///
/// # Errors
/// [`crate::error::Error::Cuda`] where kernels are required and there is no driver or no such device.
pub fn enter(ordinal: usize, stream: usize, encoded: bool, sources: &[&str]) -> Result<Entered> {
    let kernels = match Tier::wanted() {
        Tier::Libtorch => None,
        Tier::Kernels => Some(enter_kernels(ordinal, stream, encoded)?),
        Tier::Auto | Tier::Compare => entered_or_warned(ordinal, stream, sources),
    };
    let number = work_on_emulated(u8::try_from(ordinal).unwrap_or(0));
    Ok(Entered { _thread: PhantomData, outer: (HERE.replace(true), number), _kernels: kernels })
}

/// The stay of kernels; none, and said once for each device, where they cannot be had.
fn entered_or_warned(ordinal: usize, stream: usize, sources: &[&str]) -> Option<cuda::Entered> {
    static WITHOUT: Mutex<BTreeMap<usize, String>> = Mutex::new(BTreeMap::new());
    let mut without = WITHOUT.lock().unwrap_or_else(PoisonError::into_inner);
    if without.contains_key(&ordinal) {
        return None;
    }
    match enter_with(ordinal, stream, sources, true) {
        Ok(entered) => Some(entered),
        Err(error) => {
            log::warn!(
                target: "oxidion.cuda",
                "device {ordinal} computes by libtorch, which is slower than kernels of this package: {error}"
            );
            without.insert(ordinal, error.to_string());
            None
        }
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        HERE.set(self.outer.0);
        let _ = work_on_emulated(self.outer.1);
    }
}

/// Tests whether this thread works on a device.
#[must_use]
pub fn on_device() -> bool {
    HERE.get()
}

/// Guard of operations at a learning rate that is on the device, until it is dropped.
#[derive(Debug)]
pub struct Following {
    outer: Option<FlatPtr>,
    _kernels: cuda::Following,
}

/// Has operations of this thread multiply what is for each unit of the learning rate by the number that is in `rate` when
/// they run. None: by nothing.
#[must_use]
pub fn follow(rate: Option<&FlatPtr>) -> Following {
    Following { outer: RATE.replace(rate.copied()), _kernels: cuda::follow(rate) }
}

impl Drop for Following {
    fn drop(&mut self) {
        RATE.set(self.outer);
    }
}

/// The learning rate that is on the device, as a number there; 1 where there is none.
pub(super) fn followed_rate() -> Result<Value> {
    let Some(rate) = RATE.get() else { return Ok(Value::Known(1.0)) };
    // SAFETY: whoever set it keeps it until the guard is dropped.
    let view = unsafe { rate.view(None) };
    Ok(view.tensor(&[])?.f_to_kind(tch::Kind::Double).into())
}

/// Room for elements of one step: what owns it, and where it is. Torch's allocator gives it to others only after what is
/// on the stream.
#[cfg(not(feature = "cuda"))]
pub(super) fn scratch(elements: usize, dtype: DType, device: Device) -> Result<(Tensor, FlatView<'static>)> {
    scratch_mut(elements, dtype, device).map(|(room, all)| (room, all.into_view()))
}

/// As [`scratch`], to be written by operations that are told so.
#[cfg(not(feature = "cuda"))]
pub(super) fn scratch_mut(
    elements: usize,
    dtype: DType,
    device: Device,
) -> Result<(Tensor, FlatViewMut<'static>)> {
    FlatViewMut::room(elements, dtype, device)
}
