//! Packing and unpacking of the messages that ranks send each other: tables of `copies.cu`, and `messages.cu`.
//!
//! Messages are in the arena, which is device memory. NCCL runs the collectives on its own streams, and
//! waiting for one makes torch's current stream wait, not the host. The order of instructions that the plan
//! was checked for therefore holds on the device. A slot of the arena is written again only after that wait,
//! so the arena needs no `record_stream`.
//!
//! Reduce-scatters have the bits of the CPU. All-reduces add in NCCL's order. An all-gather of unequal shares
//! goes through memory of torch's allocator.

use super::super::{Copy, Messages};
use super::device::{launch, scratch};
use super::driver::Grid;
use super::table::number_of;
use crate::error::{Error, Result};
use crate::tensor::{FlatView, MatrixView, to_i64};

const THREADS: u32 = 256;
/// Units of one block of `copies.cu`, and elements of one block of `messages.cu`.
const PIECE: usize = 4096;
/// Rectangles of one launch.
const FEW: usize = 32;
const MANY: usize = 682;
/// Units of a row: a kernel counts them in 32 bits, and what it is about to do.
const MOST_UNITS: usize = 1 << 31;

/// As `copies.cu` lays it out.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct Rectangle {
    from: usize,
    to: usize,
    from_step: i64,
    to_step: i64,
    rows: u32,
    units: u32,
    end: u32,
    width: u32,
}

/// As `copies.cu` lays it out.
#[repr(C)]
#[derive(Debug)]
struct Rectangles<const MOST: usize> {
    count: i32,
    each: [Rectangle; MOST],
}

/// As `messages.cu` lays it out.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Sum {
    first: usize,
    to: usize,
    pitch: i64,
    length: i64,
    factor: f64,
    count: i32,
    kinds: [u8; 2],
}

const _: () = {
    assert!(size_of::<Rectangle>() == 48 && size_of::<Sum>() == 48);
    assert!(size_of::<Rectangles<FEW>>() == 8 + 48 * FEW && size_of::<Rectangles<MANY>>() <= 32764);
};

fn too_large(what: usize) -> Error {
    Error::Internal(format!("{what} is too much for one launch"))
}

/// See [`super::super::copy`].
pub(in super::super) fn copy(copies: &[Copy<'_>]) -> Result<()> {
    let mut all = Vec::with_capacity(copies.len());
    for copy in copies {
        add(&copy.from, &copy.to.view(), &mut all)?;
    }
    launch_all(&mut all)
}

fn launch_all(all: &mut [Rectangle]) -> Result<()> {
    for rectangles in all.chunks_mut(MANY) {
        if rectangles.len() <= FEW {
            launch_table::<FEW>("copy_few", rectangles)?;
        } else {
            launch_table::<MANY>("copy_many", rectangles)?;
        }
    }
    Ok(())
}

/// Copies runs.
fn copy_runs(runs: &[(FlatView<'_>, FlatView<'_>)]) -> Result<()> {
    let mut all = Vec::with_capacity(runs.len());
    for (from, to) in runs {
        let len = from.len().min(to.len());
        add(&from.matrix(0, [1, len], len), &to.matrix(0, [1, len], len), &mut all)?;
    }
    launch_all(&mut all)
}

/// The widest unit that a number of bytes is a multiple of.
fn width_of(bytes: usize) -> usize {
    1 << bytes.trailing_zeros().min(4)
}

/// Adds the rectangles of a copy: units as wide as addresses and distances allow, and what is left of each row.
fn add(from: &MatrixView<'_>, to: &MatrixView<'_>, all: &mut Vec<Rectangle>) -> Result<()> {
    let [rows, cols] = from.shape();
    let bytes = from.dtype().bytes();
    if rows * cols == 0 {
        return Ok(());
    }
    if from.dtype() != to.dtype() || bytes < 2 || to.shape() != [rows, cols] {
        return Err(Error::Internal(format!("a copy of {rows} x {cols} elements that do not fit")));
    }
    let ((from, from_stride), (to, to_stride)) = (from.strided(), to.strided());
    let flat = from_stride == cols && to_stride == cols;
    let (rows, cols) = if flat { (1, rows * cols) } else { (rows, cols) };
    let (from, to) = (from.device_address()?, to.device_address()?);
    let [from_step, to_step] = if rows > 1 { [from_stride * bytes, to_stride * bytes] } else { [0, 0] };
    let width = width_of(from | to | from_step | to_step);
    let row = cols * bytes;
    let whole = row / width * width;
    for (start, length) in [(0, whole), (whole, row - whole)].into_iter().filter(|(_, length)| *length > 0) {
        let width = width_of(length).min(width);
        let units = length / width;
        if units > MOST_UNITS {
            return Err(too_large(units));
        }
        all.push(Rectangle {
            from: from + start,
            to: to + start,
            from_step: to_i64(from_step)?,
            to_step: to_i64(to_step)?,
            rows: u32::try_from(rows).map_err(|_| too_large(rows))?,
            units: u32::try_from(units).map_err(|_| too_large(units))?,
            end: 0,
            width: u32::try_from(width).unwrap_or(2),
        });
    }
    Ok(())
}

fn launch_table<const MOST: usize>(name: &str, rectangles: &[Rectangle]) -> Result<()> {
    let count = i32::try_from(rectangles.len()).map_err(|_| too_large(rectangles.len()))?;
    let mut table = Rectangles { count, each: [Rectangle::default(); MOST] };
    let mut end = 0;
    for (to, rectangle) in table.each.iter_mut().zip(rectangles) {
        end += (rectangle.rows as usize * rectangle.units as usize).div_ceil(PIECE);
        *to = Rectangle { end: u32::try_from(end).map_err(|_| too_large(end))?, ..*rectangle };
    }
    let blocks = u32::try_from(end).map_err(|_| too_large(end))?;
    // SAFETY: the layout is asserted above; what is copied is memory of the device, which the session keeps.
    unsafe { launch(name, Grid { blocks, threads: THREADS, shared: 0 }, &table) }
}

/// See [`super::super::move_down`].
pub(in super::super) fn move_down(moves: &[(FlatView, FlatView)]) -> Result<()> {
    let mut due = Vec::with_capacity(moves.len());
    let (mut first_read, mut last_written, mut len) = (usize::MAX, 0, 0);
    for (from, to) in moves {
        let (there, here) = (from.device_address()?, to.device_address()?);
        if from.is_empty() || there == here {
            continue;
        }
        first_read = first_read.min(there);
        last_written = last_written.max(here + to.len() * to.dtype().bytes());
        len += from.len();
        due.push((*from, *to));
    }
    let Some((one, _)) = due.first() else { return Ok(()) };
    if last_written <= first_read {
        return copy_runs(&due);
    }
    // The blocks of a launch have no order: what would be written over is put aside.
    let (_memory, aside) = scratch(len, one.dtype(), one.device())?;
    let (mut away, mut home, mut offset) = (Vec::new(), Vec::new(), 0);
    for (from, to) in due {
        let room = aside.part(offset, from.len());
        offset += from.len();
        away.push((from, room));
        home.push((room, to));
    }
    copy_runs(&away)?;
    copy_runs(&home)
}

/// See [`super::super::sum`].
pub(in super::super) fn sum(messages: &Messages, factor: f64, to: &FlatView) -> Result<()> {
    let Messages { all, pitch, count } = *messages;
    if to.is_empty() {
        return Ok(());
    }
    if count > 0 && (count - 1) * pitch + to.len() > all.len() {
        return Err(Error::Internal(format!("{count} messages of {} elements do not fit", to.len())));
    }
    let what = Sum {
        first: all.device_address()?,
        to: to.device_address()?,
        pitch: to_i64(pitch)?,
        length: to_i64(to.len())?,
        factor,
        count: i32::try_from(count).map_err(|_| too_large(count))?,
        kinds: [number_of(all.dtype()), number_of(to.dtype())],
    };
    let pieces = to.len().div_ceil(PIECE);
    let blocks = u32::try_from(pieces).map_err(|_| too_large(pieces))?;
    // SAFETY: as in `launch_table`.
    unsafe { launch("sum_messages", Grid { blocks, threads: THREADS, shared: 0 }, &what) }
}
