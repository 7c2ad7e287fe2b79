// Running means, in float64 whatever their type.
#include "updates.cuh"

// The share of the new value: the first factor of a job, or a power of the steps that the device counts.
__device__ __forceinline__ double new_share(const Scalars& s, const Job& job) {
    return job.steps ? pow(static_cast<double>(*in_global_memory(job.steps)), s[1]) : job.factor[0];
}

// m <- m + share (sum / count + epsilon - m). Scalars: epsilon, exponent of the steps. Second factor of a
// job: count. Operands: m, sum.
template <typename C>
struct Means {
    static constexpr int OPERANDS = 2;
    static constexpr u32 READS = 0b11;
    static constexpr u32 WRITES = 0b01;
    C share, epsilon, count;

    __device__ Means(const Scalars& s, const Job& job)
        : share(new_share(s, job)), epsilon(s[0]), count(job.factor[1]) {}

    __device__ void operator()(C (&x)[2]) const { x[0] += share * (x[1] / count + epsilon - x[0]); }
};

// v <- v + share ((factor g)^2 + epsilon - v). Scalars: epsilon, exponent of the steps, factor of the
// gradient. Operands: v, g.
template <typename C>
struct Squares {
    static constexpr int OPERANDS = 2;
    static constexpr u32 READS = 0b11;
    static constexpr u32 WRITES = 0b01;
    C share, epsilon, factor;

    __device__ Squares(const Scalars& s, const Job& job)
        : share(new_share(s, job)), epsilon(s[0]), factor(s[2]) {}

    __device__ void operator()(C (&x)[2]) const {
        const C g = factor * x[1];
        x[0] += share * (g * g + epsilon - x[0]);
    }
};

template <template <typename> class Op, int Most>
__device__ __forceinline__ void move_means(const Jobs<Most>& jobs) {
    const Share share = share_of(jobs, blockIdx.x);
    Op<double> op(jobs.scalars, share.job);
    each_element<double>(Piece<2>(share.job, share.piece), op);
}

#define MEANS(name, Op)                                        \
    extern "C" __global__ void __launch_bounds__(THREADS, 1)   \
        name##_few(const __grid_constant__ Jobs<FEW> jobs) {   \
        move_means<Op>(jobs);                                  \
    }                                                          \
    extern "C" __global__ void __launch_bounds__(THREADS, 1)   \
        name##_many(const __grid_constant__ Jobs<MANY> jobs) { \
        move_means<Op>(jobs);                                  \
    }

MEANS(means, Means)
MEANS(squares, Squares)
