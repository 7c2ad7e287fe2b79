// The momentum with the norm of what it leaves.
#pragma once
#include "momentum.cuh"
#include "summed.cuh"

// Momentum that also sums u^2, of what is stored.
template <typename C>
struct MomentumSquares : MomentumSquaresOperands {
    static constexpr int SUMS = 1;
    Momentum<C> momentum;
    Type stored;
    double sum[SUMS] = {0};

    __device__ MomentumSquares(const MomentumScalars& s, const Job& job)
        : momentum(s, job), stored(job.type[2]) {}

    __device__ void operator()(C (&x)[OPERANDS]) {
        momentum(x);
        const double u = as_stored(stored, x[2]);
        sum[0] += u * u;
    }
};
