//! Kernels of operations as they are declared, and how they are called where they are compiled apart from this crate.

#![cfg_attr(not(feature = "cuda"), allow(dead_code))] // what is said is for devices

use std::ops::Range;

use super::libtorch::given::Formula;
use crate::tensor::FlatView;

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
    /// A state of either sign, which may be codes.
    Signed,
    /// A state without negative numbers, which may be codes.
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
    /// The structure that has its scalars.
    pub told: &'static str,
    /// In the order in which a device gets them.
    pub scalars: &'static [Scalar],
    /// Its work by libtorch.
    pub(super) formula: Formula,
    /// In order.
    pub operands: &'static [Operand],
}

impl Kernel {
    /// Number of operands that are written, or only read.
    pub(super) const fn operands_that_are(&self, written: bool) -> usize {
        let (mut count, mut at) = (0, 0);
        while at < self.operands.len() {
            if self.operands[at].writes == written {
                count += 1;
            }
            at += 1;
        }
        count
    }

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

    /// Tests whether the kernel takes operands in this order.
    pub(super) const fn takes<const N: usize>(&self, expected: [Slot; N]) -> bool {
        let (order, mut at) = (self.order::<N>(), 0);
        while at < N {
            match (order[at], expected[at]) {
                (Slot::Read(a), Slot::Read(b)) | (Slot::Write(a), Slot::Write(b)) if a == b => {}
                _ => return false,
            }
            at += 1;
        }
        true
    }

    /// Tests whether the kernel has a variant for operands that are more than numbers of their type.
    #[must_use]
    pub fn has_encoded_form(&self) -> bool {
        matches!(self.family, Family::Elementwise | Family::Sum)
            && self.operands.iter().any(|operand| operand.content != Content::Plain)
    }
}

/// Kernels that are declared together, with the header that has their operations.
#[derive(Clone, Copy, Debug)]
pub(super) struct Declared {
    /// Name and text of the header.
    pub header: (&'static str, &'static str),
    /// True if the text stands in a Rust file, and not in a file of its own.
    pub is_inline: bool,
    /// The kernels.
    pub kernels: &'static [&'static Kernel],
}

/// Call of an elementwise operation on `N` operands on CUDA devices.
pub trait Launch<const N: usize> {
    /// None where there is no kernel of it.
    fn on_cuda(&self) -> Option<Pass<'_>> {
        None
    }
}

/// A kernel's name and what it is told beside its operands.
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
    /// The kernel and what it is told.
    pub(super) pass: Pass<'a>,
    /// The moments that scale every job; none where the operation has no scales.
    pub(super) scales: [Vec<ScaleMoments<'a>>; 2],
}

impl<'a> Pass<'a> {
    /// A kernel that is told these scalars, of which those with a true follow the learning rate.
    pub(super) fn new<const N: usize>(kernel: &'static Kernel, told: [(f64, bool); N]) -> Self {
        const { assert!(N <= MOST_SCALARS) };
        debug_assert_eq!(N, kernel.scalars.len(), "{}", kernel.name);
        let (mut scalars, mut per_rate) = ([0.0; MOST_SCALARS], 0);
        for (at, (to, (scalar, follows))) in scalars.iter_mut().zip(told).enumerate() {
            *to = scalar;
            per_rate |= u32::from(follows) << at;
        }
        let (declared, kernel) = (kernel, kernel.name);
        Self { kernel, declared, scalars, per_rate, factors: &[], steps: &[], live: &[], double: false }
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
    pub(super) fn reading(self, live: &'a (impl AsRef<[FlatView<'static>]> + ?Sized)) -> Self {
        Self { live: live.as_ref(), ..self }
    }

    /// The same in float64.
    pub(super) fn double(self) -> Self {
        Self { double: true, ..self }
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
