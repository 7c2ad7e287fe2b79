// Running means of squares, in float64 whatever their type.
#pragma once
#include "arithmetic.cuh"

// The share of the new value: the first factor of a job, or a power of the steps that the device counts.
__device__ __forceinline__ double new_share(const MeansScalars& s, const Job& job) {
    return job.steps ? pow(static_cast<double>(*in_global_memory(job.steps)), s.exponent()) : job.factor[0];
}

// A mean as it can be stored: one of finite numbers stays finite.
template <typename C>
__device__ __forceinline__ C stored_mean(C mean, C most) {
    constexpr C FINITE = C(1.7976931348623157e308);
    return mean > most && mean <= FINITE ? most : mean;
}

// m <- (1 - share) m + share (sum / count + epsilon). Second factor of a job: count. Operands: m, sum.
template <typename C>
struct Means : MeansOperands {
    Lerp<C> lerp;
    C epsilon, most, count;

    __device__ Means(const MeansScalars& s, const Job& job)
        : lerp(Lerp<C>::adding(new_share(s, job))), epsilon(s.epsilon()), most(s.most()), count(job.factor[1]) {}

    __device__ void operator()(C (&x)[2]) const { x[0] = stored_mean(lerp(x[0], x[1] / count + epsilon), most); }
};

// v <- (1 - share) v + share ((factor g)^2 + epsilon). Operands: v, g.
template <typename C>
struct Squares : SquaresOperands {
    Lerp<C> lerp;
    C epsilon, most, factor;

    __device__ Squares(const MeansScalars& s, const Job& job)
        : lerp(Lerp<C>::adding(new_share(s, job))), epsilon(s.epsilon()), most(s.most()), factor(s.grad_factor()) {}

    __device__ void operator()(C (&x)[2]) const {
        const C g = factor * x[1];
        x[0] = stored_mean(lerp(x[0], g * g + epsilon), most);
    }
};
