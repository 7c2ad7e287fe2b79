//! Muon: momentum orthonormalized by a quintic iteration (Jordan et al. 2024); Polar Express (arXiv:2505.16932).
//! `NorMuon` (arXiv:2510.05491) is Muon whose neurons are normalized after that.
//!
//! M ← μM + G, U = orth(μM + G) (nesterov) or orth(M), X ← (1-lr·λ)X - lr·s·U with s from the block's shape.

use super::Algorithm;
use super::last_step::LastStep;
use super::neuron::{NORMALIZE, Neuron, SQUARES};
use super::orthonormal::{APPLY, BETA2, EPSILON, MOMENTUM, MU, ORTHONORMALIZE, Orthonormal, PREPARE, U};
use super::stage::{StageIo, gradients, jobs};
use crate::error::{Error, Result};
use crate::kernels;
use crate::program::{BufferId, BufferSpec, Program, Stage, Target};
use crate::spec::{
    Block, Description, DimSharding, Hyper, Matrices, Options, ParamSpec, Side, StateSpec, UnitShape,
};
use crate::tensor::DType;

pub(super) const OPTIONS: [&str; 2] = ["nesterov", "owned_states"];

const SCALARS: [&str; 5] = ["lr", "mu", "weight_decay", "epsilon", "muon_beta2"];

/// The buffers of the normalization follow those of the orthonormalization.
const NEURON_BUFFERS: usize = 2;

/// Stage before the others, where momenta are owner-sharded (ZeRO-1).
const LOAD: Stage = 3;

#[derive(Debug)]
pub(super) struct Muon {
    common: Orthonormal,
    nesterov: bool,
    neuron: Option<Neuron>,
    /// True if momenta that would be replicated on several processes are owner-sharded (ZeRO-1) instead.
    owned: bool,
}

impl Muon {
    pub(super) fn new(options: &Options) -> Result<Self> {
        Ok(Self {
            common: Orthonormal::new(options)?,
            nesterov: options.flag("nesterov")?,
            neuron: None,
            owned: options.flag("owned_states")?,
        })
    }

    pub(super) fn normalized(options: &Options) -> Result<Self> {
        Ok(Self { neuron: Some(Neuron::new(options, NEURON_BUFFERS)?), ..Self::new(options)? })
    }

    /// The last buffer, of what depends on the layout.
    fn last(&self) -> BufferId {
        NEURON_BUFFERS + if self.neuron.is_some() { Neuron::BUFFERS } else { 0 }
    }

    /// The buffer of the squared norms that the momentum's pass leaves: where no other process has a part of a matrix.
    fn norms(&self, shape: &UnitShape) -> Option<BufferId> {
        shape.alone.then(|| self.last())
    }

    /// True if the owners have the momenta: where this is asked for and there are copies.
    fn is_owned(&self, shape: &UnitShape) -> bool {
        self.owned && shape.copies
    }

    /// The buffer in which shards of gradients go to the owners; none where these have whole ones.
    fn sent(&self, shape: &UnitShape) -> Option<BufferId> {
        (self.is_owned(shape) && shape.num_shards != [1, 1]).then(|| self.last())
    }

    /// The momentum of the matrices that this process owns, of gradients in a buffer.
    fn prepare(io: &mut StageIo<'_>, from: BufferId, momentum: kernels::Momentum) -> Result<()> {
        let StageIo { units, buffers, .. } = io;
        let [from, updates] = buffers.several([from, U])?;
        let matrices = from.matrices(units)?.into_iter().zip(updates.matrices(units)?);
        let all = units.iter_mut().zip(matrices);
        let all = all.map(|(unit, (from, u))| ([from.into_view()], [unit.state[MOMENTUM].reborrow(), u]));
        kernels::run(&momentum, &mut jobs(all))
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
        if self.is_owned(shape) {
            program = Program { exclusive: true, owned: vec![MOMENTUM], ..program };
        }
        program = if let Some(gradient) = self.sent(shape) {
            let spec = BufferSpec::new("gradient", rows, cols, shape.param).sharded(along[0], along[1]);
            let sent = program.buffer(spec).local(LOAD, "load").redistribute(gradient, Target::Whole);
            sent.same_placement_as(U, gradient).local(PREPARE, "prepare").release(gradient)
        } else if self.is_owned(shape) {
            program.redistribute(U, Target::Whole).local(PREPARE, "prepare")
        } else {
            program.local(PREPARE, "prepare").redistribute(U, Target::Whole)
        };
        program = program.local(ORTHONORMALIZE, "orthonormalize").redistribute(U, Target::Storage);
        if let Some(neuron) = &self.neuron {
            program = neuron.stages(program, shape);
        }
        Ok(program.local(APPLY, "apply"))
    }

    fn run(&self, stage: Stage, io: &mut StageIo<'_>, h: &Hyper) -> Result<()> {
        let momentum = |grad_factor| kernels::Momentum { mu: h[MU], grad_factor, nesterov: self.nesterov };
        match (stage, &self.neuron) {
            (LOAD, _) => {
                let sent = self.sent(io.class).map(|sent| io.buffers.get_mut(sent)).transpose()?;
                sent.map_or(Ok(()), |sent| gradients(&io.units, sent, 1.0))
            }
            (PREPARE, _) => {
                // Among whole matrices are those without a gradient.
                io.units.retain(|unit| unit.active);
                let momentum = momentum(io.grad_factor);
                match self.sent(io.class) {
                    Some(from) => Self::prepare(io, from, momentum),
                    None => Orthonormal::prepare(io, momentum, self.norms(io.class)),
                }
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
