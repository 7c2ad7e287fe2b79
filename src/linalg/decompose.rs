//! Eigenvectors and singular vectors in float64: by libtorch, on devices with kernels for it by rotations of which the host is
//! told nothing.

use tch::{Kind, Tensor};

use super::views;
use crate::error::Result;
use crate::kernels::{ROTATED_SIZES, has_orthogonal_rows, orthogonal_rows};

/// Values by falling size, and for each the column that belongs to it.
pub(super) type Vectors = (Tensor, Tensor);

/// Eigenvalues and eigenvectors of a positive semidefinite matrix `[d, d]`; none where they are not found. On a device the
/// vectors are NaN then.
pub(super) fn symmetric(x_dd: &Tensor) -> Result<Option<Vectors>> {
    if has_orthogonal_rows()? {
        return rotated(x_dd).map(Some);
    }
    let Ok((values_d, vectors_dd)) = x_dd.f_linalg_eigh("L") else { return Ok(None) };
    Ok(Some((values_d.f_flip([0])?.f_clamp_min(0.0)?, vectors_dd.f_flip([1])?)))
}

/// Singular values and left singular vectors of a matrix, `transposed` its right ones; none where they are not found. On a
/// device the vectors are NaN then.
pub(super) fn singular(x: &Tensor, transposed: bool) -> Result<Option<Vectors>> {
    if !has_orthogonal_rows()? {
        let found = x.f_svd(true, true).ok();
        return Ok(found.map(|(u, values, v)| (values, if transposed { v } else { u })));
    }
    rotated(&if transposed { x.f_tr()? } else { x.shallow_clone() }).map(Some)
}

/// Singular values and left singular vectors of a matrix: with `A = Q R S` for an orthonormal S, those of R times Q. Of
/// `J R` with orthogonal rows the norms are the values, and the rows of J the vectors.
///
/// R is what three decompositions leave, each of the transpose of the factor before: the rows fall in size then, which
/// halves the sweeps (Drmač and Veselić, "New fast and accurate Jacobi SVD algorithm", 2008).
fn rotated(x_de: &Tensor) -> Result<Vectors> {
    let qr = |x: &Tensor| Tensor::f_linalg_qr(x, "reduced");
    // Squares of what is in a row are neither too large nor too small then.
    let largest = x_de.f_abs()?.f_amax([0, 1].as_slice(), false)?;
    let (q_dk, first_ke) = qr(&x_de.f_div(&largest.f_clamp_min(f64::MIN_POSITIVE)?)?)?;
    let (_, second_kk) = qr(&first_ke.f_tr()?)?;
    let (turn_kk, r_kk) = qr(&second_kk.f_tr()?)?;

    let k = r_kk.size()[0];
    let size = usize::try_from(k).unwrap_or(0).next_multiple_of(ROTATED_SIZES);
    let (padded, options) = (i64::try_from(size).unwrap_or(i64::MAX), (Kind::Double, x_de.device()));
    let mut w = Tensor::f_zeros([padded, padded], options)?;
    w.f_narrow(0, 0, k)?.f_narrow(1, 0, k)?.f_copy_(&r_kk)?;
    let (mut j, norm) = (Tensor::f_eye(padded, options)?, w.f_norm()?);
    let [mut rows, mut turns] = views::write_all([&mut w, &mut j])?;
    orthogonal_rows(&mut rows, &mut turns, &views::read(&norm)?, [1, size])?;
    let norms = w.f_square()?.f_sum_dim_intlist([1].as_slice(), false, Kind::Double)?.f_sqrt()?;
    // Of rows of zeros those that were added are the last.
    let (values, order) = norms.f_sort_stable(true, 0, true)?;
    let (values_k, order_k) = (values.f_narrow(0, 0, k)?, order.f_narrow(0, 0, k)?);
    let vectors_kk = j.f_narrow(1, 0, k)?.f_index_select(0, &order_k)?.f_tr()?;
    Ok((values_k.f_mul(&largest)?, q_dk.f_mm(&turn_kk)?.f_mm(&vectors_kk)?))
}
