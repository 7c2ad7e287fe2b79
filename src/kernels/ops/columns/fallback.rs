//! Passes over the columns of thin matrices.

use tch::{Kind, Tensor};

use crate::error::Result;
use crate::kernels::backend::operands;
use crate::kernels::libtorch::value::Value::{self, Computed, Scalar};
use crate::kernels::libtorch::{arithmetic, load, load_matrix, store, store_matrix};
use crate::kernels::ops::columns::{Columns, Kept, dead_share};
use crate::tensor::{DType, FlatView, to_i64};

/// The matrix in a type.
fn matrix(columns: &Columns<'_>, kind: Kind) -> Result<Tensor> {
    let [rows, cols] = columns.shape().map(to_i64);
    Ok(load(&columns.x, kind)?.f_reshape([rows?, cols?])?)
}

/// Writes the sums of squares of [`crate::kernels::squares_and_scaled`].
pub(in crate::kernels) fn squares(all: &[Columns<'_>]) -> Result<()> {
    for columns in all {
        let wide = matrix(columns, Kind::Double)?;
        store(&columns.sums.view(), &wide.f_square()?.f_sum_dim_intlist(&[0_i64][..], false, Kind::Double)?)?;
    }
    Ok(())
}

/// See [`crate::kernels::normalize_columns`].
pub(in crate::kernels) fn normalize(all: &[Kept<'_>], [epsilon, factor]: [&Value; 2]) -> Result<()> {
    for Kept { columns, q, own } in all.iter().filter(|kept| !kept.columns.shape().contains(&0)) {
        let kind = arithmetic(columns.x.dtype() == DType::F64);
        let sums = load(&columns.sums.view(), Kind::Double)?;
        let all = Computed(sums.f_nan_to_num(0.0, f64::INFINITY, f64::NEG_INFINITY)?).sum().sqrt();
        let noise = all.max(epsilon) * dead_share(operands(columns.x.dtype()));
        let norms = Computed(sums).sqrt();
        // A column with NaN is not dead, so that the NaN propagates.
        let is_dead = norms.at_most(&noise);
        let divisors = is_dead.choose(&Scalar(1.0), &(&norms + epsilon));
        let factors = is_dead.choose(&Scalar(0.0), &(factor + &norms * 0.0));
        let x = matrix(columns, kind)?;
        let narrow = |numbers: &Value| -> Result<Value> { Ok(numbers.tensor(&x)?.f_to_kind(kind).into()) };
        let unit = Computed(x.shallow_clone()) / narrow(&divisors)?;
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

/// Scales the columns of float32 matrices `[count, rows, cols]` to norm 1 in place, computed in float64. A column of zeros
/// stays one; one that is not finite becomes NaN.
#[cfg(feature = "cuda")]
pub(in crate::kernels) fn scale_to_units(matrices: &FlatView, shape: [usize; 3]) -> Result<()> {
    let mut x = matrices.tensor(&shape)?.shallow_clone();
    let norms = x.f_norm_scalaropt_dim_dtype(2.0, [1], true, Kind::Double)?;
    let factors = norms.f_reciprocal()?.f_masked_fill(&norms.f_eq(0.0)?, 0.0)?;
    let _ = x.f_mul_(&factors.f_masked_fill(&norms.f_isfinite()?.f_logical_not()?, f64::NAN)?)?;
    Ok(())
}
