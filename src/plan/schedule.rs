//! Orders the work of all buckets into one list of instructions.

use super::bucket::Bucket;
use super::program::{ProgramOp, Stage};

/// One instruction of the schedule; the number is an index into the plan's lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Instr {
    /// Run `computes[k]`.
    Compute(usize),
    /// Start `collectives[k]`.
    Issue(usize),
    /// Wait for `collectives[k]`.
    Wait(usize),
}

impl Instr {
    /// The pair of integers that the driver reads.
    #[must_use]
    pub fn code(self) -> (u8, usize) {
        match self {
            Self::Compute(k) => (0, k),
            Self::Issue(k) => (1, k),
            Self::Wait(k) => (2, k),
        }
    }
}

/// Consecutive stages of one bucket that need no communication between them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Compute {
    /// The bucket.
    pub bucket: usize,
    /// The stages, with their names.
    pub stages: Vec<(Stage, &'static str)>,
}

/// The schedule of buckets without communication: each bucket's stages in one crossing, in bucket order.
#[must_use]
pub(super) fn schedule(buckets: &[Bucket]) -> (Vec<Compute>, Vec<Instr>) {
    let computes: Vec<Compute> = buckets
        .iter()
        .enumerate()
        .map(|(bucket, b)| {
            let stages = b.program.ops.iter().filter_map(|op| match op {
                ProgramOp::Local { stage, name } => Some((*stage, *name)),
                ProgramOp::Redistribute { .. } => None,
            });
            Compute { bucket, stages: stages.collect() }
        })
        .collect();
    let order = (0..computes.len()).map(Instr::Compute).collect();
    (computes, order)
}
