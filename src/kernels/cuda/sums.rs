//! Elementwise passes whose sums are kept on the device: those of pieces, then those of jobs.

use tch::Tensor;

use super::device::{launch, scratch};
use super::driver::Grid;
use super::quantized::{self, QuantizedJob};
use super::table::{FEW, Job, Jobs, MANY, THREADS, is_wide, job, table};
use crate::error::{Error, Result};
use crate::kernels::op::Pass;
use crate::tensor::{DType, FlatView};

/// As `sums.cu` lays it out.
#[repr(C)]
#[derive(Debug)]
struct SumJobs<const MOST: usize> {
    jobs: Jobs<MOST>,
    partial: usize,
}

/// As `totals.cu` lays it out.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct PieceSums {
    partial: usize,
    factor: f64,
    total: [usize; MANY],
    end: [u32; MANY],
    sums: i32,
}

/// As `totals.cu` lays it out.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct Numbers {
    first: usize,
    count: i64,
}

/// As `totals.cu` lays it out.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Addends {
    total: usize,
    count: i32,
    adds: i32,
    part: [Numbers; MANY],
}

const _: () = {
    assert!(size_of::<SumJobs<MANY>>() == 128 + 96 * MANY && size_of::<SumJobs<MANY>>() <= 32764);
    assert!(size_of::<PieceSums>() == 24 + 12 * MANY && size_of::<Addends>() == 16 + 16 * MANY);
};

/// Runs a pass over all jobs and writes the sums of each, multiplied by the square of `factor`, where `sums` says.
pub(in crate::kernels) fn fold<const N: usize>(
    pass: &Pass<'_>,
    factor: f64,
    jobs: &[[FlatView; N]],
    sums: &[FlatView],
) -> Result<()> {
    let (mut wide, mut narrow) = (Vec::new(), Vec::with_capacity(jobs.len()));
    let (mut wide_quantized, mut narrow_quantized) = (Vec::new(), Vec::new());
    for ((number, operands), to) in jobs.iter().enumerate().zip(sums) {
        let (job, is_wide) = (job(pass, number, operands)?, is_wide(operands));
        if !operands[0].is_empty() && operands.iter().any(|o| o.is_encoded() || o.dtype().is_quantized()) {
            let list = if is_wide { &mut wide_quantized } else { &mut narrow_quantized };
            list.push((QuantizedJob::new(job, operands)?, *to));
        } else {
            let list = if is_wide { &mut wide } else { &mut narrow };
            list.push((job, *to));
        }
    }
    for jobs in wide.chunks(FEW) {
        launch_table::<FEW>(pass, "wide", factor, jobs)?;
    }
    for jobs in narrow.chunks(MANY) {
        if jobs.len() <= FEW {
            launch_table::<FEW>(pass, "few", factor, jobs)?;
        } else {
            launch_table::<MANY>(pass, "many", factor, jobs)?;
        }
    }
    for (is_wide, jobs) in [(true, wide_quantized), (false, narrow_quantized)] {
        for jobs in jobs.chunks(quantized::at_once(is_wide)) {
            let (own, to): (Vec<QuantizedJob>, Vec<FlatView>) = jobs.iter().copied().unzip();
            let (partial, ends) = quantized::sum(pass, is_wide, &own, |pieces| room(pieces, &to))?;
            add_up(&partial.1, &ends, factor, &to)?;
        }
    }
    Ok(())
}

/// As [`fold`], of units that have some jobs each: one sum of each unit.
pub(in crate::kernels) fn fold_units<const N: usize>(
    pass: &Pass<'_>,
    factor: f64,
    units: &[Vec<[FlatView; N]>],
    sums: &[FlatView],
) -> Result<()> {
    let jobs = units.concat();
    let Some(first) = sums.first() else { return Ok(()) };
    let (_memory, each) = scratch(jobs.len(), DType::F64, first.device())?;
    let places: Vec<FlatView> = (0..jobs.len()).map(|i| each.part(i, 1)).collect();
    fold(pass, factor, &jobs, &places)?;
    let mut at = 0;
    for (jobs, to) in units.iter().zip(sums) {
        add_numbers(&[each.part(at, jobs.len())], to)?;
        at += jobs.len();
    }
    Ok(())
}

/// Allocates memory for the sums of `pieces` pieces; returns it with its address.
fn room(pieces: u32, to: &[FlatView]) -> Result<((Tensor, FlatView<'static>), usize)> {
    let first = to.first().ok_or_else(|| Error::Internal("sums of no job".into()))?;
    let (memory, partial) = scratch(pieces as usize * first.len(), DType::F64, first.device())?;
    Ok(((memory, partial), partial.device_address()?))
}

fn launch_table<const MOST: usize>(
    pass: &Pass<'_>,
    form: &str,
    factor: f64,
    jobs: &[(Job, FlatView)],
) -> Result<()> {
    let (own, to): (Vec<Job>, Vec<FlatView>) = jobs.iter().copied().unzip();
    let (jobs, blocks) = table::<MOST>(pass, &own)?;
    let ends: Vec<u32> = jobs.job.iter().take(own.len()).map(|job| job.end).collect();
    let ((_memory, sums), partial) = room(blocks, &to)?;
    if blocks > 0 {
        let grid = Grid { blocks, threads: THREADS, shared: 0 };
        let table = SumJobs { jobs, partial };
        // SAFETY: the layout is asserted above; the session keeps the operands, and torch's allocator gives scratch to
        // others only after what is on the stream.
        unsafe { launch(&format!("{}_{form}", pass.kernel), grid, &table) }?;
    }
    add_up(&sums, &ends, factor, &to)
}

/// Adds the sums of the pieces of each job up.
fn add_up(partial: &FlatView, ends: &[u32], factor: f64, to: &[FlatView]) -> Result<()> {
    let Some(first) = to.first() else { return Ok(()) };
    let mut pieces = PieceSums {
        partial: partial.device_address()?,
        factor,
        total: [0; MANY],
        end: [0; MANY],
        sums: i32::try_from(first.len()).unwrap_or(0),
    };
    for (at, (end, to)) in ends.iter().zip(to).enumerate() {
        (pieces.end[at], pieces.total[at]) = (*end, to.device_address()?);
    }
    let grid = Grid { blocks: blocks_of(to.len())?, threads: THREADS, shared: 0 };
    // SAFETY: the layout is asserted above; partial sums and totals are numbers of the arena, which the session
    // keeps.
    unsafe { launch("add_pieces", grid, &pieces) }
}

/// As many blocks.
pub(in crate::kernels) fn blocks_of(count: usize) -> Result<u32> {
    u32::try_from(count).map_err(|_| Error::Internal(format!("a launch of {count} blocks")))
}

/// Writes the sum of all numbers.
pub(in crate::kernels) fn add_numbers(numbers: &[FlatView], total: &FlatView) -> Result<()> {
    for (at, parts) in numbers.chunks(MANY).enumerate() {
        let mut addends = Addends {
            total: total.device_address()?,
            count: i32::try_from(parts.len()).unwrap_or(0),
            adds: i32::from(at > 0),
            part: [Numbers::default(); MANY],
        };
        for (to, part) in addends.part.iter_mut().zip(parts) {
            let count = i64::try_from(part.len()).unwrap_or(0);
            *to = Numbers { first: part.device_address()?, count };
        }
        let grid = Grid { blocks: 1, threads: THREADS, shared: 0 };
        // SAFETY: the layout is asserted above; the numbers are of the arena, the total is alive until it was read.
        unsafe { launch("add_numbers", grid, &addends) }?;
    }
    Ok(())
}
