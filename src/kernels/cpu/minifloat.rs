//! The code books of 8-bit states: floating-point numbers of few bits, from 0 to 1.
//!
//! Entries are the float32 numbers with few bits behind the leading one. Their number for each power of two is fixed:
//!
//! | book | 1 | entries for each power of two | smallest |
//! |---|---|---|---|
//! | not negative | 255 | 32 from 1 down to 2⁻², 8 down to 2⁻¹⁶, then 4 | 1.5·2⁻³⁶ |
//! | of either sign | 127 | 32 from 1 down to 2⁻², 16 down to 2⁻³, 8 down to 2⁻⁴, then 2 | 2⁻²³ |
//!
//! The numbers stand in ascending order from 0 on. Of the two entries that a number lies between one is drawn so that the
//! mean is the number: a random number is added to the bits that are cut off. Half of their range instead gives the nearest
//! entry. Rounding to the nearest entry at each step would keep a moment for ever where a step changes it by less than half
//! of the distance of two entries.
//!
//! A positive number of the first book never becomes 0. One of the second that is below the smallest entry becomes 0 or
//! that entry.

use super::Real;

/// The code of 0 in the book of either sign, from which magnitudes are counted up and down. Code 255 is not used.
pub(in crate::kernels) const ZERO: u8 = 127;
/// The smallest number of the book of either sign, and what makes 2¹⁶ of it.
pub(in crate::kernels) const SMALLEST: f32 = 1.0 / 8_388_608.0;
pub(in crate::kernels) const TO_HALVES: f32 = 549_755_813_888.0; // 2³⁹

/// The entries from a power of two on: of a number's bits `cut` are cut off, and the rest, counted from `base`, is the
/// entry's number.
pub(in crate::kernels) struct Octaves {
    /// The bits of the first one.
    pub from: u32,
    /// Bits that are cut off.
    pub cut: u32,
    /// The bits that are left, less the number.
    pub base: u32,
}

impl Octaves {
    /// The entries from 2 to the power of `-low` up to that of `-high`, which has this number.
    const fn new(low: u32, high: u32, number: u32, cut: u32) -> Self {
        let [from, last] = [(127 - low) << 23, (127 - high) << 23];
        Self { from, cut, base: (last >> cut) - number }
    }

    /// The number of one of the two entries around a number with these bits; `random` has 16 bits.
    #[inline(always)]
    #[allow(clippy::inline_always)] // as the others
    const fn number(&self, bits: u32, random: u32) -> i32 {
        // Half a unit of the random number makes its mean half of what is cut off.
        let add = (random << (self.cut - 16)) | (1 << (self.cut - 17));
        (bits.wrapping_add(add) >> self.cut).wrapping_sub(self.base).cast_signed()
    }
}

/// Of numbers that are not negative, largest first.
pub(in crate::kernels) const POSITIVE: [Octaves; 3] =
    [Octaves::new(2, 0, 255, 18), Octaves::new(16, 2, 191, 20), Octaves::new(127, 16, 79, 21)];
/// Of magnitudes of either sign, largest first.
pub(in crate::kernels) const SIGNED: [Octaves; 4] = [
    Octaves::new(2, 0, 127, 18),
    Octaves::new(3, 2, 63, 19),
    Octaves::new(4, 3, 47, 20),
    Octaves::new(23, 4, 39, 22),
];

/// The entry with this number.
#[allow(clippy::cast_possible_truncation)] // at most 255
const fn value<const N: usize>(parts: &[Octaves; N], number: usize) -> f32 {
    let (mut part, number) = (0, number as u32);
    while part < N && number > 0 {
        let bits = (number + parts[part].base) << parts[part].cut;
        if bits >= parts[part].from {
            return f32::from_bits(bits);
        }
        part += 1;
    }
    0.0
}

/// The entries of the first book by code.
pub(in crate::kernels) const POSITIVE_VALUES: [f32; 256] = {
    let (mut values, mut code) = ([0.0; 256], 0);
    while code < 256 {
        values[code] = value(&POSITIVE, code);
        code += 1;
    }
    values
};

/// The entries of the second book by code.
pub(in crate::kernels) const SIGNED_VALUES: [f32; 256] = {
    let (mut values, mut number, zero) = ([1.0; 256], 0, ZERO as usize);
    while number <= zero {
        values[zero + number] = value(&SIGNED, number);
        values[zero - number] = -value(&SIGNED, number);
        number += 1;
    }
    values[zero] = 0.0;
    values
};

/// The number of one of the two entries around a number that is not below the smallest part.
#[inline(always)]
#[allow(clippy::inline_always)] // as the others
fn number<const N: usize>(parts: &[Octaves; N], bits: u32, random: u32) -> i32 {
    let mut found = parts[N - 1].number(bits, random);
    for part in parts[..N - 1].iter().rev() {
        found = if bits >= part.from { part.number(bits, random) } else { found };
    }
    found
}

/// The code of a number that is at most about 1 and counts as 0 where it is negative; `random` has 16 bits.
#[inline(always)]
#[allow(clippy::inline_always, clippy::cast_possible_truncation, clippy::cast_sign_loss)] // as the others; 8 bits
fn positive_code(q: f32, random: u32) -> u8 {
    // Bounds that depend on q would have a panic, and no loop over this would be vectorised.
    let found = number(&POSITIVE, q.to_bits(), random).clamp(1, 255);
    if q > 0.0 { found as u8 } else { 0 }
}

/// The code of a number that is at most about 1 in size.
#[inline(always)]
#[allow(clippy::inline_always, clippy::cast_possible_truncation, clippy::cast_sign_loss)] // as the others; 8 bits
#[allow(clippy::cast_precision_loss)] // 16 bits
fn signed_code(q: f32, random: u32) -> u8 {
    let size = q.abs();
    let above = number(&SIGNED, size.to_bits(), random).min(i32::from(ZERO));
    let below = i32::from(size * TO_HALVES + random as f32 >= 65536.0);
    let found = if size >= SMALLEST { above } else { below };
    (i32::from(ZERO) + if q < 0.0 { -found } else { found }) as u8
}

/// Quantizes the numbers `x`, scaled to `(x·power)·inverse`, with one random number for each.
#[inline(always)]
#[allow(clippy::inline_always)] // inside its caller's instruction set
pub(super) fn encode<C: Real>(
    signed: bool,
    values: &[C],
    (power, inverse): (f32, f32),
    random: &[u16],
    q8: &mut [u8],
) {
    let all = q8.iter_mut().zip(values).zip(random);
    if signed {
        for ((to, x), r) in all {
            *to = signed_code((x.to_f32() * power) * inverse, u32::from(*r));
        }
    } else {
        for ((to, x), r) in all {
            *to = positive_code((x.to_f32() * power) * inverse, u32::from(*r));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The entries above 0 in descending order, by the number of those of each power of two.
    fn entries(counts: impl IntoIterator<Item = u32>) -> Vec<f64> {
        let (mut found, mut size) = (vec![1.0_f64], 1.0);
        for count in counts {
            size /= 2.0;
            found.extend((0..count).rev().map(|i| size * (1.0 + f64::from(i) / f64::from(count))));
        }
        found
    }

    #[test]
    fn values_are_the_powers_of_two_that_the_definition_says() {
        let mut expected = entries([32; 2].into_iter().chain([8; 14]).chain([4; 20]));
        expected.truncate(255);
        expected.push(0.0);
        expected.reverse();
        assert_eq!(POSITIVE_VALUES.map(f64::from).to_vec(), expected);
        assert_eq!(POSITIVE_VALUES[1].to_bits(), (1.5_f32 * 2.0_f32.powi(-36)).to_bits());

        let mut magnitudes = entries([32, 32, 16, 8].into_iter().chain([2; 19]));
        assert_eq!((magnitudes.len(), magnitudes.last()), (127, Some(&f64::from(SMALLEST))));
        magnitudes.push(0.0);
        magnitudes.reverse();
        for (number, size) in magnitudes.into_iter().enumerate().skip(1) {
            let [above, below] = [127 + number, 127 - number].map(|code| f64::from(SIGNED_VALUES[code]));
            assert_eq!([above, below].map(f64::to_bits), [size, -size].map(f64::to_bits));
        }
        assert_eq!(SIGNED_VALUES[127].to_bits(), 0);
    }

    /// Checks the 8-bit values of numbers between neighbouring entries, with all random numbers.
    fn check_mean(values: &[f32], first: usize, code: fn(f32, u32) -> u8) {
        for (at, pair) in values.windows(2).enumerate().skip(first) {
            for share in [0.0, 0.125, 0.3, 0.5, 0.875] {
                let q = pair[0] + share * (pair[1] - pair[0]);
                let ups = (0..=u16::MAX).filter(|r| {
                    let found = usize::from(code(q, u32::from(*r)));
                    assert!(found == at || found == at + 1, "{q} {r} {found}");
                    found > at
                });
                let found = f64::from(u32::try_from(ups.count()).unwrap_or(0)) / 65536.0;
                assert!((found - f64::from(share)).abs() < 1e-4, "{q} {found}");
            }
        }
    }

    #[test]
    fn quantized_numbers_are_neighbours_with_the_mean_of_the_number() {
        check_mean(&POSITIVE_VALUES, 1, positive_code);
        check_mean(&SIGNED_VALUES[..255], 0, signed_code);
    }

    #[test]
    fn quantized_tiny_numbers_are_not_zero_and_none_overflows() {
        for r in [0, 1, 0x8000, 0xffff] {
            for q in [f32::from_bits(1), 1e-30, 1e-12, POSITIVE_VALUES[1] / 2.0] {
                assert_eq!(positive_code(q, r), 1, "{q}");
            }
            assert_eq!([0.0, -0.0, -1.0].map(|q| positive_code(q, r)), [0; 3]);
            assert_eq!([0.0, -0.0].map(|q| signed_code(q, r)), [127; 2]);
            let near = [1.0, 1.0_f32.next_up(), 1.0_f32.next_down(), 1.001];
            assert_eq!(near.map(|q| positive_code(q, r)), [255; 4]);
            assert_eq!(near.map(|q| signed_code(q, r)), [254; 4]);
            assert_eq!(near.map(|q| signed_code(-q, r)), [0; 4]);
        }
    }
}
