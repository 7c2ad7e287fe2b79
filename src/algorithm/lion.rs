//! Lion (Chen et al. 2023, arXiv:2302.06675), optional cautious decay.
//!
//! u = sign(β₁m + (1-β₁)g), m ← β₂m + (1-β₂)g, x ← (1-lr·λ)x - lr·u.

use super::stage::{StageIo, jobs};
use super::{Algorithm, flops, whole};
use crate::error::Result;
use crate::kernels;
use crate::program::{Program, Stage};
use crate::spec::{Block, Description, Hyper, Options, ParamSpec, StateSpec, StateStorage, UnitShape};
use crate::tensor::DType;

pub(super) const OPTIONS: [&str; 2] = ["cautious_wd", "momentum_dtype"];

const SCALARS: [&str; 4] = ["lr", "beta1", "beta2", "weight_decay"];
const LR: usize = 0;
const BETA1: usize = 1;
const BETA2: usize = 2;
const WEIGHT_DECAY: usize = 3;

const MOMENTUM: usize = 0;

#[derive(Debug)]
pub(super) struct Lion {
    cautious: bool,
    momentum_dtype: Option<DType>,
    storage: StateStorage,
}

impl Lion {
    pub(super) fn new(options: &Options) -> Result<Self> {
        Ok(Self {
            cautious: options.flag("cautious_wd")?,
            momentum_dtype: options.dtype("momentum_dtype")?,
            storage: StateStorage::from_options(options)?,
        })
    }
}

impl Algorithm for Lion {
    fn name(&self) -> &'static str {
        "lion"
    }

    fn scalars(&self) -> &'static [&'static str] {
        &SCALARS
    }

    fn flat(&self) -> bool {
        true
    }

    fn blocks(&self, p: &ParamSpec) -> Result<Vec<Block>> {
        Ok(whole(p))
    }

    fn state(&self, p: &ParamSpec, _blocks: &[Block]) -> Result<Vec<StateSpec>> {
        Ok(vec![self.storage.momentum(p, self.momentum_dtype)])
    }

    fn program(&self, _shape: &UnitShape) -> Result<Program> {
        Ok(Program::new().local(0, "apply"))
    }

    fn run(&self, _stage: Stage, io: &mut StageIo<'_>, h: &Hyper) -> Result<()> {
        let update = kernels::Lion {
            lr: h[LR],
            beta1: h[BETA1],
            beta2: h[BETA2],
            decay: h[LR] * h[WEIGHT_DECAY],
            cautious: self.cautious,
            grad_factor: io.grad_factor,
        };
        let areas = io.units.iter().map(|u| Ok([u.param, u.grad, u.state[MOMENTUM]]));
        kernels::run(&update, &jobs(areas)?)
    }

    fn describe(&self, p: &ParamSpec, _blocks: &[Block], _num_shards: [usize; 2]) -> Description {
        Description {
            view: "elements".into(),
            lr_factor: 1.0,
            flops: flops(10 * p.numel()),
            ..Description::default()
        }
    }
}
