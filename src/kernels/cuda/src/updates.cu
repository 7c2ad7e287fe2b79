// Elementwise passes: every operand is read and written once.
#include "each_elementwise.cuh"

template <typename C, template <typename> class Op, int Most>
__device__ __forceinline__ void update(const Jobs<Most>& jobs) {
    const Share share = share_of(jobs, blockIdx.x);
    Op<C> op(jobs.scalars, share.job);
    each_element<C>(Piece<Op<C>::OPERANDS>(share.job, share.piece), op);
}

// Arithmetic is float32, and float64 where an operand of a job is.
#define UPDATE(name, Op) EACH_FORM(name, Jobs, update, Op)

EACH_ELEMENTWISE(UPDATE)
