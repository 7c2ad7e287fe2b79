//! Normalization by neuron: runs of equal length inside the rows of a matrix, with one running number each.
//!
//! Neurons are numbered through the matrix in row-major order; some of them share a norm.

pub(in crate::kernels) mod fallback;
mod host;

use super::live::live;
use super::slices::Chosen;
use crate::error::Result;
use crate::kernels::dispatch::frozen;
use crate::tensor::{Device, FlatViewMut, MatrixViewMut};

/// An update with its neurons.
#[derive(Debug)]
pub struct Neurons<'a> {
    /// The matrix.
    pub u: MatrixViewMut<'a>,
    /// Which rows of the parameter its rows are; none: all of them.
    pub chosen: Option<Chosen<'a>>,
    /// Elements of a neuron, as far as they are stored here.
    pub length: usize,
    /// Number of neurons that share a norm: all, or parts of one row.
    pub group: usize,
    /// V of the neurons of the parameter.
    pub variance: MatrixViewMut<'a>,
    /// Float64 numbers, one for each neuron of the matrix.
    pub squares: FlatViewMut<'a>,
    /// Float64 numbers, two for each norm.
    pub totals: FlatViewMut<'a>,
}

fn device(all: &[Neurons<'_>]) -> Device {
    all.first().map_or(Device::Cpu, |one| one.squares.device())
}

/// The sum of squares of every neuron, into `squares`.
///
/// # Errors
/// Whatever libtorch says of memory of a device.
pub fn neuron_squares(all: &mut [Neurons<'_>]) -> Result<()> {
    if device(all) == Device::Cpu {
        return all.iter_mut().try_for_each(host::squares);
    }
    frozen(|| fallback::squares(all))
}

/// `V ← β₂·V + (1-β₂)·s/length` with s the sum of squares of a neuron, which has `length` elements where it is whole.
/// `totals` become for each norm the sums over its neurons of s and of s / (√V + 1e-8)².
///
/// # Errors
/// As `neuron_squares`.
#[allow(clippy::cast_precision_loss)] // a matrix side
pub fn neuron_variance(beta2: f64, length: usize, all: &mut [Neurons<'_>]) -> Result<()> {
    let length = length.max(1) as f64;
    let device = device(all);
    if device == Device::Cpu {
        for one in all {
            host::variance(beta2, length, one);
        }
        return Ok(());
    }
    live(device, &[(beta2, false)], |numbers| fallback::variance(&numbers[0], length, all))
}

/// Multiplies every neuron by `(√a / max(√b, 1e-8)) / (√V + 1e-8)` with a and b the totals of its norm.
///
/// # Errors
/// As `neuron_squares`.
pub fn normalize_neurons(all: &mut [Neurons<'_>]) -> Result<()> {
    if device(all) == Device::Cpu {
        all.iter_mut().for_each(host::normalize);
        return Ok(());
    }
    frozen(|| fallback::normalize(all))
}
