//! Passes over the columns of thin matrices: what the kernels of `columns.cu` are launched with.

use crate::error::{Error, Result};
use crate::kernels::cuda::device::{Rate, launch, scratch};
use crate::kernels::cuda::driver::Grid;
use crate::kernels::cuda::table::{add_pieces, number_of, to_i32};
use crate::kernels::ops::columns::{Columns, Kept};
use crate::tensor::{DType, FlatView, to_i64};

const THREADS: u32 = 256;
/// Columns and rows of one block.
const COLUMNS: usize = 32;
const ROWS: usize = 256;
/// Matrices of one launch.
const MOST_MATRICES: usize = 128;

/// As `columns.cu` lays it out.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct ColumnJob {
    x: usize,
    scaled: usize,
    sums: usize,
    partial: usize,
    q: usize,
    q_stride: i64,
    rows: i32,
    cols: i32,
    own: [i32; 2],
    end: u32,
    kind: [u8; 3],
}

/// As `columns.cu` lays it out.
#[repr(C)]
#[derive(Debug)]
struct ColumnJobs {
    unit: Rate,
    epsilon: f64,
    factor: f64,
    count: i32,
    job: [ColumnJob; MOST_MATRICES],
}

const _: () = assert!(size_of::<ColumnJob>() == 72 && size_of::<ColumnJobs>() == 40 + 72 * MOST_MATRICES);

/// Number of blocks that a matrix takes.
#[derive(Clone, Copy, Debug)]
enum Blocks {
    /// One for each part of its rows and columns.
    Parts,
    /// One for as many columns as a block has threads.
    Columns,
}

impl Blocks {
    fn of(self, job: &ColumnJob) -> usize {
        let [rows, cols] = [job.rows, job.cols].map(|n| usize::try_from(n).unwrap_or(0));
        match self {
            Self::Parts => rows.div_ceil(ROWS) * cols.div_ceil(COLUMNS),
            Self::Columns => cols.div_ceil(THREADS as usize),
        }
    }
}

fn job(columns: &Columns) -> Result<ColumnJob> {
    let [rows, cols] = columns.shape();
    let dtypes = [columns.x.dtype(), columns.scaled.dtype()];
    if dtypes.contains(&DType::F64) && columns.x.dtype() != DType::F64 {
        return Err(Error::Internal("a matrix is narrower than what it is scaled to".into()));
    }
    let [kind, to] = [number_of(dtypes[0]), number_of(dtypes[1])];
    Ok(ColumnJob {
        x: columns.x.device_address()?,
        scaled: columns.scaled.device_address()?,
        sums: columns.sums.device_address()?,
        rows: to_i32(rows)?,
        cols: to_i32(cols)?,
        kind: [kind, to, to],
        ..ColumnJob::default()
    })
}

/// The name of a pass for elements of this type.
fn named(stem: &str, dtype: DType) -> String {
    format!("{stem}_{}", if dtype == DType::F64 { "wide" } else { "few" })
}

/// Scalars that all matrices of a launch have in common.
#[derive(Clone, Copy, Debug)]
struct Head {
    epsilon: f64,
    factor: f64,
    /// Learning rate by which a device multiplies the factor.
    unit: Rate,
}

impl Head {
    const NONE: Self = Self { epsilon: 0.0, factor: 0.0, unit: Rate::NONE };
}

/// Launches a kernel on all matrices that have elements.
fn run(name: &str, all: &[ColumnJob], head: Head, blocks: Blocks) -> Result<()> {
    let Head { epsilon, factor, unit } = head;
    let some: Vec<&ColumnJob> = all.iter().filter(|job| job.rows > 0 && job.cols > 0).collect();
    for jobs in some.chunks(MOST_MATRICES) {
        let count = i32::try_from(jobs.len()).unwrap_or(0);
        let job = [ColumnJob::default(); MOST_MATRICES];
        let mut table = ColumnJobs { unit, epsilon, factor, count, job };
        let mut end = 0_u32;
        for (to, job) in table.job.iter_mut().zip(jobs) {
            end = add_pieces(end, blocks.of(job))?;
            *to = ColumnJob { end, ..**job };
        }
        let grid = Grid { blocks: end, threads: THREADS, shared: 0 };
        // SAFETY: the layout is asserted above; the matrices are memory of the device, which the session keeps, and
        // torch's allocator gives scratch to others only after what is on the stream.
        unsafe { launch(name, grid, &table) }?;
    }
    Ok(())
}

/// Sums the squares of columns; `scaled` may be nowhere.
fn sum(jobs: &mut [ColumnJob], like: &FlatView, factor: f64) -> Result<()> {
    let pieces = |job: &ColumnJob| usize::try_from(job.rows).unwrap_or(0).div_ceil(ROWS);
    let need = |job: &ColumnJob| pieces(job) * usize::try_from(job.cols).unwrap_or(0);
    let total = jobs.iter().map(need).sum();
    let (_memory, partial) = scratch(total, DType::F64, like.device())?;
    let mut start = 0;
    for job in &mut *jobs {
        let len = need(job);
        job.partial = partial.part(start, len).device_address()?;
        start += len;
    }
    run(&named("column_squares", like.dtype()), jobs, Head { factor, ..Head::NONE }, Blocks::Parts)?;
    run("column_totals", jobs, Head::NONE, Blocks::Columns)
}

/// See [`crate::kernels::squares_and_scaled`].
pub(in crate::kernels) fn squares_and_scaled(all: &mut [Columns<'_>], factor: f64) -> Result<()> {
    let Some(first) = all.first().map(|first| first.x) else { return Ok(()) };
    let mut jobs = all.iter().map(job).collect::<Result<Vec<_>>>()?;
    for (_, columns) in jobs.iter().zip(all).filter(|(job, _)| job.rows == 0) {
        columns.sums.clear()?;
    }
    sum(&mut jobs, &first, factor)
}

/// See [`crate::kernels::normalize_columns`].
pub(in crate::kernels) fn normalize_columns(
    all: &[Kept],
    epsilon: f64,
    factor: f64,
    per_rate: bool,
) -> Result<()> {
    let Some(first) = all.first() else { return Ok(()) };
    let jobs = all.iter().map(|kept| {
        let (q, stride) = kept.q.view().strided();
        let mut job = job(&kept.columns)?;
        (job.q, job.q_stride, job.kind[2]) = (q.device_address()?, to_i64(stride)?, number_of(q.dtype()));
        job.own = [to_i32(kept.own.start)?, to_i32(kept.own.end)?];
        Ok(job)
    });
    let name = named("normalize_columns", first.columns.x.dtype());
    let head = Head { epsilon, factor, unit: if per_rate { Rate::of(0) } else { Rate::NONE } };
    run(&name, &jobs.collect::<Result<Vec<_>>>()?, head, Blocks::Parts)
}

/// Scales the columns of float32 matrices `[count, rows, cols]` to norm 1 in place. A column of zeros stays one; one that
/// is not finite becomes NaN.
pub(in crate::kernels) fn scale_to_units(matrices: &FlatView, [count, rows, cols]: [usize; 3]) -> Result<()> {
    let (_memory, sums) = scratch(count * cols, DType::F64, matrices.device())?;
    let units = (0..count).map(|i| {
        let x = matrices.part(i * rows * cols, rows * cols);
        let kind = [number_of(x.dtype()); 3];
        let (x, sums) = (x.device_address()?, sums.part(i * cols, cols).device_address()?);
        let (rows, cols) = (to_i32(rows)?, to_i32(cols)?);
        Ok(ColumnJob { x, sums, rows, cols, kind, ..ColumnJob::default() })
    });
    let mut jobs = units.collect::<Result<Vec<_>>>()?;
    sum(&mut jobs, matrices, 0.0)?;
    for job in &mut jobs {
        job.scaled = job.x;
    }
    run("unit_columns", &jobs, Head::NONE, Blocks::Parts)
}
