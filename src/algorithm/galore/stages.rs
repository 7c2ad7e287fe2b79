//! The stages of `GaLore` in every step.

use tch::Tensor;

use super::super::low_rank::{MOMENTUM, VARIANCE};
use super::refresh::beside;
use super::{BETA1, BETA2, EPSILON, GaLore, LOW, LOW_ALL, LR, PROJ, SCALE, WEIGHT_DECAY, WIDE};
use crate::algorithm::stage::{StageIo, jobs};
use crate::error::{Error, Result};
use crate::kernels;
use crate::program::BufferId;
use crate::spec::{Hyper, Side};
use crate::tensor::MatrixView;

impl GaLore {
    /// The buffer with the finished projected gradient.
    fn low(sides: &[Side]) -> BufferId {
        if sides.len() == 2 { LOW_ALL } else { LOW }
    }

    /// The basis of a unit's side in the type of products.
    fn basis_of(io: &StageIo<'_>, i: usize, at: usize) -> Result<Tensor> {
        Ok(io.units[i].state[PROJ + at].tensor()?.f_to_kind(io.class.param.arithmetic().kind())?)
    }

    /// A matrix of a unit's size in `WIDE`.
    fn wide(io: &StageIo<'_>, i: usize) -> Result<MatrixView> {
        let [rows, cols] = io.units[i].param.shape();
        Ok(io.flat(WIDE, i)?.part(0, rows * cols).area(0, [rows, cols], cols))
    }

    /// The gradient in the type of products: itself, or its copy.
    fn gradient(io: &StageIo<'_>, i: usize) -> Result<Tensor> {
        let grad = io.units[i].grad;
        if grad.dtype() == io.class.param.arithmetic() {
            return grad.tensor();
        }
        let wide = Self::wide(io, i)?;
        kernels::run(&kernels::Convert { factor: 1.0 }, &jobs([Ok([grad, wide])])?)?;
        wide.tensor()
    }

    /// Projects the gradients, as far as they are stored here.
    pub(super) fn project(&self, io: &StageIo<'_>) -> Result<()> {
        self.warned.listen()?;
        let sides = self.sides(io.class);
        for i in 0..io.units.len() {
            let out = io.matrix(LOW, i)?;
            let grad = Self::gradient(io, i)?;
            let first = Self::basis_of(io, i, 0)?;
            kernels::frozen(|| {
                let _ = match *sides {
                    [Side::Cols] => grad.f_mm_out(&out, &first)?,
                    [Side::Rows] => first.f_tr()?.f_mm_out(&out, &grad)?,
                    _ => first.f_tr()?.f_mm_out(&out, &grad.f_mm(&Self::basis_of(io, i, 1)?)?)?,
                };
                Ok(())
            })?;
        }
        // Before there is a basis there is no direction, whatever the gradient holds.
        (0..sides.len()).try_for_each(|at| {
            let pairs = io.units.iter().enumerate();
            let pairs = pairs.map(|(i, unit)| Ok((unit.state[PROJ + at], io.flat(LOW, i)?)));
            kernels::clear_without_basis(&pairs.collect::<Result<Vec<_>>>()?)
        })
    }

    /// Adam on the projected gradient, and back.
    pub(super) fn apply(&self, io: &StageIo<'_>, h: &Hyper) -> Result<()> {
        let sides = self.sides(io.class);
        let low = Self::low(sides);
        let (rate, decay) = (h[LR] * h[SCALE], h[LR] * h[WEIGHT_DECAY]);
        let direct = !self.common.cautious && io.class.param == io.class.param.arithmetic();
        let direction = kernels::Direction {
            beta1: h[BETA1],
            beta2: h[BETA2],
            epsilon: h[EPSILON],
            grad_factor: io.grad_factor,
            corrections: kernels::AdamW::corrections(
                if direct { -rate } else { 1.0 },
                [h[BETA1], h[BETA2]],
                io.units.iter().map(|u| u.steps + 1.0),
            ),
            unit: 1.0,
            per_rate: direct,
        };
        let turned = self.turned(io)?;
        let stored = |i: usize| [MOMENTUM, VARIANCE].map(|role| io.units[i].state[role]);
        let wide = |i: usize, pair: &[Tensor; 2]| {
            let [m, v] = stored(i);
            Ok::<_, Error>([beside(&m, &pair[0])?, beside(&v, &pair[1])?])
        };
        let operands = |i: usize| {
            let [m, v] = turned[i].as_ref().map_or_else(|| Ok(stored(i)), |pair| wide(i, pair))?;
            Ok([io.area(low, i)?, m, v])
        };
        let all = (0..io.units.len()).map(operands);
        kernels::run(&direction, &jobs(all)?)?;
        for (i, pair) in turned.iter().enumerate().filter_map(|(i, pair)| Some((i, pair.as_ref()?))) {
            let back = wide(i, pair)?.into_iter().zip(stored(i)).map(|(from, to)| Ok([from, to]));
            kernels::run(&kernels::Convert { factor: 1.0 }, &jobs(back)?)?;
        }
        let decays = |late: bool| {
            if !direct || h[WEIGHT_DECAY] == 0.0 || late != self.common.late {
                return Ok(());
            }
            kernels::run(
                &kernels::Decay { decay, per_rate: true },
                &jobs(io.units.iter().map(|u| Ok([u.param])))?,
            )
        };
        decays(false)?;
        for (i, unit) in io.units.iter().enumerate() {
            let (normal, first) = (io.matrix(low, i)?, Self::basis_of(io, i, 0)?);
            let wide = if direct { unit.param } else { Self::wide(io, i)? };
            kernels::frozen(|| {
                let (left, right) = match *sides {
                    [Side::Cols] => (normal, first.f_tr()?),
                    [Side::Rows] => (first, normal),
                    _ => (first.f_mm(&normal)?, Self::basis_of(io, i, 1)?.f_tr()?),
                };
                let mut to = wide.tensor()?;
                let _ = if direct { to.f_addmm_(&left, &right)? } else { left.f_mm_out(&to, &right)? };
                Ok(())
            })?;
            if !direct {
                self.common.update(rate, decay, &jobs([Ok([unit.param, wide])])?)?;
            }
        }
        decays(true)
    }
}
