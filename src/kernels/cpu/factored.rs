//! Passes of optimizers that keep second moments by row and by column, and of those that scale an update by its norm.

#![allow(clippy::inline_always)] // every pass must be compiled inside its caller's instruction set

use super::rows::{At, RowPass};
use super::{Fold, Op, Real};

/// Elements of a row that are worked on side by side.
const LANES: usize = 16;

/// Numbers in the type of the arithmetic.
#[derive(Clone, Debug, Default)]
pub struct Line {
    narrow: Vec<f32>,
    wide: Vec<f64>,
}

impl Line {
    /// Numbers for arithmetic in float64 or in float32.
    #[must_use]
    pub fn new(values: Vec<f64>, double: bool) -> Self {
        #[allow(clippy::cast_possible_truncation)] // rounding is the purpose
        let narrow = || values.iter().map(|x| *x as f32).collect();
        if double {
            Self { narrow: Vec::new(), wide: values }
        } else {
            Self { narrow: narrow(), wide: values }
        }
    }

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
        (row, &self.cols.get::<C>()[at.matrix * self.width..][..self.width])
    }
}

/// Sums a value over the elements of equally long slices, in lanes. Inside `value` the slices are arrays of as many
/// elements as there are lanes, so that no index has to be checked.
macro_rules! sums {
    ($($slice:ident),+; $($written:ident),*; $j:ident => $value:expr) => {{
        let mut lanes = [C::default(); LANES];
        let len = [$($slice.len()),+][0];
        let mut start = 0;
        while let ($(Some($slice),)+ $(Some($written),)*) = (
            $($slice.get(start..).and_then(|rest| rest.first_chunk::<LANES>()),)+
            $($written.get_mut(start..).and_then(|rest| rest.first_chunk_mut::<LANES>()),)*
        ) {
            for $j in 0..LANES {
                lanes[$j] = lanes[$j] + $value;
            }
            start += LANES;
        }
        $(let $slice = &$slice[start..len];)+
        $(let $written = &mut $written[start..len];)*
        for $j in 0..len - start {
            lanes[$j] = lanes[$j] + $value;
        }
        lanes.iter().map(|lane| lane.wide()).sum::<f64>()
    }};
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

/// `m ← β₁·m + (1-β₁)·u` with `u = factor·g·scale`, and Σ (u - m)² by row and column. Operands: gradient, m.
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
    const WRITES: [bool; 2] = [false, true];

    #[inline(always)]
    fn row<C: Real>(&self, at: At, [g, m]: [&mut [C]; 2], cols: &mut [C]) -> [f64; 2] {
        let (row, scale) = self.scales[at.job].at::<C>(at);
        let (row, g) = (row * C::of(self.factors[at.job]), &*g);
        let (keep, rest) = (C::of(self.beta1), C::of(1.0 - self.beta1));
        if cols.is_empty() {
            for ((g, m), scale) in g.iter().zip(m).zip(scale) {
                *m = keep * *m + rest * (*g * row * *scale);
            }
            return [0.0; 2];
        }
        let sum = sums!(g, scale; m, cols; j => {
            let u = g[j] * row * scale[j];
            let new = keep * m[j] + rest * u;
            m[j] = new;
            let square = (u - new) * (u - new);
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

/// LAMB: `m ← β₁·m + γ·g`, `v ← β₂·v + (1-β₂)·g²`, `u = m̂ / (√v̂ + ε) + λ·x`. Of every job the corrections of m and √v.
#[derive(Clone, Debug)]
pub struct Lamb {
    /// β₁.
    pub beta1: f64,
    /// γ, the gradient's weight in m.
    pub blend: f64,
    /// β₂.
    pub beta2: f64,
    /// Added to the denominator.
    pub epsilon: f64,
    /// λ.
    pub weight_decay: f64,
    /// Whether the decay acts only where it points along the update.
    pub cautious: bool,
    /// The gradient's factor: sign, unscaling, clipping.
    pub grad_factor: f64,
    /// `1 / (1 - β₁ᵗ)` and `1 / √(1 - β₂ᵗ)` of each job, or ones.
    pub corrections: Vec<[f64; 2]>,
    /// By what u is multiplied in the end, of each job.
    pub rates: Vec<f64>,
}

#[derive(Clone, Copy)]
struct Direction<C> {
    first: C,
    second: C,
    epsilon: C,
    decay: C,
    cautious: bool,
}

impl<C: Real> Direction<C> {
    #[inline(always)]
    fn of(&self, x: C, m: C, v: C) -> C {
        let adam = m * self.first / (v.sqrt() * self.second + self.epsilon);
        if self.cautious && x * adam < C::default() { adam } else { adam + self.decay * x }
    }
}

impl Lamb {
    #[inline(always)]
    fn direction<C: Real>(&self, job: usize) -> Direction<C> {
        let [first, second] = self.corrections[job];
        Direction {
            first: C::of(first),
            second: C::of(second),
            epsilon: C::of(self.epsilon),
            decay: C::of(self.weight_decay),
            cautious: self.cautious,
        }
    }
}

/// The moments, Σ x² and Σ u². Operands: x, gradient, m, v.
impl Fold<4, 2> for Lamb {
    const WRITES: [bool; 4] = [false, false, true, true];

    #[inline(always)]
    #[allow(clippy::many_single_char_names)] // as the equation has them
    fn apply<C: Real>(&self, job: usize, [x, g, m, v]: [&mut [C]; 4]) -> [f64; 2] {
        let direction = self.direction::<C>(job);
        let (beta1, blend, factor) = (C::of(self.beta1), C::of(self.blend), C::of(self.grad_factor));
        let (beta2, rest2) = (C::of(self.beta2), C::of(1.0 - self.beta2));
        let mut sums = [0.0_f64; 2];
        let mut start = 0;
        while start < x.len() {
            // Short sums in the type of the arithmetic, long ones in float64.
            let end = (start + 256).min(x.len());
            let (x, g) = (&x[start..end], &g[start..end]);
            let (m, v) = (&mut m[start..end], &mut v[start..end]);
            sums[0] += sums!(x;; j => x[j] * x[j]);
            sums[1] += sums!(x, g; m, v; j => {
                let g = factor * g[j];
                m[j] = beta1 * m[j] + blend * g;
                v[j] = beta2 * v[j] + rest2 * (g * g);
                let u = direction.of(x[j], m[j], v[j]);
                u * u
            });
            start = end;
        }
        sums
    }
}

/// `x ← x - rate·u`. Operands: x, m, v.
impl Op<3> for Lamb {
    const WRITES: [bool; 3] = [true, false, false];

    #[inline(always)]
    fn apply<C: Real>(&self, job: usize, [x, m, v]: [&mut [C]; 3]) {
        let (direction, rate) = (self.direction::<C>(job), C::of(self.rates[job]));
        for ((x, m), v) in x.iter_mut().zip(m).zip(v) {
            *x = *x - rate * direction.of(*x, *m, *v);
        }
    }
}
