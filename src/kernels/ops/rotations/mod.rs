//! Rows of matrices on a device made orthogonal.

#[cfg(feature = "cuda")]
pub(in crate::kernels) mod device;

use crate::error::{Error, Result};
use crate::kernels::dispatch::no_kernels;
use crate::kernels::libtorch::on_device;
use crate::tensor::{DType, FlatView, FlatViewMut};

/// Number of which the sizes of matrices must be multiples.
pub const ROTATED_SIZES: usize = 64;

/// Sources of the kernels.
const SOURCES: &[&str] = &["jacobi.cu"];

/// Tests whether there are kernels of [`orthogonal_rows`] where this thread works.
///
/// # Errors
/// [`Error::Cuda`] where kernels would have to be loaded in a capture.
pub fn has_orthogonal_rows() -> Result<bool> {
    Ok(on_device!(SOURCES; true, else false))
}

/// Makes the rows of square matrices on a device orthogonal by rotations: `W <- J W` for `w`, `[count, size, size]` in
/// float64, and `J <- J₁ J` for `j`, which begins as the identity. `norms` are the Frobenius norms of the matrices.
/// J is NaN where W is not finite or its rows do not become orthogonal; the host is not told.
///
/// # Errors
/// [`Error::Cuda`] where the device refuses.
pub fn orthogonal_rows(
    w: &mut FlatViewMut<'_>,
    j: &mut FlatViewMut<'_>,
    norms: &FlatView<'_>,
    shape @ [count, size]: [usize; 2],
) -> Result<()> {
    let square = count * size * size;
    let fits = w.len() == square && j.len() == square && norms.len() == count;
    let wide = [w.dtype(), j.dtype(), norms.dtype()].iter().all(|dtype| *dtype == DType::F64);
    if !fits || !wide || !size.is_multiple_of(ROTATED_SIZES) {
        return Err(Error::Internal(format!(
            "{w:?}, {j:?} and {norms:?} as {count} matrices of size {size}"
        )));
    }
    on_device!(
        SOURCES;
        device::orthogonal_rows(&w.view(), &j.view(), norms, shape),
        else Err(no_kernels("orthogonal rows", shape))
    )
}
