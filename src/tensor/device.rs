//! Devices that memory is on.

use std::sync::atomic::{AtomicBool, Ordering};

use tch::Tensor;

use crate::error::{Error, Result};

/// The host, or a CUDA device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    /// Memory of the host.
    Cpu,
    /// Memory of the device with this number.
    Cuda(u8),
}

impl Device {
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

/// Has memory of the host count as that of a device: the caller knows that the device can use it.
pub fn emulate() {
    EMULATED.store(true, Ordering::Relaxed);
}

/// Tests whether memory of the host counts as that of a device.
#[must_use]
pub fn is_emulated() -> bool {
    EMULATED.load(Ordering::Relaxed)
}
