//! Passes over stacks of matrices, row by row, with sums by row and by column. Sums are made in the same order whatever
//! the number of threads.

use std::sync::{Mutex, OnceLock};

#[cfg(target_arch = "x86_64")]
use super::isa::{self, Isa};
use super::{Real, convert};
use crate::kernels::cuda_call::RowPassCall;
use crate::tensor::{DType, Element, FlatView};
use crate::threads;

/// Elements that one task should have at least.
const TASK: usize = 1 << 16;
/// Tasks that a matrix is cut into at most.
const PARTS: usize = 32;
/// Rows that are worked on side by side at most.
const TOGETHER: usize = 4;
/// Columns of a row that are worked on before the next row's: a multiple of every block of an 8-bit state.
const TILE: usize = 512;
/// Rows whose columns are summed in the type of the arithmetic before the sums go on in float64.
const RUN: usize = 16;

/// A stack of `stack` matrices `rows × cols` that lie one after the other.
#[derive(Clone, Copy, Debug)]
pub struct Stack<const N: usize> {
    /// The elements of every operand.
    pub operands: [FlatView; N],
    /// Matrices.
    pub stack: usize,
    /// Rows of each.
    pub rows: usize,
    /// Columns of each.
    pub cols: usize,
    /// Where sums by row go: float64, one for each row of each matrix; empty where none are wanted.
    pub row_sums: FlatView,
    /// Where sums by column go: float64, one for each column of each matrix; empty where none are wanted.
    pub col_sums: FlatView,
    /// Where the sums of matrices go, of what is summed by row: float64, one for each; empty where none are wanted.
    pub all_sums: FlatView,
    /// Where the pass's own sum goes: one float64; empty where it is not wanted.
    pub total: FlatView,
}

/// Where a part of a row is: the job, the matrix within its stack, the row and first column within the matrix.
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

/// A pass over the rows of `N` operands.
pub trait RowPass<const N: usize>: Sync {
    /// Which operands are written.
    const WRITES: [bool; N];

    /// Does its work on a part of a row and adds to the columns' sums, which may be empty; returns what it adds to the
    /// row's sum and to the job's.
    fn row<C: Real>(&self, at: At, operands: [&mut [C]; N], cols: &mut [C]) -> [f64; 2];

    /// How it is called on CUDA devices; none where there is no kernel of it.
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
struct Task {
    job: usize,
    rows: std::ops::Range<usize>,
    /// Which part of a matrix that is cut; its sums by column are added up at the end.
    part: Option<usize>,
    /// Rows that are worked on side by side.
    together: usize,
}

fn tasks<const N: usize>(jobs: &[Stack<N>], together: usize) -> Vec<Task> {
    let mut tasks = Vec::new();
    for (job, stack) in jobs.iter().enumerate() {
        let (matrix, cols) = (stack.rows * stack.cols, stack.cols.max(1));
        if matrix >= 2 * TASK {
            let height = stack.rows.div_ceil(PARTS).max(TASK.div_ceil(cols));
            for first in (0..stack.stack).map(|m| m * stack.rows) {
                for (part, start) in (0..stack.rows).step_by(height).enumerate() {
                    let end = (start + height).min(stack.rows);
                    tasks.push(Task { job, rows: first + start..first + end, part: Some(part), together });
                }
            }
        } else {
            let each = TASK.div_ceil(matrix.max(1));
            for first in (0..stack.stack).step_by(each) {
                let rows = first * stack.rows..(first + each).min(stack.stack) * stack.rows;
                tasks.push(Task { job, rows, part: None, together });
            }
        }
    }
    tasks
}

/// What a task leaves: its share of the job's sum, and the sums by column of a part of a matrix.
#[derive(Default)]
struct Left {
    total: f64,
    cols: Vec<f64>,
}

/// Runs a pass over all jobs, with its sums.
pub(in crate::kernels) fn rows<const N: usize, P: RowPass<N>>(pass: &P, jobs: &[Stack<N>]) {
    rows_side_by_side(pass, jobs, together());
}

fn rows_side_by_side<const N: usize, P: RowPass<N>>(pass: &P, jobs: &[Stack<N>], together: usize) {
    for stack in jobs {
        // No row writes what has none.
        stack.row_sums.numbers().fill(0.0);
        stack.col_sums.numbers().fill(0.0);
    }
    let totals = pass_over(pass, jobs, together);
    for (stack, total) in jobs.iter().zip(totals) {
        stack.total.numbers().fill(total);
        let (all, rows) = (stack.all_sums.numbers(), stack.row_sums.numbers());
        all.fill(0.0);
        for (all, rows) in all.iter_mut().zip(rows.chunks(stack.rows.max(1))) {
            *all = rows.iter().sum();
        }
    }
}

/// Runs a pass over all jobs; returns its own sum of each.
fn pass_over<const N: usize, P: RowPass<N>>(pass: &P, jobs: &[Stack<N>], together: usize) -> Vec<f64> {
    let tasks = tasks(jobs, together);
    let left: Vec<Mutex<Left>> = tasks.iter().map(|_| Mutex::default()).collect();
    let work = |(task, left): (&Task, &Mutex<Left>)| {
        let stack = &jobs[task.job];
        let found = if stack.operands.iter().any(|s| s.dtype() == DType::F64) {
            vectorised::<f64, N, P>(pass, stack, task)
        } else {
            vectorised::<f32, N, P>(pass, stack, task)
        };
        *left.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = found;
    };
    let elements: usize = jobs.iter().map(|s| s.operands[0].len()).sum();
    if elements < 2 * TASK {
        tasks.iter().zip(&left).for_each(work);
    } else {
        threads::each(tasks.len(), |i| work((&tasks[i], &left[i])));
    }
    let mut totals = vec![0.0; jobs.len()];
    for (task, left) in tasks.iter().zip(left) {
        let Left { total, cols } = left.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
        totals[task.job] += total;
        if let Some(part) = task.part {
            let stack = &jobs[task.job];
            let matrix = task.rows.start / stack.rows.max(1);
            // SAFETY: the caller owns the sums for this stage; no task is running any more.
            let sums = unsafe { stack.col_sums.part(matrix * stack.cols, stack.cols).slice::<f64>() };
            if part == 0 {
                sums.fill(0.0);
            }
            sums.iter_mut().zip(cols).for_each(|(sum, own)| *sum += own);
        }
    }
    totals
}

/// The best instruction set that may be used.
fn vectorised<C: Real, const N: usize, P: RowPass<N>>(pass: &P, stack: &Stack<N>, task: &Task) -> Left {
    #[cfg(target_arch = "x86_64")]
    {
        let best = isa::best();
        if best >= Isa::Avx512 {
            // SAFETY: the processor has it.
            return unsafe { with_avx512::<C, N, P>(pass, stack, task) };
        }
        if best == Isa::Avx2 {
            // SAFETY: the processor has it.
            return unsafe { with_avx2::<C, N, P>(pass, stack, task) };
        }
    }
    body::<C, N, P>(pass, stack, task)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw")]
fn with_avx512<C: Real, const N: usize, P: RowPass<N>>(pass: &P, stack: &Stack<N>, task: &Task) -> Left {
    body::<C, N, P>(pass, stack, task)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn with_avx2<C: Real, const N: usize, P: RowPass<N>>(pass: &P, stack: &Stack<N>, task: &Task) -> Left {
    body::<C, N, P>(pass, stack, task)
}

#[inline(always)]
#[allow(clippy::inline_always)] // must be compiled inside its caller's instruction set
fn body<C: Real, const N: usize, P: RowPass<N>>(pass: &P, stack: &Stack<N>, task: &Task) -> Left {
    let Stack { operands, rows, cols, row_sums, col_sums, .. } = stack;
    let together = task.together;
    let (rows, cols) = ((*rows).max(1), *cols);
    let wanted = if col_sums.is_empty() { 0 } else { cols };
    let (mut short, mut wide) = (vec![C::default(); wanted], vec![0.0_f64; wanted]);
    let mut scratch: [Vec<C>; N] = operands
        .map(|s| if s.dtype() == <C as Element>::DTYPE { Vec::new() } else { vec![C::default(); TILE] });
    let mut left = Left::default();
    let (mut number, mut unflushed) = (task.rows.start, 0);
    while number < task.rows.end {
        // Rows of one matrix.
        let first = At { job: task.job, matrix: number / rows, row: number % rows, col: 0 };
        let count = together.min(task.rows.end - number).min(rows - first.row);
        let mut sums = [0.0; TOGETHER];
        let mut col = 0;
        while col < cols {
            let len = TILE.min(cols - col);
            let sums_of_cols = if wanted > 0 { &mut short[col..col + len] } else { &mut [] };
            for (r, sum) in sums[..count].iter_mut().enumerate() {
                let flats = operands.map(|s| s.part((number + r) * cols + col, len));
                let at = At { row: first.row + r, col, ..first };
                if together > 1 {
                    // The columns that come next, or the row.
                    let next = if col + len < cols { r * cols + col + len } else { (together + r) * cols };
                    for flat in operands {
                        flat.prefetch(number * cols + next, TILE.min(cols));
                    }
                }
                let [row, total] = tile(pass, at, flats, &mut scratch, sums_of_cols);
                *sum += row;
                left.total += total;
            }
            col += len;
        }
        if !row_sums.is_empty() {
            // SAFETY: the caller owns the sums for this stage; each row has one of its own, and this task its rows.
            unsafe { row_sums.part(number, count).slice::<f64>() }.copy_from_slice(&sums[..count]);
        }
        number += count;
        unflushed += count;
        let ends = number.is_multiple_of(rows);
        if wanted > 0 && (unflushed >= RUN || ends || number == task.rows.end) {
            unflushed = 0;
            for (wide, short) in wide.iter_mut().zip(&mut short) {
                *wide += short.wide();
                *short = C::default();
            }
        }
        if wanted > 0 && ends && task.part.is_none() {
            // SAFETY: as above; this task alone has this matrix.
            unsafe { col_sums.part(first.matrix * cols, cols).slice::<f64>() }.copy_from_slice(&wide);
            wide.fill(0.0);
        }
    }
    left.cols = if task.part.is_some() { wide } else { Vec::new() };
    left
}

/// A pass over a part of a row.
#[inline(always)]
#[allow(clippy::inline_always)] // as above
fn tile<C: Real, const N: usize, P: RowPass<N>>(
    pass: &P,
    at: At,
    flats: [FlatView; N],
    scratch: &mut [Vec<C>; N],
    cols: &mut [C],
) -> [f64; 2] {
    for (flat, scratch) in flats.iter().zip(scratch.iter_mut()).filter(|(_, scratch)| !scratch.is_empty()) {
        convert::load(flat, &mut scratch[..flat.len()]);
    }
    let mut buffers = scratch.iter_mut();
    let lines = flats.map(|flat| match buffers.next() {
        Some(own) if !own.is_empty() => &mut own[..flat.len()],
        // SAFETY: the caller passes disjoint views of live tensors; this task alone has this row.
        _ => unsafe { flat.slice::<C>() },
    });
    let sums = pass.row(at, lines, cols);
    for ((flat, scratch), written) in flats.iter().zip(scratch.iter()).zip(P::WRITES) {
        if written && !scratch.is_empty() {
            convert::store(&scratch[..flat.len()], flat);
        }
    }
    sums
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind, Tensor};

    use super::*;
    use crate::kernels::ops::factored::GradientSquares;

    #[test]
    fn sums_are_the_same_for_any_rows_side_by_side_and_any_threads() {
        let pass = GradientSquares { grad_factor: 0.5 };
        for (stack, rows, cols) in [(1, 700, 523), (3, 9, 64), (1, 1, 5), (2, 300, 1100)] {
            let shape = [stack, rows, cols].map(|n| i64::try_from(n).unwrap());
            let g = Tensor::randn(shape, (Kind::Float, Device::Cpu));
            let sums = |together: usize, threads: usize| {
                threads::set(threads);
                let zeros = |n: i64| Tensor::ones([n], (Kind::Double, Device::Cpu));
                let made = [shape[0] * shape[1], shape[0] * shape[2], shape[0], 1].map(zeros);
                let flat = |t: &Tensor| FlatView::of(t).unwrap();
                let [row_sums, col_sums, all_sums, _] = made.each_ref().map(flat);
                let (operands, total) = ([flat(&g)], FlatView::EMPTY);
                let job = Stack { operands, stack, rows, cols, row_sums, col_sums, all_sums, total };
                rows_side_by_side(&pass, &[job], together);
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
