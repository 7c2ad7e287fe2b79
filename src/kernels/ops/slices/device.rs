//! Slices of matrices that are chosen by their sums: the kernels of `select.cu`.

use crate::error::Result;
use crate::kernels::cuda::device::{Rate, scratch};
use crate::kernels::cuda::lines::{self, Job, Matrix, Numbers, THREADS, launch_lines};
use crate::kernels::cuda::table::to_i32;
use crate::kernels::ops::apply::Apply;
use crate::kernels::ops::slices::{Move, Sliced};
use crate::spec::Side;
use crate::tensor::{DType, FlatView, FlatViewMut, MatrixView};

/// Columns and rows whose sums one block computes.
const STRIP: usize = 128;
const CHUNK: usize = 256;
/// Rows in which a block moves its columns.
const MOVED: usize = 32;

/// As `select.cu` lays it out.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct SumJob {
    matrix: usize,
    sums: usize,
    partial: usize,
    stride: i64,
    rows: i32,
    cols: i32,
    end: u32,
    kind: u8,
}

/// As `select.cu` lays it out.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct ChoiceJob {
    scores: usize,
    chosen: usize,
    count: i32,
    room: i32,
    end: u32,
}

/// As `select.cu` lays it out.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct SliceJob {
    matrix: usize,
    update: usize,
    chosen: Numbers,
    stride: i64,
    update_stride: i64,
    rows: i32,
    cols: i32,
    update_rows: i32,
    update_cols: i32,
    end: u32,
    kind: u8,
    update_kind: u8,
}

/// As `select.cu` lays it out.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct SliceMove {
    unit: Rate,
    rate: f64,
    decay: f64,
    keep: f64,
    cautious: i32,
    columns: i32,
    give_back: i32,
}

const _: () = {
    assert!(size_of::<SumJob>() == 48 && size_of::<ChoiceJob>() == 32);
    assert!(size_of::<SliceJob>() == 72 && size_of::<SliceMove>() == 56);
};

impl Job for SumJob {
    fn end(&mut self) -> &mut u32 {
        &mut self.end
    }
}

impl Job for ChoiceJob {
    fn end(&mut self) -> &mut u32 {
        &mut self.end
    }
}

impl Job for SliceJob {
    fn end(&mut self) -> &mut u32 {
        &mut self.end
    }
}

/// The sums of absolute values, else of squares, of each row or column, into float64 views.
pub(in crate::kernels) fn line_sums(
    side: Side,
    absolute: bool,
    all: &[(MatrixView, FlatView)],
) -> Result<()> {
    let job = |(x, sums): &(MatrixView, FlatView), partial: usize| -> Result<SumJob> {
        let Matrix { start, stride, rows, cols, kind } = Matrix::of(x)?;
        let sums = sums.device_address()?;
        Ok(SumJob { matrix: start, sums, partial, stride, rows, cols, end: 0, kind })
    };
    let head = i32::from(absolute);
    if side == Side::Rows {
        let jobs = all.iter().map(|one| {
            let [rows, cols] = one.0.shape();
            Ok((job(one, 0)?, lines::blocks_of(rows, cols)))
        });
        // SAFETY: the layout is asserted above; the operands are memory of the device, which the session keeps.
        return unsafe { launch_lines("slice_rows", head, jobs) };
    }
    let Some((_, first)) = all.first() else { return Ok(()) };
    let pieces = |x: &MatrixView| x.shape()[1].div_ceil(STRIP) * x.shape()[0].div_ceil(CHUNK);
    let total = all.iter().map(|(x, _)| pieces(x)).sum::<usize>() * STRIP;
    let (_memory, partial) = scratch(total, DType::F64, first.device())?;
    let starts = all.iter().scan(partial.device_address()?, |next, (x, _)| {
        let start = *next;
        *next += pieces(x) * STRIP * DType::F64.bytes();
        Some(start)
    });
    let jobs = all.iter().zip(starts).map(|(one, start)| Ok((one, job(one, start)?)));
    let jobs = jobs.collect::<Result<Vec<_>>>()?;
    // SAFETY: the layout is asserted above; the operands are memory of the device, which the session keeps; `partial`
    // has room for the sums of all pieces.
    unsafe {
        launch_lines("slice_columns", head, jobs.iter().map(|(one, job)| Ok((*job, pieces(&one.0)))))?;
        let blocks = |x: &MatrixView| x.shape()[1].div_ceil(THREADS as usize);
        launch_lines("slice_chunks", head, jobs.iter().map(|(one, job)| Ok((*job, blocks(&one.0)))))
    }
}

/// See [`crate::kernels::choose`].
pub(in crate::kernels) fn choose(wanted: usize, all: &[(FlatView<'_>, FlatViewMut<'_>)]) -> Result<()> {
    let jobs = all.iter().map(|(scores, chosen)| {
        let (count, room) = (to_i32(scores.len())?, to_i32(chosen.len())?);
        let (scores, chosen) = (scores.device_address()?, chosen.device_address()?);
        Ok((ChoiceJob { scores, chosen, count, room, end: 0 }, 1))
    });
    // SAFETY: the layout of `ChoiceJob` is asserted above; scores and choices are memory of the device, which the
    // session keeps.
    unsafe { launch_lines("slice_choice", to_i32(wanted)?, jobs) }
}

fn job(one: &Sliced) -> Result<SliceJob> {
    let (x, u) = (Matrix::of(&one.x.view())?, Matrix::of(&one.u.view())?);
    Ok(SliceJob {
        matrix: x.start,
        update: u.start,
        chosen: Numbers::of(Some((one.chosen.numbers, one.chosen.first)))?,
        stride: x.stride,
        update_stride: u.stride,
        rows: x.rows,
        cols: x.cols,
        update_rows: u.rows,
        update_cols: u.cols,
        end: 0,
        kind: x.kind,
        update_kind: u.kind,
    })
}

/// Blocks for slices of a matrix that has as many as `area`.
fn blocks(side: Side, area: &MatrixView) -> usize {
    let [rows, cols] = area.shape();
    match side {
        Side::Rows => lines::blocks_of(rows, cols),
        Side::Cols => rows.div_ceil(MOVED) * cols.div_ceil(THREADS as usize),
    }
}

/// Moves chosen slices between matrices.
pub(in crate::kernels) fn move_slices(side: Side, how: Move, all: &[Sliced]) -> Result<()> {
    let (keep, give_back) = match how {
        Move::Take(keep) => (keep, 0),
        Move::Return => (1.0, 1),
    };
    let columns = i32::from(side == Side::Cols);
    let head = SliceMove { unit: Rate::NONE, rate: 0.0, decay: 0.0, keep, cautious: 0, columns, give_back };
    let jobs = all.iter().map(|one| Ok((job(one)?, blocks(side, &one.u.view()))));
    // SAFETY: the layout of `SliceJob` is asserted above; matrices and choices are memory of the device, which the
    // session keeps.
    unsafe { launch_lines("slice_take", head, jobs) }
}

/// See [`crate::kernels::apply_slices`].
pub(in crate::kernels) fn apply_slices(side: Side, apply: &Apply, all: &[Sliced]) -> Result<()> {
    let head = SliceMove {
        unit: Rate::of(0),
        rate: apply.rate,
        decay: apply.decay,
        keep: 1.0,
        cautious: i32::from(apply.cautious),
        columns: i32::from(side == Side::Cols),
        give_back: 0,
    };
    let jobs = all.iter().map(|one| Ok((job(one)?, blocks(side, &one.x.view()))));
    // SAFETY: the layout of `SliceJob` is asserted above; matrices and choices are memory of the device, which the
    // session keeps.
    unsafe { launch_lines("slice_apply", head, jobs) }
}
