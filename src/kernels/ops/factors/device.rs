//! Factors of jobs that follow from sums on the device.

use crate::error::{Error, Result};
use crate::kernels::cuda::device::{Rate, launch, scratch};
use crate::kernels::cuda::driver::Grid;
use crate::kernels::cuda::sums::{add_numbers, blocks_of};
use crate::kernels::cuda::table::THREADS;
use crate::kernels::ops::factors::{Clipping, Debias, Rates, Steps, Trust, UpdateSums, count};
use crate::tensor::{DType, FlatView};

/// Jobs of one launch.
const MOST: usize = 384;

/// As `factors.cu` lays it out.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct LambJob {
    norms: usize,
    steps: usize,
    correction: [f64; 2],
}

/// As `factors.cu` lays it out.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct LambFactors {
    rate: Rate,
    out: usize,
    group: usize,
    max_grad_norm: f64,
    grad_factor: f64,
    lr: f64,
    bounds: [f64; 2],
    trust_clip: f64,
    betas: [f64; 2],
    count: i32,
    adapts: i32,
    corrects_moments: i32,
    corrects_step: i32,
    job: [LambJob; MOST],
}

/// As `factors.cu` lays it out.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct UpdateJob {
    update: usize,
    param: usize,
    steps: usize,
    rate: f64,
    count: f64,
}

/// As `factors.cu` lays it out.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct UpdateFactors {
    unit: Rate,
    out: usize,
    grad_factor: f64,
    threshold: f64,
    floor: f64,
    weight_decay: f64,
    count: i32,
    warms_up: i32,
    job: [UpdateJob; MOST],
}

const _: () = {
    assert!(size_of::<LambFactors>() == 112 + 32 * MOST);
    assert!(size_of::<UpdateFactors>() == 64 + 40 * MOST && size_of::<UpdateFactors>() <= 32764);
};

/// Writes the four factors of each job of LAMB. See [`Trust::factors`].
pub(in crate::kernels) fn lamb_factors(
    trust: &Trust,
    steps: &Steps,
    norms: Option<&[FlatView]>,
    group: &[FlatView],
    out: &[FlatView],
) -> Result<()> {
    let Some(device) = out.first().map(FlatView::device) else { return Ok(()) };
    let (_memory, total) = scratch(1, DType::F64, device)?;
    add_numbers(group, &total)?;
    let group = if group.is_empty() { 0 } else { total.device_address()? };
    for (number, out) in out.chunks(MOST).enumerate() {
        let mut launched = LambFactors {
            rate: Rate::of(0),
            out: out[0].device_address()?,
            group,
            max_grad_norm: trust.max_grad_norm,
            grad_factor: trust.grad_factor,
            lr: trust.lr,
            bounds: trust.bounds,
            trust_clip: trust.clip,
            betas: trust.betas,
            count: i32::try_from(out.len()).unwrap_or(0),
            adapts: i32::from(trust.adapts),
            corrects_moments: i32::from(trust.debias == Debias::Moments),
            corrects_step: i32::from(trust.debias == Debias::Step),
            job: [LambJob::default(); MOST],
        };
        for (at, to) in launched.job[..out.len()].iter_mut().enumerate() {
            let job = number * MOST + at;
            (to.steps, to.correction) = match steps {
                Steps::Counted(steps) => (0, trust.corrections(*of(steps, job)?)),
                Steps::Counters(counters) => (of(counters, job)?.device_address()?, [1.0; 2]),
            };
            if let Some(norms) = norms {
                to.norms = of(norms, job)?.device_address()?;
            }
        }
        // SAFETY: the layout is asserted above; norms are of the arena, counters are states, and torch's allocator gives
        // scratch to others only after what is on the stream.
        unsafe { launch("lamb_factors", grid(out.len())?, &launched) }?;
    }
    Ok(())
}

/// Writes the two factors of each job of clipped updates. See [`Clipping::factors`].
pub(in crate::kernels) fn update_factors(
    clipping: &Clipping,
    rates: &Rates<'_>,
    sums: &[UpdateSums],
    out: &[FlatView],
) -> Result<()> {
    for (number, (sums, out)) in sums.chunks(MOST).zip(out.chunks(MOST)).enumerate() {
        let mut launched = UpdateFactors {
            unit: if matches!(rates, Rates::Learning(_)) { Rate::of(0) } else { Rate::NONE },
            out: out[0].device_address()?,
            grad_factor: clipping.grad_factor,
            threshold: clipping.threshold,
            floor: clipping.floor,
            weight_decay: clipping.weight_decay,
            count: i32::try_from(out.len()).unwrap_or(0),
            warms_up: i32::from(matches!(rates, Rates::Relative { warms_up: true, .. })),
            job: [UpdateJob::default(); MOST],
        };
        for (at, (to, sums)) in launched.job.iter_mut().zip(sums).enumerate() {
            let counter = rates.counter(number * MOST + at);
            *to = UpdateJob {
                update: sums.update.device_address()?,
                param: if sums.param.is_empty() { 0 } else { sums.param.device_address()? },
                steps: counter.map_or(Ok(0), |counter| counter.device_address())?,
                rate: rates.of(number * MOST + at),
                count: count(sums.numel),
            };
        }
        // SAFETY: the layout is asserted above; the operands are memory of the device, which the session keeps.
        unsafe { launch("update_factors", grid(out.len())?, &launched) }?;
    }
    Ok(())
}

/// One thread for each job.
fn grid(jobs: usize) -> Result<Grid> {
    Ok(Grid { blocks: blocks_of(jobs)?.div_ceil(THREADS), threads: THREADS, shared: 0 })
}

fn of<T>(each: &[T], job: usize) -> Result<&T> {
    each.get(job).ok_or_else(|| Error::Internal(format!("no entry for job {job}")))
}
