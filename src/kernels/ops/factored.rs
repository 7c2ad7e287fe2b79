//! Passes of optimizers that keep second moments by row and by column.

#![allow(clippy::inline_always)] // every pass must be compiled inside its caller's instruction set

use super::factors::Factors;
use crate::kernels::cpu::Real;
use crate::kernels::cpu::Slot;
use crate::kernels::cpu::lanes::{LANES, sums};
use crate::kernels::cpu::reduce::values;
use crate::kernels::cpu::rows::{At, RowPass};
use crate::kernels::cuda_call::{Kernel, RowPassCall, ScaleMoments};
use crate::kernels::ops::declare::{kernel, ops};
use crate::tensor::{Device, FlatView};

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
    /// No numbers.
    const NONE: Self = Self { narrow: Vec::new(), wide: Vec::new() };

    #[inline(always)]
    fn get<C: Real>(&self) -> &[C] {
        C::pick(&self.narrow, &self.wide)
    }
}

/// The reciprocal roots of second moments of a stack of matrices: that of an element is the product of its row's and its
/// column's.
#[derive(Clone, Debug)]
pub struct Scales<'a> {
    /// By row of each matrix.
    rows: Line,
    /// By column of each matrix.
    cols: Line,
    /// Rows of a matrix.
    height: usize,
    /// Columns of a matrix.
    width: usize,
    /// On a device the second moments themselves.
    moments: ScaleMoments<'a>,
}

impl<'a> Scales<'a> {
    /// From R, C and S: `√S / (√R·√C)`.
    #[must_use]
    pub fn of(moments: [FlatView<'a>; 3]) -> Self {
        if moments[1].device() != Device::Cpu {
            return Self { moments, ..Self::NONE };
        }
        let [rows, cols, all] = moments.map(|flat| values(&flat));
        let [mut rows, cols] = [rows, cols].map(roots);
        let [height, width] = [rows.len(), cols.len()].map(|n| n.checked_div(all.len()).unwrap_or(0));
        for (rows, all) in rows.chunks_mut(height.max(1)).zip(&all) {
            for row in rows {
                *row *= all.sqrt();
            }
        }
        Self { rows: rows.into(), cols: cols.into(), height, width, moments }
    }

    /// From second moments by element.
    #[must_use]
    pub fn by_element(moments: FlatView<'a>) -> Self {
        let all = [FlatView::EMPTY, moments, FlatView::EMPTY];
        if moments.device() != Device::Cpu {
            return Self { moments: all, ..Self::NONE };
        }
        let cols = roots(values(&moments));
        let width = cols.len();
        Self { rows: vec![1.0].into(), cols: cols.into(), height: 1, width, moments: all }
    }

    /// Scales that change none of these elements.
    #[must_use]
    pub fn ones(elements: usize, device: Device) -> Self {
        if device != Device::Cpu {
            return Self::NONE;
        }
        let (line, width) = (|count| vec![1.0; count].into(), elements);
        Self { rows: line(1), cols: line(width), height: 1, width, ..Self::NONE }
    }

    /// No scales.
    const NONE: Self =
        Self { rows: Line::NONE, cols: Line::NONE, height: 0, width: 0, moments: [FlatView::EMPTY; 3] };

    /// The row's factor and those of the columns.
    #[inline(always)]
    fn at<C: Real>(&self, at: At) -> (C, &[C]) {
        let row = self.rows.get::<C>()[at.matrix * self.height + at.row];
        (row, &self.cols.get::<C>()[at.matrix * self.width..][at.col..self.width])
    }
}

/// Moments from which a device computes scales.
fn moments<'a>(scales: &[Scales<'a>]) -> Vec<ScaleMoments<'a>> {
    scales.iter().map(|scales| scales.moments).collect()
}

fn roots(values: Vec<f64>) -> Vec<f64> {
    values.into_iter().map(|v| 1.0 / v.sqrt()).collect()
}

ops! {
    cuda "factored.cuh" also [&GRADIENT, &GRADIENT_AND_PARAMETER, &UPDATE, &RESIDUAL, &SCALED, &AVERAGED, &CONFIDENT];

    /// Σ g² by row and column. Operand: gradient.
    #[derive(Clone, Copy, Debug)]
    pub struct GradientSquares {
        /// The gradient's factor: sign and unscaling.
        grad_factor: f64,
    }

    /// Scalars of [`Residual`].
    struct ResidualScalars {
        /// β₁.
        beta1: f64,
    }

    /// Scalars of [`ScaledApply`].
    struct ScaledApplyScalars {
        /// True if the decay acts only where it points along the update.
        cautious: bool,
        /// β₁ where the finished step is averaged.
        beta1: f64,
    }

    /// Scalars of [`ConfidentApply`].
    struct ConfidentApplyScalars {
        /// β₁.
        beta1: f64,
        /// True if the decay acts only where it points along the step.
        cautious: bool,
        /// Its rate.
        rate: f64 * lr,
        /// `lr · weight_decay`.
        decay: f64 * lr,
    }
}

const GRADIENT: Kernel = kernel!(Row gradient_squares = GradientSquares told GradientSquares [g: read plain]);
const GRADIENT_AND_PARAMETER: Kernel = kernel!(Row gradient_and_parameter_squares = GradientAndParameterSquares told GradientSquares
        [g: read plain, x: read param]);
const UPDATE: Kernel = kernel!(Row update_squares = UpdateSquares told GradientSquares [g: read plain]);
const RESIDUAL: Kernel =
    kernel!(Row residual = Residual told ResidualScalars [g: read plain, m: read signed]);
const SCALED: Kernel =
    kernel!(Row scaled_apply = ScaledApply told ScaledApplyScalars [x: update param, g: read plain]);
const AVERAGED: Kernel = kernel!(Row scaled_apply_averaged = ScaledApplyAveraged told ScaledApplyScalars
    [x: update param, g: read plain, m: update signed]);
const CONFIDENT: Kernel = kernel!(Row confident_apply = ConfidentApply told ConfidentApplyScalars
    [x: update param, g: read plain, m: update signed]);

impl RowPass<1, 1, 0> for GradientSquares {
    const ORDER: [Slot; 1] = GRADIENT.order();

    #[inline(always)]
    fn row<C: Real>(&self, _at: At, [g]: [&[C]; 1], []: [&mut [C]; 0], cols: &mut [C]) -> [f64; 2] {
        let factor = C::of(self.grad_factor);
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

    fn on_cuda(&self) -> Option<RowPassCall<'_>> {
        Some(self.told(&GRADIENT).over_rows([Vec::new(), Vec::new()]))
    }
}

/// As without it, and Σ x² of all. Operands: gradient, x.
impl RowPass<2, 2, 0> for GradientSquares {
    const ORDER: [Slot; 2] = GRADIENT_AND_PARAMETER.order();

    #[inline(always)]
    fn row<C: Real>(&self, at: At, [g, x]: [&[C]; 2], []: [&mut [C]; 0], cols: &mut [C]) -> [f64; 2] {
        let total = sums!(x;; j => x[j] * x[j]);
        let [sum, _] = RowPass::<1, 1, 0>::row(self, at, [g], [], cols);
        [sum, total]
    }

    fn on_cuda(&self) -> Option<RowPassCall<'_>> {
        Some(self.told(&GRADIENT_AND_PARAMETER).over_rows([Vec::new(), Vec::new()]))
    }
}

/// Σ u² with `u = g·scale`. Operand: gradient.
#[derive(Clone, Copy, Debug)]
pub struct UpdateSquares<'a> {
    /// The scales of every job.
    pub scales: &'a [Scales<'a>],
    /// The gradient's factor.
    pub grad_factor: f64,
}

impl RowPass<1, 1, 0> for UpdateSquares<'_> {
    const ORDER: [Slot; 1] = UPDATE.order();

    #[inline(always)]
    fn row<C: Real>(&self, at: At, [g]: [&[C]; 1], []: [&mut [C]; 0], _cols: &mut [C]) -> [f64; 2] {
        let (row, scale) = self.scales[at.job].at::<C>(at);
        let row = row * C::of(self.grad_factor);
        [0.0, sums!(g, scale;; j => { let u = g[j] * row * scale[j]; u * u })]
    }

    fn on_cuda(&self) -> Option<RowPassCall<'_>> {
        let scalars = GradientSquares { grad_factor: self.grad_factor };
        Some(scalars.told(&UPDATE).over_rows([moments(self.scales), Vec::new()]))
    }
}

/// Σ (u - m)² by row and column with `u = factor·g·scale` and m as it will be: `β₁·m + (1-β₁)·u`. Operands: gradient, m.
#[derive(Clone, Copy, Debug)]
pub struct Residual<'a> {
    /// The scales of every job.
    pub scales: &'a [Scales<'a>],
    /// Of every job first the factor: clipping, and the gradient's.
    pub factors: &'a Factors<2>,
    /// β₁.
    pub beta1: f64,
}

impl RowPass<2, 2, 0> for Residual<'_> {
    const ORDER: [Slot; 2] = RESIDUAL.order();

    #[inline(always)]
    fn row<C: Real>(&self, at: At, [g, m]: [&[C]; 2], []: [&mut [C]; 0], cols: &mut [C]) -> [f64; 2] {
        let (row, scale) = self.scales[at.job].at::<C>(at);
        let row = row * C::of(self.factors.of(at.job)[0]);
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

    fn on_cuda(&self) -> Option<RowPassCall<'_>> {
        let pass = ResidualScalars { beta1: self.beta1 }.told(&RESIDUAL).reading(self.factors);
        Some(pass.over_rows([moments(self.scales), Vec::new()]))
    }
}

/// `x ← (1 - decay)·x - factor·g·scale`; cautious: the decay acts where `x·g ≥ 0`. Operands: x, g.
#[derive(Clone, Copy, Debug)]
pub struct ScaledApply<'a> {
    /// The scales of every job.
    pub scales: &'a [Scales<'a>],
    /// Of every job the factor (rate, clipping, and the gradient's) and the decay.
    pub factors: &'a Factors<2>,
    /// True if the decay acts only where it points along the update.
    pub cautious: bool,
    /// β₁ where the finished step is averaged.
    pub beta1: f64,
}

#[inline(always)]
fn decayed<C: Real>(cautious: bool, x: C, step: C, decay: C) -> C {
    if cautious && x * step < C::default() { x } else { x - decay * x }
}

impl ScaledApply<'_> {
    fn pass(&self, kernel: &'static Kernel) -> RowPassCall<'_> {
        let scalars = ScaledApplyScalars { cautious: self.cautious, beta1: self.beta1 };
        scalars.told(kernel).reading(self.factors).over_rows([moments(self.scales), Vec::new()])
    }
}

impl RowPass<2, 1, 1> for ScaledApply<'_> {
    const ORDER: [Slot; 2] = SCALED.order();

    #[inline(always)]
    fn row<C: Real>(&self, at: At, [g]: [&[C]; 1], [x]: [&mut [C]; 1], _cols: &mut [C]) -> [f64; 2] {
        let (row, scale) = self.scales[at.job].at::<C>(at);
        let [factor, decay] = self.factors.of(at.job);
        let (row, decay) = (row * C::of(factor), C::of(decay));
        for ((x, g), scale) in x.iter_mut().zip(g).zip(scale) {
            let step = *g * row * *scale;
            *x = decayed(self.cautious, *x, step, decay) - step;
        }
        [0.0; 2]
    }

    fn on_cuda(&self) -> Option<RowPassCall<'_>> {
        Some(self.pass(&SCALED))
    }
}

/// With `m ← β₁·m + (1-β₁)·step` in place of the step. Operands: x, g, m.
impl RowPass<3, 1, 2> for ScaledApply<'_> {
    const ORDER: [Slot; 3] = AVERAGED.order();

    #[inline(always)]
    fn row<C: Real>(&self, at: At, [g]: [&[C]; 1], [x, m]: [&mut [C]; 2], _cols: &mut [C]) -> [f64; 2] {
        let (row, scale) = self.scales[at.job].at::<C>(at);
        let [factor, decay] = self.factors.of(at.job);
        let (row, decay) = (row * C::of(factor), C::of(decay));
        let (keep, rest) = (C::of(self.beta1), C::of(1.0 - self.beta1));
        for (((x, g), m), scale) in x.iter_mut().zip(g).zip(m).zip(scale) {
            *m = keep * *m + rest * (*g * row * *scale);
            *x = decayed(self.cautious, *x, *m, decay) - *m;
        }
        [0.0; 2]
    }

    fn on_cuda(&self) -> Option<RowPassCall<'_>> {
        Some(self.pass(&AVERAGED))
    }
}

/// `m ← β₁·m + (1-β₁)·u` with `u = factor·g·scale`, then x as in `ScaledApply` along m with scales of its own. Operands:
/// x, gradient, m.
#[derive(Clone, Copy, Debug)]
pub struct ConfidentApply<'a> {
    /// The scales and factors of u.
    pub update: Residual<'a>,
    /// The scales of the step along m.
    pub scales: &'a [Scales<'a>],
    /// Its rate.
    pub rate: f64,
    /// `lr · weight_decay`.
    pub decay: f64,
    /// True if the decay acts only where it points along the step.
    pub cautious: bool,
}

impl RowPass<3, 1, 2> for ConfidentApply<'_> {
    const ORDER: [Slot; 3] = CONFIDENT.order();

    #[inline(always)]
    fn row<C: Real>(&self, at: At, [g]: [&[C]; 1], [x, m]: [&mut [C]; 2], _cols: &mut [C]) -> [f64; 2] {
        let Self { update, cautious, .. } = *self;
        let (own, scale) = update.scales[at.job].at::<C>(at);
        let own = own * C::of(update.factors.of(at.job)[0]);
        let (row, confidence) = self.scales[at.job].at::<C>(at);
        let (row, decay) = (row * C::of(self.rate), C::of(self.decay));
        let (keep, rest) = (C::of(update.beta1), C::of(1.0 - update.beta1));
        for ((((x, g), m), scale), confidence) in x.iter_mut().zip(g).zip(m).zip(scale).zip(confidence) {
            *m = keep * *m + rest * (*g * own * *scale);
            let along = *m * row * *confidence;
            *x = decayed(cautious, *x, along, decay) - along;
        }
        [0.0; 2]
    }

    fn on_cuda(&self) -> Option<RowPassCall<'_>> {
        let Self { cautious, rate, decay, .. } = *self;
        let scalars = ConfidentApplyScalars { beta1: self.update.beta1, cautious, rate, decay };
        let pass = scalars.told(&CONFIDENT).reading(self.update.factors);
        Some(pass.over_rows([self.update.scales, self.scales].map(moments)))
    }
}
