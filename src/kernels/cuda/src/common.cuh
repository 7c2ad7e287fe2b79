// What the matrix kernels share: how a batch and a factor are handed over, and the triangular tile order.
#pragma once
#include "ptx.cuh"

constexpr int WARP = 32;
constexpr int CHUNK_BYTES = 16;  // the widest load and store of one thread

// A float32 factor: the value at `live` where that is set, so that a replayed graph sees what is there now;
// else `value`.
struct Factor {
    const float* live;
    float value;
};

__device__ __forceinline__ float factor_value(const Factor& factor) {
    return factor.live ? *factor.live : factor.value;
}

// Row-major matrices of one size. Matrix z is at each[z] where `each` is set, else `matrix_stride` elements
// behind the one before. `row_stride` is in elements too.
struct MatrixBatch {
    void* first;
    void* const* each;
    long long matrix_stride;
    long long row_stride;
};

template <typename T>
__device__ __forceinline__ T* matrix_start(const MatrixBatch& batch, int z) {
    T* strided = static_cast<T*>(batch.first) + z * batch.matrix_stride;
    return in_global_memory(batch.each ? static_cast<T*>(batch.each[z]) : strided);
}

// Whether every row of the matrix starts at a multiple of 16 bytes.
template <typename T>
__device__ __forceinline__ bool rows_are_aligned(const T* matrix, const MatrixBatch& batch) {
    const u64 start = reinterpret_cast<u64>(matrix);
    const u64 step = static_cast<u64>(batch.row_stride) * sizeof(T);
    return ((start | step) % CHUNK_BYTES) == 0;
}

struct Tile {
    int row;
    int col;
};

// Tile number `index` of a lower triangle counted row by row. The square root is an estimate; the loops make
// it exact.
__device__ __forceinline__ Tile triangular_tile(int index) {
    int row = static_cast<int>((estimated_root(8.0f * static_cast<float>(index) + 1.0f) - 1.0f) * 0.5f);
    while ((row + 1) * (row + 2) / 2 <= index) ++row;
    while (row * (row + 1) / 2 > index) --row;
    return {row, index - row * (row + 1) / 2};
}

__host__ __device__ constexpr int ceil_div(int a, int b) {
    return (a + b - 1) / b;
}
