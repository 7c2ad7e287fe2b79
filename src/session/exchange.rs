//! Puts together what a hop sends, and puts where it belongs what came.

use crate::error::{Error, Result};
use crate::kernels;
use crate::layout::Reduction;
use crate::plan::{Bucket, Hop, HopKind, Route};
use crate::spec::Rect;
use crate::tensor::FlatView;

/// The buffer of a hop and the messages, seen as the type that travels.
struct Areas {
    main: FlatView,
    messages: FlatView,
}

fn areas(bucket: &Bucket, hop: &Hop, memory: &[FlatView]) -> Result<Areas> {
    let dtype = hop.dtype(&bucket.program.buffers[hop.buffer]);
    let messages = bucket.program.buffers.len() + hop.message;
    let (Some(main), Some(bytes)) = (memory.get(hop.buffer), memory.get(messages)) else {
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

/// Before a hop: fills what is sent.
///
/// # Errors
/// `Error::Internal` for memory that the plan did not lay out.
pub(super) fn pack(bucket: &Bucket, hop: &Hop, memory: &[FlatView]) -> Result<()> {
    let spec = &bucket.program.buffers[hop.buffer];
    let (areas, route) = (areas(bucket, hop, memory)?, Route::new(bucket, hop));
    match hop.kind {
        HopKind::Undeal { side, level, .. } => {
            kernels::copy(&copies(&areas, &route.parts(&hop.before, side, level, None), false))?;
        }
        HopKind::Collect { exact, .. } => {
            let (_, own) = route.run(&hop.before, &hop.before.units);
            let copies = if exact { bucket.axis(hop.axis).ranks.len() } else { 1 };
            let copy = |i| kernels::Copy::run(areas.main.part(0, own), areas.messages.part(i * own, own));
            kernels::copy(&(0..copies).map(copy).collect::<Vec<_>>())?;
        }
        HopKind::AllReduce { how } => {
            let (_, len) = route.run(&hop.before, &hop.before.units);
            let factor = mean_factor(bucket, hop, how);
            let from = areas.main.part(0, len);
            if hop.silent {
                areas.messages.part(0, len).clear()?;
            } else if hop.staged(spec) {
                kernels::run(&kernels::Convert { factor }, &[[from, areas.messages.part(0, len)]])?;
            } else if how == Reduction::Avg {
                kernels::run(&kernels::Decay { decay: 1.0 - factor, per_rate: false }, &[[from]])?;
            }
        }
        HopKind::Deal { .. } | HopKind::ReduceDeal { .. } | HopKind::Gather { .. } | HopKind::Slice => {}
    }
    Ok(())
}

/// After a hop: puts what came into the buffer.
///
/// # Errors
/// As `pack`.
pub(super) fn unpack(bucket: &Bucket, hop: &Hop, memory: &[FlatView]) -> Result<()> {
    let spec = &bucket.program.buffers[hop.buffer];
    let (areas, route) = (areas(bucket, hop, memory)?, Route::new(bucket, hop));
    match hop.kind {
        HopKind::Deal { side, level, .. } => {
            kernels::copy(&copies(&areas, &route.parts(&hop.after, side, level, None), true))?;
        }
        HopKind::Gather { side, level } => {
            let pitch = route.counts().recv.first().copied();
            kernels::copy(&copies(&areas, &route.parts(&hop.after, side, level, pitch), true))?;
        }
        HopKind::ReduceDeal { how, .. } => {
            let counts = route.counts().recv;
            let own = counts.first().copied().unwrap_or(0);
            let messages = kernels::Messages { all: areas.messages, pitch: own, count: counts.len() };
            kernels::sum(&messages, mean_factor(bucket, hop, how), &areas.main.part(0, own))?;
        }
        HopKind::Collect { at, exact: false } => {
            let pitch = route.counts().recv.first().copied().unwrap_or(0);
            let placed = |(peer, (first, count)): (usize, (usize, usize))| {
                (areas.main.part(peer * pitch, count), areas.main.part(first, count))
            };
            let moves: Vec<_> = route.runs_by_owner(at).into_iter().enumerate().map(placed).collect();
            kernels::move_down(&moves)?;
        }
        HopKind::Slice => {
            let (first, count) = route.run(&hop.before, &hop.after.units);
            kernels::move_down(&[(areas.main.part(first, count), areas.main.part(0, count))])?;
        }
        HopKind::AllReduce { .. } if hop.staged(spec) => {
            let (_, len) = route.run(&hop.before, &hop.before.units);
            let copy = kernels::Convert { factor: 1.0 };
            kernels::run(&copy, &[[areas.messages.part(0, len), areas.main.part(0, len)]])?;
        }
        HopKind::Undeal { .. } | HopKind::AllReduce { .. } | HopKind::Collect { exact: true, .. } => {}
    }
    Ok(())
}

/// What a sum is multiplied by to be a mean, where one is wanted.
#[allow(clippy::cast_precision_loss)] // a number of ranks
fn mean_factor(bucket: &Bucket, hop: &Hop, how: Reduction) -> f64 {
    match how {
        Reduction::Sum => 1.0,
        Reduction::Avg => 1.0 / bucket.axis(hop.axis).ranks.len() as f64,
    }
}
