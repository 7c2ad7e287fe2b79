//! Updates whose rows or columns ("channels") have factors of their own.

use super::{ChannelStep, Channels, GROWTH, Limited, NEGLIGIBLE, Projected, TINY};
use crate::kernels::cpu::TILE;
use crate::kernels::cpu::reduce::{set_values, values};
use crate::kernels::cpu::{Real, convert};
use crate::spec::Side;
use crate::tensor::{DType, FlatView, FlatViewMut, MatrixView, MatrixViewMut};
use crate::threads;

/// Elements from which rows are spread over threads.
const PARALLEL: usize = 1 << 16;

/// A factor for each row or each column of a matrix.
#[derive(Clone, Debug)]
pub(in crate::kernels) struct Factors {
    factors: Vec<f64>,
    /// True if the factors are those of the rows.
    rows: bool,
}

impl Factors {
    /// The factors of these channels.
    pub(in crate::kernels) fn of(channels: &Channels<'_>) -> Self {
        let (factors, rows) = (channels.factors.view().numbers(), channels.side == Side::Rows);
        if let [n, r, ..] = *channels.norms.view().numbers() {
            return Self { factors: vec![n.sqrt() / (r.sqrt() + TINY); factors.len()], rows };
        }
        Self { factors: factors.to_vec(), rows }
    }

    /// `Σ (f·g)²`, added row by row.
    pub(in crate::kernels) fn sum_of_squares(&self, g: &MatrixView<'_>) -> f64 {
        let [rows, cols] = g.shape();
        let one = |row: usize| {
            let mut wide = [0.0_f64; TILE];
            let mut sum = 0.0;
            let line = g.row(row);
            for start in (0..line.len()).step_by(TILE) {
                let tile = line.part(start, TILE);
                let wide = &mut wide[..tile.len()];
                convert::load(&tile, wide);
                sum += if self.rows {
                    wide.iter().map(|x| x * x).sum::<f64>()
                } else {
                    wide.iter().zip(&self.factors[start..]).map(|(x, f)| (f * x) * (f * x)).sum::<f64>()
                };
            }
            if self.rows { sum * self.factors[row] * self.factors[row] } else { sum }
        };
        let sums =
            if rows * cols < PARALLEL { (0..rows).map(one).collect() } else { threads::map(rows, one) };
        sums.iter().sum()
    }

    /// Takes a step along `f·g`.
    fn step(&self, step: &ChannelStep, rate: f64, x: MatrixViewMut<'_>, g: &MatrixView<'_>) {
        if x.dtype() == DType::F64 || g.dtype() == DType::F64 {
            self.step_in::<f64>(step, rate, x, g);
        } else {
            self.step_in::<f32>(step, rate, x, g);
        }
    }

    fn step_in<C: Real>(&self, step: &ChannelStep, rate: f64, x: MatrixViewMut<'_>, g: &MatrixView<'_>) {
        let factors: Vec<C> = self.factors.iter().map(|f| C::of(rate * f)).collect();
        let [rows, cols] = x.shape();
        let one = |row: usize, to: &mut FlatViewMut<'_>| self.step_row(step, &factors, row, to, &g.row(row));
        if rows * cols < PARALLEL {
            x.into_rows().enumerate().for_each(|(row, mut to)| one(row, &mut to));
            return;
        }
        let mut lines: Vec<_> = x.into_rows().collect();
        threads::chunks(&mut lines, 1, |row, lines| lines.iter_mut().for_each(|to| one(row, to)));
    }

    fn step_row<C: Real>(
        &self,
        step: &ChannelStep,
        factors: &[C],
        row: usize,
        to: &mut FlatViewMut<'_>,
        from: &FlatView<'_>,
    ) {
        let (mut xs, mut gs) = ([C::default(); TILE], [C::default(); TILE]);
        for start in (0..to.len()).step_by(TILE) {
            let (mut tile, grads) = (to.part(start, TILE), from.part(start, TILE));
            let (xs, gs) = (&mut xs[..tile.len()], &mut gs[..tile.len()]);
            convert::load(&tile.view(), xs);
            convert::load(&grads, gs);
            if self.rows {
                let factor = factors[row];
                for g in gs.iter_mut() {
                    *g = factor * *g;
                }
            } else {
                for (g, f) in gs.iter_mut().zip(&factors[start..]) {
                    *g = *f * *g;
                }
            }
            step.apply(xs, gs);
            convert::store(xs, &mut tile);
        }
    }
}

impl ChannelStep {
    fn apply<C: Real>(&self, x: &mut [C], u: &[C]) {
        let (keep, zero) = (C::of(1.0 - self.decay), C::default());
        let cautious = self.cautious && self.decay != 0.0;
        for (x, u) in x.iter_mut().zip(u) {
            let y = if self.late { *x - *u } else { *x };
            let kept = if cautious && y * *u < zero { y } else { y * keep };
            *x = if self.late { kept } else { kept - *u };
        }
    }
}

/// The sum of squares of each row, or of each column.
pub(in crate::kernels) fn channel_squares(x: &MatrixView<'_>, by_row: bool) -> Vec<f64> {
    let [rows, cols] = x.shape();
    let mut sums = vec![0.0; if by_row { rows } else { cols }];
    let mut wide = vec![0.0_f64; cols];
    for row in 0..rows {
        convert::load(&x.row(row), &mut wide);
        if by_row {
            sums[row] = wide.iter().map(|x| x * x).sum();
        } else {
            sums.iter_mut().zip(&wide).for_each(|(sum, x)| *sum += x * x);
        }
    }
    sums
}

/// See [`crate::kernels::channel_ratios`].
pub(in crate::kernels) fn ratios(grad_factor: f64, one: &mut Projected<'_>) {
    let Channels { side, factors, norms } = &mut one.channels;
    let after = channel_squares(&one.low.view(), *side == Side::Rows);
    let factors = factors.numbers();
    let low = factors.iter().map(|x| grad_factor.abs() * x.sqrt());
    if norms.is_empty() {
        let ratios: Vec<f64> = after.iter().zip(low).map(|(n, r)| n.sqrt() / (r + TINY)).collect();
        factors.copy_from_slice(&ratios);
    } else {
        norms.numbers().copy_from_slice(&[after.iter().sum::<f64>(), low.map(|x| x * x).sum()]);
    }
}

/// See [`crate::kernels::channel_steps`].
pub(in crate::kernels) fn limited_step(step: &ChannelStep, one: &mut Limited<'_>) {
    let norm = one.total.numbers()[0].sqrt() * step.grad_factor.abs();
    let last = values(&one.last.view())[0];
    // The first nonzero update starts the limiter, whatever the number of the step. So does one compared with which the last
    // is negligible. A gradient of zero says nothing about the next one. Comparisons with NaN are false.
    let growth = norm / (last + TINY);
    let limiter = if last <= NEGLIGIBLE * norm || growth < GROWTH { 1.0 } else { growth / GROWTH };
    if norm != 0.0 {
        set_values(&[norm / limiter], one.last.reborrow());
    }
    let rate = one.rate / limiter * step.grad_factor;
    Factors::of(&one.channels).step(step, rate, one.param.reborrow(), &one.grad);
}
