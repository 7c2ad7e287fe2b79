//! Normalization by neuron on the CPU.

use super::Neurons;
use crate::error::Result;
use crate::kernels::cpu::reduce::sum_of_squares;
use crate::kernels::cpu::{Job, convert, run_here};
use crate::kernels::ops::apply::Decay;
use crate::kernels::ops::lerp::Lerp;
use crate::threads;

/// Added to the root of the running mean square.
const EPSILON: f64 = 1e-8;
/// The smallest norm that is divided by.
const SMALLEST: f64 = 1e-8;
/// Elements from which rows are spread over threads.
const PARALLEL: usize = 1 << 16;
/// Rows that one task handles.
const TOGETHER: usize = 16;

/// The rows of the matrix that take part, in order, each with the row of V that is its own.
fn rows(neurons: &Neurons<'_>) -> Vec<(usize, usize)> {
    let all = neurons.u.shape()[0];
    match &neurons.chosen {
        Some(chosen) => chosen.pairs(all).into_iter().map(|(own, row)| (row, own)).collect(),
        None => (0..all).map(|row| (row, row)).collect(),
    }
}

/// Items of the rows that are named, in order, each with what is named with it.
fn named<'r, T, R>(
    all: impl Iterator<Item = T> + 'r,
    rows: &'r [(usize, R)],
) -> impl Iterator<Item = (&'r (usize, R), T)> {
    let mut rows = rows.iter().peekable();
    all.enumerate().filter_map(move |(at, one)| Some((rows.next_if(|(row, _)| *row == at)?, one)))
}

/// Does something to parts of rows, one after the other, or in tasks of some rows where they have many elements.
fn each<T: Send>(mut parts: Vec<T>, elements: usize, work: impl Fn(&mut T) + Sync) {
    if elements < PARALLEL {
        parts.iter_mut().for_each(work);
    } else {
        threads::chunks(&mut parts, TOGETHER, |_, parts| parts.iter_mut().for_each(&work));
    }
}

/// See [`crate::kernels::neuron_squares`].
pub(in crate::kernels) fn squares(neurons: &mut Neurons<'_>) -> Result<()> {
    let rows = rows(neurons);
    let (u, squares) = (neurons.u.view(), &mut neurons.squares);
    let length = neurons.length.max(1);
    let per_row = u.shape()[1] / length;
    squares.clear()?;
    let parts = named(squares.numbers().chunks_mut(per_row.max(1)), &rows).collect();
    each(parts, rows.len() * u.shape()[1], |((row, _), sums)| {
        let line = u.row(*row);
        for (j, sum) in sums.iter_mut().enumerate() {
            *sum = sum_of_squares(&line.part(j * length, length));
        }
    });
    Ok(())
}

/// See [`crate::kernels::neuron_variance`].
pub(in crate::kernels) fn variance(beta2: f64, length: f64, neurons: &mut Neurons<'_>) {
    let rows = rows(neurons);
    let Neurons { squares, totals, variance, group, .. } = neurons;
    let (squares, totals) = (squares.view().slice::<f64>(), totals.slice_mut::<f64>());
    totals.fill(0.0);
    let mut values = Vec::new();
    for (row, own) in rows {
        let mut variance = variance.row(own);
        let per_row = variance.len();
        values.resize(per_row, 0.0_f64);
        convert::load(&variance.view(), &mut values);
        for (j, v) in values.iter_mut().enumerate() {
            *v = Lerp::keeping(beta2).of(*v, squares[row * per_row + j] / length);
        }
        convert::store(&values, &mut variance);
        // What was stored is what the update is divided by.
        convert::load(&variance.view(), &mut values);
        for (j, v) in values.iter().enumerate() {
            let (neuron, square) = (row * per_row + j, squares[row * per_row + j]);
            let total = 2 * (neuron / (*group).max(1));
            totals[total] += square;
            totals[total + 1] += square / (v.sqrt() + EPSILON).powi(2);
        }
    }
}

/// See [`crate::kernels::normalize_neurons`].
pub(in crate::kernels) fn normalize(neurons: &mut Neurons<'_>) {
    let rows = rows(neurons);
    let Neurons { u, variance, totals, length, group, .. } = neurons;
    let (variance, totals) = (variance.view(), totals.view().slice::<f64>());
    let (length, group, elements) = ((*length).max(1), (*group).max(1), rows.len() * u.shape()[1]);
    let parts = named(u.reborrow().into_rows(), &rows).collect();
    each(parts, elements, |((row, own), line)| {
        let variance = variance.row(*own);
        let mut values = vec![0.0_f64; variance.len()];
        convert::load(&variance, &mut values);
        for (j, v) in values.iter().enumerate() {
            let total = 2 * ((row * values.len() + j) / group);
            let norm = totals[total].sqrt() / totals[total + 1].sqrt().max(SMALLEST);
            let factor = norm / (v.sqrt() + EPSILON);
            run_here(
                &Decay { decay: 1.0 - factor, per_rate: false },
                Job { read: [], write: [line.part(j * length, length)] },
            );
        }
    });
}
