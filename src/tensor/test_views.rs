//! Views of tensors for unit tests, which share none.

use tch::Tensor;

use super::{FlatPtr, FlatView, FlatViewMut};

/// To be read.
pub(crate) fn view(tensor: &Tensor) -> FlatView<'_> {
    // SAFETY: a test uses the tensor for nothing else meanwhile.
    unsafe { FlatView::from_tensor(tensor) }.unwrap()
}

/// To be written.
pub(crate) fn view_mut(tensor: &Tensor) -> FlatViewMut<'_> {
    // SAFETY: a test uses the tensor for nothing else meanwhile.
    unsafe { FlatPtr::of(tensor).unwrap().view_mut(None) }
}
