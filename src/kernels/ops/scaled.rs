//! Updates of matrices whose norm they keep, or that they follow.

#![allow(clippy::inline_always)] // formulas must be compiled inside their caller's instruction set

use tch::{Kind, Tensor};

use super::apply::Rule;
use super::declare::{kernel, operation};
use super::factors::Factors;
use crate::error::{Error, Result};
use crate::kernels::formula::{Num, Own};
use crate::kernels::op::{Declared, Formula, Kernel};
use crate::tensor::{DType, Device, FlatView, FlatViewMut};

/// The least norm that is divided by.
const LEAST: f64 = 1e-10;

operation! {
    /// Σ x², Σ u² and Σ x·u in float64. Operands: x, u.
    #[derive(Clone, Copy, Debug)]
    pub struct WeightNorms as WeightNormsScalars {
    }
}

operation! {
    /// `x ← a·((1 - decay)·x - rate·f·u)` by the [`Rule`], with factors f and a of each job. Operands: x, u.
    #[derive(Debug)]
    pub struct Scaled as ScaledScalars {
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
    }
}

pub(in crate::kernels) const DECLARED: Declared = &[WeightNorms::KERNEL, Scaled::KERNEL];

impl Formula<2, 2, 0, 3> for WeightNorms {
    const KERNEL: &'static Kernel = kernel!(Sum weight_norms = WeightNorms [x: read param, u: read plain] 3);
    type Constants<V: Num> = ();

    #[inline(always)]
    fn constants<V: Num>(_: WeightNormsScalars<V::Wide>, _: &Own<V::Wide>) {}

    #[inline(always)]
    fn update<V: Num>((): &(), [x, u]: &mut [V; 2]) -> [[V; 2]; 3] {
        [[*x; 2], [*u; 2], [*x, *u]]
    }
}

impl Formula<2, 1, 1> for Scaled {
    const KERNEL: &'static Kernel = kernel!(Elementwise scaled = Scaled [x: update param, u: read plain]);
    type Constants<V: Num> = ([V; 2], Rule<V>);

    #[inline(always)]
    fn constants<V: Num>(s: ScaledScalars<V::Wide>, own: &Own<V::Wide>) -> Self::Constants<V> {
        let ([factor, radius, square, along, step], rate) = (own.live, s.rate);
        let square = square - V::Wide::of(2.0) * rate * along + rate * rate * step;
        let norm = at_least(at_least(square, 0.0).sqrt(), LEAST);
        let scale = V::Wide::select(s.spherical, radius / norm, V::Wide::of(1.0));
        ([rate * factor, scale].map(V::narrow), Rule::new(s.decay, s.cautious).late(s.late))
    }

    #[inline(always)]
    fn update<V: Num>(([rate, scale], rule): &Self::Constants<V>, [x, u]: &mut [V; 2]) -> [[V; 2]; 0] {
        *x = *scale * rule.apply(*x, *u, *rate * *u);
        []
    }
}

/// The larger one of both; NaN stays.
#[inline(always)]
pub(super) fn at_least<W: Num>(x: W, least: f64) -> W {
    let least = W::of(least);
    W::select(x.lt(least), least, x)
}

/// Rules for the size of an update.
#[derive(Clone, Copy, Debug)]
pub enum SizeRule {
    /// The norm that the weights had when they were first seen, which they keep.
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
