//! Passes over the columns of thin matrices, and what makes rows and columns orthonormal.

use tch::{Kind, Tensor};

use super::value::Value::{self, Known, There};
use super::{arithmetic, load, load_matrix, store, store_matrix};
use crate::error::Result;
use crate::kernels::ops::columns::{Columns, Kept, dead_share};
use crate::kernels::stay::followed_rate;
use crate::tensor::{DType, FlatView, FlatViewMut, to_i64};

/// Distance from 1 to the next float32.
const EPSILON: f64 = 1.2e-7;
/// Products that are added up beside each other.
const TILE: f64 = 32.0;

/// The matrix in a type.
fn matrix(columns: &Columns<'_>, kind: Kind) -> Result<Tensor> {
    let [rows, cols] = columns.shape().map(to_i64);
    Ok(load(&columns.x, kind)?.f_reshape([rows?, cols?])?)
}

/// See [`crate::kernels::squares_and_scaled`].
pub(in crate::kernels) fn squares_and_scaled(all: &mut [Columns<'_>], factor: f64) -> Result<()> {
    for columns in all {
        let wide = matrix(columns, Kind::Double)?;
        store(&columns.sums.view(), &wide.f_square()?.f_sum_dim_intlist(&[0_i64][..], false, Kind::Double)?)?;
        let own = matrix(columns, arithmetic(columns.x.dtype() == DType::F64))?;
        store(&columns.scaled.view(), &own.f_mul_scalar(factor)?)?;
    }
    Ok(())
}

/// See [`crate::kernels::normalize_columns`].
pub(in crate::kernels) fn normalize_columns(
    all: &[Kept<'_>],
    epsilon: f64,
    factor: f64,
    per_rate: bool,
) -> Result<()> {
    let factor = if per_rate { Known(factor) * followed_rate()? } else { Known(factor) };
    for Kept { columns, q, own } in all.iter().filter(|kept| !kept.columns.shape().contains(&0)) {
        let kind = arithmetic(columns.x.dtype() == DType::F64);
        let sums = load(&columns.sums.view(), Kind::Double)?;
        let all = There(sums.f_nan_to_num(0.0, f64::INFINITY, f64::NEG_INFINITY)?).sum().sqrt();
        let noise = all.max(&Known(epsilon)) * dead_share(columns.x.dtype());
        let norms = There(sums).sqrt();
        // What is no number is not dead: it has to show.
        let is_dead = norms.at_most(&noise);
        let divisors = is_dead.choose(&Known(1.0), &(&norms + epsilon));
        let factors = is_dead.choose(&Known(0.0), &(&factor + &norms * 0.0));
        let x = matrix(columns, kind)?;
        let narrow = |numbers: &Value| -> Result<Value> { Ok(numbers.tensor(&x)?.f_to_kind(kind).into()) };
        let unit = There(x.shallow_clone()) / narrow(&divisors)?;
        let scaled = (narrow(&factors)? * &unit).tensor(&x)?;
        let (first, count) = (to_i64(own.start)?, to_i64(own.len())?);
        if count > 0 {
            let new = unit.tensor(&x)?.f_narrow(1, first, count)?;
            let is_dead = is_dead.tensor(&x)?.f_narrow(0, first, count)?;
            let old = load_matrix(&q.view(), kind)?;
            store_matrix(&q.view(), &old.f_where_self(&is_dead, &new)?)?;
        }
        store(&columns.scaled.view(), &scaled)?;
    }
    Ok(())
}

/// See [`crate::kernels::orthonormal_columns`].
pub(in crate::kernels) fn orthonormal_columns(
    matrices: &mut FlatViewMut<'_>,
    [count, rows, cols]: [usize; 3],
) -> Result<()> {
    if matrices.is_empty() {
        return Ok(());
    }
    let sizes = [to_i64(count)?, to_i64(rows)?, to_i64(cols)?];
    let x = load(&matrices.view(), Kind::Double)?.f_reshape(sizes)?;
    let norms = x.f_square()?.f_sum_dim_intlist(&[1_i64][..], true, Kind::Double)?.f_sqrt()?;
    let is_zero = norms.f_eq(0.0)?;
    let units = x.f_div(&norms.f_where_self(&is_zero.f_logical_not()?, &norms.f_ones_like()?)?)?;
    #[allow(clippy::cast_precision_loss)] // a number of columns
    let rounding = (cols as f64 + TILE) * EPSILON;
    // Columns that depend on those before them go last, where they are in nobody's way.
    let is_zero = is_zero.f_squeeze_dim(1)?;
    let (_, diagonal) = ordered_qr(&units, &is_zero)?;
    let depends = is_zero.f_logical_or(&diagonal.f_abs()?.f_le(rounding)?)?;
    let (q, diagonal) = ordered_qr(&units, &depends)?;
    let q = q.f_mul(&diagonal.f_sign()?.f_unsqueeze(1)?)?;
    let q = q.f_zeros_like()?.f_where_self(&depends.f_unsqueeze(1)?, &q)?;
    store(&matrices.view(), &q)
}

/// The orthonormal factor of matrices, and the diagonal of the other, where the columns that are marked come last.
fn ordered_qr(x: &Tensor, last: &Tensor) -> Result<(Tensor, Tensor)> {
    let (_, order) = last.f_to_kind(Kind::Float)?.f_sort_stable(true, -1, false)?;
    let (_, back) = order.f_sort_stable(true, -1, false)?;
    let columns = |x: &Tensor, order: &Tensor| x.f_gather(2, &order.f_unsqueeze(1)?.f_expand_as(x)?, false);
    let (q, r) = Tensor::f_linalg_qr(&columns(x, &order)?, "reduced")?;
    let diagonal = r.f_diagonal(0, 1, 2)?;
    Ok((columns(&q, &back)?, diagonal.f_gather(1, &back, false)?))
}

/// See [`crate::kernels::orthogonal_rows`]: the host waits.
pub(in crate::kernels) fn orthogonal_rows(
    w: &FlatView,
    j: &FlatView,
    [count, size]: [usize; 2],
) -> Result<()> {
    if w.is_empty() {
        return Ok(());
    }
    let sizes = [to_i64(count)?, to_i64(size)?, to_i64(size)?];
    let x = load(w, Kind::Double)?.f_reshape(sizes)?;
    let is_finite = x.f_isfinite()?.f_flatten(1, 2)?.f_all_dim(1, false)?.f_reshape([sizes[0], 1, 1])?;
    let safe = x.f_where_self(&is_finite, &x.f_zeros_like()?)?;
    let (left, _, _) = safe.f_svd(true, true)?;
    let turn = left.f_transpose(1, 2)?;
    let nan = Tensor::f_scalar_tensor(f64::NAN, (Kind::Double, x.device()))?;
    store(w, &turn.f_matmul(&x)?)?;
    store(j, &turn.f_where_self(&is_finite, &nan)?)
}
