//! Passes over the columns of thin matrices.

use tch::{Kind, Tensor};

use super::value::Value::{self, Known, There};
use super::{arithmetic, load, load_matrix, store, store_matrix};
use crate::error::Result;
use crate::kernels::ops::columns::{Columns, Kept, dead_share};
use crate::kernels::backend::followed_rate;
use crate::tensor::{DType, to_i64};

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
