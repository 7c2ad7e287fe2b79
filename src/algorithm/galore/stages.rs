//! The stages of `GaLore` in every step.

use tch::Tensor;

use super::layout::{LOW, LOW_ALL, PROJ, WIDE};
use super::{BETA1, BETA2, EPSILON, GaLore, LR, SCALE, WEIGHT_DECAY};
use crate::algorithm::low_rank::{gradient, in_products};
use crate::algorithm::stage::{BufferIo, StageIo, UnitIo, jobs};
use crate::error::{Error, Result};
use crate::kernels::{self, Job};
use crate::linalg::{OneThread, views};
use crate::program::BufferId;
use crate::spec::{Hyper, Side, UnitShape};
use crate::tensor::{MatrixView, MatrixViewMut};

/// The matrices that a stage takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Taken {
    /// All, of those whose bases are new with their moments turned.
    All,
    /// At the owners, those whose moments are to be turned.
    Turned,
    /// At the owners, the others.
    Same,
}

impl GaLore {
    /// Tests whether a stage takes a matrix; where matrices are whole, those without a gradient are among its units.
    fn takes_part(&self, taken: Taken, unit: &UnitIo<'_>) -> bool {
        let is_turned = self.rotate && unit.due;
        unit.active && (taken == Taken::All || (taken == Taken::Turned) == is_turned)
    }

    /// The factors of updates and the rate of decay.
    fn rates(h: &Hyper) -> (f64, f64) {
        (h[LR] * h[SCALE], h[LR] * h[WEIGHT_DECAY])
    }

    /// Tests whether directions come with the step size, and are added to the weights by the product.
    fn is_direct(&self, class: &UnitShape) -> bool {
        !self.common.cautious && class.weights == class.param.arithmetic()
    }

    /// The buffer with the finished projected gradient.
    fn low(&self, class: &UnitShape, sides: &[Side]) -> BufferId {
        if sides.len() == 2 && !self.common.is_owned(class, sides) { LOW_ALL } else { LOW }
    }

    /// The basis of a unit's side in the type of products.
    fn basis_of(class: &UnitShape, unit: &UnitIo<'_>, at: usize) -> Result<Tensor> {
        Ok(unit.state[PROJ + at].view().tensor()?.f_to_kind(class.param.arithmetic().kind())?)
    }

    /// A matrix of a unit's size in `WIDE`.
    fn wide<'s>(wide: &'s mut BufferIo<'_>, unit: &UnitIo<'_>) -> Result<MatrixViewMut<'s>> {
        let [rows, cols] = unit.param.shape();
        Ok(wide.flat(unit)?.into_matrix(0, [rows, cols], cols))
    }

    /// Projects the gradients, as far as they are stored here.
    pub(super) fn project(&self, io: &mut StageIo<'_>) -> Result<()> {
        self.warned.listen()?;
        let sides = self.sides(io.class);
        let StageIo { units, buffers, class, .. } = io;
        let [low, wide] = buffers.several([LOW, WIDE])?;
        let _alone = OneThread::for_small(units.len() * class.rows * class.cols * self.common.rank());
        for unit in &*units {
            let (out, grad) = (low.tensor(unit)?, gradient(class, unit, wide)?);
            let first = Self::basis_of(class, unit, 0)?;
            kernels::frozen(|| {
                let grad = in_products(class, &grad)?;
                let _ = match *sides {
                    [Side::Cols] => grad.f_mm_out(&out, &first)?,
                    [Side::Rows] => first.f_tr()?.f_mm_out(&out, &grad)?,
                    _ => first.f_tr()?.f_mm_out(&out, &grad.f_mm(&Self::basis_of(class, unit, 1)?)?)?,
                };
                Ok(())
            })?;
        }
        // Before there is a basis there is no direction, whatever the gradient holds.
        (0..sides.len()).try_for_each(|at| {
            let pairs = units.iter().zip(low.flats(units)?);
            let pairs = pairs.map(|(unit, low)| (unit.state[PROJ + at].view(), low));
            kernels::clear_without_basis(&mut pairs.collect::<Vec<_>>())
        })
    }

    /// The sums of projected gradients over the rows, to be summed over the columns.
    pub(super) fn sum(io: &mut StageIo<'_>) -> Result<()> {
        let StageIo { units, buffers, .. } = io;
        let [low, all] = buffers.several([LOW, LOW_ALL])?;
        let pairs = low.flats(units)?.into_iter().zip(all.flats(units)?);
        let pairs = pairs.map(|(from, to)| Job { read: [from.into_view()], write: [to] });
        kernels::run(&kernels::Convert { factor: 1.0 }, &mut pairs.collect::<Vec<_>>())
    }

    /// Adam on the projected gradient: its direction, in place.
    pub(super) fn adam(&self, io: &mut StageIo<'_>, h: &Hyper, taken: Taken) -> Result<()> {
        let (sides, grad_factor) = (self.sides(io.class), io.grad_factor);
        let StageIo { units, buffers, class, .. } = io;
        let ((rate, _), direct) = (Self::rates(h), self.is_direct(class));
        let direction = kernels::Direction {
            beta1: h[BETA1],
            beta2: h[BETA2],
            epsilon: h[EPSILON],
            grad_factor,
            corrections: kernels::AdamW::corrections(
                if direct { -rate } else { 1.0 },
                [h[BETA1], h[BETA2]],
                units.iter().filter(|unit| self.takes_part(taken, unit)).map(|unit| unit.steps + 1.0),
            ),
            unit: 1.0,
            per_rate: direct,
        };
        let mut turned = self.turned(units, buffers, sides, taken)?;
        let mut operands = Vec::with_capacity(units.len());
        let lows = buffers.get_mut(self.low(class, sides))?.matrices(units)?;
        for ((unit, low), pair) in units.iter_mut().zip(lows).zip(&mut turned) {
            if self.takes_part(taken, unit) {
                operands.push(([], Self::moments(unit, pair.as_mut(), low)?));
            }
        }
        kernels::run(&direction, &mut jobs(operands))?;
        for (unit, pair) in units.iter_mut().zip(&mut turned) {
            let Some([first, second]) = pair else { continue };
            let [m, v, ..] = &mut unit.state;
            let back = [(m, first), (v, second)].map(|(to, from)| {
                let from = view_on(&to.view(), from)?.into_view();
                Ok::<_, Error>(([from], [to.reborrow()]))
            });
            let [m, v] = back;
            kernels::run(&kernels::Convert { factor: 1.0 }, &mut jobs([m?, v?]))?;
        }
        Ok(())
    }

    /// The update: where moments lie here, Adam on the projected gradient, and back.
    pub(super) fn apply(&self, io: &mut StageIo<'_>, h: &Hyper) -> Result<()> {
        let sides = self.sides(io.class);
        if !self.common.is_owned(io.class, sides) {
            self.adam(io, h, Taken::All)?;
        }
        let StageIo { units, buffers, class, .. } = io;
        let ((rate, decay), direct) = (Self::rates(h), self.is_direct(class));
        let [low, wide] = buffers.several([self.low(class, sides), WIDE])?;
        let decays = |units: &mut [UnitIo<'_>], late: bool| {
            if !direct || h[WEIGHT_DECAY] == 0.0 || late != self.common.late {
                return Ok(());
            }
            let mut jobs = jobs(units.iter_mut().map(|unit| ([], [unit.param.reborrow()])));
            kernels::run(&kernels::Decay { decay, per_rate: true }, &mut jobs)
        };
        decays(units, false)?;
        let alone = OneThread::for_small(units.len() * class.rows * class.cols * self.common.rank());
        for unit in units.iter_mut() {
            let (normal, first) = (low.read_tensor(unit)?, Self::basis_of(class, unit, 0)?);
            let second = if sides.len() == 2 { Some(Self::basis_of(class, unit, 1)?) } else { None };
            let is_in_place = direct && class.weights == class.param;
            if direct && !is_in_place {
                // The output of the product must be a plain matrix: weights in two halves are joined before and split
                // after it.
                let together = Self::wide(wide, unit)?;
                let mut jobs = jobs([([unit.param.view()], [together])]);
                kernels::run(&kernels::Convert { factor: 1.0 }, &mut jobs)?;
            }
            let mut own = if is_in_place { unit.param.reborrow() } else { Self::wide(wide, unit)? };
            let mut to = own.tensor()?;
            kernels::frozen(|| {
                let (left, right) = match (sides, &second) {
                    (_, Some(second)) => (first.f_mm(&normal)?, second.f_tr()?),
                    ([Side::Rows], _) => (first.shallow_clone(), normal.shallow_clone()),
                    _ => (normal.shallow_clone(), first.f_tr()?),
                };
                let _ = if direct { to.f_addmm_(&left, &right)? } else { left.f_mm_out(&to, &right)? };
                Ok(())
            })?;
            drop(to);
            if direct && !is_in_place {
                let stepped = Self::wide(wide, unit)?.into_view();
                let mut jobs = jobs([([stepped], [unit.param.reborrow()])]);
                kernels::run(&kernels::Convert { factor: 1.0 }, &mut jobs)?;
            } else if !direct {
                let update = Self::wide(wide, unit)?.into_view();
                self.common.update(rate, decay, &mut jobs([([update], [unit.param.reborrow()])]))?;
            }
        }
        drop(alone);
        decays(units, true)
    }

    /// A projected gradient with its moments, or with those that were turned.
    #[allow(clippy::needless_pass_by_value)] // borrowed as long as the result
    fn moments<'s>(
        unit: &'s mut UnitIo<'_>,
        turned: Option<&'s mut [Tensor; 2]>,
        low: MatrixViewMut<'s>,
    ) -> Result<[MatrixViewMut<'s>; 3]> {
        let [m, v, ..] = &mut unit.state;
        Ok(match turned {
            Some([first, second]) => [low, view_on(&m.view(), first)?, view_on(&v.view(), second)?],
            None => [low, m.reborrow(), v.reborrow()],
        })
    }
}

/// View of a contiguous matrix, on the device of a moment.
pub(super) fn view_on<'t>(moment: &MatrixView<'_>, matrix: &'t mut Tensor) -> Result<MatrixViewMut<'t>> {
    let [rows, cols] = moment.shape();
    Ok(views::write(matrix)?.on(moment.device()).into_matrix(0, [rows, cols], cols))
}
