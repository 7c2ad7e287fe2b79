//! Choice of the kernels that run: those of the device where the operands are.

use tch::Kind;

use super::cpu::fold::Fold;
use super::cpu::pack::{self, Copy, Messages};
use super::cpu::{self, Job, Op, Slot};
use super::libtorch;
use super::libtorch::on_device;
use super::op::{Family, Pass};
use crate::error::{Error, Result};
use crate::tensor::{DType, Device, FlatView, FlatViewMut, to_i64};

/// Sources of the kernels that copy.
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
const COPIES: &[&str] = &["copies.cu"];

/// Runs `op` over all jobs, all on one device.
///
/// Arithmetic is float64 for a job with a float64 operand, else float32.
///
/// # Errors
/// [`Error::Cuda`] where there is no kernel of the operation on the device, or the device refuses it.
pub fn run<const N: usize, const R: usize, const W: usize, O: Op<N, R, W>>(
    op: &O,
    jobs: &mut [Job<'_, R, W>],
) -> Result<()> {
    match common(jobs.iter().flat_map(Job::devices))? {
        Device::Cpu => {
            cpu::run(op, jobs);
            Ok(())
        }
        Device::Cuda(_) => {
            let call = op.on_cuda().ok_or_else(no_kernel::<O>)?;
            run_there(&call, &ordered(jobs, O::ORDER))
        }
    }
}

/// The operands of jobs as a device's kernel takes them.
fn ordered<'j, const N: usize, const R: usize, const W: usize>(
    jobs: &'j mut [Job<'_, R, W>],
    order: [Slot; N],
) -> Vec<[FlatView<'j>; N]> {
    jobs.iter_mut().map(|job| job.ordered(order)).collect()
}

/// Runs a pass over all jobs as `run` does, and writes the `K` sums of each where `sums` says: float64.
///
/// # Errors
/// As [`run`].
pub fn fold<const N: usize, const R: usize, const W: usize, const K: usize, F: Fold<N, R, W, K>>(
    pass: &F,
    jobs: &mut [Job<'_, R, W>],
    sums: &mut [FlatViewMut<'_>],
) -> Result<()> {
    if sums.len() != jobs.len() || sums.iter().any(|flat| flat.len() != K) {
        return Err(Error::Internal(format!("{} jobs with {K} sums have {} places", jobs.len(), sums.len())));
    }
    match common(jobs.iter().flat_map(Job::devices))? {
        Device::Cpu => {
            let totals = cpu::fold::fold(pass, jobs);
            totals.iter().zip(sums).for_each(|(totals, to)| to.numbers().copy_from_slice(totals));
            Ok(())
        }
        Device::Cuda(_) => {
            let call = pass.on_cuda().ok_or_else(no_kernel::<F>)?;
            fold_there(&call, pass.factor(), &ordered(jobs, F::ORDER), &views(sums))
        }
    }
}

fn views<'s>(sums: &'s [FlatViewMut<'_>]) -> Vec<FlatView<'s>> {
    sums.iter().map(FlatViewMut::view).collect()
}

/// Adds up the sums of jobs by libtorch. Each unit has the number of jobs in `counts`.
fn add_up_there<const N: usize>(
    call: &Pass<'_>,
    factor: f64,
    jobs: &[[FlatView<'_>; N]],
    counts: &[usize],
    sums: &[FlatView<'_>],
) -> Result<()> {
    let Some(each) = sums.first() else { return Ok(()) };
    let width = each.len();
    let (parts, room) = super::backend::scratch(jobs.len() * width, DType::F64, each.device())?;
    let places: Vec<_> = (0..jobs.len()).map(|job| room.part(job * width, width)).collect();
    fold_there(call, factor, jobs, &places)?;
    let parts = parts.f_reshape([to_i64(jobs.len())?, to_i64(width)?])?;
    let mut first = 0;
    for (count, to) in counts.iter().zip(sums) {
        let own = parts.f_narrow(0, first, to_i64(*count)?)?;
        let total = own.f_sum_dim_intlist([0].as_slice(), false, Kind::Double)?;
        to.tensor(&[width])?.shallow_clone().f_copy_(&total)?;
        first += to_i64(*count)?;
    }
    Ok(())
}

/// As [`fold`], of units that have some jobs each: `K` sums of each unit.
///
/// # Errors
/// As [`run`].
pub fn fold_units<const N: usize, const R: usize, const W: usize, const K: usize, F: Fold<N, R, W, K>>(
    pass: &F,
    units: Vec<Vec<Job<'_, R, W>>>,
    sums: &mut [FlatViewMut<'_>],
) -> Result<()> {
    let counts: Vec<usize> = units.iter().map(Vec::len).collect();
    let mut jobs: Vec<_> = units.into_iter().flatten().collect();
    if counts.iter().all(|count| *count == 1) {
        return fold(pass, &mut jobs, sums);
    }
    match common(jobs.iter().flat_map(Job::devices))? {
        Device::Cpu => {
            let mut totals = cpu::fold::fold(pass, &mut jobs).into_iter();
            for (count, sum) in counts.into_iter().zip(sums) {
                let mut total = [0.0; K];
                for part in totals.by_ref().take(count) {
                    total.iter_mut().zip(part).for_each(|(total, part)| *total += part);
                }
                sum.numbers().copy_from_slice(&total);
            }
            Ok(())
        }
        Device::Cuda(_) => {
            let call = pass.on_cuda().ok_or_else(no_kernel::<F>)?;
            let mut jobs = ordered(&mut jobs, F::ORDER).into_iter();
            if K > 1 {
                return add_up_there(&call, pass.factor(), &jobs.collect::<Vec<_>>(), &counts, &views(sums));
            }
            let units: Vec<Vec<_>> =
                counts.iter().map(|count| jobs.by_ref().take(*count).collect()).collect();
            let encoded = units.iter().flatten().any(is_encoded);
            on_device!(
                sources(Family::Sum, encoded);
                super::cuda::fold_units(&call, pass.factor(), &units, &views(sums)),
                else libtorch::fold_units(&call, pass.factor(), &units, &views(sums))
            )
        }
    }
}

/// Runs an elementwise pass on a device.
pub(super) fn run_there<const N: usize>(call: &Pass<'_>, jobs: &[[FlatView; N]]) -> Result<()> {
    let sources = sources(call.declared.family, jobs.iter().any(is_encoded));
    on_device!(sources; super::cuda::run(call, jobs), else libtorch::run(call, jobs))
}

/// Runs a pass with sums on a device.
pub(super) fn fold_there<const N: usize>(
    call: &Pass<'_>,
    factor: f64,
    jobs: &[[FlatView; N]],
    sums: &[FlatView],
) -> Result<()> {
    let sources = sources(Family::Sum, jobs.iter().any(is_encoded));
    on_device!(
        sources;
        super::cuda::fold(call, factor, jobs, sums),
        else libtorch::fold(call, factor, jobs, sums)
    )
}

/// Tests whether an operand is more than numbers of its type.
fn is_encoded<const N: usize>(operands: &[FlatView; N]) -> bool {
    operands.iter().any(|x| x.is_encoded() || x.dtype().is_quantized())
}

/// Sources of the kernels of elementwise passes.
#[cfg_attr(not(feature = "cuda"), allow(dead_code))] // of kernels
fn sources(family: Family, encoded: bool) -> &'static [&'static str] {
    match (family, encoded) {
        (Family::Mean, _) => &["means.cu"],
        (Family::Sum, false) => &["sums.cu", "totals.cu"],
        (Family::Sum, true) => &["sums.cu", "quantized_sums.cu", "totals.cu"],
        (_, false) => &["updates.cu"],
        (_, true) => &["updates.cu", "quantized.cu"],
    }
}

/// The device of all operands.
pub(super) fn common(devices: impl IntoIterator<Item = Device>) -> Result<Device> {
    let mut devices = devices.into_iter();
    let first = devices.next().unwrap_or(Device::Cpu);
    if devices.any(|device| device != first) {
        return Err(Error::Internal("the operands of one pass are in different places".into()));
    }
    Ok(first)
}

/// Carries out copies.
///
/// # Errors
/// [`Error::Cuda`] where the device refuses it.
pub fn copy(copies: Vec<Copy<'_>>) -> Result<()> {
    match common(copies.iter().flat_map(|copy| [copy.from.device(), copy.to.device()]))? {
        Device::Cpu => pack::copy(copies),
        Device::Cuda(_) => {
            return on_device!(COPIES; super::cuda::copy(&copies), else libtorch::copy(&copies));
        }
    }
    Ok(())
}

/// Moves runs of one buffer to where they belong, each given as where it is, where it goes and its length, in order and
/// downwards: each has its place before the next one begins, and may overlap itself.
///
/// # Errors
/// As [`copy`].
pub fn move_down(buffer: &mut FlatViewMut<'_>, moves: &[[usize; 3]]) -> Result<()> {
    if buffer.device() == Device::Cpu {
        for &[from, to, count] in moves {
            buffer.copy_within(from, to, count);
        }
        return Ok(());
    }
    let all = buffer.view();
    let runs: Vec<_> =
        moves.iter().map(|&[from, to, count]| (all.part(from, count), all.part(to, count))).collect();
    on_device!(COPIES; super::cuda::move_down(&runs), else libtorch::move_down(&runs))
}

/// `to = factor · Σ messages`, added in order in float64.
///
/// # Errors
/// As [`copy`].
pub fn sum(messages: &Messages<'_>, factor: f64, to: FlatViewMut<'_>) -> Result<()> {
    match common([messages.all.device(), to.device()])? {
        Device::Cpu => pack::sum(messages, factor, to),
        Device::Cuda(_) => {
            let to = to.view();
            return on_device!(
                &["messages.cu"];
                super::cuda::sum(messages, factor, &to),
                else libtorch::sum(messages, factor, &to)
            );
        }
    }
    Ok(())
}

/// There are no kernels of an operation where this thread works.
pub(super) fn no_kernels<T: std::fmt::Debug>(what: &str, facts: T) -> Error {
    Error::Cuda(format!("there are no kernels of {what} ({facts:?}) in use"))
}

pub(super) fn no_kernel<O>() -> Error {
    Error::Cuda(format!("there is no kernel of {} yet", std::any::type_name::<O>()))
}

/// Σ x² over all elements, for measurements: the host waits for a device.
///
/// # Errors
/// Whatever libtorch says of memory of a device.
pub fn measured_squares(x: &FlatView<'_>) -> Result<f64> {
    if x.device() == Device::Cpu {
        return Ok(cpu::reduce::sum_of_squares(x));
    }
    let wide = x.tensor(&[x.len()])?.f_to_kind(Kind::Double)?;
    Ok(f64::try_from(wide.f_dot(&wide)?)?)
}

/// Runs work that a replay of a captured step repeats exactly as it was captured: products of libtorch, with the kernels
/// between them. The work must not depend on what changes from step to step.
///
/// # Errors
/// Whatever the work returns.
pub fn frozen(work: impl FnOnce() -> Result<()>) -> Result<()> {
    super::cuda::frozen(work)
}

/// Tests whether launches of this thread are put into a graph instead of being run.
///
/// # Errors
/// [`Error::Cuda`] where the driver does not say.
pub fn is_capturing() -> Result<bool> {
    super::cuda::is_capturing()
}
