//! Products where there is no kernel: nothing here is reached, as `Features::kernel` names none.

use super::{Kernel, Operand, Product, Side};
use crate::tensor::FlatView;

pub(super) const ADDENDS: usize = 0;

pub(super) fn elements(_kernel: Kernel, _side: Side, _count: usize, _inner: usize) -> usize {
    0
}

pub(super) fn pack(_kernel: Kernel, _side: Side, _from: &Operand, _to: &FlatView, _spread: bool) {}

pub(super) fn multiply(
    _kernel: Kernel,
    _left: &FlatView,
    _right: &FlatView,
    _product: &Product<'_>,
    _spread: bool,
) {
}

pub(super) fn tile_rows(_kernel: Kernel) -> usize {
    1
}

pub(super) fn tile_cols(_kernel: Kernel) -> usize {
    1
}
