//! The last step of an optimizer: decay, and the update from the parameter.

use super::stage::{StageIo, jobs};
use crate::error::Result;
use crate::kernels::{self, Apply};
use crate::program::BufferId;

/// The last step of an optimizer: decay, and the update from the parameter.
#[derive(Clone, Copy, Debug)]
pub struct LastStep {
    /// The learning rate.
    pub lr: f64,
    /// Factor of the update in addition to the learning rate. It belongs to the update's length.
    pub scale: f64,
    /// `lr · weight_decay`.
    pub decay: f64,
    /// True if the decay acts only where it points along the update.
    pub cautious: bool,
    /// True if the decay comes after the update.
    pub late: bool,
}

impl LastStep {
    /// The step of weights that are free.
    pub(super) fn free(&self) -> Apply {
        let Self { decay, cautious, late, .. } = *self;
        Apply { rate: self.lr * self.scale, decay, cautious, late }
    }
}

/// `X ← (1-lr·λ)X - lr·U` with U in a buffer.
///
/// # Errors
/// As [`kernels::run`].
pub(super) fn apply(io: &mut StageIo<'_>, step: &LastStep, update: BufferId) -> Result<()> {
    let StageIo { units, buffers, .. } = io;
    let updates = buffers.get_mut(update)?.matrices(units)?;
    let all = units.iter_mut().zip(updates);
    let all = all.map(|(unit, u)| ([u.into_view()], [unit.param.reborrow()]));
    kernels::run(&step.free(), &mut jobs(all))
}
