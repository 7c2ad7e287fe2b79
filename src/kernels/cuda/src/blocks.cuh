// States of one byte: the dynamic code books, encoding and decoding, as src/kernels/cpu/blocks.rs defines
// them. A block is stored as its largest absolute value, its scale, and a code for each element.
#pragma once
#include "unfused.cuh"

constexpr int ENTRIES = 256;
constexpr int DECADES = 7;
constexpr int MOST_BLOCK = 512;        // elements of a block
constexpr float MIDDLE = 12582912.0f;  // 1.5 * 2^23: added to a small number, it leaves the nearest integer

// The way from an absolute value to an entry, counted from 0 upwards. Between two decades lies a bound; above
// it the entry is the integer next to slope * a + shift, less `base`.
struct Lines {
    float bound[DECADES + 1];
    float slope[DECADES + 1];
    float shift[DECADES + 1];
    int base;
};

struct Book {
    float value[ENTRIES];  // in ascending order
    float edge[ENTRIES +
               1];  // of entries from 0 upwards: what lies above edge[t] and not above edge[t + 1] is t
    Lines lines;
    int zero;  // number of the entry 0

    // The largest float32 that is not above the middle of two.
    static constexpr float middle(float low, float high) {
        const double exact = (static_cast<double>(low) + static_cast<double>(high)) * 0.5;
        const float near = static_cast<float>(exact);
        // By less than one unit and at least half of one: that rounds to the number before.
        return static_cast<double>(near) <= exact ? near : static_cast<float>(near * (1.0 - 1.0 / (1 << 24)));
    }

    constexpr explicit Book(bool is_signed) : value(), edge(), lines(), zero(is_signed ? 127 : 0) {
        const double powers[DECADES] = {1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0};
        const int base = is_signed ? 0 : 1;
        int first[DECADES + 1] = {};
        int next = zero + 1;
        lines.base = base;
        for (int i = 0; i < DECADES; ++i) {
            const int count = 1 << (i + base);
            lines.slope[i] = static_cast<float>(count / (0.9 * powers[i]));
            lines.shift[i] = static_cast<float>(count - count / 9.0 - 0.5);
            first[i] = next;
            for (int j = 0; j < count; ++j, ++next) {
                value[next] = static_cast<float>(powers[i] * (0.1 + 0.9 * (j + 0.5) / count));
                if (is_signed) value[2 * zero - next] = -value[next];
            }
        }
        value[ENTRIES - 1] = 1.0f;
        first[DECADES] = ENTRIES - 1;
        lines.shift[DECADES] = static_cast<float>(1 << (DECADES + base));
        for (int k = 0; k <= DECADES; ++k) lines.bound[k] = middle(value[first[k] - 1], value[first[k]]);
        const int entries = ENTRIES - zero;
        edge[0] = -4.0f;
        for (int t = 1; t < entries; ++t) edge[t] = middle(value[zero + t - 1], value[zero + t]);
        for (int t = entries; t <= ENTRIES; ++t) edge[t] = 4.0f;
    }
};

__device__ constexpr Book SIGNED_BOOK(true);
__device__ constexpr Book UNSIGNED_BOOK(false);

// What threads look up: the signed book, then the unsigned one.
struct Tables {
    float value[2][ENTRIES];
    float edge[2][ENTRIES + 1];
};

__device__ __forceinline__ void fill_tables(Tables& tables, int thread, int threads) {
    for (int i = thread; i <= ENTRIES; i += threads) {
        if (i < ENTRIES) {
            tables.value[0][i] = SIGNED_BOOK.value[i];
            tables.value[1][i] = UNSIGNED_BOOK.value[i];
        }
        tables.edge[0][i] = SIGNED_BOOK.edge[i];
        tables.edge[1][i] = UNSIGNED_BOOK.edge[i];
    }
}

// The nearest entry; of two that are equally near, the one nearer to 0.
template <bool Signed>
__device__ __forceinline__ u32 nearest(float q, const float (&edge)[ENTRIES + 1]) {
    constexpr Lines LINES = Signed ? SIGNED_BOOK.lines : UNSIGNED_BOOK.lines;
    const float a = Signed ? fabsf(q) : q;
    float slope = 0.0f;
    float shift = static_cast<float>(LINES.base);
#pragma unroll
    for (int k = 0; k <= DECADES; ++k) {
        const bool is_above = a > LINES.bound[k];
        slope = is_above ? LINES.slope[k] : slope;
        shift = is_above ? LINES.shift[k] : shift;
    }
    // What lies between a decade's end and the bound above it belongs to the decade's last entry.
    const float found = fminf(slope * a + shift, shift * 2.25f + 0.125f);
    // Next to the middle of two entries this may be the other one.
    int entry = static_cast<int>(__float_as_uint(found + MIDDLE) & 0x1FF) - LINES.base;
    entry += (a > edge[entry + 1]) - (a <= edge[entry]);
    if (!Signed) return static_cast<u32>(entry);
    // -1 has no entry of its own.
    return static_cast<u32>(q < 0.0f ? 127 - min(entry, 127) : 127 + entry);
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
