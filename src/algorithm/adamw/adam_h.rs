//! `AdamW` whose weights keep their norm, or whose updates are at least a share of it (arXiv:2606.16899): `AdamH` of its
//! authors.
//!
//! Moments as in `mod.rs`, U = m/(1-β₁ᵗ) / (√v/√(1-β₂ᵗ) + ε), and the step of `weight_norm.rs` with that. Parameters that
//! are no matrices take the step of `AdamW`.

use super::{AdamW, BETA1, BETA2, EPSILON, LR, SCALARS, WEIGHT_DECAY};
use crate::algorithm::elementwise::Elementwise;
use crate::algorithm::stage::{StageIo, UnitIo, jobs};
use crate::algorithm::weight_norm::{LastStep, WEIGH, WeightNorm};
use crate::algorithm::{Algorithm, flops};
use crate::error::{Error, Result};
use crate::kernels;
use crate::program::{BufferId, BufferSpec, Program, Stage};
use crate::spec::{
    Block, Description, DimSharding, Hyper, Matrices, Options, ParamSpec, Side, StateSpec, UnitShape,
};

/// The update for a learning rate of 1.
const U: BufferId = 0;

const STEP: Stage = 0;
const APPLY: Stage = 1;

/// The state R, behind those of `AdamW`: both moments and the counter.
const RADIUS: usize = 3;

#[derive(Debug)]
pub(super) struct AdamH {
    free: AdamW,
    view: Matrices,
    weight_norm: WeightNorm,
}

impl AdamH {
    /// `AdamW` that binds its weights; none where these settings leave them free.
    pub(super) fn bound(options: &Options) -> Result<Option<Self>> {
        let weight_norm = WeightNorm::new(options)?;
        if weight_norm.is_free() {
            return Ok(None);
        }
        for (key, is_set) in [("amsgrad", options.flag("amsgrad")?), ("capturable", options.capturable()?)] {
            if is_set {
                return Err(Error::Value(format!("{key} needs weight_norm='free'")));
            }
        }
        Ok(Some(Self { free: AdamW::new(options)?, view: Matrices::default(), weight_norm }))
    }

    /// Both moments, and the update of matrices to its buffer.
    fn step(io: &mut StageIo<'_>, h: &Hyper) -> Result<()> {
        let grad_factor = io.grad_factor;
        let StageIo { units, buffers, .. } = io;
        let u = buffers.get_mut(U)?;
        let copies = units.iter().zip(u.matrices(units)?).map(|(unit, u)| ([unit.grad], [u]));
        kernels::run(&kernels::Convert { factor: 1.0 }, &mut jobs(copies))?;
        let each = corrections(units, h, 1.0);
        let (mut all, mut own) = (Vec::new(), Vec::new());
        let updates = u.matrices(units)?;
        for ((unit, u), correction) in units.iter_mut().zip(updates).zip(each) {
            let UnitIo { state: [m, v, ..], .. } = unit;
            // A matrix that lies in pieces is a job for each.
            let pieces = jobs([([], [u, m.reborrow(), v.reborrow()])]);
            own.resize(own.len() + pieces.len(), correction);
            all.extend(pieces);
        }
        let direction = kernels::Direction {
            beta1: h[BETA1],
            beta2: h[BETA2],
            epsilon: h[EPSILON],
            grad_factor,
            corrections: own,
            unit: 1.0,
            per_rate: false,
        };
        kernels::run(&direction, &mut all)
    }
}

/// Factors of both moments in the update of each unit, the first of them times `factor`.
fn corrections(units: &[UnitIo<'_>], h: &Hyper, factor: f64) -> Vec<[f64; 2]> {
    let steps = units.iter().map(|unit| unit.steps + 1.0);
    kernels::AdamW::corrections(factor, [h[BETA1], h[BETA2]], steps)
}

impl Algorithm for AdamH {
    fn name(&self) -> &'static str {
        AdamW::NAME
    }

    fn scalars(&self) -> &'static [&'static str] {
        &SCALARS
    }

    fn takes_vectors(&self) -> bool {
        true
    }

    fn counted(&self) -> bool {
        true
    }

    fn blocks(&self, p: &ParamSpec) -> Result<Vec<Block>> {
        if p.shape.len() < 2 {
            return Ok(vec![Block { offset: 0, rows: p.numel(), cols: 1 }]);
        }
        self.view.blocks(p)
    }

    fn state(&self, p: &ParamSpec, blocks: &[Block]) -> Result<Vec<StateSpec>> {
        let mut states = self.free.states(p);
        states.extend(self.weight_norm.state(p, &self.view, blocks)?);
        Ok(states)
    }

    fn program(&self, shape: &UnitShape) -> Result<Program> {
        let update = BufferSpec::new("update", shape.rows, shape.cols, shape.param.arithmetic())
            .sharded(DimSharding::LikeParam(Side::Rows), DimSharding::LikeParam(Side::Cols));
        if !self.weight_norm.binds(shape) {
            return Ok(Program::new().local(APPLY, "apply"));
        }
        let program = Program::new().buffer(update).local(STEP, "step");
        Ok(self.weight_norm.stages(program, shape).local(APPLY, "apply"))
    }

    fn run(&self, stage: Stage, io: &mut StageIo<'_>, h: &Hyper) -> Result<()> {
        match stage {
            STEP => Self::step(io, h),
            WEIGH => self.weight_norm.weigh(io, U),
            APPLY if self.weight_norm.binds(io.class) => {
                let step = LastStep {
                    lr: h[LR],
                    scale: 1.0,
                    decay: h[LR] * h[WEIGHT_DECAY],
                    cautious: self.free.cautious,
                    late: self.free.late,
                    radius: RADIUS,
                };
                self.weight_norm.apply(io, &step, U)
            }
            APPLY => {
                let own = corrections(&io.units, h, h[LR]);
                self.free.pass(io, h, own, Vec::new())
            }
            _ => Err(Error::Internal(format!("adamw has no stage {stage}"))),
        }
    }

    fn describe(&self, p: &ParamSpec, _blocks: &[Block], _num_shards: [usize; 2]) -> Description {
        let view = if p.shape.len() < 2 { "elements".into() } else { self.view.phrase(p) };
        Description { view, lr_factor: 1.0, flops: flops(AdamW::FLOPS * p.numel()), ..Description::default() }
    }
}
