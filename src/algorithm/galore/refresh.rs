//! Refresh of `GaLore`'s bases.

use tch::Tensor;

use super::super::low_rank::{MOMENTUM, VARIANCE};
use super::layout::{BASES, DECOMPOSE, FOUND, OVERLAP, OVERLAPS, PROJ, PROJ_STEP, SOURCE, STATISTIC, TAKE};
use super::stages::{Taken, view_on};
use super::{GaLore, Origin, Svd};
use crate::algorithm::stage::{Buffers, StageIo, UnitIo, jobs};
use crate::error::Result;
use crate::kernels::{self, Finite};
use crate::linalg::project::{Source, basis, gram};
use crate::linalg::random::Key;
use crate::linalg::sketch::Omega;
use crate::program::{BufferId, Program, Target};
use crate::spec::{Side, UnitShape};
use crate::tensor::{DType, Device, FlatView, MatrixView};

/// Separates these random numbers from others of the same parameter.
const SKETCH_TAG: u32 = 2;

impl GaLore {
    /// Appends the stages that compute new bases where they are due.
    pub(super) fn refresh(
        &self,
        mut program: Program,
        sides: &[Side],
        from: Origin,
        [is_reported, is_owned]: [bool; 2],
    ) -> Program {
        let bases = &BASES[..sides.len()];
        program = match from {
            Origin::Here => program.redistribute(bases[0], Target::Whole),
            Origin::Sums(_) | Origin::Sent => program
                .local(STATISTIC, if from == Origin::Sent { "gradient" } else { "gram" })
                .redistribute(SOURCE, Target::Whole)
                .same_placement_as(bases[0], SOURCE),
        };
        if let [first, second] = *bases {
            program = program.same_placement_as(second, first);
        }
        if is_reported {
            program = program.same_placement_as(FOUND, bases[0]);
        }
        program = program.local(DECOMPOSE, "decompose").release(SOURCE);
        for &basis in bases.iter().chain(is_reported.then_some(&FOUND)) {
            program = program.redistribute(basis, Target::Storage);
        }
        if self.rotate {
            program = program.local(OVERLAP, "overlap");
            // Owners get the sums where they need them.
            for &overlap in OVERLAPS[..sides.len()].iter().filter(|_| !is_owned) {
                program = program.redistribute(overlap, Target::Replicate);
            }
        }
        program.local(TAKE, "take")
    }

    /// Computes the matrix from which a basis follows, as far as it is stored here.
    pub(super) fn statistic(&self, io: &mut StageIo<'_>) -> Result<()> {
        let sides = self.sides(io.class);
        let sent = self.from(io.class) == Origin::Sent;
        let StageIo { units, buffers, .. } = io;
        let sources = buffers.get_mut(SOURCE)?;
        for unit in &*units {
            if !unit.due || kernels::is_zero(&unit.grad) {
                sources.flat(unit)?.clear()?;
            } else if sent {
                let pair = ([unit.grad], [sources.matrix(unit)?]);
                kernels::run(&kernels::Convert { factor: 1.0 }, &mut jobs([pair]))?;
            } else {
                let part = oriented(&*unit.grad.tensor()?, sides[0])?;
                let sum = match self.omega(unit, sides[0]) {
                    Some(omega) => omega.sketch(&part, sources.flat.device())?,
                    None => gram(&part)?,
                };
                sources.tensor(unit)?.f_copy_(&sum)?;
            }
        }
        Ok(())
    }

    /// New bases of the matrices that this process takes; NaN where there is none, as of a gradient without a direction.
    pub(super) fn decompose(&self, io: &mut StageIo<'_>) -> Result<()> {
        let sides = self.sides(io.class);
        let from = self.from(io.class);
        let StageIo { units, buffers, class, .. } = io;
        for unit in units.iter().filter(|unit| unit.due) {
            let nothing = match from {
                Origin::Here => kernels::is_zero(&unit.grad),
                Origin::Sums(_) | Origin::Sent => {
                    kernels::is_zero(&buffers.get_mut(SOURCE)?.matrix(unit)?.view())
                }
            };
            if nothing {
                Self::set_none(unit, buffers, sides)?;
                continue;
            }
            let matrix = match from {
                Origin::Here => unit.grad.tensor()?,
                Origin::Sums(_) | Origin::Sent => buffers.get(SOURCE)?.read_tensor(unit)?,
            };
            // From the buffer: `unit.grad` is empty where this process holds only a part of the gradient.
            let device = buffers.get(BASES[0])?.flat.device();
            let mut found = Vec::with_capacity(sides.len());
            for &side in sides {
                let of = (&*matrix, matches!(from, Origin::Sums(_)));
                found.push(self.solve(class, unit, side, of, device)?);
            }
            drop(matrix);
            // One without the other is of no use.
            let Some(found) = found.into_iter().collect::<Option<Vec<Tensor>>>() else {
                Self::set_none(unit, buffers, sides)?;
                self.warned.say(unit.param_index);
                continue;
            };
            for (&buffer, new) in BASES.iter().zip(found) {
                buffers.get_mut(buffer)?.tensor(unit)?.f_copy_(&new)?;
            }
            self.keep_directions(unit, buffers, sides)?;
        }
        Ok(())
    }

    /// Says of a unit that it has no new bases.
    fn set_none(unit: &UnitIo<'_>, buffers: &mut Buffers<'_>, sides: &[Side]) -> Result<()> {
        for &buffer in BASES[..sides.len()].iter().chain(&[FOUND]) {
            let _ = buffers.get_mut(buffer)?.tensor(unit)?.f_fill_(f64::NAN)?;
        }
        Ok(())
    }

    /// Keeps new bases that are finite and have a direction each.
    fn keep_directions(&self, unit: &UnitIo<'_>, buffers: &mut Buffers<'_>, sides: &[Side]) -> Result<()> {
        let _ = buffers.get_mut(FOUND)?.tensor(unit)?.f_fill_(1.0)?;
        let bases = &BASES[..sides.len()];
        let Finite::There(is_finite) = Finite::of(&flats(unit, buffers, bases)?)? else {
            let nothing = flats(unit, buffers, bases)?.iter().any(kernels::only_zeros);
            return if nothing { Self::set_none(unit, buffers, sides) } else { Ok(()) };
        };
        let mut flag = is_finite.f_detach_copy()?;
        for &basis in bases {
            let largest = buffers.get(basis)?.read_tensor(unit)?.f_abs()?.f_amax([0, 1].as_slice(), false)?;
            let _ = flag.f_logical_and_(&largest.f_ne(0.0)?)?;
        }
        for &buffer in bases.iter().chain(&[FOUND]) {
            let mut new = buffers.get_mut(buffer)?.tensor(unit)?;
            let _ = new.f_masked_fill_(&flag.f_logical_not()?, f64::NAN)?;
        }
        self.warned.ask(unit.param_index, &is_finite)
    }

    /// The basis of a side of a matrix of a unit, given the matrix or the sums that stand for it.
    fn solve(
        &self,
        class: &UnitShape,
        unit: &UnitIo<'_>,
        side: Side,
        (x, summed): (&Tensor, bool),
        device: Device,
    ) -> Result<Option<Tensor>> {
        let (rank, longest) = (self.common.rank(), class.rows.max(class.cols));
        let double = class.param == DType::F64;
        let of = |source: &Source<'_>| basis(source, rank, longest, double);
        if self.svd == Svd::Exact {
            return of(&Source::Matrix(x, side == Side::Cols));
        }
        let Some(omega) = self.omega(unit, side) else {
            return if summed {
                of(&Source::Gram(x))
            } else {
                of(&Source::Gram(&gram(&oriented(x, side)?)?))
            };
        };
        let dense = omega.dense(x.device(), device)?;
        if summed {
            return of(&Source::Sketch(x, &dense));
        }
        of(&Source::Sketch(&omega.sketch(&oriented(x, side)?, device)?, &dense))
    }

    /// The random matrix of a sketch, if there is one: a function of seed, parameter, matrix, step and side.
    fn omega(&self, unit: &UnitIo<'_>, side: Side) -> Option<Omega> {
        let d = [unit.rows, unit.cols][side.index()];
        let cols = self.sketch_columns(d)?;
        let key = Key { seed: self.common.seed, stream: unit.stream };
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // a step count
        let (tag, step) = (SKETCH_TAG + u32::from(side == Side::Cols), unit.steps as u64);
        Some(Omega { key, tag, step, index: unit.block_index, shape: [d, cols] })
    }

    /// `Vᵀ_old·V_new`, as far as it is stored here.
    pub(super) fn overlap(&self, io: &mut StageIo<'_>) -> Result<()> {
        let count = self.sides(io.class).len();
        let StageIo { units, buffers, .. } = io;
        for unit in &*units {
            for side in 0..count {
                let [new, out] = buffers.several([BASES[side], OVERLAPS[side]])?;
                let new = new.read_tensor(unit)?;
                let old = unit.state[PROJ + side].view().tensor()?.f_to_kind(new.kind())?;
                let out = out.tensor(unit)?;
                let _ = old.f_tr()?.f_mm_out(&out, &new)?;
            }
        }
        Ok(())
    }

    /// Takes over new bases.
    pub(super) fn take(&self, io: &mut StageIo<'_>) -> Result<()> {
        let sides = self.sides(io.class);
        let StageIo { units, buffers, .. } = io;
        for unit in units {
            let has_new = self.has_new(unit, buffers, sides)?;
            for (at, &basis) in BASES[..sides.len()].iter().enumerate() {
                let new = buffers.get(basis)?.read_tensor(unit)?;
                let mut old = unit.state[PROJ + at].tensor()?;
                if let Some(new) = has_new.choose(&new, &old)? {
                    old.f_copy_(&new)?;
                }
            }
            let mut last = unit.state[PROJ_STEP].tensor()?;
            if let Some(new) = has_new.choose(&last.f_zeros_like()?.f_fill_(unit.steps + 1.0)?, &last)? {
                last.f_copy_(&new)?;
            }
        }
        Ok(())
    }

    /// Tests whether a unit has new bases in this step.
    fn has_new(&self, unit: &UnitIo<'_>, buffers: &Buffers<'_>, sides: &[Side]) -> Result<Finite> {
        if !unit.due {
            return Ok(Finite::Known(false));
        }
        let turned = if self.rotate { sides.len() } else { 0 };
        Finite::of(&flats(unit, buffers, &[&BASES[..sides.len()], &OVERLAPS[..turned], &[FOUND]].concat())?)
    }

    /// Returns the moments rotated into the new bases, for the units that get some, in the dtype of products. They are
    /// stored only after the step's update: otherwise quantized moments would be rounded twice.
    pub(super) fn turned(
        &self,
        units: &[UnitIo<'_>],
        buffers: &Buffers<'_>,
        sides: &[Side],
        taken: Taken,
    ) -> Result<Vec<Option<[Tensor; 2]>>> {
        let one = |unit: &UnitIo<'_>| {
            let has_new = match taken {
                _ if !self.rotate => Finite::Known(false),
                Taken::All => self.has_new(unit, buffers, sides)?,
                // Sums over all parts of new bases: if one of them is missing, they are NaN.
                Taken::Turned if unit.active && unit.due => {
                    Finite::of(&flats(unit, buffers, &OVERLAPS[..sides.len()])?)?
                }
                Taken::Turned | Taken::Same => Finite::Known(false),
            };
            if matches!(has_new, Finite::Known(false)) {
                return Ok(None);
            }
            let turns =
                OVERLAPS[..sides.len()].iter().map(|&overlap| buffers.get(overlap)?.read_tensor(unit));
            let turns = turns.collect::<Result<Vec<_>>>()?;
            let squares: Vec<_> = turns.iter().map(|turn| Ok(turn.f_square()?)).collect::<Result<_>>()?;
            let (turns, squares): (Vec<&Tensor>, Vec<&Tensor>) =
                (turns.iter().map(|turn| &**turn).collect(), squares.iter().collect());
            let of =
                |role: usize, turns: &[&Tensor]| rotate(&unit.state[role].view(), sides, turns, &has_new);
            Ok(of(MOMENTUM, &turns)?.zip(of(VARIANCE, &squares)?).map(|(m, v)| [m, v]))
        };
        units.iter().map(one).collect()
    }
}

/// Buffers of a unit.
fn flats<'s>(unit: &UnitIo<'_>, buffers: &'s Buffers<'_>, numbers: &[BufferId]) -> Result<Vec<FlatView<'s>>> {
    numbers.iter().map(|&buffer| buffers.get(buffer)?.read(unit)).collect()
}

/// The matrix, transposed where its columns are projected.
fn oriented(matrix: &Tensor, side: Side) -> Result<Tensor> {
    Ok(if side == Side::Rows { matrix.shallow_clone() } else { matrix.f_tr()? })
}

/// Rotates a moment into new bases, if there are any: for each side `moment·turn` where columns are projected,
/// `turnᵀ·moment` where rows are.
fn rotate(
    moment: &MatrixView<'_>,
    sides: &[Side],
    turns: &[&Tensor],
    has_new: &Finite,
) -> Result<Option<Tensor>> {
    let size = moment.shape().map(|n| i64::try_from(n).unwrap_or(i64::MAX));
    let mut old = Tensor::f_empty(size, (turns[0].f_kind()?, turns[0].device()))?;
    let to = view_on(moment, &mut old)?;
    kernels::run(&kernels::Convert { factor: 1.0 }, &mut jobs([([*moment], [to])]))?;
    let mut wide = old.shallow_clone();
    for (turn, &side) in turns.iter().zip(sides) {
        wide = if side == Side::Rows { turn.f_tr()?.f_mm(&wide)? } else { wide.f_mm(turn)? };
    }
    has_new.choose(&wide.f_contiguous()?, &old)
}
