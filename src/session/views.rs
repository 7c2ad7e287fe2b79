//! Views of what a session holds, made when they are used: the only place of the session that makes them.
//!
//! Premises of the unsafe blocks, here as (1) to (4):
//! 1. Memory is there: from the look at the beginning of a step to its end a `BoundTensor` holds the storage, [`Memory`] the
//!    arena, and views borrow them. Whenever Python has run meanwhile, [`Session::look_again`](super::Session) refuses a
//!    tensor that has another storage or one that was resized, before a view is made.
//! 2. Parameters and states of a session alias neither each other nor gradients: [`AliasCheck`](super::alias::AliasCheck)
//!    checks it when they are bound, and at each step where one has moved. Gradients are read only, and may share memory.
//! 3. The buffers of a bucket do not alias: [`Memory::new`] checks it. Scratch may share memory with messages: only an
//!    exchange sees these, and it has no scratch. Units of a parameter do not overlap, and neither do their parts of a state:
//!    the plan shards them so (`src/plan/plan_tests.rs`).
//! 4. Use is exclusive: code that makes a view for writing has the session, or the part of it, for itself.

use std::collections::BTreeMap;

use tch::Tensor;

use super::tensors::{BoundParam, BoundTensor};
use crate::algorithm::stage::{BufferIo, Buffers, MatrixShard, UnitIo};
use crate::error::{Error, Result};
use crate::plan::{Bucket, Plan, StagePoint};
use crate::spec::Rect;
use crate::tensor::{DType, FlatPtr, FlatView, FlatViewMut, Held, MatrixView, MatrixViewMut};

/// Facts of a unit that are the same in every step, but for `due`.
#[derive(Clone, Debug)]
pub(super) struct Fixed {
    pub(super) param: usize,
    pub(super) stream: u64,
    pub(super) index: usize,
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) numel: usize,
    pub(super) local: Rect,
    /// States of the unit by number, with its part of each; scales of other states are left out.
    pub(super) states: Vec<(usize, Rect)>,
    /// True if it is scheduled in this step (`Algorithm::due`).
    pub(super) due: bool,
    /// True if it waits for nothing any more (`Algorithm::seen`).
    pub(super) seen: bool,
}

/// The units of a bucket.
pub(super) fn fixed(plan: &Plan, bucket: &Bucket) -> Vec<Fixed> {
    let units = bucket.units.iter().map(|unit| {
        let planned = &plan.params[unit.param];
        let own = planned.states.iter().enumerate().filter(|(_, state)| state.is_of_algorithm());
        Fixed {
            param: unit.param,
            stream: planned.spec.stream,
            index: unit.shard.index,
            rows: unit.shard.block.rows,
            cols: unit.shard.block.cols,
            numel: planned.spec.numel(),
            local: unit.shard.local,
            states: own.map(|(at, state)| (at, state.part(&unit.shard))).collect(),
            due: false,
            seen: plan.algorithms[bucket.algorithm].first_refresh().is_none(),
        }
    });
    units.collect()
}

impl BoundTensor {
    /// All elements, to be read.
    pub(super) fn view(&self) -> FlatView<'_> {
        // SAFETY: (1), (2), and a writer has the session for itself (4).
        unsafe { self.flat.view(self.encoding.as_deref()) }
    }

    /// All elements, to be written.
    pub(super) fn view_mut(&mut self) -> FlatViewMut<'_> {
        // SAFETY: (1), (2), and the tensor is borrowed to be written (4).
        unsafe { self.flat.view_mut(self.encoding.as_deref()) }
    }

    /// The elements of a unit, to be written.
    fn unit(&self, part: &Rect) -> MatrixViewMut<'_> {
        let Rect { offset, rows, cols, stride } = *part;
        // SAFETY: (1), (2), (3); `Sources` has the session's parameters for itself (4).
        unsafe { self.flat.matrix_mut(self.encoding.as_deref(), offset, [rows, cols], stride) }
    }
}

/// The states of all parameters, to be written in parts. Its holder has the parameters of the session for itself.
pub(super) struct States<'s>(&'s [BoundParam]);

impl<'s> States<'s> {
    pub(super) fn new(bound: &'s mut [BoundParam]) -> Self {
        Self(bound)
    }

    /// Tests whether a parameter takes part in the step.
    pub(super) fn takes_part(&self, param: usize) -> bool {
        self.0[param].grad.is_some()
    }

    /// The part of a state that belongs to a unit, which is asked for once.
    pub(super) fn part(&self, param: usize, state: usize, part: &Rect) -> MatrixViewMut<'s> {
        self.0[param].states[state].unit(part)
    }
}

/// A part of a tensor's memory.
pub(super) fn matrix<'a>(flat: &FlatView<'a>, part: &Rect) -> MatrixView<'a> {
    flat.matrix(part.offset, [part.rows, part.cols], part.stride)
}

/// The arena with the buffers of all buckets in it.
#[derive(Debug)]
pub(super) struct Memory {
    /// For each bucket its buffers, and after them its messages.
    buckets: Vec<Vec<FlatPtr>>,
    _arena: Vec<Tensor>,
    /// The storages of the parts of the arena.
    held: Held,
}

impl Memory {
    /// Locates the buffers of a plan in the parts of its arena, float32 on each device.
    pub(super) fn new(plan: &Plan, arena: Vec<Tensor>) -> Result<Self> {
        if arena.len() != plan.arena.parts.len() {
            return Err(Error::Internal(format!("an arena of {} parts", arena.len())));
        }
        let parts = arena
            .iter()
            .zip(&plan.arena.parts)
            .map(|(tensor, (device, range))| Ok((*device, FlatPtr::of(tensor)?.on(*device), range.offset)));
        let parts = parts.collect::<Result<Vec<_>>>()?;
        let mut buckets = Vec::with_capacity(plan.buckets.len());
        for (bucket, places) in plan.buckets.iter().zip(&plan.arena.places) {
            let there = parts.iter().find(|(device, ..)| *device == bucket.shape.device);
            let Some((_, all, start)) = there else {
                return Err(Error::Internal("a bucket on a device without an arena".into()));
            };
            let mut buffers: Vec<FlatPtr> = Vec::with_capacity(places.len());
            for (at, place) in places.iter().enumerate() {
                // Messages are bytes of whatever buffer they carry: float16 stands for two of them.
                let dtype = bucket.program.buffers.get(at).map_or(DType::F16, |b| b.dtype);
                let buffer = all.carve(place.offset - start, place.bytes / dtype.bytes(), dtype)?;
                let is_scratch = |at: usize| bucket.program.buffers.get(at).is_some_and(|spec| spec.shared);
                let message = at >= bucket.program.buffers.len();
                let clash = |(number, other): (usize, &FlatPtr)| {
                    other.overlaps(&buffer) && !(message && is_scratch(number))
                };
                if buffers.iter().enumerate().any(clash) {
                    return Err(Error::Internal(format!("buffer {at} of a bucket overlaps another one")));
                }
                buffers.push(buffer);
            }
            buckets.push(buffers);
        }
        let mut held = Held::default();
        for part in &arena {
            held.push(part, part);
        }
        Ok(Self { buckets, _arena: arena, held })
    }

    /// The storages of the parts of the arena, once more.
    pub(super) fn held_again(&self) -> Held {
        self.held.again(0..self.held.len())
    }

    /// Looks again at the arena, whose tensors Python has too.
    ///
    /// # Errors
    /// `Error::Mode` for a part that was resized.
    pub(super) fn look_again(&self) -> Result<()> {
        if self.held.are_there(0..self.held.len()) {
            return Ok(());
        }
        Err(Error::Mode("the workspace of the optimizer was resized".into()))
    }

    /// Two buffers of a bucket.
    pub(super) fn two(&mut self, bucket: usize, buffers: [usize; 2]) -> Result<[FlatViewMut<'_>; 2]> {
        let found = self.buckets[bucket].get_disjoint_mut(buffers);
        let found = found.map_err(|_| Error::Internal("a bucket without memory".into()))?;
        // SAFETY: (1), (3), and the memory is borrowed to be written (4).
        Ok(found.map(|buffer| unsafe { buffer.view_mut(None) }))
    }

    /// A buffer of a bucket.
    pub(super) fn one(&mut self, bucket: usize, buffer: usize) -> Result<FlatViewMut<'_>> {
        let found = self.buckets[bucket].get(buffer);
        let found = found.ok_or_else(|| Error::Internal("a bucket without memory".into()))?;
        // SAFETY: (1), (3), and the memory is borrowed to be written (4).
        Ok(unsafe { found.view_mut(None) })
    }
}

/// Copies of buffers, by the numbers of their buckets: what owns each, and where it is.
pub(super) type Brought = BTreeMap<usize, (Tensor, FlatPtr)>;

/// Copies on the device of a bucket of the group buffers of its group that are on others, by the numbers of their buckets.
///
/// # Errors
/// Whatever libtorch says to the copies.
pub(super) fn brought_here(plan: &Plan, number: usize, memory: &mut Memory) -> Result<Brought> {
    let (own, mut brought) = (&plan.buckets[number], BTreeMap::new());
    let Some(buffer) = own.program.group_buffer() else { return Ok(brought) };
    for (other, bucket) in plan.buckets.iter().enumerate() {
        let is_elsewhere = bucket.shape.device != own.shape.device;
        if is_elsewhere && plan.same_group(bucket.algorithm, own.algorithm) {
            let all = memory.one(other, buffer)?.into_view();
            let copy = all.tensor(&[all.len()])?.f_to_device(own.shape.device.torch())?;
            let place = FlatPtr::of(&copy)?.on(own.shape.device);
            brought.insert(other, (copy, place));
        }
    }
    Ok(brought)
}

/// Operands of a stage of a bucket. Its holder has the parameters and the memory of the session for itself.
pub(super) struct Sources<'s> {
    pub(super) plan: &'s Plan,
    pub(super) number: usize,
    pub(super) bucket: &'s Bucket,
    pub(super) point: &'s StagePoint,
    pub(super) shards: &'s [Vec<MatrixShard>],
    fixed: &'s [Fixed],
    bound: &'s [BoundParam],
    memory: &'s Memory,
}

impl<'s> Sources<'s> {
    pub(super) fn new(
        plan: &'s Plan,
        (number, point): (usize, &'s StagePoint),
        shards: &'s [Vec<MatrixShard>],
        fixed: &'s [Fixed],
        bound: &'s mut [BoundParam],
        memory: &'s mut Memory,
    ) -> Self {
        Self { plan, number, bucket: &plan.buckets[number], point, shards, fixed, bound, memory }
    }

    /// A buffer of the bucket, to be written.
    #[allow(clippy::unused_self)] // it has the memory for itself
    fn buffer(&self, buffer: &FlatPtr) -> FlatViewMut<'s> {
        // SAFETY: (1), (3), (4); callers get an empty buffer where units have parts of it, see `buffers`.
        unsafe { buffer.view_mut(None) }
    }

    /// The buffers of the bucket: all but the one that gradients are averaged in and those that stand for states, which units
    /// have.
    pub(super) fn buffers(&self) -> Buffers<'s> {
        let specs =
            self.bucket.program.buffers.iter().zip(&self.memory.buckets[self.number]).zip(self.shards);
        let buffers = specs.enumerate().map(|(at, ((spec, memory), shards))| {
            let units_have = self.bucket.gradient == Some(at) || self.bucket.program.is_state(at);
            let flat = if units_have { FlatViewMut::EMPTY } else { self.buffer(memory) };
            BufferIo { spec, flat, shards }
        });
        Buffers(buffers.collect())
    }

    /// The group buffer of all buckets of its group, none for its own; `brought`: of those on other devices.
    pub(super) fn group<'g>(&self, brought: &'g Brought) -> Vec<Option<FlatView<'g>>>
    where
        's: 'g,
    {
        let Some(buffer) = self.bucket.program.group_buffer() else { return Vec::new() };
        let all = self.plan.buckets.iter().zip(&self.memory.buckets).enumerate();
        let siblings = all.filter(|(_, (b, _))| self.plan.same_group(b.algorithm, self.bucket.algorithm));
        let views = siblings.map(|(number, (_, memory))| {
            let flat = brought.get(&number).map_or(&memory[buffer], |(_, copy)| copy);
            // SAFETY: (1), (4); in the plan the group buffers of a group do not overlap any buffers of its buckets, and
            // `brought` owns the copies.
            (number != self.number).then(|| unsafe { flat.view(None) })
        });
        views.collect()
    }

    /// Describes the unit at `position` of the stage, which has `before` others before it. Returns false where it is skipped
    /// in the step.
    #[inline]
    pub(super) fn fill(&self, io: &mut UnitIo<'s>, position: usize, before: usize) -> Result<bool> {
        let Self { bucket, point, shards, bound, .. } = *self;
        let memory = &self.memory.buckets[self.number];
        let fixed = &self.fixed[point.units.start + position];
        let bound_param = &bound[fixed.param];
        let found = |grad: &'s BoundTensor| match bucket.gradient {
            Some(buffer) => {
                let MatrixShard { offset, shape, .. } = shards[buffer][position];
                self.buffer(&memory[buffer]).into_view().matrix(offset, shape, shape[1])
            }
            None => matrix(&grad.view(), &fixed.local),
        };
        let whole = (point.whole || point.gathered) && bucket.distributed();
        if !whole && bound_param.grad.is_none() {
            if bucket.distributed() || bucket.whole_parameter {
                // It contributes zeros to every exchange.
                for (flat, shards) in memory.iter().zip(shards).filter(|(_, shards)| !shards.is_empty()) {
                    let MatrixShard { offset, shape, .. } = &shards[position];
                    self.buffer(flat).part(*offset, shape[0] * shape[1]).clear()?;
                }
            }
            return Ok(false);
        }
        (io.param_index, io.stream) = (fixed.param, fixed.stream);
        io.block_index = fixed.index;
        (io.rows, io.cols, io.numel) = (fixed.rows, fixed.cols, fixed.numel);
        io.transposed = bucket.shape.transposed;
        // Alone, units of one shape without a gradient take no room; else everything keeps its place.
        io.position = if bucket.distributed() || bucket.whole_parameter { position } else { before };
        (io.active, io.due, io.steps) = (bound_param.grad.is_some(), fixed.due, bound_param.steps);
        if whole {
            let complete = !point.gathered && fixed.local.numel() == fixed.rows * fixed.cols;
            io.grad = bound_param.grad.as_ref().filter(|_| complete).map_or(MatrixView::EMPTY, found);
            io.param = MatrixViewMut::EMPTY;
            io.state.iter_mut().for_each(|state| *state = MatrixViewMut::EMPTY);
            if point.whole && io.active {
                // States of what has no gradient may not have been taken yet.
                for &state in &bucket.program.owned {
                    let (at, rect) = &fixed.states[state];
                    io.state[state] = bound_param.states[*at].unit(rect);
                }
            } else if !point.whole {
                for &(buffer, state) in &bucket.program.carried.states {
                    let MatrixShard { offset, shape, .. } = shards[buffer][position];
                    io.state[state] = self
                        .buffer(&memory[buffer])
                        .into_part(offset, shape[0] * shape[1])
                        .into_matrix(0, shape, shape[1]);
                }
            }
            return Ok(true);
        }
        io.param = bound_param.param.unit(&fixed.local);
        io.grad = bound_param.grad.as_ref().map_or(MatrixView::EMPTY, found);
        for (out, (at, rect)) in io.state.iter_mut().zip(&fixed.states) {
            let state = &bound_param.states[*at];
            state.flat.prefetch_number();
            *out = state.unit(rect);
        }
        Ok(true)
    }
}

/// Memory for units that one stage hands to the next: what describes thousands of them is large.
#[derive(Debug, Default)]
pub(super) struct Room(Vec<UnitIo<'static>>);

impl Room {
    /// As many units as there were. Those that `Sources::fill` does not fill must not be used.
    pub(super) fn lend<'s>(&mut self) -> Vec<UnitIo<'s>> {
        std::mem::take(&mut self.0)
    }

    /// Keeps the memory.
    pub(super) fn keep(&mut self, units: Vec<UnitIo<'_>>) {
        // SAFETY: the types differ by a lifetime only. What the views borrow may be gone afterwards, and nothing uses them:
        // units leave here by `lend` alone, and `Sources::fill` then sets again all views that it ever sets in a unit of this
        // bucket.
        self.0 = unsafe { std::mem::transmute::<Vec<UnitIo<'_>>, Vec<UnitIo<'static>>>(units) };
    }
}
