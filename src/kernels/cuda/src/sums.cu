// Elementwise passes that also sum something up, in the same order at every launch: each block leaves the
// sums of its piece, and a kernel of totals.cu adds those of a job. There are no atomics. A sum depends
// neither on the alignment of operands nor on other jobs of the table.
#include "each_sum.cuh"
#include "summed.cuh"

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
    leave_sums<WARPS>(op, what.partial, piece);
}

#define SUM(name, Op) EACH_FORM(name, SumJobs, sum_pieces, Op)

EACH_SUM(SUM)
