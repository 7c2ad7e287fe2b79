//! Normal numbers on a device.

#[cfg(feature = "cuda")]
mod device;
pub(in crate::kernels) mod fallback;

use crate::error::Result;
use crate::kernels::libtorch::on_device;
use crate::tensor::{Device, FlatViewMut};

/// A part of a stream of normal numbers.
#[derive(Debug)]
pub struct Normals<'a> {
    /// Memory of the numbers.
    pub out: FlatViewMut<'a>,
    /// The stream (`stream`).
    pub stream: [u32; 4],
    /// Offset of the first number in the stream.
    pub first: u64,
}

/// Numbers times `factor`, both float32, by a kernel where there is one for the device. False, with nothing done, where
/// there is none.
///
/// # Errors
/// `Error::Cuda` where the device refuses it.
pub fn fill_normals(factor: f64, all: &mut [Normals<'_>]) -> Result<bool> {
    if all.first().is_none_or(|one| one.out.device() == Device::Cpu) {
        return Ok(false);
    }
    on_device!(&["normals.cu"]; device::normals(factor, all), else fallback::normals(factor, all))?;
    Ok(true)
}
