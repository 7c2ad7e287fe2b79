//! Eigenvectors and singular vectors in float64 by libtorch. The host waits for a device.

use tch::Tensor;

use crate::error::Result;

/// Values by falling size, and for each the column that belongs to it.
pub(super) type Vectors = (Tensor, Tensor);

/// Eigenvalues and eigenvectors of a positive semidefinite matrix `[d, d]`; none where they are not found.
pub(super) fn symmetric(x_dd: &Tensor) -> Result<Option<Vectors>> {
    let Ok((values_d, vectors_dd)) = x_dd.f_linalg_eigh("L") else { return Ok(None) };
    Ok(Some((values_d.f_flip([0])?.f_clamp_min(0.0)?, vectors_dd.f_flip([1])?)))
}

/// Singular values and left singular vectors of a matrix, `transposed` its right ones; none where they are not found.
pub(super) fn singular(x: &Tensor, transposed: bool) -> Option<Vectors> {
    let found = x.f_svd(true, true).ok();
    found.map(|(u, values, v)| (values, if transposed { v } else { u }))
}
