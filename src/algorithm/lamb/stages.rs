//! The stages of LAMB on one bucket.

use super::{GRADIENT, Lamb, MOMENTUM, NORMS, STEP, VARIANCE};
use crate::algorithm::stage::{StageIo, jobs};
use crate::error::Result;
use crate::kernels::{self, LambNorms, Steps, SumOfSquares};
use crate::program::BufferId;
use crate::spec::Hyper;
use crate::tensor::{DType, FlatView};

/// Tests whether the moments are stored in the type in which they are computed, so that nothing is lost by writing them
/// first.
fn exact(io: &StageIo<'_>) -> bool {
    io.units.iter().all(|u| {
        let types = [u.param, u.grad, u.state[MOMENTUM], u.state[VARIANCE]].map(|area| area.dtype());
        let arithmetic = if types.contains(&DType::F64) { DType::F64 } else { DType::F32 };
        types[2..].iter().all(|dtype| *dtype == arithmetic)
    })
}

/// Parameters, gradients and both moments.
fn moments(io: &StageIo<'_>) -> Result<Vec<[FlatView; 4]>> {
    jobs(io.units.iter().map(|u| Ok([u.param, u.grad, u.state[MOMENTUM], u.state[VARIANCE]])))
}

/// A buffer's memory for each parameter.
fn flats(io: &StageIo<'_>, buffer: BufferId) -> Result<Vec<FlatView>> {
    (0..io.units.len()).map(|i| io.flat(buffer, i)).collect()
}

/// Where the steps of each parameter are counted.
fn counters(io: &StageIo<'_>) -> Vec<FlatView> {
    io.units.iter().map(|u| u.state[STEP].row(0)).collect()
}

/// Σ g² of every parameter.
pub(super) fn gradients(io: &StageIo<'_>) -> Result<()> {
    let pass = SumOfSquares { factor: io.grad_factor };
    kernels::fold(&pass, &jobs(io.units.iter().map(|u| Ok([u.grad])))?, &flats(io, GRADIENT)?)
}

impl Lamb {
    /// Σ x² and Σ u² of every parameter.
    pub(super) fn normalize(&self, io: &StageIo<'_>, h: &Hyper) -> Result<()> {
        let (steps, norms) = (Steps::count(counters(io))?, flats(io, NORMS)?);
        let pass = self.pass(h, self.trust(io, h).factors(&steps, &norms, false, &io.group)?);
        let operands = moments(io)?;
        if exact(io) {
            kernels::fold(&LambNorms::<true>(&pass), &operands, &norms)
        } else {
            kernels::fold(&LambNorms::<false>(&pass), &operands, &norms)
        }
    }

    /// The step, and the moments where they are not written yet.
    pub(super) fn apply(&self, io: &StageIo<'_>, h: &Hyper) -> Result<()> {
        let (steps, norms) = (Steps::counted(counters(io)), flats(io, NORMS)?);
        let pass = self.pass(h, self.trust(io, h).factors(&steps, &norms, true, &io.group)?);
        if exact(io) {
            let stored = io.units.iter().map(|u| Ok([u.param, u.state[MOMENTUM], u.state[VARIANCE]]));
            kernels::run(&pass, &jobs(stored)?)
        } else {
            kernels::run(&pass, &moments(io)?)
        }
    }
}
