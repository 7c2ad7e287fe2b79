//! Normalization by neuron on the CPU.

use super::Neurons;
use crate::error::Result;
use crate::tensor::MatrixView;
use crate::threads;

/// Added to the root of the running mean square.
const EPSILON: f64 = 1e-8;
/// The smallest norm that is divided by.
const SMALLEST: f64 = 1e-8;
/// Elements from which rows are spread over threads.
const PARALLEL: usize = 1 << 16;
/// Rows that one task handles.
const TOGETHER: usize = 16;

/// The rows of the matrix that take part, each with the row of V that is its own.
fn rows(neurons: &Neurons) -> Vec<(usize, usize)> {
    let all = neurons.u.shape()[0];
    match &neurons.chosen {
        Some(chosen) => chosen.pairs(all).into_iter().map(|(own, row)| (row, own)).collect(),
        None => (0..all).map(|row| (row, row)).collect(),
    }
}

/// Does something for every row that takes part, and the row of V that is its own.
fn each_row(u: &MatrixView, rows: &[(usize, usize)], work: impl Fn(usize, usize) + Sync) {
    let one = |&(row, own): &(usize, usize)| work(row, own);
    if rows.len() * u.shape()[1] < PARALLEL {
        rows.iter().for_each(one);
    } else {
        threads::each(rows.len().div_ceil(TOGETHER), |i| {
            rows.chunks(TOGETHER).skip(i).take(1).flatten().for_each(one);
        });
    }
}

/// See [`crate::kernels::neuron_squares`].
pub(in crate::kernels) fn squares(neurons: &Neurons) -> Result<()> {
    let (u, squares) = (&neurons.u, &neurons.squares);
    let length = neurons.length.max(1);
    let per_row = u.shape()[1] / length;
    squares.clear()?;
    each_row(u, &rows(neurons), |row, _| {
        let line = u.row(row);
        for j in 0..per_row {
            let sum = crate::kernels::cpu::reduce::sum_of_squares(&line.part(j * length, length));
            // SAFETY: the caller owns both for this stage; every neuron is written by one task.
            unsafe { squares.part(row * per_row + j, 1).slice::<f64>()[0] = sum };
        }
    });
    Ok(())
}

/// See [`crate::kernels::neuron_variance`].
pub(in crate::kernels) fn variance(beta2: f64, length: f64, neurons: &Neurons) {
    // SAFETY: the caller owns all of them for this stage, and they do not overlap.
    let (squares, totals) = unsafe { (neurons.squares.slice::<f64>(), neurons.totals.slice::<f64>()) };
    totals.fill(0.0);
    let mut values = Vec::new();
    for (row, own) in rows(neurons) {
        let variance = neurons.variance.row(own);
        let per_row = variance.len();
        values.resize(per_row, 0.0_f64);
        crate::kernels::cpu::convert::load(&variance, &mut values);
        for (j, v) in values.iter_mut().enumerate() {
            let mean = squares[row * per_row + j] / length;
            *v += (1.0 - beta2) * (mean - *v);
        }
        crate::kernels::cpu::convert::store(&values, &variance);
        // What was stored is what the update is divided by.
        crate::kernels::cpu::convert::load(&variance, &mut values);
        for (j, v) in values.iter().enumerate() {
            let (neuron, square) = (row * per_row + j, squares[row * per_row + j]);
            let total = 2 * (neuron / neurons.group.max(1));
            totals[total] += square;
            totals[total + 1] += square / (v.sqrt() + EPSILON).powi(2);
        }
    }
}

/// See [`crate::kernels::normalize_neurons`].
pub(in crate::kernels) fn normalize(neurons: &Neurons) {
    let (u, length) = (&neurons.u, neurons.length.max(1));
    each_row(u, &rows(neurons), |row, own| {
        // SAFETY: the caller owns it for this stage; it is only read here.
        let totals = unsafe { neurons.totals.slice::<f64>() };
        let (line, variance) = (u.row(row), neurons.variance.row(own));
        let mut values = vec![0.0_f64; variance.len()];
        crate::kernels::cpu::convert::load(&variance, &mut values);
        for (j, v) in values.iter().enumerate() {
            let total = 2 * ((row * values.len() + j) / neurons.group.max(1));
            let norm = totals[total].sqrt() / totals[total + 1].sqrt().max(SMALLEST);
            let factor = norm / (v.sqrt() + EPSILON);
            crate::kernels::cpu::run_here(
                &crate::kernels::ops::apply::Decay { decay: 1.0 - factor, per_rate: false },
                [line.part(j * length, length)],
            );
        }
    });
}
