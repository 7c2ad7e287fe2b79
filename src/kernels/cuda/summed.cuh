// What elementwise passes sum up.
#pragma once
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

// What is read of a number that was stored in a type.
template <typename C>
__device__ __forceinline__ double as_stored(Type type, C x) {
    const float single = static_cast<float>(x);
    if (type == Type::float64) return static_cast<double>(x);
    if (type == Type::bfloat16) return to_float(bfloat16{static_cast<u16>(pack(single, 0.0f, bfloat16{}))});
    if (type == Type::float16) return to_float(float16{static_cast<u16>(pack(single, 0.0f, float16{}))});
    return single;
}

// Momentum that also sums u^2, of what is stored. Scalars and operands as Momentum has them.
template <typename C>
struct MomentumSquares {
    static constexpr int OPERANDS = Momentum<C>::OPERANDS;
    static constexpr u32 READS = Momentum<C>::READS;
    static constexpr u32 WRITES = Momentum<C>::WRITES;
    static constexpr int SUMS = 1;
    Momentum<C> momentum;
    Type stored;
    double sum[SUMS] = {0};

    __device__ MomentumSquares(const Scalars& s, const Job& job) : momentum(s, job), stored(job.type[2]) {}

    __device__ void operator()(C (&x)[OPERANDS]) {
        momentum(x);
        const double u = as_stored(stored, x[2]);
        sum[0] += u * u;
    }
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

// Leaves the sums of a block's piece, which `Warps` warps made.
template <int Warps, typename Op>
__device__ __forceinline__ void leave_sums(const Op& op, double* partial, u32 piece) {
#pragma unroll
    for (int k = 0; k < Op::SUMS; ++k) {
        const double sum = block_sum<Warps>(op.sum[k]);
        if (threadIdx.x == 0)
            in_global_memory(partial)[static_cast<long long>(piece) * Op::SUMS + k] = sum;
    }
}
