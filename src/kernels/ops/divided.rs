//! Matrices divided by their norms, on a device.

#![allow(clippy::inline_always)] // formulas must be compiled inside their caller's instruction set

use super::declare::{kernel, operation};
use super::scaled::at_least;
use crate::error::Result;
use crate::kernels::formula::{Num, Own};
use crate::kernels::libtorch::on_device;
use crate::kernels::op::{Declared, Formula, Kernel, Operation as _};
#[cfg(feature = "cuda")]
use crate::kernels::ops::sum_of_squares::squares_there;
use crate::tensor::FlatView;

const SOURCES: &[&str] = &["updates.cu"];
/// The least divisor, whose reciprocal is a float32: a zero matrix stays zero.
pub const LEAST_DIVISOR: f64 = 1e-37;

operation! {
    /// `y ← x / max(factor·√s + epsilon, 1e-37)` with Σ x² of each job as s. Operands: x, y.
    #[derive(Clone, Copy, Debug)]
    pub(in crate::kernels) struct Divided as DividedScalars {
        /// Factor of the norm.
        factor: f64,
        /// Summand of the divisor.
        epsilon: f64,
    }
}

pub(in crate::kernels) const DECLARED: Declared = &[Divided::KERNEL];

impl Formula<2, 1, 1> for Divided {
    const KERNEL: &'static Kernel = kernel!(Elementwise divided = Divided [x: read plain, y: write plain]);
    type Constants<V: Num> = V;

    #[inline(always)]
    fn constants<V: Num>(s: DividedScalars<V::Wide>, own: &Own<V::Wide>) -> V {
        V::narrow(V::Wide::of(1.0) / at_least(s.factor * own.live[0].sqrt() + s.epsilon, LEAST_DIVISOR))
    }

    #[inline(always)]
    fn update<V: Num>(inverse: &V, [x, y]: &mut [V; 2]) -> [[V; 2]; 0] {
        *y = *inverse * *x;
        []
    }
}

/// Divides `count` equal parts of memory of a device by their norms, in one launch. `squares`: Σ x² of each, in float64, where
/// they are known. `to` may be the same memory in another type of the same size. False, with nothing done, where no kernels
/// are in use.
///
/// # Errors
/// As [`crate::kernels::run`].
#[cfg_attr(not(feature = "cuda"), allow(clippy::unnecessary_wraps, unused_variables))]
pub fn divide_parts(
    [x, to]: [&FlatView<'_>; 2],
    count: usize,
    squares: Option<&[FlatView<'_>]>,
    scalars: [f64; 2],
) -> Result<bool> {
    on_device!(SOURCES; divide([x, to], count, squares, scalars).map(|()| true), else Ok(false))
}

#[cfg(feature = "cuda")]
fn divide(
    operands: [&FlatView<'_>; 2],
    count: usize,
    squares: Option<&[FlatView<'_>]>,
    [factor, epsilon]: [f64; 2],
) -> Result<()> {
    let Some(squares) = squares else {
        let (_memory, all) = squares_there(operands[0], count)?;
        let each: Vec<_> = (0..count).map(|i| all.part(i, 1)).collect();
        return divide(operands, count, Some(&each), [factor, epsilon]);
    };
    let each = operands[0].len() / count.max(1);
    let jobs: Vec<_> = (0..count).map(|i| operands.map(|x| x.part(i * each, each))).collect();
    crate::kernels::cuda::run(&Divided { factor, epsilon }.call(Divided::KERNEL).reading(squares), &jobs)
}
