//! The bytes of a strided tensor, and whether two tensors share one.

use tch::Tensor;

/// Bytes of a tensor's elements: runs without a gap, at regular distances.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Elements {
    start: usize,
    /// Bytes of a run.
    run: usize,
    /// Distance in bytes and number of runs, of runs of runs, and so on; distances ascend. Empty for one run.
    repeats: Vec<(usize, usize)>,
}

impl Elements {
    /// Bytes without a gap; none where there are none.
    #[must_use]
    pub fn solid(start: usize, bytes: usize) -> Option<Self> {
        (start > 0 && bytes > 0).then_some(Self { start, run: bytes, repeats: Vec::new() })
    }

    /// The bytes of a strided tensor's elements; none where there are none.
    #[must_use]
    pub fn of(tensor: &Tensor) -> Option<Self> {
        let item = tensor.kind().elt_size_in_bytes();
        if tensor.is_contiguous() {
            return Self::solid(address_of(tensor), tensor.numel() * item);
        }
        let sizes = tensor.size();
        let steps = tensor.stride().into_iter().map(|step| usize::try_from(step).unwrap_or(0) * item);
        let dims = steps.zip(sizes.into_iter().map(|size| usize::try_from(size).unwrap_or(0)));
        Self::strided(address_of(tensor), item, dims.collect())
    }

    /// Returns elements of `item` bytes with the strides of dimensions, which are given with their sizes in any order.
    fn strided(start: usize, item: usize, mut dims: Vec<(usize, usize)>) -> Option<Self> {
        let mut found = Self::solid(start, item)?;
        if dims.iter().any(|(_, size)| *size == 0) {
            return None;
        }
        dims.retain(|(_, size)| *size > 1);
        dims.sort_unstable();
        for (step, size) in dims {
            match found.repeats.last_mut() {
                None if step == found.run => found.run *= size,
                Some((last, count)) if step == *last * *count => *count *= size,
                _ => found.repeats.push((step, size)),
            }
        }
        Some(found)
    }

    /// The first byte, and the one behind the last.
    #[must_use]
    pub fn bounds(&self) -> [usize; 2] {
        let reach: usize = self.repeats.iter().map(|(step, count)| step * (count - 1)).sum();
        [self.start, self.start + reach + self.run]
    }

    /// Tests whether two tensors share a byte. Where that is not found by `cuts` cuts they count as if they did.
    #[must_use]
    pub fn share(&self, other: &Self, cuts: &mut usize) -> bool {
        let ([start, end], [begin, stop]) = (self.bounds(), other.bounds());
        if end <= begin || stop <= start || self.in_other_columns(other) {
            return false;
        }
        if (self.repeats.is_empty() && other.repeats.is_empty()) || *cuts == 0 {
            return true;
        }
        *cuts -= 1;
        let first = other.repeats.is_empty() || (!self.repeats.is_empty() && end - start >= stop - begin);
        let (cut, whole) = if first { (self, other) } else { (other, self) };
        cut.halves().iter().any(|half| half.share(whole, cuts))
    }

    /// Tests whether the runs of both are disjoint modulo the greatest common divisor of all distances, as columns of one
    /// matrix are.
    fn in_other_columns(&self, other: &Self) -> bool {
        let steps = self.repeats.iter().chain(&other.repeats).map(|(step, _)| *step);
        let width = steps.fold(0, greatest_common_divisor);
        if width == 0 {
            return false;
        }
        let ahead = (other.start % width + width - self.start % width) % width;
        self.run <= ahead && ahead + other.run <= width
    }

    /// Two parts, cut along the largest distance.
    fn halves(&self) -> [Self; 2] {
        let mut halves = [self.clone(), self.clone()];
        if let Some((step, count)) = self.repeats.last() {
            let first = count / 2;
            halves[1].start += first * step;
            for (half, own) in halves.iter_mut().zip([first, count - first]) {
                half.repeats.pop();
                if own > 1 {
                    half.repeats.push((*step, own));
                }
            }
        }
        halves
    }
}

fn greatest_common_divisor(a: usize, b: usize) -> usize {
    if b == 0 { a } else { greatest_common_divisor(b, a % b) }
}

/// Address of the first element of a tensor.
#[must_use]
pub fn address_of(tensor: &Tensor) -> usize {
    tensor.data_ptr().addr()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// The bytes one by one.
    fn bytes(item: usize, start: usize, dims: &[(usize, usize)]) -> BTreeSet<usize> {
        let mut all: Vec<usize> = vec![start];
        for (step, size) in dims {
            all = all.iter().flat_map(|at| (0..*size).map(move |i| at + i * step)).collect();
        }
        all.iter().flat_map(|at| *at..at + item).collect()
    }

    #[test]
    fn tensors_share_a_byte_where_their_bytes_say_so() {
        let mut state = 7_u64;
        let mut draw = |n: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            usize::try_from(state >> 33).unwrap() % n
        };
        let mut shared = 0;
        for _ in 0..4000 {
            let mut one = || {
                let dims: Vec<_> = (0..=draw(3)).map(|_| (1 + draw(40), 1 + draw(5))).collect();
                (1 + draw(2) * 3, 1 + draw(120), dims)
            };
            let [(a_item, a_start, a), (b_item, b_start, b)] = [one(), one()];
            let [left, right] = [bytes(a_item, a_start, &a), bytes(b_item, b_start, &b)];
            let wanted = !left.is_disjoint(&right);
            let [x, y] = [(a_item, a_start, a), (b_item, b_start, b)]
                .map(|(item, start, dims)| Elements::strided(start, item, dims).unwrap());
            assert_eq!(x.bounds(), [*left.first().unwrap(), left.last().unwrap() + 1]);
            assert_eq!(x.share(&y, &mut { 1 << 20 }), wanted, "{x:?} {y:?}");
            shared += usize::from(wanted);
        }
        assert!((800..3600).contains(&shared), "{shared}");
    }

    #[test]
    fn columns_of_a_large_matrix_are_distinct_by_their_place_alone() {
        let columns =
            |start: usize| Elements::strided(64 + 4 * start, 4, vec![(4 << 20, 1 << 20), (4, 1 << 19)]);
        let [a, b] = [columns(0), columns(1 << 19)].map(Option::unwrap);
        assert!(!a.share(&b, &mut 0));
        assert!(a.share(&columns((1 << 19) - 1).unwrap(), &mut { 1 << 20 }));
    }
}
