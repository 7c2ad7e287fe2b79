//! Sparse sign matrices where they are needed.

mod host;

pub use host::{NONZEROS as SIGNS, Signs};

use crate::error::{Error, Result};
use crate::kernels::on_device;
use crate::tensor::{Device, FlatViewMut};

/// Writes the rows of a sparse sign matrix ([`host::Signs`]) from row `first` of a stream on to memory of float64
/// zeros.
///
/// # Errors
/// `Error::Cuda` where the device refuses it, `Error::Internal` where a device's matrix is said to be the host's.
pub fn sign_matrix(out: &mut FlatViewMut<'_>, shape: [usize; 2], stream: [u32; 4], first: u64) -> Result<()> {
    if out.device() != Device::Cpu {
        return crate::kernels::ops::normals::fallback::signs(&out.view(), shape, stream, first);
    }
    if on_device() {
        return Err(Error::Internal(format!("signs at {out:?}, by a thread that works on a device")));
    }
    host::Signs::new(shape, stream, first).write(out.slice_mut::<f64>());
    Ok(())
}
