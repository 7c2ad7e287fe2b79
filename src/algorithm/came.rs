//! CAME: Adafactor with a momentum whose steps are scaled by how well it agrees with the updates (Luo et al. 2023,
//! arXiv:2307.02047).
//!
//! u = g/√V, u ← u/max(1, RMS(u)/clip), m ← β₁m + (1-β₁)u, q = (u - m)² + ε₂ with its own means by row and column under
//! β₃, x ← x - lr·λ·x - lr·m/√Q. A parameter of fewer than two dimensions takes m as it is.

use super::factored::{self, Factored, is_matrix, sums};
use super::stage::{StageIo, UnitIo, lines};
use super::{Algorithm, flops, whole_matrices};
use crate::error::{Error, Result};
use crate::kernels::{
    self, Clipping, ConfidentApply, Factors, GradientSquares, Job, NewShare, Rates, Residual, Scales, Steps,
};
use crate::program::{BufferId, BufferSpec, Program, Stage, Target};
use crate::spec::{Block, Description, Hyper, Options, ParamSpec, StateSpec, StateStorage, UnitShape};
use crate::tensor::DType;

pub(super) const OPTIONS: [&str; 1] = ["momentum_dtype"];
/// The authors' names of states.
pub(super) const STATES: [(&str, &str); 3] =
    [("res_row", "exp_avg_res_row"), ("res_col", "exp_avg_res_col"), ("res_mean", "exp_avg_res_mean")];

const SCALARS: [&str; 8] =
    ["lr", "eps[0]", "eps[1]", "clip_threshold", "betas[0]", "betas[1]", "betas[2]", "weight_decay"];
const LR: usize = 0;
const EPSILON1: usize = 1;
const EPSILON2: usize = 2;
const CLIP: usize = 3;
const BETA1: usize = 4;
const BETA2: usize = 5;
const BETA3: usize = 6;
const WEIGHT_DECAY: usize = 7;

const SQUARES: Stage = 0;
const UPDATE: Stage = 1;
const RESIDUALS: Stage = 2;
const APPLY: Stage = 3;

const STEP: usize = 0;
const MOMENTUM: usize = 1;
/// Σ u²; behind it the sums of g² and those of (u - m)².
const UPDATES: BufferId = 0;
const SECOND: Factored = Factored { states: 2, buffers: 1 };
const INSTABILITY: Factored = Factored { states: 5, buffers: 4 };

#[derive(Debug)]
pub(super) struct Came {
    /// The counter of the steps, which is where the parameters are for graphs that count.
    step: StateSpec,
    cautious: bool,
    momentum_dtype: Option<DType>,
    storage: StateStorage,
}

impl Came {
    pub(super) fn new(options: &Options) -> Result<Self> {
        Ok(Self {
            step: StateSpec::steps(options)?,
            cautious: options.cautious()?,
            momentum_dtype: options.dtype("momentum_dtype")?,
            storage: StateStorage::from_options(options)?,
        })
    }

    fn squares(io: &mut StageIo<'_>) -> Result<()> {
        let pass = GradientSquares { grad_factor: io.grad_factor };
        let StageIo { units, buffers, class, .. } = io;
        if !is_matrix(class) {
            return Ok(());
        }
        let rooms = SECOND.rooms(class, units, buffers, true, None)?;
        let stacks = units.iter().zip(rooms);
        let stacks = stacks.map(|(unit, room)| room.stack(Job { read: [unit.grad.all()], write: [] }));
        kernels::rows::<1, 1, 0, _>(&pass, &mut stacks.collect::<Vec<_>>())
    }

    fn update(io: &mut StageIo<'_>, h: &Hyper) -> Result<()> {
        let StageIo { units, buffers, class, grad_factor, .. } = io;
        let _ = Steps::count(lines(units, STEP))?;
        let share = NewShare::Same(1.0 - h[BETA2]);
        SECOND.update(class, units, buffers, &share, (h[EPSILON1], *grad_factor))?;
        SECOND.update_squares(class, units, buffers, (UPDATES, *grad_factor))
    }

    /// The factors by which u is clipped.
    fn clipped(io: &StageIo<'_>, h: &Hyper) -> Result<Factors<2>> {
        let (threshold, floor) = (h[CLIP], f64::NAN);
        let clipping = Clipping { grad_factor: io.grad_factor, threshold, floor, weight_decay: 0.0 };
        clipping.factors(&Rates::Unit, &sums(&io.units, &io.buffers, UPDATES, None)?)
    }

    fn residuals(io: &mut StageIo<'_>, h: &Hyper) -> Result<()> {
        if !is_matrix(io.class) {
            return Ok(());
        }
        let factors = Self::clipped(io, h)?;
        let StageIo { units, buffers, class, .. } = io;
        let rooms = INSTABILITY.rooms(class, units, buffers, true, None)?;
        let mut parts: Vec<_> = units.iter_mut().map(UnitIo::reborrow).collect();
        let scales: Vec<_> = parts.iter_mut().map(|unit| SECOND.scale(class, unit)).collect();
        let pass = Residual { scales: &scales, factors: &factors, beta1: h[BETA1] };
        let stacks = parts.into_iter().zip(rooms).map(|(mut unit, room)| {
            let momentum = unit.take_state(MOMENTUM).into_view().all();
            room.stack(Job { read: [unit.grad.all(), momentum], write: [] })
        });
        kernels::rows(&pass, &mut stacks.collect::<Vec<_>>())
    }

    fn apply(&self, io: &mut StageIo<'_>, h: &Hyper) -> Result<()> {
        let factors = Self::clipped(io, h)?;
        let StageIo { units, buffers, class, grad_factor, .. } = io;
        if is_matrix(class) {
            let share = NewShare::Same(1.0 - h[BETA3]);
            INSTABILITY.update(class, units, buffers, &share, (h[EPSILON2], *grad_factor))?;
        }
        let rooms = INSTABILITY.rooms(class, units, buffers, false, None)?;
        let mut parts: Vec<_> = units.iter_mut().map(UnitIo::reborrow).collect();
        let own: Vec<_> = parts.iter_mut().map(|unit| SECOND.scale(class, unit)).collect();
        let along = |unit: &mut UnitIo<'_>| {
            let (len, device) = (unit.grad.shape().iter().product(), unit.param.device());
            if is_matrix(class) { None } else { Some(Scales::ones(len, device)) }
        };
        let scales: Vec<_> = parts
            .iter_mut()
            .map(|unit| along(unit).unwrap_or_else(|| INSTABILITY.scale(class, unit)))
            .collect();
        let (rate, decay, cautious) = (h[LR], h[LR] * h[WEIGHT_DECAY], self.cautious);
        let step = ConfidentApply {
            beta1: h[BETA1],
            cautious,
            rate,
            decay,
            update_scales: &own,
            scales: &scales,
            factors: &factors,
        };
        let stacks = parts.into_iter().zip(rooms).map(|(mut unit, room)| {
            let momentum = unit.take_state(MOMENTUM).into_all();
            room.stack(Job { read: [unit.grad.all()], write: [unit.param.into_all(), momentum] })
        });
        kernels::rows(&step, &mut stacks.collect::<Vec<_>>())
    }
}

impl Algorithm for Came {
    fn name(&self) -> &'static str {
        "came"
    }

    fn scalars(&self) -> &'static [&'static str] {
        &SCALARS
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
        let momentum = self.storage.momentum(p, self.momentum_dtype);
        let mut states = vec![self.step.clone(), momentum];
        if p.shape.len() < 2 {
            states.push(StateSpec::like("variance", p, factored::dtype(p)));
        } else {
            states.extend(factored::states(["row", "col", "mean"], p));
            states.extend(factored::states(["res_row", "res_col", "res_mean"], p));
        }
        Ok(states)
    }

    fn program(&self, shape: &UnitShape) -> Result<Program> {
        let total = BufferSpec::new("update", 1, 1, DType::F64).total();
        let mut program = Program::new().buffer(total);
        if is_matrix(shape) {
            program = Factored::buffers(program, ["rows", "columns", "squares"]);
            program = Factored::buffers(program, ["residual rows", "residual columns", "residuals"]);
        }
        program = program.local(SQUARES, "squares");
        if is_matrix(shape) {
            program = SECOND.sum(program);
        }
        program = program
            .local(UPDATE, "update")
            .redistribute(UPDATES, Target::Replicate)
            .local(RESIDUALS, "residuals");
        if is_matrix(shape) {
            program = INSTABILITY.sum(program);
        }
        Ok(program.local(APPLY, "apply"))
    }

    fn run(&self, stage: Stage, io: &mut StageIo<'_>, h: &Hyper) -> Result<()> {
        match stage {
            SQUARES => Self::squares(io),
            UPDATE => Self::update(io, h),
            RESIDUALS => Self::residuals(io, h),
            APPLY => self.apply(io, h),
            _ => Err(Error::Internal(format!("came has no stage {stage}"))),
        }
    }

    fn describe(&self, p: &ParamSpec, _blocks: &[Block], _num_shards: [usize; 2]) -> Description {
        Description {
            view: if p.shape.len() < 2 { "elements" } else { "rows and columns" }.into(),
            lr_factor: 1.0,
            flops: flops(22 * p.numel()),
            ..Description::default()
        }
    }
}
