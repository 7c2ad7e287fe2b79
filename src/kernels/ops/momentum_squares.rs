//! The momentum with the norm of what it leaves.

#![allow(clippy::inline_always)] // every pass must be compiled inside its caller's instruction set

use crate::kernels::cpu::{Fold, Op, Real, Slot};
use crate::kernels::cuda_call::{Kernel, Pass};
use crate::kernels::ops::declare::{kernel, ops};
use crate::kernels::ops::momentum::Momentum;
use crate::tensor::DType;

/// Sums of squares that are gathered side by side.
const LANES: usize = 16;

ops! {
    cuda "momentum_squares.cuh" also [&SQUARES];
}

const SQUARES: Kernel = kernel!(Sum momentum_squares = MomentumSquares told Momentum
    [g: read plain, m: update signed, u: write plain]);

/// [`Momentum`] that also sums u² in float64, of the numbers that are stored. Operands: gradient, momentum, u.
#[derive(Clone, Copy, Debug)]
pub struct MomentumSquares {
    /// The pass.
    pub momentum: Momentum,
    /// The type that u is stored in.
    pub stored: DType,
}

impl Fold<3, 1, 2, 1> for MomentumSquares {
    const ORDER: [Slot; 3] = SQUARES.order();

    #[inline(always)]
    fn apply<C: Real>(&self, job: usize, read: [&[C]; 1], [m, u]: [&mut [C]; 2]) -> [f64; 1] {
        self.momentum.apply(job, read, [m, &mut *u]);
        if self.stored == DType::BF16 { sum(u, to_bfloat16) } else { sum(u, |x| x) }
    }

    fn on_cuda(&self) -> Option<Pass<'_>> {
        Some(self.momentum.call(&SQUARES))
    }
}

#[inline(always)]
fn sum<C: Real>(u: &[C], stored: impl Fn(f64) -> f64 + Copy) -> [f64; 1] {
    let mut lanes = [0.0_f64; LANES];
    let (whole, rest) = u.as_chunks::<LANES>();
    let square = |x: &C| {
        let x = stored(x.wide());
        x * x
    };
    for chunk in whole {
        for (lane, x) in lanes.iter_mut().zip(chunk) {
            *lane += square(x);
        }
    }
    [lanes.iter().sum::<f64>() + rest.iter().map(square).sum::<f64>()]
}

/// A float32 as it is stored in bfloat16: the nearest, ties to even. NaN stays one.
#[inline(always)]
#[allow(clippy::cast_possible_truncation)] // it is a float32
fn to_bfloat16(x: f64) -> f64 {
    let bits = (x as f32).to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) & 0xffff_0000;
    if x.is_nan() { f64::NAN } else { f64::from(f32::from_bits(rounded)) }
}

/// By libtorch.
mod formulas {
    use crate::kernels::libtorch::prelude::*;

    use crate::kernels::ops::momentum::momentum_formula;

    pub(super) fn momentum_squares(given: &Given<'_>, values: &mut [Value]) -> Vec<Value> {
        momentum_formula(given, values);
        vec![given.as_stored(&values[2], 2).wide().square().sum()]
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::disallowed_methods, reason = "a test may panic")]
mod tests {
    use tch::{Device, Kind, Tensor};

    use super::*;
    use crate::kernels::Job;
    use crate::kernels::{Momentum, fold_on_cpu, run_on_cpu};
    use crate::tensor::test_views::{view, view_mut};

    #[test]
    fn sums_are_those_of_what_the_pass_stores() {
        for (kind, stored) in
            [(Kind::Float, DType::F32), (Kind::BFloat16, DType::BF16), (Kind::Double, DType::F64)]
        {
            for len in [1, 15, 1000, 300_001] {
                tch::manual_seed(len);
                let random = |kind| Tensor::randn([len], (Kind::Double, Device::Cpu)).to_kind(kind);
                let (g, m, u) = (random(Kind::Float), random(Kind::Float), random(kind));
                let momentum = Momentum { mu: 0.9, grad_factor: 0.5, nesterov: true };
                let (alone, other) = (m.copy(), u.copy());
                let job = |m, u| Job { read: [view(&g)], write: [view_mut(m), view_mut(u)] };
                run_on_cpu(&momentum, &mut [job(&alone, &other)]);
                let [[sum]] = fold_on_cpu(&MomentumSquares { momentum, stored }, &mut [job(&m, &u)])[..]
                else {
                    panic!("one job has one sum");
                };
                assert!(m.equal(&alone) && u.equal(&other), "{kind:?} {len}");
                let expected = u.to_kind(Kind::Double).square().sum(Kind::Double).double_value(&[]);
                assert!((sum - expected).abs() <= 1e-13 * expected, "{kind:?} {len}: {sum} {expected}");
            }
        }
    }

    #[test]
    fn what_is_not_finite_shows() {
        let g = Tensor::from_slice(&[1.0_f32, f32::NAN, 3.0]);
        let inf = Tensor::from_slice(&[1.0_f32, f32::INFINITY, 3.0]);
        for (g, is_nan) in [(g, true), (inf, false)] {
            for (kind, stored) in [(Kind::Float, DType::F32), (Kind::BFloat16, DType::BF16)] {
                let [m, u] = [Kind::Float, kind].map(|kind| Tensor::zeros([3], (kind, Device::Cpu)));
                let momentum = Momentum { mu: 1.0, grad_factor: 1.0, nesterov: false };
                let job = Job { read: [view(&g)], write: [view_mut(&m), view_mut(&u)] };
                let [[sum]] = fold_on_cpu(&MomentumSquares { momentum, stored }, &mut [job])[..] else {
                    panic!("one job has one sum");
                };
                assert!(if is_nan { sum.is_nan() } else { sum.is_infinite() }, "{sum}");
            }
        }
    }
}
