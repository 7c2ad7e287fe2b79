//! The stages of LAMB on one bucket.

use super::{GRADIENT, Lamb, MOMENTUM, NORMS, STEP, VARIANCE};
use crate::algorithm::stage::{StageIo, UnitIo, group_buffers, jobs, lines};
use crate::error::Result;
use crate::kernels::{self, Factors, LambNorms, Steps, SumOfSquares};
use crate::spec::Hyper;
use crate::tensor::DType;

/// Tests whether the moments are stored in the type in which they are computed, so that nothing is lost by writing them
/// first.
fn exact(io: &StageIo<'_>) -> bool {
    io.units.iter().all(|u| {
        let types = [u.param.dtype(), u.grad.dtype(), u.state[MOMENTUM].dtype(), u.state[VARIANCE].dtype()];
        let arithmetic = if types.contains(&DType::F64) { DType::F64 } else { DType::F32 };
        types[2..].iter().all(|dtype| *dtype == arithmetic)
    })
}

/// Σ g² of every parameter.
pub(super) fn gradients(io: &mut StageIo<'_>) -> Result<()> {
    let pass = SumOfSquares { factor: io.grad_factor };
    let StageIo { units, buffers, .. } = io;
    let mut jobs = jobs(units.iter().map(|unit| ([unit.grad], [])));
    kernels::fold(&pass, &mut jobs, &mut buffers.get_mut(GRADIENT)?.flats(units)?)
}

impl Lamb {
    /// By what each parameter's step is scaled, and the other factors of a pass; `counts`: a step is counted first.
    fn factors(&self, io: &mut StageIo<'_>, h: &Hyper, counts: bool) -> Result<Factors<4>> {
        let trust = self.trust(io.grad_factor, h);
        let StageIo { units, buffers, group, .. } = io;
        let norms = units.iter().map(|unit| buffers.get(NORMS)?.read(unit)).collect::<Result<Vec<_>>>()?;
        let group = group_buffers(group, buffers, GRADIENT)?;
        let steps = if counts {
            Steps::count(lines(units, STEP))?
        } else {
            Steps::counted(units.iter().map(|unit| unit.state[STEP].view().row(0)).collect())
        };
        trust.factors(&steps, &norms, !counts, &group)
    }

    /// Σ x² and Σ u² of every parameter.
    pub(super) fn normalize(&self, io: &mut StageIo<'_>, h: &Hyper) -> Result<()> {
        let pass = self.pass(h, self.factors(io, h, true)?);
        let exact = exact(io);
        let StageIo { units, buffers, .. } = io;
        let mut norms = buffers.get_mut(NORMS)?.flats(units)?;
        if exact {
            let operands = units.iter_mut().map(|UnitIo { param, grad, state: [m, v, ..], .. }| {
                ([param.view(), *grad], [m.reborrow(), v.reborrow()])
            });
            kernels::fold(&LambNorms::<true>(&pass), &mut jobs(operands), &mut norms)
        } else {
            let operands = units.iter().map(|UnitIo { param, grad, state: [m, v, ..], .. }| {
                ([param.view(), *grad, m.view(), v.view()], [])
            });
            kernels::fold(&LambNorms::<false>(&pass), &mut jobs(operands), &mut norms)
        }
    }

    /// The step, and the moments where they are not written yet.
    pub(super) fn apply(&self, io: &mut StageIo<'_>, h: &Hyper) -> Result<()> {
        let pass = self.pass(h, self.factors(io, h, false)?);
        if exact(io) {
            let operands = io
                .units
                .iter_mut()
                .map(|UnitIo { param, state: [m, v, ..], .. }| ([m.view(), v.view()], [param.reborrow()]));
            kernels::run(&pass, &mut jobs(operands))
        } else {
            let operands = io.units.iter_mut().map(|UnitIo { param, grad, state: [m, v, ..], .. }| {
                ([*grad], [param.reborrow(), m.reborrow(), v.reborrow()])
            });
            kernels::run(&pass, &mut jobs(operands))
        }
    }
}
