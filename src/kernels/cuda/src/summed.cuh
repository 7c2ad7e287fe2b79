// What elementwise passes sum up.
#pragma once
#include "arithmetic.cuh"
#include "block_sum.cuh"

// What is read of a number that was stored in a type.
template <typename C>
__device__ __forceinline__ double as_stored(Type type, C x) {
    const float single = static_cast<float>(x);
    if (type == Type::float64) return static_cast<double>(x);
    if (type == Type::bfloat16) return to_float(bfloat16{static_cast<u16>(pack(single, 0.0f, bfloat16{}))});
    if (type == Type::float16) return to_float(float16{static_cast<u16>(pack(single, 0.0f, float16{}))});
    return single;
}

// Leaves the sums of a block's piece, which `Warps` warps made.
template <int Warps, typename Op>
__device__ __forceinline__ void leave_sums(const Op& op, double* partial, u32 piece) {
#pragma unroll
    for (int k = 0; k < Op::SUMS; ++k) {
        const double sum = block_sum<Warps>(op.sum[k]);
        if (threadIdx.x == 0)
            in_global_memory(partial)[static_cast<long long>(piece) * Op::SUMS + k] = sum;
    }
}
