//! Tables of jobs: what the elementwise kernels of `updates.cu` are launched with.

use super::device::Rate;
pub(in crate::kernels) use super::device::number_of;
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
