//! Lion (Chen et al. 2023, arXiv:2302.06675), optional cautious decay.
//!
//! u = sign(β₁m + (1-β₁)g), m ← β₂m + (1-β₂)g, x ← (1-lr·λ)x - lr·u.

use super::elementwise::Elementwise;
use super::stage::{StageIo, UnitIo, jobs};
use super::{Entry, STORAGE};
use crate::error::Result;
use crate::kernels;
use crate::spec::{Hyper, Options, ParamSpec, StateSpec, StateStorage};
use crate::tensor::DType;

pub(super) const ENTRY: Entry = Entry {
    name: Lion::NAME,
    options: &[&["momentum_dtype"], &STORAGE],
    states: &[&[("momentum", "exp_avg")]],
    new: |options| Ok(Box::new(Lion::new(options)?)),
};

const LR: usize = 0;
const BETA1: usize = 1;
const BETA2: usize = 2;
const WEIGHT_DECAY: usize = 3;

const MOMENTUM: usize = 0;

#[derive(Debug)]
struct Lion {
    cautious: bool,
    momentum_dtype: Option<DType>,
    storage: StateStorage,
}

impl Lion {
    fn new(options: &Options) -> Result<Self> {
        Ok(Self {
            cautious: options.cautious()?,
            momentum_dtype: options.dtype("momentum_dtype")?,
            storage: StateStorage::from_options(options)?,
        })
    }
}

impl Elementwise for Lion {
    const NAME: &'static str = "lion";
    const SCALARS: &'static [&'static str] = &["lr", "beta1", "beta2", "weight_decay"];
    const FLOPS: usize = 10;

    fn states(&self, p: &ParamSpec) -> Vec<StateSpec> {
        vec![self.storage.momentum(p, self.momentum_dtype)]
    }

    fn update(&self, io: &mut StageIo<'_>, h: &Hyper) -> Result<()> {
        let update = kernels::Lion {
            lr: h[LR],
            beta1: h[BETA1],
            beta2: h[BETA2],
            decay: h[LR] * h[WEIGHT_DECAY],
            cautious: self.cautious,
            grad_factor: io.grad_factor,
        };
        let operands = io.units.iter_mut().map(|UnitIo { param, grad, state, .. }| {
            ([*grad], [param.reborrow(), state[MOMENTUM].reborrow()])
        });
        kernels::run(&update, &mut jobs(operands))
    }
}
