// float32 weights in two halves: a bfloat16 parameter and the low half, as src/kernels/cpu/master.rs has them.
#pragma once
#include "common.cuh"

// Joins a parameter and its low half to the float32 weight.
__device__ __forceinline__ float joined(u16 high, short low) {
    const u32 plain = static_cast<u32>(high) << 16;
    const u32 bits = (static_cast<u32>(high) - (low < 0 ? 1u : 0u)) << 16 | static_cast<u16>(low);
    const bool is_nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
    return __uint_as_float(is_nan ? plain : bits);
}

// The parameter and the low half of a weight.
struct Halves {
    u32 high;
    u32 low;

    __device__ __forceinline__ explicit Halves(float weight) {
        const u32 bits = __float_as_uint(weight);
        const bool is_nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
        high = is_nan ? bits >> 16 | 0x40u : bits + 0x8000u >> 16;
        low = is_nan ? 0u : bits & 0xFFFFu;
    }
};
