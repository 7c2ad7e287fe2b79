//! Orders the work of all buckets into one list of instructions.

use std::collections::VecDeque;

use super::arena::Arena;
use super::bucket::Bucket;
use super::coalesce::{Coalesced, CoalescedCollective};
use super::ir::{ArenaRange, Redistribution, RedistributionKind, Step};
use super::route::Route;
use super::workspace::Sharing;
use crate::layout::{Axis, Collective};
use crate::tensor::DType;

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

/// Bytes that are sent along one axis.
#[derive(Clone, Debug, PartialEq)]
pub struct Transfer {
    /// The bucket, the first of several.
    pub bucket: usize,
    /// The buckets with their bytes.
    pub shares: Vec<(usize, usize)>,
    /// The buffers' names.
    pub buffer: String,
    /// The axis.
    pub axis: Axis,
    /// The ranks of the axes of the mesh that it stands for.
    pub lines: Vec<Vec<u64>>,
    /// Collective that carries the bytes.
    pub collective: Collective,
    /// Element type of the bytes.
    pub dtype: DType,
    /// Arena range that is sent.
    pub send: ArenaRange,
    /// Arena range that is received.
    pub recv: ArenaRange,
    /// Bytes to each rank; one entry where all get the same.
    pub send_bytes: Vec<usize>,
    /// Bytes from each rank.
    pub recv_bytes: Vec<usize>,
    /// True if the transfer is skipped in steps in which no unit of the bucket is scheduled (`Algorithm::due`).
    pub guarded: bool,
}

impl Transfer {
    /// Transfer of a collective of coalesced buckets; `places` are the ranges of every bucket's buffers and messages,
    /// `common` those of the common messages.
    fn of(
        buckets: &[Bucket],
        collective: &CoalescedCollective,
        places: &[Vec<ArenaRange>],
        common: &[ArenaRange],
    ) -> Option<Self> {
        let (number, redistribution) = collective.redistributions.first()?;
        let mut transfer = Self::of_redistribution(
            &buckets[*number],
            *number,
            (redistribution, &collective.axis),
            &places[*number],
        );
        transfer.lines.clone_from(&collective.lines);
        if let Some(whole) = collective.message.and_then(|m| common.get(m)) {
            let mut names: Vec<&str> = Vec::new();
            for (bucket, redistribution) in &collective.redistributions {
                let name = buckets[*bucket].program.buffers[redistribution.buffer].name;
                if !names.contains(&name) {
                    names.push(name);
                }
                let own = places[*bucket][buckets[*bucket].program.buffers.len() + redistribution.message];
                transfer.shares.push((*bucket, own.bytes));
            }
            transfer.buffer = names.join("+");
            (transfer.send, transfer.recv) = (*whole, *whole);
            (transfer.send_bytes, transfer.recv_bytes) = (vec![whole.bytes], vec![whole.bytes]);
        } else {
            transfer.shares.push((*number, transfer.send.bytes));
        }
        Some(transfer)
    }

    /// Transfer of one redistribution; `places` are the ranges of the bucket's buffers and messages.
    fn of_redistribution(
        bucket: &Bucket,
        number: usize,
        (redistribution, axis): (&Redistribution, &Axis),
        places: &[ArenaRange],
    ) -> Self {
        let spec = &bucket.program.buffers[redistribution.buffer];
        let counts = Route::new(bucket, redistribution).counts();
        let (main, messages) = (places[redistribution.buffer], places[bucket.program.buffers.len()]);
        let dtype = redistribution.dtype(spec);
        let (from, to) = match redistribution.kind {
            RedistributionKind::ToOwner { .. }
            | RedistributionKind::ReduceToOwner { .. }
            | RedistributionKind::AllGather { .. } => (main, messages),
            RedistributionKind::FromOwner { .. } | RedistributionKind::GatherOwned { .. } => (messages, main),
            RedistributionKind::AllReduce { .. } if spec.wire != spec.dtype => (messages, messages),
            RedistributionKind::AllReduce { .. } | RedistributionKind::Slice => (main, main),
        };
        let bytes = |counts: Vec<usize>| counts.into_iter().map(|n| n * dtype.bytes()).collect::<Vec<_>>();
        let (send_bytes, recv_bytes) = (bytes(counts.send), bytes(counts.recv));
        Self {
            bucket: number,
            shares: Vec::new(),
            buffer: spec.name.into(),
            axis: axis.clone(),
            lines: vec![axis.ranks.clone()],
            collective: redistribution.kind.collective(),
            dtype,
            send: ArenaRange { bytes: send_bytes.iter().sum(), ..from },
            recv: ArenaRange { bytes: recv_bytes.iter().sum(), ..to },
            send_bytes,
            recv_bytes,
            guarded: redistribution.guarded,
        }
    }
}

/// Schedule, with the computes and collectives that its numbers stand for.
#[derive(Clone, Debug, Default)]
pub(super) struct Scheduled {
    pub(super) computes: Vec<Compute>,
    /// Collectives, each with the number of its set of coalesced buckets.
    pub(super) collectives: Vec<(usize, CoalescedCollective)>,
    pub(super) order: Vec<Instr>,
    /// Arena slot of each set of coalesced buckets.
    pub(super) slots: Vec<usize>,
}

impl Scheduled {
    /// The transfers of all collectives, once the arena is laid out.
    pub(super) fn transfers(&self, buckets: &[Bucket], arena: &Arena) -> Vec<Transfer> {
        let transfer = |(one, collective): &(usize, CoalescedCollective)| {
            Transfer::of(buckets, collective, &arena.places, &arena.common[*one])
        };
        self.collectives.iter().filter_map(transfer).collect()
    }

    /// Schedules coalesced buckets from synchronization point `next` to the first that has collectives in flight:
    /// returns their numbers, none at the end, and the point that follows.
    fn advance(&mut self, number: usize, one: &Coalesced, mut next: usize) -> (Vec<usize>, usize) {
        let first = self.collectives.len();
        while first == self.collectives.len()
            && let Some(sync_point) = one.sync_points.get(next)
        {
            for (bucket, steps) in &sync_point.computes {
                self.order.push(Instr::Compute(self.computes.len()));
                self.computes.push(Compute { bucket: *bucket, steps: steps.clone() });
            }
            for collective in &sync_point.collectives {
                self.order.push(Instr::Issue(self.collectives.len()));
                self.collectives.push((number, collective.clone()));
            }
            next += 1;
        }
        ((first..self.collectives.len()).collect(), next)
    }
}

/// Coalesced buckets under way.
struct Flight {
    one: usize,
    next: usize,
    collectives: Vec<usize>,
    lane: usize,
}

/// Pipelines the sets of coalesced buckets: while one waits for its collectives the next ones compute, and those
/// without communication fill the first gaps.
#[must_use]
pub(super) fn schedule(coalesced: &[Coalesced], sharing: Sharing) -> Scheduled {
    let mut plan = Scheduled { slots: vec![0; coalesced.len()], ..Scheduled::default() };
    let (mut waiting, mut fillers): (VecDeque<usize>, VecDeque<usize>) = (0..coalesced.len())
        .partition(|&t| coalesced[t].sync_points.iter().any(|sync_point| !sync_point.collectives.is_empty()));
    let mut flights: VecDeque<Flight> = VecDeque::new();
    let mut free: Vec<usize> = (0..sharing.lanes).rev().collect();
    let fits = |one: &Coalesced| sharing.fillers || one.sizes.iter().flatten().all(|bytes| *bytes == 0);
    // Those that need the memory of a lane come last.
    fillers.make_contiguous().sort_by_key(|&one| !fits(&coalesced[one]));
    loop {
        while let (Some(&lane), Some(one)) = (free.last(), waiting.front().copied()) {
            waiting.pop_front();
            plan.slots[one] = lane;
            let (collectives, next) = plan.advance(one, &coalesced[one], 0);
            if !collectives.is_empty() {
                free.pop();
                flights.push_back(Flight { one, next, collectives, lane });
            }
        }
        if fillers.front().is_some_and(|&one| flights.is_empty() || fits(&coalesced[one]))
            && let Some(filler) = fillers.pop_front()
        {
            // Its slot is a lane of its own: it runs while the others are in flight.
            plan.slots[filler] = if flights.is_empty() { 0 } else { sharing.lanes };
            plan.advance(filler, &coalesced[filler], 0);
        } else if flights.is_empty() {
            break;
        }
        let Some(flight) = flights.pop_front() else { continue };
        plan.order.extend(flight.collectives.iter().map(|&k| Instr::Wait(k)));
        let (collectives, next) = plan.advance(flight.one, &coalesced[flight.one], flight.next);
        if collectives.is_empty() {
            free.push(flight.lane);
        } else {
            flights.push_back(Flight { next, collectives, ..flight });
        }
    }
    plan
}
