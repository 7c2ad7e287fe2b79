//! Puts together what a redistribution sends, and puts where it belongs what came.

use super::views::Memory;
use crate::error::Result;
use crate::kernels::{self, Job};
use crate::layout::Reduction;
use crate::plan::{Bucket, Redistribution, RedistributionKind, Route};
use crate::spec::Rect;
use crate::tensor::FlatViewMut;

/// The buffer of a redistribution and the messages, viewed as the dtype that is sent.
struct Areas<'a> {
    main: FlatViewMut<'a>,
    messages: FlatViewMut<'a>,
}

fn areas<'a>(
    bucket: &Bucket,
    redistribution: &Redistribution,
    number: usize,
    memory: &'a mut Memory,
) -> Result<Areas<'a>> {
    let dtype = redistribution.dtype(&bucket.program.buffers[redistribution.buffer]);
    let messages = bucket.program.buffers.len() + redistribution.message;
    let [main, bytes] = memory.two(number, [redistribution.buffer, messages])?;
    let len = bytes.len() * bytes.dtype().bytes() / dtype.bytes();
    Ok(Areas { main, messages: bytes.retyped(len, dtype)? })
}

/// Copies between messages and buffer: `(message, buffer)` pairs of positions.
fn copies<'a>(
    Areas { main, messages }: Areas<'a>,
    places: &[(Rect, Rect)],
    home: bool,
) -> Result<Vec<kernels::Copy<'a>>> {
    let (from, to) = if home { (messages, main) } else { (main, messages) };
    let (mut sources, mut targets) = (Vec::with_capacity(places.len()), Vec::with_capacity(places.len()));
    for (there, here) in places {
        let shape = [there.rows, there.cols];
        let [source, target] = if home { [there, here] } else { [here, there] };
        sources.push((source.offset, shape, source.stride));
        targets.push(Rect {
            offset: target.offset,
            rows: there.rows,
            cols: there.cols,
            stride: target.stride,
        });
    }
    let (from, to) = (from.into_view(), to.into_matrices(&targets)?);
    let pairs = sources.into_iter().zip(to);
    let pairs = pairs
        .map(|((offset, shape, stride), to)| kernels::Copy { from: from.matrix(offset, shape, stride), to });
    Ok(pairs.collect())
}

/// Before a redistribution: fills what is sent.
///
/// # Errors
/// `Error::Internal` for memory that the plan did not lay out.
pub(super) fn pack(
    bucket: &Bucket,
    redistribution: &Redistribution,
    number: usize,
    memory: &mut Memory,
) -> Result<()> {
    let spec = &bucket.program.buffers[redistribution.buffer];
    let route = Route::new(bucket, redistribution);
    let mut areas = areas(bucket, redistribution, number, memory)?;
    match redistribution.kind {
        RedistributionKind::FromOwner { side, level, .. } => {
            let places = route.parts(&redistribution.before, side, level, None);
            kernels::copy(copies(areas, &places, false)?)?;
        }
        RedistributionKind::GatherOwned { exact, .. } => {
            let (_, own) = route.run(&redistribution.before, &redistribution.before.units);
            let count = if exact { bucket.axis(redistribution.axis).ranks.len() } else { 1 };
            let from = areas.main.into_view().part(0, own);
            let to = areas.messages.into_part(0, count * own).chunks(own);
            kernels::copy(to.map(|to| kernels::Copy::run(from, to)).collect())?;
        }
        RedistributionKind::AllReduce { how } => {
            let (_, len) = route.run(&redistribution.before, &redistribution.before.units);
            let factor = mean_factor(bucket, redistribution, how);
            if redistribution.silent {
                areas.messages.part(0, len).clear()?;
            } else if redistribution.staged(spec) {
                let job =
                    Job { read: [areas.main.view().part(0, len)], write: [areas.messages.part(0, len)] };
                kernels::run(&kernels::Convert { factor }, &mut [job])?;
            } else if how == Reduction::Avg {
                let job = Job { read: [], write: [areas.main.part(0, len)] };
                kernels::run(&kernels::Decay { decay: 1.0 - factor, per_rate: false }, &mut [job])?;
            }
        }
        RedistributionKind::ToOwner { .. }
        | RedistributionKind::ReduceToOwner { .. }
        | RedistributionKind::AllGather { .. }
        | RedistributionKind::Slice => {}
    }
    Ok(())
}

/// After a redistribution: puts what came into the buffer.
///
/// # Errors
/// As `pack`.
pub(super) fn unpack(
    bucket: &Bucket,
    redistribution: &Redistribution,
    number: usize,
    memory: &mut Memory,
) -> Result<()> {
    let spec = &bucket.program.buffers[redistribution.buffer];
    let route = Route::new(bucket, redistribution);
    let mut areas = areas(bucket, redistribution, number, memory)?;
    match redistribution.kind {
        RedistributionKind::ToOwner { side, level, .. } => {
            let places = route.parts(&redistribution.after, side, level, None);
            kernels::copy(copies(areas, &places, true)?)?;
        }
        RedistributionKind::AllGather { side, level } => {
            let pitch = route.counts().recv.first().copied();
            let places = route.parts(&redistribution.after, side, level, pitch);
            kernels::copy(copies(areas, &places, true)?)?;
        }
        RedistributionKind::ReduceToOwner { how, .. } => {
            let counts = route.counts().recv;
            let own = counts.first().copied().unwrap_or(0);
            let all = areas.messages.into_view();
            let messages = kernels::Messages { all, pitch: own, count: counts.len() };
            kernels::sum(&messages, mean_factor(bucket, redistribution, how), areas.main.into_part(0, own))?;
        }
        RedistributionKind::GatherOwned { at, exact: false } => {
            let pitch = route.counts().recv.first().copied().unwrap_or(0);
            let placed = |(peer, (first, count)): (usize, (usize, usize))| [peer * pitch, first, count];
            let moves: Vec<_> = route.runs_by_owner(at).into_iter().enumerate().map(placed).collect();
            kernels::move_down(&mut areas.main, &moves)?;
        }
        RedistributionKind::Slice => {
            let (first, count) = route.run(&redistribution.before, &redistribution.after.units);
            kernels::move_down(&mut areas.main, &[[first, 0, count]])?;
        }
        RedistributionKind::AllReduce { .. } if redistribution.staged(spec) => {
            let (_, len) = route.run(&redistribution.before, &redistribution.before.units);
            let job = Job { read: [areas.messages.view().part(0, len)], write: [areas.main.part(0, len)] };
            kernels::run(&kernels::Convert { factor: 1.0 }, &mut [job])?;
        }
        RedistributionKind::FromOwner { .. }
        | RedistributionKind::AllReduce { .. }
        | RedistributionKind::GatherOwned { exact: true, .. } => {}
    }
    Ok(())
}

/// Factor by which a sum is multiplied to be a mean, where one is wanted.
#[allow(clippy::cast_precision_loss)] // a number of ranks
fn mean_factor(bucket: &Bucket, redistribution: &Redistribution, how: Reduction) -> f64 {
    match how {
        Reduction::Sum => 1.0,
        Reduction::Avg => 1.0 / bucket.axis(redistribution.axis).ranks.len() as f64,
    }
}
