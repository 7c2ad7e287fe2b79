// Running means, in float64 whatever their type.
#include "each_mean.cuh"

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

EACH_MEAN(MEANS)
