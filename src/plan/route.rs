//! Routes of a redistribution: elements that each rank sends to and gets from each other, and the offsets of all parts.

use std::ops::Range;

use super::bucket::{Bucket, Unit};
use super::ir::{BufferShard, Redistribution, RedistributionKind, owned_by};
use crate::program::BufferSpec;
use crate::spec::{Rect, Side};

/// Elements to and from each rank of the axis. Messages lie one after the other in the order of the ranks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Elements to each rank.
    pub send: Vec<usize>,
    /// Elements from each rank.
    pub recv: Vec<usize>,
}

/// Redistribution with the bucket and buffer from which its numbers are computed.
#[derive(Clone, Copy, Debug)]
pub struct Route<'a> {
    bucket: &'a Bucket,
    redistribution: &'a Redistribution,
    spec: &'a BufferSpec,
}

impl<'a> Route<'a> {
    /// The route of a redistribution of the bucket.
    #[must_use]
    pub fn new(bucket: &'a Bucket, redistribution: &'a Redistribution) -> Self {
        Self { bucket, redistribution, spec: &bucket.program.buffers[redistribution.buffer] }
    }

    fn ranks(&self) -> usize {
        self.bucket.axis(self.redistribution.axis).ranks.len()
    }

    fn units(&self, range: &Range<usize>) -> &'a [Unit] {
        &self.bucket.units[range.clone()]
    }

    fn sum(&self, range: &Range<usize>, elements: impl Fn(&Unit) -> usize) -> usize {
        self.units(range).iter().map(elements).sum()
    }

    fn held(&self, depth: [usize; 2]) -> impl Fn(&Unit) -> usize + '_ {
        move |unit| Redistribution::size(self.bucket, self.spec, unit, depth).iter().product()
    }

    /// The part of a unit that rank `peer` of an axis has, within what is held when that axis is gathered.
    fn part(&self, unit: &Unit, depth: [usize; 2], axis: (Side, usize, usize)) -> [Range<usize>; 2] {
        [0, 1].map(|d| {
            let outer = self.bucket.span(unit, self.spec, d, depth);
            let inner = self.bucket.peer_span(unit, self.spec, d, depth, axis);
            if inner.is_empty() { 0..0 } else { inner.start - outer.start..inner.end - outer.start }
        })
    }

    fn part_len(&self, depth: [usize; 2], axis: (Side, usize, usize)) -> impl Fn(&Unit) -> usize + '_ {
        move |unit| self.part(unit, depth, axis).iter().map(ExactSizeIterator::len).product()
    }

    /// Elements to and from each rank.
    #[must_use]
    pub fn counts(&self) -> Counts {
        let Redistribution { kind, before, after, .. } = self.redistribution;
        let each = |count: &dyn Fn(usize) -> usize| (0..self.ranks()).map(count).collect::<Vec<_>>();
        let owned = |units: &Range<usize>, at, peer| owned_by(self.bucket, units, at, peer);
        match *kind {
            RedistributionKind::ToOwner { side, level, at } => Counts {
                send: each(&|j| self.sum(&owned(&before.units, at, j), self.held(before.depth))),
                recv: each(&|j| self.sum(&after.units, self.part_len(after.depth, (side, level, j)))),
            },
            RedistributionKind::FromOwner { side, level, at } => Counts {
                send: each(&|j| self.sum(&before.units, self.part_len(before.depth, (side, level, j)))),
                recv: each(&|j| self.sum(&owned(&after.units, at, j), self.held(after.depth))),
            },
            RedistributionKind::ReduceToOwner { at, .. } => {
                let own = self.sum(&after.units, self.held(after.depth));
                Counts {
                    send: each(&|j| self.sum(&owned(&before.units, at, j), self.held(before.depth))),
                    recv: vec![own; self.ranks()],
                }
            }
            RedistributionKind::GatherOwned { at, exact: true } => {
                let own = self.sum(&before.units, self.held(before.depth));
                Counts {
                    send: vec![own; self.ranks()],
                    recv: each(&|j| self.sum(&owned(&after.units, at, j), self.held(after.depth))),
                }
            }
            RedistributionKind::GatherOwned { at, exact: false } => {
                let most = (0..self.ranks())
                    .map(|j| self.sum(&owned(&after.units, at, j), self.held(after.depth)))
                    .max();
                Counts { send: vec![most.unwrap_or(0)], recv: vec![most.unwrap_or(0); self.ranks()] }
            }
            RedistributionKind::AllGather { side, level } => {
                let most = (0..self.ranks())
                    .map(|j| self.sum(&before.units, self.part_len(after.depth, (side, level, j))))
                    .max();
                Counts { send: vec![most.unwrap_or(0)], recv: vec![most.unwrap_or(0); self.ranks()] }
            }
            RedistributionKind::AllReduce { .. } => {
                let all = self.sum(&before.units, self.held(before.depth));
                Counts { send: vec![all], recv: vec![all] }
            }
            RedistributionKind::Slice => Counts::default(),
        }
    }

    /// Parts of every unit as pairs: the rectangle in the messages, which lie by rank, and that in the buffer once the
    /// axis is gathered. Messages begin at multiples of `pitch` where given.
    #[must_use]
    pub fn parts(
        &self,
        held: &BufferShard,
        side: Side,
        level: usize,
        pitch: Option<usize>,
    ) -> Vec<(Rect, Rect)> {
        let units = self.units(&held.units);
        let mut places = Vec::with_capacity(units.len() * self.ranks());
        let mut message = 0;
        for peer in 0..self.ranks() {
            message = pitch.map_or(message, |pitch| peer * pitch);
            let mut home = 0;
            for unit in units {
                let [rows, cols] = self.part(unit, held.depth, (side, level, peer));
                let [all_rows, all_cols] = Redistribution::size(self.bucket, self.spec, unit, held.depth);
                let there = Rect { offset: message, rows: rows.len(), cols: cols.len(), stride: cols.len() };
                let offset = home + rows.start * all_cols + cols.start;
                let here = Rect { offset, rows: rows.len(), cols: cols.len(), stride: all_cols };
                if there.rows * there.cols > 0 {
                    places.push((there, here));
                }
                message += there.rows * there.cols;
                home += all_rows * all_cols;
            }
        }
        places
    }

    /// Elements of the buffer before `units`, counted from the first unit held, and elements of `units`.
    #[must_use]
    pub fn run(&self, held: &BufferShard, units: &Range<usize>) -> (usize, usize) {
        let before = held.units.start..units.start.max(held.units.start);
        (self.sum(&before, self.held(held.depth)), self.sum(units, self.held(held.depth)))
    }

    /// Elements by rank that its units take in the buffer that all ranks get: (first, count).
    #[must_use]
    pub fn runs_by_owner(&self, at: usize) -> Vec<(usize, usize)> {
        let all = &self.redistribution.after;
        (0..self.ranks()).map(|j| self.run(all, &owned_by(self.bucket, &all.units, at, j))).collect()
    }
}
