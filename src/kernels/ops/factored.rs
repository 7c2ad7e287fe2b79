//! Passes of optimizers that keep second moments by row and by column.

#![allow(clippy::inline_always)] // every pass must be compiled inside its caller's instruction set

use std::sync::OnceLock;

use super::factors::Factors;
use crate::kernels::cpu::Real;
use crate::kernels::cpu::Slot;
use crate::kernels::cpu::convert::load;
use crate::kernels::cpu::isa;
use crate::kernels::cpu::lanes::{LANES, sums};
use crate::kernels::cpu::reduce::values;
use crate::kernels::cpu::rows::{At, RowPass, SCALES};
use crate::kernels::cuda_call::{Kernel, RowPassCall, ScaleMoments};
use crate::kernels::ops::declare::{kernel, ops};
use crate::tensor::{DType, Device, FlatView};

/// For each number of as many equal parts as there are factors the part's factor over the number's root. A pass works in
/// the widest type of its operands, which only it knows: computed when it is first asked for in a type.
#[derive(Clone, Debug)]
pub struct Line<'a> {
    numbers: FlatView<'a>,
    factors: Vec<f64>,
    narrow: OnceLock<Vec<f32>>,
    wide: OnceLock<Vec<f64>>,
}

impl<'a> Line<'a> {
    /// No numbers.
    const fn none() -> Self {
        Self::of(FlatView::EMPTY, Vec::new())
    }

    const fn of(numbers: FlatView<'a>, factors: Vec<f64>) -> Self {
        Self { numbers, factors, narrow: OnceLock::new(), wide: OnceLock::new() }
    }

    fn ones(count: usize) -> Self {
        Self { narrow: vec![1.0; count].into(), wide: vec![1.0; count].into(), ..Self::none() }
    }

    #[cold]
    #[inline(never)]
    fn computed<C: Real>(&self) -> Vec<C> {
        isa::vectorised::<C, _>(Roots(self, Vec::with_capacity(self.numbers.len())))
    }

    #[inline(always)]
    fn get<C: Real>(&self) -> &[C] {
        if C::DTYPE == DType::F64 {
            C::pick(&[], self.wide.get_or_init(|| self.computed::<f64>()))
        } else {
            C::pick(self.narrow.get_or_init(|| self.computed::<f32>()), &[])
        }
    }
}

/// Elements that are worked on at once.
const TILE: usize = 512;
/// Numbers that float32 has, with their neighbours, to full precision.
const NORMAL: std::ops::Range<f64> = 1e-36..1e36;

/// Numbers of a line in one type, which are computed.
struct Roots<'l, 'a, C>(&'l Line<'a>, Vec<C>);

impl<T: Real> isa::Work for Roots<'_, '_, T> {
    type Out = Vec<T>;

    #[inline(always)]
    fn run<C: Real>(self) -> Vec<T> {
        let Self(Line { numbers, factors, .. }, mut roots) = self;
        let each = numbers.len().checked_div(factors.len()).unwrap_or(0);
        let mut tile = [0.0_f64; TILE];
        for (part, factor) in factors.iter().enumerate() {
            for start in (0..each).step_by(TILE) {
                let tile = &mut tile[..TILE.min(each - start)];
                load(&numbers.part(part * each + start, tile.len()), tile);
                // Roots and quotients of float64 take four times as long.
                let are_normal = tile.iter().fold(true, |all, x| all & NORMAL.contains(x));
                if are_normal && NORMAL.contains(factor) {
                    roots.extend(tile.iter().map(|x| T::of(*factor) / T::of(*x).sqrt()));
                } else {
                    roots.extend(tile.iter().map(|x| T::of(factor / x.sqrt())));
                }
            }
        }
        roots
    }
}

/// The reciprocal roots of second moments of a stack of matrices: that of an element is the product of its row's and its
/// column's.
#[derive(Clone, Debug)]
pub struct Scales<'a> {
    /// By row of each matrix.
    rows: Line<'a>,
    /// By column of each matrix.
    cols: Line<'a>,
    /// Rows of a matrix.
    height: usize,
    /// Columns of a matrix.
    width: usize,
    /// On a device the second moments themselves.
    moments: ScaleMoments<'a>,
}

impl<'a> Scales<'a> {
    /// From R, C and S: `√S / (√R·√C)`, with a root of √S on either side. All of it on one could be no float32 number, where
    /// one row is zero and another one large.
    #[must_use]
    pub fn of(moments: [FlatView<'a>; 3]) -> Self {
        if moments[1].device() != Device::Cpu {
            return Self { moments, ..Self::none() };
        }
        let [rows, cols, all] = moments;
        let [height, width] = [rows.len(), cols.len()].map(|n| n.checked_div(all.len()).unwrap_or(0));
        let halves: Vec<_> = values(&all).into_iter().map(|all| all.sqrt().sqrt()).collect();
        let [rows, cols] = [rows, cols].map(|side| Line::of(side, halves.clone()));
        Self { rows, cols, height, width, moments }
    }

    /// From second moments by element.
    #[must_use]
    pub fn by_element(moments: FlatView<'a>) -> Self {
        let all = [FlatView::EMPTY, moments, FlatView::EMPTY];
        if moments.device() != Device::Cpu {
            return Self { moments: all, ..Self::none() };
        }
        let cols = Line::of(moments, vec![1.0]);
        Self { rows: Line::ones(1), cols, height: 1, width: moments.len(), moments: all }
    }

    /// Scales that change none of these elements.
    #[must_use]
    pub fn ones(elements: usize, device: Device) -> Self {
        if device != Device::Cpu {
            return Self::none();
        }
        let width = elements;
        Self { rows: Line::ones(1), cols: Line::ones(width), height: 1, width, ..Self::none() }
    }

    /// No scales.
    const fn none() -> Self {
        Self { rows: Line::none(), cols: Line::none(), height: 0, width: 0, moments: [FlatView::EMPTY; 3] }
    }

    /// The row's factor and those of the columns.
    #[inline(always)]
    fn at<C: Real>(&self, at: At) -> (C, &[C]) {
        let row = self.rows.get::<C>()[at.matrix * self.height + at.row];
        (row, &self.cols.get::<C>()[at.matrix * self.width..][at.col..self.width])
    }

    /// The factors of the rows from this one on, and those of the columns.
    #[inline(always)]
    fn from<C: Real>(&self, at: At) -> [&[C]; 2] {
        let rows = &self.rows.get::<C>()[at.matrix * self.height..][at.row..self.height];
        [rows, &self.cols.get::<C>()[at.matrix * self.width..][..self.width]]
    }
}

/// Moments from which a device computes scales.
fn moments<'a>(scales: &[Scales<'a>]) -> Vec<ScaleMoments<'a>> {
    scales.iter().map(|scales| scales.moments).collect()
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

    #[inline(always)]
    fn elements<C: Real>(
        &self,
        _job: usize,
        [g]: [&[C]; 1],
        []: [&mut [C]; 0],
        _scales: [[&[C]; 2]; SCALES],
        summed: &mut [C],
    ) -> f64 {
        let factor = C::of(self.grad_factor);
        for (summed, g) in summed.iter_mut().zip(g) {
            *summed = factor * *g * (factor * *g);
        }
        0.0
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

    #[inline(always)]
    fn elements<C: Real>(
        &self,
        job: usize,
        [g, x]: [&[C]; 2],
        []: [&mut [C]; 0],
        scales: [[&[C]; 2]; SCALES],
        summed: &mut [C],
    ) -> f64 {
        RowPass::<1, 1, 0>::elements(self, job, [g], [], scales, summed);
        sums!(x;; j => x[j] * x[j])
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

    #[inline(always)]
    fn scales<C: Real>(&self, at: At) -> [[&[C]; 2]; SCALES] {
        [self.scales[at.job].from(at), [&[]; 2]]
    }

    #[inline(always)]
    fn elements<C: Real>(
        &self,
        _job: usize,
        [g]: [&[C]; 1],
        []: [&mut [C]; 0],
        [[row, scale], _]: [[&[C]; 2]; SCALES],
        _summed: &mut [C],
    ) -> f64 {
        let factor = C::of(self.grad_factor);
        sums!(g, row, scale;; j => { let u = g[j] * (row[j] * factor) * scale[j]; u * u })
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

    #[inline(always)]
    fn scales<C: Real>(&self, at: At) -> [[&[C]; 2]; SCALES] {
        [self.scales[at.job].from(at), [&[]; 2]]
    }

    #[inline(always)]
    fn elements<C: Real>(
        &self,
        job: usize,
        [g, m]: [&[C]; 2],
        []: [&mut [C]; 0],
        [[row, scale], _]: [[&[C]; 2]; SCALES],
        summed: &mut [C],
    ) -> f64 {
        let factor = C::of(self.factors.of(job)[0]);
        let (keep, rest) = (C::of(self.beta1), C::of(1.0 - self.beta1));
        for ((((summed, g), m), row), scale) in summed.iter_mut().zip(g).zip(m).zip(row).zip(scale) {
            let u = *g * (*row * factor) * *scale;
            let away = u - (keep * *m + rest * u);
            *summed = away * away;
        }
        0.0
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

    #[inline(always)]
    fn scales<C: Real>(&self, at: At) -> [[&[C]; 2]; SCALES] {
        [self.scales[at.job].from(at), [&[]; 2]]
    }

    #[inline(always)]
    fn elements<C: Real>(
        &self,
        job: usize,
        [g]: [&[C]; 1],
        [x]: [&mut [C]; 1],
        [[row, scale], _]: [[&[C]; 2]; SCALES],
        _summed: &mut [C],
    ) -> f64 {
        let [factor, decay] = self.factors.of(job).map(C::of);
        for (((x, g), row), scale) in x.iter_mut().zip(g).zip(row).zip(scale) {
            let step = *g * (*row * factor) * *scale;
            *x = decayed(self.cautious, *x, step, decay) - step;
        }
        0.0
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

    #[inline(always)]
    fn scales<C: Real>(&self, at: At) -> [[&[C]; 2]; SCALES] {
        [self.scales[at.job].from(at), [&[]; 2]]
    }

    #[inline(always)]
    fn elements<C: Real>(
        &self,
        job: usize,
        [g]: [&[C]; 1],
        [x, m]: [&mut [C]; 2],
        [[row, scale], _]: [[&[C]; 2]; SCALES],
        _summed: &mut [C],
    ) -> f64 {
        let [factor, decay] = self.factors.of(job).map(C::of);
        let (keep, rest) = (C::of(self.beta1), C::of(1.0 - self.beta1));
        for ((((x, g), m), row), scale) in x.iter_mut().zip(g).zip(m).zip(row).zip(scale) {
            *m = keep * *m + rest * (*g * (*row * factor) * *scale);
            *x = decayed(self.cautious, *x, *m, decay) - *m;
        }
        0.0
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

    #[inline(always)]
    fn scales<C: Real>(&self, at: At) -> [[&[C]; 2]; SCALES] {
        [self.update.scales, self.scales].map(|scales| scales[at.job].from(at))
    }

    #[inline(always)]
    fn elements<C: Real>(
        &self,
        job: usize,
        [g]: [&[C]; 1],
        [x, m]: [&mut [C]; 2],
        [[own, scale], [row, confidence]]: [[&[C]; 2]; SCALES],
        _summed: &mut [C],
    ) -> f64 {
        let Self { update, cautious, .. } = *self;
        let factor = C::of(update.factors.of(job)[0]);
        let (rate, decay) = (C::of(self.rate), C::of(self.decay));
        let (keep, rest) = (C::of(update.beta1), C::of(1.0 - update.beta1));
        let first = x.iter_mut().zip(g).zip(m).zip(own).zip(scale);
        for ((((((x, g), m), own), scale), row), confidence) in first.zip(row).zip(confidence) {
            *m = keep * *m + rest * (*g * (*own * factor) * *scale);
            let along = *m * (*row * rate) * *confidence;
            *x = decayed(cautious, *x, along, decay) - along;
        }
        0.0
    }

    fn on_cuda(&self) -> Option<RowPassCall<'_>> {
        let Self { cautious, rate, decay, .. } = *self;
        let scalars = ConfidentApplyScalars { beta1: self.update.beta1, cautious, rate, decay };
        let pass = scalars.told(&CONFIDENT).reading(self.update.factors);
        Some(pass.over_rows([self.update.scales, self.scales].map(moments)))
    }
}

/// By libtorch.
mod formulas {
    use crate::kernels::libtorch::prelude::*;

    pub(super) fn gradient_squares(given: &Given<'_>, values: &mut [Value]) -> Vec<Value> {
        vec![(given.scalar("grad_factor") * &values[0]).wide().square()]
    }

    pub(super) fn gradient_and_parameter_squares(given: &Given<'_>, values: &mut [Value]) -> Vec<Value> {
        vec![(given.scalar("grad_factor") * &values[0]).wide().square(), values[1].wide().square()]
    }

    pub(super) fn update_squares(given: &Given<'_>, values: &mut [Value]) -> Vec<Value> {
        let [row, col] = given.scale(0);
        let u = &values[0] * (row * given.scalar("grad_factor")) * col;
        vec![Known(0.0), u.wide().square()]
    }

    pub(super) fn residual(given: &Given<'_>, values: &mut [Value]) -> Vec<Value> {
        let u = update(given, &values[0]);
        vec![(&u - average(given, &values[1], &u)).wide().square()]
    }

    pub(super) fn scaled_apply(given: &Given<'_>, values: &mut [Value]) -> Vec<Value> {
        let step = update(given, &values[1]);
        values[0] = decayed(given, &values[0], &step, &given.live(1)) - step;
        Vec::new()
    }

    pub(super) fn scaled_apply_averaged(given: &Given<'_>, values: &mut [Value]) -> Vec<Value> {
        values[2] = average(given, &values[2], &update(given, &values[1]));
        values[0] = decayed(given, &values[0], &values[2], &given.live(1)) - &values[2];
        Vec::new()
    }

    pub(super) fn confident_apply(given: &Given<'_>, values: &mut [Value]) -> Vec<Value> {
        values[2] = average(given, &values[2], &update(given, &values[1]));
        let [row, col] = given.scale(1);
        let along = &values[2] * (row * given.scalar("rate")) * col;
        values[0] = decayed(given, &values[0], &along, &given.scalar("decay")) - along;
        Vec::new()
    }

    fn update(given: &Given<'_>, g: &Value) -> Value {
        let [row, col] = given.scale(0);
        g * (row * given.live(0)) * col
    }

    fn average(given: &Given<'_>, m: &Value, new: &Value) -> Value {
        let beta1 = given.scalar("beta1");
        &beta1 * m + (1.0 - &beta1) * new
    }

    fn decayed(given: &Given<'_>, x: &Value, step: &Value, decay: &Value) -> Value {
        let kept = x - decay * x;
        if given.is("cautious") { (x * step).below(&Known(0.0)).choose(x, &kept) } else { kept }
    }
}
