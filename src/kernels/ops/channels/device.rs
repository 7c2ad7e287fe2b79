//! Kernels of `low_rank.cu`, of which the optimizers with low-rank moments are made.

use crate::error::Result;
use crate::kernels::cuda::device::{Rate, scratch};
use crate::kernels::cuda::lines::{Job, Matrix, blocks_of, launch_lines};
use crate::kernels::cuda::table::{number_of, to_i32};
use crate::kernels::ops::channels::{ChannelStep, Channels, Limited, Projected};
use crate::kernels::ops::slices::device::line_sums;
use crate::spec::Side;
use crate::tensor::{DType, FlatView, FlatViewMut, MatrixView, to_i64};

/// Threads of a block, each of which makes a row of signs.
const THREADS: usize = 256;

/// As `low_rank.cu` lays it out.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct SignJob {
    out: usize,
    stream: [u32; 4],
    first: u64,
    rows: i32,
    cols: i32,
    end: u32,
}

/// As `low_rank.cu` lays it out.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct GuardJob {
    basis: usize,
    out: usize,
    stride: i64,
    count: i64,
    rows: i32,
    cols: i32,
    end: u32,
    kind: u8,
    out_kind: u8,
}

/// As `low_rank.cu` lays it out.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct ChannelJob {
    param: usize,
    grad: usize,
    factors: usize,
    norms: usize,
    squares: usize,
    total: usize,
    last: usize,
    step: usize,
    rate: f64,
    stride: i64,
    grad_stride: i64,
    rows: i32,
    cols: i32,
    channels: i32,
    pieces: i32,
    end: u32,
    kind: u8,
    grad_kind: u8,
    last_kind: u8,
}

/// As `low_rank.cu` lays it out.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct ChannelOf {
    unit: Rate,
    factor: f64,
    decay: f64,
    by_row: i32,
    cautious: i32,
    late: i32,
}

const _: () = {
    assert!(size_of::<SignJob>() == 48);
    assert!(size_of::<GuardJob>() == 48);
    assert!(size_of::<ChannelJob>() == 112 && size_of::<ChannelOf>() == 48);
};

impl Job for SignJob {
    fn end(&mut self) -> &mut u32 {
        &mut self.end
    }
}

impl Job for GuardJob {
    fn end(&mut self) -> &mut u32 {
        &mut self.end
    }
}

impl Job for ChannelJob {
    fn end(&mut self) -> &mut u32 {
        &mut self.end
    }
}

/// See [`crate::kernels::sign_matrix`].
pub(in crate::kernels) fn signs(
    out: &FlatView,
    [rows, cols]: [usize; 2],
    stream: [u32; 4],
    first: u64,
) -> Result<()> {
    let (address, sizes) = (out.device_address()?, [to_i32(rows)?, to_i32(cols)?]);
    let job = SignJob { out: address, stream, first, rows: sizes[0], cols: sizes[1], end: 0 };
    // SAFETY: the layout of `SignJob` is asserted above; what is written is memory of the device, which the session
    // keeps.
    unsafe { launch_lines("low_rank_signs", 0_i32, [Ok((job, rows.div_ceil(THREADS)))]) }
}

/// See [`crate::kernels::clear_without_basis`].
pub(in crate::kernels) fn clear_without_basis(all: &[(MatrixView<'_>, FlatViewMut<'_>)]) -> Result<()> {
    let jobs = all.iter().map(|(basis, out)| {
        let Matrix { start, stride, rows, cols, kind } = Matrix::of(basis)?;
        let (count, out, out_kind) = (to_i64(out.len())?, out.device_address()?, number_of(out.dtype()));
        Ok((GuardJob { basis: start, out, stride, count, rows, cols, end: 0, kind, out_kind }, 1))
    });
    // SAFETY: the layout of `GuardJob` is asserted above; bases and outputs are memory of the device, which the
    // session keeps.
    unsafe { launch_lines("low_rank_guard", 0_i32, jobs) }
}

fn head(grad_factor: f64, side: Side) -> ChannelOf {
    let by_row = i32::from(side == Side::Rows);
    ChannelOf { unit: Rate::NONE, factor: grad_factor, decay: 0.0, by_row, cautious: 0, late: 0 }
}

/// A job with the factors of some channels.
fn job(channels: &Channels) -> Result<ChannelJob> {
    let Channels { factors, norms, .. } = channels;
    Ok(ChannelJob {
        factors: factors.device_address()?,
        norms: if norms.is_empty() { 0 } else { norms.device_address()? },
        channels: to_i32(factors.len())?,
        ..ChannelJob::default()
    })
}

/// A job on gradients and, where there is one, the parameter.
fn job_of(channels: &Channels, grad: &MatrixView, param: Option<&MatrixView>) -> Result<ChannelJob> {
    let grad = Matrix::of(grad)?;
    let param = param.map_or(Ok(grad), Matrix::of)?;
    Ok(ChannelJob {
        param: param.start,
        stride: param.stride,
        kind: param.kind,
        grad: grad.start,
        grad_stride: grad.stride,
        grad_kind: grad.kind,
        rows: grad.rows,
        cols: grad.cols,
        ..job(channels)?
    })
}

/// See [`crate::kernels::channel_ratios`].
pub(in crate::kernels) fn channel_ratios(grad_factor: f64, all: &[Projected]) -> Result<()> {
    let Some(first) = all.first() else { return Ok(()) };
    let (like, side) = (&first.channels.factors, first.channels.side);
    let total = all.iter().map(|one| one.channels.factors.len()).sum();
    let (_memory, squares) = scratch(total, DType::F64, like.device())?;
    let parts = all.iter().scan(0, |next, one| {
        let length = one.channels.factors.len();
        *next += length;
        Some(squares.part(*next - length, length))
    });
    let sums: Vec<_> = all.iter().zip(parts).map(|(one, part)| (one.low.view(), part)).collect();
    line_sums(side, false, &sums)?;
    let jobs = all.iter().zip(&sums).map(|(one, (_, squares))| {
        Ok((ChannelJob { squares: squares.device_address()?, ..job(&one.channels)? }, 1))
    });
    // SAFETY: the layout of `ChannelJob` is asserted above; the operands are memory of the device, which the session
    // keeps, and `scratch` says how long the squares stay.
    unsafe { launch_lines("low_rank_ratios", head(grad_factor, side), jobs) }
}

/// See [`crate::kernels::channel_totals`].
pub(in crate::kernels) fn channel_totals(
    all: &[(Channels<'_>, MatrixView<'_>, FlatViewMut<'_>)],
) -> Result<()> {
    let Some((channels, _, total)) = all.first() else { return Ok(()) };
    let blocks = |grad: &MatrixView| blocks_of(grad.shape()[0], grad.shape()[1]);
    let pieces = all.iter().map(|(_, grad, _)| blocks(grad)).sum();
    let (_memory, squares) = scratch(pieces, DType::F64, total.device())?;
    let mut next = 0;
    let jobs = all.iter().map(|(channels, grad, total)| {
        let pieces = blocks(grad);
        let squares = squares.part(next, pieces).device_address()?;
        next += pieces;
        let total = total.device_address()?;
        let job = ChannelJob { squares, total, pieces: to_i32(pieces)?, ..job_of(channels, grad, None)? };
        Ok((job, pieces))
    });
    let (jobs, head) = (jobs.collect::<Result<Vec<_>>>()?, head(1.0, channels.side));
    // SAFETY: the layout of `ChannelJob` is asserted above; the operands are memory of the device, which the session
    // keeps, and `scratch` says how long the squares stay.
    unsafe {
        launch_lines("low_rank_measure", head, jobs.iter().copied().map(Ok))?;
        launch_lines("low_rank_total", head, jobs.iter().map(|(job, _)| Ok((*job, 1))))
    }
}

/// See [`crate::kernels::channel_steps`].
pub(in crate::kernels) fn channel_steps(step: &ChannelStep, all: &[Limited]) -> Result<()> {
    let Some(first) = all.first() else { return Ok(()) };
    let (_memory, steps) = scratch(all.len(), DType::F64, first.total.device())?;
    let jobs = all.iter().enumerate().map(|(i, one)| {
        let job = ChannelJob {
            total: one.total.device_address()?,
            last: one.last.device_address()?,
            last_kind: number_of(one.last.dtype()),
            step: steps.part(i, 1).device_address()?,
            rate: one.rate,
            ..job_of(&one.channels, &one.grad, Some(&one.param.view()))?
        };
        Ok((job, blocks_of(one.param.shape()[0], one.param.shape()[1])))
    });
    let jobs = jobs.collect::<Result<Vec<_>>>()?;
    let head = ChannelOf {
        unit: Rate::of(0),
        decay: step.decay,
        cautious: i32::from(step.cautious),
        late: i32::from(step.late),
        ..head(step.grad_factor, first.channels.side)
    };
    // SAFETY: the layout of `ChannelJob` is asserted above; the operands are memory of the device, which the session
    // keeps, and `scratch` says how long the steps stay.
    unsafe {
        launch_lines("low_rank_limit", head, jobs.iter().map(|(job, _)| Ok((*job, 1))))?;
        launch_lines("low_rank_step", head, jobs.iter().copied().map(Ok))
    }
}
