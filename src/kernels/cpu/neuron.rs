//! Normalization by neuron: runs of equal length inside the rows of a matrix, with one running number each.
//!
//! Neurons are numbered through the matrix in row-major order; `group` of them share a norm.

use rayon::prelude::*;

use crate::batch::{Area, Slab};
use crate::threads;

/// Added to the root of the running mean square.
const EPSILON: f64 = 1e-8;
/// The smallest norm that is divided by.
const SMALLEST: f64 = 1e-8;
/// Elements from which rows are spread over threads.
const PARALLEL: usize = 1 << 16;

/// Does something for every row in `rows`, with its position among them.
fn each_row(u: &Area, rows: &[usize], work: impl Fn(usize, usize) + Sync) {
    if rows.len() * u.shape()[1] < PARALLEL || threads::get() == 1 {
        rows.iter().enumerate().for_each(|(at, row)| work(at, *row));
    } else {
        threads::run(|| {
            rows.par_iter().enumerate().with_min_len(16).for_each(|(at, row)| work(at, *row));
        });
    }
}

/// `squares[n] = Σ u²` over neuron n of `length` elements, for the neurons of `rows`. `squares` is float64.
pub fn neuron_squares(u: &Area, rows: &[usize], length: usize, squares: &Slab) {
    let length = length.max(1);
    let per_row = u.shape()[1] / length;
    each_row(u, rows, |_, row| {
        let line = u.row(row);
        for j in 0..per_row {
            let sum = super::reduce::sum_of_squares(&line.part(j * length, length));
            // SAFETY: the caller owns both for this stage; every neuron is written by one task.
            unsafe { squares.part(row * per_row + j, 1).slice::<f64>()[0] = sum };
        }
    });
}

/// `V ← V + (1-β₂)(s/length - V)` with s the sum of squares of the neuron.
#[derive(Clone, Copy, Debug)]
pub struct NeuronVariance {
    /// β₂.
    pub beta2: f64,
    /// Elements of a whole neuron.
    pub length: usize,
    /// Neurons that share a norm.
    pub group: usize,
}

impl NeuronVariance {
    /// Updates `variances`, the V of the neurons of each of `rows`, and leaves in `totals` for each group the sums
    /// over these neurons of s and of s / (√V + 1e-8)². `squares` and `totals` are float64.
    pub fn run(&self, squares: &Slab, rows: &[usize], variances: &[Slab], totals: &Slab) {
        // SAFETY: the caller owns all of them for this stage, and they do not overlap.
        let (squares, totals) = unsafe { (squares.slice::<f64>(), totals.slice::<f64>()) };
        totals.fill(0.0);
        let mut values = Vec::new();
        for (row, variance) in rows.iter().zip(variances) {
            let per_row = variance.len();
            values.resize(per_row, 0.0_f64);
            super::convert::load(variance, &mut values);
            for (j, v) in values.iter_mut().enumerate() {
                let square = squares[row * per_row + j];
                #[allow(clippy::cast_precision_loss)] // a matrix side
                let mean = square / self.length.max(1) as f64;
                *v += (1.0 - self.beta2) * (mean - *v);
            }
            super::convert::store(&values, variance);
            // What was stored is what the update is divided by.
            super::convert::load(variance, &mut values);
            for (j, v) in values.iter().enumerate() {
                let (neuron, square) = (row * per_row + j, squares[row * per_row + j]);
                let total = 2 * (neuron / self.group.max(1));
                totals[total] += square;
                totals[total + 1] += square / (v.sqrt() + EPSILON).powi(2);
            }
        }
    }
}

/// Multiplies every neuron of `rows` by `(√a / max(√b, 1e-8)) / (√V + 1e-8)` with a and b the totals of its group.
pub fn normalize_neurons(
    u: &Area,
    rows: &[usize],
    length: usize,
    group: usize,
    variances: &[Slab],
    totals: &Slab,
) {
    let length = length.max(1);
    each_row(u, rows, |at, row| {
        // SAFETY: the caller owns it for this stage; it is only read here.
        let totals = unsafe { totals.slice::<f64>() };
        let (line, variance) = (u.row(row), &variances[at]);
        let mut values = vec![0.0_f64; variance.len()];
        super::convert::load(variance, &mut values);
        for (j, v) in values.iter().enumerate() {
            let total = 2 * ((row * values.len() + j) / group.max(1));
            let norm = totals[total].sqrt() / totals[total + 1].sqrt().max(SMALLEST);
            let factor = norm / (v.sqrt() + EPSILON);
            super::run_here(
                &super::elementwise::Decay { decay: 1.0 - factor },
                [line.part(j * length, length)],
            );
        }
    });
}
