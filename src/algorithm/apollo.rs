//! APOLLO: gradients scaled by channel as `AdamW` would scale them in a random subspace (Zhu et al. 2024,
//! arXiv:2412.05270).
//!
//! With P Gaussian of variance 1/r (where the columns are projected): R = G·P, N = m / (√v + ε) with Adam's moments of
//! R, s_i = ‖N_i‖ / (‖R_i‖ + 1e-8) by row or once for the matrix, U = s·G, of which the norm grows by 1 % a step at
//! most, X ← X - lr·√(1-β₂ᵗ)/(1-β₁ᵗ)·√scale·U. P is a function of seed, parameter and number of the period, never stored.

use super::low_rank::{LowRank, MOMENTUM, VARIANCE};
use super::{Algorithm, flops};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::hyper::Hyper;
use crate::kernels::{self, ChannelStep, Channels};
use crate::linalg::low_rank::gaussian_rows;
use crate::linalg::random::Key;
use crate::options::Options;
use crate::plan::{BufferId, BufferSpec, Program, Stage, Target};
use crate::spec::{Block, Cut, Description, Init, ParamSpec, Share, Side, StateSpec, UnitShape};
use crate::stage::{StageIo, jobs};
use crate::view::View;

pub(super) const OPTIONS: [&str; 1] = ["scale_type"];

const SCALARS: [&str; 6] = ["lr", "beta1", "beta2", "epsilon", "weight_decay", "scale"];
const LR: usize = 0;
const BETA1: usize = 1;
const BETA2: usize = 2;
const EPSILON: usize = 3;
const WEIGHT_DECAY: usize = 4;
const SCALE: usize = 5;

/// Behind the states that all algorithms of the kind have.
const UPDATE_NORM: usize = 3;

const PROJECT: Stage = 0;
const RATIO: Stage = 1;
const MEASURE: Stage = 2;
const SUM: Stage = 3;
const APPLY: Stage = 4;

const LOW: BufferId = 0;
/// The squared norms of N and R.
const NORMS: BufferId = 1;
/// The factor of each channel.
const FACTORS: BufferId = 2;
/// The squared norm of U, summed over the rows, then over the columns.
const TOTAL: BufferId = 3;
const TOTAL_ALL: BufferId = 4;
const P: BufferId = 5;
/// A gradient in the type of products.
const WIDE: BufferId = 6;

/// Separates these random numbers from others of the same parameter.
const TAG: u32 = 4;
/// By how much the norm of an update may exceed that of the one before.
const GROWTH: f64 = 1.01;
const TINY: f64 = 1e-8;

#[derive(Debug)]
pub(super) struct Apollo {
    common: LowRank,
    /// Whether the matrix has one factor.
    tensor: bool,
}

impl Apollo {
    pub(super) fn new(options: &Options) -> Result<Self> {
        let common = LowRank::new(options)?;
        if common.sides(1, 1, false).len() == 2 {
            return Err(Error::Value("proj_type of apollo_adamw must not be 'full'".into()));
        }
        Ok(Self { common, tensor: options.either("scale_type", "channel", "tensor")? })
    }

    fn side(&self, class: &UnitShape) -> Side {
        self.common.sides(class.rows, class.cols, class.transposed)[0]
    }

    fn project(&self, io: &StageIo<'_>) -> Result<()> {
        let side = self.side(io.class);
        let product = io.class.param.arithmetic();
        for (i, unit) in io.units.iter().enumerate() {
            let (d, rank) = ([unit.rows, unit.cols][side.index()], self.common.rank());
            let key = Key { seed: self.common.seed, stream: unit.param_index as u64 };
            #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // a step count
            let period = unit.steps as u64 / self.common.gap as u64;
            let first = unit.block_index * d + io.origin(P, i)?[0];
            let mut p = io.matrix(P, i)?;
            p.f_copy_(&gaussian_rows(key, TAG, period, first, io.shape(P, i)?)?)?;
            let grad = if unit.grad.dtype() == product {
                unit.grad.tensor()?
            } else {
                let [rows, cols] = unit.grad.shape();
                let wide = io.slab(WIDE, i)?.part(0, rows * cols).area(0, [rows, cols], cols);
                kernels::run(&kernels::Convert { factor: 1.0 }, &jobs([Ok([unit.grad, wide])])?);
                wide.tensor()?
            };
            let out = io.matrix(LOW, i)?;
            debug_assert!(rank == io.shape(P, i)?[1]);
            let _ = match side {
                Side::Cols => grad.f_mm_out(&out, &p)?,
                Side::Rows => p.f_tr()?.f_mm_out(&out, &grad)?,
            };
        }
        Ok(())
    }

    /// Moments of the projected gradient, and the ratios of norms that they give.
    fn ratio(&self, io: &StageIo<'_>, h: &Hyper) -> Result<()> {
        let by_row = self.side(io.class) == Side::Cols;
        let squares = |i: usize| Ok(kernels::channel_squares(&io.slab(LOW, i)?, io.shape(LOW, i)?, by_row));
        let before = (0..io.units.len()).map(squares).collect::<Result<Vec<_>>>()?;
        let direction = kernels::Direction {
            beta1: h[BETA1],
            beta2: h[BETA2],
            epsilon: h[EPSILON],
            grad_factor: io.grad_factor,
            factor: 1.0,
            // Not corrected: the step size is.
            steps: vec![f64::INFINITY; io.units.len()],
        };
        let units = io.units.iter().enumerate();
        let all = units.map(|(i, u)| Ok([io.area(LOW, i)?, u.state[MOMENTUM], u.state[VARIANCE]]));
        kernels::run(&direction, &jobs(all)?);
        for (i, before) in before.into_iter().enumerate() {
            let after = squares(i)?;
            let low = before.iter().map(|x| io.grad_factor.abs() * x.sqrt());
            if self.tensor {
                let sums = [after.iter().sum::<f64>(), low.map(|x| x * x).sum()];
                io.slab(NORMS, i)?.numbers().copy_from_slice(&sums);
            } else {
                let ratios: Vec<f64> = after.iter().zip(low).map(|(n, r)| n.sqrt() / (r + TINY)).collect();
                io.slab(FACTORS, i)?.numbers().copy_from_slice(&ratios);
            }
        }
        Ok(())
    }

    fn channels(&self, io: &StageIo<'_>, i: usize) -> Result<Channels> {
        let rows = self.side(io.class) == Side::Cols;
        let factors = io.slab(FACTORS, i)?;
        if self.tensor {
            let norms = io.slab(NORMS, i)?.numbers();
            let ratio = norms[0].sqrt() / (norms[1].sqrt() + TINY);
            return Ok(Channels { factors: vec![ratio; factors.len()], rows });
        }
        Ok(Channels { factors: factors.numbers().to_vec(), rows })
    }

    fn apply(&self, io: &StageIo<'_>, h: &Hyper) -> Result<()> {
        for (i, unit) in io.units.iter().enumerate() {
            let steps = unit.steps + 1.0;
            let norm = io.slab(TOTAL_ALL, i)?.numbers()[0].sqrt() * io.grad_factor.abs();
            let stored = unit.state[UPDATE_NORM].row(0);
            let last = stored.tensor(&[1])?.f_double_value(&[0])?;
            // Nothing is compared with at first, and a gradient of zero says nothing of the next one.
            let limiter = if unit.steps > 0.0 { (norm / (last + TINY)).max(GROWTH) / GROWTH } else { 1.0 };
            if norm != 0.0 {
                let _ = stored.tensor(&[1])?.f_fill_(norm / limiter)?;
            }
            let corrected = (1.0 - h[BETA2].powf(steps)).sqrt() / (1.0 - h[BETA1].powf(steps));
            let step = ChannelStep {
                rate: h[LR] * corrected * h[SCALE].sqrt() / limiter * io.grad_factor,
                decay: h[LR] * h[WEIGHT_DECAY],
                cautious: self.common.cautious,
                late: self.common.late,
            };
            self.channels(io, i)?.step(&step, &unit.param, &unit.grad);
        }
        Ok(())
    }
}

impl Algorithm for Apollo {
    fn name(&self) -> &'static str {
        "apollo_adamw"
    }

    fn scalars(&self) -> &'static [&'static str] {
        &SCALARS
    }

    fn takes(&self, p: &ParamSpec) -> bool {
        self.common.takes(p)
    }

    fn orientation(&self, ways: [usize; 2]) -> Option<bool> {
        self.common.orientation(ways)
    }

    fn counted(&self) -> bool {
        true
    }

    fn blocks(&self, p: &ParamSpec) -> Result<Vec<Block>> {
        View::default().blocks(p)
    }

    fn state(&self, p: &ParamSpec, blocks: &[Block]) -> Result<Vec<StateSpec>> {
        let lead = p.shape.len() - 2;
        let mut states = self.common.states(p, self.common.sides_of(p, blocks));
        states.push(StateSpec {
            role: "update_norm",
            shape: p.shape[..lead].to_vec(),
            dtype: p.dtype.arithmetic(),
            init: Init::Zeros,
            cuts: (0..lead).map(Cut::With).collect(),
            share: Share::Number,
            coded: None,
        });
        Ok(states)
    }

    fn program(&self, shape: &UnitShape) -> Result<Program> {
        let (side, rank, product) = (self.side(shape), self.common.rank(), shape.param.arithmetic());
        let with = [Cut::With(Side::Rows), Cut::With(Side::Cols)];
        let (rows, cols) = (shape.rows, shape.cols);
        let (low, factors, other) = match side {
            Side::Cols => (
                BufferSpec::new("r", rows, rank, product).cut(with[0], Cut::Whole),
                BufferSpec::new("factors", rows, 1, DType::F64).cut(with[0], Cut::Whole),
                Side::Rows,
            ),
            Side::Rows => (
                BufferSpec::new("r", rank, cols, product).cut(Cut::Whole, with[1]),
                BufferSpec::new("factors", 1, cols, DType::F64).cut(Cut::Whole, with[1]),
                Side::Cols,
            ),
        };
        let total = |over| BufferSpec::new("update_norm", 1, 1, DType::F64).summed(over);
        let norms = BufferSpec::new("norms", 1, if self.tensor { 2 } else { 0 }, DType::F64).summed(other);
        let projection = BufferSpec::new("p", [rows, cols][side.index()], rank, product);
        let wide = if shape.param == product {
            0
        } else {
            rows.div_ceil(shape.ways[0]) * cols.div_ceil(shape.ways[1])
        };
        let mut program = Program::new()
            .buffer(low.summed(side))
            .buffer(norms)
            .buffer(factors)
            .buffer(total(Side::Rows))
            .buffer(total(Side::Cols))
            .buffer(projection.cut(with[side.index()], Cut::Whole))
            .scratch("wide", wide, product)
            .local(PROJECT, "project")
            .redistribute(LOW, Target::Replicate)
            .local(RATIO, "ratio");
        if self.tensor {
            program = program.redistribute(NORMS, Target::Replicate);
        }
        Ok(program
            .local(MEASURE, "measure")
            .redistribute(TOTAL, Target::Replicate)
            .local(SUM, "sum")
            .redistribute(TOTAL_ALL, Target::Replicate)
            .local(APPLY, "apply"))
    }

    fn run(&self, stage: Stage, io: &mut StageIo<'_>, h: &Hyper) -> Result<()> {
        let units = 0..io.units.len();
        match stage {
            PROJECT => self.project(io),
            RATIO => self.ratio(io, h),
            MEASURE => units.into_iter().try_for_each(|i| {
                let total = self.channels(io, i)?.sum_of_squares(&io.units[i].grad);
                io.slab(TOTAL, i)?.numbers().fill(total);
                Ok(())
            }),
            SUM => units.into_iter().try_for_each(|i| {
                io.slab(TOTAL, i)?.copy_to(&io.slab(TOTAL_ALL, i)?);
                Ok(())
            }),
            APPLY => self.apply(io, h),
            _ => Err(Error::Internal(format!("apollo_adamw has no stage {stage}"))),
        }
    }

    fn describe(&self, p: &ParamSpec, blocks: &[Block], _ways: [usize; 2]) -> Description {
        let products: usize = blocks.iter().map(|b| b.numel() * (2 * self.common.rank() + 6)).sum();
        Description {
            view: View::default().phrase(p),
            lr_factor: 1.0,
            rank: Some(self.common.rank()),
            flops: flops(products),
            whole_flops: 0.0,
        }
    }
}
