//! Updates whose rows or columns ("channels") have factors of their own, and what they come from.

pub(in crate::kernels) mod fallback;
mod host;

use super::live::live;
use crate::error::Result;
use crate::kernels::dispatch::frozen;
use crate::kernels::libtorch::on_device;
use crate::kernels::ops::decode::{decoded, encoded_elements};
use crate::spec::Side;
use crate::tensor::{DType, Device, FlatView, FlatViewMut, MatrixView, MatrixViewMut};

/// By how much the norm of an update may exceed that of the one before.
pub(in crate::kernels) const GROWTH: f64 = 1.01;
/// Share of the norm of an update at which the one before is nothing to compare with: √ε of float32. Updates are Adam's,
/// which differ by a factor of some tens at most unless the gradients before were zero or far below Adam's epsilon.
pub(in crate::kernels) const NEGLIGIBLE: f64 = 3.452_669_8e-4;
/// Added to norms that are divided by.
pub(in crate::kernels) const TINY: f64 = 1e-8;

/// Factors of the channels of a matrix, in float64.
#[derive(Debug)]
pub struct Channels<'a> {
    /// Side of the matrix whose slices are the channels: rows or columns.
    pub side: Side,
    /// One for each.
    pub factors: FlatViewMut<'a>,
    /// The squared norms of N and R, where these give all channels one factor; else empty.
    pub norms: FlatViewMut<'a>,
}

/// A projected gradient R before its moments were updated, N afterwards.
#[derive(Debug)]
pub struct Projected<'a> {
    /// R or N.
    pub low: MatrixViewMut<'a>,
    /// Factors and norms that its channels give.
    pub channels: Channels<'a>,
}

/// Scalars with which [`channel_steps`] moves parameters.
#[derive(Clone, Copy, Debug)]
pub struct ChannelStep {
    /// γ, the gradient's factor: sign and unscaling.
    pub grad_factor: f64,
    /// `lr · weight_decay`.
    pub decay: f64,
    /// True if the decay acts only where it points along the update.
    pub cautious: bool,
    /// True if the decay comes after the update.
    pub late: bool,
}

/// A matrix that takes a step `x ← x - rate·γ·f·g`. The norm of the step grows by 1 % at most, unless the one before is
/// [`NEGLIGIBLE`] compared with it.
#[derive(Debug)]
pub struct Limited<'a> {
    /// f.
    pub channels: Channels<'a>,
    /// x.
    pub param: MatrixViewMut<'a>,
    /// g.
    pub grad: MatrixView<'a>,
    /// The squared norm of f·g, in float64.
    pub total: FlatView<'a>,
    /// The norm of the last update that was not zero, 0 if there was none; becomes that of this one.
    pub last: FlatViewMut<'a>,
    /// The rate, unless that is too much.
    pub rate: f64,
}

/// The squared norms of the channels of R, into their factors.
///
/// # Errors
/// `Error::Cuda` where the device refuses it.
pub fn channel_squares(all: &mut [Projected<'_>]) -> Result<()> {
    let Some(one) = all.first() else { return Ok(()) };
    let side = one.channels.side;
    if one.channels.factors.device() == Device::Cpu {
        for one in all {
            let sums = host::channel_squares(&one.low.view(), side == Side::Rows);
            one.channels.factors.numbers().copy_from_slice(&sums);
        }
        return Ok(());
    }
    let sums = all.iter().map(|one| (one.low.view(), one.channels.factors.view()));
    let sums: Vec<_> = sums.collect();
    on_device!(&["select.cu"]; crate::kernels::ops::slices::device::line_sums(side, false, &sums), else crate::kernels::ops::slices::fallback::line_sums(side, false, &sums))
}

/// `|N| / (|γR| + 1e-8)` of each channel, of N and of what [`channel_squares`] left of R; or where the channels have one
/// factor, the squares of both norms.
///
/// # Errors
/// As `channel_squares`.
pub fn channel_ratios(grad_factor: f64, all: &mut [Projected<'_>]) -> Result<()> {
    match all.first().map(|one| one.channels.factors.device()) {
        None => Ok(()),
        Some(Device::Cpu) => {
            for one in all {
                host::ratios(grad_factor, one);
            }
            Ok(())
        }
        Some(device) => live(device, &[(grad_factor.abs(), false)], |size| fallback::ratios(&size[0], all)),
    }
}

/// `Σ (f·g)²` of each matrix, into a float64 number.
///
/// # Errors
/// As `channel_squares`.
pub fn channel_totals(all: &mut [(Channels<'_>, MatrixView<'_>, FlatViewMut<'_>)]) -> Result<()> {
    match all.first().map(|(channels, ..)| channels.factors.device()) {
        None => Ok(()),
        Some(Device::Cpu) => {
            for (channels, grad, total) in all {
                total.numbers().fill(host::Factors::of(channels).sum_of_squares(grad));
            }
            Ok(())
        }
        Some(Device::Cuda(_)) => frozen(|| fallback::totals(all)),
    }
}

/// Takes the steps.
///
/// # Errors
/// As `channel_squares`.
pub fn channel_steps(step: &ChannelStep, all: &mut [Limited<'_>]) -> Result<()> {
    match all.first().map(|one| one.total.device()) {
        None => Ok(()),
        Some(Device::Cpu) => {
            for one in all {
                host::limited_step(step, one);
            }
            Ok(())
        }
        Some(device) => {
            let wide = |one: &Limited<'_>| [one.param.dtype(), one.grad.dtype()].contains(&DType::F64);
            decoded(
                all,
                |one| encoded_elements(&one.param.view()),
                |decoded, one| decoded.written(wide(one), &mut one.param),
                |_, part| {
                    let of_all =
                        [(step.grad_factor.abs(), false), (step.grad_factor, false), (step.decay, true)];
                    let rates = part.iter().map(|one| (one.rate, true));
                    let numbers: Vec<_> = of_all.into_iter().chain(rates).collect();
                    live(device, &numbers, |numbers| fallback::steps(step, numbers, part))
                },
            )
        }
    }
}
