//! Products of a matrix with thin factors. The matrix is used as it is stored; `transposed` says that the factors
//! belong to its transpose.

use tch::Tensor;

use super::random::{Key, fill_normal};
use crate::error::{Error, Result};

/// `out = B·q` with B the oriented matrix `[m, n]`, `q` `[n, r]`, `out` `[m, r]`.
///
/// # Errors
/// Whatever libtorch says.
pub fn project(stored: &Tensor, transposed: bool, q: &Tensor, out: &Tensor) -> Result<()> {
    let oriented = if transposed { stored.f_tr()? } else { stored.shallow_clone() };
    let _ = oriented.f_mm_out(out, q)?;
    Ok(())
}

/// `out = Bᵀ·p` with B the oriented matrix `[m, n]`, `p` `[m, r]`, `out` `[n, r]`.
///
/// # Errors
/// Whatever libtorch says.
pub fn back_project(stored: &Tensor, transposed: bool, p: &Tensor, out: &Tensor) -> Result<()> {
    project(stored, !transposed, p, out)
}

/// `B += p·rᵀ` in place, with B the oriented matrix `[m, n]`, `p` `[m, r]`, `r` `[n, r]`.
///
/// # Errors
/// Whatever libtorch says.
pub fn add_product(stored: &mut Tensor, transposed: bool, p: &Tensor, r: &Tensor) -> Result<()> {
    let (left, right) = if transposed { (r, p) } else { (p, r) };
    let _ = stored.f_addmm_(left, &right.f_tr()?)?;
    Ok(())
}

/// `stored = p·rᵀ`, oriented as in `add_product`.
///
/// # Errors
/// Whatever libtorch says.
pub fn set_product(stored: &Tensor, transposed: bool, p: &Tensor, r: &Tensor) -> Result<()> {
    let (left, right) = if transposed { (r, p) } else { (p, r) };
    let _ = left.f_mm_out(stored, &right.f_tr()?)?;
    Ok(())
}

/// Rows of a Gaussian matrix with `cols` columns and entries N(0, 1/cols), from row `first` on: a function of the key, of
/// `tag` and of `step` only. float32.
///
/// # Errors
/// `Error::Value` for sizes beyond what can be addressed.
pub fn gaussian_rows(
    key: Key,
    tag: u32,
    step: u64,
    first: usize,
    [rows, cols]: [usize; 2],
) -> Result<Tensor> {
    let mut numbers = vec![0.0_f32; rows * cols];
    fill_normal(&mut numbers, key, tag, step, (first * cols) as u64);
    let size = |n| i64::try_from(n).map_err(|_| Error::Value(format!("size {n} is too large")));
    let mut matrix = Tensor::f_from_slice(&numbers)?.f_view([size(rows)?, size(cols)?])?;
    #[allow(clippy::cast_precision_loss)] // a number of columns
    let _ = matrix.f_mul_scalar_(1.0 / (cols.max(1) as f64).sqrt())?;
    Ok(matrix)
}

/// One Gaussian sketch `[rows, cols]` with entries N(0, 1/rows) for each (key, number of the block): a function of
/// these, of `tag` and of `step` only. float32.
///
/// # Errors
/// `Error::Value` for sizes beyond what can be addressed.
pub fn sketches(keys: &[(Key, usize)], rows: usize, cols: usize, tag: u32, step: u64) -> Result<Tensor> {
    let each = rows * cols;
    let mut numbers = vec![0.0_f32; keys.len() * each];
    for ((key, block), out) in keys.iter().zip(numbers.chunks_exact_mut(each.max(1))) {
        fill_normal(out, *key, tag, step, (block * each) as u64);
    }
    let size = [keys.len(), rows, cols]
        .map(|n| i64::try_from(n).map_err(|_| Error::Value(format!("size {n} is too large"))));
    let [count, rows_size, cols_size] = size;
    let mut sketch = Tensor::f_from_slice(&numbers)?.f_view([count?, rows_size?, cols_size?])?;
    #[allow(clippy::cast_precision_loss)] // a number of rows
    let _ = sketch.f_mul_scalar_(1.0 / (rows.max(1) as f64).sqrt())?;
    Ok(sketch)
}
