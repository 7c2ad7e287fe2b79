//! Tables of jobs that kernels work on by rows or columns, as `lines.cuh` lays them out.

use super::device::launch;
use super::driver::Grid;
use super::table::{number_of, to_i32};
use crate::error::{Error, Result};
use crate::tensor::{FlatView, MatrixView, to_i64};

pub(in crate::kernels) const THREADS: u32 = 256;
/// Jobs of one launch.
const MOST: usize = 128;
/// Elements from which a line takes all threads of a block.
const LONG: usize = 2048;
/// Lines that one warp or block works on, one after the other.
const OF_A_TEAM: usize = 4;
const WARP: usize = 32;

/// As `lines.cuh` lays it out.
#[repr(C)]
#[derive(Debug)]
struct Lines<H, J> {
    head: H,
    count: i32,
    job: [J; MOST],
}

/// A job of such a table.
pub(in crate::kernels) trait Job: Copy + Default {
    /// The blocks of this job and all before it.
    fn end(&mut self) -> &mut u32;
}

/// As `lines.cuh` lays it out.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::kernels) struct Numbers {
    start: usize,
    most: i32,
    first: i32,
}

impl Numbers {
    pub(in crate::kernels) fn of(chosen: Option<(FlatView, Option<usize>)>) -> Result<Self> {
        let Some((numbers, first)) = chosen else { return Ok(Self::default()) };
        Ok(Self {
            start: numbers.device_address()?,
            most: to_i32(numbers.len())?,
            first: first.map_or(Ok(-1), to_i32)?,
        })
    }
}

/// A matrix as kernels find it.
#[derive(Clone, Copy, Debug)]
pub(in crate::kernels) struct Matrix {
    pub(in crate::kernels) start: usize,
    pub(in crate::kernels) stride: i64,
    pub(in crate::kernels) rows: i32,
    pub(in crate::kernels) cols: i32,
    pub(in crate::kernels) kind: u8,
}

impl Matrix {
    pub(in crate::kernels) fn of(area: &MatrixView) -> Result<Self> {
        let ((flat, stride), [rows, cols]) = (area.strided(), area.shape());
        Ok(Self {
            start: flat.device_address()?,
            stride: to_i64(stride)?,
            rows: to_i32(rows)?,
            cols: to_i32(cols)?,
            kind: number_of(flat.dtype()),
        })
    }
}

/// Returns the number of blocks for `lines` lines of this length.
pub(in crate::kernels) fn blocks_of(lines: usize, length: usize) -> usize {
    lines.div_ceil(OF_A_TEAM * if length >= LONG { 1 } else { THREADS as usize / WARP })
}

/// Launches a kernel on all jobs, each with the number of its blocks.
///
/// # Safety
/// The kernel takes a table of such a head and such jobs, and what these point to is memory of the device that is alive
/// when it runs.
pub(in crate::kernels) unsafe fn launch_lines<H: Copy, J: Job>(
    kernel: &str,
    head: H,
    jobs: impl IntoIterator<Item = Result<(J, usize)>>,
) -> Result<()> {
    let mut table = Lines { head, count: 0, job: [J::default(); MOST] };
    let (mut at, mut end) = (0, 0_u32);
    let flush = |table: &mut Lines<H, J>, at: &mut usize, end: &mut u32| -> Result<()> {
        if *end > 0 {
            table.count = to_i32(*at)?;
            // SAFETY: the caller upholds it.
            unsafe { launch(kernel, Grid { blocks: *end, threads: THREADS, shared: 0 }, &*table) }?;
        }
        (*at, *end) = (0, 0);
        Ok(())
    };
    for job in jobs {
        let (mut job, blocks) = job?;
        if blocks == 0 {
            continue;
        }
        let blocks = u32::try_from(blocks).map_err(|_| Error::Internal(format!("{blocks} blocks")))?;
        if at == MOST || end.checked_add(blocks).is_none_or(|end| end > MOST_BLOCKS) {
            flush(&mut table, &mut at, &mut end)?;
        }
        end += blocks;
        *job.end() = end;
        table.job[at] = job;
        at += 1;
    }
    flush(&mut table, &mut at, &mut end)
}

/// Blocks of one launch.
const MOST_BLOCKS: u32 = i32::MAX as u32;
