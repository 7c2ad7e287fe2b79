// Normal numbers of a counter-based generator, bit for bit those of src/linalg/random.rs.
#pragma once
#include "philox.cuh"

// No compiler joins these to a multiplication and addition that rounds once.
__device__ __forceinline__ float mul(float x, float y) { return __fmul_rn(x, y); }
__device__ __forceinline__ float add(float x, float y) { return __fadd_rn(x, y); }

// A stream of numbers: the key of the generator, and the upper half of its counter.
struct Stream {
    u32 key[2];
    u32 high[2];
};

// Natural logarithm on (0, 1], at most 0.
__device__ __forceinline__ float ln_unit(float u) {
    const u32 bits = __float_as_uint(u) + (0x3F800000u - 0x3F3504F3u);
    const float exponent = static_cast<float>(static_cast<int>(bits >> 23) - 127);
    const float f = add(__uint_as_float((bits & 0x007FFFFFu) + 0x3F3504F3u), -1.0f);
    const float s = __fdiv_rn(f, add(2.0f, f));
    const float square = mul(s, s);
    const float inner = add(1.0f / 7.0f, mul(square, 1.0f / 9.0f));
    const float tail = mul(square, add(1.0f / 3.0f, mul(square, add(0.2f, mul(square, inner)))));
    return fminf(add(mul(exponent, 0.693147180559945309f), mul(2.0f, add(s, mul(s, tail)))), 0.0f);
}

// 1 - square / first * rest
__device__ __forceinline__ float next_term(float square, float divisor, float rest) {
    return add(1.0f, -mul(__fdiv_rn(square, divisor), rest));
}

// Two normal numbers of two words.
__device__ __forceinline__ void box_muller(u32 x, u32 y, float& first, float& second) {
    const float unit = mul(add(static_cast<float>(x), 0.5f), 1.0f / 4294967296.0f);
    const float radius = __fsqrt_rn(mul(-2.0f, ln_unit(unit)));
    const u32 quarter = (y + (1u << 29)) >> 30;
    const float angle = mul(static_cast<float>(static_cast<int>(y - (quarter << 30))),
                            6.28318530717958647693f / 4294967296.0f);
    const float square = mul(angle, angle);
    const float sin = mul(
        angle, next_term(square, 6.0f,
                         next_term(square, 20.0f, next_term(square, 42.0f, next_term(square, 72.0f, 1.0f)))));
    const float cos = next_term(
        square, 2.0f, next_term(square, 12.0f, next_term(square, 30.0f, next_term(square, 56.0f, 1.0f))));
    const float s = quarter % 2 == 0 ? sin : cos, c = quarter % 2 == 0 ? cos : sin;
    first = mul(radius, quarter == 1 || quarter == 2 ? -c : c);
    second = mul(radius, quarter & 2 ? -s : s);
}

// The four numbers of a block of the stream.
__device__ __forceinline__ void normals(const Stream& stream, u64 block, float (&out)[4]) {
    u32 words[4] = {static_cast<u32>(block), static_cast<u32>(block >> 32), stream.high[0], stream.high[1]};
    philox(words, stream.key[0], stream.key[1]);
    box_muller(words[0], words[1], out[0], out[1]);
    box_muller(words[2], words[3], out[2], out[3]);
}
