//! The momentum with the norm of what it leaves.

#![allow(clippy::inline_always)] // formulas must be compiled inside their caller's instruction set

use super::declare::{kernel, operation_of};
use super::momentum::{Momentum, MomentumScalars};
use crate::kernels::formula::{Num, Own};
use crate::kernels::op::{Declared, Formula, Kernel};
use crate::tensor::DType;

/// [`Momentum`] that also sums u² in float64, of the numbers that are stored. Operands: gradient, momentum, u.
#[derive(Clone, Copy, Debug)]
pub struct MomentumSquares {
    /// The pass.
    pub momentum: Momentum,
    /// The type that u is stored in.
    pub stored: DType,
}

pub(in crate::kernels) const DECLARED: Declared = &[MomentumSquares::KERNEL];

operation_of!([] MomentumSquares: momentum is Momentum as MomentumScalars);

impl Formula<3, 1, 2, 1> for MomentumSquares {
    const KERNEL: &'static Kernel = kernel!(Sum momentum_squares = MomentumSquares
        [g: read plain, m: update signed, u: write plain] 1 of stored);
    type Constants<V: Num> = <Momentum as Formula<3, 1, 2>>::Constants<V>;

    #[inline(always)]
    fn constants<V: Num>(s: MomentumScalars<V::Wide>, own: &Own<V::Wide>) -> Self::Constants<V> {
        <Momentum as Formula<3, 1, 2>>::constants::<V>(s, own)
    }

    #[inline(always)]
    fn update<V: Num>(k: &Self::Constants<V>, x: &mut [V; 3]) -> [[V; 2]; 1] {
        <Momentum as Formula<3, 1, 2>>::update::<V>(k, x);
        [[x[2]; 2]]
    }

    fn stored(&self) -> Option<DType> {
        Some(self.stored)
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
