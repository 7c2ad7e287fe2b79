//! Passes of optimizers that keep second moments by row and by column.

#![allow(clippy::inline_always)] // every pass must be compiled inside its caller's instruction set

use super::lanes::{LANES, sums};
use super::rows::{At, RowPass};
use super::{Op, Real};

/// Numbers in both types of arithmetic: a pass works in the widest type of its operands, which only it knows.
#[derive(Clone, Debug, Default)]
pub struct Line {
    narrow: Vec<f32>,
    wide: Vec<f64>,
}

impl From<Vec<f64>> for Line {
    fn from(wide: Vec<f64>) -> Self {
        #[allow(clippy::cast_possible_truncation)] // rounding is the purpose
        let narrow = wide.iter().map(|x| *x as f32).collect();
        Self { narrow, wide }
    }
}

impl Line {
    #[inline(always)]
    fn get<C: Real>(&self) -> &[C] {
        C::pick(&self.narrow, &self.wide)
    }
}

/// The reciprocal roots of second moments of a stack of matrices: that of an element is the product of its row's and its
/// column's.
#[derive(Clone, Debug, Default)]
pub struct Scales {
    /// By row of each matrix.
    pub rows: Line,
    /// By column of each matrix.
    pub cols: Line,
    /// Rows of a matrix.
    pub height: usize,
    /// Columns of a matrix.
    pub width: usize,
}

impl Scales {
    /// The row's factor and those of the columns.
    #[inline(always)]
    fn at<C: Real>(&self, at: At) -> (C, &[C]) {
        let row = self.rows.get::<C>()[at.matrix * self.height + at.row];
        (row, &self.cols.get::<C>()[at.matrix * self.width..][at.col..self.width])
    }
}

/// Σ g² by row and column. Operand: gradient.
#[derive(Clone, Copy, Debug)]
pub struct GradientSquares {
    /// The gradient's factor: sign and unscaling.
    pub grad_factor: f64,
}

impl RowPass<1> for GradientSquares {
    const WRITES: [bool; 1] = [false];

    #[inline(always)]
    fn row<C: Real>(&self, _at: At, [g]: [&mut [C]; 1], cols: &mut [C]) -> [f64; 2] {
        let (factor, g) = (C::of(self.grad_factor), &*g);
        if cols.is_empty() {
            return [sums!(g;; j => { let g = factor * g[j]; g * g }), 0.0];
        }
        let sum = sums!(g; cols; j => {
            let square = factor * g[j] * (factor * g[j]);
            cols[j] = cols[j] + square;
            square
        });
        [sum, 0.0]
    }
}

/// As without it, and Σ x² of all. Operands: gradient, x.
impl RowPass<2> for GradientSquares {
    const WRITES: [bool; 2] = [false; 2];

    #[inline(always)]
    fn row<C: Real>(&self, at: At, [g, x]: [&mut [C]; 2], cols: &mut [C]) -> [f64; 2] {
        let x = &*x;
        let total = sums!(x;; j => x[j] * x[j]);
        let [sum, _] = RowPass::<1>::row(self, at, [g], cols);
        [sum, total]
    }
}

/// Σ u² with `u = g·scale`. Operand: gradient.
#[derive(Clone, Copy, Debug)]
pub struct UpdateSquares<'a> {
    /// The scales of every job.
    pub scales: &'a [Scales],
    /// The gradient's factor.
    pub grad_factor: f64,
}

impl RowPass<1> for UpdateSquares<'_> {
    const WRITES: [bool; 1] = [false];

    #[inline(always)]
    fn row<C: Real>(&self, at: At, [g]: [&mut [C]; 1], _cols: &mut [C]) -> [f64; 2] {
        let (row, scale) = self.scales[at.job].at::<C>(at);
        let (row, g) = (row * C::of(self.grad_factor), &*g);
        [0.0, sums!(g, scale;; j => { let u = g[j] * row * scale[j]; u * u })]
    }
}

/// `v ← v + rest·(g² + ε - v)` in float64. Operands: v, gradient.
#[derive(Clone, Copy, Debug)]
pub struct Squares {
    /// The share of the new square.
    pub rest: f64,
    /// ε.
    pub epsilon: f64,
    /// The gradient's factor.
    pub grad_factor: f64,
}

impl Op<2> for Squares {
    const WRITES: [bool; 2] = [true, false];

    #[inline(always)]
    fn apply<C: Real>(&self, _job: usize, [v, g]: [&mut [C]; 2]) {
        for (v, g) in v.iter_mut().zip(g) {
            let (old, g) = (v.wide(), self.grad_factor * g.wide());
            *v = C::of(old + self.rest * (g * g + self.epsilon - old));
        }
    }
}

/// Σ (u - m)² by row and column with `u = factor·g·scale` and m as it will be: `β₁·m + (1-β₁)·u`. Operands: gradient, m.
#[derive(Clone, Copy, Debug)]
pub struct Residual<'a> {
    /// The scales of every job.
    pub scales: &'a [Scales],
    /// The factor of every job: clipping, and the gradient's.
    pub factors: &'a [f64],
    /// β₁.
    pub beta1: f64,
}

impl RowPass<2> for Residual<'_> {
    const WRITES: [bool; 2] = [false; 2];

    #[inline(always)]
    fn row<C: Real>(&self, at: At, [g, m]: [&mut [C]; 2], cols: &mut [C]) -> [f64; 2] {
        let (row, scale) = self.scales[at.job].at::<C>(at);
        let (row, g, m) = (row * C::of(self.factors[at.job]), &*g, &*m);
        let (keep, rest) = (C::of(self.beta1), C::of(1.0 - self.beta1));
        let sum = sums!(g, scale, m; cols; j => {
            let u = g[j] * row * scale[j];
            let away = u - (keep * m[j] + rest * u);
            let square = away * away;
            cols[j] = cols[j] + square;
            square
        });
        [sum, 0.0]
    }
}

/// `x ← (1 - decay)·x - factor·g·scale`; cautious: the decay acts where `x·g ≥ 0`. Operands: x, g.
#[derive(Clone, Copy, Debug)]
pub struct ScaledApply<'a> {
    /// The scales of every job.
    pub scales: &'a [Scales],
    /// The factor of every job: rate, clipping, and the gradient's.
    pub factors: &'a [f64],
    /// The decay of every job.
    pub decays: &'a [f64],
    /// Whether the decay acts only where it points along the update.
    pub cautious: bool,
    /// β₁ where the finished step is averaged.
    pub beta1: f64,
}

impl ScaledApply<'_> {
    #[inline(always)]
    fn decayed<C: Real>(&self, x: C, step: C, decay: C) -> C {
        if self.cautious && x * step < C::default() { x } else { x - decay * x }
    }
}

impl RowPass<2> for ScaledApply<'_> {
    const WRITES: [bool; 2] = [true, false];

    #[inline(always)]
    fn row<C: Real>(&self, at: At, [x, g]: [&mut [C]; 2], _cols: &mut [C]) -> [f64; 2] {
        let (row, scale) = self.scales[at.job].at::<C>(at);
        let (row, decay) = (row * C::of(self.factors[at.job]), C::of(self.decays[at.job]));
        for ((x, g), scale) in x.iter_mut().zip(g).zip(scale) {
            let step = *g * row * *scale;
            *x = self.decayed(*x, step, decay) - step;
        }
        [0.0; 2]
    }
}

/// With `m ← β₁·m + (1-β₁)·step` in place of the step. Operands: x, g, m.
impl RowPass<3> for ScaledApply<'_> {
    const WRITES: [bool; 3] = [true, false, true];

    #[inline(always)]
    fn row<C: Real>(&self, at: At, [x, g, m]: [&mut [C]; 3], _cols: &mut [C]) -> [f64; 2] {
        let (row, scale) = self.scales[at.job].at::<C>(at);
        let (row, decay) = (row * C::of(self.factors[at.job]), C::of(self.decays[at.job]));
        let (keep, rest) = (C::of(self.beta1), C::of(1.0 - self.beta1));
        for (((x, g), m), scale) in x.iter_mut().zip(g).zip(m).zip(scale) {
            *m = keep * *m + rest * (*g * row * *scale);
            *x = self.decayed(*x, *m, decay) - *m;
        }
        [0.0; 2]
    }
}

/// `m ← β₁·m + (1-β₁)·u` with `u = factor·g·scale`, then x as in `ScaledApply` along m with scales of its own. Operands:
/// x, gradient, m.
#[derive(Clone, Copy, Debug)]
pub struct ConfidentApply<'a> {
    /// The scales and factors of u.
    pub update: Residual<'a>,
    /// The scales and factors of the step.
    pub step: ScaledApply<'a>,
}

impl RowPass<3> for ConfidentApply<'_> {
    const WRITES: [bool; 3] = [true, false, true];

    #[inline(always)]
    fn row<C: Real>(&self, at: At, [x, g, m]: [&mut [C]; 3], _cols: &mut [C]) -> [f64; 2] {
        let Self { update, step } = self;
        let (own, scale) = update.scales[at.job].at::<C>(at);
        let own = own * C::of(update.factors[at.job]);
        let (row, confidence) = step.scales[at.job].at::<C>(at);
        let (row, decay) = (row * C::of(step.factors[at.job]), C::of(step.decays[at.job]));
        let (keep, rest) = (C::of(update.beta1), C::of(1.0 - update.beta1));
        for ((((x, g), m), scale), confidence) in x.iter_mut().zip(g).zip(m).zip(scale).zip(confidence) {
            *m = keep * *m + rest * (*g * own * *scale);
            let along = *m * row * *confidence;
            *x = step.decayed(*x, along, decay) - along;
        }
        [0.0; 2]
    }
}
