//! Second moments by row and by column (Shazeer & Stern 2018, arXiv:1804.04235), for the matrices over the last two
//! dimensions of a parameter; a parameter of fewer dimensions keeps them by element.
//!
//! With s the squares plus ε, R and C their running means over columns and rows, and S that over all: 1/√V = √S/(√R·√C).
//! S is the mean of R and of C; kept beside them, it needs no sum over what others store.

use crate::batch::Slab;
use crate::dtype::DType;
use crate::error::Result;
use crate::kernels::{self, Scales, Squares, Stack, UpdateSquares};
use crate::plan::{BufferId, BufferSpec, Program, Target};
use crate::spec::{Cut, Init, ParamSpec, Share, Side, StateSpec, UnitShape};
use crate::stage::StageIo;

/// The moments of one quantity: where its states and buffers begin. Of states there are R, C, S, or one by element; of
/// buffers the sums by row, by column and of all.
#[derive(Clone, Copy, Debug)]
pub(super) struct Factored {
    pub(super) states: usize,
    pub(super) buffers: BufferId,
}

/// How many leading dimensions number the matrices.
pub(super) fn leading(p: &ParamSpec) -> usize {
    if p.shape.len() < 2 { p.shape.len() } else { p.shape.len() - 2 }
}

/// Whether the parameters of a bucket are matrices.
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
        cuts: dims.into_iter().map(Cut::With).collect(),
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
            .buffer(new(rows, 0).cut(Cut::Stack, Cut::With(Side::Rows)).summed(Side::Cols))
            .buffer(new(cols, 0).cut(Cut::Stack, Cut::With(Side::Cols)).summed(Side::Rows))
            .buffer(new(all, 1).cut(Cut::Stack, Cut::Whole).summed(Side::Rows).summed(Side::Cols))
    }

    /// Appends the sums over what others store.
    pub(super) fn sum(&self, program: Program) -> Program {
        (0..3).fold(program, |program, i| program.redistribute(self.buffers + i, Target::Replicate))
    }

    /// Unit `i` as a stack of matrices (one row where it is none) over these operands, with the sums of a pass.
    pub(super) fn stack<const N: usize>(
        &self,
        io: &StageIo<'_>,
        i: usize,
        operands: [Slab; N],
        summed: bool,
    ) -> Result<Stack<N>> {
        if !is_matrix(io.class) {
            let cols = operands[0].len();
            let none = Slab::EMPTY;
            return Ok(Stack { operands, stack: 1, rows: 1, cols, row_sums: none, col_sums: none });
        }
        let (rows, cols) = (io.shape(self.buffers, i)?, io.shape(self.buffers + 1, i)?);
        let (mut row_sums, mut col_sums) = (Slab::EMPTY, Slab::EMPTY);
        if summed {
            (row_sums, col_sums) = (io.slab(self.buffers, i)?, io.slab(self.buffers + 1, i)?);
            // No row writes what has none.
            row_sums.clear()?;
            col_sums.clear()?;
        }
        Ok(Stack { operands, stack: rows[0], rows: rows[1], cols: cols[1], row_sums, col_sums })
    }

    /// The sums of all out of those by row.
    pub(super) fn close(&self, io: &StageIo<'_>) -> Result<()> {
        if !is_matrix(io.class) {
            return Ok(());
        }
        (0..io.units.len()).try_for_each(|i| {
            let (rows, all) = (io.slab(self.buffers, i)?, io.slab(self.buffers + 2, i)?);
            let height = io.shape(self.buffers, i)?[1].max(1);
            let all = all.numbers();
            all.fill(0.0);
            all.iter_mut()
                .zip(rows.numbers().chunks(height))
                .for_each(|(all, rows)| *all = rows.iter().sum());
            Ok(())
        })
    }

    /// Moves R, C and S of unit `i` by the share `rest` towards the means of what was summed, plus ε; second moments by
    /// element towards g² + ε.
    pub(super) fn update(&self, io: &StageIo<'_>, i: usize, rest: f64, epsilon: f64) -> Result<()> {
        let unit = &io.units[i];
        if !is_matrix(io.class) {
            let pass = Squares { rest, epsilon, grad_factor: io.grad_factor };
            let operands = [unit.state[self.states].row(0), unit.grad.all()];
            kernels::run(&pass, &[operands])?;
            return Ok(());
        }
        #[allow(clippy::cast_precision_loss)] // sizes of matrices
        let [rows, cols] = [unit.rows, unit.cols].map(|n| n.max(1) as f64);
        for (at, count) in [cols, rows, rows * cols].into_iter().enumerate() {
            let (state, sums) = (unit.state[self.states + at].row(0), io.slab(self.buffers + at, i)?);
            let mut values = kernels::values(&state);
            for (value, sum) in values.iter_mut().zip(sums.numbers()) {
                *value += rest * (*sum / count + epsilon - *value);
            }
            kernels::set_values(&values, &state);
        }
        Ok(())
    }

    /// 1/√V of unit `i`, from its states.
    pub(super) fn scales(&self, io: &StageIo<'_>, i: usize) -> Scales {
        let unit = &io.units[i];
        let state = |at: usize| kernels::values(&unit.state[self.states + at].row(0));
        let roots = |values: Vec<f64>| values.into_iter().map(|v| 1.0 / v.sqrt()).collect::<Vec<_>>();
        if !is_matrix(io.class) {
            let cols = roots(state(0));
            let width = cols.len();
            return Scales { rows: vec![1.0].into(), cols: cols.into(), height: 1, width };
        }
        let [mut rows, cols, all] = [roots(state(0)), roots(state(1)), state(2)];
        let [height, width] = [rows.len(), cols.len()].map(|n| n.checked_div(all.len()).unwrap_or(0));
        for (rows, all) in rows.chunks_mut(height.max(1)).zip(&all) {
            for row in rows {
                *row *= all.sqrt();
            }
        }
        Scales { rows: rows.into(), cols: cols.into(), height, width }
    }

    /// Σ u² with u = g/√V into a buffer.
    pub(super) fn update_squares(&self, io: &StageIo<'_>, buffer: BufferId) -> Result<()> {
        let scales: Vec<Scales> = (0..io.units.len()).map(|i| self.scales(io, i)).collect();
        let pass = UpdateSquares { scales: &scales, grad_factor: io.grad_factor };
        let stacks = io.units.iter().enumerate().map(|(i, u)| self.stack(io, i, [u.grad.all()], false));
        let sums = kernels::rows(&pass, &stacks.collect::<Result<Vec<_>>>()?);
        sums.into_iter().enumerate().try_for_each(|(i, sum)| {
            io.slab(buffer, i)?.numbers().fill(sum);
            Ok(())
        })
    }

    /// Scales that change nothing.
    pub(super) fn ones(io: &StageIo<'_>, i: usize) -> Scales {
        let width = io.units[i].param.shape().iter().product();
        let line = |count| vec![1.0; count].into();
        Scales { rows: line(1), cols: line(width), height: 1, width }
    }
}

/// The divisor that keeps the root mean square of an update at `threshold`: of unit `i` with this sum of squares.
pub(super) fn clipping(io: &StageIo<'_>, i: usize, squares: f64, threshold: f64) -> f64 {
    let ratio = root_mean_square(io, i, squares) / threshold;
    // A NaN must show.
    if ratio < 1.0 { 1.0 } else { ratio }
}

/// The root mean square over all elements of the parameter of unit `i`.
pub(super) fn root_mean_square(io: &StageIo<'_>, i: usize, squares: f64) -> f64 {
    #[allow(clippy::cast_precision_loss)] // a number of elements
    let count = io.units[i].numel.max(1) as f64;
    (squares / count).sqrt()
}
