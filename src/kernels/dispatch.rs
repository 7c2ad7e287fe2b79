//! Which kernels run: those of the place where the operands are.

use tch::{Kind, Tensor};

use super::cpu::fold::Fold;
use super::cpu::pack::{self, Copy, Messages};
use super::cpu::rows::{RowPass, Stack};
use super::cpu::{self, Op};
use super::cuda_call::RowPassCall;
use super::decode::decoded;
use super::ops::factors::Steps;
use crate::error::{Error, Result};
use crate::kernels::ops::adamw::AdamW;
use crate::kernels::ops::sum_of_squares::SumOfSquares;
use crate::tensor::{DType, Device, FlatView};

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

/// Runs a pass over the rows of all jobs, and writes its sums where they say.
///
/// # Errors
/// As [`run`].
pub fn rows<const N: usize, P: RowPass<N>>(pass: &P, jobs: &[Stack<N>]) -> Result<()> {
    match common(jobs.iter().flat_map(|stack| &stack.operands))? {
        Device::Cpu => {
            cpu::rows::rows(pass, jobs);
            Ok(())
        }
        Device::Cuda(_) => rows_decoded::<N, P>(&pass.on_cuda().ok_or_else(no_kernel::<P>)?, jobs),
    }
}

/// The pass on a device, on numbers of operands that are encoded.
fn rows_decoded<const N: usize, P: RowPass<N>>(call: &RowPassCall<'_>, jobs: &[Stack<N>]) -> Result<()> {
    decoded(
        jobs,
        |stack| stack.operands.iter().filter(|o| o.is_encoded()).map(FlatView::len).sum(),
        |decoded, stack| {
            let wide = stack.operands.iter().any(|o| o.dtype() == DType::F64);
            let mut operands = stack.operands;
            for (operand, is_written) in operands.iter_mut().zip(P::WRITES) {
                let len = operand.len();
                *operand = decoded.operand(operand.area(0, [1, len], len), wide, is_written)?.all();
            }
            Ok(Stack { operands, ..*stack })
        },
        |range, part| super::cuda::rows(&call.of(range), part),
    )
}

/// The place of all operands.
fn common<'a>(operands: impl IntoIterator<Item = &'a FlatView>) -> Result<Device> {
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

fn no_kernel<O>() -> Error {
    Error::Cuda(format!("there is no kernel of {} yet", std::any::type_name::<O>()))
}

/// `out <- factor (Σ weight addend + A Bᵀ)` on batches `[g, k, k]` and `[g, k, n]` where the result is symmetric, with at
/// most two addends, which may be `out`: by a kernel that computes one triangle, where there is one for the place, type and
/// size. False, with nothing done, where there is none.
///
/// # Errors
/// [`Error::Cuda`] where the device refuses it.
pub fn symmetric_product(
    out: &Tensor,
    [a, b]: [&Tensor; 2],
    add: &[(f64, &Tensor)],
    factor: f64,
) -> Result<bool> {
    super::cuda::symmetric_product(out, [a, b], add, factor)
}

/// Whether [`symmetric_product`] has a kernel for matrices of this type with so many rows, where their columns lie together.
#[must_use]
pub fn has_symmetric_product(kind: Kind, rows: i64) -> bool {
    super::cuda::has_symmetric_product(kind, rows)
}

/// Counts a step of each counter where it is. Returns `AdamW`'s corrections, and the counters that they follow: none
/// where the host counts.
///
/// # Errors
/// As [`run`].
pub fn count_steps(
    counters: Vec<FlatView>,
    lr: f64,
    betas: [f64; 2],
) -> Result<(Vec<[f64; 2]>, Vec<FlatView>)> {
    Ok(match Steps::count(counters)? {
        Steps::Counted(steps) => (AdamW::corrections(lr, betas, steps.into_iter()), Vec::new()),
        Steps::Counters(counters) => (vec![[lr, 1.0]; counters.len()], counters),
    })
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

/// Σ x² of each of `count` equal parts of memory of a device, as float64 `[count]` there.
///
/// # Errors
/// As [`run`].
pub fn squares_of_parts(x: &FlatView, count: usize) -> Result<Tensor> {
    let (squares, sums) = super::cuda::scratch(count, DType::F64, x.device())?;
    let each = x.len() / count.max(1);
    let jobs: Vec<_> = (0..count).map(|i| [x.part(i * each, each)]).collect();
    let places: Vec<_> = (0..count).map(|i| sums.part(i, 1)).collect();
    // Who works on a device has no other memory, whatever place a tensor's own is.
    let pass = Fold::<1, 1>::on_cuda(&SumOfSquares { factor: 1.0 });
    super::cuda::fold(&pass.ok_or_else(no_kernel::<SumOfSquares>)?, 1.0, &jobs, &places)?;
    Ok(squares)
}

/// Has the kernels of this thread launched on a stream of a device; `encoded` says whether also those for what is more than
/// numbers of its type.
///
/// # Errors
/// [`Error::Cuda`] where there is no driver or no such device.
#[cfg(feature = "cuda")]
pub fn enter(ordinal: usize, stream: usize, encoded: bool) -> Result<super::cuda::Entered> {
    super::cuda::enter(super::sources::sources(), ordinal, stream, encoded)
}

/// As there, in a build without kernels for devices.
///
/// # Errors
/// Always.
#[cfg(not(feature = "cuda"))]
pub fn enter(_ordinal: usize, _stream: usize, _encoded: bool) -> Result<super::cuda::Entered> {
    Err(Error::Cuda("this build has no kernels for devices (feature `cuda`)".into()))
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
