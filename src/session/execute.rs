//! The stages of algorithms: the units of a bucket with their memory in this step.

use std::ops::Range;
use std::time::Instant;

use super::tensors::BoundTensor;
use super::{Session, area};
use crate::algorithm::stage::{BufferIo, MAX_STATES, MatrixShard, StageIo, UnitIo};
use crate::error::Result;
use crate::plan::{Bucket, Plan, StagePoint, Step};
use crate::spec::Rect;
use crate::tensor::{Device, MatrixView};
use crate::threads;

/// Elementwise units that are handed to a kernel together: what describes them stays in the nearest cache, which for
/// 4000 vectors is 3 MB otherwise.
const TOGETHER: usize = 64;
/// Elements for each thread that are worth waking them.
const SHARE: usize = 1 << 19;
/// Elements of whole units that are worked on from the first to the last step before the next ones.
const BATCH: usize = 1 << 18;

/// What is the same of a unit in every step.
#[derive(Clone, Debug)]
pub(super) struct Fixed {
    param: usize,
    index: usize,
    rows: usize,
    cols: usize,
    numel: usize,
    local: Rect,
    /// Where its states are, those left out that are scales of others.
    states: Vec<(usize, Rect)>,
}

/// The units of a bucket.
pub(super) fn fixed(plan: &Plan, bucket: &Bucket) -> Vec<Fixed> {
    let units = bucket.units.iter().map(|unit| {
        let planned = &plan.params[unit.param];
        let own = planned.states.iter().enumerate().filter(|(_, state)| state.scales_of.is_none());
        Fixed {
            param: unit.param,
            index: unit.shard.index,
            rows: unit.shard.block.rows,
            cols: unit.shard.block.cols,
            numel: planned.spec.numel(),
            local: unit.shard.local,
            states: own.map(|(at, state)| (at, state.part(&unit.shard))).collect(),
        }
    });
    units.collect()
}

impl Session {
    /// The positions of a bucket's units that run through all of its steps together: of one that is worked on here alone,
    /// and whose units depend on nothing but themselves, a few at a time, so that what one step reads the next one finds
    /// in a cache.
    pub(super) fn batches(&self, number: usize, steps: &[Step]) -> Vec<Range<usize>> {
        let bucket = &self.plan.buckets[number];
        let all = bucket.units.len();
        let stage = |step: &Step| matches!(step, Step::Stage(p) if p.units == (0..all) && !p.guarded);
        let here = self.device == Device::Cpu;
        let alone = here
            && bucket.whole_parameter
            && !bucket.distributed()
            && bucket.program.group_buffer().is_none();
        if !alone || steps.len() < 2 || !steps.iter().all(stage) {
            return std::iter::once(0..usize::MAX).collect();
        }
        let (mut batches, mut start, mut elements) = (Vec::new(), 0, 0);
        for (at, unit) in self.fixed[number].iter().enumerate() {
            elements += unit.local.numel();
            if elements >= BATCH || at + 1 == all {
                batches.push(start..at + 1);
                (start, elements) = (at + 1, 0);
            }
        }
        batches
    }

    /// Runs a stage on the units at these positions. Elementwise units depend on nothing but themselves, so a kernel gets
    /// some of them at a time.
    pub(super) fn stage(
        &mut self,
        plan: &Plan,
        number: usize,
        point: &StagePoint,
        at: (usize, usize),
        positions: Range<usize>,
    ) -> Result<()> {
        let bucket = &plan.buckets[number];
        let alone = !bucket.distributed() && !bucket.whole_parameter && bucket.program.buffers.is_empty();
        let apart = alone && plan.algorithms[bucket.algorithm].flat();
        let apart = apart && self.device == Device::Cpu;
        let least = if threads::get() == 1 { 0 } else { SHARE * threads::get() };
        let mut room = std::mem::take(&mut self.room[number]);
        let (mut next, mut done) = (positions.start, Ok(()));
        let end = positions.end.min(point.units.len());
        while next < end && done.is_ok() {
            let (mut count, mut elements) = (0, 0);
            while next < end && !(apart && count >= TOGETHER && elements >= least) {
                if room.len() == count {
                    room.push(UnitIo::EMPTY);
                }
                if self.fill(&mut room[count], number, point, (at, next), count)? {
                    elements += room[count].param.shape().iter().product::<usize>();
                    count += 1;
                }
                next += 1;
            }
            done = self.run(plan, number, point, at, &room[..count]);
        }
        self.room[number] = room;
        done
    }

    /// Describes the unit at `position` of a stage, which has `before` others before it; false where it takes no part in
    /// the step.
    #[inline]
    fn fill(
        &self,
        io: &mut UnitIo,
        number: usize,
        point: &StagePoint,
        ((compute, step), position): ((usize, usize), usize),
        before: usize,
    ) -> Result<bool> {
        let bucket = &self.plan.buckets[number];
        let memory = &self.memory[number];
        let shards = &self.shards[compute][step];
        let fixed = &self.fixed[number][point.units.start + position];
        let bound_param = &self.bound[fixed.param];
        let averaged = bucket.gradient.map(|b| (&shards[b][position], memory[b]));
        let found = |grad: &BoundTensor| match averaged {
            Some((part, flat)) => flat.area(part.offset, part.shape, part.shape[1]),
            None => area(&grad.flat, &fixed.local),
        };
        let whole = point.whole && bucket.distributed();
        if !whole && bound_param.grad.is_none() {
            if bucket.distributed() || bucket.whole_parameter {
                // It contributes zeros to every exchange.
                for (flat, shards) in memory.iter().zip(shards).filter(|(_, shards)| !shards.is_empty()) {
                    let MatrixShard { offset, shape, .. } = &shards[position];
                    flat.part(*offset, shape[0] * shape[1]).clear()?;
                }
            }
            return Ok(false);
        }
        io.param_index = fixed.param;
        io.block_index = fixed.index;
        (io.rows, io.cols, io.numel) = (fixed.rows, fixed.cols, fixed.numel);
        io.transposed = bucket.shape.transposed;
        // Alone, units of one shape without a gradient take no room; else everything keeps its place.
        io.position = if bucket.distributed() || bucket.whole_parameter { position } else { before };
        (io.due, io.steps) = (bound_param.due, bound_param.steps);
        if whole {
            let complete = fixed.local.numel() == fixed.rows * fixed.cols;
            io.grad = bound_param.grad.as_ref().filter(|_| complete).map_or(MatrixView::EMPTY, found);
            io.param = MatrixView::EMPTY;
            io.state = [MatrixView::EMPTY; MAX_STATES];
            return Ok(true);
        }
        io.param = area(&bound_param.param.flat, &fixed.local);
        io.grad = bound_param.grad.as_ref().map_or(MatrixView::EMPTY, found);
        for (out, (at, rect)) in io.state.iter_mut().zip(&fixed.states) {
            let flat = &bound_param.states[*at].flat;
            flat.prefetch_number();
            *out = area(flat, rect);
        }
        Ok(true)
    }

    fn run(
        &mut self,
        plan: &Plan,
        number: usize,
        point: &StagePoint,
        (compute, step): (usize, usize),
        units: &[UnitIo],
    ) -> Result<()> {
        if units.is_empty() {
            return Ok(());
        }
        let bucket = &plan.buckets[number];
        let (memory, shards) = (&self.memory[number], &self.shards[compute][step]);
        let specs = bucket.program.buffers.iter().zip(memory).zip(shards);
        let buffers: Vec<BufferIo<'_>> =
            specs.map(|((spec, flat), shards)| BufferIo { spec, flat: *flat, shards }).collect();
        let mut io = StageIo {
            units,
            class: &bucket.shape,
            group: self.group(plan, bucket),
            grad_factor: self.grad_factors[bucket.algorithm],
            probe: self.probe.as_mut(),
            buffers: &buffers,
        };
        let started = Instant::now();
        let hyper = &self.hypers[bucket.algorithm];
        let done = plan.algorithms[bucket.algorithm].run(point.stage, &mut io, hyper);
        self.inside += started.elapsed();
        done
    }
}
