//! Passes of optimizers that keep second moments by row and by column.

#![allow(clippy::inline_always)] // formulas must be compiled inside their caller's instruction set
#![allow(clippy::needless_range_loop)] // loops index several slices at once; only their number is known

use std::sync::OnceLock;

use super::apply::Rule;
use super::declare::{kernel, operation};
use super::factors::Factors;
use super::lerp::weights;
use crate::kernels::cpu::convert::load;
use crate::kernels::cpu::each::{gather, length, products, scatter};
use crate::kernels::cpu::isa;
use crate::kernels::cpu::reduce::values;
use crate::kernels::cpu::rows::{At, RowPass, SCALES};
use crate::kernels::cpu::{Real, Slot};
use crate::kernels::formula::tape::{Expr, Node, Tape, push};
use crate::kernels::formula::{Num, Own};
use crate::kernels::op::{Declared, Kernel, Operation, RowPassCall, ScaleMoments};
use crate::tensor::{DType, Device, FlatView};

/// `factor[i] / √number` for each number of part i, of as many equal parts as there are factors. A pass works in the widest
/// type of its operands, which only it knows: computed when it is first asked for in a type.
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

    /// The factors of the rows from this one on, and those of the columns.
    #[inline(always)]
    fn from<C: Real>(&self, at: At) -> [&[C]; 2] {
        let rows = &self.rows.get::<C>()[at.matrix * self.height..][at.row..self.height];
        [rows, &self.cols.get::<C>()[at.matrix * self.width..][..self.width]]
    }
}

/// A formula on the elements of matrices, each with scales of its row and of its column.
pub trait RowFormula<const N: usize, const R: usize, const W: usize>: Operation {
    /// Its kernel.
    const KERNEL: &'static Kernel;
    /// Scales that it takes.
    const SCALED_BY: usize;
    /// Numbers that all elements of a job have in common.
    type Constants<V: Num>: Copy;

    /// Computes the constants of a job in float64.
    fn constants<V: Num>(scalars: Self::Scalars<V::Wide>, own: &Own<V::Wide>) -> Self::Constants<V>;

    /// Updates one element of each operand; returns the two factors of what is summed by row and column, and of what is
    /// summed over the job.
    fn update<V: Num>(
        constants: &Self::Constants<V>,
        x: &mut [V; N],
        scales: [[V; 2]; SCALES],
    ) -> [Option<[V; 2]>; 2];

    /// The scales of every job.
    fn scales(&self) -> [&[Scales<'_>]; SCALES];
}

/// Records the formula of a kernel.
pub(in crate::kernels) fn record<F: RowFormula<N, R, W>, const N: usize, const R: usize, const W: usize>()
-> Tape {
    Tape::record(|x: &mut [Expr; N]| {
        let constants = F::constants::<Expr>(F::recorded(), &Own::recorded());
        let scales = std::array::from_fn(|s| [push(Node::RowScale(s)), push(Node::ColScale(s))]);
        F::update::<Expr>(&constants, x, scales).to_vec()
    })
}

impl<F: RowFormula<N, R, W>, const N: usize, const R: usize, const W: usize> RowPass<N, R, W> for F {
    const ORDER: [Slot; N] = F::KERNEL.order::<N>();
    type Constants<C: Real> = F::Constants<C>;

    #[inline(always)]
    fn constants<C: Real>(&self, job: usize) -> F::Constants<C> {
        F::constants::<C>(self.scalars(), &self.own(job))
    }

    #[inline(always)]
    fn scales<C: Real>(&self, at: At) -> [[&[C]; 2]; SCALES] {
        let all = RowFormula::scales(self);
        let mut found: [[&[C]; 2]; SCALES] = [[&[]; 2]; SCALES];
        for s in 0..F::SCALED_BY {
            found[s] = all[s][at.job].from(at);
        }
        found
    }

    #[inline(always)]
    fn elements<C: Real, const BY_ROW: bool>(
        &self,
        constants: &F::Constants<C>,
        read: [&[C]; R],
        write: [&mut [C]; W],
        mut scales: [[&[C]; 2]; SCALES],
        [summed, terms]: [&mut [C]; 2],
    ) -> f64 {
        let len = length(&read, &write);
        let (summed, terms) = (&mut summed[..len], &mut terms[..len]);
        for s in 0..F::SCALED_BY {
            let [row, col] = scales[s];
            scales[s] = [if BY_ROW { &row[..1] } else { &row[..len] }, &col[..len]];
        }
        let mut sums_terms = false;
        for at in 0..len {
            let mut x = gather!(<Self as RowPass<N, R, W>>::ORDER, read, write, at);
            let mut own = [[C::default(); 2]; SCALES];
            for s in 0..F::SCALED_BY {
                own[s] = [scales[s][0][if BY_ROW { 0 } else { at }], scales[s][1][at]];
            }
            let [by_row, own] = F::update::<C>(constants, &mut x, own);
            scatter!(<Self as RowPass<N, R, W>>::ORDER, write, at, x);
            if let Some([a, b]) = by_row {
                summed[at] = a * b;
            }
            if let Some([a, _]) = own {
                terms[at] = a;
                sums_terms = true;
            }
        }
        if sums_terms { products(terms, terms) } else { 0.0 }
    }

    fn on_cuda(&self) -> Option<RowPassCall<'_>> {
        let moments =
            RowFormula::scales(self).map(|scales| scales.iter().map(|scales| scales.moments).collect());
        Some(self.call(F::KERNEL).over_rows(moments))
    }
}

operation! {
    /// Σ g² by row and column, and with a parameter behind it Σ x² of all. Operands: gradient[, x].
    #[derive(Clone, Copy, Debug)]
    pub struct GradientSquares as GradientSquaresScalars {
        /// The gradient's factor: sign and unscaling.
        grad_factor: f64,
    }
}

operation! {
    /// Σ u² with `u = g·scale`. Operand: gradient.
    #[derive(Clone, Copy, Debug)]
    pub struct UpdateSquares<'a> as UpdateSquaresScalars {
        /// The gradient's factor: sign and unscaling.
        grad_factor: f64,
        ;
        /// The scales of every job.
        scales: &'a [Scales<'a>],
    }
}

operation! {
    /// Σ (u - m)² by row and column with `u = factor·g·scale` and m as it will be: `β₁·m + (1-β₁)·u`. Operands: gradient, m.
    #[derive(Clone, Copy, Debug)]
    pub struct Residual<'a> as ResidualScalars {
        /// β₁.
        beta1: f64,
        ;
        /// The scales of every job.
        scales: &'a [Scales<'a>],
        /// Of every job first the factor: clipping, and the gradient's.
        factors: &'a Factors<2> => reading,
    }
}

operation! {
    /// `x ← (1 - decay)·x - factor·g·scale`; cautious: the decay acts where `x·g ≥ 0`. With m behind it
    /// `m ← β₁·m + (1-β₁)·step` takes the place of the step. Operands: x, g[, m].
    #[derive(Clone, Copy, Debug)]
    pub struct ScaledApply<'a> as ScaledApplyScalars {
        /// True if the decay acts only where it points along the update.
        cautious: bool,
        /// β₁ where the finished step is averaged.
        beta1: f64,
        ;
        /// The scales of every job.
        scales: &'a [Scales<'a>],
        /// Of every job the factor (rate, clipping, and the gradient's) and the decay.
        factors: &'a Factors<2> => reading,
    }
}

operation! {
    /// `m ← β₁·m + (1-β₁)·u` with `u = factor·g·scale`, then x as in [`ScaledApply`] along m with scales of its own. Operands:
    /// x, gradient, m.
    #[derive(Clone, Copy, Debug)]
    pub struct ConfidentApply<'a> as ConfidentApplyScalars {
        /// β₁.
        beta1: f64,
        /// True if the decay acts only where it points along the step.
        cautious: bool,
        /// Its rate.
        rate: f64 * lr,
        /// `lr · weight_decay`.
        decay: f64 * lr,
        ;
        /// The scales of u.
        update_scales: &'a [Scales<'a>],
        /// The scales of the step along m.
        scales: &'a [Scales<'a>],
        /// Of every job first the factor of u.
        factors: &'a Factors<2> => reading,
    }
}

pub(in crate::kernels) const DECLARED: Declared = &[
    <GradientSquares as RowFormula<1, 1, 0>>::KERNEL,
    <GradientSquares as RowFormula<2, 2, 0>>::KERNEL,
    UpdateSquares::KERNEL,
    Residual::KERNEL,
    <ScaledApply<'_> as RowFormula<2, 1, 1>>::KERNEL,
    <ScaledApply<'_> as RowFormula<3, 1, 2>>::KERNEL,
    ConfidentApply::KERNEL,
];

/// `g·(row·factor)·col`.
#[inline(always)]
fn scaled<V: Num>(g: V, [row, col]: [V; 2], factor: V) -> V {
    g * (row * factor) * col
}

impl RowFormula<1, 1, 0> for GradientSquares {
    const KERNEL: &'static Kernel = kernel!(Row gradient_squares = GradientSquares [g: read plain]);
    const SCALED_BY: usize = 0;
    type Constants<V: Num> = V;

    #[inline(always)]
    fn constants<V: Num>(s: GradientSquaresScalars<V::Wide>, _: &Own<V::Wide>) -> V {
        V::narrow(s.grad_factor)
    }

    #[inline(always)]
    fn update<V: Num>(factor: &V, [g]: &mut [V; 1], _: [[V; 2]; SCALES]) -> [Option<[V; 2]>; 2] {
        [Some([*factor * *g; 2]), None]
    }

    fn scales(&self) -> [&[Scales<'_>]; SCALES] {
        [&[], &[]]
    }
}

impl RowFormula<2, 2, 0> for GradientSquares {
    const KERNEL: &'static Kernel = kernel!(Row gradient_and_parameter_squares = GradientAndParameterSquares
        [g: read plain, x: read param]);
    const SCALED_BY: usize = 0;
    type Constants<V: Num> = V;

    #[inline(always)]
    fn constants<V: Num>(s: GradientSquaresScalars<V::Wide>, _: &Own<V::Wide>) -> V {
        V::narrow(s.grad_factor)
    }

    #[inline(always)]
    fn update<V: Num>(factor: &V, [g, x]: &mut [V; 2], _: [[V; 2]; SCALES]) -> [Option<[V; 2]>; 2] {
        [Some([*factor * *g; 2]), Some([*x; 2])]
    }

    fn scales(&self) -> [&[Scales<'_>]; SCALES] {
        [&[], &[]]
    }
}

impl RowFormula<1, 1, 0> for UpdateSquares<'_> {
    const KERNEL: &'static Kernel = kernel!(Row update_squares = UpdateSquares [g: read plain]);
    const SCALED_BY: usize = 1;
    type Constants<V: Num> = V;

    #[inline(always)]
    fn constants<V: Num>(s: UpdateSquaresScalars<V::Wide>, _: &Own<V::Wide>) -> V {
        V::narrow(s.grad_factor)
    }

    #[inline(always)]
    fn update<V: Num>(factor: &V, [g]: &mut [V; 1], [scale, _]: [[V; 2]; SCALES]) -> [Option<[V; 2]>; 2] {
        [None, Some([scaled(*g, scale, *factor); 2])]
    }

    fn scales(&self) -> [&[Scales<'_>]; SCALES] {
        [self.scales, &[]]
    }
}

impl RowFormula<2, 2, 0> for Residual<'_> {
    const KERNEL: &'static Kernel = kernel!(Row residual = Residual [g: read plain, m: read signed]);
    const SCALED_BY: usize = 1;
    type Constants<V: Num> = ([V; 2], V);

    #[inline(always)]
    fn constants<V: Num>(s: ResidualScalars<V::Wide>, own: &Own<V::Wide>) -> Self::Constants<V> {
        (weights::<V>(s.beta1), V::narrow(own.live[0]))
    }

    #[inline(always)]
    fn update<V: Num>(
        ([keep, rest], factor): &Self::Constants<V>,
        [g, m]: &mut [V; 2],
        [scale, _]: [[V; 2]; SCALES],
    ) -> [Option<[V; 2]>; 2] {
        let u = scaled(*g, scale, *factor);
        [Some([u - (*keep * *m + *rest * u); 2]), None]
    }

    fn scales(&self) -> [&[Scales<'_>]; SCALES] {
        [self.scales, &[]]
    }
}

impl RowFormula<2, 1, 1> for ScaledApply<'_> {
    const KERNEL: &'static Kernel = kernel!(Row scaled_apply = ScaledApply [x: update param, g: read plain]);
    const SCALED_BY: usize = 1;
    type Constants<V: Num> = (V, Rule<V>);

    #[inline(always)]
    fn constants<V: Num>(s: ScaledApplyScalars<V::Wide>, own: &Own<V::Wide>) -> Self::Constants<V> {
        (V::narrow(own.live[0]), Rule::subtracting(own.live[1], s.cautious))
    }

    #[inline(always)]
    fn update<V: Num>(
        (factor, rule): &Self::Constants<V>,
        [x, g]: &mut [V; 2],
        [scale, _]: [[V; 2]; SCALES],
    ) -> [Option<[V; 2]>; 2] {
        let step = scaled(*g, scale, *factor);
        *x = rule.apply(*x, step, step);
        [None, None]
    }

    fn scales(&self) -> [&[Scales<'_>]; SCALES] {
        [self.scales, &[]]
    }
}

impl RowFormula<3, 1, 2> for ScaledApply<'_> {
    const KERNEL: &'static Kernel = kernel!(Row scaled_apply_averaged = ScaledApplyAveraged
        [x: update param, g: read plain, m: update signed]);
    const SCALED_BY: usize = 1;
    type Constants<V: Num> = ([V; 2], V, Rule<V>);

    #[inline(always)]
    fn constants<V: Num>(s: ScaledApplyScalars<V::Wide>, own: &Own<V::Wide>) -> Self::Constants<V> {
        (weights::<V>(s.beta1), V::narrow(own.live[0]), Rule::subtracting(own.live[1], s.cautious))
    }

    #[inline(always)]
    fn update<V: Num>(
        ([keep, rest], factor, rule): &Self::Constants<V>,
        [x, g, m]: &mut [V; 3],
        [scale, _]: [[V; 2]; SCALES],
    ) -> [Option<[V; 2]>; 2] {
        *m = *keep * *m + *rest * scaled(*g, scale, *factor);
        *x = rule.apply(*x, *m, *m);
        [None, None]
    }

    fn scales(&self) -> [&[Scales<'_>]; SCALES] {
        [self.scales, &[]]
    }
}

impl RowFormula<3, 1, 2> for ConfidentApply<'_> {
    const KERNEL: &'static Kernel = kernel!(Row confident_apply = ConfidentApply
        [x: update param, g: read plain, m: update signed]);
    const SCALED_BY: usize = 2;
    type Constants<V: Num> = ([V; 2], [V; 2], Rule<V>);

    #[inline(always)]
    fn constants<V: Num>(s: ConfidentApplyScalars<V::Wide>, own: &Own<V::Wide>) -> Self::Constants<V> {
        let factors = [own.live[0], s.rate].map(V::narrow);
        (weights::<V>(s.beta1), factors, Rule::subtracting(s.decay, s.cautious))
    }

    #[inline(always)]
    fn update<V: Num>(
        ([keep, rest], [factor, rate], rule): &Self::Constants<V>,
        [x, g, m]: &mut [V; 3],
        [scale, confidence]: [[V; 2]; SCALES],
    ) -> [Option<[V; 2]>; 2] {
        *m = *keep * *m + *rest * scaled(*g, scale, *factor);
        let step = scaled(*m, confidence, *rate);
        *x = rule.apply(*x, step, step);
        [None, None]
    }

    fn scales(&self) -> [&[Scales<'_>]; SCALES] {
        [self.update_scales, self.scales]
    }
}
