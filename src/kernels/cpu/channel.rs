//! Updates whose rows or columns ("channels") have factors of their own.

use rayon::prelude::*;

use super::convert::{self, Real};
use crate::batch::{Area, Slab};
use crate::dtype::DType;
use crate::threads;

/// Elements from which rows are spread over threads.
const PARALLEL: usize = 1 << 16;

/// A factor for each row or each column of a matrix.
#[derive(Clone, Debug)]
pub struct Channels {
    /// The factors.
    pub factors: Vec<f64>,
    /// Whether they are those of the rows.
    pub rows: bool,
}

/// `x ← x - rate·f·g` with decay before or after it.
#[derive(Clone, Copy, Debug)]
pub struct ChannelStep {
    /// Factor of the update: also its sign.
    pub rate: f64,
    /// `lr · weight_decay`.
    pub decay: f64,
    /// Whether the decay acts only where it points along the update.
    pub cautious: bool,
    /// Whether the decay comes after the update.
    pub late: bool,
}

impl Channels {
    /// `Σ (f·g)²`, added row by row.
    #[must_use]
    pub fn sum_of_squares(&self, g: &Area) -> f64 {
        let sums: Vec<f64> = each_row(g, |row| {
            let mut wide = [0.0_f64; super::TILE];
            let mut sum = 0.0;
            let line = g.row(row);
            for start in (0..line.len()).step_by(super::TILE) {
                let tile = line.part(start, super::TILE);
                let wide = &mut wide[..tile.len()];
                convert::load(&tile, wide);
                sum += if self.rows {
                    wide.iter().map(|x| x * x).sum::<f64>()
                } else {
                    wide.iter().zip(&self.factors[start..]).map(|(x, f)| (f * x) * (f * x)).sum::<f64>()
                };
            }
            if self.rows { sum * self.factors[row] * self.factors[row] } else { sum }
        });
        sums.iter().sum()
    }

    /// Takes a step along `f·g`.
    pub fn step(&self, step: &ChannelStep, x: &Area, g: &Area) {
        if x.dtype() == DType::F64 || g.dtype() == DType::F64 {
            self.step_in::<f64>(step, x, g);
        } else {
            self.step_in::<f32>(step, x, g);
        }
    }

    fn step_in<C: Real>(&self, step: &ChannelStep, x: &Area, g: &Area) {
        let factors: Vec<C> = self.factors.iter().map(|f| C::of(step.rate * f)).collect();
        each_row(x, |row| {
            let (mut xs, mut gs) = ([C::default(); super::TILE], [C::default(); super::TILE]);
            let (to, from) = (x.row(row), g.row(row));
            for start in (0..to.len()).step_by(super::TILE) {
                let (tile, grads) = (to.part(start, super::TILE), from.part(start, super::TILE));
                let (xs, gs) = (&mut xs[..tile.len()], &mut gs[..tile.len()]);
                convert::load(&tile, xs);
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
                convert::store(xs, &tile);
            }
        });
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

/// What `work` returns of every row.
fn each_row<T: Send>(area: &Area, work: impl Fn(usize) -> T + Sync) -> Vec<T> {
    let [rows, cols] = area.shape();
    if rows * cols < PARALLEL || threads::get() == 1 {
        return (0..rows).map(work).collect();
    }
    threads::run(|| (0..rows).into_par_iter().with_min_len(16).map(&work).collect())
}

/// The sum of squares of each row, or of each column.
#[must_use]
pub fn channel_squares(x: &Slab, [rows, cols]: [usize; 2], by_row: bool) -> Vec<f64> {
    let mut sums = vec![0.0; if by_row { rows } else { cols }];
    let mut wide = vec![0.0_f64; cols];
    for row in 0..rows {
        convert::load(&x.part(row * cols, cols), &mut wide);
        if by_row {
            sums[row] = wide.iter().map(|x| x * x).sum();
        } else {
            sums.iter_mut().zip(&wide).for_each(|(sum, x)| *sum += x * x);
        }
    }
    sums
}
