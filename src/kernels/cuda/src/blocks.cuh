// States of one byte: the code books, encoding and decoding, as src/kernels/cpu/blocks.rs and positive.rs
// define them. A block is stored as its largest absolute value, its scale, and a code for each element.
#pragma once
#include "unfused.cuh"

constexpr int ENTRIES = 256;
constexpr int DECADES = 7;
constexpr int MOST_BLOCK = 512;        // elements of a block
constexpr float MIDDLE = 12582912.0f;  // 1.5 * 2^23: added to a small number, it leaves the nearest integer

// The way from an absolute value to an entry, counted from 0 upwards. Between two decades lies a bound; above
// it the entry is the integer next to slope * a + shift.
struct Lines {
    float bound[DECADES + 1];
    float slope[DECADES + 1];
    float shift[DECADES + 1];
};

constexpr int ZERO = 127;  // the entry 0

// Numbers of either sign.
struct Book {
    float value[ENTRIES];  // in ascending order
    float edge[ENTRIES +
               1];  // of entries from 0 upwards: what lies above edge[t] and not above edge[t + 1] is t
    Lines lines;

    // The largest float32 that is not above the middle of two.
    static constexpr float middle(float low, float high) {
        const double exact = (static_cast<double>(low) + static_cast<double>(high)) * 0.5;
        const float near = static_cast<float>(exact);
        // By less than one unit and at least half of one: that rounds to the number before.
        return static_cast<double>(near) <= exact ? near : static_cast<float>(near * (1.0 - 1.0 / (1 << 24)));
    }

    constexpr Book() : value(), edge(), lines() {
        const double powers[DECADES] = {1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0};
        int first[DECADES + 1] = {};
        int next = ZERO + 1;
        for (int i = 0; i < DECADES; ++i) {
            const int count = 1 << i;
            lines.slope[i] = static_cast<float>(count / (0.9 * powers[i]));
            lines.shift[i] = static_cast<float>(count - count / 9.0 - 0.5);
            first[i] = next;
            for (int j = 0; j < count; ++j, ++next) {
                value[next] = static_cast<float>(powers[i] * (0.1 + 0.9 * (j + 0.5) / count));
                value[2 * ZERO - next] = -value[next];
            }
        }
        value[ENTRIES - 1] = 1.0f;
        first[DECADES] = ENTRIES - 1;
        lines.shift[DECADES] = static_cast<float>(1 << DECADES);
        for (int k = 0; k <= DECADES; ++k) lines.bound[k] = middle(value[first[k] - 1], value[first[k]]);
        const int entries = ENTRIES - ZERO;
        edge[0] = -4.0f;
        for (int t = 1; t < entries; ++t) edge[t] = middle(value[ZERO + t - 1], value[ZERO + t]);
        for (int t = entries; t <= ENTRIES; ++t) edge[t] = 4.0f;
    }
};

// Numbers that are not negative: for each power of two 32 entries down to 2^-2, 8 down to 2^-16, then 4.
struct PositiveBook {
    float value[ENTRIES];  // in ascending order

    constexpr PositiveBook() : value() {
        int next = ENTRIES - 1;
        float least = 1.0f;
        value[next] = least;
        for (int octave = 1; next > 1; ++octave) {
            least *= 0.5f;
            const int count = octave <= 2 ? 32 : octave <= 16 ? 8 : 4;
            for (int j = count - 1; j >= 0 && next > 1; --j)
                value[--next] = least * (1.0f + static_cast<float>(j) / static_cast<float>(count));
        }
    }
};

__device__ constexpr Book BOOK;
__device__ constexpr PositiveBook POSITIVE_BOOK;

// What threads look up: the book of either sign, then that of numbers that are not negative.
struct Tables {
    float value[2][ENTRIES];
    float edge[ENTRIES + 1];
};

__device__ __forceinline__ void fill_tables(Tables& tables, int thread, int threads) {
    for (int i = thread; i <= ENTRIES; i += threads) {
        if (i < ENTRIES) {
            tables.value[0][i] = BOOK.value[i];
            tables.value[1][i] = POSITIVE_BOOK.value[i];
        }
        tables.edge[i] = BOOK.edge[i];
    }
}

// The nearest entry of the book of either sign; of two that are equally near, the one nearer to 0.
__device__ __forceinline__ u32 nearest(float q, const float (&edge)[ENTRIES + 1]) {
    constexpr Lines LINES = BOOK.lines;
    const float a = fabsf(q);
    float slope = 0.0f;
    float shift = 0.0f;
#pragma unroll
    for (int k = 0; k <= DECADES; ++k) {
        const bool is_above = a > LINES.bound[k];
        slope = is_above ? LINES.slope[k] : slope;
        shift = is_above ? LINES.shift[k] : shift;
    }
    // What lies between a decade's end and the bound above it belongs to the decade's last entry.
    const float found = fminf(slope * a + shift, shift * 2.25f + 0.125f);
    // Next to the middle of two entries this may be the other one.
    int entry = static_cast<int>(__float_as_uint(found + MIDDLE) & 0x1FF);
    entry += (a > edge[entry + 1]) - (a <= edge[entry]);
    // -1 has no entry of its own.
    return static_cast<u32>(q < 0.0f ? ZERO - min(entry, ZERO) : ZERO + entry);
}

// A number's bits without the last `Cut`, counted so that 2^-Power has `code`; what is added decides what is
// between two.
template <int Cut, int Power, int Code>
__device__ __forceinline__ int without_last_bits(u32 bits, u32 random) {
    constexpr u32 BASE = ((127u - Power) << 23 >> Cut) - Code;
    return static_cast<int>(((bits + (random << (Cut - 16) | 1u << (Cut - 17))) >> Cut) - BASE);
}

// The code of a number that is at most about 1; `random` has 16 bits. That of a positive one is never 0.
__device__ __forceinline__ u32 positive_code(float q, u32 random) {
    if (!(q > 0.0f)) return 0;
    const u32 bits = __float_as_uint(q);
    const int few = bits >= (127u - 16) << 23 ? without_last_bits<20, 2, 191>(bits, random)
                                              : without_last_bits<21, 16, 79>(bits, random);
    const int found = bits >= (127u - 2) << 23 ? without_last_bits<18, 0, 255>(bits, random) : few;
    return static_cast<u32>(min(max(found, 1), 255));
}

// How the numbers of a block become those that entries are near to.
struct Scaling {
    float power, inverse;
    bool is_lost;  // all codes are that of 0

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
