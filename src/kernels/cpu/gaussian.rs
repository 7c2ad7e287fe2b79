//! Normal numbers from counters. Box–Muller with polynomial logarithm, sine and cosine made of single-precision additions
//! and multiplications, so every machine and every slicing of a stream gives the same bits.

use super::{Real, isa, philox};
use crate::threads;

/// Numbers of one block of the generator.
const LANES: u64 = 4;
/// Blocks computed together; the loops over them vectorize.
const WIDTH: usize = 16;
/// Numbers that one task makes.
const PIECE: usize = 1 << 14;

/// Writes the standard normal numbers of a stream (`stream`) from number `first` on, each at most 6.8 in absolute value.
pub fn gaussian(out: &mut [f32], stream: [u32; 4], first: u64) {
    threads::chunks(out, PIECE, |piece, part| {
        let first = first.wrapping_add((piece * PIECE) as u64);
        isa::vectorised::<f32, _>(Numbers { out: part, stream, first });
    });
}

/// Numbers of a stream.
struct Numbers<'a> {
    out: &'a mut [f32],
    stream: [u32; 4],
    first: u64,
}

impl isa::Work for Numbers<'_> {
    type Out = ();

    #[inline(always)]
    #[allow(clippy::inline_always)] // must be compiled inside its caller's instruction set
    fn run<C: Real>(self) {
        body(self.out, self.stream, self.first);
    }
}

#[inline(always)]
#[allow(clippy::inline_always)] // must be compiled inside its caller's instruction set
fn body(out: &mut [f32], stream: [u32; 4], first: u64) {
    let (mut index, mut rest) = (first, out);
    while !rest.is_empty() {
        let skip = (index % LANES) as usize;
        let numbers = normals(stream, index / LANES);
        let count = (numbers.len() - skip).min(rest.len());
        let (now, later) = rest.split_at_mut(count);
        now.copy_from_slice(&numbers[skip..skip + count]);
        index = index.wrapping_add(count as u64);
        rest = later;
    }
}

/// The normals of `WIDTH` blocks, from `first_block` on.
#[inline(always)]
#[allow(clippy::inline_always)] // inside its caller's instruction set
#[expect(clippy::cast_possible_truncation, reason = "the two words of a 64-bit number")]
fn normals([key0, key1, high0, high1]: [u32; 4], first_block: u64) -> [f32; 4 * WIDTH] {
    let mut bits = [[0_u32; WIDTH]; 4];
    for lane in 0..WIDTH {
        let block = first_block.wrapping_add(lane as u64);
        let values = philox([block as u32, (block >> 32) as u32, high0, high1], [key0, key1]);
        for (row, value) in bits.iter_mut().zip(values) {
            row[lane] = value;
        }
    }
    let mut rows = [[0.0_f32; WIDTH]; 4];
    for lane in 0..WIDTH {
        (rows[0][lane], rows[1][lane]) = box_muller(bits[0][lane], bits[1][lane]);
    }
    for lane in 0..WIDTH {
        (rows[2][lane], rows[3][lane]) = box_muller(bits[2][lane], bits[3][lane]);
    }
    let mut out = [0.0; 4 * WIDTH];
    for (lane, four) in out.chunks_exact_mut(4).enumerate() {
        four.copy_from_slice(&[rows[0][lane], rows[1][lane], rows[2][lane], rows[3][lane]]);
    }
    out
}

/// `sqrt(-2 ln u) (cos 2πv, sin 2πv)` with `u = (x + 1/2) / 2³²` and `v = y / 2³²`.
#[inline(always)]
#[allow(clippy::inline_always)] // must be compiled inside its caller's instruction set
#[expect(clippy::cast_precision_loss, reason = "u and the angle keep 24 bits")]
fn box_muller(x: u32, y: u32) -> (f32, f32) {
    let radius = (-2.0 * ln_unit((x as f32 + 0.5) * (1.0 / 4_294_967_296.0))).sqrt();
    // Nearest quarter turn, and the rest as an angle in [-π/4, π/4].
    let quarter = y.wrapping_add(1 << 29) >> 30;
    let angle =
        (y.wrapping_sub(quarter << 30).cast_signed()) as f32 * (std::f32::consts::TAU / 4_294_967_296.0);
    let (sin, cos) = sin_cos_eighth(angle);
    let (s, c) = if quarter & 1 == 0 { (sin, cos) } else { (cos, sin) };
    let cos = if quarter == 1 || quarter == 2 { -c } else { c };
    let sin = if quarter & 2 == 0 { s } else { -s };
    (radius * cos, radius * sin)
}

/// Natural logarithm on `(0, 1]`, at most 0, relative error about 1e-7.
#[inline(always)]
#[allow(clippy::inline_always)] // must be compiled inside its caller's instruction set
fn ln_unit(u: f32) -> f32 {
    // u = mantissa * 2^exponent with the mantissa in [sqrt(1/2), sqrt(2)).
    let bits = u.to_bits().wrapping_add(0x3F80_0000 - 0x3F35_04F3);
    #[expect(clippy::cast_precision_loss, reason = "an exponent has 8 bits")]
    let exponent = ((bits >> 23).cast_signed() - 127) as f32;
    let f = f32::from_bits((bits & 0x007F_FFFF) + 0x3F35_04F3) - 1.0;
    // ln(1 + f) = 2 artanh(s) with s = f / (2 + f), |s| < 0.172: the next term of the series is below 4e-9.
    let s = f / (2.0 + f);
    let square = s * s;
    let tail = square * (1.0 / 3.0 + square * (0.2 + square * (1.0 / 7.0 + square * (1.0 / 9.0))));
    (exponent * std::f32::consts::LN_2 + 2.0 * (s + s * tail)).min(0.0)
}

/// Sine and cosine of an angle in `[-π/4, π/4]` by Taylor series, absolute error below 1e-7.
#[inline(always)]
#[allow(clippy::inline_always)] // must be compiled inside its caller's instruction set
fn sin_cos_eighth(angle: f32) -> (f32, f32) {
    let square = angle * angle;
    let sin = 1.0 - square / 6.0 * (1.0 - square / 20.0 * (1.0 - square / 42.0 * (1.0 - square / 72.0)));
    let cos = 1.0 - square / 2.0 * (1.0 - square / 12.0 * (1.0 - square / 30.0 * (1.0 - square / 56.0)));
    (angle * sin, cos)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn box_muller_agrees_with_double_precision() {
        let corners = [0, 1, 2, 1 << 29, (1 << 29) - 1, 1 << 30, 3 << 30, 1 << 31, u32::MAX - 1, u32::MAX];
        let spread = (0..4000_u32).map(|i| i.wrapping_mul(0x9E37_79B9));
        let samples: Vec<u32> = corners.into_iter().chain(spread).collect();
        for (i, &x) in samples.iter().enumerate() {
            let y = samples[(i * 7 + 3) % samples.len()];
            #[expect(clippy::cast_precision_loss, reason = "the same 24-bit uniform")]
            let u = f64::from((x as f32 + 0.5) * (1.0 / 4_294_967_296.0));
            let radius = (-2.0 * u.ln()).sqrt();
            let angle = std::f64::consts::TAU * f64::from(y) / 4_294_967_296.0;
            let (z0, z1) = box_muller(x, y);
            assert!((f64::from(z0) - radius * angle.cos()).abs() < 2e-6, "{x} {y}: {z0}");
            assert!((f64::from(z1) - radius * angle.sin()).abs() < 2e-6, "{x} {y}: {z1}");
            assert!(z0.abs() < 6.8 && z1.abs() < 6.8);
        }
    }
}
