//! Updates whose rows or columns ("channels") have factors of their own, and what they come from.

#[cfg(feature = "cuda")]
pub(in crate::kernels) mod device;
mod host;

use crate::error::Result;
use crate::kernels::ops::declare::on_device;
use crate::kernels::ops::decode::{decoded, encoded_elements};
use crate::spec::Side;
use crate::tensor::{DType, Device, FlatView, MatrixView};

/// By how much the norm of an update may exceed that of the one before.
pub(in crate::kernels) const GROWTH: f64 = 1.01;
/// Added to norms that are divided by.
pub(in crate::kernels) const TINY: f64 = 1e-8;

/// Factors of the channels of a matrix, in float64.
#[derive(Clone, Copy, Debug)]
pub struct Channels {
    /// What the channels are.
    pub side: Side,
    /// One for each.
    pub factors: FlatView,
    /// The squared norms of N and R, where these give all channels one factor; else empty.
    pub norms: FlatView,
}

/// A projected gradient R before its moments were updated, N afterwards.
#[derive(Clone, Copy, Debug)]
pub struct Projected {
    /// R or N.
    pub low: MatrixView,
    /// What its channels give.
    pub channels: Channels,
}

/// How [`channel_steps`] moves parameters.
#[derive(Clone, Copy, Debug)]
pub struct ChannelStep {
    /// γ, the gradient's factor: sign and unscaling.
    pub grad_factor: f64,
    /// `lr · weight_decay`.
    pub decay: f64,
    /// Whether the decay acts only where it points along the update.
    pub cautious: bool,
    /// Whether the decay comes after the update.
    pub late: bool,
}

/// A matrix that takes a step `x ← x - rate·γ·f·g`, whose norm grows by 1 % at most.
#[derive(Clone, Copy, Debug)]
pub struct Limited {
    /// f.
    pub channels: Channels,
    /// x.
    pub param: MatrixView,
    /// g.
    pub grad: MatrixView,
    /// The squared norm of f·g, in float64.
    pub total: FlatView,
    /// The norm of the update before, which becomes that of this one.
    pub last: FlatView,
    /// The rate, unless that is too much.
    pub rate: f64,
    /// Whether there was no update before.
    pub fresh: bool,
}

/// The squared norms of the channels of R, into their factors.
///
/// # Errors
/// `Error::Cuda` where the device refuses it.
pub fn channel_squares(all: &[Projected]) -> Result<()> {
    let Some(one) = all.first() else { return Ok(()) };
    let side = one.channels.side;
    if one.channels.factors.device() == Device::Cpu {
        for one in all {
            let sums = host::channel_squares(&one.low, side == Side::Rows);
            one.channels.factors.numbers().copy_from_slice(&sums);
        }
        return Ok(());
    }
    let sums: Vec<_> = all.iter().map(|one| (one.low, one.channels.factors)).collect();
    on_device!(crate::kernels::ops::slices::device::line_sums(side, false, &sums))
}

/// `|N| / (|γR| + 1e-8)` of each channel, of N and of what [`channel_squares`] left of R; or where the channels have one
/// factor, the squares of both norms.
///
/// # Errors
/// As `channel_squares`.
pub fn channel_ratios(grad_factor: f64, all: &[Projected]) -> Result<()> {
    match all.first().map(|one| one.channels.factors.device()) {
        None => Ok(()),
        Some(Device::Cpu) => {
            for one in all {
                host::ratios(grad_factor, one);
            }
            Ok(())
        }
        Some(Device::Cuda(_)) => on_device!(device::channel_ratios(grad_factor, all)),
    }
}

/// `Σ (f·g)²` of each matrix, into a float64 number.
///
/// # Errors
/// As `channel_squares`.
pub fn channel_totals(all: &[(Channels, MatrixView, FlatView)]) -> Result<()> {
    match all.first().map(|(channels, ..)| channels.factors.device()) {
        None => Ok(()),
        Some(Device::Cpu) => {
            for (channels, grad, total) in all {
                total.numbers().fill(host::Factors::of(channels).sum_of_squares(grad));
            }
            Ok(())
        }
        Some(Device::Cuda(_)) => on_device!(device::channel_totals(all)),
    }
}

/// Takes the steps.
///
/// # Errors
/// As `channel_squares`.
pub fn channel_steps(step: &ChannelStep, all: &[Limited]) -> Result<()> {
    match all.first().map(|one| one.total.device()) {
        None => Ok(()),
        Some(Device::Cpu) => {
            for one in all {
                host::limited_step(step, one);
            }
            Ok(())
        }
        Some(Device::Cuda(_)) => {
            let wide = |one: &Limited| [one.param, one.grad].iter().any(|area| area.dtype() == DType::F64);
            decoded(
                all,
                |one| encoded_elements(&one.param),
                |decoded, one| Ok(Limited { param: decoded.operand(one.param, wide(one), true)?, ..*one }),
                |_, part| on_device!(device::channel_steps(step, part)),
            )
        }
    }
}
