//! Stands for `cuda` in a build without kernels for CUDA devices.

use std::path::PathBuf;

use tch::Tensor;

use super::cpu::Slot;
use super::cpu::rows::Stack;
use super::op::{Pass, RowPassCall};
use super::{Copy, Messages};
use crate::error::{Error, Result};
use crate::tensor::{DType, Device, FlatPtr, FlatView, FlatViewMut};

/// Guard of a thread that has entered a device: a no-op in builds without CUDA.
#[derive(Debug)]
pub struct Entered;

/// Guard of launches at a learning rate that a device reads: there are none.
#[derive(Debug)]
pub struct RateGuard;

/// Does nothing.
#[must_use]
pub fn follow(_rate: Option<&FlatPtr>) -> RateGuard {
    RateGuard
}

/// The launches of a captured step: there are none.
#[derive(Clone, Debug, Default)]
pub struct Tape;

/// Notes nothing.
pub fn note() {}

/// Nothing.
#[must_use]
pub fn noted() -> Tape {
    Tape
}

/// Does nothing.
pub fn let_go() {}

/// Does nothing.
pub fn set(_tape: Tape, _graph: usize) {}

/// Does nothing.
///
/// # Errors
/// Never.
#[allow(clippy::unnecessary_wraps)] // as where there are kernels
pub fn finish() -> Result<()> {
    Ok(())
}

pub(super) fn frozen(work: impl FnOnce() -> Result<()>) -> Result<()> {
    work()
}

/// None: no step is captured for replays.
#[allow(clippy::unnecessary_wraps)] // as where there are kernels
pub(super) fn live_numbers(
    _count: usize,
    _room: impl FnOnce() -> Result<(Tensor, FlatView<'static>)>,
) -> Result<Option<FlatView<'static>>> {
    Ok(None)
}

pub(super) fn refuse<T>() -> Result<T> {
    Err(Error::Cuda("this build has no kernels for it (feature `cuda`)".into()))
}

/// Keeps nothing.
pub fn keep_in(_folder: Option<PathBuf>) {}

/// Looks for nothing.
pub fn look_for_nvrtc_at(_paths: Vec<PathBuf>) {}

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
pub fn enter(_ordinal: usize, _stream: usize, _encoded: bool) -> Result<Entered> {
    refuse()
}

/// Refused.
///
/// # Errors
/// Always.
pub fn enter_with(_ordinal: usize, _stream: usize, _wanted: &[&str], _allow_off: bool) -> Result<Entered> {
    refuse()
}

/// None is used.
#[allow(clippy::unnecessary_wraps)] // as where there are kernels
pub(super) fn uses(_wanted: &[&str]) -> Result<bool> {
    Ok(false)
}

/// All are off.
///
/// # Errors
/// Never.
#[allow(clippy::unnecessary_wraps)] // as where there are kernels
pub fn turn_off(_name: &str, _reason: &str) -> Result<()> {
    Ok(())
}

/// All are off.
///
/// # Errors
/// Never.
#[allow(clippy::unnecessary_wraps)] // as where there are kernels
pub fn turn_off_on(_ordinal: usize, _name: &str, _reason: &str) -> Result<()> {
    Ok(())
}

/// Does nothing: none is loaded.
pub fn use_only_asked(_only: bool) {}

/// Facts about a device, as where there are kernels.
#[derive(Clone, Debug)]
pub struct Facts {
    /// Name that the driver gives it.
    pub name: String,
    /// Compute capability, if the driver knows it.
    pub capability: Option<(i32, i32)>,
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// The newest version of CUDA that the driver has, as 12040 for 12.4.
    pub driver: i32,
}

/// Refused.
///
/// # Errors
/// Always.
pub fn facts(_ordinal: usize) -> Result<Facts> {
    refuse()
}

/// Does nothing: none is used.
///
/// # Errors
/// Never.
#[allow(clippy::unnecessary_wraps)] // as where there are kernels
pub fn hide(_ordinal: usize, _names: Vec<String>) -> Result<()> {
    Ok(())
}

/// Refused.
///
/// # Errors
/// Always.
pub fn images(_ordinal: usize) -> Result<Vec<(&'static str, String)>> {
    refuse()
}

/// Refused.
///
/// # Errors
/// Always.
pub fn states(_ordinal: usize) -> Result<Vec<(&'static str, State)>> {
    refuse()
}

/// None.
#[must_use]
pub fn source_of(_kernel: &str) -> Option<&'static str> {
    None
}

/// Refused.
///
/// # Errors
/// Always.
pub fn graphs_refusal() -> Result<Option<String>> {
    refuse()
}

/// Origin of machine code: there is none.
#[derive(Clone, Copy, Debug)]
pub enum Origin {}

impl Origin {
    /// Its name in reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {}
    }
}

/// State of a source on a device, as where there are kernels.
#[derive(Clone, Debug)]
pub enum State {
    /// Nothing has asked for it.
    NotLoaded,
    /// Its kernels may be launched.
    Loaded {
        /// Origin of its machine code.
        origin: Origin,
        /// Time that this took.
        seconds: f64,
    },
    /// It is not used, for this reason.
    Off(String),
}

#[allow(clippy::unnecessary_wraps)] // as where there are kernels
pub(super) fn is_capturing() -> Result<bool> {
    Ok(false)
}
