// The sum of squares.
#pragma once
#include "arithmetic.cuh"

// Sum of x^2 in float64, so that no finite float32 overflows. Operand: x.
template <typename C>
struct SumOfSquares : SumOfSquaresOperands {
    static constexpr int SUMS = 1;
    double sum[1] = {0};

    __device__ SumOfSquares(const SumOfSquaresScalars&, const Job&) {}

    __device__ void operator()(C (&x)[1]) { sum[0] += static_cast<double>(x[0]) * static_cast<double>(x[0]); }
};
