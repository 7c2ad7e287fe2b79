//! Kernels of operations as they are declared, and how devices call them.

#![cfg_attr(not(feature = "cuda"), allow(dead_code))] // used by device builds only

use std::ops::Range;

use super::formula::tape::{Expr, Tape};
use super::formula::{Num, Own};
use crate::tensor::{DType, FlatView};

/// Scalars of an operation at most.
pub(super) const MOST_SCALARS: usize = 12;

/// A scalar of an operation.
#[derive(Clone, Copy, Debug)]
pub struct Scalar {
    /// Its name in Rust and on devices.
    pub name: &'static str,
    /// True if the scalar is yes or no.
    pub is_flag: bool,
    /// True if the scalar is, or may be, proportional to the learning rate.
    pub follows_rate: bool,
}

/// Contents of an operand, which say how it may be stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// A parameter or an average of it, which may be rounded at random.
    Param,
    /// Numbers of their type.
    Plain,
    /// A state of either sign, which may be quantized.
    Signed,
    /// A state without negative numbers, which may be quantized.
    Unsigned,
}

/// An operand of a kernel.
#[derive(Clone, Copy, Debug)]
pub struct Operand {
    /// Its name in the operation's equation.
    pub name: &'static str,
    /// True if the operand's elements are read.
    pub reads: bool,
    /// True if the operand's elements are written.
    pub writes: bool,
    /// Its contents.
    pub content: Content,
}

/// Slot of an operand in a job: the number of one that is read, or of one that is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Slot {
    /// Read only.
    Read(usize),
    /// Written.
    Write(usize),
}

/// The kind of pass that a kernel makes, each compiled by sources of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// Over elements.
    Elementwise,
    /// Over elements, with sums.
    Sum,
    /// Over elements, in float64 whatever their type.
    Mean,
    /// Over the rows of matrices.
    Row,
}

/// A kernel of an operation: the one source of its name, of its operands and of the order of its scalars.
#[derive(Clone, Copy, Debug)]
pub struct Kernel {
    /// Its name, without what says how many jobs it takes.
    pub name: &'static str,
    /// The operation on devices.
    pub device: &'static str,
    /// Its pass.
    pub family: Family,
    /// Its scalars, in the order in which a device gets them.
    pub scalars: &'static [Scalar],
    /// Its recorded formula.
    pub(super) tape: fn() -> &'static Tape,
    /// Its operands, in order.
    pub operands: &'static [Operand],
    /// True if sums are taken of the last operand as it is stored.
    pub(super) sums_stored: bool,
}

impl Kernel {
    /// Slot of a job for each operand: those that are only read in order, and those that are written.
    pub(super) const fn order<const N: usize>(&self) -> [Slot; N] {
        assert!(self.operands.len() == N);
        let (mut order, mut read, mut written, mut at) = ([Slot::Read(0); N], 0, 0, 0);
        while at < N {
            order[at] = if self.operands[at].writes { Slot::Write(written) } else { Slot::Read(read) };
            if self.operands[at].writes {
                written += 1;
            } else {
                read += 1;
            }
            at += 1;
        }
        order
    }

    /// Tests whether the kernel has a variant for operands that are more than numbers of their type.
    #[must_use]
    pub fn has_encoded_form(&self) -> bool {
        matches!(self.family, Family::Elementwise | Family::Sum)
            && self.operands.iter().any(|operand| operand.content != Content::Plain)
    }
}

/// Kernels that are declared in one file.
pub(super) type Declared = &'static [&'static Kernel];

/// The scalars of an operation.
pub trait Operation: Sync {
    /// The scalars in the order of a kernel's arguments.
    const SCALARS: &'static [Scalar];
    /// The scalars by name.
    type Scalars<W: Num>: Copy;

    /// Returns their values.
    fn scalars(&self) -> Self::Scalars<f64>;
    /// Returns them as they are recorded.
    fn recorded() -> Self::Scalars<Expr>;
    /// Returns the numbers of a job.
    fn own(&self, job: usize) -> Own<f64>;
    /// Returns the call of a kernel with these scalars.
    fn call(&self, kernel: &'static Kernel) -> Pass<'_>;
}

/// An elementwise formula on `N` operands (`R` only read, `W` written), with `S` sums of products.
pub trait Formula<const N: usize, const R: usize, const W: usize, const S: usize = 0>: Operation {
    /// Its kernel.
    const KERNEL: &'static Kernel;
    /// Numbers that all elements of a job have in common.
    type Constants<V: Num>: Copy;

    /// Computes the constants of a job in float64.
    fn constants<V: Num>(scalars: Self::Scalars<V::Wide>, own: &Own<V::Wide>) -> Self::Constants<V>;

    /// Updates one element of each operand; returns the two factors of what each sum adds up.
    fn update<V: Num>(constants: &Self::Constants<V>, x: &mut [V; N]) -> [[V; 2]; S];

    /// Factor of the sums' terms: sums are multiplied by its square.
    fn factor(&self) -> f64 {
        1.0
    }

    /// The type of the last operand, if the terms are taken as they are stored there.
    fn stored(&self) -> Option<DType> {
        None
    }
}

/// Records the formula of a kernel.
pub(super) fn record<
    F: Formula<N, R, W, S>,
    const N: usize,
    const R: usize,
    const W: usize,
    const S: usize,
>() -> Tape {
    Tape::record(|x: &mut [Expr; N]| {
        let constants = F::constants::<Expr>(F::recorded(), &Own::recorded());
        F::update::<Expr>(&constants, x).map(Some).to_vec()
    })
}

/// A call of a kernel: its arguments except the operands.
#[derive(Clone, Copy, Debug)]
pub struct Pass<'a> {
    /// The kernel, without what says how many jobs it takes.
    pub(super) kernel: &'static str,
    /// Its declaration.
    pub(super) declared: &'static Kernel,
    /// In the order of the kernel's declaration.
    pub(super) scalars: [f64; MOST_SCALARS],
    /// A bit for each scalar that is proportional to the learning rate, by which a device multiplies it that has the rate.
    pub(super) per_rate: u32,
    /// Two factors of each job's own; none where the operation has none.
    pub(super) factors: &'a [[f64; 2]],
    /// Counters of the steps of each job, if they are on the device: its factors depend on them.
    pub(super) steps: &'a [FlatView<'a>],
    /// Factors of each job, where the device left them; none where the operation has none of that kind.
    pub(super) live: &'a [FlatView<'a>],
    /// True if arithmetic is float64 whatever the operands are.
    pub(super) double: bool,
}

/// Second moments of a stack of matrices by row, by column and of all; by column alone where they are by element; empty views
/// where nothing is scaled.
pub(super) type ScaleMoments<'a> = [FlatView<'a>; 3];

/// Call of a pass over the rows of matrices.
#[derive(Clone, Debug)]
pub struct RowPassCall<'a> {
    /// The kernel and its arguments.
    pub(super) pass: Pass<'a>,
    /// The moments that scale every job; none where the operation has no scales.
    pub(super) scales: [Vec<ScaleMoments<'a>>; 2],
}

impl<'a> Pass<'a> {
    /// Returns the call of a kernel with these scalars. A scalar with `true` follows the learning rate.
    pub(super) fn new<const N: usize>(kernel: &'static Kernel, args: [(f64, bool); N]) -> Self {
        const { assert!(N <= MOST_SCALARS) };
        debug_assert_eq!(N, kernel.scalars.len(), "{}", kernel.name);
        let (mut scalars, mut per_rate) = ([0.0; MOST_SCALARS], 0);
        for (at, (to, (scalar, follows))) in scalars.iter_mut().zip(args).enumerate() {
            *to = scalar;
            per_rate |= u32::from(follows) << at;
        }
        let (declared, kernel, double) = (kernel, kernel.name, matches!(kernel.family, Family::Mean));
        Self { kernel, declared, scalars, per_rate, factors: &[], steps: &[], live: &[], double }
    }

    /// The same with factors of each job's own.
    pub(super) fn with(self, factors: &'a [[f64; 2]]) -> Self {
        Self { factors, ..self }
    }

    /// The same with the steps of each job.
    pub(super) fn after(self, steps: &'a [FlatView<'a>]) -> Self {
        Self { steps, ..self }
    }

    /// The same with factors of each job's own that the device left.
    pub(super) fn reading(self, live: &'a (impl AsRef<[FlatView<'a>]> + ?Sized)) -> Self {
        Self { live: live.as_ref(), ..self }
    }

    /// As a pass over rows with these scales.
    pub(super) fn over_rows(self, scales: [Vec<ScaleMoments<'a>>; 2]) -> RowPassCall<'a> {
        RowPassCall { pass: self, scales }
    }
}

impl RowPassCall<'_> {
    /// The same for some of the jobs only.
    pub(super) fn of(&self, jobs: Range<usize>) -> Self {
        fn part<T>(all: &[T], jobs: Range<usize>) -> &[T] {
            all.get(jobs).unwrap_or_default()
        }
        let pass = Pass {
            factors: part(self.pass.factors, jobs.clone()),
            steps: part(self.pass.steps, jobs.clone()),
            live: part(self.pass.live, jobs.clone()),
            ..self.pass
        };
        let scales = self.scales.each_ref().map(|scales| part(scales, jobs.clone()).to_vec());
        Self { pass, scales }
    }
}
