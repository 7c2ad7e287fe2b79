// Stochastic rounding to bfloat16, as src/kernels/cpu/rounding.rs has it: an element's random bits depend on
// a key and on its place in the whole tensor alone.
#pragma once
#include "philox.cuh"

constexpr int MOST_SPANS = 4;
constexpr int NUMBERS = 8;  // of 16 bits, in one block of the generator

// The part of a dimension that is stored.
struct Span {
    long long size;
    long long start;
    long long length;
};

// The random bits of a run of elements. A dimension that is not cut counts as one with the dimension before.
struct Rounding {
    u32 key[4];
    long long first;  // of the run, among the stored elements
    int spans;        // at least one
    Span span[MOST_SPANS];
};

// Up or down so that the mean is the number: random bits are added to those that are cut off. What is a
// bfloat16 already, infinite or NaN stays what it is.
__device__ __forceinline__ u32 rounded_by(float x, u32 random) {
    const u32 bits = __float_as_uint(x);
    const bool is_nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
    return is_nan ? bits >> 16 | 0x40u : (bits + random) >> 16;
}

// The random bits of elements one after the other.
struct RandomBits {
    const Rounding& rounding;
    u64 place = 0;        // of the next element in the whole tensor
    long long left = 0;   // elements from there on that lie together
    u64 block = ~u64(0);  // of the generator, which gave:
    u32 word[4] = {0, 0, 0, 0};

    __device__ explicit RandomBits(const Rounding& rounding) : rounding(rounding) {}

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
        if (block != place / NUMBERS) {
            block = place / NUMBERS;
            word[0] = static_cast<u32>(block);
            word[1] = static_cast<u32>(block >> 32);
            word[2] = rounding.key[2];
            word[3] = rounding.key[3];
            philox(word, rounding.key[0], rounding.key[1]);
        }
        const u32 number = static_cast<u32>(place % NUMBERS);
        ++place;
        --left;
        const u32 low = number & 2 ? word[1] : word[0];
        const u32 high = number & 2 ? word[3] : word[2];
        const u32 pair = number & 4 ? high : low;
        return number & 1 ? pair >> 16 : pair & 0xFFFFu;
    }
};
