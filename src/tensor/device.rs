//! Devices that memory is on.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use tch::Tensor;

use super::elements::address_of;
use crate::error::{Error, Result};

/// The host, or a CUDA device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Device {
    /// Memory of the host.
    Cpu,
    /// Memory of the device with this number.
    Cuda(u8),
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(number) => write!(f, "cuda:{number}"),
        }
    }
}

impl Device {
    /// When it gets its work, where several have some: the host last, as it works while it is given.
    #[must_use]
    pub fn turn(self) -> usize {
        match self {
            Self::Cuda(number) => usize::from(number),
            Self::Cpu => usize::MAX,
        }
    }

    /// Device of the elements of a tensor.
    ///
    /// # Errors
    /// `Error::Value` for a tensor that is neither on the host nor on a CUDA device.
    pub fn of(tensor: &Tensor) -> Result<Self> {
        match tensor.device() {
            tch::Device::Cpu => Ok(Self::Cpu),
            tch::Device::Cuda(number) => u8::try_from(number)
                .map(Self::Cuda)
                .map_err(|_| Error::Value(format!("there is no CUDA device {number}"))),
            other => {
                Err(Error::Value(format!("tensors must be on the CPU or on a CUDA device, got {other:?}")))
            }
        }
    }

    /// The device as which the memory of a tensor counts: the one that it is on, where none is emulated.
    ///
    /// # Errors
    /// As `of`.
    pub fn counted(tensor: &Tensor) -> Result<Self> {
        match Self::of(tensor)? {
            Self::Cpu if is_emulated() => {
                let elsewhere = ELSEWHERE.lock().unwrap_or_else(PoisonError::into_inner);
                Ok(elsewhere.get(&address_of(tensor)).copied().unwrap_or(Self::Cuda(0)))
            }
            found => Ok(found),
        }
    }

    /// As libtorch names it.
    #[must_use]
    pub fn torch(self) -> tch::Device {
        match self {
            // An emulated device has the memory of the host.
            Self::Cuda(number) if !is_emulated() => tch::Device::Cuda(usize::from(number)),
            _ => tch::Device::Cpu,
        }
    }
}

/// True if memory of the host counts as that of an emulated device.
static EMULATED: AtomicBool = AtomicBool::new(false);

/// Devices as which memory of the host counts where it does not as device 0, by its address.
static ELSEWHERE: Mutex<BTreeMap<usize, Device>> = Mutex::new(BTreeMap::new());

thread_local! {
    /// The emulated device that the thread works on.
    static EMULATED_HERE: Cell<u8> = const { Cell::new(0) };
}

/// Says which device the thread works on, where devices are emulated: memory that it asks for is there. Returns what was said
/// before.
#[must_use]
pub fn work_on_emulated(number: u8) -> u8 {
    EMULATED_HERE.replace(number)
}

/// Device of memory that the thread asks for, where devices are emulated.
#[must_use]
pub(super) fn emulated_here() -> Device {
    Device::Cuda(EMULATED_HERE.get())
}

/// Has the memory of a tensor of the host count as that of this device, where devices are emulated.
pub fn emulate_at(tensor: &Tensor, device: Device) {
    ELSEWHERE.lock().unwrap_or_else(PoisonError::into_inner).insert(address_of(tensor), device);
}

/// Has memory of the host count as that of a device: the caller knows that the device can use it.
pub fn emulate() {
    EMULATED.store(true, Ordering::Relaxed);
}

/// Tests whether memory of the host counts as that of a device.
#[must_use]
pub fn is_emulated() -> bool {
    EMULATED.load(Ordering::Relaxed)
}
