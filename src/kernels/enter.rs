//! The device guard of a thread: its kernels are loaded, or libtorch computes.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use super::backend::{DeviceGuard, Tier};
use super::cuda;
#[cfg(not(feature = "cuda"))]
use super::cuda::{enter as enter_kernels, enter_with};
#[cfg(feature = "cuda")]
use super::sources::{enter as enter_kernels, enter_with};
use crate::error::Result;

/// Guard of a thread that works on a device, until it is dropped.
#[derive(Debug)]
pub struct Entered {
    _here: DeviceGuard,
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
    Ok(Entered { _here: DeviceGuard::on(ordinal), _kernels: kernels })
}

/// The guard of kernels; none, and said once for each device, where they cannot be had.
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
