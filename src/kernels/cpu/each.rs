//! Formulas on slices.

#![allow(clippy::inline_always)] // every function must be compiled inside its caller's instruction set
#![allow(clippy::needless_range_loop)] // over several slices at once, of which only their number is known

use super::fold::{Fold, RUN};
use super::lanes::{LANES, sums};
use super::{Op, Real, Slot};
use crate::kernels::op::{Family, Formula, Pass};
use crate::tensor::DType;

/// The elements at one place of all operands.
#[inline(always)]
pub(in crate::kernels) fn gather<C: Real, const N: usize, const R: usize, const W: usize>(
    order: &[Slot; N],
    read: &[&[C]; R],
    write: &[&mut [C]; W],
    at: usize,
) -> [C; N] {
    order.map(|slot| match slot {
        Slot::Read(r) => read[r][at],
        Slot::Write(w) => write[w][at],
    })
}

/// Writes the elements of the operands that are written.
#[inline(always)]
pub(in crate::kernels) fn scatter<C: Real, const N: usize, const W: usize>(
    order: &[Slot; N],
    write: &mut [&mut [C]; W],
    at: usize,
    x: &[C; N],
) {
    for n in 0..N {
        if let Slot::Write(w) = order[n] {
            write[w][at] = x[n];
        }
    }
}

/// Slices of one length, cut to it so that no index has to be checked.
#[inline(always)]
pub(in crate::kernels) fn alike<'a, C, const R: usize, const W: usize>(
    read: [&'a [C]; R],
    write: [&'a mut [C]; W],
) -> (usize, [&'a [C]; R], [&'a mut [C]; W]) {
    let len = read.first().map_or_else(|| write.first().map_or(0, |x| x.len()), |x| x.len());
    (len, read.map(|x| &x[..len]), write.map(|x| &mut x[..len]))
}

impl<F: Formula<N, R, W>, const N: usize, const R: usize, const W: usize> Op<N, R, W> for F {
    const ORDER: [Slot; N] = F::KERNEL.order::<N>();
    type Constants<C: Real> =
        (<F as Formula<N, R, W>>::Constants<C>, <F as Formula<N, R, W>>::Constants<f64>);

    #[inline(always)]
    fn constants<C: Real>(&self, job: usize) -> Self::Constants<C> {
        let (scalars, own) = (self.scalars(), self.own(job));
        (F::constants::<C>(scalars, &own), F::constants::<f64>(scalars, &own))
    }

    #[inline(always)]
    fn apply<C: Real>(&self, (own, wide): &Self::Constants<C>, read: [&[C]; R], write: [&mut [C]; W]) {
        let (len, read, mut write) = alike(read, write);
        for at in 0..len {
            let mut x = gather(&<Self as Op<N, R, W>>::ORDER, &read, &write, at);
            if matches!(F::KERNEL.family, Family::Mean) {
                let mut all = x.map(C::wide);
                F::update::<f64>(wide, &mut all);
                x = all.map(C::of);
            } else {
                F::update::<C>(own, &mut x);
            }
            scatter(&<Self as Op<N, R, W>>::ORDER, &mut write, at, &x);
        }
    }

    fn on_cuda(&self) -> Option<Pass<'_>> {
        Some(self.call(F::KERNEL))
    }
}

/// Σ a·b, in the type of the arithmetic; in float64 where that overflows.
#[inline(always)]
pub(in crate::kernels) fn products<C: Real>(a: &[C], b: &[C]) -> f64 {
    let sum = sums!(a, b;; j => a[j] * b[j]);
    if sum.is_finite() { sum } else { a.iter().zip(b).map(|(a, b)| a.wide() * b.wide()).sum() }
}

/// Σ a² in float64, of numbers as they are stored.
#[inline(always)]
fn squares_of_stored<C: Real>(x: &[C], stored: impl Fn(f64) -> f64 + Copy) -> f64 {
    let mut lanes = [0.0_f64; LANES];
    let (whole, rest) = x.as_chunks::<LANES>();
    let square = |x: &C| {
        let x = stored(x.wide());
        x * x
    };
    for chunk in whole {
        for (lane, x) in lanes.iter_mut().zip(chunk) {
            *lane += square(x);
        }
    }
    lanes.iter().sum::<f64>() + rest.iter().map(square).sum::<f64>()
}

/// A float32 as it is stored in bfloat16: the nearest, ties to even. NaN stays one.
#[inline(always)]
#[allow(clippy::cast_possible_truncation)] // it is a float32
fn to_bfloat16(x: f64) -> f64 {
    let bits = (x as f32).to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) & 0xffff_0000;
    if x.is_nan() { f64::NAN } else { f64::from(f32::from_bits(rounded)) }
}

impl<F: Formula<N, R, W, S>, const N: usize, const R: usize, const W: usize, const S: usize> Fold<N, R, W, S>
    for F
{
    const ORDER: [Slot; N] = F::KERNEL.order::<N>();

    #[inline(always)]
    fn apply<C: Real>(&self, job: usize, read: [&[C]; R], write: [&mut [C]; W]) -> [f64; S] {
        let constants = F::constants::<C>(self.scalars(), &self.own(job));
        let (len, read, mut write) = alike(read, write);
        let mut found = [0.0_f64; S];
        let mut terms = [[[C::default(); RUN]; 2]; S];
        for start in (0..len).step_by(RUN) {
            let count = RUN.min(len - start);
            for i in 0..count {
                let mut x = gather(&<Self as Fold<N, R, W, S>>::ORDER, &read, &write, start + i);
                let pairs = F::update::<C>(&constants, &mut x);
                scatter(&<Self as Fold<N, R, W, S>>::ORDER, &mut write, start + i, &x);
                for s in 0..S {
                    terms[s][0][i] = pairs[s][0];
                    terms[s][1][i] = pairs[s][1];
                }
            }
            for s in 0..S {
                let [a, b] = [&terms[s][0][..count], &terms[s][1][..count]];
                found[s] += match self.stored() {
                    None => products(a, b),
                    Some(DType::BF16) => squares_of_stored(a, to_bfloat16),
                    Some(_) => squares_of_stored(a, |x| x),
                };
            }
        }
        found
    }

    fn factor(&self) -> f64 {
        Formula::factor(self)
    }

    fn on_cuda(&self) -> Option<Pass<'_>> {
        Some(self.call(F::KERNEL))
    }
}
