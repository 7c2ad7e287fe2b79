//! Encoding of stored elements: 8-bit codes with a scale for each block, or stochastic rounding.

use super::FlatView;

/// How a kernel reads and writes the elements of a tensor.
#[derive(Clone, Debug)]
pub enum Encoding {
    /// Codes with one scale for each block of a row.
    Blocks(Blocks),
    /// Numbers of 16 bits that are rounded at random.
    Rounding(Rounding),
}

/// The blocks of a tensor of codes: each row of `width` elements is cut into blocks, of which the last may be short.
#[derive(Clone, Debug)]
pub struct Blocks {
    /// The largest absolute value of each block, float32, by row.
    pub scales: FlatView,
    /// Elements of a row.
    pub width: usize,
    /// Elements of a block, a power of two.
    pub block: usize,
}

impl Blocks {
    /// The block that holds element `at`: its number, and the element after its last one.
    #[must_use]
    #[inline]
    pub fn block_at(&self, at: usize) -> (usize, usize) {
        // Divisions take long beside the work on a block.
        let bits = self.block.trailing_zeros();
        let (row, col) = (at / self.width, at % self.width);
        let (in_row, here) = ((self.width + self.block - 1) >> bits, col >> bits);
        (row * in_row + here, row * self.width + ((here + 1) << bits).min(self.width))
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

/// Random bits for the elements of a tensor: a function of `key` and of an element's place in the whole tensor.
#[derive(Clone, Debug)]
pub struct Rounding {
    /// Names the stream of random numbers.
    pub key: [u32; 4],
    /// Where the elements are in the whole tensor.
    pub places: Places,
}

/// The spans that a kernel of a device takes.
pub const MOST_SPANS: usize = 4;

/// Where the elements of the stored part of a tensor are in the whole one, both in row-major order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Places {
    /// By dimension: size, start and length of the part. A dimension that is not cut counts as one with the one before.
    spans: Vec<(usize, usize, usize)>,
}

impl Places {
    /// The part of a tensor of shape `shape` that has start and length `spans` by dimension.
    #[must_use]
    pub fn new(shape: &[usize], spans: &[(usize, usize)]) -> Self {
        let mut merged: Vec<(usize, usize, usize)> = Vec::new();
        for (&size, &(start, len)) in shape.iter().zip(spans) {
            match merged.last_mut() {
                Some(last) if len == size => *last = (last.0 * size, last.1 * size, last.2 * size),
                _ => merged.push((size, start, len)),
            }
        }
        Self { spans: merged }
    }

    /// Size, start and length of the part by dimension, those that are not cut with the ones before them.
    #[must_use]
    pub fn spans(&self) -> &[(usize, usize, usize)] {
        &self.spans
    }

    /// The place of stored element `at` in the whole tensor, and how many elements from it on lie together there.
    #[must_use]
    pub fn find(&self, at: usize) -> (u64, usize) {
        let (mut rest, mut step, mut place) = (at, 1, 0);
        for &(size, start, len) in self.spans.iter().rev() {
            place += (start + rest % len.max(1)) * step;
            rest /= len.max(1);
            step *= size;
        }
        let run = self.spans.last().map_or(1, |&(_, _, len)| len.max(1));
        (place as u64, run - at % run)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_any_width_cover_each_row_by_itself() {
        for (width, block) in [(1, 8), (7, 8), (8, 8), (9, 8), (20, 8), (257, 256), (513, 256)] {
            let blocks = Blocks { scales: FlatView::EMPTY, width, block };
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
}
