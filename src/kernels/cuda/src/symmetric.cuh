// What is added to a symmetric product on its way out.
#pragma once
#include "common.cuh"

constexpr int ADDENDS = 2;

// out = alpha (product) + sum_i beta_i addend_i + gamma I. An addend without `first` and `each` is none.
struct SymmetricTerms {
    MatrixBatch addend[ADDENDS];
    Factor alpha;
    Factor beta[ADDENDS];
    Factor gamma;
};

// The terms of one matrix of the batch, read once.
template <typename T>
struct Finish {
    const T* addend[ADDENDS];
    long long row_stride[ADDENDS];
    float alpha, beta[ADDENDS], gamma;
    int size;

    __device__ __forceinline__ Finish(const SymmetricTerms& terms, int z, int size) : size(size) {
        alpha = factor_value(terms.alpha);
        gamma = factor_value(terms.gamma);
#pragma unroll
        for (int a = 0; a < ADDENDS; ++a) {
            const bool present = terms.addend[a].first || terms.addend[a].each;
            addend[a] = present ? matrix_start<const T>(terms.addend[a], z) : nullptr;
            beta[a] = present ? factor_value(terms.beta[a]) : 0.0f;
            row_stride[a] = terms.addend[a].row_stride;
        }
    }

    // The element before rounding. Addends are read in the lower triangle only: out of it the value means
    // nothing.
    __device__ __forceinline__ float operator()(float product, int row, int col) const {
        float value = alpha * product;
#pragma unroll
        for (int a = 0; a < ADDENDS; ++a)
            if (addend[a] && row < size && col <= row)
                value += beta[a] * to_float(*in_global_memory(addend[a] + row * row_stride[a] + col));
        return row == col ? value + gamma : value;
    }
};
