//! APOLLO: gradients scaled by channel as `AdamW` would scale them in a random subspace (Zhu et al. 2024,
//! arXiv:2412.05270).
//!
//! With P Gaussian of variance 1/r (where the columns are projected): R = G·P, N = m / (√v + ε) with Adam's moments of
//! R, s = ‖N‖ / (‖R‖ + 1e-8) by row or once for the matrix, U = s·G, whose norm grows by at most 1 % a step from the
//! first one that is not negligible, X ← X - lr·√(1-β₂ᵗ)/(1-β₁ᵗ)·√scale·U. P is a function of seed, parameter and
//! number of the period, never stored.

mod stages;

use super::low_rank::{LowRank, OWNED};
use super::stage::StageIo;
use super::{Algorithm, flops};
use crate::error::{Error, Result};
use crate::program::{BufferId, BufferSpec, Program, Stage, Target};
use crate::spec::{
    Block, Description, DimSharding, Hyper, Init, Matrices, Options, ParamSpec, Share, Side, StateSpec,
    UnitShape,
};
use crate::tensor::DType;

pub(super) const OPTIONS: [&str; 1] = ["scale_type"];

const SCALARS: [&str; 6] = ["lr", "beta1", "beta2", "epsilon", "weight_decay", "scale"];
const LR: usize = 0;
const BETA1: usize = 1;
const BETA2: usize = 2;
const EPSILON: usize = 3;
const WEIGHT_DECAY: usize = 4;
const SCALE: usize = 5;

/// State behind those that all algorithms of the kind have.
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

#[derive(Debug)]
pub(super) struct Apollo {
    common: LowRank,
    /// True if the matrix has one factor.
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

    /// The side that is projected.
    fn side(&self, class: &UnitShape) -> Side {
        self.common.sides(class.rows, class.cols, class.transposed)[0]
    }

    /// Appends the ratios of whole projected gradients, computed by the owners; all ranks receive the resulting factors.
    /// A gradient that is whole on all ranks is projected by its owner only.
    fn at_owners(&self, program: Program, shape: &UnitShape) -> Program {
        let placed = |program: Program, buffers: &[BufferId]| {
            buffers.iter().fold(program, |program, &buffer| program.same_placement_as(buffer, LOW))
        };
        let mut program = if shape.num_shards == [1, 1] {
            placed(program.redistribute(LOW, Target::Whole), &[P, FACTORS, NORMS]).local(PROJECT, "project")
        } else {
            placed(program.local(PROJECT, "project").redistribute(LOW, Target::Whole), &[FACTORS, NORMS])
        };
        // One factor follows from the norms.
        let (sent, other) = if self.tensor { (NORMS, FACTORS) } else { (FACTORS, NORMS) };
        program = program.local(RATIO, "ratio");
        program = [LOW, P, other].into_iter().fold(program, Program::release);
        program.redistribute(sent, Target::Storage)
    }

    /// The side that is not projected, whose rows or columns have factors.
    fn channel_side(&self, class: &UnitShape) -> Side {
        if self.side(class) == Side::Cols { Side::Rows } else { Side::Cols }
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

    fn orientation(&self, num_shards: [usize; 2]) -> Option<bool> {
        self.common.orientation(num_shards)
    }

    fn counted(&self) -> bool {
        true
    }

    fn multiplies_gradients(&self) -> bool {
        true
    }

    fn replays(&self, encoded: bool) -> bool {
        // libtorch takes the step on decoded weights, which have other memory in each step.
        !encoded
    }

    fn blocks(&self, p: &ParamSpec) -> Result<Vec<Block>> {
        Matrices::stacked().blocks(p)
    }

    fn state(&self, p: &ParamSpec, blocks: &[Block]) -> Result<Vec<StateSpec>> {
        let lead = p.shape.len() - 2;
        let mut states = self.common.states(p, self.common.sides_of(p, blocks));
        states.push(StateSpec {
            role: "update_norm",
            shape: p.shape[..lead].to_vec(),
            dtype: p.dtype.arithmetic(),
            init: Init::Zeros,
            sharding: (0..lead).map(DimSharding::LikeParam).collect(),
            share: Share::Number,
            moment: None,
            quantized: None,
            on_host: false,
        });
        Ok(states)
    }

    fn program(&self, shape: &UnitShape) -> Result<Program> {
        let (side, rank, product) = (self.side(shape), self.common.rank(), shape.param.arithmetic());
        let with = [DimSharding::LikeParam(Side::Rows), DimSharding::LikeParam(Side::Cols)];
        let (rows, cols) = (shape.rows, shape.cols);
        let (low, factors, other) = match side {
            Side::Cols => (
                BufferSpec::new("r", rows, rank, product).sharded(with[0], DimSharding::Replicated),
                BufferSpec::new("factors", rows, 1, DType::F64).sharded(with[0], DimSharding::Replicated),
                Side::Rows,
            ),
            Side::Rows => (
                BufferSpec::new("r", rank, cols, product).sharded(DimSharding::Replicated, with[1]),
                BufferSpec::new("factors", 1, cols, DType::F64).sharded(DimSharding::Replicated, with[1]),
                Side::Cols,
            ),
        };
        let total = |over| BufferSpec::new("update_norm", 1, 1, DType::F64).summed(over);
        let norms = BufferSpec::new("norms", 1, if self.tensor { 2 } else { 0 }, DType::F64).summed(other);
        let projection = BufferSpec::new("p", [rows, cols][side.index()], rank, product);
        let wide = if shape.param == product {
            0
        } else {
            rows.div_ceil(shape.num_shards[0]) * cols.div_ceil(shape.num_shards[1])
        };
        let is_owned = self.common.is_owned(shape, &[side]);
        let owned = if is_owned { OWNED.to_vec() } else { Vec::new() };
        let mut program = Program { exclusive: is_owned, owned, ..Program::new() }
            .buffer(low.summed(side))
            .buffer(norms)
            .buffer(factors)
            .buffer(total(Side::Rows))
            .buffer(total(Side::Cols))
            .buffer(projection.sharded(with[side.index()], DimSharding::Replicated))
            .scratch("wide", wide, product);
        if is_owned {
            program = self.at_owners(program, shape);
        } else {
            program = program.local(PROJECT, "project").redistribute(LOW, Target::Replicate);
            program = program.local(RATIO, "ratio");
            if self.tensor {
                program = program.redistribute(NORMS, Target::Replicate);
            }
        }
        Ok(program
            .local(MEASURE, "measure")
            .redistribute(TOTAL, Target::Replicate)
            .local(SUM, "sum")
            .redistribute(TOTAL_ALL, Target::Replicate)
            .local(APPLY, "apply"))
    }

    fn run(&self, stage: Stage, io: &mut StageIo<'_>, h: &Hyper) -> Result<()> {
        match stage {
            PROJECT => self.project(io),
            RATIO => self.ratio(io, h),
            MEASURE => self.measure(io),
            SUM => Self::sum(io),
            APPLY => self.apply(io, h),
            _ => Err(Error::Internal(format!("apollo_adamw has no stage {stage}"))),
        }
    }

    fn describe(&self, p: &ParamSpec, blocks: &[Block], _num_shards: [usize; 2]) -> Description {
        let each = 2.0 * flops(self.common.rank()) + 6.0;
        let products: f64 = blocks.iter().map(|b| flops(b.numel()) * each).sum();
        Description {
            view: Matrices::stacked().phrase(p),
            lr_factor: 1.0,
            rank: Some(self.common.rank()),
            roundoff: None,
            flops: products,
            whole_flops: 0.0,
        }
    }
}
