//! Copies of rectangles between areas, and sums of messages.

use crate::tensor::FlatView;
use crate::threads;

/// Elements from which copies are spread over threads.
const PARALLEL: usize = 1 << 18;

/// `rows × cols` elements to copy: source and destination with the distances of their rows.
#[derive(Clone, Copy, Debug)]
pub struct Copy {
    /// First element to last, of the source's type.
    pub from: FlatView,
    /// Elements from one row of the source to the next.
    pub from_stride: usize,
    /// Of the same type as the source.
    pub to: FlatView,
    /// Elements from one row of the destination to the next.
    pub to_stride: usize,
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
}

impl Copy {
    /// All elements of a view, to one of the same length.
    #[must_use]
    pub fn run(from: FlatView, to: FlatView) -> Self {
        let cols = from.len().min(to.len());
        Self { from, from_stride: cols, to, to_stride: cols, rows: 1, cols }
    }
}

/// What each rank contributed: messages of equal length, one after the other.
#[derive(Clone, Copy, Debug)]
pub struct Messages {
    /// The memory of all.
    pub all: FlatView,
    /// Elements from one to the next.
    pub pitch: usize,
    /// How many.
    pub count: usize,
}

/// Carries out copies between areas that do not overlap.
pub(crate) fn copy(copies: &[Copy]) {
    let total: usize = copies.iter().map(|c| c.rows * c.cols).sum();
    if total < PARALLEL {
        copies.iter().for_each(one);
    } else {
        threads::each(copies.len(), |i| one(&copies[i]));
    }
}

fn one(copy: &Copy) {
    let Copy { from, from_stride, to, to_stride, rows, cols } = *copy;
    if from_stride == cols && to_stride == cols {
        from.part(0, rows * cols).copy_to(&to.part(0, rows * cols));
        return;
    }
    for row in 0..rows {
        from.part(row * from_stride, cols).copy_to(&to.part(row * to_stride, cols));
    }
}

/// `to = factor · Σ messages`, added in order in float64.
pub(crate) fn sum(messages: &Messages, factor: f64, to: &FlatView) {
    let Messages { all, pitch, count } = *messages;
    let tiles = to.len().div_ceil(super::TILE);
    let one = |tile: usize| {
        let (mut total, mut term) = ([0.0_f64; super::TILE], [0.0_f64; super::TILE]);
        let start = tile * super::TILE;
        let out = to.part(start, super::TILE);
        let n = out.len();
        for rank in 0..count {
            super::convert::load(&all.part(rank * pitch + start, n), &mut term[..n]);
            total[..n].iter_mut().zip(&term).for_each(|(sum, x)| *sum += x);
        }
        total[..n].iter_mut().for_each(|x| *x *= factor);
        super::convert::store(&total[..n], &out);
    };
    if to.len() * count < PARALLEL {
        (0..tiles).for_each(one);
    } else {
        threads::each(tiles, one);
    }
}

#[cfg(test)]
mod tests {
    use tch::Tensor;

    use super::*;

    #[test]
    fn copy_rectangle_lands_in_its_place() {
        let from = Tensor::from_slice(&[1.0_f32, 2.0, 3.0, 4.0]);
        let to = Tensor::zeros([3, 4], (tch::Kind::Float, tch::Device::Cpu));
        let (source, target) = (FlatView::of(&from).unwrap(), FlatView::of(&to).unwrap());
        let copies =
            [Copy { from: source, from_stride: 2, to: target.part(5, 7), to_stride: 4, rows: 2, cols: 2 }];
        copy(&copies);
        let wanted = [0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 2.0, 0.0, 0.0, 3.0, 4.0, 0.0];
        assert_eq!(Vec::<f32>::try_from(to.view([-1])).unwrap(), wanted);
    }

    #[test]
    fn sum_many_tiles_equals_the_tensors_mean() {
        let parts = Tensor::randn([3, 5000], (tch::Kind::Float, tch::Device::Cpu));
        let to = Tensor::zeros([5000], (tch::Kind::Float, tch::Device::Cpu));
        let all = FlatView::of(&parts).unwrap();
        sum(&Messages { all, pitch: 5000, count: 3 }, 1.0 / 3.0, &FlatView::of(&to).unwrap());
        let wanted = parts.to_kind(tch::Kind::Double).mean_dim(0, false, None);
        // Means of three normals stay below 4, where float32 is rounded by at most 1.2e-7.
        assert!(f64::try_from((to.to_kind(tch::Kind::Double) - wanted).abs().max()).unwrap() < 1.3e-7);
    }
}
