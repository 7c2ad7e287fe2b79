//! Stands for `cuda` in a build without kernels for CUDA devices.

use std::path::PathBuf;

use tch::Tensor;

use super::pass::Pass;
use crate::batch::Slab;
use crate::error::{Error, Result};

/// A thread's stay on a device: there is none.
#[derive(Debug)]
pub struct Entered;

fn refuse<T>() -> Result<T> {
    Err(Error::Cuda("this build has no kernels for it (feature `cuda`)".into()))
}

/// Keeps nothing.
pub fn keep_in(_folder: Option<PathBuf>) {}

/// Refused.
///
/// # Errors
/// Always.
pub fn emulate() -> Result<()> {
    refuse()
}

/// Refused.
///
/// # Errors
/// Always.
pub fn enter(_ordinal: usize, _stream: usize) -> Result<Entered> {
    refuse()
}

pub(super) fn is_entered() -> bool {
    false
}

pub(super) fn run<const N: usize>(_pass: &Pass<'_>, _jobs: &[[Slab; N]]) -> Result<()> {
    refuse()
}

#[allow(clippy::unnecessary_wraps)] // as where there are kernels
pub(super) fn symmetric_product(_out: &Tensor, _factors: [&Tensor; 2], _accumulate: bool) -> Result<bool> {
    Ok(false)
}
