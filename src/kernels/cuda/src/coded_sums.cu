// The passes of sums.cu over operands that may be quantized or stochastically rounded. The order of a sum
// follows the blocks of these operands, so it is not that of sums.cu.
#include "coded.cuh"
#include "each_sum.cuh"
#include "summed.cuh"

template <int Most>
struct CodedSumJobs {
    CodedJobs<Most> jobs;
    double* partial;  // Op::SUMS for each piece
};

template <typename Number, template <typename> class Operation, int Most>
__device__ __forceinline__ void sum_coded(const CodedSumJobs<Most>& what) {
    using C = Unfused<Number>;
    const u32 piece = blockIdx.x;
    const int number = job_of(what.jobs, piece);
    const CodedJob& job = what.jobs.job[number];
    Operation<C> op(what.jobs.scalars, job.plain);
    each_block<C>(job, piece_of(what.jobs, number, piece) * job.share, op);
    leave_sums<CODED_WARPS>(op, what.partial, piece);
}

// The kernels of one operation, in float32 and in float64.
#define SUM_CODED(name, Op)                                                         \
    extern "C" __global__ void __launch_bounds__(CODED_THREADS, CODED_BLOCKS)       \
        name##_coded_many(const __grid_constant__ CodedSumJobs<MANY_CODED> table) { \
        sum_coded<float, Op>(table);                                                \
    }                                                                               \
    extern "C" __global__ void __launch_bounds__(CODED_THREADS, 1)                  \
        name##_coded_wide(const __grid_constant__ CodedSumJobs<FEW> table) {        \
        sum_coded<double, Op>(table);                                               \
    }

EACH_ENCODED_SUM(SUM_CODED)
