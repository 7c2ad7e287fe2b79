//! Formulas on slices.

#![allow(clippy::inline_always)] // every function must be compiled inside its caller's instruction set
#![allow(clippy::needless_range_loop)] // over several slices at once, by their number

use super::fold::{Fold, RUN};
use super::lanes::{LANES, sums};
use super::{Op, Real, Slot};
use crate::kernels::op::{Family, Formula, Pass};
use crate::tensor::DType;

// Loops and not `map` or closures, which the compiler calls out of line inside of a large function, at a hundred times the
// cost; and no check of an index, with which a pass over 64 elements takes three times as long.

/// The elements at one place of all operands, in the order of a constant. The place is below [`length`].
macro_rules! gather {
    ($order:expr, $read:ident, $write:ident, $at:expr) => {{
        let mut x = [C::default(); N];
        for n in 0..N {
            // SAFETY: the place is below the length of every operand.
            x[n] = unsafe {
                match $order[n] {
                    Slot::Read(r) => *$read[r].get_unchecked($at),
                    Slot::Write(w) => *$write[w].get_unchecked($at),
                }
            };
        }
        x
    }};
}

/// Writes the elements of the operands that are written. The place is below [`length`].
macro_rules! scatter {
    ($order:expr, $write:ident, $at:expr, $x:ident) => {
        for n in 0..N {
            if let Slot::Write(w) = $order[n] {
                // SAFETY: the place is below the length of every operand.
                unsafe { *$write[w].get_unchecked_mut($at) = $x[n] };
            }
        }
    };
}
pub(in crate::kernels) use {gather, scatter};

/// The length of the shortest slice; all are of one length.
#[inline(always)]
pub(in crate::kernels) fn length<C, const R: usize, const W: usize>(
    read: &[&[C]; R],
    write: &[&mut [C]; W],
) -> usize {
    let mut len = usize::MAX;
    for r in 0..R {
        len = len.min(read[r].len());
    }
    for w in 0..W {
        len = len.min(write[w].len());
    }
    len
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
        let len = length(&read, &write);
        for at in 0..len {
            let mut x = gather!(<Self as Op<N, R, W>>::ORDER, read, write, at);
            if const { matches!(F::KERNEL.family, Family::Mean) } {
                let mut all = [0.0_f64; N];
                for n in 0..N {
                    all[n] = x[n].wide();
                }
                F::update::<f64>(wide, &mut all);
                for n in 0..N {
                    x[n] = C::of(all[n]);
                }
            } else {
                F::update::<C>(own, &mut x);
            }
            scatter!(<Self as Op<N, R, W>>::ORDER, write, at, x);
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
        let len = length(&read, &write);
        let mut found = [0.0_f64; S];
        let mut terms = [[[C::default(); RUN]; 2]; S];
        for start in (0..len).step_by(RUN) {
            let count = RUN.min(len - start);
            for i in 0..count {
                let mut x = gather!(<Self as Fold<N, R, W, S>>::ORDER, read, write, start + i);
                let pairs = F::update::<C>(&constants, &mut x);
                scatter!(<Self as Fold<N, R, W, S>>::ORDER, write, start + i, x);
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
