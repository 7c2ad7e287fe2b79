//! Updates that keep the norms of weights, or are at least a share of them (arXiv:2606.16899).
//!
//! With R the norm that a matrix has at its first step, and U the update for a learning rate of 1:
//! "hyperball" X' = X - lr·(R/‖U‖)·U, X ← X'·R/‖X'‖, so that lr is an angle. "floor" U ← U·max(1, c·‖X‖/‖U‖), "`row_floor`"
//! the same for each row.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

use super::last_step::LastStep;
use super::stage::{StageIo, UnitIo, jobs, lines};
use crate::error::{Error, Result};
use crate::kernels::{self, Factors, Job, Scaled, SizeRule, WeightNorms};
use crate::program::{BufferId, BufferSpec, ProgramOp, Stage, Target};
use crate::spec::{Block, DimSharding, Matrices, Options, ParamSpec, Side, StateSpec, UnitShape};
use crate::tensor::{DType, Device, FlatViewMut, MatrixView, MatrixViewMut};

/// The key with the rule.
pub(super) const RULE: &str = "weight_norm";

pub(super) const OPTIONS: [&str; 2] = [RULE, "weight_norm_floor"];

/// The stage of the sums, whose number no algorithm has.
pub(super) const WEIGH: Stage = 20;

/// The state with the norm R that a matrix keeps.
pub const RADIUS: &str = "radius";

/// Name of the buffer of the sums by which the norms of weights are bound.
pub const SUMS: &str = "weight_norms";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rule {
    Free,
    Hyperball,
    Floor,
    RowFloor,
}

/// A constraint on the norms of weights, which are those of matrices: other parameters are free.
#[derive(Debug)]
pub(super) struct WeightNorm {
    rule: Rule,
    /// The least ratio of an update to the weights.
    least: f64,
    /// Matrices on a device whose norm was looked at: parameter and block.
    seen: Mutex<BTreeSet<(usize, usize)>>,
}

impl WeightNorm {
    /// The constraint of these settings.
    pub(super) fn new(options: &Options) -> Result<Self> {
        let rule = match options.word(RULE)? {
            "free" => Rule::Free,
            "hyperball" => Rule::Hyperball,
            "floor" => Rule::Floor,
            "row_floor" => Rule::RowFloor,
            other => {
                return Err(Error::Value(format!(
                    "weight_norm must be 'free', 'hyperball', 'floor' or 'row_floor', got '{other}'"
                )));
            }
        };
        Ok(Self { rule, least: options.real("weight_norm_floor")?, seen: Mutex::default() })
    }

    /// Tests whether it binds no weights at all.
    pub(super) fn is_free(&self) -> bool {
        self.rule == Rule::Free
    }

    /// State R, a number of each matrix; 0 where it is not known yet.
    ///
    /// # Errors
    /// `Error::Value` where every matrix of a parameter is one element: none of them could change.
    pub(super) fn state(
        &self,
        p: &ParamSpec,
        view: &Matrices,
        blocks: &[Block],
    ) -> Result<Option<StateSpec>> {
        if self.rule != Rule::Hyperball || p.shape.len() < 2 {
            return Ok(None);
        }
        if p.numel() > 1 && blocks.iter().all(|block| block.rows * block.cols == 1) {
            return Err(Error::Value(format!(
                "weight_norm='hyperball' keeps the norm of each matrix, and those of {} of shape {:?} have one element each: \
                 put it in a group with weight_norm='free', or with flatten=True where the class has that",
                p.name, p.shape
            )));
        }
        Ok(Some(view.number(RADIUS, p, blocks)))
    }

    /// Tests whether it binds the weights of a parameter whose matrices have `dims` dimensions.
    pub(super) fn binds(&self, dims: usize) -> bool {
        self.rule != Rule::Free && dims > 1
    }

    /// The buffer of the sums of a class that is bound, and the operations that compute them.
    pub(super) fn sums_of(&self, shape: &UnitShape, buffer: BufferId) -> (BufferSpec, [ProgramOp; 2]) {
        let sums = if self.rule == Rule::RowFloor {
            BufferSpec::new(SUMS, shape.rows, 3, DType::F64)
                .sharded(DimSharding::LikeParam(Side::Rows), DimSharding::Replicated)
        } else {
            BufferSpec::new(SUMS, 1, 3, DType::F64).summed(Side::Rows)
        };
        let weigh = ProgramOp::Local { stage: WEIGH, name: "weigh" };
        (sums.summed(Side::Cols), [weigh, ProgramOp::Redistribute { buffer, to: Target::Replicate }])
    }

    /// The buffer of the sums, which stands behind those of the algorithm.
    fn sums(io: &StageIo<'_>) -> Result<BufferId> {
        let found = io.buffers.0.iter().position(|buffer| buffer.spec.name == SUMS);
        found.ok_or_else(|| Error::Internal("weights without a buffer of their norms".into()))
    }

    /// Pairs of weights and updates, one for each sum.
    fn work<'s>(
        &self,
        units: &'s mut [UnitIo<'_>],
        updates: Vec<MatrixViewMut<'s>>,
    ) -> Vec<(MatrixViewMut<'s>, MatrixView<'s>)> {
        let all = units.iter_mut().zip(updates).map(|(unit, u)| (unit.param.reborrow(), u.into_view()));
        if self.rule != Rule::RowFloor {
            return all.collect();
        }
        all.flat_map(|(param, u)| {
            let rows = param.into_groups(1);
            rows.enumerate().map(move |(row, x)| (x, u.rows(row, 1)))
        })
        .collect()
    }

    /// Places of the sums, one for each of `work`.
    fn places(sums: Vec<MatrixViewMut<'_>>) -> Vec<FlatViewMut<'_>> {
        sums.into_iter().flat_map(MatrixViewMut::into_rows).collect()
    }

    /// Sums of squares and products of weights and of the updates in a buffer.
    pub(super) fn weigh(&self, io: &mut StageIo<'_>, update: BufferId) -> Result<()> {
        let at = Self::sums(io)?;
        let StageIo { units, buffers, .. } = io;
        let [updates, sums] = buffers.several([update, at])?;
        let mut places = Self::places(sums.matrices(units)?);
        let updates = updates.matrices(units)?;
        let each = self.work(units, updates).into_iter();
        let each = each.map(|(x, u)| jobs([([x.into_view(), u], [])])).collect();
        kernels::fold_units(&WeightNorms {}, each, &mut places)
    }

    /// `X ← (1-lr·λ)X - lr·U` with U in a buffer, as the sums that `weigh` left have it; R is in the state `radius`.
    pub(super) fn apply(
        &self,
        io: &mut StageIo<'_>,
        step: &LastStep,
        update: BufferId,
        radius: usize,
    ) -> Result<()> {
        let at = Self::sums(io)?;
        let StageIo { units, buffers, .. } = io;
        let [updates, sums] = buffers.several([update, at])?;
        let LastStep { lr, scale, decay, cautious, late } = *step;
        let spherical = self.rule == Rule::Hyperball;
        if spherical && lr == 0.0 {
            // Nothing moves. Optimizers are stepped so to make states for a checkpoint before the weights are there: their
            // norm is not that of later.
            return Ok(());
        }
        let rule = if spherical { SizeRule::Sphere } else { SizeRule::Floor { least: self.least, scale } };
        let places: Vec<_> = Self::places(sums.matrices(units)?);
        let places: Vec<_> = places.into_iter().map(FlatViewMut::into_view).collect();
        let mut radii = if spherical { lines(units, radius) } else { Vec::new() };
        let factors = rule.factors(&places, &mut radii)?;
        drop(radii);
        if spherical {
            self.check(units, radius)?;
        }
        let updates = updates.matrices(units)?;
        let (mut all, mut of) = (Vec::new(), Vec::new());
        for (at, (x, u)) in self.work(units, updates).into_iter().enumerate() {
            let jobs: Vec<Job<'_, 1, 1>> = jobs([([u], [x])]);
            of.extend(std::iter::repeat_n(at, jobs.len()));
            all.extend(jobs);
        }
        let factors: Factors<5> = factors.spread(&of);
        kernels::run(&Scaled { rate: lr, decay, cautious, late, spherical, factors }, &mut all)
    }

    /// Refuses weights of zeros: no step leads them away from there.
    fn check(&self, units: &[UnitIo<'_>], radius: usize) -> Result<()> {
        for unit in units.iter().filter(|unit| unit.rows * unit.cols > 0) {
            let stored = unit.state[radius].view();
            let is_zero = if stored.device() == Device::Cpu {
                let all = stored.all();
                match all.dtype() {
                    DType::F64 => all.numbers() == [0.0],
                    DType::F32 => all.slice::<f32>() == [0.0],
                    _ => f64::try_from(&*all.tensor(&[])?)? == 0.0,
                }
            } else {
                let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
                !kernels::is_capturing()?
                    && seen.insert((unit.param_index, unit.block_index))
                    && f64::try_from(stored.tensor()?.f_sum(tch::Kind::Double)?)? == 0.0
            };
            if is_zero {
                return Err(Error::Param {
                    index: unit.param_index,
                    what: "weight_norm='hyperball' keeps the norm of each matrix, and one is all zero: \
                           initialize them with other numbers, or put them in a group with weight_norm='free'"
                        .into(),
                });
            }
        }
        Ok(())
    }
}
