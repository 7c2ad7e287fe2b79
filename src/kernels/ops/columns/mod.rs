//! Passes over the columns of thin matrices, for all matrices of a bucket.

pub(in crate::kernels) mod fallback;
mod host;
#[cfg(feature = "cuda")]
pub(in crate::kernels) mod panel;

pub(in crate::kernels) use host::dead_share;

use std::ops::Range;

use super::convert::Convert;
use super::live::live;
use crate::error::{Error, Result};
use crate::kernels::Job;
use crate::kernels::dispatch::{frozen, no_kernels, run};
use crate::kernels::libtorch::on_device;
use crate::tensor::{DType, Device, FlatView, FlatViewMut, MatrixViewMut};

/// Sources of the kernels of panels.
const PANEL: &[&str] = &["gram.cu", "cholesky.cu"];

/// A row-major matrix with as many columns as it has sums.
#[derive(Debug)]
pub struct Columns<'a> {
    /// The matrix.
    pub x: FlatView<'a>,
    /// The sum of squares of each column, float64.
    pub sums: FlatViewMut<'a>,
    /// A matrix like it, for what it is scaled to.
    pub scaled: FlatViewMut<'a>,
}

/// A matrix, and where some of its columns are kept when they are normalized.
#[derive(Debug)]
pub struct Kept<'a> {
    /// The matrix.
    pub columns: Columns<'a>,
    /// The kept columns.
    pub q: MatrixViewMut<'a>,
    /// Which they are.
    pub own: Range<usize>,
}

impl Columns<'_> {
    /// Rows and columns.
    #[must_use]
    pub fn shape(&self) -> [usize; 2] {
        let cols = self.sums.len();
        [self.x.len().checked_div(cols).unwrap_or(0), cols]
    }

    /// Device of the matrix.
    fn device(&self) -> Result<Device> {
        let device = self.x.device();
        if self.sums.dtype() != DType::F64 || self.scaled.len() != self.x.len() {
            return Err(Error::Internal("column sums need one float64 each".into()));
        }
        if [self.sums.device(), self.scaled.device()] != [device; 2] {
            return Err(Error::Internal("a matrix and its column sums are in different places".into()));
        }
        Ok(device)
    }
}

/// Splits by device: what is on the host, and what is on a device.
fn on_host<'c, 'a: 'c>(all: impl Iterator<Item = &'c Columns<'a>>) -> Result<bool> {
    let places = all.map(Columns::device).collect::<Result<Vec<_>>>()?;
    let on_host = places.iter().filter(|device| **device == Device::Cpu).count();
    if on_host != 0 && on_host != places.len() {
        return Err(Error::Internal("the matrices of one pass are in different places".into()));
    }
    Ok(on_host > 0)
}

/// `sums[j] = Σᵢ x[i, j]²` and `scaled = factor · x` for every matrix.
///
/// # Errors
/// `Error::Internal` when sums are not float64 or `scaled` is no matrix like `x`; [`Error::Cuda`] where a device refuses.
pub fn squares_and_scaled(all: &mut [Columns<'_>], factor: f64) -> Result<()> {
    if !on_host(all.iter())? {
        frozen(|| fallback::squares(all))?;
        let scaled = all.iter_mut().map(|one| Job { read: [one.x], write: [one.scaled.reborrow()] });
        return run(&Convert { factor }, &mut scaled.collect::<Vec<_>>());
    }
    for Columns { x, sums, scaled } in all {
        host::squares_and_scaled(x, sums, factor, scaled);
    }
    Ok(())
}

/// `q[:, j] ← x[:, j] / (√sums[j] + epsilon)` and `scaled[:, j] ← factor · q[:, j]` for every matrix. Of `q` only the
/// columns in `own` are stored.
///
/// A dead column (norm zero, or rounding noise compared with the norm of the matrix or with epsilon) keeps its `q` and gets
/// `scaled = 0`. No step is taken along a direction that the momentum does not have, and `q` never vanishes. `per_rate`: the
/// factor is proportional to the learning rate.
///
/// # Errors
/// As [`squares_and_scaled`].
pub fn normalize_columns(all: &mut [Kept<'_>], epsilon: f64, factor: f64, per_rate: bool) -> Result<()> {
    if !on_host(all.iter().map(|kept| &kept.columns))? {
        let Some(device) = all.first().map(|kept| kept.columns.x.device()) else { return Ok(()) };
        let numbers = [(epsilon, false), (factor, per_rate)];
        return live(device, &numbers, |numbers| fallback::normalize(all, [&numbers[0], &numbers[1]]));
    }
    for Kept { columns: Columns { x, sums, scaled }, q, own } in all {
        host::normalize_columns(x, &sums.view(), epsilon, factor, (q, own.clone()), scaled);
    }
    Ok(())
}

/// Tests whether there are kernels of [`orthonormal_columns`] where this thread works.
///
/// # Errors
/// [`Error::Cuda`] where kernels would have to be loaded in a capture.
pub fn has_orthonormal_columns() -> Result<bool> {
    Ok(on_device!(PANEL; true, else false))
}

/// Makes the columns of matrices `[count, rows, cols]` of float32 that lie together on a device orthonormal, or zero
/// where they depend on those before them. `twice`: never in one pass. `rounding`: the share of a column that may be
/// rounding of what it was made of, 0 where that is less than that of float32.
///
/// # Errors
/// [`Error::Cuda`] where the device refuses, or has no kernels for it.
pub fn orthonormal_columns(
    matrices: &mut FlatViewMut<'_>,
    shape: [usize; 3],
    twice: bool,
    rounding: f64,
) -> Result<()> {
    if matrices.dtype() != DType::F32 || matrices.len() != shape.iter().product::<usize>() {
        return Err(Error::Internal(format!("{matrices:?} as matrices {shape:?} of float32")));
    }
    on_device!(
        PANEL;
        panel::orthonormal_columns(&matrices.view(), shape, twice, rounding),
        else Err(no_kernels("orthonormal columns", twice))
    )
}
