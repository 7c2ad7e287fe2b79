//! Muon: momentum orthonormalized by a quintic iteration (Jordan et al. 2024); Polar Express (arXiv:2505.16932).
//! `NorMuon` (arXiv:2510.05491) is Muon whose neurons are normalized after that.
//!
//! M ← μM + G, U = orth(μM + G) (nesterov) or orth(M), X ← (1-lr·λ)X - lr·s·U with s from the block's shape.

use super::Algorithm;
use super::last_step::LastStep;
use super::neuron::{NORMALIZE, Neuron, SQUARES};
use super::orthonormal::{APPLY, BETA2, EPSILON, MU, ORTHONORMALIZE, Orthonormal, PREPARE, U};
use super::stage::StageIo;
use crate::error::{Error, Result};
use crate::kernels;
use crate::program::{BufferId, BufferSpec, Program, Stage, Target};
use crate::spec::{
    Block, Description, DimSharding, Hyper, Matrices, Options, ParamSpec, Side, StateSpec, UnitShape,
};
use crate::tensor::DType;

pub(super) const OPTIONS: [&str; 1] = ["nesterov"];

const SCALARS: [&str; 5] = ["lr", "mu", "weight_decay", "epsilon", "muon_beta2"];

/// The buffers of the normalization follow those of the orthonormalization.
const NEURON_BUFFERS: usize = 2;

#[derive(Debug)]
pub(super) struct Muon {
    common: Orthonormal,
    nesterov: bool,
    neuron: Option<Neuron>,
}

impl Muon {
    pub(super) fn new(options: &Options) -> Result<Self> {
        Ok(Self { common: Orthonormal::new(options)?, nesterov: options.flag("nesterov")?, neuron: None })
    }

    pub(super) fn normalized(options: &Options) -> Result<Self> {
        Ok(Self { neuron: Some(Neuron::new(options, NEURON_BUFFERS)?), ..Self::new(options)? })
    }

    /// The buffer of the squared norms that the momentum's pass leaves, the last one: where no other process has a part
    /// of a matrix.
    fn norms(&self, shape: &UnitShape) -> Option<BufferId> {
        let last = NEURON_BUFFERS + if self.neuron.is_some() { Neuron::BUFFERS } else { 0 };
        shape.alone.then_some(last)
    }
}

impl Algorithm for Muon {
    fn name(&self) -> &'static str {
        if self.neuron.is_some() { "normuon" } else { "muon" }
    }

    fn scalars(&self) -> &'static [&'static str] {
        if self.neuron.is_some() { &SCALARS } else { &SCALARS[..BETA2] }
    }

    fn view(&self, _p: &ParamSpec) -> Matrices {
        self.common.view.clone()
    }

    fn replays(&self, _encoded: bool) -> bool {
        self.common.replays()
    }

    fn leaves_update(&self) -> bool {
        true
    }

    fn state(&self, p: &ParamSpec, blocks: &[Block]) -> Result<Vec<StateSpec>> {
        Ok(self.common.states(p, blocks, self.neuron.as_ref()))
    }

    fn program(&self, shape: &UnitShape) -> Result<Program> {
        let (rows, cols, dtype) = (shape.rows, shape.cols, self.common.product(shape.param));
        let along = [DimSharding::LikeParam(Side::Rows), DimSharding::LikeParam(Side::Cols)];
        let program =
            Program::new().buffer(BufferSpec::new("u", rows, cols, dtype).sharded(along[0], along[1]));
        let mut program = self.common.scratch(program, shape, [rows, cols], dtype)?;
        if self.neuron.is_some() {
            program = Neuron::buffers(program, shape, rows, along[0]);
        }
        if self.norms(shape).is_some() {
            program = program.buffer(BufferSpec::new("squared_norm", 1, 1, DType::F64));
        }
        program = program
            .local(PREPARE, "prepare")
            .redistribute(U, Target::Whole)
            .local(ORTHONORMALIZE, "orthonormalize")
            .redistribute(U, Target::Storage);
        if let Some(neuron) = &self.neuron {
            program = neuron.stages(program, shape);
        }
        Ok(program.local(APPLY, "apply"))
    }

    fn run(&self, stage: Stage, io: &mut StageIo<'_>, h: &Hyper) -> Result<()> {
        match (stage, &self.neuron) {
            (PREPARE, _) => {
                let momentum =
                    kernels::Momentum { mu: h[MU], grad_factor: io.grad_factor, nesterov: self.nesterov };
                Orthonormal::prepare(io, momentum, self.norms(io.class))
            }
            (ORTHONORMALIZE, _) => self.common.orthonormalize(io, h[EPSILON], self.norms(io.class)),
            (SQUARES, Some(neuron)) => neuron.squares(io, None),
            (NORMALIZE, Some(neuron)) => neuron.update(io, h[BETA2], None),
            _ => Err(Error::Internal(format!("{} has no stage {stage}", self.name()))),
        }
    }

    fn update(&self, _class: &UnitShape) -> Option<(Stage, BufferId)> {
        Some((APPLY, U))
    }

    fn finish(&self, io: &mut StageIo<'_>, _h: &Hyper) -> Result<()> {
        self.neuron.as_ref().map_or(Ok(()), |neuron| neuron.scale(io, None))
    }

    fn last_step(&self, io: &mut StageIo<'_>, h: &Hyper) -> Result<LastStep> {
        Ok(self.common.last_step(io.class, h))
    }

    fn describe(&self, p: &ParamSpec, blocks: &[Block], _num_shards: [usize; 2]) -> Description {
        self.common.describe(p, blocks, |b| [b.rows, b.cols])
    }
}
