//! Numbers of the states, stages and buffers of SOAP and of its bases, and the sides that these belong to.

use crate::algorithm::stage::UnitIo;
use crate::program::{BufferId, Stage};
use crate::spec::Side;

pub(super) const MOMENTUM: usize = 0;
pub(super) const VARIANCE: usize = 1;
/// The steps that had been taken when a matrix got its first bases, with that step; 0 before it has any. It follows the
/// moments and the counter.
pub(super) const SINCE: usize = 3;
/// The factor of the first side that has a basis; its basis, and those of the second side follow.
pub(super) const FACTOR: usize = 4;

pub(super) const STEP: Stage = 0;
pub(super) const LOAD: Stage = 1;
pub(super) const APPLY: Stage = 2;

/// The gradient in the type of products.
pub(super) const GRADIENT: BufferId = 0;
/// The momentum, which becomes the update.
pub(super) const UPDATE: BufferId = 1;
/// The sum of the squares of the update.
pub(super) const NORM: BufferId = 2;

/// The buffers of bases, by the first of them.
pub(super) const BASES: BufferId = 3;
/// Offset of the number of the state `SINCE`.
pub(super) const SINCE_BUFFER: BufferId = 0;
/// Offset of the squares of the gradient, for the first side that has a basis and for the second.
pub(super) const SQUARES: BufferId = 1;
/// Offset of the factors.
pub(super) const FACTORS: BufferId = 3;
/// Offset of the bases.
pub(super) const TURNS: BufferId = 5;
/// Offset of the first buffer behind those of the bases.
pub(super) const BEHIND: BufferId = 7;

/// Stages of the bases, behind those that an algorithm numbers from 0 on.
pub(super) const KEEP: Stage = 3;
pub(super) const COPY: Stage = 4;
pub(super) const REFRESH: Stage = 5;
pub(super) const TAKE: Stage = 6;

/// The number of a state of the side at this position among those with a basis: the factor, or the basis.
pub(super) fn state_of(at: usize, is_basis: bool) -> usize {
    FACTOR + 2 * at + usize::from(is_basis)
}

/// The length of a side of the whole block.
pub(super) fn length(unit: &UnitIo<'_>, side: Side) -> usize {
    [unit.rows, unit.cols][side.index()]
}
