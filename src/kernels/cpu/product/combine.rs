//! Elementwise passes between products.
#![allow(clippy::inline_always)] // every `apply` must be compiled inside its caller's instruction set

use super::super::{Op, Real};

/// `x ← factor x`.
#[derive(Clone, Copy, Debug)]
pub struct Scale(pub f64);

impl Op<1> for Scale {
    const WRITES: [bool; 1] = [true];

    #[inline(always)]
    fn apply<C: Real>(&self, _job: usize, [x]: [&mut [C]; 1]) {
        let factor = C::of(self.0);
        x.iter_mut().for_each(|x| *x = factor * *x);
    }
}

/// `out ← keep out + factor x`; `out` is not read where `keep` is zero. Operands: out, x.
#[derive(Clone, Copy, Debug)]
pub struct Combine {
    /// Factor of what is there.
    pub keep: f64,
    /// Factor of `x`.
    pub factor: f64,
}

impl Op<2> for Combine {
    const WRITES: [bool; 2] = [true, false];

    #[inline(always)]
    fn apply<C: Real>(&self, _job: usize, [out, x]: [&mut [C]; 2]) {
        let (keep, factor) = (C::of(self.keep), C::of(self.factor));
        if self.keep == 0.0 {
            out.iter_mut().zip(x).for_each(|(out, x)| *out = factor * *x);
        } else {
            out.iter_mut().zip(x).for_each(|(out, x)| *out = keep * *out + factor * *x);
        }
    }
}
