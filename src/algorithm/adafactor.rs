//! Adafactor with the parameters of fairseq and `transformers` (Shazeer & Stern 2018, arXiv:1804.04235).
//!
//! a = ρ·max(ε₂, RMS(x)), β₂ = 1 - t^decay; u = g/√V, u ← u/max(1, RMS(u)/clip), x ← x - λ·a·x - a·u; with β₁ the
//! finished step a·u is averaged.

use super::factored::{self, Factored, is_matrix, sums};
use super::stage::{StageIo, UnitIo};
use super::{Algorithm, flops, whole_matrices};
use crate::error::{Error, Result};
use crate::kernels::{self, Clipping, GradientSquares, Job, NewShare, Rates, ScaledApply, Steps};
use crate::program::{BufferId, BufferSpec, Program, Stage, Target};
use crate::spec::{Block, Description, Hyper, Options, ParamSpec, StateSpec, StateStorage, UnitShape};
use crate::tensor::DType;

pub(super) const OPTIONS: [&str; 5] =
    ["beta1", "scale_parameter", "relative_step", "warmup_init", "momentum_dtype"];

const SCALARS: [&str; 7] =
    ["lr?", "eps[0]", "eps[1]", "clip_threshold", "-decay_rate", "beta1?", "weight_decay"];
/// The same where the step is not relative: `lr` has to be a number.
const SCALARS_WITH_LR: [&str; 7] =
    ["lr", "eps[0]", "eps[1]", "clip_threshold", "-decay_rate", "beta1?", "weight_decay"];
const LR: usize = 0;
const EPSILON1: usize = 1;
const EPSILON2: usize = 2;
const CLIP: usize = 3;
const DECAY_RATE: usize = 4;
const BETA1: usize = 5;
const WEIGHT_DECAY: usize = 6;

const SQUARES: Stage = 0;
const UPDATE: Stage = 1;
const APPLY: Stage = 2;

/// Σ x² and Σ u²; behind them the sums of g².
const PARAM: BufferId = 0;
const UPDATES: BufferId = 1;
const SECOND: Factored = Factored { states: 0, buffers: 2 };

#[derive(Debug)]
#[allow(clippy::struct_excessive_bools)] // settings that do not depend on each other
pub(super) struct Adafactor {
    scale_parameter: bool,
    relative_step: bool,
    warmup_init: bool,
    cautious: bool,
    momentum: bool,
    /// The counter of the steps, which is where the parameters are for graphs that count.
    step: StateSpec,
    momentum_dtype: Option<DType>,
    storage: StateStorage,
}

impl Adafactor {
    pub(super) fn new(options: &Options) -> Result<Self> {
        Ok(Self {
            scale_parameter: options.flag("scale_parameter")?,
            relative_step: options.flag("relative_step")?,
            warmup_init: options.flag("warmup_init")?,
            cautious: options.cautious()?,
            momentum: options.is_set("beta1")?,
            step: StateSpec::steps(options)?,
            momentum_dtype: options.dtype("momentum_dtype")?,
            storage: StateStorage::from_options(options)?,
        })
    }

    /// Number of states of second moments; the step and the momentum follow.
    fn moments(shape: &UnitShape) -> usize {
        if is_matrix(shape) { 3 } else { 1 }
    }

    /// Rates ρ. A rate of zero stays: frameworks set it to take a step that moves nothing.
    fn rates<'a>(&self, h: &Hyper, steps: &'a Steps<'a>) -> Rates<'a> {
        if !self.relative_step || h[LR] == 0.0 {
            return Rates::Learning(h[LR]);
        }
        Rates::Relative { steps, warms_up: self.warmup_init }
    }

    fn squares(&self, io: &mut StageIo<'_>) -> Result<()> {
        let pass = GradientSquares { grad_factor: io.grad_factor };
        let StageIo { units, buffers, class, .. } = io;
        if !self.scale_parameter && !is_matrix(class) {
            return Ok(());
        }
        let rooms = SECOND.rooms(class, units, buffers, true, self.scale_parameter.then_some(PARAM))?;
        let units = units.iter().zip(rooms);
        if self.scale_parameter {
            let stacks = units.map(|(unit, room)| {
                room.stack(Job { read: [unit.grad.all(), unit.param.view().all()], write: [] })
            });
            kernels::rows::<2, 2, 0, _>(&pass, &mut stacks.collect::<Vec<_>>())
        } else {
            let stacks = units.map(|(unit, room)| room.stack(Job { read: [unit.grad.all()], write: [] }));
            kernels::rows::<1, 1, 0, _>(&pass, &mut stacks.collect::<Vec<_>>())
        }
    }

    fn update(io: &mut StageIo<'_>, h: &Hyper) -> Result<()> {
        let StageIo { units, buffers, class, grad_factor, .. } = io;
        let mut parts: Vec<_> = units.iter_mut().map(UnitIo::reborrow).collect();
        let counters = parts.iter_mut().map(|unit| unit.take_state(Self::moments(class)).into_row(0));
        let steps = &Steps::count(counters.collect())?;
        let share = NewShare::OfSteps { steps, exponent: -h[DECAY_RATE] };
        SECOND.update(class, &mut parts, buffers, &share, (h[EPSILON1], *grad_factor))?;
        SECOND.update_squares(class, &mut parts, buffers, (UPDATES, *grad_factor))
    }

    fn apply(&self, io: &mut StageIo<'_>, h: &Hyper) -> Result<()> {
        let (moments, class) = (Self::moments(io.class), io.class);
        let clipping = Clipping {
            grad_factor: io.grad_factor,
            threshold: h[CLIP],
            floor: h[EPSILON2],
            weight_decay: h[WEIGHT_DECAY],
        };
        let StageIo { units, buffers, .. } = io;
        let factors = {
            let steps = Steps::counted(units.iter().map(|unit| unit.state[moments].view().row(0)).collect());
            let sums = sums(units, buffers, UPDATES, self.scale_parameter.then_some(PARAM))?;
            clipping.factors(&self.rates(h, &steps), &sums)?
        };
        let rooms = SECOND.rooms(class, units, buffers, false, None)?;
        let mut parts: Vec<_> = units.iter_mut().map(UnitIo::reborrow).collect();
        let scales: Vec<_> = parts.iter_mut().map(|unit| SECOND.scale(class, unit)).collect();
        let (cautious, beta1) = (self.cautious, h[BETA1]);
        let pass = ScaledApply { scales: &scales, factors: &factors, cautious, beta1 };
        let parts = parts.into_iter().zip(rooms);
        if self.momentum {
            let stacks = parts.map(|(mut unit, room)| {
                let momentum = unit.take_state(moments + 1).into_all();
                room.stack(Job { read: [unit.grad.all()], write: [unit.param.into_all(), momentum] })
            });
            kernels::rows::<3, 1, 2, _>(&pass, &mut stacks.collect::<Vec<_>>())
        } else {
            let stacks = parts.map(|(unit, room)| {
                room.stack(Job { read: [unit.grad.all()], write: [unit.param.into_all()] })
            });
            kernels::rows::<2, 1, 1, _>(&pass, &mut stacks.collect::<Vec<_>>())
        }
    }
}

impl Algorithm for Adafactor {
    fn name(&self) -> &'static str {
        "adafactor"
    }

    fn scalars(&self) -> &'static [&'static str] {
        if self.relative_step { &SCALARS } else { &SCALARS_WITH_LR }
    }

    fn whole_parameter(&self) -> bool {
        true
    }

    fn leading(&self, p: &ParamSpec) -> usize {
        factored::leading(p)
    }

    fn blocks(&self, p: &ParamSpec) -> Result<Vec<Block>> {
        Ok(whole_matrices(p))
    }

    fn state(&self, p: &ParamSpec, _blocks: &[Block]) -> Result<Vec<StateSpec>> {
        let mut states = if p.shape.len() < 2 {
            vec![StateSpec::like("variance", p, factored::dtype(p))]
        } else {
            factored::states(["row", "col", "mean"], p).to_vec()
        };
        states.push(self.step.clone());
        if self.momentum {
            states.push(self.storage.momentum(p, self.momentum_dtype));
        }
        Ok(states)
    }

    fn program(&self, shape: &UnitShape) -> Result<Program> {
        let total = |name| BufferSpec::new(name, 1, 1, DType::F64).total();
        let mut program = Program::new().buffer(total("parameter")).buffer(total("update"));
        if is_matrix(shape) {
            program = Factored::buffers(program, ["rows", "columns", "squares"]);
        }
        program = program.local(SQUARES, "squares");
        if self.scale_parameter {
            program = program.redistribute(PARAM, Target::Replicate);
        }
        if is_matrix(shape) {
            program = SECOND.sum(program);
        }
        Ok(program.local(UPDATE, "update").redistribute(UPDATES, Target::Replicate).local(APPLY, "apply"))
    }

    fn run(&self, stage: Stage, io: &mut StageIo<'_>, h: &Hyper) -> Result<()> {
        match stage {
            SQUARES => self.squares(io),
            UPDATE => Self::update(io, h),
            APPLY => self.apply(io, h),
            _ => Err(Error::Internal(format!("adafactor has no stage {stage}"))),
        }
    }

    fn describe(&self, p: &ParamSpec, _blocks: &[Block], _num_shards: [usize; 2]) -> Description {
        Description {
            view: if p.shape.len() < 2 { "elements" } else { "rows and columns" }.into(),
            lr_factor: 1.0,
            flops: flops(14 * p.numel()),
            ..Description::default()
        }
    }
}
