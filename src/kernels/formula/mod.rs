//! Formulas of operations, each written once over a kind of numbers: compiled for the CPU, and recorded ([`tape`]) to be
//! carried out by libtorch and printed as a CUDA kernel.

#![allow(clippy::inline_always)] // formulas must be compiled inside their caller's instruction set

pub(in crate::kernels) mod tape;

use std::ops::{Add, Div, Mul, Neg, Sub};

/// A kind of numbers that formulas are written over.
pub trait Num:
    Copy
    + std::fmt::Debug
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
{
    /// Float64 numbers of this kind, in which constants are computed.
    type Wide: Num<Flag = Self::Flag, Wide = Self::Wide>;
    /// Answers of comparisons.
    type Flag: Copy + std::fmt::Debug;

    /// A constant.
    fn of(x: f64) -> Self;
    /// Rounds a constant to the type of the arithmetic.
    fn narrow(x: Self::Wide) -> Self;
    /// Square root.
    fn sqrt(self) -> Self;
    /// Exponential function.
    fn exp(self) -> Self;
    /// Natural logarithm.
    fn ln(self) -> Self;
    /// Power.
    fn powf(self, exponent: Self::Wide) -> Self;
    /// Power of a constant to a number of steps.
    fn power(self, steps: Self) -> Self;
    /// Compares; false for NaN.
    fn lt(self, other: Self) -> Self::Flag;
    /// Compares; false for NaN.
    fn ge(self, other: Self) -> Self::Flag;
    /// A flag that holds nowhere.
    fn never() -> Self::Flag;
    /// Tests whether both hold.
    fn both(a: Self::Flag, b: Self::Flag) -> Self::Flag;
    /// Returns `yes` where the flag holds, else `no`.
    fn select(flag: Self::Flag, yes: Self, no: Self) -> Self;
}

macro_rules! number {
    ($type:ty) => {
        impl Num for $type {
            type Wide = f64;
            type Flag = bool;

            #[inline(always)]
            #[allow(clippy::cast_possible_truncation, trivial_numeric_casts)] // rounding is the purpose
            fn of(x: f64) -> Self {
                x as Self
            }
            #[inline(always)]
            fn narrow(x: f64) -> Self {
                Self::of(x)
            }
            #[inline(always)]
            fn sqrt(self) -> Self {
                self.sqrt()
            }
            #[inline(always)]
            fn exp(self) -> Self {
                self.exp()
            }
            #[inline(always)]
            fn ln(self) -> Self {
                self.ln()
            }
            #[inline(always)]
            fn powf(self, exponent: f64) -> Self {
                Self::of(f64::from(self).powf(exponent))
            }
            #[inline(always)]
            fn power(self, steps: Self) -> Self {
                self.powf(steps)
            }
            #[inline(always)]
            fn lt(self, other: Self) -> bool {
                self < other
            }
            #[inline(always)]
            fn ge(self, other: Self) -> bool {
                self >= other
            }
            #[inline(always)]
            fn never() -> bool {
                false
            }
            #[inline(always)]
            fn both(a: bool, b: bool) -> bool {
                a & b
            }
            #[inline(always)]
            fn select(flag: bool, yes: Self, no: Self) -> Self {
                if flag { yes } else { no }
            }
        }
    };
}
number!(f32);
number!(f64);

/// Numbers of one job, in addition to the scalars of all jobs.
#[derive(Clone, Copy, Debug)]
pub struct Own<W: Num> {
    /// Two factors that the host knows.
    pub factors: [W; 2],
    /// Factors that an earlier pass of the step left.
    pub live: [W; 5],
    /// True where the number of steps is counted on a device.
    pub counts: W::Flag,
    /// The number of steps that are counted there.
    pub steps: W,
    /// The learning rate that is read on a device; 1 where the host knows it.
    pub rate: W,
}

impl Own<f64> {
    /// Numbers of a job without a factor, a rate or steps that the host knows.
    pub(in crate::kernels) const NONE: Self =
        Self { factors: [f64::NAN; 2], live: [f64::NAN; 5], counts: false, steps: 0.0, rate: 1.0 };

    /// The same with two factors.
    #[inline(always)]
    pub(in crate::kernels) fn with(self, factors: [f64; 2]) -> Self {
        Self { factors, ..self }
    }

    /// The same with factors that an earlier pass left.
    #[inline(always)]
    pub(in crate::kernels) fn reading<const K: usize>(mut self, left: [f64; K]) -> Self {
        self.live[..K].copy_from_slice(&left);
        self
    }
}

/// `rate / (1 - β₁ᵗ)` and `1 / √(1 - β₂ᵗ)`: the factors of Adam's moments. They are the job's own where the host counts the
/// steps; else the first of those is the rate. `unit` multiplies the rate.
#[inline(always)]
pub(in crate::kernels) fn corrections<W: Num>(own: &Own<W>, [beta1, beta2]: [W; 2], unit: W) -> [W; 2] {
    let (one, [rate, root]) = (W::of(1.0), own.factors);
    let rate = rate * unit;
    [
        W::select(own.counts, rate / (one - beta1.power(own.steps)), rate),
        W::select(own.counts, one / (one - beta2.power(own.steps)).sqrt(), root),
    ]
}
