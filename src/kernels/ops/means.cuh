// Running means of squares, in float64 whatever their type.
#pragma once
#include "arithmetic.cuh"

// The share of the new value: the first factor of a job, or a power of the steps that the device counts.
__device__ __forceinline__ double new_share(const MeansScalars& s, const Job& job) {
    return job.steps ? pow(static_cast<double>(*in_global_memory(job.steps)), s.exponent()) : job.factor[0];
}

// m <- m + share (sum / count + epsilon - m). Second factor of a job: count. Operands: m, sum.
template <typename C>
struct Means : MeansOperands {
    C share, epsilon, count;

    __device__ Means(const MeansScalars& s, const Job& job)
        : share(new_share(s, job)), epsilon(s.epsilon()), count(job.factor[1]) {}

    __device__ void operator()(C (&x)[2]) const { x[0] += share * (x[1] / count + epsilon - x[0]); }
};

// v <- v + share ((factor g)^2 + epsilon - v). Operands: v, g.
template <typename C>
struct Squares : SquaresOperands {
    C share, epsilon, factor;

    __device__ Squares(const MeansScalars& s, const Job& job)
        : share(new_share(s, job)), epsilon(s.epsilon()), factor(s.grad_factor()) {}

    __device__ void operator()(C (&x)[2]) const {
        const C g = factor * x[1];
        x[0] += share * (g * g + epsilon - x[0]);
    }
};
