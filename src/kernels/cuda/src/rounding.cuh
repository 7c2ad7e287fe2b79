// Rounding at random, as src/kernels/cpu/rounding.rs has it: an element's random bits are a hash of its place
// in the whole tensor under a key.
#pragma once
#include "ptx.cuh"

constexpr int MOST_SPANS = 4;

// The part of a dimension that is stored.
struct Span {
    long long size;
    long long start;
    long long length;
};

// The random bits of a run of elements. A dimension that is not cut counts as one with the dimension before.
struct Rounding {
    u32 key;          // of the parameter and the step; each tensor has a tag besides
    int spans;        // at least one
    long long first;  // of the run, among the stored elements
    Span span[MOST_SPANS];
};

// Up or down so that the mean is the number: random bits are added to those that are cut off. What is a
// bfloat16 already, infinite or NaN stays what it is.
__device__ __forceinline__ u32 rounded_by(float x, u32 random) {
    const u32 bits = __float_as_uint(x);
    const bool is_nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
    return is_nan ? bits >> 16 | 0x40u : (bits + random) >> 16;
}

// Rounds likewise to float16: the lower 13 bits are cut off. `least` holds the bits of the smallest magnitude
// that a nonzero number can become.
__device__ __forceinline__ u32 half_rounded_by(float x, u32 random, u32 least) {
    constexpr float LEAST_NORMAL = 1.0f / 16384.0f;
    constexpr u32 BIAS = (127 - 15) << 10;
    const u32 sign = __float_as_uint(x) >> 16 & 0x8000u;
    const float size = fabsf(x);
    // Subnormal numbers have the same spacing as those that begin at 2^-14. Adding 2^-14 moves them there.
    const bool is_small = size < LEAST_NORMAL;
    const float moved = is_small ? __fadd_rn(size, LEAST_NORMAL) : size;
    const u32 cut = ((__float_as_uint(moved) + (random >> 3)) >> 13) - BIAS - (is_small ? 1u << 10 : 0u);
    const u32 kept = size > 0.0f ? max(min(cut, 0x7C00u), least) : 0u;
    return sign | (size != size ? 0x7E00u : kept);
}

// The random bits of elements one after the other.
struct RandomBits {
    const Rounding& rounding;
    const u32 tag;       // of the tensor
    u64 place = 0;       // of the next element in the whole tensor
    long long left = 0;  // elements from there on that lie together

    __device__ RandomBits(const Rounding& rounding, u32 tag) : rounding(rounding), tag(tag) {}

    // Goes to an element of the run.
    __device__ __forceinline__ void go_to(long long element) {
        const int inner = rounding.spans - 1;
        const long long at = rounding.first + element;
        long long rest = at;
        u64 step = 1;
        place = 0;
        left = rounding.span[inner].length - at;
        for (int d = inner; d > 0; --d) {
            const Span& span = rounding.span[d];
            const long long over = rest / span.length;
            const long long own = rest - over * span.length;
            if (d == inner) left = span.length - own;
            place += static_cast<u64>(span.start + own) * step;
            step *= static_cast<u64>(span.size);
            rest = over;
        }
        place += static_cast<u64>(rounding.span[0].start + rest) * step;
    }

    // The bits of this element, which is the one behind the last one.
    __device__ __forceinline__ u32 next(long long element) {
        if (left == 0) go_to(element);
        const u64 at = place / 2;
        u32 x = static_cast<u32>(at) + rounding.key;
        x = (x ^ x >> 17) * 0xED5AD4BBu;
        x += tag + static_cast<u32>(at >> 32) * 0x9E3779B9u;
        x = (x ^ x >> 11) * 0xAC4C1B51u;
        x = (x ^ x >> 15) * 0x31848BABu;
        x ^= x >> 14;
        const bool is_upper = place & 1;
        ++place;
        --left;
        return is_upper ? x >> 16 : x & 0xFFFFu;
    }
};
