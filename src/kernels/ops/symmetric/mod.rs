//! Products of matrices whose result is symmetric, on a device.
//!
//! With k rows and n >= k columns a step of Newton-Schulz has `4 k^2 n + 2 k^3` operations in full products,
//! and `3 k^2 n + k^3` where one triangle of symmetric products is computed. The ratio is 1.5 for squares and
//! falls to 1.33 for long matrices. At 4096 x 11008 the Gram form allows 1.8 with two restarts and 2.1 with
//! one. One matrix of 4096 rows has 528 tiles of 128 x 128 in its triangle, which are four waves on 132
//! multiprocessors. The whole product has 1024 tiles, which are eight waves. The targets in
//! `benchmarks/device_report.py` follow from these numbers.
//!
//! All matrices of a bucket are multiplied in one launch. The kernel or library that multiplies depends on
//! their number, so the last bits of a result may depend on it too.

#[cfg(feature = "cuda")]
pub(in crate::kernels) mod device;
mod measured;

use tch::{Kind, Tensor};

use crate::error::Result;
#[cfg(feature = "cuda")]
use crate::kernels::backend::Tier;
#[cfg(feature = "cuda")]
use crate::kernels::cuda::facts;
use crate::kernels::libtorch::on_device;
use crate::tensor::Device;

pub use measured::{ProductClass, set_measured};

/// Sources without which there is none.
const SOURCES: &[&str] = &["symmetric_mma.cu"];

/// `out <- factor (Σ weight addend + A Bᵀ) + identity I` on batches `[g, k, k]` and `[g, k, n]` where the result is symmetric, with at
/// most two addends, which may be `out`: by a kernel that computes one triangle, where there is one for the device,
/// type and size. False, with nothing done, where there is none.
///
/// # Errors
/// [`Error::Cuda`] where the device refuses it.
#[cfg_attr(not(feature = "cuda"), allow(clippy::unnecessary_wraps))] // without a device there is nothing to refuse
pub fn symmetric_product(
    out: &Tensor,
    [a, b]: [&Tensor; 2],
    add: &[(f64, &Tensor)],
    [factor, identity]: [f64; 2],
) -> Result<bool> {
    on_device!(SOURCES; device::symmetric_product(out, [a, b], add, [factor, identity]), else Ok(false))
}

/// Computes as [`symmetric_product`] with a factor of 1, by warpgroup instructions in `blocks` blocks, whatever the size: for
/// tests.
///
/// # Errors
/// [`Error::Cuda`] where the device refuses it.
#[cfg_attr(not(feature = "cuda"), allow(clippy::unnecessary_wraps, unused_variables))]
pub fn symmetric_product_by_groups(
    out: &Tensor,
    [a, b]: [&Tensor; 2],
    add: &[(f64, &Tensor)],
    blocks: u32,
) -> Result<bool> {
    on_device!(&["symmetric_wgmma.cu"]; device::symmetric_product_by_groups(out, [a, b], add, blocks), else Ok(false))
}

/// The multiprocessors of a device that the tiles of products are to fill, 0 where that is not known or libtorch alone computes.
#[must_use]
pub fn multiprocessors(device: Device) -> usize {
    #[cfg(feature = "cuda")]
    if let Device::Cuda(number) = device
        && Tier::wanted() != Tier::Libtorch
    {
        return facts(number.into()).map_or(0, |facts| facts.multiprocessors as usize);
    }
    let _ = device;
    0
}

/// Tests whether [`symmetric_product`] has a kernel for matrices of this type with `rows` contiguous rows.
///
/// # Errors
/// [`Error::Cuda`] where it would have to be loaded in a capture.
pub fn has_symmetric_product(kind: Kind, rows: i64) -> Result<bool> {
    Ok(on_device!(SOURCES; device::has_symmetric_product(kind, rows), else false))
}
