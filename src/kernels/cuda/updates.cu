// Elementwise passes: every operand is read and written once.
#include "lamb.cuh"
#include "updates.cuh"

template <typename C, template <typename> class Op, int Most>
__device__ __forceinline__ void update(const Jobs<Most>& jobs) {
    const u32 piece = blockIdx.x;
    const int at = job_of(jobs, piece);
    const Job& job = jobs.job[at];
    const u32 before = at ? jobs.job[at - 1].end : 0;
    Op<C> op(jobs.scalars, job.factor);
    each_element<C>(Piece<Op<C>::OPERANDS>(job, piece - before), op);
}

// Arithmetic is float32, and float64 where an operand of a job is.
#define UPDATE(name, Op)                                          \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) \
        name##_few(const __grid_constant__ Jobs<FEW> jobs) {      \
        update<float, Op>(jobs);                                  \
    }                                                             \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) \
        name##_many(const __grid_constant__ Jobs<MANY> jobs) {    \
        update<float, Op>(jobs);                                  \
    }                                                             \
    extern "C" __global__ void __launch_bounds__(THREADS, 1)      \
        name##_wide(const __grid_constant__ Jobs<FEW> jobs) {     \
        update<double, Op>(jobs);                                 \
    }

UPDATE(momentum, Momentum)
UPDATE(momentum_alone, MomentumAlone)
UPDATE(accumulate, Accumulate)
UPDATE(apply, Apply)
UPDATE(apply_late, ApplyLate)
UPDATE(convert, Convert)
UPDATE(release, Release)
UPDATE(decay, Decay)
UPDATE(adamw, AdamW)
UPDATE(adamw_largest, AdamWLargest)
UPDATE(lion, Lion)
UPDATE(direction, Direction)
UPDATE(lamb, Lamb)
UPDATE(lamb_along, LambAlong)
