// States of one byte: the code books, encoding and decoding, as src/kernels/cpu/blocks.rs and minifloat.rs
// define them. A block is stored as its largest absolute value, its scale, and a code for each element.
#pragma once
#include "unfused.cuh"

constexpr int ENTRIES = 256;
constexpr int MOST_BLOCK = 512;  // elements of a block
constexpr int ZERO = 127;        // the code of 0 in the book of either sign; 255 is not used

// The code books by code: of numbers of either sign, for each power of two 32 entries down to 2^-2, 16 down to
// 2^-3, 8 down to 2^-4, then 2 down to 2^-23; of numbers that are not negative 32 down to 2^-2, 8 down to
// 2^-16, then 4.
struct Books {
    float value[2][ENTRIES];

    constexpr Books() : value() {
        value[0][ENTRIES - 1] = 1.0f;
        int next = ZERO;
        value[0][ZERO + next] = 1.0f;
        value[0][ZERO - next] = -1.0f;
        float least = 1.0f;
        for (int octave = 1; next > 1; ++octave) {
            least *= 0.5f;
            const int count = octave <= 2 ? 32 : octave <= 3 ? 16 : octave <= 4 ? 8 : 2;
            for (int j = count - 1; j >= 0; --j) {
                --next;
                value[0][ZERO + next] = least * (1.0f + static_cast<float>(j) / static_cast<float>(count));
                value[0][ZERO - next] = -value[0][ZERO + next];
            }
        }
        next = ENTRIES - 1;
        least = 1.0f;
        value[1][next] = least;
        for (int octave = 1; next > 1; ++octave) {
            least *= 0.5f;
            const int count = octave <= 2 ? 32 : octave <= 16 ? 8 : 4;
            for (int j = count - 1; j >= 0 && next > 1; --j)
                value[1][--next] = least * (1.0f + static_cast<float>(j) / static_cast<float>(count));
        }
    }
};

__device__ constexpr Books BOOKS;

// What threads look up.
struct Tables {
    float value[2][ENTRIES];
};

__device__ __forceinline__ void fill_tables(Tables& tables, int thread, int threads) {
    for (int i = thread; i < ENTRIES; i += threads) {
        tables.value[0][i] = BOOKS.value[0][i];
        tables.value[1][i] = BOOKS.value[1][i];
    }
}

// A number's bits without the last `Cut`, counted so that 2^-Power has the number `Entry`; what is added decides
// what is between two.
template <int Cut, int Power, int Entry>
__device__ __forceinline__ int without_last_bits(u32 bits, u32 random) {
    constexpr u32 BASE = ((127u - Power) << 23 >> Cut) - Entry;
    return static_cast<int>(((bits + (random << (Cut - 16) | 1u << (Cut - 17))) >> Cut) - BASE);
}

__device__ __forceinline__ bool is_from(u32 bits, u32 power) { return bits >= (127u - power) << 23; }

// The code of a number that is at most about 1 in size; `random` has 16 bits.
__device__ __forceinline__ u32 signed_code(float q, u32 random) {
    constexpr float SMALLEST = 1.0f / 8388608.0f;  // 2^-23
    constexpr float TO_HALVES = 549755813888.0f;   // 2^39: makes 2^16 of it
    const float size = fabsf(q);
    const u32 bits = __float_as_uint(size);
    int found = without_last_bits<22, 4, 39>(bits, random);
    if (is_from(bits, 4)) found = without_last_bits<20, 3, 47>(bits, random);
    if (is_from(bits, 3)) found = without_last_bits<19, 2, 63>(bits, random);
    if (is_from(bits, 2)) found = without_last_bits<18, 0, 127>(bits, random);
    if (!(size >= SMALLEST)) found = size * TO_HALVES + static_cast<float>(random) >= 65536.0f;
    found = min(found, ZERO);
    return static_cast<u32>(ZERO + (q < 0.0f ? -found : found));
}

// The code of a number that is at most about 1 and counts as 0 where it is negative. That of a positive one is
// never 0.
__device__ __forceinline__ u32 positive_code(float q, u32 random) {
    if (!(q > 0.0f)) return 0;
    const u32 bits = __float_as_uint(q);
    int found = without_last_bits<21, 16, 79>(bits, random);
    if (is_from(bits, 16)) found = without_last_bits<20, 2, 191>(bits, random);
    if (is_from(bits, 2)) found = without_last_bits<18, 0, 255>(bits, random);
    return static_cast<u32>(min(max(found, 1), 255));
}

// How the numbers of a block become those that entries are near to.
struct Scaling {
    float power, inverse;
    bool is_lost;  // all values are quantized to 0

    __device__ explicit Scaling(float scale) {
        // A power of two that keeps products with it, and the inverse, normal numbers.
        constexpr float LARGE = 1152921504606846976.0f;  // 2^60
        constexpr float UP = 18446744073709551616.0f;    // 2^64
        power = scale < 1.0f / LARGE ? UP : scale > LARGE ? 1.0f / UP : 1.0f;
        inverse = 1.0f / (scale * power);
        is_lost = !(scale > 0.0f && scale < __uint_as_float(0x7F800000u));
    }

    __device__ float operator()(float x) const { return rounded_product(rounded_product(x, power), inverse); }
};
