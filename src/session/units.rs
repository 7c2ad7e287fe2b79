//! The stages of algorithms: the units of a bucket with their memory in this step.

use super::bound::Bound;
use super::{Session, area};
use crate::batch::Area;
use crate::error::Result;
use crate::plan::{Bucket, Plan, StagePoint};
use crate::spec::Rect;
use crate::stage::{BufferIo, MAX_STATES, Part, StageIo, UnitIo};
use crate::threads;

/// Elementwise units that are handed to a kernel together: what describes them stays in the nearest cache, which for
/// 4000 vectors takes the time of a stage from 6.4 to 4.9 ms.
const TOGETHER: usize = 64;
/// Elements for each thread that are worth waking them.
const SHARE: usize = 1 << 19;

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
        let member = &plan.members[unit.param];
        let own = member.states.iter().enumerate().filter(|(_, state)| state.scales_of.is_none());
        Fixed {
            param: unit.param,
            index: unit.piece.index,
            rows: unit.piece.block.rows,
            cols: unit.piece.block.cols,
            numel: member.spec.numel(),
            local: unit.piece.local,
            states: own.map(|(at, state)| (at, state.part(&unit.piece))).collect(),
        }
    });
    units.collect()
}

impl Session {
    /// Runs a stage. Elementwise units depend on nothing but themselves, so a kernel gets some of them at a time.
    pub(super) fn stage(
        &mut self,
        plan: &Plan,
        number: usize,
        point: &StagePoint,
        at: (usize, usize),
    ) -> Result<()> {
        let bucket = &plan.buckets[number];
        let alone = !bucket.distributed() && !bucket.joint && bucket.program.buffers.is_empty();
        let apart = alone && plan.algorithms[bucket.algorithm].flat();
        let least = if threads::get() == 1 { 0 } else { SHARE * threads::get() };
        let mut units = std::mem::take(&mut self.room);
        let (mut next, mut done) = (0, Ok(()));
        while next < point.units.len() && done.is_ok() {
            units.clear();
            let mut elements = 0;
            while next < point.units.len() && !(apart && units.len() >= TOGETHER && elements >= least) {
                if let Some(unit) = self.unit(number, point, (at, next), units.len()) {
                    elements += unit.param.shape().iter().product::<usize>();
                    units.push(unit);
                }
                next += 1;
            }
            done = self.run(plan, number, point, at, &units);
        }
        self.room = units;
        done
    }

    /// The unit at `position` of a stage; none where it takes no part in the step.
    #[inline]
    fn unit(
        &self,
        number: usize,
        point: &StagePoint,
        ((compute, step), position): ((usize, usize), usize),
        before: usize,
    ) -> Option<UnitIo> {
        let bucket = &self.plan.buckets[number];
        let memory = &self.memory[number];
        let parts = &self.parts[compute][step];
        let fixed = &self.fixed[number][point.units.start + position];
        let slot = &self.slots[fixed.param];
        let mut io = UnitIo {
            param_index: fixed.param,
            block_index: fixed.index,
            rows: fixed.rows,
            cols: fixed.cols,
            numel: fixed.numel,
            transposed: bucket.shape.transposed,
            // Alone, units of one shape without a gradient take no room; else everything keeps its place.
            position: if bucket.distributed() || bucket.joint { position } else { before },
            due: slot.due,
            steps: slot.steps,
            param: Area::EMPTY,
            grad: Area::EMPTY,
            state: [Area::EMPTY; MAX_STATES],
        };
        let averaged = bucket.gradient.map(|b| (&parts[b][position], memory[b]));
        let found = |grad: &Bound| match averaged {
            Some((part, slab)) => slab.area(part.offset, part.shape, part.shape[1]),
            None => area(&grad.slab, &fixed.local),
        };
        if point.whole && bucket.distributed() {
            let complete = fixed.local.numel() == fixed.rows * fixed.cols;
            io.grad = slot.grad.as_ref().filter(|_| complete).map_or(Area::EMPTY, found);
            return Some(io);
        }
        let Some(grad) = &slot.grad else {
            if bucket.distributed() || bucket.joint {
                // It contributes zeros to every exchange.
                for (slab, parts) in memory.iter().zip(parts).filter(|(_, parts)| !parts.is_empty()) {
                    let Part { offset, shape, .. } = &parts[position];
                    slab.part(*offset, shape[0] * shape[1]).clear();
                }
            }
            return None;
        };
        io.param = area(&slot.param.slab, &fixed.local);
        io.grad = found(grad);
        for (out, (at, rect)) in io.state.iter_mut().zip(&fixed.states) {
            *out = area(&slot.states[*at].slab, rect);
        }
        Some(io)
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
        let (memory, parts) = (&self.memory[number], &self.parts[compute][step]);
        let specs = bucket.program.buffers.iter().zip(memory).zip(parts);
        let buffers: Vec<BufferIo<'_>> =
            specs.map(|((spec, slab), parts)| BufferIo { spec, slab: *slab, parts }).collect();
        let mut io = StageIo {
            units,
            class: &bucket.shape,
            group_sum: self.group_sum(plan, bucket),
            grad_factor: self.grad_factors[bucket.algorithm],
            probe: self.probe.as_mut(),
            buffers: &buffers,
        };
        plan.algorithms[bucket.algorithm].run(point.stage, &mut io, &self.hypers[bucket.algorithm])
    }
}
