//! Products where there is no kernel: nothing here is reached, as `Features::kernel` names none.

use super::{Kernel, Operand, Product, Side};
use crate::tensor::{FlatView, FlatViewMut};

pub(super) const ADDENDS: usize = 0;

pub(super) fn elements(_kernel: Kernel, _side: Side, _count: usize, _inner: usize) -> usize {
    0
}

pub(super) fn pack(
    _kernel: Kernel,
    _side: Side,
    _from: &Operand<'_>,
    _to: &mut FlatViewMut<'_>,
    _spread: bool,
) {
}

pub(super) fn multiply(
    _kernel: Kernel,
    _left: &FlatView<'_>,
    _right: &FlatView<'_>,
    _product: &mut Product<'_>,
    _spread: bool,
) {
}

pub(super) fn tile_rows(_kernel: Kernel) -> usize {
    1
}

pub(super) fn tile_cols(_kernel: Kernel) -> usize {
    1
}
