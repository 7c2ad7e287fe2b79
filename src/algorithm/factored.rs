//! Second moments by row and by column (Shazeer & Stern 2018, arXiv:1804.04235), for the matrices over the last two
//! dimensions of a parameter; a parameter of fewer dimensions keeps them by element.
//!
//! With s the squares plus ε, R and C their running means over columns and rows, and S that over all: 1/√V = √S/(√R·√C).
//! S is the mean of R and of C; kept beside them, it needs no sum over what others store.

use super::stage::{StageIo, UnitIo};
use crate::error::Result;
use crate::kernels::{self, Means, NewShare, Scales, Squares, Stack, UpdateSquares, UpdateSums};
use crate::program::{BufferId, BufferSpec, Program, Target};
use crate::spec::{DimSharding, Init, ParamSpec, Share, Side, StateSpec, UnitShape};
use crate::tensor::{DType, FlatView};

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

/// The type of factors: float32 whatever the parameter's, as long means in 16 bits stand still.
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
        coded: None,
        on_host: false,
        sharding: dims.into_iter().map(DimSharding::LikeParam).collect(),
        share: Share::All,
    })
}

impl Factored {
    /// Declares the sums of a quantity under these names.
    pub(super) fn buffers(program: Program, names: [&'static str; 3], shape: &UnitShape) -> Program {
        let wire = shape.param.arithmetic();
        let new = |name, cols| BufferSpec::new(name, 0, cols, DType::F64).wire(wire);
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

    /// Unit `i` as a stack of matrices (one row where it is none) over these operands; with the sums of squares if
    /// `summed`, and with the sum that goes to `total` unless that is empty.
    pub(super) fn stack<const N: usize>(
        &self,
        io: &StageIo<'_>,
        i: usize,
        operands: [FlatView; N],
        (summed, total): (bool, FlatView),
    ) -> Result<Stack<N>> {
        let [mut row_sums, mut col_sums, mut all_sums] = [FlatView::EMPTY; 3];
        let [mut stack, mut rows, mut cols] = [1, 1, operands[0].len()];
        if is_matrix(io.class) {
            [stack, rows] = io.shape(self.buffers, i)?;
            cols = io.shape(self.buffers + 1, i)?[1];
            if summed {
                let sums = |at| io.flat(self.buffers + at, i);
                (row_sums, col_sums, all_sums) = (sums(0)?, sums(1)?, sums(2)?);
            }
        }
        Ok(Stack { operands, stack, rows, cols, row_sums, col_sums, all_sums, total })
    }

    /// Moves R, C and S by the share of what is new towards the means of what was summed, plus ε; second moments by
    /// element towards g² + ε.
    pub(super) fn update(&self, io: &StageIo<'_>, share: &NewShare<'_>, epsilon: f64) -> Result<()> {
        let state = |u: &UnitIo, at: usize| u.state[self.states + at].row(0);
        if !is_matrix(io.class) {
            let jobs: Vec<_> = io.units.iter().map(|u| [state(u, 0), u.grad.all()]).collect();
            return kernels::run(&Squares::new(epsilon, share, io.grad_factor, jobs.len()), &jobs);
        }
        let (mut means, mut jobs) = (Vec::new(), Vec::new());
        for (i, unit) in io.units.iter().enumerate() {
            #[allow(clippy::cast_precision_loss)] // sizes of matrices
            let [rows, cols] = [unit.rows, unit.cols].map(|n| n.max(1) as f64);
            for (at, count) in [cols, rows, rows * cols].into_iter().enumerate() {
                means.push((i, count));
                jobs.push([state(unit, at), io.flat(self.buffers + at, i)?]);
            }
        }
        kernels::run(&Means::new(epsilon, share, &means), &jobs)
    }

    /// 1/√V of every unit, from its states.
    pub(super) fn scales(&self, io: &StageIo<'_>) -> Vec<Scales> {
        let state = |u: &UnitIo, at: usize| u.state[self.states + at].row(0);
        let of = |u: &UnitIo| {
            if is_matrix(io.class) {
                Scales::of([0, 1, 2].map(|at| state(u, at)))
            } else {
                Scales::by_element(state(u, 0))
            }
        };
        io.units.iter().map(of).collect()
    }

    /// Σ u² with u = g/√V into a buffer.
    pub(super) fn update_squares(&self, io: &StageIo<'_>, buffer: BufferId) -> Result<()> {
        let pass = UpdateSquares { scales: &self.scales(io), grad_factor: io.grad_factor };
        let units = io.units.iter().enumerate();
        let stacks = units.map(|(i, u)| self.stack(io, i, [u.grad.all()], (false, io.flat(buffer, i)?)));
        kernels::rows(&pass, &stacks.collect::<Result<Vec<_>>>()?)
    }
}

/// Where the steps of each parameter are counted.
pub(super) fn counters(io: &StageIo<'_>, state: usize) -> Vec<FlatView> {
    io.units.iter().map(|u| u.state[state].row(0)).collect()
}

/// The sums from which the factors of each parameter follow; `param` where its rate follows its own size.
pub(super) fn sums(io: &StageIo<'_>, update: BufferId, param: Option<BufferId>) -> Result<Vec<UpdateSums>> {
    let of = |i: usize| {
        let param = param.map_or(Ok(FlatView::EMPTY), |buffer| io.flat(buffer, i))?;
        Ok(UpdateSums { update: io.flat(update, i)?, param, numel: io.units[i].numel })
    };
    (0..io.units.len()).map(of).collect()
}
