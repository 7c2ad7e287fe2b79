//! Orders the work of all buckets into one list of instructions.

use std::collections::VecDeque;

use super::arena::Place;
use super::bucket::Bucket;
use super::hop::{Hop, HopKind, Segment, Step};
use super::route::Route;
use crate::dtype::DType;
use crate::layout::{Axis, Collective};

/// Buckets whose collectives are in flight at a time.
const LANES: usize = 2;

/// One instruction of the schedule; the number is an index into the plan's lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Instr {
    /// Run `computes[k]`.
    Compute(usize),
    /// Start `collectives[k]`.
    Issue(usize),
    /// Wait for `collectives[k]`.
    Wait(usize),
}

impl Instr {
    /// The pair of integers that the driver reads.
    #[must_use]
    pub fn code(self) -> (u8, usize) {
        match self {
            Self::Compute(k) => (0, k),
            Self::Issue(k) => (1, k),
            Self::Wait(k) => (2, k),
        }
    }
}

/// Consecutive steps of one bucket that need no communication between them.
#[derive(Clone, Debug, PartialEq)]
pub struct Compute {
    /// The bucket.
    pub bucket: usize,
    /// The steps.
    pub steps: Vec<Step>,
}

/// Bytes that travel along one axis.
#[derive(Clone, Debug, PartialEq)]
pub struct Transfer {
    /// The bucket.
    pub bucket: usize,
    /// The buffer's name.
    pub buffer: &'static str,
    /// The axis.
    pub axis: Axis,
    /// What happens to them.
    pub collective: Collective,
    /// Their type.
    pub dtype: DType,
    /// Where they are taken from.
    pub send: Place,
    /// Where they arrive.
    pub recv: Place,
    /// Bytes to each rank; one entry where all get the same.
    pub send_bytes: Vec<usize>,
    /// Bytes from each rank.
    pub recv_bytes: Vec<usize>,
    /// Whether it is left out where no unit of the bucket is due.
    pub guarded: bool,
}

impl Transfer {
    /// The transfer of a hop; `places` are those of the bucket's buffers and messages.
    fn of(bucket: &Bucket, number: usize, hop: &Hop, places: &[Place]) -> Self {
        let spec = &bucket.program.buffers[hop.buffer];
        let counts = Route::new(bucket, hop).counts();
        let (main, messages) = (places[hop.buffer], places[bucket.program.buffers.len()]);
        let dtype = hop.dtype(spec);
        let (from, to) = match hop.kind {
            HopKind::Deal { .. } | HopKind::ReduceDeal { .. } | HopKind::Gather { .. } => (main, messages),
            HopKind::Undeal { .. } | HopKind::Collect { .. } => (messages, main),
            HopKind::AllReduce { .. } if spec.wire != spec.dtype => (messages, messages),
            HopKind::AllReduce { .. } | HopKind::Slice => (main, main),
        };
        let bytes = |counts: Vec<usize>| counts.into_iter().map(|n| n * dtype.bytes()).collect::<Vec<_>>();
        let (send_bytes, recv_bytes) = (bytes(counts.send), bytes(counts.recv));
        Self {
            bucket: number,
            buffer: spec.name,
            axis: bucket.axes[hop.axis].axis.clone(),
            collective: hop.kind.collective(),
            dtype,
            send: Place { bytes: send_bytes.iter().sum(), ..from },
            recv: Place { bytes: recv_bytes.iter().sum(), ..to },
            send_bytes,
            recv_bytes,
            guarded: hop.guarded,
        }
    }
}

/// A schedule and what its numbers mean.
#[derive(Clone, Debug, Default)]
pub(super) struct Scheduled {
    pub(super) computes: Vec<Compute>,
    /// The bucket and hop of each collective.
    pub(super) hops: Vec<(usize, Hop)>,
    pub(super) order: Vec<Instr>,
    /// The slot of each bucket.
    pub(super) slots: Vec<usize>,
}

impl Scheduled {
    /// The transfers of all hops, once the buffers have their places.
    pub(super) fn transfers(&self, buckets: &[Bucket], places: &[Vec<Place>]) -> Vec<Transfer> {
        self.hops.iter().map(|(b, hop)| Transfer::of(&buckets[*b], *b, hop, &places[*b])).collect()
    }

    /// Runs the next segment of a bucket: returns whether it left something in flight.
    fn advance(&mut self, bucket: usize, segment: &Segment) -> bool {
        if !segment.steps.is_empty() {
            self.order.push(Instr::Compute(self.computes.len()));
            self.computes.push(Compute { bucket, steps: segment.steps.clone() });
        }
        let Some(hop) = &segment.hop else {
            return false;
        };
        self.order.push(Instr::Issue(self.hops.len()));
        self.hops.push((bucket, hop.clone()));
        true
    }
}

/// A bucket under way.
struct Flight {
    bucket: usize,
    next: usize,
    collective: usize,
    lane: usize,
}

/// Pipelines the buckets: while one waits for its collective the next ones compute, and buckets without communication
/// fill the first gaps. `segments[b]` are those of bucket b.
#[must_use]
pub(super) fn schedule(segments: &[Vec<Segment>]) -> Scheduled {
    let mut plan = Scheduled { slots: vec![0; segments.len()], ..Scheduled::default() };
    let (mut waiting, mut fillers): (VecDeque<usize>, VecDeque<usize>) =
        (0..segments.len()).partition(|&b| segments[b].len() > 1);
    let mut flights: VecDeque<Flight> = VecDeque::new();
    let mut free: Vec<usize> = (0..LANES).rev().collect();
    loop {
        while let (Some(&lane), Some(bucket)) = (free.last(), waiting.front().copied()) {
            waiting.pop_front();
            plan.slots[bucket] = lane;
            if plan.advance(bucket, &segments[bucket][0]) {
                free.pop();
                flights.push_back(Flight { bucket, next: 1, collective: plan.hops.len() - 1, lane });
            }
        }
        if let Some(filler) = fillers.pop_front() {
            // Its slot is a lane of its own: it runs while the others are in flight.
            plan.slots[filler] = if flights.is_empty() { 0 } else { LANES };
            plan.advance(filler, &segments[filler][0]);
        } else if flights.is_empty() {
            break;
        }
        let Some(flight) = flights.pop_front() else { continue };
        plan.order.push(Instr::Wait(flight.collective));
        if plan.advance(flight.bucket, &segments[flight.bucket][flight.next]) {
            let collective = plan.hops.len() - 1;
            flights.push_back(Flight { next: flight.next + 1, collective, ..flight });
        } else {
            free.push(flight.lane);
        }
    }
    plan
}
