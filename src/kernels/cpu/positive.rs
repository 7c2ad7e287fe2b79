//! The code book of numbers that are not negative: floating-point numbers of few bits, from 0 to 1.
//!
//! Code 255 is 1. From 1 down to 2⁻² there are 32 entries for each power of two, down to 2⁻¹⁶ 8, below that 4; code 1 is
//! 1.5·2⁻³⁶ and code 0 is 0. They are the float32 numbers with few leading bits, so what is between two of them is decided
//! by the bits that are cut off: a random number, or half of the distance, is added to those. A positive number never gets
//! code 0.

use super::Real;

/// The entries from a power of two on: of a number's bits `cut` are cut off, and the rest, counted from `base`, is the code.
pub(in crate::kernels) struct Octaves {
    /// The bits of the first one.
    pub from: u32,
    /// Bits that are cut off.
    pub cut: u32,
    /// The bits that are left, less the code.
    pub base: u32,
}

impl Octaves {
    /// The entries from 2 to the power of `-low` up to that of `-high`, which has this code.
    const fn new(low: u32, high: u32, code: u32, cut: u32) -> Self {
        let [from, last] = [(127 - low) << 23, (127 - high) << 23];
        Self { from, cut, base: (last >> cut) - code }
    }
}

/// Powers of two by their number of entries: 32, 8 and 4 each.
pub(in crate::kernels) const OCTAVES: [Octaves; 3] =
    [Octaves::new(2, 0, 255, 18), Octaves::new(16, 2, 191, 20), Octaves::new(127, 16, 79, 21)];

/// The entries in ascending order.
pub(in crate::kernels) const VALUES: [f32; 256] = {
    let mut values = [0.0; 256];
    let mut code = 1;
    while code < 256 {
        let mut part = OCTAVES.len();
        while part > 0 {
            part -= 1;
            let Octaves { from, cut, base } = OCTAVES[part];
            let bits = (code as u32 + base) << cut;
            if bits >= from {
                values[code] = f32::from_bits(bits);
            }
        }
        code += 1;
    }
    values
};

/// The code of a number that is at most about 1; `random` has 16 bits.
#[inline(always)]
#[allow(clippy::inline_always, clippy::cast_possible_truncation, clippy::cast_sign_loss)] // as the others; 8 bits
fn code(q: f32, random: u32) -> u8 {
    let [top, middle, low] = &OCTAVES;
    let bits = if q > 0.0 { q.to_bits() } else { 0 };
    // Half a unit of the random number makes its mean half of what is cut off.
    let rounded = |part: &Octaves| {
        let add = (random << (part.cut - 16)) | (1 << (part.cut - 17));
        (bits.wrapping_add(add) >> part.cut).wrapping_sub(part.base).cast_signed()
    };
    let few = if bits >= middle.from { rounded(middle) } else { rounded(low) };
    let found = if bits >= top.from { rounded(top) } else { few };
    let least = i32::from(bits > 0);
    found.clamp(least, if bits > 0 { 255 } else { 0 }) as u8
}

/// The codes of numbers `x` as `(x·power)·inverse` with their random numbers.
#[inline(always)]
#[allow(clippy::inline_always)] // inside its caller's instruction set
pub(super) fn encode<C: Real>(values: &[C], (power, inverse): (f32, f32), random: &[u16], codes: &mut [u8]) {
    for ((to, x), r) in codes.iter_mut().zip(values).zip(random) {
        *to = code((x.to_f32() * power) * inverse, u32::from(*r));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_the_powers_of_two_that_the_definition_says() {
        let mut expected = vec![1.0_f64];
        let mut size = 1.0;
        for entries in [32; 2].into_iter().chain([8; 14]).chain([4; 20]) {
            size /= 2.0;
            expected.extend((0..entries).rev().map(|i| size * (1.0 + f64::from(i) / f64::from(entries))));
        }
        expected.truncate(255);
        expected.push(0.0);
        expected.reverse();
        let values: Vec<_> = VALUES.iter().map(|x| f64::from(*x)).collect();
        assert_eq!(values, expected);
        assert_eq!(VALUES[1].to_bits(), (1.5_f32 * 2.0_f32.powi(-36)).to_bits());
    }

    #[test]
    fn codes_are_neighbours_with_the_mean_of_the_number() {
        for (at, pair) in VALUES.windows(2).enumerate().skip(1) {
            for share in [0.0, 0.125, 0.3, 0.5, 0.875] {
                let q = pair[0] + share * (pair[1] - pair[0]);
                let ups = (0..=u16::MAX).filter(|r| {
                    let found = usize::from(code(q, u32::from(*r)));
                    assert!(found == at || found == at + 1, "{q} {r} {found}");
                    found > at
                });
                let found = ups.count();
                assert!(
                    (f64::from(u32::try_from(found).unwrap_or(0)) / 65536.0 - f64::from(share)).abs() < 1e-4
                );
            }
        }
    }

    #[test]
    fn codes_of_tiny_numbers_are_not_zero_and_none_is_above_the_largest() {
        for r in [0, 1, 0x8000, 0xffff] {
            for q in [f32::from_bits(1), 1e-30, 1e-12, VALUES[1] / 2.0] {
                assert_eq!(code(q, r), 1, "{q}");
            }
            assert_eq!([0.0, -0.0, -1.0].map(|q| code(q, r)), [0; 3]);
            let near = [1.0, 1.0_f32.next_up(), 1.0_f32.next_down(), 1.001];
            assert_eq!(near.map(|q| code(q, r)), [255; 4]);
        }
    }
}
