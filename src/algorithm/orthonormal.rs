//! Common parts of the optimizers with an orthonormalized update: reading a parameter as matrices, the
//! orthonormalization, the learning-rate factor, the update.

use tch::Tensor;

use super::last_step::LastStep;
use super::lr_scale::LrScale;
use super::stage::{StageIo, jobs, record};
use super::{flops, wide_flops};
use crate::error::Result;
use crate::kernels::{self, Momentum, MomentumSquares};
use crate::linalg::gram::unit_roundoff;
use crate::linalg::orthogonality::{expected_orthogonality_error, orthogonality_error};
use crate::linalg::orthonormalizer::Orthonormalizer;
use crate::program::{BufferId, Program, Stage};
use crate::spec::{Block, Description, Hyper, Matrices, Options, ParamSpec, StateStorage, UnitShape};
use crate::tensor::{DType, product_dtype};

/// Option keys in addition to those of the matrices and of the orthonormalization.
pub(super) const OPTIONS: [&str; 2] = ["adjust_lr", "momentum_dtype"];

/// The scalars that all of them have, in this order. The second is the factor of the momentum.
pub(super) const LR: usize = 0;
pub(super) const MU: usize = 1;
pub(super) const WEIGHT_DECAY: usize = 2;
pub(super) const EPSILON: usize = 3;
/// Scalar of the optimizers that normalize neurons.
pub(super) const BETA2: usize = 4;

/// The momentum is the first state of all of them.
pub(super) const MOMENTUM: usize = 0;

/// The stages and buffers that all of them have.
pub(super) const PREPARE: Stage = 0;
pub(super) const ORTHONORMALIZE: Stage = 1;
pub(super) const APPLY: Stage = 2;
pub(super) const U: BufferId = 0;
pub(super) const SCRATCH: BufferId = 1;

#[derive(Debug)]
pub(super) struct Orthonormal {
    pub(super) view: Matrices,
    cautious: bool,
    adjust: LrScale,
    orthonormalizer: Orthonormalizer,
    pub(super) momentum_dtype: Option<DType>,
    orth_dtype: Option<DType>,
    /// True if products of bfloat16 matrices are the fastest ones.
    bfloat16: bool,
    pub(super) storage: StateStorage,
}

impl Orthonormal {
    /// See [`super::Algorithm::replays`]: a capture cannot wait for a decomposition.
    pub(super) fn replays(&self) -> bool {
        !self.orthonormalizer.decomposes()
    }

    pub(super) fn new(options: &Options) -> Result<Self> {
        Ok(Self {
            view: Matrices::from_options(options)?,
            cautious: options.cautious()?,
            adjust: LrScale::parse(options.optional_word("adjust_lr")?)?,
            orthonormalizer: Orthonormalizer::from_options(options)?,
            momentum_dtype: options.dtype("momentum_dtype")?,
            storage: StateStorage::from_options(options)?,
            orth_dtype: options.dtype("orth_dtype")?,
            bfloat16: options.matrix_units || kernels::multiplies_bf16(),
        })
    }

    /// The type in which matrices of a parameter are orthonormalized.
    pub(super) fn product(&self, param: DType) -> DType {
        let wanted = self.orth_dtype.unwrap_or_else(|| product_dtype(param, self.bfloat16));
        self.orthonormalizer.given(wanted)
    }

    /// The program with memory for the orthonormalization of matrices `rows × cols` of units of this shape.
    pub(super) fn scratch(
        &self,
        program: Program,
        shape: &UnitShape,
        [rows, cols]: [usize; 2],
        dtype: DType,
    ) -> Result<Program> {
        let elements = self.orthonormalizer.scratch_elements(rows, cols, dtype, shape.is_batched())?;
        let program = Self::room(program, shape, "scratch", elements, dtype);
        Ok(Program { triangle: (dtype.bytes() == 2).then_some(rows.min(cols)), ..program })
    }

    /// The program with memory for a matrix, or for each where they are computed together.
    pub(super) fn room(
        program: Program,
        shape: &UnitShape,
        name: &'static str,
        elements: usize,
        dtype: DType,
    ) -> Program {
        let add = if shape.is_batched() { Program::scratch_of_each } else { Program::scratch };
        add(program, name, elements, dtype)
    }

    /// The momentum of all units, and the update that is orthonormalized; `squares`: with the sums of its squares.
    pub(super) fn prepare(io: &mut StageIo<'_>, momentum: Momentum, squares: Option<BufferId>) -> Result<()> {
        let StageIo { units, buffers, .. } = io;
        let Some(squares) = squares else {
            let updates = buffers.get_mut(U)?.matrices(units)?;
            let all = units.iter_mut().zip(updates);
            let all = all.map(|(unit, u)| ([unit.grad], [unit.state[MOMENTUM].reborrow(), u]));
            return kernels::run(&momentum, &mut jobs(all));
        };
        let [updates, squares] = buffers.several([U, squares])?;
        let (updates, mut sums) = (updates.matrices(units)?, squares.flats(units)?);
        let all = units.iter_mut().zip(updates);
        let each: Vec<_> =
            all.map(|(unit, u)| jobs([([unit.grad], [unit.state[MOMENTUM].reborrow(), u])])).collect();
        let Some(first) = each.iter().flatten().next() else { return Ok(()) };
        let pass = MomentumSquares { momentum, stored: first.write[1].dtype() };
        kernels::fold_units(&pass, each, &mut sums)
    }

    /// Number of matrices among `count` for which there is scratch memory at once.
    pub(super) fn at_once(shape: &UnitShape, count: usize) -> usize {
        if shape.is_batched() { count } else { 1 }
    }

    /// Orthonormalizes matrices `[B, m, n]` in place.
    pub(super) fn run(&self, batch: &mut Tensor, epsilon: f64, scratch: &mut Tensor) -> Result<()> {
        self.orthonormalizer.run(batch, epsilon, scratch)
    }

    /// Orthonormalizes buffer `U` of all units, `squares`: with these sums of the squares of each.
    pub(super) fn orthonormalize(
        &self,
        io: &mut StageIo<'_>,
        epsilon: f64,
        squares: Option<BufferId>,
    ) -> Result<()> {
        let StageIo { units, buffers, probe, .. } = io;
        if units.is_empty() {
            return Ok(());
        }
        let updates = buffers.get(U)?;
        for unit in &*units {
            record(probe, "expected", unit, || expected_orthogonality_error(&*updates.read_tensor(unit)?))?;
        }
        if let Some(squares) = squares {
            let [updates, squares, scratch] = buffers.several([U, squares, SCRATCH])?;
            // Where the work is sharded by owner, the units of this stage are some of those whose norms are known.
            let known = units.iter().map(|unit| squares.read(unit)).collect::<Result<Vec<_>>>()?;
            let (mut batch, mut scratch) = (updates.batch(units)?, scratch.all()?);
            self.orthonormalizer.run_with(&mut batch, epsilon, Some(&known), &mut scratch)?;
        } else {
            let [updates, scratch] = buffers.several([U, SCRATCH])?;
            self.orthonormalizer.run(&mut *updates.batch(units)?, epsilon, &mut *scratch.all()?)?;
        }
        let updates = buffers.get(U)?;
        for unit in &*units {
            record(probe, "orthogonality_error", unit, || orthogonality_error(&*updates.read_tensor(unit)?))?;
        }
        Ok(())
    }

    /// The last step: decay and `X ← X - lr·s·U`.
    pub(super) fn last_step(&self, class: &UnitShape, h: &Hyper) -> LastStep {
        LastStep {
            lr: h[LR],
            scale: self.adjust.factor(self.view.fans(class.rows, class.cols)),
            decay: h[LR] * h[WEIGHT_DECAY],
            cautious: self.cautious,
            late: false,
        }
    }

    /// Description for `explain()`, for an orthonormalization of `size` of each block.
    pub(super) fn describe(
        &self,
        p: &ParamSpec,
        blocks: &[Block],
        size: impl Fn(&Block) -> [usize; 2],
    ) -> Description {
        let dtype = self.product(p.dtype);
        let whole = |b: &Block| {
            let [rows, cols] = size(b);
            wide_flops(self.orthonormalizer.flops(rows, cols, dtype))
        };
        let whole_flops: f64 = blocks.iter().map(whole).sum();
        Description {
            view: self.view.phrase(p),
            lr_factor: blocks.first().map_or(1.0, |b| self.adjust.factor(self.view.fans(b.rows, b.cols))),
            rank: None,
            roundoff: Some(unit_roundoff(dtype)),
            flops: whole_flops + flops(8 * blocks.iter().map(Block::numel).sum::<usize>()),
            whole_flops,
        }
    }
}
