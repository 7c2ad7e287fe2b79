//! Passes over stacks of matrices, row by row, with sums by row and by column; over several rows at once where they are
//! short. Sums are made in the same order whatever the number of threads.

mod thin;

use std::sync::OnceLock;

use thin::THIN;

use super::lanes::{LANES, sums};
use super::{Job, Real, Slot, convert, isa};
use crate::kernels::op::RowPassCall;
use crate::tensor::{DType, Element, FlatViewMut};
use crate::threads;

/// Elements that one task should have at least.
const TASK: usize = 1 << 16;
/// Tasks that a matrix is split into at most.
const PARTS: usize = 32;
/// Rows that are worked on side by side at most.
const TOGETHER: usize = 4;
/// Columns of a row that are worked on before the next row's: a multiple of every block of an 8-bit state.
pub(super) const TILE: usize = 512;
/// Rows whose columns are summed in the type of the arithmetic before the sums go on in float64.
const RUN: usize = 16;

/// A stack of `stack` matrices `rows × cols` that lie one after the other.
#[derive(Debug)]
#[allow(clippy::struct_field_names)] // a stack of matrices
pub struct Stack<'a, const R: usize, const W: usize> {
    /// The elements of every operand.
    pub operands: Job<'a, R, W>,
    /// Matrices.
    pub stack: usize,
    /// Rows of each.
    pub rows: usize,
    /// Columns of each.
    pub cols: usize,
    /// Sums by row: float64, one for each row of each matrix; empty where none are wanted.
    pub row_sums: FlatViewMut<'a>,
    /// Sums by column: float64, one for each column of each matrix; empty where none are wanted.
    pub col_sums: FlatViewMut<'a>,
    /// Sums of matrices, of what is summed by row: float64, one for each; empty where none are wanted.
    pub all_sums: FlatViewMut<'a>,
    /// Sum of the pass's own: one float64; empty where it is not wanted.
    pub total: FlatViewMut<'a>,
}

/// Position of a part of a row: the job, the matrix within its stack, the row and first column within the matrix.
#[derive(Clone, Copy, Debug)]
pub struct At {
    /// The job.
    pub job: usize,
    /// The matrix.
    pub matrix: usize,
    /// The row.
    pub row: usize,
    /// The first column.
    pub col: usize,
}

/// Scales that an element has at most.
pub(crate) const SCALES: usize = 2;

/// A pass over the rows of `N` operands (`R` read, `W` written).
pub trait RowPass<const N: usize, const R: usize, const W: usize>: Sync {
    /// The order in which kernels of devices take the operands.
    const ORDER: [Slot; N];
    /// Numbers that all elements of a job have in common.
    type Constants<C: Real>;

    /// Computes the constants of a job.
    fn constants<C: Real>(&self, job: usize) -> Self::Constants<C>;

    /// Scales by row, from this one on, and by column of a matrix; empty where the pass has none.
    fn scales<C: Real>(&self, at: At) -> [[&[C]; 2]; SCALES];

    /// Does its work on elements with a scale of the row and of the column each: one of the row for all of them where
    /// `BY_ROW`. Leaves what is summed by row and by column in the first memory, and uses the second; returns what it adds to
    /// the job's sum.
    fn elements<C: Real, const BY_ROW: bool>(
        &self,
        constants: &Self::Constants<C>,
        read: [&[C]; R],
        write: [&mut [C]; W],
        scales: [[&[C]; 2]; SCALES],
        memory: [&mut [C]; 2],
    ) -> f64;

    /// Call of the pass on CUDA devices; none where there is no kernel of it.
    fn on_cuda(&self) -> Option<RowPassCall<'_>> {
        None
    }
}

/// Rows that are worked on side by side, their memory asked for ahead where there are several. Intel's hardware fetches
/// several streams faster than one and takes a while to find out about each. AMD's is the fastest where it is left alone
/// with one: CAME on 1024 x 4096 takes 14.6 ms by four rows on a Zen 3 and 9.6 by one. The order of all sums is the same.
fn together() -> usize {
    static ROWS: OnceLock<usize> = OnceLock::new();
    *ROWS.get_or_init(|| if crate::tensor::cpu_is_of_amd() { 1 } else { TOGETHER })
}

/// Rows of one job: of several whole matrices, or of a part of one.
pub(super) struct Task<'a, const R: usize, const W: usize> {
    pub(super) job: usize,
    /// The number of the first row in the job, and how many there are.
    pub(super) first: usize,
    pub(super) count: usize,
    /// Rows and columns of a matrix.
    pub(super) shape: [usize; 2],
    /// Part of a matrix that is split; its sums by column are added up at the end.
    pub(super) part: Option<usize>,
    /// The elements of the rows.
    pub(super) operands: Job<'a, R, W>,
    pub(super) row_sums: FlatViewMut<'a>,
    /// Sums by column of whole matrices.
    pub(super) col_sums: FlatViewMut<'a>,
    /// True if sums by column are wanted.
    pub(super) sums_cols: bool,
    /// True if the arithmetic is float64 whatever the operands' type.
    is_wide: bool,
    /// Rows that are worked on side by side.
    together: usize,
    pub(super) left: Left,
}

/// Sums that a task leaves: its share of the job's sum, and the sums by column of a part of a matrix.
#[derive(Default)]
pub(super) struct Left {
    pub(super) total: f64,
    pub(super) cols: Vec<f64>,
}

/// Splits a job into tasks. The job keeps the sums by column of matrices that are split.
fn cut<'a, const R: usize, const W: usize>(
    job: usize,
    stack: &'a mut Stack<'_, R, W>,
    (together, is_wide): (usize, bool),
    tasks: &mut Vec<Task<'a, R, W>>,
) {
    let Stack { stack: matrices, rows, cols, .. } = *stack;
    let (matrix, is_cut) = (rows * cols, rows * cols >= 2 * TASK);
    let sums_cols = !stack.col_sums.is_empty();
    let mut operands = stack.operands.reborrow();
    let mut row_sums = stack.row_sums.reborrow();
    let mut col_sums = if is_cut { FlatViewMut::EMPTY } else { stack.col_sums.reborrow() };
    let mut push = |first: usize, count: usize, part: Option<usize>| {
        let whole = if part.is_none() { count / rows.max(1) } else { 0 };
        tasks.push(Task {
            job,
            first,
            count,
            shape: [rows, cols],
            part,
            operands: operands.take_first(count * cols),
            row_sums: row_sums.take_first(count),
            col_sums: col_sums.take_first(whole * cols),
            sums_cols,
            is_wide,
            together,
            left: Left::default(),
        });
    };
    if is_cut {
        let height = rows.div_ceil(PARTS).max(TASK.div_ceil(cols));
        for first in (0..matrices).map(|m| m * rows) {
            for (part, start) in (0..rows).step_by(height).enumerate() {
                push(first + start, height.min(rows - start), Some(part));
            }
        }
    } else {
        let each = TASK.div_ceil(matrix.max(1));
        for first in (0..matrices).step_by(each) {
            push(first * rows, each.min(matrices - first) * rows, None);
        }
    }
}

/// Runs a pass over all jobs, with its sums.
pub(in crate::kernels) fn rows<const N: usize, const R: usize, const W: usize, P: RowPass<N, R, W>>(
    pass: &P,
    jobs: &mut [Stack<'_, R, W>],
) {
    rows_side_by_side(pass, jobs, together());
}

fn rows_side_by_side<const N: usize, const R: usize, const W: usize, P: RowPass<N, R, W>>(
    pass: &P,
    jobs: &mut [Stack<'_, R, W>],
    together: usize,
) {
    let all: Vec<_> = (0..jobs.len()).collect();
    summed(pass, jobs, &all, (together, false));
    if W == 0 {
        // Squares of large numbers are no float32 numbers: these jobs are done again, in float64.
        let again: Vec<_> = all.into_iter().filter(|job| overflows(&mut jobs[*job])).collect();
        if !again.is_empty() {
            summed(pass, jobs, &again, (together, true));
        }
    }
}

/// Tests whether a sum is not finite though the arithmetic was float32.
fn overflows<const R: usize, const W: usize>(stack: &mut Stack<'_, R, W>) -> bool {
    let sums = [&mut stack.total, &mut stack.all_sums, &mut stack.col_sums];
    let finite = sums.into_iter().all(|sums| side_by_side(sums.numbers()).is_finite());
    !finite && stack.operands.dtypes().all(|dtype| dtype != DType::F64)
}

/// Runs a pass over those jobs that are named, in float64 if that is said, and writes its sums.
fn summed<const N: usize, const R: usize, const W: usize, P: RowPass<N, R, W>>(
    pass: &P,
    jobs: &mut [Stack<'_, R, W>],
    named: &[usize],
    how: (usize, bool),
) {
    for job in named {
        let stack = &mut jobs[*job];
        // No row writes what has none.
        stack.row_sums.numbers().fill(0.0);
        stack.col_sums.numbers().fill(0.0);
    }
    let totals = pass_over(pass, jobs, named, how);
    for job in named {
        let stack = &mut jobs[*job];
        stack.total.numbers().fill(totals[*job]);
        let (all, rows) = (stack.all_sums.numbers(), stack.row_sums.view().numbers());
        all.fill(0.0);
        for (all, rows) in all.iter_mut().zip(rows.chunks(stack.rows.max(1))) {
            *all = side_by_side(rows);
        }
    }
}

/// The sum of numbers, some side by side.
fn side_by_side(numbers: &[f64]) -> f64 {
    let (whole, rest) = numbers.as_chunks::<8>();
    let mut lanes = [0.0_f64; 8];
    for chunk in whole {
        lanes.iter_mut().zip(chunk).for_each(|(lane, x)| *lane += x);
    }
    lanes.iter().chain(rest).sum()
}

/// Runs a pass over those jobs that are named; returns its own sum of each.
fn pass_over<const N: usize, const R: usize, const W: usize, P: RowPass<N, R, W>>(
    pass: &P,
    jobs: &mut [Stack<'_, R, W>],
    named: &[usize],
    how: (usize, bool),
) -> Vec<f64> {
    let elements: usize = named.iter().map(|job| jobs[*job].operands.len()).sum();
    let (mut totals, mut tasks) = (vec![0.0; jobs.len()], Vec::new());
    let mut named = named.iter().peekable();
    for (job, stack) in jobs.iter_mut().enumerate() {
        if named.next_if_eq(&&job).is_some() {
            cut(job, stack, how, &mut tasks);
        }
    }
    let work = |task: &mut Task<'_, R, W>| {
        let is_wide = task.is_wide || task.operands.dtypes().any(|dtype| dtype == DType::F64);
        let rows = (pass, Rows::<N, R, W>(task));
        if is_wide { isa::vectorised::<f64, _>(rows) } else { isa::vectorised::<f32, _>(rows) }
    };
    if elements < 2 * TASK {
        tasks.iter_mut().for_each(work);
    } else {
        threads::chunks(&mut tasks, 1, |_, tasks| tasks.iter_mut().for_each(work));
    }
    let mut parts = Vec::new();
    for Task { job, first, shape: [rows, cols], part, left, .. } in tasks {
        totals[job] += left.total;
        if let Some(part) = part {
            parts.push((job, part, first / rows.max(1) * cols, left.cols));
        }
    }
    for (job, part, start, found) in parts {
        let sums = jobs[job].col_sums.numbers().get_mut(start..start + found.len()).unwrap_or_default();
        if part == 0 {
            sums.fill(0.0);
        }
        sums.iter_mut().zip(found).for_each(|(sum, own)| *sum += own);
    }
    totals
}

/// A task of a pass over rows.
struct Rows<'t, 'a, const N: usize, const R: usize, const W: usize>(&'t mut Task<'a, R, W>);

impl<P: RowPass<N, R, W>, const N: usize, const R: usize, const W: usize> isa::Work
    for (&P, Rows<'_, '_, N, R, W>)
{
    type Out = ();

    #[inline(always)]
    #[allow(clippy::inline_always)] // must be compiled inside its caller's instruction set
    fn run<C: Real>(self) {
        let (pass, Rows(task)) = self;
        let [rows, cols] = task.shape;
        if rows > 1 && cols <= THIN {
            thin::body::<C, N, R, W, P>(pass, task);
        } else {
            body::<C, N, R, W, P>(pass, task);
        }
    }
}

#[inline(always)]
#[allow(clippy::inline_always)] // must be compiled inside its caller's instruction set
fn body<C: Real, const N: usize, const R: usize, const W: usize, P: RowPass<N, R, W>>(
    pass: &P,
    task: &mut Task<'_, R, W>,
) {
    let Task { operands, row_sums, col_sums, left, .. } = task;
    let (together, rows, cols) = (task.together, task.shape[0].max(1), task.shape[1]);
    let wanted = if task.sums_cols { cols } else { 0 };
    let (mut short, mut wide) = (vec![C::default(); wanted], vec![0.0_f64; wanted]);
    let (mut reads, mut writes) = scratch::<C, R, W>(operands);
    let constants = pass.constants::<C>(task.job);
    let [mut summed, mut terms] = [[C::default(); TILE]; 2];
    let sums_rows = !row_sums.is_empty() || task.sums_cols;
    let (mut done, mut unflushed) = (0, 0);
    while done < task.count {
        // Rows of one matrix.
        let number = task.first + done;
        let first = At { job: task.job, matrix: number / rows, row: number % rows, col: 0 };
        let count = together.min(task.count - done).min(rows - first.row);
        let mut sums = [0.0; TOGETHER];
        let mut col = 0;
        while col < cols {
            let len = TILE.min(cols - col);
            let sums_of_cols = if wanted > 0 { &mut short[col..col + len] } else { &mut [] };
            for (r, sum) in sums[..count].iter_mut().enumerate() {
                let start = (done + r) * cols + col;
                if together > 1 && rows > 1 {
                    // The columns that come next, or the row.
                    let next = if col + len < cols { r * cols + col + len } else { (together + r) * cols };
                    operands.prefetch(done * cols + next, TILE.min(cols));
                }
                let tiles = Job {
                    read: operands.read.map(|x| x.part(start, len)),
                    write: operands.write.each_mut().map(|x| x.part(start, len)),
                };
                let scales = pass.scales::<C>(At { row: first.row + r, ..first });
                let scales = scales.map(|[row, cols]| [row, cols.get(col..col + len).unwrap_or(&[])]);
                let work = |read: [&[C]; R], write: [&mut [C]; W]| {
                    pass.elements::<C, true>(&constants, read, write, scales, [&mut summed, &mut terms])
                };
                left.total += tile(tiles, (&mut reads, &mut writes), work);
                if sums_rows {
                    let summed = &summed[..len];
                    *sum += sums!(summed;; j => summed[j]);
                    sums_of_cols.iter_mut().zip(summed).for_each(|(all, own)| *all = *all + *own);
                }
            }
            col += len;
        }
        if !row_sums.is_empty() {
            row_sums.part(done, count).slice_mut::<f64>().copy_from_slice(&sums[..count]);
        }
        done += count;
        unflushed += count;
        let ends = (number + count).is_multiple_of(rows);
        if wanted > 0 && (unflushed >= RUN || ends || done == task.count) {
            unflushed = 0;
            for (wide, short) in wide.iter_mut().zip(&mut short) {
                *wide += short.wide();
                *short = C::default();
            }
        }
        if wanted > 0 && ends && task.part.is_none() {
            let here = (first.matrix - task.first / rows) * cols;
            col_sums.part(here, cols).slice_mut::<f64>().copy_from_slice(&wide);
            wide.fill(0.0);
        }
    }
    left.cols = if task.part.is_some() { wide } else { Vec::new() };
}

/// Memory for a tile of each operand that is not of the type of the arithmetic.
pub(super) fn scratch<C: Real, const R: usize, const W: usize>(
    operands: &Job<'_, R, W>,
) -> ([Vec<C>; R], [Vec<C>; W]) {
    let scratch = |dtype: DType| {
        if dtype == <C as Element>::DTYPE { Vec::new() } else { vec![C::default(); TILE] }
    };
    let written = operands.write.each_ref().map(|x| scratch(x.dtype()));
    (operands.read.map(|x| scratch(x.dtype())), written)
}

/// Does work on a part of the elements, in the type of the arithmetic.
#[inline(always)]
#[allow(clippy::inline_always)] // inside its caller's instruction set
pub(super) fn tile<C: Real, T, const R: usize, const W: usize>(
    Job { read, mut write }: Job<'_, R, W>,
    (reads, writes): (&mut [Vec<C>; R], &mut [Vec<C>; W]),
    work: impl FnOnce([&[C]; R], [&mut [C]; W]) -> T,
) -> T {
    let mut buffers = reads.iter_mut();
    let lines = read.map(|x| match buffers.next() {
        Some(own) if !own.is_empty() => {
            let own = &mut own[..x.len()];
            convert::load(&x, own);
            &*own
        }
        _ => x.slice::<C>(),
    });
    let mut buffers = writes.iter_mut();
    let written = write.each_mut().map(|x| match buffers.next() {
        Some(own) if !own.is_empty() => {
            let own = &mut own[..x.len()];
            convert::load(&x.view(), own);
            own
        }
        _ => x.slice_mut::<C>(),
    });
    let done = work(lines, written);
    for (x, own) in write.iter_mut().zip(writes.iter()).filter(|(_, own)| !own.is_empty()) {
        convert::store(&own[..x.len()], x);
    }
    done
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind, Tensor};

    use super::*;
    use crate::kernels::ops::factored::GradientSquares;
    use crate::tensor::test_views::{view, view_mut};

    #[test]
    fn sums_are_the_same_for_any_rows_side_by_side_and_any_threads() {
        let pass = GradientSquares { grad_factor: 0.5 };
        let shapes = [(1, 700, 523), (3, 9, 64), (1, 1, 5), (2, 300, 1100), (1, 70_001, 4), (2, 45_000, 3)];
        let thin = [(1, 200_003, 1), (5, 7, 8), (40, 1000, 16), (3, 1500, 65), (900, 2, 2), (2, 3, 64)];
        for (stack, rows, cols) in shapes.into_iter().chain(thin) {
            let shape = [stack, rows, cols].map(|n| i64::try_from(n).unwrap());
            let g = Tensor::randn(shape, (Kind::Float, Device::Cpu));
            let sums = |together: usize, threads: usize| {
                threads::set(threads);
                let zeros = |n: i64| Tensor::ones([n], (Kind::Double, Device::Cpu));
                let made = [shape[0] * shape[1], shape[0] * shape[2], shape[0], 1].map(zeros);
                let [row_sums, col_sums, all_sums, _] = made.each_ref().map(view_mut);
                let (operands, total) = (Job { read: [view(&g)], write: [] }, FlatViewMut::EMPTY);
                let job = Stack { operands, stack, rows, cols, row_sums, col_sums, all_sums, total };
                rows_side_by_side::<1, 1, 0, _>(&pass, &mut [job], together);
                threads::set(1);
                Tensor::cat(&made, 0)
            };
            let first = sums(1, 1);
            for (together, threads) in [(TOGETHER, 1), (2, 1), (1, 3), (TOGETHER, 3)] {
                assert!(first.equal(&sums(together, threads)), "{stack} {rows} {cols}: {together} {threads}");
            }
            let wide = g.to_kind(Kind::Double).square() * 0.25;
            let expected = wide.sum_dim_intlist(2, false, None::<Kind>).flatten(0, -1);
            let off = (first.narrow(0, 0, shape[0] * shape[1]) - &expected).abs().max() / expected.max();
            assert!(f64::try_from(off).unwrap() < 1e-6);
        }
    }
}
