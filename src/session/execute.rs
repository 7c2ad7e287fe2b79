//! The stages of algorithms: the units of a bucket with their memory in this step.

use std::ops::Range;
use std::time::Instant;

use super::Session;
use super::views::{Sources, brought_here};
use crate::algorithm::stage::{StageIo, UnitIo};
use crate::error::Result;
use crate::plan::{Plan, StagePoint, Step};
use crate::tensor::Device;
use crate::threads;

/// Elementwise units that are handed to a kernel together: what describes them stays in the nearest cache, which for
/// 4000 vectors is 3 MB otherwise.
const TOGETHER: usize = 64;
/// Elements for each thread that are worth waking them.
const SHARE: usize = 1 << 19;
/// Elements of whole units that are worked on from the first to the last step before the next ones.
const BATCH: usize = 1 << 18;

impl Session {
    /// The positions of a bucket's units that run through all of its steps together: of one that is worked on here alone,
    /// and whose units depend on nothing but themselves, a few at a time, so that what one step reads the next one finds
    /// in a cache.
    pub(super) fn batches(&self, number: usize, steps: &[Step]) -> Vec<Range<usize>> {
        let bucket = &self.plan.buckets[number];
        let all = bucket.units.len();
        let stage = |step: &Step| matches!(step, Step::Stage(p) if p.units == (0..all) && !p.guarded);
        let here = bucket.shape.device == Device::Cpu;
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
        let splits = alone && plan.algorithms[bucket.algorithm].flat();
        let splits = splits && bucket.shape.device == Device::Cpu;
        let least = if threads::get() == 1 { 0 } else { SHARE * threads::get() };
        let Self { shards, fixed, bound, memory, room, probe, hypers, grad_factors, inside, .. } = self;
        let (compute, step) = at;
        let brought = brought_here(plan, number, memory)?;
        let shards = &shards[compute][step];
        let sources = Sources::new(plan, (number, point), shards, &fixed[number], bound, memory);
        let hyper = &hypers[bucket.algorithm];
        let room = &mut room[number];
        let (mut next, mut done) = (positions.start, Ok(()));
        let end = positions.end.min(point.units.len());
        while next < end && done.is_ok() {
            let mut units = room.lend();
            let (mut count, mut elements) = (0, 0);
            while next < end && !(splits && count >= TOGETHER && elements >= least) {
                if units.len() == count {
                    units.push(UnitIo::EMPTY);
                }
                if sources.fill(&mut units[count], next, count)? {
                    elements += units[count].param.shape().iter().product::<usize>();
                    count += 1;
                }
                next += 1;
            }
            units.truncate(count);
            let mut io = StageIo {
                units,
                class: &bucket.shape,
                group: sources.group(&brought),
                grad_factor: grad_factors[bucket.algorithm],
                probe: probe.as_mut(),
                buffers: sources.buffers(),
            };
            if io.units.is_empty() {
                continue;
            }
            let started = Instant::now();
            let name = |param: usize| plan.params[param].spec.name.as_str();
            done = plan.algorithms[bucket.algorithm].run(point.stage, &mut io, hyper);
            done = done.map_err(|error| error.named(name));
            *inside += started.elapsed();
            room.keep(io.units);
        }
        done
    }
}
