//! Views of tensors that linear algebra makes or is lent.
//!
//! A tensor of libtorch is one owner of memory that may have several. Functions of this room get tensors that their caller
//! lends for the call, or make them, and call libtorch on no other owner of their memory while a view of it is alive: that
//! is what the unsafe blocks here rest on.

use tch::Tensor;

use crate::error::{Error, Result};
use crate::tensor::{FlatPtr, FlatView, FlatViewMut};

/// To be read.
///
/// # Errors
/// As [`FlatPtr::of`].
pub(crate) fn read(tensor: &Tensor) -> Result<FlatView<'_>> {
    // SAFETY: `read` says so above.
    unsafe { FlatView::from_tensor(tensor) }
}

/// The elements of a matrix that lies column by column, to be read in that order.
///
/// # Errors
/// As [`FlatPtr::of`].
pub(crate) fn read_turned(matrix: &Tensor) -> Result<FlatView<'_>> {
    // SAFETY: the transpose has the memory of the matrix, which is borrowed; else as in `read`.
    Ok(unsafe { FlatPtr::of(&matrix.f_tr()?)?.view(None) })
}

/// To be written.
///
/// # Errors
/// As [`FlatPtr::of`].
pub(crate) fn write(tensor: &mut Tensor) -> Result<FlatViewMut<'_>> {
    // SAFETY: as in `read`; the tensor is borrowed to be written.
    unsafe { FlatViewMut::from_tensor(tensor) }
}

/// Several at once.
///
/// # Errors
/// As [`FlatPtr::of`], and `Error::Internal` for tensors that share memory.
pub(crate) fn write_all<const N: usize>(tensors: [&mut Tensor; N]) -> Result<[FlatViewMut<'_>; N]> {
    for (at, one) in tensors.iter().enumerate() {
        for other in &tensors[at + 1..] {
            if FlatPtr::of(one)?.overlaps(&FlatPtr::of(other)?) {
                return Err(Error::Internal("the tensors of a call share memory".into()));
            }
        }
    }
    let mut views = [const { FlatViewMut::EMPTY }; N];
    for (view, tensor) in views.iter_mut().zip(tensors) {
        *view = write(tensor)?;
    }
    Ok(views)
}
