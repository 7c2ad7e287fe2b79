// Terms that are added to a symmetric product before it is stored.
#pragma once
#include "common.cuh"

constexpr int ADDENDS = 2;
constexpr int CHUNK = CHUNK_BYTES / 2;  // elements of 16 bits

// out = alpha (product) + sum_i beta_i addend_i + gamma I. An addend without `first` and `each` is none.
struct SymmetricTerms {
    MatrixBatch addend[ADDENDS];
    Factor alpha;
    Factor beta[ADDENDS];
    Factor gamma;
};

// The factors of one launch, read once.
struct Factors {
    float alpha, beta[ADDENDS], gamma;
    bool present[ADDENDS];

    __device__ __forceinline__ explicit Factors(const SymmetricTerms& terms)
        : alpha(factor_value(terms.alpha)), gamma(factor_value(terms.gamma)) {
#pragma unroll
        for (int a = 0; a < ADDENDS; ++a) {
            present[a] = terms.addend[a].first || terms.addend[a].each;
            beta[a] = present[a] ? factor_value(terms.beta[a]) : 0.0f;
        }
    }
};

// How many of the eight elements from a column on are in the lower triangle: addends are read there only.
__device__ __forceinline__ int lower_count(int row, int col, int size) {
    return row < size ? min(max(row - col + 1, 0), CHUNK) : 0;
}

// Whether all eight are.
__device__ __forceinline__ bool is_whole(int row, int col, int size) {
    return row < size && row - col >= CHUNK - 1;
}

// Two neighbours of one row, `alpha product` so far, with those of an addend. Both kernels round in this order.
template <typename T>
__device__ __forceinline__ void add_pair(float& low, float& high, float beta, u32 bits, T) {
    low += beta * to_float(T{static_cast<u16>(bits)});
    high += beta * to_float(T{static_cast<u16>(bits >> 16)});
}
