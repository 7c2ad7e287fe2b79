//! Tables of jobs: what the elementwise kernels of `updates.cu` are launched with. Jobs whose operands are more than
//! numbers of their type go to those of `coded.cu`.

use super::coded::{self, CodedJob};
use super::device::{Rate, launch};
use super::driver::Grid;
use crate::error::{Error, Result};
use crate::kernels::op::{MOST_SCALARS, Pass};
use crate::tensor::{DType, FlatView, to_i64};

pub(in crate::kernels) const MOST_OPERANDS: usize = 5;
pub(in crate::kernels) const THREADS: u32 = 256;
/// Elements of one block.
pub(in crate::kernels) const PIECE: usize = 1 << 14;
/// Jobs of one launch. The kernels in float64 take the small table.
pub(in crate::kernels) const FEW: usize = 32;
pub(in crate::kernels) const MANY: usize = 338;

/// As `jobs.cuh` lays it out.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(in crate::kernels) struct Scalars {
    rate: Rate,
    value: [f64; MOST_SCALARS],
}

impl Scalars {
    pub(in crate::kernels) fn of(pass: &Pass<'_>) -> Self {
        Self { rate: Rate::of(pass.per_rate), value: pass.scalars }
    }
}

/// As `jobs.cuh` lays it out.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::kernels) struct Job {
    operand: [usize; MOST_OPERANDS],
    length: i64,
    factor: [f64; 2],
    steps: usize,
    live: usize,
    pub(in crate::kernels) end: u32,
    pub(in crate::kernels) kind: [u8; MOST_OPERANDS],
}

/// As `jobs.cuh` lays it out.
#[repr(C)]
#[derive(Debug)]
pub(in crate::kernels) struct Jobs<const MOST: usize> {
    scalars: Scalars,
    count: i32,
    pub(in crate::kernels) job: [Job; MOST],
}

const _: () = {
    assert!(size_of::<Scalars>() == 112 && size_of::<Job>() == 96);
    assert!(size_of::<Jobs<FEW>>() == 120 + 96 * FEW && size_of::<Jobs<MANY>>() <= 32764);
};

/// Runs a pass over all jobs.
pub(in crate::kernels) fn run<const N: usize>(pass: &Pass<'_>, jobs: &[[FlatView; N]]) -> Result<()> {
    let (mut wide, mut narrow) = (Vec::new(), Vec::with_capacity(jobs.len()));
    let (mut wide_coded, mut narrow_coded) = (Vec::new(), Vec::new());
    for (number, operands) in jobs.iter().enumerate().filter(|(_, operands)| !operands[0].is_empty()) {
        let (job, is_wide) = (job(pass, number, operands)?, !pass.double && is_wide(operands));
        if operands.iter().any(|o| o.is_encoded() || o.dtype().is_quantized()) {
            let list = if is_wide { &mut wide_coded } else { &mut narrow_coded };
            list.push(CodedJob::new(job, operands)?);
        } else {
            let list = if is_wide { &mut wide } else { &mut narrow };
            list.push(job);
        }
    }
    for jobs in wide.chunks(FEW) {
        launch_table::<FEW>(pass, "wide", jobs)?;
    }
    for jobs in narrow.chunks(MANY) {
        if jobs.len() <= FEW {
            launch_table::<FEW>(pass, "few", jobs)?;
        } else {
            launch_table::<MANY>(pass, "many", jobs)?;
        }
    }
    coded::run(pass, true, &wide_coded)?;
    coded::run(pass, false, &narrow_coded)
}

/// Tests whether arithmetic is float64.
pub(in crate::kernels) fn is_wide<const N: usize>(operands: &[FlatView; N]) -> bool {
    operands.iter().any(|o| o.dtype() == DType::F64)
}

/// Job `number` of a pass.
pub(in crate::kernels) fn job<const N: usize>(
    pass: &Pass<'_>,
    number: usize,
    operands: &[FlatView; N],
) -> Result<Job> {
    const { assert!(N <= MOST_OPERANDS) };
    let factor = pass.factors.get(number).copied().unwrap_or_default();
    let address = |flats: &[FlatView]| flats.get(number).map_or(Ok(0), FlatView::device_address);
    let (steps, live) = (address(pass.steps)?, address(pass.live)?);
    let mut job = Job { factor, steps, live, ..Job::default() };
    let length = operands[0].len();
    job.length = to_i64(length)?;
    for (at, flat) in operands.iter().enumerate() {
        if flat.len() != length {
            return Err(Error::Internal("the operands of a pass differ in length".into()));
        }
        (job.operand[at], job.kind[at]) = (flat.encoded_address(), number_of(flat.dtype()));
    }
    Ok(job)
}

/// A type as `jobs.cuh` numbers it.
pub(in crate::kernels) fn number_of(dtype: DType) -> u8 {
    match dtype {
        DType::F16 => 0,
        DType::BF16 => 1,
        DType::F32 => 2,
        DType::F64 => 3,
        DType::Q8 => 4,
        DType::UQ8 => 5,
        // No kernel takes them by themselves: `ROUNDED` and `MASTER` of `coded.rs` are 6 and 7.
        DType::I16 => 8,
    }
}

/// A side of a matrix, or a number of its lines.
pub(in crate::kernels) fn to_i32(n: usize) -> Result<i32> {
    i32::try_from(n).map_err(|_| Error::Internal(format!("{n} rows or columns of one matrix")))
}

/// The end of a job with this many pieces behind one that ends at `end`.
pub(in crate::kernels) fn add_pieces(end: u32, pieces: usize) -> Result<u32> {
    u32::try_from(pieces)
        .ok()
        .and_then(|pieces| end.checked_add(pieces))
        .ok_or_else(|| Error::Internal("too many elements for one launch".into()))
}

/// A table of jobs, and how many pieces they have.
pub(in crate::kernels) fn table<const MOST: usize>(
    pass: &Pass<'_>,
    jobs: &[Job],
) -> Result<(Jobs<MOST>, u32)> {
    let scalars = Scalars::of(pass);
    let mut table =
        Jobs { scalars, count: i32::try_from(jobs.len()).unwrap_or(0), job: [Job::default(); MOST] };
    let mut end = 0_u32;
    for (to, job) in table.job.iter_mut().zip(jobs) {
        end = add_pieces(end, usize::try_from(job.length).unwrap_or(0).div_ceil(PIECE))?;
        *to = Job { end, ..*job };
    }
    Ok((table, end))
}

fn launch_table<const MOST: usize>(pass: &Pass<'_>, form: &str, jobs: &[Job]) -> Result<()> {
    let (table, blocks) = table::<MOST>(pass, jobs)?;
    let grid = Grid { blocks, threads: THREADS, shared: 0 };
    // SAFETY: the layout is asserted above; the operands are memory of the device, which the session keeps.
    unsafe { launch(&format!("{}_{form}", pass.kernel), grid, &table) }
}
