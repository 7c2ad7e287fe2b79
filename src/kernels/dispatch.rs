//! Which kernels run: those of the place where the operands are.

use tch::Kind;

use super::cpu::fold::Fold;
use super::cpu::pack::{self, Copy, Messages};
use super::cpu::{self, Op};
use crate::error::{Error, Result};
use crate::tensor::{Device, FlatView};

/// Runs `op` over all jobs: each is `N` views of equal length, disjoint from those of the other jobs, all in one place.
///
/// Arithmetic is float64 for a job with a float64 operand, else float32.
///
/// # Errors
/// [`Error::Cuda`] where there is no kernel of the operation on the device, or the device refuses it.
pub fn run<const N: usize, O: Op<N>>(op: &O, jobs: &[[FlatView; N]]) -> Result<()> {
    match common(jobs.iter().flatten())? {
        Device::Cpu => {
            cpu::run(op, jobs);
            Ok(())
        }
        Device::Cuda(_) => super::cuda::run(&op.on_cuda().ok_or_else(no_kernel::<O>)?, jobs),
    }
}

/// Runs a pass over all jobs as `run` does, and writes the `K` sums of each where `sums` says: float64.
///
/// # Errors
/// As [`run`].
pub fn fold<const N: usize, const K: usize, F: Fold<N, K>>(
    pass: &F,
    jobs: &[[FlatView; N]],
    sums: &[FlatView],
) -> Result<()> {
    if sums.len() != jobs.len() || sums.iter().any(|flat| flat.len() != K) {
        return Err(Error::Internal(format!("{} jobs with {K} sums have {} places", jobs.len(), sums.len())));
    }
    match common(jobs.iter().flatten())? {
        Device::Cpu => {
            let totals = cpu::fold::fold(pass, jobs);
            totals.iter().zip(sums).for_each(|(totals, to)| to.numbers().copy_from_slice(totals));
            Ok(())
        }
        Device::Cuda(_) => {
            super::cuda::fold(&pass.on_cuda().ok_or_else(no_kernel::<F>)?, pass.factor(), jobs, sums)
        }
    }
}

/// As [`fold`], of units that have some jobs each: one sum of each unit.
///
/// # Errors
/// As [`run`].
pub fn fold_units<const N: usize, F: Fold<N, 1>>(
    pass: &F,
    units: &[Vec<[FlatView; N]>],
    sums: &[FlatView],
) -> Result<()> {
    let jobs = units.concat();
    if units.iter().all(|jobs| jobs.len() == 1) {
        return fold(pass, &jobs, sums);
    }
    match common(jobs.iter().flatten())? {
        Device::Cpu => {
            let mut totals = cpu::fold::fold(pass, &jobs).into_iter();
            for (jobs, sum) in units.iter().zip(sums) {
                sum.numbers().fill(totals.by_ref().take(jobs.len()).map(|[total]| total).sum());
            }
            Ok(())
        }
        Device::Cuda(_) => {
            let call = pass.on_cuda().ok_or_else(no_kernel::<F>)?;
            super::cuda::fold_units(&call, pass.factor(), units, sums)
        }
    }
}

/// The place of all operands.
pub(super) fn common<'a>(operands: impl IntoIterator<Item = &'a FlatView>) -> Result<Device> {
    let mut operands = operands.into_iter();
    let device = operands.next().map_or(Device::Cpu, FlatView::device);
    if operands.any(|flat| flat.device() != device) {
        return Err(Error::Internal("the operands of one pass are in different places".into()));
    }
    Ok(device)
}

/// Carries out copies between areas that do not overlap.
///
/// # Errors
/// [`Error::Cuda`] where the device refuses it.
pub fn copy(copies: &[Copy]) -> Result<()> {
    match common(copies.iter().flat_map(|copy| [&copy.from, &copy.to]))? {
        Device::Cpu => pack::copy(copies),
        Device::Cuda(_) => return super::cuda::copy(copies),
    }
    Ok(())
}

/// Moves runs of one buffer to where they belong, `(from, to)` in order and downwards: each has its place before the
/// next one begins, and may overlap itself.
///
/// # Errors
/// As [`copy`].
pub fn move_down(moves: &[(FlatView, FlatView)]) -> Result<()> {
    match common(moves.iter().flat_map(|(from, to)| [from, to]))? {
        Device::Cpu => moves.iter().for_each(|(from, to)| from.copy_to(to)),
        Device::Cuda(_) => return super::cuda::move_down(moves),
    }
    Ok(())
}

/// `to = factor · Σ messages`, added in order in float64.
///
/// # Errors
/// As [`copy`].
pub fn sum(messages: &Messages, factor: f64, to: &FlatView) -> Result<()> {
    match common([&messages.all, to])? {
        Device::Cpu => pack::sum(messages, factor, to),
        Device::Cuda(_) => return super::cuda::sum(messages, factor, to),
    }
    Ok(())
}

pub(super) fn no_kernel<O>() -> Error {
    Error::Cuda(format!("there is no kernel of {} yet", std::any::type_name::<O>()))
}

/// Σ x² over all elements, for measurements: the host waits for a device.
///
/// # Errors
/// Whatever libtorch says of memory of a device.
pub fn measured_squares(x: &FlatView) -> Result<f64> {
    if x.device() == Device::Cpu {
        return Ok(cpu::reduce::sum_of_squares(x));
    }
    let wide = x.tensor(&[x.len()])?.f_to_kind(Kind::Double)?;
    Ok(f64::try_from(wide.f_dot(&wide)?)?)
}

/// Whether this thread works on a device.
#[must_use]
pub fn on_device() -> bool {
    super::cuda::is_entered()
}

/// Does work of which a replay of a captured step repeats every part as it was captured: products of libtorch, with the
/// kernels between them. It must not depend on what changes from step to step.
///
/// # Errors
/// Whatever the work returns.
pub fn frozen(work: impl FnOnce() -> Result<()>) -> Result<()> {
    super::cuda::frozen(work)
}

/// Whether what this thread launches is put into a graph instead of being run.
///
/// # Errors
/// [`Error::Cuda`] where the driver does not say.
pub fn is_capturing() -> Result<bool> {
    super::cuda::is_capturing()
}
