//! Stands for `cuda` in a build without kernels for CUDA devices.

use std::path::PathBuf;

use tch::{Kind, Tensor};

use super::cpu::rows::Stack;
use super::cuda_call::{Pass, RowPassCall};
use super::ops::channels::{ChannelStep, Channels, Limited, Projected};
use super::ops::clipping::{Clipping, Rates, UpdateSums};
use super::ops::columns::{Columns, Kept};
use super::ops::factors::Steps;
use super::ops::neurons::Neurons;
use super::ops::normals::Normals;
use super::ops::slices::{Move, Sliced};
use super::ops::trust::Trust;
use super::{Copy, Messages};
use crate::error::{Error, Result};
use crate::kernels::ops::apply::Apply;
use crate::spec::Side;
use crate::tensor::{DType, Device, FlatView, MatrixView};

/// A thread's stay on a device: there is none.
#[derive(Debug)]
pub struct Entered;

/// What follows a learning rate on a device: nothing.
#[derive(Debug)]
pub struct Following;

/// Does nothing.
///
/// # Errors
/// Never.
pub fn follow(_rate: Option<&FlatView>) -> Result<Following> {
    Ok(Following)
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
pub fn set(_tape: Tape, _graph: usize) {}

/// Does nothing.
///
/// # Errors
/// Never.
pub fn finish() -> Result<()> {
    Ok(())
}

pub(super) fn frozen(work: impl FnOnce() -> Result<()>) -> Result<()> {
    work()
}

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

pub(super) fn is_entered() -> bool {
    false
}

#[allow(clippy::unnecessary_wraps)] // as where there are kernels
pub(super) fn is_capturing() -> Result<bool> {
    Ok(false)
}

pub(super) fn run<const N: usize>(_pass: &Pass<'_>, _jobs: &[[FlatView; N]]) -> Result<()> {
    refuse()
}

pub(super) fn copy(_copies: &[Copy]) -> Result<()> {
    refuse()
}

pub(super) fn move_down(_moves: &[(FlatView, FlatView)]) -> Result<()> {
    refuse()
}

pub(super) fn sum(_messages: &Messages, _factor: f64, _to: &FlatView) -> Result<()> {
    refuse()
}

pub(super) fn neurons(_kernel: &'static str, _mean: [f64; 2], _all: &[Neurons]) -> Result<()> {
    refuse()
}

pub(super) fn line_sums(_side: Side, _absolute: bool, _all: &[(MatrixView, FlatView)]) -> Result<()> {
    refuse()
}

pub(super) fn choose(_count: usize, _all: &[(FlatView, FlatView)]) -> Result<()> {
    refuse()
}

pub(super) fn move_slices(_side: Side, _how: Move, _all: &[Sliced]) -> Result<()> {
    refuse()
}

pub(super) fn apply_slices(_side: Side, _apply: &Apply, _all: &[Sliced]) -> Result<()> {
    refuse()
}

pub(super) fn fold<const N: usize>(
    _pass: &Pass<'_>,
    _factor: f64,
    _jobs: &[[FlatView; N]],
    _sums: &[FlatView],
) -> Result<()> {
    refuse()
}

pub(super) fn fold_units<const N: usize>(
    _pass: &Pass<'_>,
    _factor: f64,
    _units: &[Vec<[FlatView; N]>],
    _sums: &[FlatView],
) -> Result<()> {
    refuse()
}

pub(super) fn rows<const N: usize>(_call: &RowPassCall<'_>, _jobs: &[Stack<N>]) -> Result<()> {
    refuse()
}

pub(super) fn update_factors(
    _clipping: &Clipping,
    _rates: &Rates<'_>,
    _sums: &[UpdateSums],
    _out: &[FlatView],
) -> Result<()> {
    refuse()
}

pub(super) fn scratch(_elements: usize, _dtype: DType, _place: Device) -> Result<(Tensor, FlatView)> {
    refuse()
}

pub(super) fn lamb_factors(
    _trust: &Trust,
    _steps: &Steps,
    _norms: Option<&[FlatView]>,
    _group: &[FlatView],
    _out: &[FlatView],
) -> Result<()> {
    refuse()
}

pub(super) fn normals(_factor: f64, _all: &[Normals]) -> Result<()> {
    refuse()
}

pub(super) fn orthogonal_rows(
    _w: &FlatView,
    _j: &FlatView,
    _norms: &FlatView,
    _shape: [usize; 2],
) -> Result<()> {
    refuse()
}

pub(super) fn signs(_out: &FlatView, _shape: [usize; 2], _stream: [u32; 4], _first: u64) -> Result<()> {
    refuse()
}

pub(super) fn clear_without_basis(_all: &[(MatrixView, FlatView)]) -> Result<()> {
    refuse()
}

pub(super) fn channel_ratios(_factor: f64, _all: &[Projected]) -> Result<()> {
    refuse()
}

pub(super) fn channel_totals(_all: &[(Channels, MatrixView, FlatView)]) -> Result<()> {
    refuse()
}

pub(super) fn channel_steps(_step: &ChannelStep, _all: &[Limited]) -> Result<()> {
    refuse()
}

pub(super) fn has_symmetric_product(_kind: Kind, _rows: i64) -> bool {
    false
}

#[allow(clippy::unnecessary_wraps)] // as where there are kernels
pub(super) fn symmetric_product(
    _out: &Tensor,
    _factors: [&Tensor; 2],
    _add: &[(f64, &Tensor)],
    _factor: f64,
) -> Result<bool> {
    Ok(false)
}

pub(super) fn squares_and_scaled(_all: &[Columns], _factor: f64) -> Result<()> {
    refuse()
}

pub(super) fn normalize_columns(_all: &[Kept], _epsilon: f64, _factor: f64, _per_rate: bool) -> Result<()> {
    refuse()
}

pub(super) fn orthonormal_columns(_matrices: &FlatView, _shape: [usize; 3], _twice: bool) -> Result<()> {
    refuse()
}
