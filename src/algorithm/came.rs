//! CAME: Adafactor with a momentum whose steps are scaled by how well it agrees with the updates (Luo et al. 2023,
//! arXiv:2307.02047).
//!
//! u = g/√V, u ← u/max(1, RMS(u)/clip), m ← β₁m + (1-β₁)u, q = (u - m)² + ε₂ with its own means by row and column under
//! β₃, x ← x - lr·λ·x - lr·m/√Q. A parameter of fewer than two dimensions takes m as it is.

use super::factored::{self, Factored, counters, is_matrix, sums};
use super::stage::StageIo;
use super::{Algorithm, flops, whole_matrices};
use crate::error::{Error, Result};
use crate::kernels::{
    self, Clipping, ConfidentApply, Factors, GradientSquares, NewShare, Rates, Residual, Scales, Steps,
};
use crate::program::{BufferId, BufferSpec, Program, Stage, Target};
use crate::spec::{Block, Description, Hyper, Options, ParamSpec, StateSpec, StateStorage, UnitShape};
use crate::tensor::{DType, FlatView};

pub(super) const OPTIONS: [&str; 3] = ["capturable", "cautious_wd", "momentum_dtype"];
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
            step: StateSpec { on_host: !options.flag("capturable")?, ..StateSpec::counter("step") },
            cautious: options.flag("cautious_wd")?,
            momentum_dtype: options.dtype("momentum_dtype")?,
            storage: StateStorage::from_options(options)?,
        })
    }

    fn squares(io: &StageIo<'_>) -> Result<()> {
        if !is_matrix(io.class) {
            return Ok(());
        }
        let pass = GradientSquares { grad_factor: io.grad_factor };
        let units = io.units.iter().enumerate();
        let stacks = units.map(|(i, u)| SECOND.stack(io, i, [u.grad.all()], (true, FlatView::EMPTY)));
        kernels::rows(&pass, &stacks.collect::<Result<Vec<_>>>()?)
    }

    fn update(io: &StageIo<'_>, h: &Hyper) -> Result<()> {
        Steps::count(counters(io, STEP))?;
        SECOND.update(io, &NewShare::Same(1.0 - h[BETA2]), h[EPSILON1])?;
        SECOND.update_squares(io, UPDATES)
    }

    /// The factors by which u is clipped.
    fn clipped(io: &StageIo<'_>, h: &Hyper) -> Result<Factors<2>> {
        let (threshold, floor) = (h[CLIP], f64::NAN);
        let clipping = Clipping { grad_factor: io.grad_factor, threshold, floor, weight_decay: 0.0 };
        clipping.factors(&Rates::Unit, &sums(io, UPDATES, None)?)
    }

    fn residuals(io: &StageIo<'_>, h: &Hyper) -> Result<()> {
        if !is_matrix(io.class) {
            return Ok(());
        }
        let (scales, factors) = (SECOND.scales(io), Self::clipped(io, h)?);
        let pass = Residual { scales: &scales, factors: &factors, beta1: h[BETA1] };
        let units = io.units.iter().enumerate();
        let stacks = units.map(|(i, u)| {
            INSTABILITY.stack(io, i, [u.grad.all(), u.state[MOMENTUM].all()], (true, FlatView::EMPTY))
        });
        kernels::rows(&pass, &stacks.collect::<Result<Vec<_>>>()?)
    }

    fn apply(&self, io: &StageIo<'_>, h: &Hyper) -> Result<()> {
        let (scales, factors) = (SECOND.scales(io), Self::clipped(io, h)?);
        let update = Residual { scales: &scales, factors: &factors, beta1: h[BETA1] };
        let scales = if is_matrix(io.class) {
            INSTABILITY.update(io, &NewShare::Same(1.0 - h[BETA3]), h[EPSILON2])?;
            INSTABILITY.scales(io)
        } else {
            io.units.iter().map(|u| Scales::ones(&u.param.all())).collect()
        };
        let (rate, decay, cautious) = (h[LR], h[LR] * h[WEIGHT_DECAY], self.cautious);
        let step = ConfidentApply { update, scales: &scales, rate, decay, cautious };
        let stacks = io.units.iter().enumerate().map(|(i, u)| {
            let operands = [u.param.all(), u.grad.all(), u.state[MOMENTUM].all()];
            INSTABILITY.stack(io, i, operands, (false, FlatView::EMPTY))
        });
        kernels::rows(&step, &stacks.collect::<Result<Vec<_>>>()?)
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
        let total = BufferSpec::new("update", 1, 1, DType::F64).wire(shape.param.arithmetic()).total();
        let mut program = Program::new().buffer(total);
        if is_matrix(shape) {
            program = Factored::buffers(program, ["rows", "columns", "squares"], shape);
            program = Factored::buffers(program, ["residual rows", "residual columns", "residuals"], shape);
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
