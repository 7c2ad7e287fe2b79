//! How `GaLore` finds new bases.

use std::sync::PoisonError;

use tch::Tensor;

use super::super::low_rank::{MOMENTUM, VARIANCE};
use super::{BASES, DECOMPOSE, GaLore, OVERLAP, OVERLAPS, Origin, PROJ, SOURCE, STATISTIC, Svd, TAKE};
use crate::batch::{Area, Slab};
use crate::dtype::DType;
use crate::error::Result;
use crate::kernels;
use crate::linalg::low_rank::sketches;
use crate::linalg::project::{Source, basis, gram, sketch, sketch_columns};
use crate::linalg::random::Key;
use crate::plan::{Program, Target};
use crate::spec::Side;
use crate::stage::{StageIo, jobs};

/// Separates these random numbers from others of the same parameter.
const SKETCH_TAG: u32 = 2;

impl GaLore {
    /// Appends what computes new bases where they are due.
    pub(super) fn refresh(&self, mut program: Program, sides: &[Side], from: Origin) -> Program {
        let bases = &BASES[..sides.len()];
        program = match from {
            Origin::Here => program.redistribute(bases[0], Target::Whole),
            Origin::Sums(_) | Origin::Sent => program
                .local(STATISTIC, if from == Origin::Sent { "gradient" } else { "gram" })
                .redistribute(SOURCE, Target::Whole)
                .beside(bases[0], SOURCE),
        };
        if let [first, second] = *bases {
            program = program.beside(second, first);
        }
        program = program.local(DECOMPOSE, "decompose").release(SOURCE);
        for &basis in bases {
            program = program.redistribute(basis, Target::Storage);
        }
        if self.rotate {
            program = program.local(OVERLAP, "overlap");
            for &overlap in &OVERLAPS[..sides.len()] {
                program = program.redistribute(overlap, Target::Replicate);
            }
        }
        program.local(TAKE, "take")
    }

    /// What a basis is computed from, as far as it is stored here.
    pub(super) fn statistic(&self, io: &StageIo<'_>) -> Result<()> {
        let sides = self.sides(io.class);
        let sent = self.from(sides, io.class.ways) == Origin::Sent;
        for (i, unit) in io.units.iter().enumerate() {
            if !unit.due {
                io.slab(SOURCE, i)?.clear()?;
            } else if sent {
                let pair = [unit.grad, io.area(SOURCE, i)?];
                kernels::run(&kernels::Convert { factor: 1.0 }, &jobs([Ok(pair)])?)?;
            } else {
                let part = oriented(&unit.grad.tensor()?, sides[0])?;
                let sum = match self.svd {
                    Svd::Random => sketch(&part, &self.omega(io, i, sides[0])?)?,
                    Svd::Gram | Svd::Exact => gram(&part)?,
                };
                io.matrix(SOURCE, i)?.f_copy_(&sum)?;
            }
        }
        Ok(())
    }

    /// New bases of the matrices that this process takes; NaN where there is none.
    pub(super) fn decompose(&self, io: &StageIo<'_>) -> Result<()> {
        let sides = self.sides(io.class);
        let from = self.from(sides, io.class.ways);
        for (i, unit) in io.units.iter().enumerate().filter(|(_, unit)| unit.due) {
            let matrix = match from {
                Origin::Here => unit.grad.tensor()?,
                Origin::Sums(_) | Origin::Sent => io.matrix(SOURCE, i)?,
            };
            let mut found = Vec::with_capacity(sides.len());
            for &side in sides {
                found.push(match from {
                    Origin::Sums(_) => self.solve(io, &matrix, None)?,
                    Origin::Here | Origin::Sent => self.solve(io, &matrix, Some((i, side)))?,
                });
            }
            // One without the other is of no use.
            let complete = found.iter().all(Option::is_some);
            if !complete {
                self.warn(unit.param_index);
            }
            for (&buffer, new) in BASES.iter().zip(found) {
                let mut out = io.matrix(buffer, i)?;
                match new.filter(|_| complete) {
                    Some(new) => out.f_copy_(&new)?,
                    None => drop(out.f_fill_(f64::NAN)?),
                }
            }
        }
        Ok(())
    }

    /// The basis of a side of a matrix of a unit, or of the sums that stand for it.
    fn solve(&self, io: &StageIo<'_>, x: &Tensor, of: Option<(usize, Side)>) -> Result<Option<Tensor>> {
        let (rank, longest) = (self.common.rank(), io.class.rows.max(io.class.cols));
        let double = io.class.param == DType::F64;
        match (self.svd, of) {
            (Svd::Exact, of) => {
                let columns = of.is_some_and(|(_, side)| side == Side::Cols);
                basis(&Source::Matrix(x, columns), rank, longest, double)
            }
            (Svd::Gram, None) => basis(&Source::Gram(x), rank, longest, double),
            (Svd::Random, None) => basis(&Source::Sketch(x), rank, longest, double),
            (Svd::Gram, Some((_, side))) => {
                basis(&Source::Gram(&gram(&oriented(x, side)?)?), rank, longest, double)
            }
            (Svd::Random, Some((i, side))) => {
                let sum = sketch(&oriented(x, side)?, &self.omega(io, i, side)?)?;
                basis(&Source::Sketch(&sum), rank, longest, double)
            }
        }
    }

    /// The random matrix of a sketch: a function of seed, parameter, matrix, step and side.
    fn omega(&self, io: &StageIo<'_>, i: usize, side: Side) -> Result<Tensor> {
        let unit = &io.units[i];
        let d = [unit.rows, unit.cols][side.index()];
        let key = Key { seed: self.common.seed, stream: unit.param_index as u64 };
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // a step count
        let (tag, step) = (SKETCH_TAG + u32::from(side == Side::Cols), unit.steps as u64);
        let columns = sketch_columns(self.common.rank(), d);
        let omega = sketches(&[(key, unit.block_index)], d, columns, tag, step)?.f_squeeze_dim(0)?;
        Ok(omega.f_to(unit.grad.tensor()?.device())?)
    }

    fn warn(&self, param: usize) {
        let mut warned = self.warned.0.lock().unwrap_or_else(PoisonError::into_inner);
        if warned.insert(param) {
            log::warn!(
                target: "oxidion.galore",
                "parameter {param}: the gradient is not finite or does not decompose; its old projection is kept"
            );
        }
    }

    /// `Vᵀ_old·V_new`, as far as it is stored here.
    pub(super) fn overlap(&self, io: &StageIo<'_>) -> Result<()> {
        let count = self.sides(io.class).len();
        for (i, unit) in io.units.iter().enumerate() {
            for side in 0..count {
                let new = io.matrix(BASES[side], i)?;
                let old = unit.state[PROJ + side].tensor()?.f_to_kind(new.kind())?;
                let out = io.matrix(OVERLAPS[side], i)?;
                let _ = old.f_tr()?.f_mm_out(&out, &new)?;
            }
        }
        Ok(())
    }

    /// Takes over new bases.
    pub(super) fn take(&self, io: &StageIo<'_>) -> Result<()> {
        let sides = self.sides(io.class);
        for (i, unit) in io.units.iter().enumerate() {
            if self.has_new(io, i)? {
                for (at, &basis) in BASES[..sides.len()].iter().enumerate() {
                    unit.state[PROJ + at].tensor()?.f_copy_(&io.matrix(basis, i)?)?;
                }
            }
        }
        Ok(())
    }

    /// Whether a unit has new bases in this step.
    fn has_new(&self, io: &StageIo<'_>, i: usize) -> Result<bool> {
        let count = self.sides(io.class).len();
        let buffers = BASES[..count].iter().chain(&OVERLAPS[..if self.rotate { count } else { 0 }]);
        let finite = |&buffer: &usize| kernels::is_finite(&io.slab(buffer, i)?);
        Ok(io.units[i].due && !buffers.map(finite).collect::<Result<Vec<bool>>>()?.contains(&false))
    }

    /// The moments of the units that are to be turned into new bases, turned, in the type of products. They are stored
    /// once the step has gone into them: what is coded would be rounded twice.
    pub(super) fn turned(&self, io: &StageIo<'_>) -> Result<Vec<Option<[Tensor; 2]>>> {
        let sides = self.sides(io.class);
        let one = |i: usize| {
            if !self.rotate || !self.has_new(io, i)? {
                return Ok(None);
            }
            let turns = OVERLAPS[..sides.len()].iter().map(|&overlap| io.matrix(overlap, i));
            let turns = turns.collect::<Result<Vec<_>>>()?;
            let squares: Vec<_> =
                turns.iter().map(Tensor::f_square).collect::<std::result::Result<_, _>>()?;
            let state = io.units[i].state;
            Ok(Some([rotate(state[MOMENTUM], sides, &turns)?, rotate(state[VARIANCE], sides, &squares)?]))
        };
        (0..io.units.len()).map(one).collect()
    }
}

/// The matrix, transposed where its columns are projected.
fn oriented(matrix: &Tensor, side: Side) -> Result<Tensor> {
    Ok(if side == Side::Rows { matrix.shallow_clone() } else { matrix.f_tr()? })
}

/// For each side `moment·turn` where columns are projected, `turnᵀ·moment` where rows are.
fn rotate(moment: Area, sides: &[Side], turns: &[Tensor]) -> Result<Tensor> {
    let [rows, cols] = moment.shape();
    let size = [rows, cols].map(|n| i64::try_from(n).unwrap_or(i64::MAX));
    let mut wide = Tensor::f_empty(size, (turns[0].f_kind()?, turns[0].device()))?;
    kernels::run(&kernels::Convert { factor: 1.0 }, &jobs([Ok([moment, beside(&moment, &wide)?])])?)?;
    for (turn, &side) in turns.iter().zip(sides) {
        wide = if side == Side::Rows { turn.f_tr()?.f_mm(&wide)? } else { wide.f_mm(turn)? };
    }
    Ok(wide.f_contiguous()?)
}

/// A contiguous matrix that was made where a moment is.
pub(super) fn beside(moment: &Area, matrix: &Tensor) -> Result<Area> {
    let [rows, cols] = moment.shape();
    Ok(Slab::of(matrix)?.at(moment.strided().0.place()).area(0, [rows, cols], cols))
}
