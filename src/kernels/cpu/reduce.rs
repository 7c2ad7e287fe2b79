//! Sums over elements, accumulated in float64.

use std::ops::Range;

use crate::batch::{Area, Slab};
use crate::dtype::DType;
use crate::error::{Error, Result};

/// A column whose norm is at most this fraction of the largest one holds rounding noise only: two units in the
/// last place of float32.
const DEAD: f64 = 2.4e-7;

/// Σ x² over all elements.
#[must_use]
pub fn sum_of_squares(x: &Slab) -> f64 {
    let mut wide = [0.0_f64; super::TILE];
    let mut sum = 0.0;
    for start in (0..x.len()).step_by(super::TILE) {
        let tile = x.part(start, super::TILE);
        super::convert::load(&tile, &mut wide[..tile.len()]);
        sum += wide[..tile.len()].iter().map(|x| x * x).sum::<f64>();
    }
    sum
}

/// All elements in float64.
#[must_use]
pub fn values(x: &Slab) -> Vec<f64> {
    let mut wide = vec![0.0; x.len()];
    for start in (0..x.len()).step_by(super::TILE) {
        let end = (start + super::TILE).min(x.len());
        super::convert::load(&x.part(start, super::TILE), &mut wide[start..end]);
    }
    wide
}

/// Sets all elements, as many as there are values.
pub fn set_values(values: &[f64], x: &Slab) {
    debug_assert_eq!(values.len(), x.len());
    for start in (0..x.len()).step_by(super::TILE) {
        let end = (start + super::TILE).min(x.len());
        super::convert::store(&values[start..end], &x.part(start, super::TILE));
    }
}

/// Whether every element is zero.
#[must_use]
pub fn only_zeros(x: &Slab) -> bool {
    (0..x.len()).step_by(super::TILE).all(|start| sum_of_squares(&x.part(start, super::TILE)) == 0.0)
}

/// `sums[j] = Σᵢ x[i, j]²` of a row-major `[rows, columns]` slab; `sums` is float64.
///
/// # Errors
/// `Error::Internal` when `sums` is not one float64 for each column.
pub fn column_sums_of_squares(x: &Slab, columns: usize, sums: &Slab) -> Result<()> {
    if sums.dtype() != DType::F64 || sums.len() != columns {
        return Err(Error::Internal("column sums need one float64 each".into()));
    }
    // SAFETY: the caller owns both slabs for this stage, and they do not overlap.
    let sums = unsafe { sums.slice::<f64>() };
    sums.fill(0.0);
    let mut row = vec![0.0_f64; columns];
    for start in (0..x.len()).step_by(columns.max(1)) {
        super::convert::load(&x.part(start, columns), &mut row);
        sums.iter_mut().zip(&row).for_each(|(sum, value)| *sum += value * value);
    }
    Ok(())
}

/// `q[:, j] ← x[:, j] / (√sums[j] + epsilon)` and `scaled[:, j] ← factor · q[:, j]`. Of `q` only the columns in `own`
/// are stored.
///
/// A dead column (norm zero, or rounding noise beside the largest one) keeps its `q` and gets `scaled = 0`: a
/// direction that the momentum does not have is not stepped along.
pub fn normalize_columns(
    x: &Slab,
    sums: &Slab,
    epsilon: f64,
    factor: f64,
    (q, own): (&Area, Range<usize>),
    scaled: &Slab,
) {
    // SAFETY: the caller owns the slabs for this stage, and they do not overlap.
    let sums = unsafe { sums.slice::<f64>() };
    let columns = sums.len();
    let largest = sums.iter().fold(0.0_f64, |a, &b| a.max(b)).sqrt();
    let divisors: Vec<Option<f64>> = sums
        .iter()
        .map(|s| {
            let norm = s.sqrt();
            // A NaN is not dead: it has to show.
            (norm.is_nan() || norm > DEAD * largest).then_some(norm + epsilon)
        })
        .collect();
    if columns == 0 {
        return;
    }
    let (mut row_x, mut row_q) = (vec![0.0_f64; columns], vec![0.0_f64; own.len()]);
    let mut row_scaled = vec![0.0_f64; columns];
    for (row, start) in (0..x.len()).step_by(columns).enumerate() {
        let (xs, ss) = (x.part(start, columns), scaled.part(start, columns));
        let qs = q.row(row);
        super::convert::load(&xs, &mut row_x);
        super::convert::load(&qs, &mut row_q);
        for j in 0..columns {
            row_scaled[j] = 0.0;
            if let Some(divisor) = divisors[j] {
                let new = row_x[j] / divisor;
                row_scaled[j] = factor * new;
                if own.contains(&j) {
                    row_q[j - own.start] = new;
                }
            }
        }
        super::convert::store(&row_q, &qs);
        super::convert::store(&row_scaled, &ss);
    }
}

#[cfg(test)]
mod tests {
    use tch::Tensor;

    use super::*;

    #[test]
    fn normalize_columns_dead_column_keeps_q() {
        let x = Tensor::from_slice(&[3.0_f64, 0.0, 1e-9, 4.0, 0.0, 0.0]).view([2, 3]);
        let q = Tensor::from_slice(&[9.0_f64, 8.0, 7.0, 6.0, 5.0, 4.0]).view([2, 3]);
        let (scaled, sums) = (q.zeros_like(), Tensor::zeros([3], (tch::Kind::Double, tch::Device::Cpu)));
        let slab = |t: &Tensor| Slab::of(t).unwrap();
        column_sums_of_squares(&slab(&x), 3, &slab(&sums)).unwrap();
        let area = |t: &Tensor, cols| slab(t).area(0, [2, cols], cols);
        normalize_columns(&slab(&x), &slab(&sums), 0.0, -2.0, (&area(&q, 3), 0..3), &slab(&scaled));
        assert_eq!(Vec::<f64>::try_from(q.view([-1])).unwrap(), [0.6, 8.0, 7.0, 0.8, 5.0, 4.0]);
        assert_eq!(Vec::<f64>::try_from(scaled.view([-1])).unwrap(), [-1.2, 0.0, 0.0, -1.6, 0.0, 0.0]);
        let q = Tensor::from_slice(&[8.0_f64, 7.0, 5.0, 4.0]).view([2, 2]);
        normalize_columns(&slab(&x), &slab(&sums), 0.0, 1.0, (&area(&q, 2), 0..2), &slab(&scaled));
        assert_eq!(Vec::<f64>::try_from(q.view([-1])).unwrap(), [0.6, 7.0, 0.8, 4.0]);
    }
}
