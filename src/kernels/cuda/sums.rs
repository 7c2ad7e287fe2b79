//! Elementwise passes with sums, which stay on the device: those of pieces, then those of jobs.

use super::super::pass::Pass;
use super::device::{launch, scratch};
use super::driver::Grid;
use super::table::{FEW, Job, Jobs, MANY, THREADS, is_wide, job, table};
use crate::batch::Slab;
use crate::dtype::DType;
use crate::error::{Error, Result};

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
    assert!(size_of::<SumJobs<MANY>>() == 120 + 96 * MANY && size_of::<SumJobs<MANY>>() <= 32764);
    assert!(size_of::<PieceSums>() == 24 + 12 * MANY && size_of::<Addends>() == 16 + 16 * MANY);
};

/// Runs a pass over all jobs and writes the sums of each, multiplied by the square of `factor`, where `sums` says.
pub(in super::super) fn fold<const N: usize>(
    pass: &Pass<'_>,
    factor: f64,
    jobs: &[[Slab; N]],
    sums: &[Slab],
) -> Result<()> {
    let (mut wide, mut narrow) = (Vec::new(), Vec::with_capacity(jobs.len()));
    for ((number, operands), to) in jobs.iter().enumerate().zip(sums) {
        let list = if is_wide(operands) { &mut wide } else { &mut narrow };
        list.push((job(pass, number, operands)?, *to));
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
    Ok(())
}

fn launch_table<const MOST: usize>(
    pass: &Pass<'_>,
    form: &str,
    factor: f64,
    jobs: &[(Job, Slab)],
) -> Result<()> {
    let (own, to): (Vec<Job>, Vec<Slab>) = jobs.iter().copied().unzip();
    let (table, blocks) = table::<MOST>(pass, &own)?;
    let Some(first) = to.first() else { return Ok(()) };
    let sums = first.len();
    let (_memory, partial) = scratch(blocks as usize * sums, DType::F64, first.place())?;
    let mut pieces = PieceSums {
        partial: partial.device_address()?,
        factor,
        total: [0; MANY],
        end: [0; MANY],
        sums: i32::try_from(sums).unwrap_or(0),
    };
    for (at, (job, to)) in table.job.iter().zip(&to).enumerate() {
        (pieces.end[at], pieces.total[at]) = (job.end, to.device_address()?);
    }
    if blocks > 0 {
        let grid = Grid { blocks, threads: THREADS, shared: 0 };
        let table = SumJobs { jobs: table, partial: pieces.partial };
        // SAFETY: the layout is asserted above; the session keeps the operands, and torch's allocator gives scratch to
        // others only after what is on the stream.
        unsafe { launch(&format!("{}_{form}", pass.kernel), grid, &table) }?;
    }
    let grid = Grid { blocks: blocks_of(to.len())?, threads: THREADS, shared: 0 };
    // SAFETY: as above; the sums are numbers of the arena.
    unsafe { launch("add_pieces", grid, &pieces) }
}

/// As many blocks.
pub(super) fn blocks_of(count: usize) -> Result<u32> {
    u32::try_from(count).map_err(|_| Error::Internal(format!("a launch of {count} blocks")))
}

/// Writes the sum of all numbers.
pub(super) fn add_numbers(numbers: &[Slab], total: &Slab) -> Result<()> {
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
