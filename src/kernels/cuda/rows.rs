//! Tables of stacks: what the passes of `rows.cu` over matrices are launched with, and the sums that follow.

use tch::Tensor;

use super::super::cpu::Slot;
use super::super::cpu::rows::Stack;
use super::device::{launch, scratch};
use super::driver::Grid;
use super::table::{Scalars, THREADS, add_pieces, number_of};
use crate::error::{Error, Result};
use crate::kernels::op::RowPassCall;
use crate::tensor::{DType, FlatView, to_i64};

const MOST_OPERANDS: usize = 3;
const MOST_SCALES: usize = 2;
/// Jobs of one launch. The kernels in float64 take the small table.
const FEW: usize = 16;
const MANY: usize = 177;
/// Rows of a tile for each thread, and adjacent elements that a thread handles.
const DOWN: usize = 16;
const VECTOR: usize = 4;
/// Threads along a row.
const LANES: [usize; 3] = [8, 16, 32];

/// As `stacks.cuh` lays it out.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct Moments {
    row: usize,
    col: usize,
    all: usize,
}

/// As `stacks.cuh` lays it out.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct StackJob {
    operand: [usize; MOST_OPERANDS],
    moments: [Moments; MOST_SCALES],
    live: usize,
    /// By row, by column, of tiles.
    partial: [usize; 3],
    /// By row, by column, of matrices, of the operation.
    sums: [usize; 4],
    stack: i64,
    rows: i64,
    cols: i64,
    /// Blocks of this job and all before it: of the pass, of sums by row and column, of other sums.
    ends: [u32; 3],
    kind: [u8; MOST_OPERANDS],
    moments_kind: [u8; MOST_SCALES],
    lanes: u8,
}

/// As `stacks.cuh` lays it out.
#[repr(C)]
#[derive(Debug)]
struct Stacks<const MOST: usize> {
    scalars: Scalars,
    count: i32,
    job: [StackJob; MOST],
}

const _: () = {
    assert!(size_of::<StackJob>() == 184);
    assert!(size_of::<Stacks<FEW>>() == 120 + 184 * FEW && size_of::<Stacks<MANY>>() <= 32764);
};

/// A job, and how many numbers it leaves by row, by column and of tiles.
#[derive(Clone, Copy, Debug)]
struct Planned {
    job: StackJob,
    blocks: [usize; 3],
    partial: [usize; 3],
}

/// Runs a pass over all jobs, with its sums.
pub(in super::super) fn rows<const N: usize, const R: usize, const W: usize>(
    call: &RowPassCall<'_>,
    jobs: &mut [Stack<'_, R, W>],
    order: [Slot; N],
) -> Result<()> {
    const { assert!(N <= MOST_OPERANDS) };
    let Some(place) = jobs.first().and_then(|stack| stack.operands.devices().next()) else { return Ok(()) };
    let (mut wide, mut narrow) = (Vec::new(), Vec::with_capacity(jobs.len()));
    for (number, stack) in jobs.iter_mut().enumerate() {
        let planned = planned(call, number, stack, order)?;
        let is_wide = stack.operands.dtypes().any(|dtype| dtype == DType::F64);
        if is_wide { &mut wide } else { &mut narrow }.push(planned);
    }
    let room = |jobs: &[Planned]| {
        let numbers = jobs.iter().flat_map(|job| job.partial).sum();
        scratch(numbers, DType::F64, place)
    };
    for jobs in wide.chunks(FEW) {
        launch_table::<FEW>(call, ["wide", "few"], jobs, &room(jobs)?)?;
    }
    for jobs in narrow.chunks(MANY) {
        if jobs.len() <= FEW {
            launch_table::<FEW>(call, ["few", "few"], jobs, &room(jobs)?)?;
        } else {
            launch_table::<MANY>(call, ["many", "many"], jobs, &room(jobs)?)?;
        }
    }
    Ok(())
}

fn planned<const N: usize, const R: usize, const W: usize>(
    call: &RowPassCall<'_>,
    number: usize,
    stack: &mut Stack<'_, R, W>,
    order: [Slot; N],
) -> Result<Planned> {
    let Stack { operands, stack: matrices, rows, cols, row_sums, col_sums, all_sums, total } = stack;
    let (matrices, rows, cols) = (&*matrices, &*rows, &*cols);
    let live = call.pass.live.get(number).map_or(Ok(0), FlatView::device_address)?;
    let mut job = StackJob { live, ..StackJob::default() };
    for (at, flat) in operands.ordered(order).iter().enumerate() {
        (job.operand[at], job.kind[at]) = (flat.device_address()?, number_of(flat.dtype()));
        if flat.len() != *matrices * *rows * *cols {
            return Err(Error::Internal(format!("{} elements as {matrices} x {rows} x {cols}", flat.len())));
        }
    }
    for (at, scales) in call.scales.iter().enumerate() {
        let [row, col, all] = scales.get(number).copied().unwrap_or([FlatView::EMPTY; 3]);
        let addresses = [row, col, all].map(|flat| flat.device_address());
        let [row_at, col_at, all_at] = addresses;
        job.moments[at] = Moments { row: row_at?, col: col_at?, all: all_at? };
        job.moments_kind[at] = number_of(col.dtype());
        if !row.is_empty() && [row.dtype(), all.dtype()] != [col.dtype(); 2] {
            return Err(Error::Internal("second moments of different types".into()));
        }
    }
    for (to, flat) in job.sums.iter_mut().zip([&*row_sums, col_sums, all_sums, total]) {
        *to = if flat.is_empty() { 0 } else { flat.device_address()? };
    }
    let lanes = LANES.into_iter().find(|lanes| lanes * VECTOR >= *cols).unwrap_or(LANES[2]);
    let slots = THREADS as usize / lanes;
    let (down, across) = (rows.div_ceil(DOWN * slots), cols.div_ceil(VECTOR * lanes));
    let [by_row, by_col] = [row_sums, col_sums].map(|sums| !sums.is_empty());
    let (of_matrices, own) = (!all_sums.is_empty(), !total.is_empty());
    let strips = if by_row || by_col { matrices * (rows + cols) } else { 0 };
    [job.stack, job.rows, job.cols] = [to_i64(*matrices)?, to_i64(*rows)?, to_i64(*cols)?];
    job.lanes = u8::try_from(lanes).unwrap_or(0);
    let tiles = matrices * down * across;
    let wanted = |numbers: usize, wanted: bool| if wanted { numbers } else { 0 };
    Ok(Planned {
        job,
        blocks: [tiles, strips.div_ceil(THREADS as usize), wanted(*matrices, of_matrices) + usize::from(own)],
        partial: [
            wanted(matrices * across * rows, by_row),
            wanted(matrices * down * cols, by_col),
            wanted(2 * tiles, of_matrices || own),
        ],
    })
}

/// Launches the pass, and what adds up the sums of its tiles, which lie in `room`.
fn launch_table<const MOST: usize>(
    call: &RowPassCall<'_>,
    [form, sums]: [&str; 2],
    jobs: &[Planned],
    (_memory, room): &(Tensor, FlatView<'_>),
) -> Result<()> {
    let scalars = Scalars::of(&call.pass);
    let count = i32::try_from(jobs.len()).unwrap_or(0);
    let mut table = Stacks { scalars, count, job: [StackJob::default(); MOST] };
    let (mut ends, mut at) = ([0_u32; 3], room.device_address()?);
    for (to, planned) in table.job.iter_mut().zip(jobs) {
        *to = planned.job;
        for (end, blocks) in ends.iter_mut().zip(planned.blocks) {
            *end = add_pieces(*end, blocks)?;
        }
        to.ends = ends;
        for (partial, numbers) in to.partial.iter_mut().zip(planned.partial) {
            *partial = if numbers > 0 { at } else { 0 };
            at += numbers * size_of::<f64>();
        }
    }
    let kernels =
        [format!("{}_{form}", call.pass.kernel), format!("add_strips_{sums}"), format!("add_tiles_{sums}")];
    for (kernel, blocks) in kernels.iter().zip(ends).filter(|(_, blocks)| *blocks > 0) {
        let grid = Grid { blocks, threads: THREADS, shared: 0 };
        // SAFETY: the layout is asserted above; the session keeps operands, states and sums, and torch's allocator gives
        // scratch to others only after what is on the stream.
        unsafe { launch(kernel, grid, &table) }?;
    }
    Ok(())
}
