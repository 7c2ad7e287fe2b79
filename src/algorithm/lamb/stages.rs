//! The stages of LAMB on one bucket.

use super::{GRADIENT, Lamb, MOMENTUM, NORMS, STEP, VARIANCE};
use crate::batch::Slab;
use crate::dtype::DType;
use crate::error::Result;
use crate::hyper::Hyper;
use crate::kernels::{self, LambNorms, SumOfSquares};
use crate::stage::{StageIo, jobs};

/// Whether the moments are stored in the type in which they are computed, so that nothing is lost by writing them first.
fn exact(io: &StageIo<'_>) -> bool {
    io.units.iter().all(|u| {
        let types = [u.param, u.grad, u.state[MOMENTUM], u.state[VARIANCE]].map(|area| area.dtype());
        let arithmetic = if types.contains(&DType::F64) { DType::F64 } else { DType::F32 };
        types[2..].iter().all(|dtype| *dtype == arithmetic)
    })
}

/// Parameters, gradients and both moments.
fn moments(io: &StageIo<'_>) -> Result<Vec<[Slab; 4]>> {
    jobs(io.units.iter().map(|u| Ok([u.param, u.grad, u.state[MOMENTUM], u.state[VARIANCE]])))
}

/// Σ g² of every parameter.
pub(super) fn gradients(io: &StageIo<'_>) -> Result<()> {
    let sums = kernels::fold(&SumOfSquares, &jobs(io.units.iter().map(|u| Ok([u.grad])))?);
    sums.into_iter().enumerate().try_for_each(|(i, [sum])| {
        io.slab(GRADIENT, i)?.numbers().fill(sum * io.grad_factor * io.grad_factor);
        Ok(())
    })
}

impl Lamb {
    /// Σ x² and Σ u² of every parameter.
    pub(super) fn normalize(&self, io: &StageIo<'_>, h: &Hyper) -> Result<()> {
        let steps: Vec<f64> = io.units.iter().map(|u| u.state[STEP].row(0).increment()).collect();
        let (pass, operands) = (self.pass(io, h, &steps), moments(io)?);
        let sums = if exact(io) {
            kernels::fold(&LambNorms::<true>(&pass), &operands)
        } else {
            kernels::fold(&LambNorms::<false>(&pass), &operands)
        };
        sums.into_iter().enumerate().try_for_each(|(i, sums)| {
            io.slab(NORMS, i)?.numbers().copy_from_slice(&sums);
            Ok(())
        })
    }

    /// The step, and the moments where they are not written yet.
    pub(super) fn apply(&self, io: &StageIo<'_>, h: &Hyper) -> Result<()> {
        let steps: Vec<f64> = io.units.iter().map(|u| u.state[STEP].row(0).count()).collect();
        let mut pass = self.pass(io, h, &steps);
        for (i, step) in steps.into_iter().enumerate() {
            pass.rates.push(self.rate(h, step, io.slab(NORMS, i)?.numbers()));
        }
        if exact(io) {
            let stored = io.units.iter().map(|u| Ok([u.param, u.state[MOMENTUM], u.state[VARIANCE]]));
            kernels::run(&pass, &jobs(stored)?)?;
        } else {
            kernels::run(&pass, &moments(io)?)?;
        }
        Ok(())
    }
}
