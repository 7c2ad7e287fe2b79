//! Passes over short rows: by element, whatever the number of rows.

#![allow(clippy::inline_always)] // every function must be compiled inside its caller's instruction set

use super::{At, RowPass, SCALES, TILE, Task, scratch, tile};
use crate::kernels::cpu::{Job, Real};

/// Columns of rows that are worked on several at once: of one of 64 what it takes to begin it is a third of its time.
pub(super) const THIN: usize = 64;

/// As many elements as are worked on at once.
type Tile<C> = [C; TILE];

/// The pass over the rows of a task, which are short. Rows of a tile are summed by column in pairs.
#[inline(always)]
pub(super) fn body<C: Real, const N: usize, const R: usize, const W: usize, P: RowPass<N, R, W>>(
    pass: &P,
    task: &mut Task<'_, R, W>,
) {
    let Task { operands, row_sums, col_sums, left, .. } = task;
    let (rows, cols) = (task.shape[0].max(1), task.shape[1]);
    if cols == 0 {
        return;
    }
    let height = TILE / cols;
    let constants = pass.constants::<C>(task.job);
    let (mut by_row, mut by_col) = ([[C::default(); TILE]; SCALES], [[C::default(); TILE]; SCALES]);
    let ([mut summed, mut terms], mut wide): ([Tile<C>; 2], _) =
        ([[C::default(); TILE]; 2], vec![0.0_f64; cols]);
    let (mut reads, mut writes) = scratch::<C, R, W>(operands);
    let (mut done, mut matrix) = (0, None);
    while done < task.count {
        // Rows of one matrix.
        let number = task.first + done;
        let at = At { job: task.job, matrix: number / rows, row: number % rows, col: 0 };
        let count = height.min(task.count - done).min(rows - at.row);
        let (start, len) = (done * cols, count * cols);
        let own = pass.scales::<C>(at);
        for (to, [own, _]) in by_row.iter_mut().zip(own).filter(|(_, [own, _])| !own.is_empty()) {
            spread(own, cols, &mut to[..len]);
        }
        if matrix != Some(at.matrix) {
            matrix = Some(at.matrix);
            for (to, [_, own]) in by_col.iter_mut().zip(own).filter(|(_, [_, own])| !own.is_empty()) {
                to.chunks_exact_mut(cols).for_each(|line| line.copy_from_slice(own));
            }
        }
        let scales = std::array::from_fn(|s| [&by_row[s][..len], &by_col[s][..len]]);
        let tiles = Job {
            read: operands.read.map(|x| x.part(start, len)),
            write: operands.write.each_mut().map(|x| x.part(start, len)),
        };
        let work = |read: [&[C]; R], write: [&mut [C]; W]| {
            pass.elements::<C, false>(
                &constants,
                read,
                write,
                scales,
                [&mut summed[..len], &mut terms[..len]],
            )
        };
        left.total += tile(tiles, (&mut reads, &mut writes), work);
        if !row_sums.is_empty() {
            add_rows(&summed[..len], cols, row_sums.part(done, count).slice_mut::<f64>());
        }
        done += count;
        if task.sums_cols {
            add_pairs(&mut summed[..len], cols);
            wide.iter_mut().zip(&summed).for_each(|(wide, own)| *wide += own.wide());
            if (number + count).is_multiple_of(rows) && task.part.is_none() {
                let here = (at.matrix - task.first / rows) * cols;
                col_sums.part(here, cols).slice_mut::<f64>().copy_from_slice(&wide);
                wide.fill(0.0);
            }
        }
    }
    left.cols = if task.sums_cols && task.part.is_some() { wide } else { Vec::new() };
}

/// Calls a function with the number of columns as a constant if it is one of these, else with 0.
macro_rules! by_width {
    ($cols:ident: $call:ident($($argument:expr),*)) => {
        match $cols {
            1 => $call::<C, 1>($($argument),*),
            2 => $call::<C, 2>($($argument),*),
            4 => $call::<C, 4>($($argument),*),
            8 => $call::<C, 8>($($argument),*),
            16 => $call::<C, 16>($($argument),*),
            _ => $call::<C, 0>($($argument),*),
        }
    };
}

/// Writes the number of each row to all of its elements.
#[inline(always)]
fn spread<C: Real>(own: &[C], cols: usize, to: &mut [C]) {
    by_width!(cols: spread_by(own, cols, to));
}

#[inline(always)]
fn spread_by<C: Real, const COLS: usize>(own: &[C], cols: usize, to: &mut [C]) {
    let cols = if COLS == 0 { cols } else { COLS };
    to.chunks_exact_mut(cols).zip(own).for_each(|(line, own)| line.fill(*own));
}

/// Sums each row, in float64.
#[inline(always)]
fn add_rows<C: Real>(x: &[C], cols: usize, sums: &mut [f64]) {
    by_width!(cols: add_rows_by(x, cols, sums));
}

#[inline(always)]
fn add_rows_by<C: Real, const COLS: usize>(x: &[C], cols: usize, sums: &mut [f64]) {
    let cols = if COLS == 0 { cols } else { COLS };
    for (sum, line) in sums.iter_mut().zip(x.chunks_exact(cols)) {
        *sum = line.iter().map(|x| x.wide()).sum();
    }
}

/// Adds the lower half of the rows to the upper one until one is left.
#[inline(always)]
fn add_pairs<C: Real>(x: &mut [C], cols: usize) {
    let mut rows = x.len() / cols;
    while rows > 1 {
        let half = rows.div_ceil(2);
        let (upper, lower) = x[..rows * cols].split_at_mut(half * cols);
        upper.iter_mut().zip(lower).for_each(|(upper, lower)| *upper = *upper + *lower);
        rows = half;
    }
}
