//! The diagonal of symmetric products, which is far larger than the rest: rounded, it is most of their error.

use half::bf16;

use super::super::convert::widen;
use super::{Operand, Product};
use crate::tensor::{DType, FlatView, Strided};

/// Elements of the diagonal that are looked at.
const SAMPLES: usize = 8;
/// Neighbours among them, which share lines of the cache where the rows of an operand are columns in memory.
const RUN: usize = 4;
/// Sums that are gathered side by side.
const LANES: usize = 16;

impl Product<'_> {
    /// The median of some elements that the diagonal of a square product will have, as a number of its type. Zero where it
    /// is not finite, and in types other than bfloat16, whose digits suffice without.
    #[must_use]
    pub fn usual_diagonal(&self, operands: [&Operand<'_>; 2]) -> f64 {
        let [rows, cols, _] = self.size;
        if self.out.dtype() != DType::BF16 || rows != cols || rows == 0 {
            return 0.0;
        }
        let places = samples(rows);
        let mut found = dots(operands, &places);
        for (sum, place) in found.iter_mut().zip(places) {
            let at = place * (self.stride + 1);
            let old = (self.keep != 0.0).then_some((self.keep, self.out.view()));
            let added = old.into_iter().chain(self.add.iter().copied());
            let added: f64 = added.map(|(weight, x)| weight * f64::from(number(&x, at))).sum();
            *sum = self.factor * *sum + added + self.diagonal;
        }
        found.sort_unstable_by(f64::total_cmp);
        let median = f64::midpoint(found[SAMPLES / 2 - 1], found[SAMPLES / 2]);
        let rounded = f64::from(bf16::from_f64(median));
        if rounded.is_finite() { rounded } else { 0.0 }
    }
}

/// The sum of the diagonal of a matrix of `k` rows in bfloat16.
#[must_use]
pub fn trace(x: &FlatView<'_>, k: usize) -> f64 {
    x.slice::<bf16>().iter().step_by(k + 1).map(|&x| f64::from(x)).sum()
}

/// Rows out of `count`, in two runs.
fn samples(count: usize) -> [usize; SAMPLES] {
    std::array::from_fn(|i| ((2 * (i / RUN) + 1) * count / 4 + i % RUN).min(count - 1))
}

/// `Σ_p a_ip b_ip` of some rows `i` of both operands, in float32.
fn dots([left, right]: [&Operand<'_>; 2], places: &[usize; SAMPLES]) -> [f64; SAMPLES] {
    let inner = left.inner;
    if [left, right].iter().all(|x| x.steps[1] == 1) {
        return places.map(|i| {
            let [a, b] = [left, right].map(|x| run(&x.x, i * x.steps[0], inner));
            f64::from(dot(a, b))
        });
    }
    let mut sums = [0.0_f32; SAMPLES];
    for p in 0..inner {
        for (sum, &i) in sums.iter_mut().zip(places) {
            let at = |x: &Operand<'_>| number(&x.x, i * x.steps[0] + p * x.steps[1]);
            *sum += widen(at(left)) * widen(at(right));
        }
    }
    sums.map(f64::from)
}

fn dot(a: &[bf16], b: &[bf16]) -> f32 {
    let mut lanes = [0.0_f32; LANES];
    let ((a, rest_of_a), (b, rest_of_b)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    for (a, b) in a.iter().zip(b) {
        for (lane, (&a, &b)) in lanes.iter_mut().zip(a.iter().zip(b)) {
            *lane += widen(a) * widen(b);
        }
    }
    let rest = rest_of_a.iter().zip(rest_of_b);
    lanes.iter().sum::<f32>() + rest.map(|(&a, &b)| widen(a) * widen(b)).sum::<f32>()
}

/// Neighbours in a row.
fn run<'a>(x: &Strided<'a>, first: usize, count: usize) -> &'a [bf16] {
    assert!(first + count <= x.len(), "a row beyond its matrix");
    // SAFETY: they are inside; the elements of a row are borrowed to be read (`Strided`).
    unsafe { std::slice::from_raw_parts(x.pointer::<bf16>().add(first), count) }
}

fn number(x: &Strided<'_>, at: usize) -> bf16 {
    run(x, at, 1)[0]
}
