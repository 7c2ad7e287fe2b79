// Elementwise passes that also sum something up, in the same order at every launch: each block leaves the
// sums of its piece, and a kernel of totals.cu adds those of a job.
#include "block_sum.cuh"
#include "lamb.cuh"
#include "updates.cuh"

// Sum of x^2 in float64, so that no finite float32 overflows. Operand: x.
template <typename C>
struct SumOfSquares {
    static constexpr int OPERANDS = 1;
    static constexpr u32 READS = 0b1;
    static constexpr u32 WRITES = 0;
    static constexpr int SUMS = 1;
    double sum[1] = {0};

    __device__ SumOfSquares(const Scalars&, const Job&) {}

    __device__ void operator()(C (&x)[1]) { sum[0] += static_cast<double>(x[0]) * static_cast<double>(x[0]); }
};

// Sums of x^2 and u^2 of LAMB. Scalars as LambDirection has them. Operands: x, g, m, v. Where `Store`, the
// moments are written.
template <typename C, bool Store>
struct LambNorms {
    static constexpr int OPERANDS = 4;
    static constexpr u32 READS = 0b1111;
    static constexpr u32 WRITES = Store ? 0b1100 : 0;
    static constexpr int SUMS = 2;
    LambDirection<C> direction;
    double sum[2] = {0, 0};

    __device__ LambNorms(const Scalars& s, const Job& job) : direction(s, job) {}

    __device__ void operator()(C (&x)[4]) {
        const double u = static_cast<double>(direction.next(x[0], x[1], x[2], x[3]));
        sum[0] += static_cast<double>(x[0]) * static_cast<double>(x[0]);
        sum[1] += u * u;
    }
};

template <typename C>
using LambNormsKept = LambNorms<C, true>;
template <typename C>
using LambNormsOnly = LambNorms<C, false>;

template <int Most>
struct SumJobs {
    Jobs<Most> jobs;
    double* partial;  // Op::SUMS for each piece
};

template <typename C, template <typename> class Op, int Most>
__device__ __forceinline__ void sum_pieces(const SumJobs<Most>& what) {
    const u32 piece = blockIdx.x;
    const Share share = share_of(what.jobs, piece);
    Op<C> op(what.jobs.scalars, share.job);
    each_element<C, true>(Piece<Op<C>::OPERANDS>(share.job, share.piece), op);
#pragma unroll
    for (int k = 0; k < Op<C>::SUMS; ++k) {
        const double sum = block_sum(op.sum[k]);
        if (threadIdx.x == 0)
            in_global_memory(what.partial)[static_cast<long long>(piece) * Op<C>::SUMS + k] = sum;
    }
}

#define SUM(name, Op) EACH_FORM(name, SumJobs, sum_pieces, Op)

SUM(sum_of_squares, SumOfSquares)
SUM(lamb_norms, LambNormsKept)
SUM(lamb_norms_only, LambNormsOnly)
