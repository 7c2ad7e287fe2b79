//! Encoding of stored elements: 8-bit values with a scale for each block, stochastic rounding, or float32 weights in two
//! halves.

use super::{DType, Device, FlatPtr};

/// Encoding of the elements of a tensor, by which a kernel reads and writes them.
#[derive(Clone, Debug)]
pub enum Encoding {
    /// 8-bit values with one scale for each block of a row.
    Blocks(Blocks),
    /// Numbers of 16 bits that are rounded stochastically.
    Rounding(Rounding),
    /// Float32 weights: the elements are their bfloat16 roundings, and here are the low halves of all of them, `I16`. A view
    /// of elements borrows their low halves too.
    Master(FlatPtr),
}

/// The blocks of a quantized tensor. Each row of `width` elements is split into blocks, and the last one may be short.
#[derive(Clone, Debug)]
pub struct Blocks {
    /// The absmax of each block, float32, by row. A view of quantized values borrows the scales of its blocks too.
    pub scales: FlatPtr,
    /// Elements of a row.
    pub width: usize,
    /// Elements of a block, a power of two.
    pub block: usize,
    /// Random bits for stochastic rounding; without them values are rounded to the nearest codebook entry.
    pub rounding: Option<Rounding>,
}

impl Blocks {
    /// The block that holds element `at`: its number, and the element after its last one.
    #[must_use]
    #[inline]
    pub fn block_at(&self, at: usize) -> (usize, usize) {
        // Divisions are slow compared with the work on a block.
        let bits = self.block.trailing_zeros();
        let (row, col) = (at / self.width, at % self.width);
        let (in_row, here) = ((self.width + self.block - 1) >> bits, col >> bits);
        (row * in_row + here, row * self.width + ((here + 1) << bits).min(self.width))
    }

    /// Address of the scales of `count` blocks from number `first` on, for a kernel of a device; none where there are
    /// fewer.
    #[must_use]
    pub fn scales_address(&self, first: usize, count: usize) -> Option<usize> {
        let inside = first + count <= self.scales.len() && self.scales.dtype() == DType::F32;
        inside.then(|| self.scales.address() + first * DType::F32.bytes())
    }

    /// The scale of a block, in memory of the host; none where there is none.
    pub(super) fn scale(&self, number: usize) -> Option<*mut f32> {
        let Self { scales, .. } = self;
        let there = number < scales.len() && scales.dtype() == DType::F32 && scales.device() == Device::Cpu;
        there.then(|| scales.pointer::<f32>().wrapping_add(number))
    }

    /// The last end of a block that is at most `most` elements behind `start`, a beginning of one; the end of the first
    /// block where none is.
    #[must_use]
    #[inline]
    pub fn cut(&self, start: usize, most: usize) -> usize {
        let (row, col) = ((start + most) / self.width, (start + most) % self.width);
        let end = row * self.width + (col & !(self.block - 1));
        if end > start { end } else { self.block_at(start).1 }
    }
}

/// Random bits for the elements of a tensor: a function of `key` and of an element's position in the whole tensor.
#[derive(Clone, Debug)]
pub struct Rounding {
    /// Names the stream of random numbers: that of the parameter and the step, and that of the tensor among those.
    pub key: [u32; 2],
    /// Positions of the elements in the whole tensor.
    pub places: Places,
    /// True for a second moment: a positive number never becomes 0.
    pub stays_positive: bool,
}

/// The spans that a kernel of a device takes.
pub const MOST_SPANS: usize = 4;

/// Size, start and length of a part of a dimension.
pub type Span = (usize, usize, usize);

/// Positions of the stored elements of a tensor in the whole one, both in row-major order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Places {
    /// The number of the first element of each piece, and how the piece lies in the whole: by dimension, where one that is not
    /// sharded counts as one with the one before.
    pieces: Vec<(usize, Vec<Span>)>,
}

impl Places {
    /// The part of a tensor of shape `shape` that has start and length `spans` by dimension.
    #[must_use]
    pub fn new(shape: &[usize], spans: &[(usize, usize)]) -> Self {
        let mut merged: Vec<Span> = Vec::new();
        for (&size, &(start, len)) in shape.iter().zip(spans) {
            match merged.last_mut() {
                Some(last) if len == size => *last = (last.0 * size, last.1 * size, last.2 * size),
                _ => merged.push((size, start, len)),
            }
        }
        Self { pieces: vec![(0, merged)] }
    }

    /// Positions of matrices one after the other. Each matrix gives where its elements are in the whole: offset, rows,
    /// columns and row stride.
    #[must_use]
    pub fn of_matrices(matrices: impl IntoIterator<Item = [usize; 4]>) -> Self {
        let (mut pieces, mut first) = (Vec::new(), 0);
        for [offset, rows, cols, stride] in matrices.into_iter().filter(|[_, rows, cols, _]| rows * cols > 0)
        {
            let start = offset / stride.max(1);
            let all = (start + rows, start, rows);
            pieces.push((first, vec![all, (stride, offset % stride.max(1), cols)]));
            first += rows * cols;
        }
        Self { pieces }
    }

    /// The piece with element `at`: the number of its first element, size, start and length by dimension, and the number of the
    /// first element behind it, if there are more.
    #[must_use]
    #[inline]
    pub fn piece(&self, at: usize) -> (usize, &[Span], Option<usize>) {
        let next = self.pieces.partition_point(|(first, _)| *first <= at);
        let (first, spans) = self
            .pieces
            .get(next.saturating_sub(1))
            .map_or((0, [].as_slice()), |(first, spans)| (*first, spans));
        (first, spans, self.pieces.get(next).map(|(first, _)| *first))
    }

    /// The most dimensions that a piece has.
    #[must_use]
    pub fn depth(&self) -> usize {
        self.pieces.iter().map(|(_, spans)| spans.len()).max().unwrap_or(0)
    }

    /// The position of stored element `at` in the whole tensor, and how many elements from it on lie together there.
    #[must_use]
    pub fn find(&self, at: usize) -> (u64, usize) {
        let (first, spans, _) = self.piece(at);
        let at = at - first;
        let (mut rest, mut step, mut place) = (at, 1, 0);
        for &(size, start, len) in spans.iter().rev() {
            place += (start + rest % len.max(1)) * step;
            rest /= len.max(1);
            step *= size;
        }
        let run = spans.last().map_or(1, |&(_, _, len)| len.max(1));
        (place as u64, run - at % run)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_any_width_cover_each_row_by_itself() {
        for (width, block) in [(1, 8), (7, 8), (8, 8), (9, 8), (20, 8), (257, 256), (513, 256)] {
            let blocks = Blocks { scales: FlatPtr::EMPTY, width, block, rounding: None };
            let (mut at, mut number) = (0, 0);
            while at < 3 * width {
                let (found, end) = blocks.block_at(at);
                let len = (width - at % width).min(block);
                assert_eq!((found, end), (number, at + len), "{width} {block} {at}");
                for most in [len, len + 1, 40, 600] {
                    let cut = blocks.cut(at, most);
                    assert!(cut == end || cut <= at + most);
                    assert!(cut.is_multiple_of(width) || (cut % width).is_multiple_of(block));
                    let next = blocks.block_at(cut).1;
                    assert!(
                        most < len || next > at + most,
                        "{cut} is not the last end within {most} of {at}"
                    );
                }
                (at, number) = (end, number + 1);
            }
        }
    }

    #[test]
    fn places_any_cut_equal_the_definition() {
        for (shape, spans) in [
            (vec![], vec![]),
            (vec![5], vec![(2, 3)]),
            (vec![4, 6], vec![(1, 2), (0, 6)]),
            (vec![4, 6], vec![(0, 4), (2, 3)]),
            (vec![3, 4, 5], vec![(1, 2), (0, 4), (1, 3)]),
            (vec![3, 4, 5, 2], vec![(0, 3), (2, 2), (1, 3), (1, 1)]),
        ] {
            let places = Places::new(&shape, &spans);
            let count: usize = spans.iter().map(|(_, len)| len).product();
            let expected = |at: usize| {
                let (mut rest, mut step, mut place) = (at, 1, 0);
                for d in (0..shape.len()).rev() {
                    let (start, len): (usize, usize) = spans[d];
                    place += (start + rest % len) * step;
                    (rest, step) = (rest / len, step * shape[d]);
                }
                place as u64
            };
            for at in 0..count {
                let (place, run) = places.find(at);
                assert_eq!(place, expected(at));
                assert!((at..(at + run).min(count)).all(|i| expected(i) == place + (i - at) as u64));
            }
        }
    }

    #[test]
    fn places_of_matrices_equal_the_definition() {
        // In rows of 10: all of rows 3 and 4, columns 2 to 4 of rows 0 and 1, nothing, column 9 of row 7.
        let matrices = [[30, 2, 10, 10], [2, 2, 3, 10], [0, 0, 5, 10], [79, 1, 1, 10]];
        let expected: Vec<u64> = (30..50).chain([2, 3, 4, 12, 13, 14, 79]).collect();
        let places = Places::of_matrices(matrices);
        for (at, &place) in expected.iter().enumerate() {
            let (found, run) = places.find(at);
            assert_eq!(found, place, "{at}");
            let together = expected[at..].iter().zip(place..).take_while(|(a, b)| **a == *b).count();
            assert!(run >= 1 && run <= together, "{at}: {run} of {together}");
        }
        assert_eq!((places.piece(19).2, places.piece(20).0, places.piece(26).2), (Some(20), 20, None));
        assert_eq!(places.depth(), 2);
    }
}
