//! Muon: momentum orthonormalized by a quintic iteration (Jordan et al. 2024); Polar Express (arXiv:2505.16932).
//!
//! M ← μM + G, U = orth(μM + G) (nesterov) or orth(M), X ← (1-lr·λ)X - lr·s·U with s from the block's shape.

use super::{Algorithm, flops};
use crate::dtype::{DType, product_dtype};
use crate::error::{Error, Result};
use crate::hyper::Hyper;
use crate::kernels;
use crate::linalg::adjust::AdjustLr;
use crate::linalg::coefficients::{NEWTON_SCHULZ, POLAR_EXPRESS, Polynomial};
use crate::linalg::newton_schulz::{newton_schulz, scratch_elements};
use crate::options::Options;
use crate::plan::{BufferId, BufferSpec, Program, Stage, Target};
use crate::spec::{Block, Cut, Description, ParamSpec, Side, StateSpec, UnitShape};
use crate::stage::{StageIo, orthogonality_error};
use crate::view::View;

pub(super) const OPTIONS: [&str; 10] = [
    "adjust_lr",
    "cautious_wd",
    "flatten",
    "nesterov",
    "num_heads",
    "orth_dtype",
    "split_sizes",
    "state_dtype",
    "momentum_dtype",
    "use_polar_express",
];

const SCALARS: [&str; 4] = ["lr", "mu", "weight_decay", "epsilon"];
const LR: usize = 0;
const MU: usize = 1;
const WEIGHT_DECAY: usize = 2;
const EPSILON: usize = 3;

const MOMENTUM: usize = 0;

const PREPARE: Stage = 0;
const ORTHONORMALIZE: Stage = 1;
const APPLY: Stage = 2;

const U: BufferId = 0;
const SCRATCH: BufferId = 1;

/// Stands for "however many units the bucket has": the iteration bounds how many matrices it takes together.
const ANY_COUNT: i64 = 1 << 20;

#[derive(Debug)]
pub(super) struct Muon {
    view: View,
    nesterov: bool,
    cautious: bool,
    adjust: AdjustLr,
    polynomial: &'static Polynomial,
    momentum_dtype: Option<DType>,
    orth_dtype: Option<DType>,
}

impl Muon {
    pub(super) fn new(options: &Options) -> Result<Self> {
        Ok(Self {
            view: View::from_options(options)?,
            nesterov: options.flag("nesterov")?,
            cautious: options.flag("cautious_wd")?,
            adjust: AdjustLr::parse(options.word("adjust_lr")?)?,
            polynomial: if options.flag("use_polar_express")? { &POLAR_EXPRESS } else { &NEWTON_SCHULZ },
            momentum_dtype: options.dtype("momentum_dtype")?.or(options.dtype("state_dtype")?),
            orth_dtype: options.dtype("orth_dtype")?,
        })
    }

    fn factor(&self, rows: usize, cols: usize) -> f64 {
        self.adjust.factor(rows as u64, cols as u64)
    }
}

impl Algorithm for Muon {
    fn name(&self) -> &'static str {
        "muon"
    }

    fn scalars(&self) -> &'static [&'static str] {
        &SCALARS
    }

    fn leading(&self, p: &ParamSpec) -> usize {
        if self.view.flatten { 0 } else { p.shape.len().saturating_sub(2) }
    }

    fn blocks(&self, p: &ParamSpec) -> Result<Vec<Block>> {
        self.view.blocks(p)
    }

    fn state(&self, p: &ParamSpec, _blocks: &[Block]) -> Result<Vec<StateSpec>> {
        Ok(vec![StateSpec::like("momentum", p, self.momentum_dtype.unwrap_or(p.dtype))])
    }

    fn program(&self, shape: &UnitShape) -> Result<Program> {
        let (rows, cols) = (shape.rows, shape.cols);
        let dtype = self.orth_dtype.unwrap_or_else(|| product_dtype(shape.param));
        let size =
            |n: usize| i64::try_from(n).map_err(|_| Error::Value(format!("a side of {n} is too large")));
        let scratch = scratch_elements(ANY_COUNT, size(rows)?, size(cols)?);
        let scratch = usize::try_from(scratch).map_err(|_| Error::Internal("negative scratch".into()))?;
        Ok(Program::new()
            .buffer(BufferSpec::new("u", rows, cols, dtype).cut(Cut::With(Side::Rows), Cut::With(Side::Cols)))
            .scratch("scratch", scratch, dtype)
            .local(PREPARE, "prepare")
            .redistribute(U, Target::Whole)
            .local(ORTHONORMALIZE, "orthonormalize")
            .redistribute(U, Target::Storage)
            .local(APPLY, "apply"))
    }

    fn run(&self, stage: Stage, io: &mut StageIo<'_>, h: &Hyper) -> Result<()> {
        match stage {
            PREPARE => {
                let update =
                    kernels::Momentum { mu: h[MU], grad_factor: io.grad_factor, nesterov: self.nesterov };
                let jobs = (0..io.units.len())
                    .map(|i| Ok([io.units[i].grad, io.units[i].state[MOMENTUM], io.slab(U, i)?]))
                    .collect::<Result<Vec<_>>>()?;
                kernels::run(&update, &jobs);
            }
            ORTHONORMALIZE if io.units.is_empty() => {}
            ORTHONORMALIZE => {
                let mut batch = io.matrices(U, io.units.len())?;
                newton_schulz(&mut batch, self.polynomial, h[EPSILON], &io.scratch(SCRATCH)?)?;
                for i in 0..io.units.len() {
                    let matrix = io.matrix(U, i)?;
                    io.record("orthogonality_error", i, || orthogonality_error(&matrix))?;
                }
            }
            APPLY => {
                let Some(unit) = io.units.first() else {
                    return Ok(());
                };
                let update = kernels::Apply {
                    rate: h[LR] * self.factor(unit.rows, unit.cols),
                    decay: h[LR] * h[WEIGHT_DECAY],
                    cautious: self.cautious,
                };
                let jobs = (0..io.units.len())
                    .map(|i| Ok([io.units[i].param, io.slab(U, i)?]))
                    .collect::<Result<Vec<_>>>()?;
                kernels::run(&update, &jobs);
            }
            _ => return Err(Error::Internal(format!("muon has no stage {stage}"))),
        }
        Ok(())
    }

    fn describe(&self, p: &ParamSpec, blocks: &[Block]) -> Description {
        let steps = self.polynomial.rows.len();
        let iteration = |b: &Block| {
            let (short, long) = (b.rows.min(b.cols), b.rows.max(b.cols));
            flops(steps * short * short * (4 * long + 2 * short))
        };
        let whole_flops: f64 = blocks.iter().map(iteration).sum();
        Description {
            view: self.view.phrase(p),
            lr_factor: blocks.first().map_or(1.0, |b| self.factor(b.rows, b.cols)),
            rank: None,
            flops: whole_flops + flops(8 * p.numel()),
            whole_flops,
        }
    }
}
