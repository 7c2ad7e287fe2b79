//! Sums over elements, accumulated in float64.

use crate::tensor::{FlatView, FlatViewMut};

/// Σ x² over all elements.
#[must_use]
pub(in crate::kernels) fn sum_of_squares(x: &FlatView<'_>) -> f64 {
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
pub(in crate::kernels) fn values(x: &FlatView<'_>) -> Vec<f64> {
    let mut wide = vec![0.0; x.len()];
    for start in (0..x.len()).step_by(super::TILE) {
        let end = (start + super::TILE).min(x.len());
        super::convert::load(&x.part(start, super::TILE), &mut wide[start..end]);
    }
    wide
}

/// Sets all elements, as many as there are values.
pub(in crate::kernels) fn set_values(values: &[f64], x: FlatViewMut<'_>) {
    debug_assert_eq!(values.len(), x.len());
    for (values, mut tile) in values.chunks(super::TILE).zip(x.chunks(super::TILE)) {
        super::convert::store(values, &mut tile);
    }
}

/// Tests whether every element is zero.
#[must_use]
pub fn only_zeros(x: &FlatView<'_>) -> bool {
    (0..x.len()).step_by(super::TILE).all(|start| sum_of_squares(&x.part(start, super::TILE)) == 0.0)
}
