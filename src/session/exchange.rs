//! Puts together what a redistribution sends, and puts where it belongs what came.

use crate::error::{Error, Result};
use crate::kernels;
use crate::layout::Reduction;
use crate::plan::{Bucket, Redistribution, RedistributionKind, Route};
use crate::spec::Rect;
use crate::tensor::FlatView;

/// The buffer of a redistribution and the messages, seen as the type that travels.
struct Areas {
    main: FlatView,
    messages: FlatView,
}

fn areas(bucket: &Bucket, redistribution: &Redistribution, memory: &[FlatView]) -> Result<Areas> {
    let dtype = redistribution.dtype(&bucket.program.buffers[redistribution.buffer]);
    let messages = bucket.program.buffers.len() + redistribution.message;
    let (Some(main), Some(bytes)) = (memory.get(redistribution.buffer), memory.get(messages)) else {
        return Err(Error::Internal("a bucket without memory".into()));
    };
    let len = bytes.len() * bytes.dtype().bytes() / dtype.bytes();
    Ok(Areas { main: *main, messages: bytes.carve(0, len, dtype)? })
}

/// Copies between messages and buffer: `(message, buffer)` pairs of places.
fn copies(areas: &Areas, places: &[(Rect, Rect)], home: bool) -> Vec<kernels::Copy> {
    let all = |area: &FlatView, rect: &Rect| area.part(rect.offset, area.len() - rect.offset.min(area.len()));
    let copy = |(there, here): &(Rect, Rect)| {
        let (there_slab, here_slab) = (all(&areas.messages, there), all(&areas.main, here));
        let (from, from_stride, to, to_stride) = if home {
            (there_slab, there.stride, here_slab, here.stride)
        } else {
            (here_slab, here.stride, there_slab, there.stride)
        };
        kernels::Copy { from, from_stride, to, to_stride, rows: there.rows, cols: there.cols }
    };
    places.iter().map(copy).collect()
}

/// Before a redistribution: fills what is sent.
///
/// # Errors
/// `Error::Internal` for memory that the plan did not lay out.
pub(super) fn pack(bucket: &Bucket, redistribution: &Redistribution, memory: &[FlatView]) -> Result<()> {
    let spec = &bucket.program.buffers[redistribution.buffer];
    let (areas, route) = (areas(bucket, redistribution, memory)?, Route::new(bucket, redistribution));
    match redistribution.kind {
        RedistributionKind::FromOwner { side, level, .. } => {
            kernels::copy(&copies(&areas, &route.parts(&redistribution.before, side, level, None), false))?;
        }
        RedistributionKind::GatherOwned { exact, .. } => {
            let (_, own) = route.run(&redistribution.before, &redistribution.before.units);
            let copies = if exact { bucket.axis(redistribution.axis).ranks.len() } else { 1 };
            let copy = |i| kernels::Copy::run(areas.main.part(0, own), areas.messages.part(i * own, own));
            kernels::copy(&(0..copies).map(copy).collect::<Vec<_>>())?;
        }
        RedistributionKind::AllReduce { how } => {
            let (_, len) = route.run(&redistribution.before, &redistribution.before.units);
            let factor = mean_factor(bucket, redistribution, how);
            let from = areas.main.part(0, len);
            if redistribution.silent {
                areas.messages.part(0, len).clear()?;
            } else if redistribution.staged(spec) {
                kernels::run(&kernels::Convert { factor }, &[[from, areas.messages.part(0, len)]])?;
            } else if how == Reduction::Avg {
                kernels::run(&kernels::Decay { decay: 1.0 - factor, per_rate: false }, &[[from]])?;
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
pub(super) fn unpack(bucket: &Bucket, redistribution: &Redistribution, memory: &[FlatView]) -> Result<()> {
    let spec = &bucket.program.buffers[redistribution.buffer];
    let (areas, route) = (areas(bucket, redistribution, memory)?, Route::new(bucket, redistribution));
    match redistribution.kind {
        RedistributionKind::ToOwner { side, level, .. } => {
            kernels::copy(&copies(&areas, &route.parts(&redistribution.after, side, level, None), true))?;
        }
        RedistributionKind::AllGather { side, level } => {
            let pitch = route.counts().recv.first().copied();
            kernels::copy(&copies(&areas, &route.parts(&redistribution.after, side, level, pitch), true))?;
        }
        RedistributionKind::ReduceToOwner { how, .. } => {
            let counts = route.counts().recv;
            let own = counts.first().copied().unwrap_or(0);
            let messages = kernels::Messages { all: areas.messages, pitch: own, count: counts.len() };
            kernels::sum(&messages, mean_factor(bucket, redistribution, how), &areas.main.part(0, own))?;
        }
        RedistributionKind::GatherOwned { at, exact: false } => {
            let pitch = route.counts().recv.first().copied().unwrap_or(0);
            let placed = |(peer, (first, count)): (usize, (usize, usize))| {
                (areas.main.part(peer * pitch, count), areas.main.part(first, count))
            };
            let moves: Vec<_> = route.runs_by_owner(at).into_iter().enumerate().map(placed).collect();
            kernels::move_down(&moves)?;
        }
        RedistributionKind::Slice => {
            let (first, count) = route.run(&redistribution.before, &redistribution.after.units);
            kernels::move_down(&[(areas.main.part(first, count), areas.main.part(0, count))])?;
        }
        RedistributionKind::AllReduce { .. } if redistribution.staged(spec) => {
            let (_, len) = route.run(&redistribution.before, &redistribution.before.units);
            let copy = kernels::Convert { factor: 1.0 };
            kernels::run(&copy, &[[areas.messages.part(0, len), areas.main.part(0, len)]])?;
        }
        RedistributionKind::FromOwner { .. }
        | RedistributionKind::AllReduce { .. }
        | RedistributionKind::GatherOwned { exact: true, .. } => {}
    }
    Ok(())
}

/// What a sum is multiplied by to be a mean, where one is wanted.
#[allow(clippy::cast_precision_loss)] // a number of ranks
fn mean_factor(bucket: &Bucket, redistribution: &Redistribution, how: Reduction) -> f64 {
    match how {
        Reduction::Sum => 1.0,
        Reduction::Avg => 1.0 / bucket.axis(redistribution.axis).ranks.len() as f64,
    }
}
