//! Numbers of the states, stages and buffers of `GaLore`.

use crate::program::{BufferId, Stage};

/// The steps that had been taken when the bases were computed, with that step; 0 before there are any. It follows the
/// states that all algorithms of the kind have.
pub(super) const PROJ_STEP: usize = 3;
/// The bases.
pub(super) const PROJ: usize = 4;

pub(super) const STATISTIC: Stage = 0;
pub(super) const DECOMPOSE: Stage = 1;
pub(super) const OVERLAP: Stage = 2;
pub(super) const TAKE: Stage = 3;
pub(super) const PROJECT: Stage = 4;
pub(super) const SUM: Stage = 5;
pub(super) const APPLY: Stage = 6;
pub(super) const ADAM: Stage = 7;
pub(super) const TURN: Stage = 8;

/// The projected gradient; where both sides are projected, first its sums over the rows, then those over the columns.
pub(super) const LOW: BufferId = 0;
pub(super) const LOW_ALL: BufferId = 1;
/// Matrix from which a basis is computed.
pub(super) const SOURCE: BufferId = 2;
/// New bases, of the first side that is projected and of the second.
pub(super) const BASES: [BufferId; 2] = [3, 4];
/// Products of old and new bases.
pub(super) const OVERLAPS: [BufferId; 2] = [5, 6];
/// A matrix in the type of products.
pub(super) const WIDE: BufferId = 7;
/// NaN where there are no new bases, for processes that hold no part of them.
pub(super) const FOUND: BufferId = 8;
