//! Copies of rectangles between matrix views, and sums of messages.

use crate::tensor::{FlatView, FlatViewMut, MatrixView, MatrixViewMut};
use crate::threads;

/// Elements from which copies are spread over threads.
const PARALLEL: usize = 1 << 18;

/// Elements to copy: two matrices of one shape and type.
#[derive(Debug)]
pub struct Copy<'a> {
    /// The source.
    pub from: MatrixView<'a>,
    /// The destination.
    pub to: MatrixViewMut<'a>,
}

impl<'a> Copy<'a> {
    /// All elements of a view, to one of the same length.
    #[must_use]
    pub fn run(from: FlatView<'a>, to: FlatViewMut<'a>) -> Self {
        let cols = from.len().min(to.len());
        Self { from: from.matrix(0, [1, cols], cols), to: to.into_matrix(0, [1, cols], cols) }
    }
}

/// Messages of all ranks, of equal length, one after the other.
#[derive(Clone, Copy, Debug)]
pub struct Messages<'a> {
    /// The memory of all.
    pub all: FlatView<'a>,
    /// Elements from one to the next.
    pub pitch: usize,
    /// Number of messages.
    pub count: usize,
}

/// Carries out copies.
pub(crate) fn copy(mut copies: Vec<Copy<'_>>) {
    let total: usize = copies.iter().map(|c| c.from.shape().iter().product::<usize>()).sum();
    if total < PARALLEL {
        copies.iter_mut().for_each(one);
    } else {
        threads::chunks(&mut copies, 1, |_, copies| copies.iter_mut().for_each(one));
    }
}

fn one(Copy { from, to }: &mut Copy<'_>) {
    if let Some(from) = from.flat().filter(|_| to.is_flat()) {
        return to.all().copy_from(from);
    }
    for (row, mut to) in to.reborrow().into_rows().enumerate() {
        to.copy_from(from.row(row));
    }
}

/// `to = factor · Σ messages`, added in order in float64.
pub(crate) fn sum(messages: &Messages<'_>, factor: f64, to: FlatViewMut<'_>) {
    let Messages { all, pitch, count } = *messages;
    let elements = to.len() * count;
    let mut tiles: Vec<_> = to.chunks(super::TILE).collect();
    let one = |tile: usize, out: &mut FlatViewMut<'_>| {
        let (mut total, mut term) = ([0.0_f64; super::TILE], [0.0_f64; super::TILE]);
        let (start, n) = (tile * super::TILE, out.len());
        for rank in 0..count {
            super::convert::load(&all.part(rank * pitch + start, n), &mut term[..n]);
            total[..n].iter_mut().zip(&term).for_each(|(sum, x)| *sum += x);
        }
        total[..n].iter_mut().for_each(|x| *x *= factor);
        super::convert::store(&total[..n], out);
    };
    if elements < PARALLEL {
        tiles.iter_mut().enumerate().for_each(|(tile, out)| one(tile, out));
    } else {
        threads::chunks(&mut tiles, 1, |tile, out| out.iter_mut().for_each(|out| one(tile, out)));
    }
}

#[cfg(test)]
mod tests {
    use tch::Tensor;

    use super::*;
    use crate::tensor::test_views::{view, view_mut};

    #[test]
    fn copy_rectangle_lands_where_it_belongs() {
        let from = Tensor::from_slice(&[1.0_f32, 2.0, 3.0, 4.0]);
        let to = Tensor::zeros([3, 4], (tch::Kind::Float, tch::Device::Cpu));
        let (source, target) = (view(&from).matrix(0, [2, 2], 2), view_mut(&to).into_matrix(5, [2, 2], 4));
        copy(vec![Copy { from: source, to: target }]);
        let wanted = [0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 2.0, 0.0, 0.0, 3.0, 4.0, 0.0];
        assert_eq!(Vec::<f32>::try_from(to.view([-1])).unwrap(), wanted);
    }

    #[test]
    fn sum_many_tiles_equals_the_tensors_mean() {
        let parts = Tensor::randn([3, 5000], (tch::Kind::Float, tch::Device::Cpu));
        let to = Tensor::zeros([5000], (tch::Kind::Float, tch::Device::Cpu));
        sum(&Messages { all: view(&parts), pitch: 5000, count: 3 }, 1.0 / 3.0, view_mut(&to));
        let wanted = parts.to_kind(tch::Kind::Double).mean_dim(0, false, None);
        // Means of three normals are below 4, where float32 rounds by at most 1.2e-7.
        assert!(f64::try_from((to.to_kind(tch::Kind::Double) - wanted).abs().max()).unwrap() < 1.3e-7);
    }
}
