//! LAMB: Adam whose step is scaled, for each parameter, to the parameter's norm (You et al. 2020, arXiv:1904.00962).
//!
//! m ← β₁m + γg, v ← β₂v + (1-β₂)g², u = m̂/(√v̂ + ε) + λx, x ← x - lr · φ(‖x‖)/‖u‖ · u. The ratio is 1 where a norm is
//! zero, and without decay unless `always_adapt`.

mod stages;

use super::stage::StageIo;
use super::{Algorithm, flops, whole};
use crate::error::{Error, Result};
use crate::kernels::{self, Debias, Factors, Trust};
use crate::program::{BufferId, BufferSpec, Program, Stage, Target};
use crate::spec::{Block, Description, Hyper, Options, ParamSpec, StateSpec, StateStorage, UnitShape};
use crate::tensor::DType;

pub(super) const OPTIONS: [&str; 7] = [
    "debias",
    "always_adapt",
    "grad_averaging",
    "max_grad_norm",
    "momentum_dtype",
    "variance_dtype",
    "trust_clip",
];

const SCALARS: [&str; 9] = [
    "lr",
    "beta1",
    "beta2",
    "epsilon",
    "weight_decay",
    "phi?[0]",
    "phi?[1]",
    "trust_clip?",
    "max_grad_norm?",
];
const LR: usize = 0;
const BETA1: usize = 1;
const BETA2: usize = 2;
const EPSILON: usize = 3;
const WEIGHT_DECAY: usize = 4;
const PHI: [usize; 2] = [5, 6];
const TRUST_CLIP: usize = 7;
const MAX_GRAD_NORM: usize = 8;

const MOMENTUM: usize = 0;
const VARIANCE: usize = 1;
const STEP: usize = 2;

const NORMALIZE: Stage = 0;
const APPLY: Stage = 1;
const GRADIENTS: Stage = 2;

const NORMS: BufferId = 0;
const GRADIENT: BufferId = 1;

#[derive(Debug)]
#[allow(clippy::struct_excessive_bools)] // settings that do not depend on each other
pub(super) struct Lamb {
    debias: Debias,
    always_adapt: bool,
    averaging: bool,
    clips: bool,
    /// The counter of the steps, which is where the parameters are for graphs that count.
    step: StateSpec,
    cautious: bool,
    momentum_dtype: Option<DType>,
    variance_dtype: Option<DType>,
    storage: StateStorage,
}

impl Lamb {
    pub(super) fn new(options: &Options) -> Result<Self> {
        let debias = match options.word("debias")? {
            "moments" => Debias::Moments,
            "step" => Debias::Step,
            "none" => Debias::None,
            other => {
                return Err(Error::Value(format!(
                    "debias must be 'moments', 'step' or 'none', got '{other}'"
                )));
            }
        };
        Ok(Self {
            debias,
            always_adapt: options.flag("always_adapt")?,
            averaging: options.flag("grad_averaging")?,
            clips: options.is_set("max_grad_norm")?,
            step: StateSpec::steps(options)?,
            cautious: options.cautious()?,
            momentum_dtype: options.dtype("momentum_dtype")?,
            variance_dtype: options.dtype("variance_dtype")?,
            storage: StateStorage::from_options(options)?,
        })
    }

    /// Trust ratio by which each parameter's step is scaled.
    fn trust(&self, grad_factor: f64, h: &Hyper) -> Trust {
        Trust {
            lr: h[LR],
            betas: [h[BETA1], h[BETA2]],
            debias: self.debias,
            adapts: self.always_adapt || h[WEIGHT_DECAY] != 0.0,
            bounds: PHI.map(|bound| h[bound]),
            clip: h[TRUST_CLIP],
            grad_factor,
            max_grad_norm: h[MAX_GRAD_NORM],
        }
    }

    /// The pass over moments and directions.
    fn pass(&self, h: &Hyper, factors: Factors<4>) -> kernels::Lamb {
        kernels::Lamb {
            beta1: h[BETA1],
            blend: if self.averaging { 1.0 - h[BETA1] } else { 1.0 },
            beta2: h[BETA2],
            epsilon: h[EPSILON],
            weight_decay: h[WEIGHT_DECAY],
            cautious: self.cautious,
            factors,
        }
    }
}

impl Algorithm for Lamb {
    fn name(&self) -> &'static str {
        "lamb"
    }

    fn scalars(&self) -> &'static [&'static str] {
        &SCALARS
    }

    fn whole_parameter(&self) -> bool {
        true
    }

    fn leading(&self, p: &ParamSpec) -> usize {
        p.shape.len()
    }

    fn blocks(&self, p: &ParamSpec) -> Result<Vec<Block>> {
        Ok(whole(p))
    }

    fn state(&self, p: &ParamSpec, _blocks: &[Block]) -> Result<Vec<StateSpec>> {
        Ok(vec![
            self.storage.momentum(p, self.momentum_dtype),
            self.storage.second_moment(p, self.variance_dtype),
            self.step.clone(),
        ])
    }

    fn program(&self, _shape: &UnitShape) -> Result<Program> {
        let mut program = Program::new().buffer(BufferSpec::new("norms", 1, 2, DType::F64).total());
        if self.clips {
            program = program
                .buffer(BufferSpec::new("gradients", 1, 1, DType::F64).total().group())
                .local(GRADIENTS, "gradients")
                .redistribute(GRADIENT, Target::Replicate);
        }
        Ok(program.local(NORMALIZE, "norms").redistribute(NORMS, Target::Replicate).local(APPLY, "apply"))
    }

    fn run(&self, stage: Stage, io: &mut StageIo<'_>, h: &Hyper) -> Result<()> {
        match stage {
            GRADIENTS => stages::gradients(io),
            NORMALIZE => self.normalize(io, h),
            APPLY => self.apply(io, h),
            _ => Err(Error::Internal(format!("lamb has no stage {stage}"))),
        }
    }

    fn describe(&self, p: &ParamSpec, _blocks: &[Block], _num_shards: [usize; 2]) -> Description {
        Description {
            view: "one norm".into(),
            lr_factor: 1.0,
            flops: flops(28 * p.numel()),
            ..Description::default()
        }
    }
}
