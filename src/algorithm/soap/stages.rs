//! The stages of SOAP in every step.

use tch::Tensor;

use super::basis::Bases;
use super::layout::{GRADIENT, MOMENTUM, NORM, SINCE, UPDATE, VARIANCE};
use super::{BETA1, BETA2, EPSILON, Soap};
use crate::algorithm::stage::{Buffers, StageIo, UnitIo, gradients, jobs};
use crate::error::Result;
use crate::kernels::{self, Job};
use crate::linalg::OneThread;
use crate::linalg::eigenbasis::rotate;
use crate::spec::{Hyper, Side};
use crate::tensor::{Lent, MatrixViewMut};

/// Added to the root mean square that an update is divided by.
const LEAST_RMS: f64 = 1e-30;

/// `Q_Lᵀ·X·Q_R`, or `back`: `Q_L·X·Q_Rᵀ`, with bases by the position of their side among those that have one.
pub(super) fn turn<'a>(
    x: &mut Tensor,
    sides: &[Side],
    mut of: impl FnMut(usize) -> Result<Lent<'a>>,
    back: bool,
) -> Result<()> {
    let mut turns = [None, None];
    let bases = (0..sides.len()).map(&mut of).collect::<Result<Vec<_>>>()?;
    for (side, basis) in sides.iter().zip(&bases) {
        // A checkpoint may have brought another type.
        turns[side.index()] = Some(basis.f_to_kind(x.kind())?);
    }
    let [left, right] = &turns;
    kernels::frozen(|| rotate(x, left.as_ref(), right.as_ref(), back))
}

/// Tests whether a unit takes a step: the first gradient makes the bases only.
pub(super) fn moves(unit: &UnitIo<'_>) -> bool {
    unit.steps > 0.0
}

/// `M ← β₁M + (1-β₁)G` and a copy of it, with G in a buffer, of units that take a step; without a basis there is no G.
fn average(units: &mut [UnitIo<'_>], buffers: &mut Buffers<'_>, beta1: f64, has_bases: bool) -> Result<()> {
    let [from, out] = buffers.several([GRADIENT, UPDATE])?;
    if has_bases {
        let pairs = units.iter().zip(from.flats(units)?);
        let pairs = pairs.map(|(unit, flat)| (unit.state[SINCE].view(), flat));
        kernels::clear_without_basis(&mut pairs.collect::<Vec<_>>())?;
    }
    let matrices = from.matrices(units)?.into_iter().zip(out.matrices(units)?);
    let mut all = Vec::with_capacity(units.len());
    for (unit, (from, mut out)) in units.iter_mut().zip(matrices) {
        if moves(unit) {
            all.push(([from.into_view()], [unit.state[MOMENTUM].reborrow(), out]));
        } else {
            out.all().clear()?;
        }
    }
    let momentum = kernels::Momentum { mu: beta1, grad_factor: 1.0 - beta1, nesterov: false };
    kernels::run(&momentum, &mut jobs(all))
}

impl Soap {
    /// `√(1-β₂ᵗ) / (1-β₁ᵗ)` of units that take a step, or 1.
    fn factors(&self, units: &[UnitIo<'_>], h: &Hyper, is_late: bool) -> Vec<[f64; 2]> {
        let one = |unit: &UnitIo<'_>| {
            let corrected = self.correct_bias && self.normalize == is_late;
            [if corrected { correction(unit.steps, h) } else { 1.0 }, 1.0]
        };
        units.iter().filter(|unit| moves(unit)).map(one).collect()
    }

    /// A step up to the update: of what is stored here, or at the owners, who have the gradients.
    pub(super) fn step(&self, io: &mut StageIo<'_>, h: &Hyper) -> Result<()> {
        let (sides, grad_factor) = (self.bases.sides_in(io.class), io.grad_factor);
        let is_owned = self.bases.is_owned(io.class);
        let StageIo { units, buffers, class, .. } = io;
        if is_owned {
            units.retain(|unit| unit.active);
        } else {
            gradients(units, buffers.get_mut(GRADIENT)?, grad_factor)?;
        }
        let _alone = OneThread::for_small(class.rows * class.cols * class.rows.max(class.cols));
        for unit in &*units {
            let gradient = buffers.get(GRADIENT)?.read_tensor(unit)?.f_alias()?;
            self.bases.squares(class, &gradient, unit, buffers)?;
        }
        average(units, buffers, h[BETA1], !sides.is_empty())?;
        let turns = |unit: &UnitIo<'_>, x: &mut Tensor, back| {
            turn(x, sides, |at| Bases::basis(unit, at, sides[at]), back)
        };
        for unit in units.iter().filter(|unit| moves(unit) && !sides.is_empty()) {
            for buffer in [GRADIENT, UPDATE] {
                turns(unit, &mut *buffers.get_mut(buffer)?.tensor(unit)?, false)?;
            }
        }
        let factors = self.factors(units, h, false);
        let [gradient, update] = buffers.several([GRADIENT, UPDATE])?;
        let pairs = update.matrices(units)?.into_iter().zip(gradient.matrices(units)?);
        let all = units.iter_mut().zip(pairs).filter(|(unit, _)| moves(unit));
        whiten(h, factors, all.map(|(unit, (n, y))| (n, y, unit.state[VARIANCE].reborrow())))?;
        for unit in units.iter().filter(|unit| moves(unit) && !sides.is_empty()) {
            turns(unit, &mut *buffers.get_mut(UPDATE)?.tensor(unit)?, true)?;
        }
        if self.normalize {
            norms(units, buffers)?;
            if is_owned {
                self.normalized(units, buffers, h)?;
            }
        }
        Ok(())
    }

    /// The gradients that owners of matrices take.
    pub(super) fn load(io: &mut StageIo<'_>) -> Result<()> {
        let StageIo { units, buffers, grad_factor, .. } = io;
        gradients(units, buffers.get_mut(GRADIENT)?, *grad_factor)
    }

    /// Divides updates by their root mean square, given the sums of their squares.
    fn normalized(&self, units: &[UnitIo<'_>], buffers: &mut Buffers<'_>, h: &Hyper) -> Result<()> {
        let factors = self.factors(units, h, true);
        for (unit, [factor, _]) in units.iter().filter(|unit| moves(unit)).zip(factors) {
            let [update, norm] = buffers.several([UPDATE, NORM])?;
            #[expect(clippy::cast_precision_loss, reason = "sizes are far below 2^53")]
            let mean =
                norm.read_tensor(unit)?.f_view(-1)?.f_mul_scalar(1.0 / (unit.rows * unit.cols) as f64)?;
            let mut update = update.tensor(unit)?;
            let scale = mean.f_sqrt()?.f_add_scalar(LEAST_RMS)?.f_reciprocal()?.f_mul_scalar(factor)?;
            let scale = scale.f_to_kind(update.kind())?;
            let _ = update.f_mul_(&scale)?;
        }
        Ok(())
    }

    /// Divides updates by their root mean square; owners have done so.
    pub(super) fn normalize_local(&self, io: &mut StageIo<'_>, h: &Hyper) -> Result<()> {
        if self.normalize && !self.bases.is_owned(io.class) {
            self.normalized(&io.units, &mut io.buffers, h)?;
        }
        Ok(())
    }
}

/// `√(1-β₂ᵗ) / (1-β₁ᵗ)`.
fn correction(steps: f64, h: &Hyper) -> f64 {
    (1.0 - h[BETA2].powf(steps)).sqrt() / (1.0 - h[BETA1].powf(steps))
}

/// Operands of a unit that takes a step: its momentum in the basis, its gradient there, and its second moment.
type Whitened<'s> = (MatrixViewMut<'s>, MatrixViewMut<'s>, MatrixViewMut<'s>);

/// The second moment, and the momentum in its basis divided by the root of that.
fn whiten<'s>(h: &Hyper, factors: Vec<[f64; 2]>, all: impl Iterator<Item = Whitened<'s>>) -> Result<()> {
    let (mut each, mut own) = (Vec::new(), Vec::new());
    for ((n, y, v), factor) in all.zip(factors) {
        // A matrix that lies in pieces is a job for each.
        let pieces = jobs([([y.into_view()], [n, v])]);
        own.resize(own.len() + pieces.len(), factor);
        each.extend(pieces);
    }
    kernels::run(&kernels::Whiten { beta2: h[BETA2], epsilon: h[EPSILON], factors: own }, &mut each)
}

/// Sums of the squares of updates, as far as they are stored here.
fn norms(units: &[UnitIo<'_>], buffers: &mut Buffers<'_>) -> Result<()> {
    let [update, norm] = buffers.several([UPDATE, NORM])?;
    let all = update.flats(units)?.into_iter().map(|u| Job { read: [u.into_view()], write: [] });
    kernels::fold(
        &kernels::SumOfSquares { factor: 1.0 },
        &mut all.collect::<Vec<_>>(),
        &mut norm.flats(units)?,
    )
}
