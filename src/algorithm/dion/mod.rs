//! Dion: low-rank orthonormal updates by amortized power iteration with error feedback
//! (Ahn et al. 2025, arXiv:2504.05295).
//!
//! With B the matrix oriented m ≥ n: M ← M + G, P = orth(M·Q), R = Mᵀ·P, M ← M - (1-μ)·P·Rᵀ,
//! Q ← R / (‖R‖ by column + ε), X ← (1-lr·λ)·X - lr·√(rows/cols)·P·Qᵀ. With an orthonormal right factor (arXiv:2605.16341) Q is
//! the Q factor of R instead.

mod basis;
mod right;
mod stages;

use super::last_step::LastStep;
use super::lr_scale::LrScale;
use super::stage::StageIo;
use super::{Algorithm, flops};
use crate::error::{Error, Result};
use crate::kernels;
use crate::linalg::basis::Size;
use crate::linalg::gram::unit_roundoff;
use crate::linalg::qr::QrMethod;
use crate::program::{BufferId, BufferSpec, Carried, Program, Stage, Target};
use crate::spec::{
    Block, Description, DimSharding, Hyper, Matrices, Options, ParamSpec, Side, StateSpec, StateStorage,
    UnitShape,
};
use crate::tensor::DType;

pub(super) const OPTIONS: [&str; 13] = [
    "adjust_lr",
    "momentum_dtype",
    "Q_dtype",
    "orth_dtype",
    "oversample",
    "power_iters",
    "qr_method",
    "cqr_warmup_steps",
    "rank_fraction",
    "rank_multiple_of",
    "right_factor",
    "route",
    "seed",
];

const SCALARS: [&str; 5] = ["lr", "mu", "weight_decay", "epsilon", "step"];
const LR: usize = 0;
const MU: usize = 1;
const WEIGHT_DECAY: usize = 2;
const EPSILON: usize = 3;
const STEP: usize = 4;

const MOMENTUM: usize = 0;
const Q: usize = 1;

const PREPARE: Stage = 0;
const PROJECT: Stage = 1;
const ORTHONORMALIZE: Stage = 2;
const BACK_PROJECT: Stage = 3;
const FEEDBACK: Stage = 4;
const APPLY: Stage = 5;
const PROJECT_AGAIN: Stage = 6;
const ORTHONORMALIZE_AGAIN: Stage = 7;
const ACCUMULATE: Stage = 8;
const LOAD: Stage = 9;
const UPDATE: Stage = 10;
const APPLY_UPDATE: Stage = 11;
const SELECT: Stage = 12;
const FACTORIZE: Stage = 13;

const P: BufferId = 0;
const R: BufferId = 1;
const WORK: BufferId = 2;
const NORMS: BufferId = 3;
const FULL: BufferId = 4;
/// Buffers that are sent to the owners and back in the gathered program.
const UPDATES: BufferId = 5;
const MOMENTA: BufferId = 6;
const QS: BufferId = 7;
/// Buffers of an orthonormal right factor.
const RIGHT: BufferId = 8;
const LIVE: BufferId = 9;

#[derive(Debug)]
pub(super) struct Dion {
    rank_fraction: f64,
    rank_multiple_of: usize,
    power_iters: usize,
    /// True if the columns of Q are orthonormal, false if each has length 1.
    orthonormal: bool,
    qr_method: QrMethod,
    cqr_warmup_steps: usize,
    oversample: f64,
    seed: u64,
    cautious: bool,
    view: Matrices,
    adjust: LrScale,
    momentum_dtype: Option<DType>,
    q_dtype: Option<DType>,
    orth_dtype: Option<DType>,
    /// True if products of float32 matrices are in TF32.
    tf32: bool,
    storage: StateStorage,
}

impl Dion {
    pub(super) fn new(options: &Options) -> Result<Self> {
        let word = options.optional_word("orth_dtype")?;
        let tf32 = match word {
            None | Some("auto") => options.matrix_units,
            Some(word) => word == "tf32" && options.on_device,
        };
        Ok(Self {
            rank_fraction: options.share("rank_fraction")?,
            rank_multiple_of: options.count("rank_multiple_of")?.max(1),
            power_iters: options.count("power_iters")?.max(1),
            orthonormal: options.either("right_factor", "column", "orthonormal")?,
            qr_method: QrMethod::parse(options.word("qr_method")?)?,
            cqr_warmup_steps: options.count("cqr_warmup_steps")?,
            oversample: options.real("oversample")?,
            seed: options.count("seed")? as u64,
            cautious: options.cautious()?,
            view: Matrices::from_options(options)?,
            adjust: LrScale::parse(options.optional_word("adjust_lr")?)?,
            momentum_dtype: options.dtype("momentum_dtype")?,
            q_dtype: options.dtype("Q_dtype")?,
            orth_dtype: if word == Some("tf32") { None } else { options.dtype("orth_dtype")? },
            tf32,
            storage: StateStorage::from_options(options)?,
        })
    }

    /// min(⌈fraction·min(m, n) / multiple⌉·multiple, m, n), the product in float64.
    #[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss)] // small and positive
    fn rank(&self, rows: usize, cols: usize) -> usize {
        let short = rows.min(cols);
        let multiple = self.rank_multiple_of as f64;
        let wanted = (self.rank_fraction * short as f64 / multiple).ceil() as usize * self.rank_multiple_of;
        wanted.min(short)
    }

    /// The type of P, R and the products that make them. bfloat16 is a setting only: the error of P would be fed back.
    fn product(&self, param: DType, momentum: DType) -> DType {
        let needed = if param == DType::F64 || momentum == DType::F64 { DType::F64 } else { DType::F32 };
        self.orth_dtype.unwrap_or(needed)
    }

    /// The type whose bits the operands of products of this type have: float16 for float32 in TF32.
    fn operand(&self, product: DType) -> DType {
        if self.tf32 && product == DType::F32 { DType::F16 } else { product }
    }

    /// Tests whether the update is a matrix of its own before it goes to the parameter, which is then written once.
    fn in_two_steps(&self, param: DType, product: DType) -> bool {
        self.cautious || param != product
    }

    /// A buffer like the matrices.
    fn matrix(shape: &UnitShape, name: &'static str, dtype: DType) -> BufferSpec {
        BufferSpec::new(name, shape.rows, shape.cols, dtype)
            .sharded(DimSharding::LikeParam(Side::Rows), DimSharding::LikeParam(Side::Cols))
    }

    /// The sides of the oriented matrix, each with its length: the long one and the short one.
    fn sides(shape: &UnitShape) -> [(Side, usize); 2] {
        let sides = [(Side::Rows, shape.rows), (Side::Cols, shape.cols)];
        if shape.transposed { [sides[1], sides[0]] } else { sides }
    }

    /// A program with the buffers of the factors.
    fn factors(&self, shape: &UnitShape) -> Program {
        let [(long, length), (short, width)] = Self::sides(shape);
        let rank = self.rank(shape.rows, shape.cols);
        let product = self.product(shape.param, shape.state[MOMENTUM]);
        let factor = |name, side, length| {
            BufferSpec::new(name, length, rank, product)
                .sharded(DimSharding::LikeParam(side), DimSharding::Replicated)
        };
        Program::new()
            .buffer(factor("p", long, length).summed(short).linear())
            .buffer(factor("r", short, width).summed(long).linear())
            .buffer(self.basis(shape, "work", product))
            .buffer(BufferSpec::new("norms", 1, rank, DType::F64).summed(short).wire(product))
    }

    /// A buffer like Q.
    fn basis(&self, shape: &UnitShape, name: &'static str, dtype: DType) -> BufferSpec {
        let [(long, _), (short, width)] = Self::sides(shape);
        let columns = if self.view.alike() { DimSharding::Even(long) } else { DimSharding::Replicated };
        BufferSpec::new(name, width, self.rank(shape.rows, shape.cols), dtype)
            .sharded(DimSharding::LikeParam(short), columns)
    }

    /// Appends the power iterations, the feedback, the norms, and what makes Q orthonormal.
    fn iterate(&self, program: Program, shape: &UnitShape) -> Program {
        let mut program = program.redistribute(WORK, Target::Replicate);
        for iteration in 0..self.power_iters {
            program = program
                .local(if iteration == 0 { PROJECT } else { PROJECT_AGAIN }, "project")
                .redistribute(P, Target::Whole)
                .local(if iteration == 0 { ORTHONORMALIZE } else { ORTHONORMALIZE_AGAIN }, "orthonormalize")
                .redistribute(P, Target::Storage)
                .local(BACK_PROJECT, "back_project")
                .redistribute(R, Target::Replicate);
        }
        program = program.local(FEEDBACK, "feedback").redistribute(NORMS, Target::Replicate);
        if self.orthonormal { Self::factorize(program, shape) } else { program }
    }

    fn method(&self, step: f64) -> QrMethod {
        #[allow(clippy::cast_precision_loss)] // a number of steps
        let warm = step <= self.cqr_warmup_steps as f64;
        if self.qr_method == QrMethod::Cqr && warm { QrMethod::Rcqr } else { self.qr_method }
    }
}

impl Algorithm for Dion {
    fn name(&self) -> &'static str {
        "dion"
    }

    fn scalars(&self) -> &'static [&'static str] {
        &SCALARS
    }

    fn view(&self, _p: &ParamSpec) -> Matrices {
        self.view.clone()
    }

    fn leaves_update(&self) -> bool {
        true
    }

    fn state(&self, p: &ParamSpec, blocks: &[Block]) -> Result<Vec<StateSpec>> {
        Ok(vec![self.storage.momentum(p, self.momentum_dtype), self.q(p, blocks)])
    }

    fn program(&self, shape: &UnitShape) -> Result<Program> {
        let momentum = shape.state[MOMENTUM];
        let product = self.product(shape.param, momentum);
        let is_bound = shape.bound.is_some();
        let mut program = self.factors(shape);
        let is_in_place = shape.weights == shape.param && !self.in_two_steps(shape.weights, product);
        if momentum != product || !is_in_place && !is_bound {
            program = program.buffer(Self::matrix(shape, "full", product));
        }
        if is_bound {
            if momentum == product {
                program = program.scratch("full", 0, product);
            }
            program = program.buffer(Self::matrix(shape, "update", product));
        }
        if self.orthonormal {
            program = self.right_buffers(program, shape);
        }
        program = self.iterate(program.local(PREPARE, "accumulate"), shape);
        if !is_bound {
            return Ok(program.local(APPLY, "apply"));
        }
        Ok(program.local(UPDATE, "update").local(APPLY_UPDATE, "apply"))
    }

    fn gathered_program(&self, shape: &UnitShape) -> Result<Option<Program>> {
        let momentum = shape.state[MOMENTUM];
        let product = self.product(shape.param, momentum);
        // A quantized state is requantized where it is stored; sending it to an owner and back would quantize it twice.
        if momentum.is_quantized() {
            return Ok(None);
        }
        let program = self.factors(shape);
        let full = Self::matrix(shape, "full", product);
        let needed = momentum != product || shape.weights != product;
        let program = if needed { program.buffer(full) } else { program.scratch("full", 0, product) };
        let mut program = program
            .buffer(Self::matrix(shape, "update", shape.weights))
            .buffer(Self::matrix(shape, "momentum", momentum))
            .buffer(self.basis(shape, "q", shape.state[Q]));
        if self.orthonormal {
            program = self.right_buffers(program, shape);
        }
        let carried = Carried { states: vec![(MOMENTA, MOMENTUM), (QS, Q)], results: vec![UPDATES] };
        let section =
            |program: Program| self.iterate(program.local(LOAD, "load"), shape).local(UPDATE, "update");
        let program = program.local(ACCUMULATE, "accumulate").gathered(carried, section);
        Ok(Some(program.local(APPLY_UPDATE, "apply")))
    }

    fn run(&self, stage: Stage, io: &mut StageIo<'_>, h: &Hyper) -> Result<()> {
        // Columns are made orthonormal in float32.
        let is_exact = matches!(stage, ORTHONORMALIZE | ORTHONORMALIZE_AGAIN | FACTORIZE);
        let _products = kernels::Products::begin(self.tf32 && !is_exact);
        match stage {
            PREPARE => Self::accumulate(io),
            ACCUMULATE => Self::accumulate_stored(io),
            LOAD => Self::load(io),
            PROJECT => Self::project(io, WORK),
            PROJECT_AGAIN => Self::project(io, R),
            // The columns of Q have about one length, those of R that of what they captured.
            ORTHONORMALIZE => self.orthonormalize(io, h, Size::All),
            ORTHONORMALIZE_AGAIN => self.orthonormalize(io, h, Size::Each),
            BACK_PROJECT => Self::back_project(io),
            FEEDBACK => self.feedback(io, h),
            SELECT => Self::select(io, h),
            FACTORIZE => self.orthonormalize_right(io),
            UPDATE => self.update(io, h),
            APPLY => self.apply(io, h),
            _ => Err(Error::Internal(format!("dion has no stage {stage}"))),
        }
    }

    fn update(&self, _class: &UnitShape) -> Option<(Stage, BufferId)> {
        Some((APPLY_UPDATE, UPDATES))
    }

    fn last_step(&self, io: &mut StageIo<'_>, h: &Hyper) -> Result<LastStep> {
        Ok(LastStep {
            lr: h[LR],
            scale: self.adjust.factor(self.view.fans(io.class.rows, io.class.cols)),
            decay: h[LR] * h[WEIGHT_DECAY],
            cautious: self.cautious,
            late: false,
        })
    }

    fn describe(&self, p: &ParamSpec, blocks: &[Block], num_shards: [usize; 2]) -> Description {
        let Some(first) = blocks.first() else {
            return Description::default();
        };
        let short = if p.oriented(blocks.iter().copied()) { Side::Rows } else { Side::Cols };
        // Of Q's factorization, which is work on whole matrices only where R is sharded.
        let right = |b: &Block, rank: f64| {
            let width = [b.rows, b.cols][short.index()];
            if self.orthonormal { 4.0 * rank * rank * flops(width) } else { 0.0 }
        };
        let is_cut = num_shards[short.index()] > 1;
        let left = |b: &Block, rank: f64| 4.0 * rank * rank * flops(b.rows.max(b.cols));
        let whole = |b: &Block, rank: f64| left(b, rank) + if is_cut { right(b, rank) } else { 0.0 };
        let products = |b: &Block, rank: f64| 8.0 * rank * flops(b.numel()) + left(b, rank) + right(b, rank);
        let total = |cost: &dyn Fn(&Block, f64) -> f64| -> f64 {
            blocks.iter().map(|b| cost(b, flops(self.rank(b.rows, b.cols)))).sum()
        };
        let product = self.product(p.dtype, self.storage.momentum(p, self.momentum_dtype).dtype);
        Description {
            view: self.view.phrase(p),
            lr_factor: self.adjust.factor(self.view.fans(first.rows, first.cols)),
            rank: blocks.iter().map(|b| self.rank(b.rows, b.cols)).max(),
            roundoff: Some(unit_roundoff(self.operand(product))),
            flops: total(&products),
            whole_flops: total(&whole),
        }
    }
}
