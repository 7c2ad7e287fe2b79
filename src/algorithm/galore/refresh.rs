//! Refresh of `GaLore`'s bases.

use tch::Tensor;

use super::super::low_rank::{MOMENTUM, VARIANCE};
use super::{BASES, DECOMPOSE, GaLore, OVERLAP, OVERLAPS, Origin, PROJ, SOURCE, STATISTIC, Svd, TAKE};
use crate::algorithm::stage::{StageIo, jobs};
use crate::error::Result;
use crate::kernels::{self, Finite};
use crate::linalg::project::{Source, basis, gram};
use crate::linalg::random::Key;
use crate::linalg::sketch::Omega;
use crate::program::{BufferId, Program, Target};
use crate::spec::Side;
use crate::tensor::{DType, FlatView, MatrixView};

/// Separates these random numbers from others of the same parameter.
const SKETCH_TAG: u32 = 2;

impl GaLore {
    /// Appends the stages that compute new bases where they are due.
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
        let sent = self.from(sides, io.class.num_shards) == Origin::Sent;
        for (i, unit) in io.units.iter().enumerate() {
            if !unit.due {
                io.flat(SOURCE, i)?.clear()?;
            } else if sent {
                let pair = [unit.grad, io.area(SOURCE, i)?];
                kernels::run(&kernels::Convert { factor: 1.0 }, &jobs([Ok(pair)])?)?;
            } else {
                let part = oriented(&unit.grad.tensor()?, sides[0])?;
                let sum = match self.omega(io, i, sides[0]) {
                    Some(omega) => omega.sketch(&part, io.flat(SOURCE, i)?.device())?,
                    None => gram(&part)?,
                };
                io.matrix(SOURCE, i)?.f_copy_(&sum)?;
            }
        }
        Ok(())
    }

    /// New bases of the matrices that this process takes; NaN where there is none.
    pub(super) fn decompose(&self, io: &StageIo<'_>) -> Result<()> {
        let sides = self.sides(io.class);
        let from = self.from(sides, io.class.num_shards);
        for (i, unit) in io.units.iter().enumerate().filter(|(_, unit)| unit.due) {
            let matrix = match from {
                Origin::Here => unit.grad.tensor()?,
                Origin::Sums(_) | Origin::Sent => io.matrix(SOURCE, i)?,
            };
            let mut found = Vec::with_capacity(sides.len());
            for &side in sides {
                found.push(self.solve(io, i, side, &matrix, matches!(from, Origin::Sums(_)))?);
            }
            // One without the other is of no use.
            let complete = found.iter().all(Option::is_some);
            for (&buffer, new) in BASES.iter().zip(found) {
                let mut out = io.matrix(buffer, i)?;
                match new.filter(|_| complete) {
                    Some(new) => out.f_copy_(&new)?,
                    None => drop(out.f_fill_(f64::NAN)?),
                }
            }
            if !complete {
                self.warned.say(unit.param_index);
            } else if let Finite::There(flag) = Finite::of(&flats(io, &BASES[..sides.len()], i)?)? {
                for &buffer in &BASES[..sides.len()] {
                    let _ = io.matrix(buffer, i)?.f_masked_fill_(&flag.f_logical_not()?, f64::NAN)?;
                }
                self.warned.ask(unit.param_index, &flag)?;
            }
        }
        Ok(())
    }

    /// The basis of a side of a matrix of a unit, given the matrix or the sums that stand for it.
    fn solve(
        &self,
        io: &StageIo<'_>,
        i: usize,
        side: Side,
        x: &Tensor,
        summed: bool,
    ) -> Result<Option<Tensor>> {
        let (rank, longest) = (self.common.rank(), io.class.rows.max(io.class.cols));
        let double = io.class.param == DType::F64;
        let of = |source: &Source<'_>| basis(source, rank, longest, double);
        if self.svd == Svd::Exact {
            return of(&Source::Matrix(x, side == Side::Cols));
        }
        // Whoever has a part of the gradient only is told none of it here.
        let place = io.flat(BASES[0], i)?.device();
        let Some(omega) = self.omega(io, i, side) else {
            return if summed {
                of(&Source::Gram(x))
            } else {
                of(&Source::Gram(&gram(&oriented(x, side)?)?))
            };
        };
        let dense = omega.dense(x.device(), place)?;
        if summed {
            return of(&Source::Sketch(x, &dense));
        }
        of(&Source::Sketch(&omega.sketch(&oriented(x, side)?, place)?, &dense))
    }

    /// The random matrix of a sketch, if there is one: a function of seed, parameter, matrix, step and side.
    fn omega(&self, io: &StageIo<'_>, i: usize, side: Side) -> Option<Omega> {
        let unit = &io.units[i];
        let d = [unit.rows, unit.cols][side.index()];
        let cols = self.sketch_columns(d)?;
        let key = Key { seed: self.common.seed, stream: unit.param_index as u64 };
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // a step count
        let (tag, step) = (SKETCH_TAG + u32::from(side == Side::Cols), unit.steps as u64);
        Some(Omega { key, tag, step, index: unit.block_index, shape: [d, cols] })
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
            let has_new = self.has_new(io, i)?;
            for (at, &basis) in BASES[..sides.len()].iter().enumerate() {
                let mut old = unit.state[PROJ + at].tensor()?;
                if let Some(new) = has_new.choose(&io.matrix(basis, i)?, &old)? {
                    old.f_copy_(&new)?;
                }
            }
        }
        Ok(())
    }

    /// Whether a unit has new bases in this step.
    fn has_new(&self, io: &StageIo<'_>, i: usize) -> Result<Finite> {
        if !io.units[i].due {
            return Ok(Finite::Known(false));
        }
        let count = self.sides(io.class).len();
        let turned = if self.rotate { count } else { 0 };
        Finite::of(&flats(io, &[&BASES[..count], &OVERLAPS[..turned]].concat(), i)?)
    }

    /// The moments of the units that are to be turned into new bases, turned, in the type of products. They are stored
    /// once the step has gone into them: what is coded would be rounded twice.
    pub(super) fn turned(&self, io: &StageIo<'_>) -> Result<Vec<Option<[Tensor; 2]>>> {
        let sides = self.sides(io.class);
        let one = |i: usize| {
            let has_new = if self.rotate { self.has_new(io, i)? } else { Finite::Known(false) };
            if matches!(has_new, Finite::Known(false)) {
                return Ok(None);
            }
            let turns = OVERLAPS[..sides.len()].iter().map(|&overlap| io.matrix(overlap, i));
            let turns = turns.collect::<Result<Vec<_>>>()?;
            let squares: Vec<_> =
                turns.iter().map(Tensor::f_square).collect::<std::result::Result<_, _>>()?;
            let state = io.units[i].state;
            let of = |role: usize, turns: &[Tensor]| rotate(state[role], sides, turns, &has_new);
            Ok(of(MOMENTUM, &turns)?.zip(of(VARIANCE, &squares)?).map(|(m, v)| [m, v]))
        };
        (0..io.units.len()).map(one).collect()
    }
}

/// Buffers of a unit.
fn flats(io: &StageIo<'_>, buffers: &[BufferId], i: usize) -> Result<Vec<FlatView>> {
    buffers.iter().map(|&buffer| io.flat(buffer, i)).collect()
}

/// The matrix, transposed where its columns are projected.
fn oriented(matrix: &Tensor, side: Side) -> Result<Tensor> {
    Ok(if side == Side::Rows { matrix.shallow_clone() } else { matrix.f_tr()? })
}

/// For each side `moment·turn` where columns are projected, `turnᵀ·moment` where rows are, if there are new bases.
fn rotate(moment: MatrixView, sides: &[Side], turns: &[Tensor], has_new: &Finite) -> Result<Option<Tensor>> {
    let [rows, cols] = moment.shape();
    let size = [rows, cols].map(|n| i64::try_from(n).unwrap_or(i64::MAX));
    let old = Tensor::f_empty(size, (turns[0].f_kind()?, turns[0].device()))?;
    kernels::run(&kernels::Convert { factor: 1.0 }, &jobs([Ok([moment, beside(&moment, &old)?])])?)?;
    let mut wide = old.shallow_clone();
    for (turn, &side) in turns.iter().zip(sides) {
        wide = if side == Side::Rows { turn.f_tr()?.f_mm(&wide)? } else { wide.f_mm(turn)? };
    }
    has_new.choose(&wide.f_contiguous()?, &old)
}

/// A contiguous matrix that was made where a moment is.
pub(super) fn beside(moment: &MatrixView, matrix: &Tensor) -> Result<MatrixView> {
    let [rows, cols] = moment.shape();
    Ok(FlatView::of(matrix)?.at(moment.strided().0.device()).area(0, [rows, cols], cols))
}
