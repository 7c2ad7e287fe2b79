//! `GaLore`: `AdamW` on a gradient that is projected on its leading singular vectors (Zhao et al. 2024,
//! arXiv:2403.03507).
//!
//! With V the first r right singular vectors of a recent gradient (where the columns are projected): R = G·V,
//! N = Adam's direction of R, X ← (1-lr·λ)·X - lr·s·N·Vᵀ. Every `update_proj_gap` steps V is recomputed, unless the
//! gradient has no direction; until the first V is found, its computation is tried in every step.

mod compose;
mod layout;
mod refresh;
mod stages;

use super::low_rank::LowRank;
use super::stage::StageIo;
use super::warned::Warned;
use super::{Algorithm, flops};
use crate::error::{Error, Result};
use crate::kernels::SIGNS;
use crate::linalg::sketch::sketch_columns;
use crate::program::{Program, Stage};
use crate::spec::{
    Block, Description, DimSharding, Hyper, Init, Matrices, Options, ParamSpec, Share, Side, StateSpec,
    UnitShape,
};
use crate::tensor::DType;

use layout::{ADAM, APPLY, DECOMPOSE, OVERLAP, PROJ_STEP, PROJECT, STATISTIC, SUM, TAKE, TURN};
use stages::Taken;

pub(super) const OPTIONS: [&str; 3] = ["svd", "rotate_moments", "stagger"];

const SCALARS: [&str; 6] = ["lr", "beta1", "beta2", "epsilon", "weight_decay", "scale"];
const LR: usize = 0;
const BETA1: usize = 1;
const BETA2: usize = 2;
const EPSILON: usize = 3;
const WEIGHT_DECAY: usize = 4;
const SCALE: usize = 5;

/// Method by which a basis is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Svd {
    Gram,
    Exact,
    Random,
}

/// Source, at its owner, of the matrix from which a basis is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Origin {
    /// The gradient, stored by the owner.
    Here,
    /// Sums over the side that is not projected.
    Sums(Side),
    /// The gradient, sent to the owner.
    Sent,
}

#[derive(Debug)]
pub(super) struct GaLore {
    common: LowRank,
    svd: Svd,
    rotate: bool,
    stagger: bool,
    warned: Warned,
}

impl GaLore {
    pub(super) fn new(options: &Options) -> Result<Self> {
        let svd = match options.word("svd")? {
            "gram" => Svd::Gram,
            "exact" => Svd::Exact,
            "random" => Svd::Random,
            other => {
                return Err(Error::Value(format!("svd must be one of gram, exact, random, got '{other}'")));
            }
        };
        Ok(Self {
            common: LowRank::new(options)?,
            svd,
            rotate: options.flag("rotate_moments")?,
            stagger: options.flag("stagger")?,
            warned: Warned::new(
                "oxidion.galore",
                "the gradient is not finite or does not decompose; its old projection is kept",
            ),
        })
    }

    /// Origin of the bases of a class: sums only where they take fewer bytes than a process has of the gradient.
    fn from(&self, class: &UnitShape) -> Origin {
        let (lengths, shards) = ([class.rows, class.cols], class.num_shards);
        let bytes =
            class.rows * class.cols * class.param.arithmetic().bytes() / (shards[0] * shards[1]).max(1);
        match *self.sides(class) {
            _ if shards == [1, 1] => Origin::Here,
            [side] if shards[side.index()] == 1 && self.svd != Svd::Exact => {
                let d = lengths[side.index()];
                let sums = d * self.sketch_columns(d).unwrap_or(d) * DType::F64.bytes();
                if sums <= bytes { Origin::Sums(side.other()) } else { Origin::Sent }
            }
            _ => Origin::Sent,
        }
    }

    fn sides(&self, class: &UnitShape) -> &'static [Side] {
        self.common.sides(class.rows, class.cols, class.transposed)
    }

    /// The columns of a sketch of `d` directions, if there is one.
    fn sketch_columns(&self, d: usize) -> Option<usize> {
        sketch_columns(self.common.rank(), d).filter(|_| self.svd == Svd::Random)
    }

    /// Tests whether processes hold parts of bases only, and may hold none.
    fn is_basis_sharded(sides: &[Side], num_shards: [usize; 2]) -> bool {
        sides.iter().any(|side| num_shards[side.index()] > 1)
    }

    /// The basis of one side for each matrix.
    fn basis(&self, role: &'static str, p: &ParamSpec, side: Side) -> StateSpec {
        let lead = p.shape.len() - 2;
        let dim = lead + side.index();
        StateSpec {
            role,
            shape: p.shape[..lead].iter().copied().chain([p.shape[dim], self.common.rank()]).collect(),
            dtype: p.dtype.arithmetic(),
            init: Init::Zeros,
            sharding: (0..lead)
                .map(DimSharding::LikeParam)
                .chain([DimSharding::LikeParam(dim), DimSharding::Replicated])
                .collect(),
            share: Share::Side { side, leading: lead, column: false },
            moment: None,
            quantized: None,
            on_host: false,
        }
    }
}

impl Algorithm for GaLore {
    fn name(&self) -> &'static str {
        "galore_adamw"
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

    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // a step count
    fn due(&self, stream: u64, steps: f64) -> bool {
        let (gap, steps) = (self.common.gap as u64, steps as u64);
        // Multiples of the golden ratio spread any number of positions evenly; streams of names are spread by chance.
        let place = u64::from(stream.wrapping_mul(0x9E37_79B9) as u32);
        let offset = if self.stagger { (place * gap) >> 32 } else { 0 };
        steps == 0 || (steps + offset).is_multiple_of(gap)
    }

    fn first_refresh(&self) -> Option<usize> {
        Some(PROJ_STEP)
    }

    fn blocks(&self, p: &ParamSpec) -> Result<Vec<Block>> {
        Matrices::stacked().blocks(p)
    }

    fn state(&self, p: &ParamSpec, blocks: &[Block]) -> Result<Vec<StateSpec>> {
        let sides = self.common.sides_of(p, blocks);
        let (mut states, lead) = (self.common.states(p, sides), p.shape.len() - 2);
        states.push(StateSpec {
            shape: p.shape[..lead].to_vec(),
            dtype: p.dtype.arithmetic(),
            sharding: (0..lead).map(DimSharding::LikeParam).collect(),
            share: Share::Number,
            on_host: false,
            ..StateSpec::counter("proj_step")
        });
        states
            .extend(sides.iter().zip(["proj", "proj_right"]).map(|(&side, role)| self.basis(role, p, side)));
        Ok(states)
    }

    fn program(&self, shape: &UnitShape) -> Result<Program> {
        Ok(self.compose(shape))
    }

    fn run(&self, stage: Stage, io: &mut StageIo<'_>, h: &Hyper) -> Result<()> {
        match stage {
            STATISTIC => self.statistic(io),
            DECOMPOSE => self.decompose(io),
            OVERLAP => self.overlap(io),
            TAKE => self.take(io),
            PROJECT => self.project(io),
            SUM => Self::sum(io),
            ADAM => self.adam(io, h, Taken::Same),
            TURN => self.adam(io, h, Taken::Turned),
            APPLY => self.apply(io, h),
            _ => Err(Error::Internal(format!("galore_adamw has no stage {stage}"))),
        }
    }

    fn describe(&self, p: &ParamSpec, blocks: &[Block], _num_shards: [usize; 2]) -> Description {
        let sides = self.common.sides_of(p, blocks);
        // A side to the third power may be larger than an integer.
        let refresh = |b: &Block| -> f64 {
            let one = |&side: &Side| {
                let side = [b.rows, b.cols][side.index()];
                let (n, d) = (flops(b.numel()), flops(side));
                match (self.svd, self.sketch_columns(side)) {
                    (Svd::Exact, _) => 6.0 * n * d + 22.0 * d * d * d,
                    (Svd::Random, Some(columns)) => {
                        let s = flops(columns);
                        2.0 * n * (s + flops(SIGNS)) + (6.0 * d + 9.0 * s) * s * s
                    }
                    (Svd::Gram | Svd::Random, _) => 2.0 * n * d + 9.0 * d * d * d,
                }
            };
            sides.iter().map(one).sum()
        };
        let whole_flops = blocks.iter().map(refresh).sum::<f64>() / flops(self.common.gap);
        let products: f64 = blocks.iter().map(|b| 4.0 * flops(b.numel()) * flops(self.common.rank())).sum();
        Description {
            view: Matrices::stacked().phrase(p),
            lr_factor: 1.0,
            rank: Some(self.common.rank()),
            roundoff: None,
            flops: products + whole_flops,
            whole_flops,
        }
    }
}
