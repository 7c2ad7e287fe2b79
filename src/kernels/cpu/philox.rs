//! The generator `Philox4x32-10` (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

/// One block: ten rounds of Philox-4x32 on `counter` under `key`.
#[must_use]
#[inline(always)]
#[allow(clippy::inline_always)] // must be compiled inside its caller's instruction set
pub fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..10 {
        let (high0, low0) = split(0xD251_1F53, counter[0]);
        let (high1, low1) = split(0xCD9E_8D57, counter[2]);
        counter = [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0];
        key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
    }
    counter
}

/// 128 bits that name a stream of numbers: a key of the generator, and the upper half of its counter. `tag` separates
/// uses of one stream.
#[must_use]
pub fn stream([seed, stream, step]: [u64; 3], tag: u32) -> [u32; 4] {
    let ([stream0, stream1], [step0, step1]) = (words(stream), words(step));
    // One block keyed by the seed, a bijection of `(stream, step)`.
    let [w0, w1, w2, w3] = philox([stream0, stream1, step0, step1], words(seed));
    [w0, w1, w2, w3 ^ tag]
}

/// Low and high word.
#[expect(clippy::cast_possible_truncation, reason = "the two words of a 64-bit number")]
fn words(x: u64) -> [u32; 2] {
    [x as u32, (x >> 32) as u32]
}

/// High and low word of a 32 x 32 bit product.
#[inline(always)]
#[allow(clippy::inline_always)] // inside its caller's instruction set
#[expect(clippy::cast_possible_truncation, reason = "the two words of a 64-bit product")]
fn split(a: u32, b: u32) -> (u32, u32) {
    let product = u64::from(a) * u64::from(b);
    ((product >> 32) as u32, product as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn philox_gives_the_published_vectors() {
        // Random123 kat_vectors, philox 4x32 10.
        assert_eq!(philox([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(
            philox([u32::MAX; 4], [u32::MAX; 2]),
            [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]
        );
        assert_eq!(
            philox([0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344], [0xa409_3822, 0x299f_31d0]),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }
}
