//! Updates of matrices whose norm they keep, or that they follow.

#![allow(clippy::inline_always)] // every pass must be compiled inside its caller's instruction set

use tch::{Kind, Tensor};

use crate::error::{Error, Result};
use crate::kernels::cpu::Slot::{self, Read, Write};
use crate::kernels::cpu::fold::RUN;
use crate::kernels::cpu::lanes::{LANES, squares, sums};
use crate::kernels::cpu::{Fold, Op, Real};
use crate::kernels::cuda_call::{Kernel, Pass};
use crate::kernels::ops::declare::{kernel, ops};
use crate::kernels::ops::factors::Factors;
use crate::tensor::{DType, Device, FlatView, FlatViewMut};

/// The least norm that is divided by.
const LEAST: f64 = 1e-10;

ops! {
    cuda "weight_norm.cuh" also [&NORMS];

    /// Σ x², Σ u² and Σ x·u in float64. Operands: x, u.
    #[derive(Clone, Copy, Debug)]
    pub struct WeightNorms {}

    /// `x ← a·((1 - decay)·x - rate·f·u)`, late `x ← a·(1 - decay)·(x - rate·f·u)`, with factors f and a of each job; cautious:
    /// the decay acts where `x·u ≥ 0`, of the x that it is about to act on. Operands: x, u.
    #[derive(Debug)]
    pub struct Scaled {
        /// Factor of the update.
        rate: f64 * lr,
        /// `lr · weight_decay`.
        decay: f64 * lr,
        /// True if the decay acts only where it points along the update.
        cautious: bool,
        /// True if the decay comes after the update.
        late: bool,
        /// True if a brings the norm back to the radius: `r / ‖x - rate·f·u‖`; else it is 1.
        spherical: bool,
        ;
        /// Of each job f, the radius r, ‖x‖², `f·⟨x, u⟩` and `f²·‖u‖²`.
        factors: Factors<5> => reading,
    } => {
        scaled = Scaled [x: update param, u: read plain];
    }
}

const NORMS: Kernel = kernel!(Sum weight_norms = WeightNorms told WeightNorms [x: read param, u: read plain]);

impl Fold<2, 2, 0, 3> for WeightNorms {
    const ORDER: [Slot; 2] = NORMS.order();

    #[inline(always)]
    fn apply<C: Real>(&self, _job: usize, [x, u]: [&[C]; 2], []: [&mut [C]; 0]) -> [f64; 3] {
        let mut found = [0.0_f64; 3];
        for (x, u) in x.chunks(RUN).zip(u.chunks(RUN)) {
            found[0] += squares(x);
            found[1] += squares(u);
            found[2] += sums!(x, u;; j => { x[j] * u[j] });
        }
        found
    }

    fn on_cuda(&self) -> Option<Pass<'_>> {
        Some(self.call(&NORMS))
    }
}

impl Scaled {
    /// The factors of u and of the result.
    #[inline(always)]
    fn factors_of(&self, job: usize) -> [f64; 2] {
        let [factor, radius, square, along, step] = self.factors.of(job);
        let rate = self.rate;
        let norm = at_least(square - 2.0 * rate * along + rate * rate * step, 0.0).sqrt();
        let norm = at_least(norm, LEAST);
        [rate * factor, if self.spherical { radius / norm } else { 1.0 }]
    }
}

impl Op<2, 1, 1> for Scaled {
    const ORDER: [Slot; 2] = [Write(0), Read(0)];

    #[inline(always)]
    fn apply<C: Real>(&self, job: usize, [u]: [&[C]; 1], [x]: [&mut [C]; 1]) {
        let [rate, scale] = self.factors_of(job).map(C::of);
        let (keep, zero) = (C::of(1.0 - self.decay), C::default());
        if self.late {
            for (x, u) in x.iter_mut().zip(u) {
                let y = *x - rate * *u;
                *x = scale * if self.cautious && y * *u < zero { y } else { y * keep };
            }
        } else if self.cautious && self.decay != 0.0 {
            for (x, u) in x.iter_mut().zip(u) {
                let kept = if *x * *u >= zero { *x * keep } else { *x };
                *x = scale * (kept - rate * *u);
            }
        } else {
            for (x, u) in x.iter_mut().zip(u) {
                *x = scale * (*x * keep - rate * *u);
            }
        }
    }
}

/// The larger one of both; NaN stays, where `f64::max` would hide it and make finite numbers of what is none.
fn at_least(x: f64, least: f64) -> f64 {
    if x < least { least } else { x }
}

/// Rules for the size of an update.
#[derive(Clone, Copy, Debug)]
pub enum SizeRule {
    /// As long as the weights were when they were first seen, which they stay.
    Sphere,
    /// At least `least` times as long as the weights, `scale` times the update taken for it.
    Floor {
        /// The least ratio.
        least: f64,
        /// Factor of the update, which belongs to its length.
        scale: f64,
    },
}

impl SizeRule {
    /// Factors of [`Scaled`] from Σ x², Σ u² and Σ x·u of each job. `radii` has the norm that each keeps, 0 where none is
    /// known yet: the present one, which is written there.
    ///
    /// # Errors
    /// `Error::Internal` for another number of sums or radii than jobs; whatever a device says.
    pub fn factors(self, norms: &[FlatView<'_>], radii: &mut [FlatViewMut<'_>]) -> Result<Factors<5>> {
        if norms.first().map_or(Device::Cpu, FlatView::device) == Device::Cpu {
            let mut each = Vec::with_capacity(norms.len());
            for (at, norms) in norms.iter().enumerate() {
                let &[x, u, along] = norms.numbers() else { return Err(no_norms()) };
                each.push(match self {
                    Self::Floor { least, scale } => {
                        let size = at_least(scale * u.sqrt(), LEAST);
                        [scale * at_least(least * x.sqrt() / size, 1.0), 0.0, 0.0, 0.0, 0.0]
                    }
                    Self::Sphere => {
                        let radius = radius_of(radii.get_mut(at).ok_or_else(no_norms)?, x.sqrt())?;
                        let factor = radius / at_least(u.sqrt(), LEAST);
                        [factor, radius, x, factor * along, factor * factor * u]
                    }
                });
            }
            return Ok(Factors::known(each));
        }
        let sums = Tensor::f_cat(&tensors(norms.iter().copied())?, 0)?.f_reshape([-1, 3])?;
        let [x, u, along] = [0, 1, 2].map(|at| sums.f_select(1, at));
        let (x, u, along) = (x?, u?, along?);
        let all = match self {
            Self::Floor { least, scale } => {
                let size = u.f_sqrt()?.f_mul_scalar(scale)?.f_clamp_min(LEAST)?;
                let factor =
                    x.f_sqrt()?.f_mul_scalar(least)?.f_div(&size)?.f_clamp_min(1.0)?.f_mul_scalar(scale)?;
                let none = factor.f_zeros_like()?;
                [factor, none.shallow_clone(), none.shallow_clone(), none.shallow_clone(), none]
            }
            Self::Sphere => {
                let stored = tensors(radii.iter().map(FlatViewMut::view))?;
                let radius = Tensor::f_cat(&stored, 0)?;
                let present = x.f_sqrt()?.f_to_kind(radius.kind())?;
                let radius = present.f_where_self(&radius.f_eq(0.0)?, &radius)?;
                for (at, mut stored) in (0..).zip(stored) {
                    stored.f_copy_(&radius.f_narrow(0, at, 1)?)?;
                }
                let radius = radius.f_to_kind(Kind::Double)?;
                let factor = radius.f_div(&u.f_sqrt()?.f_clamp_min(LEAST)?)?;
                let (along, step) = (factor.f_mul(&along)?, factor.f_square()?.f_mul(&u)?);
                [factor, radius, x, along, step]
            }
        };
        Factors::computed(&Tensor::f_stack(&all, 1)?, norms[0].device())
    }
}

/// The radius that is stored, in whatever type a checkpoint has it; the present norm is, where there is none.
#[expect(clippy::cast_possible_truncation, reason = "it may be stored as float32")]
fn radius_of(stored: &mut FlatViewMut<'_>, present: f64) -> Result<f64> {
    match stored.dtype() {
        DType::F64 => {
            let radius = stored.numbers().first_mut().ok_or_else(no_norms)?;
            *radius = if *radius == 0.0 { present } else { *radius };
            Ok(*radius)
        }
        DType::F32 => {
            let radius = stored.slice_mut::<f32>().first_mut().ok_or_else(no_norms)?;
            *radius = if *radius == 0.0 { present as f32 } else { *radius };
            Ok(f64::from(*radius))
        }
        _ => {
            let mut number = stored.tensor(&[])?;
            if f64::try_from(&*number)? == 0.0 {
                let _ = number.f_fill_(present)?;
            }
            Ok(f64::try_from(&*number)?)
        }
    }
}

fn no_norms() -> Error {
    Error::Internal("weights without the sums of their norms".into())
}

fn tensors<'a>(all: impl Iterator<Item = FlatView<'a>>) -> Result<Vec<Tensor>> {
    all.map(|x| Ok(x.tensor(&[x.len()])?.shallow_clone())).collect()
}

/// By libtorch.
mod formulas {
    use crate::kernels::libtorch::prelude::*;

    pub(super) fn weight_norms(_given: &Given<'_>, values: &mut [Value]) -> Vec<Value> {
        let [x, u] = [0, 1].map(|at: usize| values[at].wide());
        [x.square(), u.square(), x * u].map(|x| x.sum()).into()
    }

    pub(super) fn scaled(given: &Given<'_>, values: &mut [Value]) -> Vec<Value> {
        let (x, u) = (values[0].clone(), values[1].clone());
        let rate = given.scalar("rate");
        let (keep, move_by) = (1.0 - given.scalar("decay"), &rate * given.live(0));
        let moved = if given.is("late") {
            let y = x - move_by * &u;
            let kept = &y * keep;
            if given.is("cautious") { (&y * u).below(&Known(0.0)).choose(&y, &kept) } else { kept }
        } else {
            let kept = &x * keep;
            let kept =
                if given.is("cautious") { Known(0.0).at_most(&(&x * &u)).choose(&kept, &x) } else { kept };
            kept - move_by * u
        };
        values[0] = if given.is("spherical") {
            let square = given.live(2) - 2.0 * &rate * given.live(3) + &rate * &rate * given.live(4);
            let (norm, least) = (square.max(&Known(0.0)).sqrt(), Known(super::LEAST));
            given.live(1) / norm.below(&least).choose(&least, &norm) * moved
        } else {
            moved
        };
        Vec::new()
    }
}
