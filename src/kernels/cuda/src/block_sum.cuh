// Sums over a block, always in the same order.
#pragma once
#include "jobs.cuh"

constexpr int WARPS = THREADS / 32;

// The sum over the block, in thread 0.
template <int Warps = WARPS>
__device__ __forceinline__ double block_sum(double x) {
    __shared__ double warps[Warps];
    for (int lane = 16; lane > 0; lane /= 2) x += __shfl_xor_sync(0xFFFFFFFF, x, lane);
    const int thread = static_cast<int>(threadIdx.x);
    if (thread % 32 == 0) warps[thread / 32] = x;
    __syncthreads();
    double sum = 0;
    if (thread == 0) {
        for (int w = 0; w < Warps; ++w) sum += warps[w];
    }
    __syncthreads();
    return sum;
}
