//! Conversion of one type to another, and counters.

#![allow(clippy::inline_always)] // formulas must be compiled inside their caller's instruction set

use super::declare::{kernel, operation};
use crate::kernels::formula::{Num, Own};
use crate::kernels::op::{Declared, Formula, Kernel};

operation! {
    /// `y ← factor·x`, from one type to another. Operands: x, y.
    #[derive(Clone, Copy, Debug)]
    pub struct Convert as ConvertScalars {
        /// The factor.
        factor: f64,
    }
}

operation! {
    /// `x ← x + 1`. Operand: x.
    #[derive(Clone, Copy, Debug)]
    pub(in crate::kernels) struct Count as CountScalars {
    }
}

pub(in crate::kernels) const DECLARED: Declared = &[Convert::KERNEL, Count::KERNEL];

impl Formula<2, 1, 1> for Convert {
    const KERNEL: &'static Kernel =
        kernel!(Elementwise convert = Convert [x: read unsigned, y: write signed]);
    type Constants<V: Num> = V;

    #[inline(always)]
    fn constants<V: Num>(s: ConvertScalars<V::Wide>, _: &Own<V::Wide>) -> V {
        V::narrow(s.factor)
    }

    #[inline(always)]
    fn update<V: Num>(factor: &V, [x, y]: &mut [V; 2]) -> [[V; 2]; 0] {
        *y = *factor * *x;
        []
    }
}

impl Formula<1, 0, 1> for Count {
    const KERNEL: &'static Kernel = kernel!(Elementwise count = Count [x: update plain]);
    type Constants<V: Num> = ();

    #[inline(always)]
    fn constants<V: Num>(_: CountScalars<V::Wide>, _: &Own<V::Wide>) {}

    #[inline(always)]
    fn update<V: Num>((): &(), [x]: &mut [V; 1]) -> [[V; 2]; 0] {
        *x = *x + V::of(1.0);
        []
    }
}
