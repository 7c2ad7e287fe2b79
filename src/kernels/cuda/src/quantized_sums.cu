// The passes of sums.cu over operands that may be quantized or stochastically rounded. The order of a sum
// follows the blocks of these operands, so it is not that of sums.cu.
#include "quantized.cuh"
#include "each_sum.cuh"
#include "summed.cuh"

template <int Most>
struct QuantizedSumJobs {
    QuantizedJobs<Most> jobs;
    double* partial;  // Op::SUMS for each piece
};

template <typename Number, template <typename> class Operation, int Most>
__device__ __forceinline__ void sum_quantized(const QuantizedSumJobs<Most>& what) {
    using C = Unfused<Number>;
    const u32 piece = blockIdx.x;
    const int number = job_of(what.jobs, piece);
    const QuantizedJob& job = what.jobs.job[number];
    Operation<C> op(what.jobs.scalars, job.plain);
    each_block<C>(job, piece_of(what.jobs, number, piece) * job.share, op);
    leave_sums<QUANTIZED_WARPS>(op, what.partial, piece);
}

// The kernels of one operation, in float32 and in float64.
#define SUM_QUANTIZED(name, Op)                                                         \
    extern "C" __global__ void __launch_bounds__(QUANTIZED_THREADS, QUANTIZED_BLOCKS)       \
        name##_quantized_many(const __grid_constant__ QuantizedSumJobs<MANY_QUANTIZED> table) { \
        sum_quantized<float, Op>(table);                                                \
    }                                                                               \
    extern "C" __global__ void __launch_bounds__(QUANTIZED_THREADS, 1)                  \
        name##_quantized_wide(const __grid_constant__ QuantizedSumJobs<FEW> table) {        \
        sum_quantized<double, Op>(table);                                               \
    }

EACH_ENCODED_SUM(SUM_QUANTIZED)
