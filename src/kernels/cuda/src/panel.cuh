// What Gram products, Cholesky factors and panel solves share: which matrices take part, tiles of 64 x 64,
// and float32 products on the matrix units.
//
// Products are 3xTF32: each operand is split into two tf32 parts, high and low, and three of the four
// products are summed. What is left out is below 2^-22 of the product, so the result is as good as float32,
// at a third of the tf32 rate: by data sheet 52 Tflop/s on A100, where the FMA units do 19.5. Matrix units do
// not round to nearest when they accumulate, which biases long sums of one sign, as on the diagonal of a Gram
// matrix; so they sum over 32 columns only, and ordinary additions take it from there.
#pragma once
#include "common.cuh"

constexpr int TILE = 64;
constexpr int DEPTH = 32;  // columns per pipeline stage
constexpr int STAGES = 3;
constexpr int THREADS = 128;  // four warps, each 32 x 32 of the tile
constexpr int WARP_TILE = 32;
constexpr int CHUNK = CHUNK_BYTES / 4;  // floats per 16 bytes
constexpr int INSTRUCTION_DEPTH = 8;

// Outcome of a factorization, left on the device so that no host has to read it.
struct PanelStatus {
    int info;     // 0, or 1 + the first column whose pivot was not above rounding error
    float ratio;  // smallest over largest diagonal element of the factor of the panel with unit columns
};

enum Which { EVERY = 0, ILL_CONDITIONED = 1, FAILED = 2, ILL_CONDITIONED_OR_FAILED = 3 };

// The matrices a launch works on, by the outcome of an earlier one. Others are left as they are.
struct Selection {
    const PanelStatus* status;
    float threshold;  // a ratio below it is ill-conditioned
    int which;
};

__device__ __forceinline__ bool is_selected(const Selection& selection, int z) {
    if (selection.which == EVERY) return true;
    const PanelStatus status = selection.status[z];
    if (status.info != 0) return selection.which & FAILED;
    return (selection.which & ILL_CONDITIONED) && status.ratio < selection.threshold;
}

// A tile's elements in one thread: two times 16 rows, four times 8 columns, four of the instruction.
using Sums = float[2][4][4];

// Calls visit(row, column, element) for each of them.
template <typename Visit>
__device__ __forceinline__ void for_each_sum(Sums& sums, Visit visit) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int row = warp / 2 * WARP_TILE + lane / 4, col = warp % 2 * WARP_TILE + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int q = 0; q < 4; ++q) visit(row + i * 16 + q / 2 * 8, col + j * 8 + q % 2, sums[i][j][q]);
}

// to += sign * product.
__device__ __forceinline__ void accumulate(Sums& to, const Sums& product, float sign) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int q = 0; q < 4; ++q) to[i][j][q] += sign * product[i][j][q];
}

__device__ __forceinline__ void split(float x, u32& high, u32& low) {
    high = to_tf32(x);
    low = to_tf32(x - __uint_as_float(high));
}

// left right^T over DEPTH columns; left(row, k) and right(column, k) read shared memory.
template <typename Left, typename Right>
__device__ __forceinline__ void multiply(Sums& product, Left left, Right right) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int row = warp / 2 * WARP_TILE + lane / 4, col = warp % 2 * WARP_TILE + lane / 4;
    for_each_sum(product, [](int, int, float& x) { x = 0.0f; });
#pragma unroll
    for (int step = 0; step < DEPTH / INSTRUCTION_DEPTH; ++step) {
        const int k = step * INSTRUCTION_DEPTH + lane % 4;
        u32 left_high[2][4], left_low[2][4], right_high[4][2], right_low[4][2];
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int q = 0; q < 4; ++q)
                split(left(row + i * 16 + q % 2 * 8, k + q / 2 * 4), left_high[i][q], left_low[i][q]);
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int q = 0; q < 2; ++q)
                split(right(col + j * 8, k + q * 4), right_high[j][q], right_low[j][q]);
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                multiply_add_tf32(product[i][j], left_low[i], right_high[j]);
                multiply_add_tf32(product[i][j], left_high[i], right_low[j]);
                multiply_add_tf32(product[i][j], left_high[i], right_high[j]);
            }
    }
}

// Copies Rows x Cols of a row-major matrix to rows of Pitch floats. Outside of [.., end_row) x [.., end_col)
// it is zero.
template <int Rows, int Cols, int Pitch>
__device__ __forceinline__ void load_tile(float* to, const float* matrix, long long row_stride, int first_row,
                                          int end_row, int first_col, int end_col) {
    constexpr int CHUNKS = Cols / CHUNK;
    const u64 start = reinterpret_cast<u64>(matrix);
    const bool aligned = (start | static_cast<u64>(row_stride) * 4) % CHUNK_BYTES == 0;
#pragma unroll
    for (int id = threadIdx.x; id < Rows * CHUNKS; id += THREADS) {
        const int row = id / CHUNKS, col = id % CHUNKS * CHUNK;
        const int count = first_row + row < end_row ? min(max(end_col - first_col - col, 0), CHUNK) : 0;
        const float* from = matrix + (count ? (first_row + row) * row_stride + first_col + col : 0);
        const u32 address = shared_address(to + row * Pitch + col);
        if (aligned) {
            copy_async_16(address, from, count * 4);
        } else {
            for (int e = 0; e < CHUNK; ++e)
                copy_async_4(address + e * 4, from + (e < count ? e : 0), e < count ? 4 : 0);
        }
    }
}

// load(block, slot) and use(slot) for every block, STAGES - 1 loads ahead. All threads leave together.
template <typename Load, typename Use>
__device__ __forceinline__ void pipeline(int blocks, Load load, Use use) {
    for (int block = 0; block < STAGES - 1; ++block) {
        if (block < blocks) load(block, block);
        copy_async_commit();
    }
    for (int block = 0; block < blocks; ++block) {
        copy_async_wait<STAGES - 2>();
        __syncthreads();  // the slot is full for all, and all have left the slot that is filled next
        const int next = block + STAGES - 1;
        if (next < blocks) load(next, next % STAGES);
        copy_async_commit();
        use(block % STAGES);
    }
    copy_async_wait<0>();
    __syncthreads();
}
