//! Second moments by row and by column (Shazeer & Stern 2018, arXiv:1804.04235), for the matrices over the last two
//! dimensions of a parameter; a parameter of fewer dimensions keeps them by element.
//!
//! With s the squares plus ε, R and C their running means over columns and rows, and S that over all: 1/√V = √S/(√R·√C).
//! S is the mean of R and of C; stored with them, it needs no sum over the elements on other ranks.

use super::stage::{Buffers, UnitIo};
use crate::error::Result;
use crate::kernels::{self, Job, Means, NewShare, Scales, Squares, Stack, UpdateSquares, UpdateSums};
use crate::program::{BufferId, BufferSpec, Program, Target};
use crate::spec::{DimSharding, Init, ParamSpec, Share, Side, StateSpec, UnitShape};
use crate::tensor::{DType, FlatView, FlatViewMut};

/// The moments of one quantity: where its states and buffers begin. Of states there are R, C, S, or one by element; of
/// buffers the sums by row, by column and of all.
#[derive(Clone, Copy, Debug)]
pub(super) struct Factored {
    pub(super) states: usize,
    pub(super) buffers: BufferId,
}

/// Number of leading dimensions that count the matrices.
pub(super) fn leading(p: &ParamSpec) -> usize {
    if p.shape.len() < 2 { p.shape.len() } else { p.shape.len() - 2 }
}

/// Tests whether the parameters of a bucket are matrices.
pub(super) fn is_matrix(shape: &UnitShape) -> bool {
    shape.inner.len() == 2
}

/// The type of second moments: float32 at least, as long means in 16 bits stand still, and squares of float16 overflow.
pub(super) fn dtype(p: &ParamSpec) -> DType {
    p.dtype.arithmetic()
}

/// R, C and S under these names.
pub(super) fn states(names: [&'static str; 3], p: &ParamSpec) -> [StateSpec; 3] {
    let (last, lead) = (p.shape.len() - 1, p.shape.len() - 2);
    let keeps: [Vec<usize>; 3] =
        [(0..last).collect(), (0..lead).chain([last]).collect(), (0..lead).collect()];
    let mut names = names.into_iter();
    keeps.map(|dims| StateSpec {
        role: names.next().unwrap_or_default(),
        shape: dims.iter().map(|&d| p.shape[d]).collect(),
        dtype: dtype(p),
        init: Init::Zeros,
        moment: None,
        quantized: None,
        on_host: false,
        sharding: dims.into_iter().map(DimSharding::LikeParam).collect(),
        share: Share::All,
    })
}

impl Factored {
    /// Declares the sums of a quantity under these names.
    pub(super) fn buffers(program: Program, names: [&'static str; 3]) -> Program {
        let new = |name, cols| BufferSpec::new(name, 0, cols, DType::F64);
        let [rows, cols, all] = names;
        program
            .buffer(
                new(rows, 0)
                    .sharded(DimSharding::PerMatrix, DimSharding::LikeParam(Side::Rows))
                    .summed(Side::Cols),
            )
            .buffer(
                new(cols, 0)
                    .sharded(DimSharding::PerMatrix, DimSharding::LikeParam(Side::Cols))
                    .summed(Side::Rows),
            )
            .buffer(
                new(all, 1)
                    .sharded(DimSharding::PerMatrix, DimSharding::Replicated)
                    .summed(Side::Rows)
                    .summed(Side::Cols),
            )
    }

    /// Appends the sums over what others store.
    pub(super) fn sum(&self, program: Program) -> Program {
        (0..3).fold(program, |program, i| program.redistribute(self.buffers + i, Target::Replicate))
    }

    /// Memory for the sums of each unit: those of squares if `summed`, and the pass's own in a buffer, if there is one.
    pub(super) fn rooms<'s>(
        &self,
        class: &UnitShape,
        units: &[UnitIo<'_>],
        buffers: &'s mut Buffers<'_>,
        summed: bool,
        total: Option<BufferId>,
    ) -> Result<Vec<Room<'s>>> {
        let mut rooms: Vec<_> = units.iter().map(|_| Room::default()).collect();
        if is_matrix(class) {
            for (room, unit) in rooms.iter_mut().zip(units) {
                let [stack, rows] = buffers.get(self.buffers)?.shape(unit)?;
                room.shape = Some([stack, rows, buffers.get(self.buffers + 1)?.shape(unit)?[1]]);
            }
        }
        let [rows, cols, all] = [0, 1, 2].map(|at| self.buffers + at);
        let (sums, total) = match total {
            Some(total) if summed && is_matrix(class) => {
                let [rows, cols, all, total] = buffers.several([rows, cols, all, total])?;
                (Some([rows, cols, all]), Some(total))
            }
            Some(total) => (None, Some(buffers.get_mut(total)?)),
            None if summed && is_matrix(class) => (Some(buffers.several([rows, cols, all])?), None),
            None => (None, None),
        };
        if let Some(sums) = sums {
            for (at, buffer) in sums.into_iter().enumerate() {
                for (room, flat) in rooms.iter_mut().zip(buffer.flats(units)?) {
                    room.sums[at] = flat;
                }
            }
        }
        if let Some(total) = total {
            for (room, flat) in rooms.iter_mut().zip(total.flats(units)?) {
                room.total = flat;
            }
        }
        Ok(rooms)
    }

    /// Moves R, C and S by the share of what is new towards the means of what was summed, plus ε; second moments by
    /// element towards g² + ε.
    pub(super) fn update(
        &self,
        class: &UnitShape,
        units: &mut [UnitIo<'_>],
        buffers: &Buffers<'_>,
        share: &NewShare<'_>,
        (epsilon, grad_factor): (f64, f64),
    ) -> Result<()> {
        if !is_matrix(class) {
            let all = units.iter_mut();
            let all = all.map(|u| Job { read: [u.grad.all()], write: [u.state[self.states].row(0)] });
            let mut jobs: Vec<_> = all.collect();
            let (most, params) = (largest(&jobs), jobs.len());
            return kernels::run(&Squares::new(epsilon, most, share, (grad_factor, params)), &mut jobs);
        }
        let (mut means, mut jobs) = (Vec::new(), Vec::new());
        for (i, unit) in units.iter_mut().enumerate() {
            #[allow(clippy::cast_precision_loss)] // sizes of matrices
            let [rows, cols] = [unit.rows, unit.cols].map(|n| n.max(1) as f64);
            let mut sums = Vec::with_capacity(3);
            for at in 0..3 {
                sums.push(buffers.get(self.buffers + at)?.read(unit)?);
            }
            let states = unit.state[self.states..self.states + 3].iter_mut();
            for ((state, sum), count) in states.zip(sums).zip([cols, rows, rows * cols]) {
                means.push((i, count));
                jobs.push(Job { read: [sum], write: [state.row(0)] });
            }
        }
        kernels::run(&Means::new(epsilon, largest(&jobs), share, &means), &mut jobs)
    }

    /// 1/√V of a unit, from its states.
    pub(super) fn scale<'s>(&self, class: &UnitShape, unit: &mut UnitIo<'s>) -> Scales<'s> {
        let mut state = |at: usize| unit.take_state(self.states + at).into_view().row(0);
        if is_matrix(class) { Scales::of([0, 1, 2].map(state)) } else { Scales::by_element(state(0)) }
    }

    /// Σ u² with u = g/√V into a buffer.
    pub(super) fn update_squares(
        &self,
        class: &UnitShape,
        units: &mut [UnitIo<'_>],
        buffers: &mut Buffers<'_>,
        (buffer, grad_factor): (BufferId, f64),
    ) -> Result<()> {
        let rooms = self.rooms(class, units, buffers, false, Some(buffer))?;
        let grads: Vec<_> = units.iter().map(|unit| unit.grad.all()).collect();
        let scales: Vec<_> = units.iter_mut().map(|unit| self.scale(class, &mut unit.reborrow())).collect();
        let stacks = rooms.into_iter().zip(grads).map(|(room, g)| room.stack(Job { read: [g], write: [] }));
        let pass = UpdateSquares { scales: &scales, grad_factor };
        kernels::rows(&pass, &mut stacks.collect::<Vec<_>>())
    }
}

/// The largest finite number that the states of all jobs can store. Squares of float32 gradients from 2e19 on are no float32
/// numbers: their means stop there.
fn largest(jobs: &[Job<'_, 1, 1>]) -> f64 {
    jobs.iter().map(|job| job.write[0].dtype().largest()).fold(f64::MAX, f64::min)
}

/// The sizes of a unit's matrices, if it has some, and where sums over them go.
#[derive(Debug)]
pub(super) struct Room<'s> {
    /// Matrices, rows and columns.
    shape: Option<[usize; 3]>,
    /// By row, by column and of all; empty where none are wanted.
    sums: [FlatViewMut<'s>; 3],
    /// The pass's own; empty where it is not wanted.
    total: FlatViewMut<'s>,
}

impl Default for Room<'_> {
    fn default() -> Self {
        Self { shape: None, sums: [const { FlatViewMut::EMPTY }; 3], total: FlatViewMut::EMPTY }
    }
}

impl<'s> Room<'s> {
    /// These operands as a stack of matrices, one row where they are none.
    pub(super) fn stack<const R: usize, const W: usize>(self, operands: Job<'s, R, W>) -> Stack<'s, R, W> {
        let [stack, rows, cols] = self.shape.unwrap_or([1, 1, operands.len()]);
        let ([row_sums, col_sums, all_sums], total) = (self.sums, self.total);
        Stack { operands, stack, rows, cols, row_sums, col_sums, all_sums, total }
    }
}

/// The sums from which the factors of each parameter follow; `param` where its rate follows its own size.
pub(super) fn sums<'s>(
    units: &[UnitIo<'_>],
    buffers: &'s Buffers<'_>,
    update: BufferId,
    param: Option<BufferId>,
) -> Result<Vec<UpdateSums<'s>>> {
    let of = |unit: &UnitIo<'_>| {
        let param = param.map_or(Ok(FlatView::EMPTY), |buffer| buffers.get(buffer)?.read(unit))?;
        Ok(UpdateSums { update: buffers.get(update)?.read(unit)?, param, numel: unit.numel })
    };
    units.iter().map(of).collect()
}
