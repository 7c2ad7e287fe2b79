//! The passes of LAMB.

#![allow(clippy::inline_always)] // every pass must be compiled inside its caller's instruction set

use super::factors::Factors;
use crate::kernels::cpu::Slot::{self, Read, Write};
use crate::kernels::cpu::fold::RUN;
use crate::kernels::cpu::lanes::{LANES, squares, sums};
use crate::kernels::cpu::{Fold, Op, Real};
use crate::kernels::cuda_call::{Kernel, Pass};
use crate::kernels::ops::declare::{kernel, ops};

ops! {
    cuda "lamb.cuh" also [&NORMS, &NORMS_ONLY];

    /// LAMB: `m ← β₁·m + γ·g`, `v ← β₂·v + (1-β₂)·g²`, `u = m̂ / (√v̂ + ε) + λ·x`.
    #[derive(Debug)]
    pub struct Lamb {
        /// β₁.
        beta1: f64,
        /// γ, the gradient's weight in m.
        blend: f64,
        /// β₂.
        beta2: f64,
        /// Added to the denominator.
        epsilon: f64,
        /// λ.
        weight_decay: f64,
        /// True if the decay acts only where it points along the update.
        cautious: bool,
        ;
        /// Of each job `1 / (1 - β₁ᵗ)` and `1 / √(1 - β₂ᵗ)` or ones, the gradient's factor (sign, unscaling, clipping), and by
        /// what u is multiplied in the end.
        factors: Factors<4> => reading,
    } => {
        lamb = Lamb [x: update param, g: read plain, m: update signed, v: update unsigned];
        lamb_along = LambAlong [x: update param, m: read signed, v: read unsigned];
    }
}

/// Sums with the moments written, of parameters that are stored as numbers of their type.
const NORMS: Kernel = kernel!(Sum lamb_norms = LambNormsKept told Lamb
    [x: read param, g: read plain, m: update plain, v: update plain]);
/// Sums alone.
const NORMS_ONLY: Kernel = kernel!(Sum lamb_norms_only = LambNormsOnly told Lamb
    [x: read param, g: read plain, m: read signed, v: read unsigned]);

#[derive(Clone, Copy)]
struct Direction<C> {
    factor: C,
    beta1: C,
    blend: C,
    beta2: C,
    rest2: C,
    first: C,
    second: C,
    epsilon: C,
    decay: C,
    cautious: bool,
    rate: C,
}

impl Lamb {
    #[inline(always)]
    fn direction<C: Real>(&self, job: usize) -> Direction<C> {
        let [first, second, factor, rate] = self.factors.of(job);
        Direction {
            factor: C::of(factor),
            beta1: C::of(self.beta1),
            blend: C::of(self.blend),
            beta2: C::of(self.beta2),
            rest2: C::of(1.0 - self.beta2),
            first: C::of(first),
            second: C::of(second),
            epsilon: C::of(self.epsilon),
            decay: C::of(self.weight_decay),
            cautious: self.cautious,
            rate: C::of(rate),
        }
    }
}

impl<C: Real> Direction<C> {
    /// The moments with a gradient, and the direction along them.
    #[inline(always)]
    #[allow(clippy::many_single_char_names)] // as the equation has them
    fn next(&self, x: C, g: C, m: C, v: C) -> [C; 3] {
        let g = self.factor * g;
        let (m, v) = (self.beta1 * m + self.blend * g, self.beta2 * v + self.rest2 * (g * g));
        [m, v, self.along(x, m, v)]
    }

    /// The direction along moments.
    #[inline(always)]
    fn along(&self, x: C, m: C, v: C) -> C {
        let adam = m * self.first / (v.sqrt() * self.second + self.epsilon);
        if self.cautious && x * adam < C::default() { adam } else { adam + self.decay * x }
    }
}

/// Σ x² and Σ u². Operands: x, gradient, m, v. With `STORE` the moments are written: only where they are stored as they
/// are computed, as a step is along what was not rounded.
#[derive(Clone, Copy, Debug)]
pub struct LambNorms<'a, const STORE: bool>(pub &'a Lamb);

impl Fold<4, 2, 2, 2> for LambNorms<'_, true> {
    const ORDER: [Slot; 4] = NORMS.order();

    #[inline(always)]
    #[allow(clippy::many_single_char_names)] // as the equation has them
    fn apply<C: Real>(&self, job: usize, [x, g]: [&[C]; 2], [m, v]: [&mut [C]; 2]) -> [f64; 2] {
        let direction = self.0.direction::<C>(job);
        let mut sums = [0.0_f64; 2];
        let mut start = 0;
        while start < x.len() {
            // Short sums in the type of the arithmetic, long ones in float64.
            let end = (start + RUN).min(x.len());
            let (x, g) = (&x[start..end], &g[start..end]);
            let (m, v) = (&mut m[start..end], &mut v[start..end]);
            sums[0] += squares(x);
            sums[1] += sums!(x, g; m, v; j => {
                let u;
                [m[j], v[j], u] = direction.next(x[j], g[j], m[j], v[j]);
                u * u
            });
            start = end;
        }
        sums
    }

    fn on_cuda(&self) -> Option<Pass<'_>> {
        Some(self.0.call(&NORMS))
    }
}

impl Fold<4, 4, 0, 2> for LambNorms<'_, false> {
    const ORDER: [Slot; 4] = NORMS_ONLY.order();

    #[inline(always)]
    #[allow(clippy::many_single_char_names)] // as the equation has them
    fn apply<C: Real>(&self, job: usize, [x, g, m, v]: [&[C]; 4], []: [&mut [C]; 0]) -> [f64; 2] {
        let direction = self.0.direction::<C>(job);
        let mut sums = [0.0_f64; 2];
        let mut start = 0;
        while start < x.len() {
            let end = (start + RUN).min(x.len());
            let [x, g, m, v] = [x, g, m, v].map(|x| &x[start..end]);
            sums[0] += squares(x);
            sums[1] += sums!(x, g, m, v;; j => {
                let [_, _, u] = direction.next(x[j], g[j], m[j], v[j]);
                u * u
            });
            start = end;
        }
        sums
    }

    fn on_cuda(&self) -> Option<Pass<'_>> {
        Some(self.0.call(&NORMS_ONLY))
    }
}

/// The moments, and `x ← x - rate·u`. Operands: x, gradient, m, v.
impl Op<4, 1, 3> for Lamb {
    const ORDER: [Slot; 4] = [Write(0), Read(0), Write(1), Write(2)];

    #[inline(always)]
    #[allow(clippy::many_single_char_names)] // as the equation has them
    fn apply<C: Real>(&self, job: usize, [g]: [&[C]; 1], [x, m, v]: [&mut [C]; 3]) {
        let direction = self.direction::<C>(job);
        for (((x, g), m), v) in x.iter_mut().zip(g).zip(m).zip(v) {
            let u;
            [*m, *v, u] = direction.next(*x, *g, *m, *v);
            *x = *x - direction.rate * u;
        }
    }
}

/// `x ← x - rate·u` along moments that are written. Operands: x, m, v.
impl Op<3, 2, 1> for Lamb {
    const ORDER: [Slot; 3] = [Write(0), Read(0), Read(1)];

    #[inline(always)]
    fn apply<C: Real>(&self, job: usize, [m, v]: [&[C]; 2], [x]: [&mut [C]; 1]) {
        let direction = self.direction::<C>(job);
        for ((x, m), v) in x.iter_mut().zip(m).zip(v) {
            *x = *x - direction.rate * direction.along(*x, *m, *v);
        }
    }
}

/// By libtorch.
mod formulas {
    use crate::kernels::libtorch::prelude::*;

    pub(super) fn lamb(given: &Given<'_>, values: &mut [Value]) -> Vec<Value> {
        moments(given, values);
        let along = along(given, &values[0], &values[2], &values[3]);
        values[0] = &values[0] - given.live(3) * along;
        Vec::new()
    }

    pub(super) fn lamb_along(given: &Given<'_>, values: &mut [Value]) -> Vec<Value> {
        let along = along(given, &values[0], &values[1], &values[2]);
        values[0] = &values[0] - given.live(3) * along;
        Vec::new()
    }

    pub(super) fn lamb_norms(given: &Given<'_>, values: &mut [Value]) -> Vec<Value> {
        moments(given, values);
        let along = along(given, &values[0], &values[2], &values[3]);
        [&values[0], &along].map(|x| x.wide().square().sum()).into()
    }

    pub(super) fn lamb_norms_only(given: &Given<'_>, values: &mut [Value]) -> Vec<Value> {
        lamb_norms(given, values)
    }

    fn moments(given: &Given<'_>, values: &mut [Value]) {
        let (beta2, g) = (given.scalar("beta2"), given.live(2) * &values[1]);
        values[2] = given.scalar("beta1") * &values[2] + given.scalar("blend") * &g;
        values[3] = &beta2 * &values[3] + (1.0 - &beta2) * (&g * &g);
    }

    fn along(given: &Given<'_>, x: &Value, m: &Value, v: &Value) -> Value {
        let adam = m * given.live(0) / (v.sqrt() * given.live(1) + given.scalar("epsilon"));
        let decayed = &adam + given.scalar("weight_decay") * x;
        if given.is("cautious") { (x * &adam).below(&Known(0.0)).choose(&adam, &decayed) } else { decayed }
    }
}
