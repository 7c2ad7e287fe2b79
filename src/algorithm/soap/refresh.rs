//! Factors of the bases, and the bases that follow them.

use tch::Tensor;

use super::basis::Bases;
use super::layout::{
    BASES, COPY, FACTORS, KEEP, REFRESH, SINCE, SINCE_BUFFER, SQUARES, TAKE, TURNS, length, state_of,
};
use crate::algorithm::stage::{Buffers, StageIo, UnitIo, jobs};
use crate::error::{Error, Result};
use crate::kernels::{self, Finite};
use crate::linalg::eigenbasis::{Completion, eigenbasis, followed, square};
use crate::linalg::random::Key;
use crate::program::{BufferId, Stage};
use crate::spec::{Side, UnitShape};
use crate::tensor::{DType, FlatView, MatrixViewMut};

/// Separates the numbers that complete bases of rows from others of the same parameter; those of columns have the next.
const BASIS_TAG: u32 = 4;

/// The squares of a unit.
fn flats<'s>(unit: &UnitIo<'_>, buffers: &'s Buffers<'_>, count: usize) -> Result<Vec<FlatView<'s>>> {
    (0..count).map(|at| buffers.get(BASES + SQUARES + at)?.read(unit)).collect()
}

/// The first columns of a state that belong to a unit: as many as its buffer has.
fn part<'s>(unit: &'s mut UnitIo<'_>, state: usize, cols: usize) -> MatrixViewMut<'s> {
    unit.state[state].reborrow().into_first_cols(cols)
}

impl Bases {
    /// Runs a stage of the bases; `betas` are the decay rate of the factors and, where that is NaN, the one that stands for it.
    ///
    /// # Errors
    /// `Error::Internal` for another stage, and whatever the stage returns.
    pub(super) fn run(&self, stage: Stage, io: &mut StageIo<'_>, [own, other]: [f64; 2]) -> Result<()> {
        match stage {
            KEEP => self.keep(io, if own.is_nan() { other } else { own }),
            COPY => self.copy(io),
            REFRESH => self.refresh(io),
            TAKE => self.take(io),
            _ => Err(Error::Internal(format!("there is no stage {stage} of bases"))),
        }
    }

    /// The squares of a unit's gradient, `G·Gᵀ` of the rows and `Gᵀ·G` of the columns, to buffers.
    pub(super) fn squares(
        &self,
        class: &UnitShape,
        gradient: &Tensor,
        unit: &UnitIo<'_>,
        buffers: &mut Buffers<'_>,
    ) -> Result<()> {
        for (at, &side) in self.sides_in(class).iter().enumerate() {
            let mut out = buffers.get_mut(BASES + SQUARES + at)?.tensor(unit)?;
            match side {
                Side::Rows => square(&mut out, gradient)?,
                Side::Cols => square(&mut out, &gradient.f_tr()?)?,
            }
        }
        Ok(())
    }

    /// `L ← β·L + (1-β)·G·Gᵀ`, and R alike, but of a gradient that is not finite.
    fn keep(&self, io: &mut StageIo<'_>, beta: f64) -> Result<()> {
        self.warned.listen()?;
        let count = self.sides_in(io.class).len();
        let StageIo { units, buffers, .. } = io;
        for unit in units.iter_mut().filter(|unit| unit.active) {
            let is_finite = Finite::of(&flats(unit, buffers, count)?)?;
            match &is_finite {
                Finite::Known(true) => {}
                Finite::Known(false) => {
                    self.warned.say(unit.param_index);
                    continue;
                }
                Finite::There(flag) => self.warned.ask(unit.param_index, flag)?,
            }
            for at in 0..count {
                let squares = buffers.get(BASES + SQUARES + at)?;
                let cols = squares.shape(unit)?[1];
                let taken = squares.read_tensor(unit)?.f_mul_scalar(1.0 - beta)?;
                let mut own = part(unit, state_of(at, false), cols);
                let mut factor = own.tensor()?;
                let new = factor.f_mul_scalar(beta)?.f_add(&taken)?;
                if let Some(new) = is_finite.choose(&new, &factor)? {
                    factor.f_copy_(&new)?;
                }
            }
        }
        Ok(())
    }

    /// Factors, bases and since when these are there, to buffers.
    fn copy(&self, io: &mut StageIo<'_>) -> Result<()> {
        let count = self.sides_in(io.class).len();
        let StageIo { units, buffers, .. } = io;
        for at in 0..count {
            load(units, buffers, BASES + FACTORS + at, state_of(at, false))?;
            load(units, buffers, BASES + TURNS + at, state_of(at, true))?;
        }
        load(units, buffers, BASES + SINCE_BUFFER, SINCE)
    }

    /// New bases of the units that are due, from and to buffers, or where these are whole, states.
    fn refresh(&self, io: &mut StageIo<'_>) -> Result<()> {
        let sides = self.sides_in(io.class);
        let StageIo { units, buffers, class, .. } = io;
        for unit in units.iter_mut().filter(|unit| unit.due) {
            let since = number(&mut self.matrix(class, unit, buffers, (BASES + SINCE_BUFFER, SINCE), 1)?)?;
            let Some(found) = self.found(class, unit, buffers, since)? else { continue };
            for (at, new) in found {
                let place = (BASES + TURNS + at, state_of(at, true));
                let mut basis = self.matrix(class, unit, buffers, place, length(unit, sides[at]))?;
                basis.tensor()?.f_copy_(&new)?;
            }
            if since <= 0.0 {
                let steps = unit.steps + 1.0;
                let mut own = self.matrix(class, unit, buffers, (BASES + SINCE_BUFFER, SINCE), 1)?;
                let _ = own.tensor()?.f_fill_(steps)?;
            }
        }
        Ok(())
    }

    /// New bases of a unit by position among the sides that have one, or nothing where there are none: before there is a
    /// gradient other than zero, and where one of them does not decompose.
    fn found(
        &self,
        class: &UnitShape,
        unit: &mut UnitIo<'_>,
        buffers: &mut Buffers<'_>,
        since: f64,
    ) -> Result<Option<Vec<(usize, Tensor)>>> {
        let mut found = Vec::new();
        for (at, &side) in self.sides_in(class).iter().enumerate() {
            let is_first = since <= 0.0;
            if !is_first && !has_full_rank(unit, side, since) {
                continue;
            }
            let (cols, kind) = (length(unit, side), class.param.arithmetic().kind());
            let place = (BASES + FACTORS + at, state_of(at, false));
            let factor =
                self.matrix(class, unit, buffers, place, cols)?.tensor()?.f_to_kind(kind)?.f_detach_copy()?;
            let new = if is_first {
                if number(&mut self.matrix(class, unit, buffers, place, cols)?)? <= 0.0 {
                    return Ok(None);
                }
                self.first(class, unit, side, &factor)?
            } else {
                let place = (BASES + TURNS + at, state_of(at, true));
                let mut basis = self.matrix(class, unit, buffers, place, cols)?;
                followed(&factor, &basis.tensor()?.f_to_kind(kind)?)?
            };
            let Some(new) = new else {
                self.warned.say(unit.param_index);
                return Ok(None);
            };
            found.push((at, new));
        }
        Ok(Some(found))
    }

    /// Takes new bases over.
    fn take(&self, io: &mut StageIo<'_>) -> Result<()> {
        let sides = self.sides_in(io.class).iter().enumerate();
        let StageIo { units, buffers, .. } = io;
        let of_sides = sides.map(|(at, &side)| (BASES + TURNS + at, state_of(at, true), Some(side)));
        for (buffer, state, side) in of_sides.chain([(BASES + SINCE_BUFFER, SINCE, None)]) {
            let new = buffers.get_mut(buffer)?.matrices(units)?;
            let all = units.iter_mut().zip(new).filter(|(unit, _)| unit.due).map(|(unit, new)| {
                let cols = side.map_or(1, |side| length(unit, side));
                ([new.into_view()], [part(unit, state, cols)])
            });
            kernels::run(&kernels::Convert { factor: 1.0 }, &mut jobs(all))?;
        }
        Ok(())
    }

    /// A matrix of a unit: the buffer, or where states are whole, the first columns of the state.
    fn matrix<'s>(
        &self,
        class: &UnitShape,
        unit: &'s mut UnitIo<'_>,
        buffers: &'s mut Buffers<'_>,
        (buffer, state): (BufferId, usize),
        cols: usize,
    ) -> Result<MatrixViewMut<'s>> {
        if self.has_states(class) {
            Ok(part(unit, state, cols))
        } else {
            buffers.get_mut(buffer)?.matrix(unit)
        }
    }

    /// The first basis of a side, given its factor.
    fn first(
        &self,
        class: &UnitShape,
        unit: &UnitIo<'_>,
        side: Side,
        factor: &Tensor,
    ) -> Result<Option<Tensor>> {
        let completion = Completion {
            key: Key { seed: self.seed, stream: unit.stream },
            tag: BASIS_TAG + u32::from(side == Side::Cols),
            index: unit.block_index,
        };
        eigenbasis(factor, class.rows.max(class.cols), class.param == DType::F64, &completion)
    }
}

/// A state to a buffer.
fn load(units: &[UnitIo<'_>], buffers: &mut Buffers<'_>, buffer: usize, state: usize) -> Result<()> {
    let out = buffers.get_mut(buffer)?.matrices(units)?;
    let all = units
        .iter()
        .zip(out)
        .map(|(unit, out)| ([unit.state[state].view().first_cols(out.shape()[1])], [out]));
    kernels::run(&kernels::Convert { factor: 1.0 }, &mut jobs(all))
}

/// The largest magnitude in a matrix: of one number, the number. The host waits for a device.
fn number(matrix: &mut MatrixViewMut<'_>) -> Result<f64> {
    Ok(f64::try_from(matrix.tensor()?.f_abs()?.f_amax([0, 1].as_slice(), false)?)?)
}

/// Tests whether as many gradients were seen that the factor of a side has full rank.
fn has_full_rank(unit: &UnitIo<'_>, side: Side, since: f64) -> bool {
    let lengths = [unit.rows, unit.cols];
    let (own, other) = (lengths[side.index()], lengths[1 - side.index()]);
    #[expect(clippy::cast_precision_loss, reason = "sizes are far below 2^53")]
    let enough = (unit.steps + 2.0 - since) * other as f64 >= 2.0 * own as f64;
    enough
}
