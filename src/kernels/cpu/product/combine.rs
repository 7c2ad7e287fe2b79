//! Elementwise passes between products.
#![allow(clippy::inline_always)] // every `apply` must be compiled inside its caller's instruction set

use super::super::fold::Fold;
use super::super::reduce::{set_values, values};
use super::super::{Op, Real, Slot};
use crate::tensor::{FlatView, FlatViewMut};

/// Sums of squares that are gathered side by side.
const LANES: usize = 16;

/// Σ x² in float64, so that no finite float32 overflows. Operand: x.
#[derive(Clone, Copy, Debug)]
pub struct WideSquares;

impl Fold<1, 1, 0, 1> for WideSquares {
    const ORDER: [Slot; 1] = [Slot::Read(0)];

    #[inline(always)]
    fn apply<C: Real>(&self, _job: usize, [x]: [&[C]; 1], []: [&mut [C]; 0]) -> [f64; 1] {
        let mut lanes = [0.0_f64; LANES];
        let (whole, rest) = x.as_chunks::<LANES>();
        for chunk in whole {
            for (lane, x) in lanes.iter_mut().zip(chunk) {
                *lane += x.wide() * x.wide();
            }
        }
        [lanes.iter().sum::<f64>() + rest.iter().map(|x| x.wide() * x.wide()).sum::<f64>()]
    }
}

/// Divides row `i` of the short side of the row-major `[rows, cols]` matrix `x` by `factor sqrt(Σ_j |gram[i, j]|)`; a row
/// whose sum is zero becomes zero.
pub fn divide_rows(x: &mut FlatViewMut<'_>, [rows, cols]: [usize; 2], gram: &FlatView<'_>, factor: f64) {
    let short = rows.min(cols);
    let factors: Vec<f64> = (0..short)
        .map(|i| {
            let sum: f64 = values(&gram.part(i * short, short)).iter().map(|g| g.abs()).sum();
            if sum == 0.0 { 0.0 } else { (sum.sqrt() * factor).recip() }
        })
        .collect();
    for i in 0..rows {
        let row = x.part(i * cols, cols);
        let mut numbers = values(&row.view());
        for (j, number) in numbers.iter_mut().enumerate() {
            *number *= factors[if rows > cols { j } else { i }];
        }
        set_values(&numbers, row);
    }
}

/// `x ← factor x`.
#[derive(Clone, Copy, Debug)]
pub struct Scale(pub f64);

impl Op<1, 0, 1> for Scale {
    const ORDER: [Slot; 1] = [Slot::Write(0)];
    type Constants<C: Real> = C;

    #[inline(always)]
    fn constants<C: Real>(&self, _job: usize) -> C {
        C::of(self.0)
    }

    #[inline(always)]
    fn apply<C: Real>(&self, factor: &C, []: [&[C]; 0], [x]: [&mut [C]; 1]) {
        for x in x {
            *x = *factor * *x;
        }
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

impl Op<2, 1, 1> for Combine {
    const ORDER: [Slot; 2] = [Slot::Write(0), Slot::Read(0)];
    type Constants<C: Real> = [C; 2];

    #[inline(always)]
    fn constants<C: Real>(&self, _job: usize) -> [C; 2] {
        [self.keep, self.factor].map(C::of)
    }

    #[inline(always)]
    fn apply<C: Real>(&self, &[keep, factor]: &[C; 2], [x]: [&[C]; 1], [out]: [&mut [C]; 1]) {
        if self.keep == 0.0 {
            out.iter_mut().zip(x).for_each(|(out, x)| *out = factor * *x);
        } else {
            out.iter_mut().zip(x).for_each(|(out, x)| *out = keep * *out + factor * *x);
        }
    }
}
