//! `ClassName`: momentum (say whose, with the paper), optional cautious decay.
//!
//! m ← μ·m + g, x ← (1-lr·λ)x - lr·m.

use super::elementwise::Elementwise;
use super::stage::{StageIo, UnitIo, jobs};
use super::{Entry, STORAGE};
use crate::error::Result;
use crate::kernels;
use crate::spec::{Hyper, Options, ParamSpec, StateSpec, StateStorage};

pub(super) const ENTRY: Entry = Entry {
    name: RustType::NAME,
    options: &[&STORAGE],
    states: &[&[("momentum", "momentum_buffer")]],
    new: |options| Ok(Box::new(RustType::new(options)?)),
};

#[derive(Debug)]
struct RustType {
    cautious: bool,
    storage: StateStorage,
}

impl RustType {
    fn new(options: &Options) -> Result<Self> {
        Ok(Self { cautious: options.cautious()?, storage: StateStorage::from_options(options)? })
    }
}

impl Elementwise for RustType {
    const NAME: &'static str = "optimizer_name";
    const SCALARS: &'static [&'static str] = &["lr", "momentum", "weight_decay"];
    const FLOPS: usize = 5;

    fn states(&self, p: &ParamSpec) -> Vec<StateSpec> {
        vec![self.storage.momentum(p, None)]
    }

    fn update(&self, io: &mut StageIo<'_>, h: &Hyper) -> Result<()> {
        let [lr, mu, weight_decay] = h.all();
        let (cautious, grad_factor) = (self.cautious, io.grad_factor);
        let update = kernels::RustType { lr, mu, decay: lr * weight_decay, cautious, grad_factor };
        let operands = io
            .units
            .iter_mut()
            .map(|UnitIo { param, grad, state: [m, ..], .. }| ([*grad], [param.reborrow(), m.reborrow()]));
        kernels::run(&update, &mut jobs(operands))
    }
}
