//! SOAP: Adam in the eigenbasis of Shampoo's factors (Vyas et al. 2024, arXiv:2409.11321).
//!
//! The first gradient makes the bases P of the rows and Q of the columns. With t gradients before this one:
//! M ← β₁M + (1-β₁)G, V ← β₂V + (1-β₂)(Pᵀ·G·Q)², U = P·((Pᵀ·M·Q) / (√V + ε))·Qᵀ, X ← X - lr·√(1-β₂ᵗ)/(1-β₁ᵗ)·U,
//! X ← (1-lr·λ)X; then L ← βL + (1-β)G·Gᵀ, R alike, and where t is a multiple of the frequency P ← qr(L·P), Q alike.

mod basis;
mod compose;
mod layout;
mod muon;
mod refresh;
mod stages;

use super::last_step::LastStep;
use super::stage::StageIo;
use super::{Algorithm, flops};
use crate::error::Result;
use crate::program::{BufferId, Program, Stage};
use crate::spec::{
    Block, Code, Description, Hyper, Matrices, Options, ParamSpec, StateSpec, StateStorage, UnitShape,
};

use basis::Bases;
use layout::{APPLY, LOAD, SINCE, STEP, UPDATE};
pub(super) use muon::SoapMuon;
use stages::moves;

/// Option keys of the bases.
pub(super) const BASIS: [&str; 5] =
    ["sides", "max_precondition_dim", "precondition_frequency", "seed", "owned_states"];
/// Option keys of SOAP itself.
pub(super) const OPTIONS: [&str; 4] = ["correct_bias", "normalize_grads", "decay_order", "merge_dims"];
/// Option keys of SOAP-Muon itself.
pub(super) const MUON: [&str; 2] = ["denom_power", "orth_norm"];

const SCALARS: [&str; 6] = ["lr", "beta1", "beta2", "epsilon", "weight_decay", "shampoo_beta?"];
const LR: usize = 0;
const BETA1: usize = 1;
const BETA2: usize = 2;
const EPSILON: usize = 3;
const WEIGHT_DECAY: usize = 4;
const SHAMPOO_BETA: usize = 5;

#[derive(Debug)]
#[allow(clippy::struct_excessive_bools)] // settings that do not depend on each other
pub(super) struct Soap {
    bases: Bases,
    correct_bias: bool,
    normalize: bool,
    /// True if weight decay comes after the update.
    late: bool,
    cautious: bool,
    storage: StateStorage,
}

impl Soap {
    pub(super) fn new(options: &Options) -> Result<Self> {
        Ok(Self {
            bases: Bases::new(options, false)?,
            correct_bias: options.flag("correct_bias")?,
            normalize: options.flag("normalize_grads")?,
            late: !options.either("decay_order", "galore", "torch")?,
            cautious: options.cautious()?,
            storage: StateStorage::from_options(options)?,
        })
    }
}

impl Algorithm for Soap {
    fn name(&self) -> &'static str {
        "soap"
    }

    fn sees_largest(&self) -> bool {
        true
    }

    fn scalars(&self) -> &'static [&'static str] {
        &SCALARS
    }

    fn takes_vectors(&self) -> bool {
        true
    }

    fn orientation(&self, num_shards: [usize; 2]) -> Option<bool> {
        self.bases.orientation(num_shards)
    }

    fn counted(&self) -> bool {
        true
    }

    fn due(&self, _stream: u64, steps: f64) -> bool {
        self.bases.due(steps)
    }

    fn first_refresh(&self) -> Option<usize> {
        Some(SINCE)
    }

    fn view(&self, p: &ParamSpec) -> Matrices {
        self.bases.view(p)
    }

    fn leaves_update(&self) -> bool {
        true
    }

    fn columns(&self, p: &ParamSpec) -> usize {
        self.bases.columns_of(p)
    }

    fn blocks(&self, p: &ParamSpec) -> Result<Vec<Block>> {
        if p.shape.len() < 2 {
            return Ok(vec![Block { rows: p.numel(), cols: 1, ..Block::default() }]);
        }
        self.bases.blocks(p)
    }

    fn state(&self, p: &ParamSpec, blocks: &[Block]) -> Result<Vec<StateSpec>> {
        let variance = StateSpec::like("variance", p, p.dtype.arithmetic());
        let mut states = vec![
            // Not in 8 bits: turned into the bases, its error would be as large in each direction, also where gradients are
            // small, and there the step divides it by a small number.
            self.storage.moment("momentum", p, None, Code::Signed),
            variance.eight_bit(Code::Unsigned, &self.storage),
            StateSpec::counter("step"),
        ];
        states.extend(self.bases.states(p, blocks));
        Ok(states)
    }

    fn program(&self, shape: &UnitShape) -> Result<Program> {
        Ok(self.compose(shape))
    }

    fn run(&self, stage: Stage, io: &mut StageIo<'_>, h: &Hyper) -> Result<()> {
        match stage {
            STEP => self.step(io, h),
            LOAD => Self::load(io),
            _ => self.bases.run(stage, io, [h[SHAMPOO_BETA], h[BETA2]]),
        }
    }

    fn update(&self, _class: &UnitShape) -> Option<(Stage, BufferId)> {
        Some((APPLY, UPDATE))
    }

    fn finish(&self, io: &mut StageIo<'_>, h: &Hyper) -> Result<()> {
        self.normalize_local(io, h)
    }

    fn last_step(&self, io: &mut StageIo<'_>, h: &Hyper) -> Result<LastStep> {
        io.units.retain(moves);
        let (lr, decay) = (h[LR], h[LR] * h[WEIGHT_DECAY]);
        Ok(LastStep { lr, scale: 1.0, decay, cautious: self.cautious, late: self.late })
    }

    fn describe(&self, p: &ParamSpec, blocks: &[Block], num_shards: [usize; 2]) -> Description {
        let sides = self.bases.sides_of(p, blocks);
        let (products, refresh) = Bases::flops(blocks, sides);
        let refresh = refresh / flops(self.bases.frequency);
        let is_local = sides.iter().all(|side| num_shards[side.index()] == 1);
        Description {
            view: if p.shape.len() < 2 { "vector".into() } else { self.bases.phrase(p) },
            lr_factor: 1.0,
            rank: None,
            roundoff: None,
            flops: products + refresh + flops(14 * blocks.iter().map(Block::numel).sum::<usize>()),
            whole_flops: if is_local { refresh } else { products + refresh },
        }
    }
}
