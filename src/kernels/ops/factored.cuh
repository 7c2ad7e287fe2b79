// The operations on matrices whose second moments are kept by row and by column, as
// src/kernels/ops/factored.rs has them. Each takes one element of every operand, with the scales of its row
// and of its column. Squares are summed in float64, so that no finite float32 overflows.
#pragma once
#include "arithmetic.cuh"
#include "stacks.cuh"

// (factor g)^2. Operand: g.
template <typename C>
struct GradientSquares : GradientSquaresOperands {
    static constexpr int SCALES = 0;
    static constexpr bool SUMS = true;
    static constexpr bool TOTAL = false;
    C factor;
    double total = 0;

    __device__ GradientSquares(const GradientSquaresScalars& s, const StackJob&)
        : factor(scalar<C>(s.grad_factor())) {}

    __device__ double operator()(C (&x)[1], const C*, const C*) const {
        const double g = static_cast<double>(factor * x[0]);
        return g * g;
    }
};

// As without it, and the sum of x^2. Operands: g, x.
template <typename C>
struct GradientAndParameterSquares : GradientAndParameterSquaresOperands {
    static constexpr int SCALES = 0;
    static constexpr bool SUMS = true;
    static constexpr bool TOTAL = true;
    C factor;
    double total = 0;

    __device__ GradientAndParameterSquares(const GradientSquaresScalars& s, const StackJob&)
        : factor(scalar<C>(s.grad_factor())) {}

    __device__ double operator()(C (&x)[2], const C*, const C*) {
        const double g = static_cast<double>(factor * x[0]);
        total += static_cast<double>(x[1]) * static_cast<double>(x[1]);
        return g * g;
    }
};

// The sum of u^2 with u = factor g scale. Operand: g.
template <typename C>
struct UpdateSquares : UpdateSquaresOperands {
    static constexpr int SCALES = 1;
    static constexpr bool SUMS = false;
    static constexpr bool TOTAL = true;
    C factor;
    double total = 0;

    __device__ UpdateSquares(const GradientSquaresScalars& s, const StackJob&)
        : factor(scalar<C>(s.grad_factor())) {}

    __device__ C operator()(C (&x)[1], const C* row, const C* col) {
        const double u = static_cast<double>(x[0] * (row[0] * factor) * col[0]);
        total += u * u;
        return C(0);
    }
};

// (u - m)^2 with u = factor g scale and m as it will be: beta1 m + (1 - beta1) u. Live factor of a job: that
// of u. Operands: g, m.
template <typename C>
struct Residual : ResidualOperands {
    static constexpr int SCALES = 1;
    static constexpr bool SUMS = true;
    static constexpr bool TOTAL = false;
    C keep, rest, factor;
    double total = 0;

    __device__ Residual(const ResidualScalars& s, const StackJob& job)
        : keep(scalar<C>(s.beta1())),
          rest(scalar<C>(1.0 - s.beta1())),
          factor(scalar<C>(in_global_memory(job.live)[0])) {}

    __device__ double operator()(C (&x)[2], const C* row, const C* col) const {
        const C u = x[0] * (row[0] * factor) * col[0];
        const double away = static_cast<double>(u - (keep * x[1] + rest * u));
        return away * away;
    }
};

// x <- (1 - decay) x - step with step = factor g scale, or with its running mean m; cautious: the decay acts
// where x step >= 0. Live factors of a job: that of the step, decay. Operands: x, g[, m].
template <typename C, typename Operands>
struct ScaledApplyWith : Operands {
    static constexpr int COUNT = Operands::OPERANDS;
    static constexpr int SCALES = 1;
    static constexpr bool SUMS = false;
    static constexpr bool TOTAL = false;
    C keep, rest, factor, decay;
    bool cautious;

    __device__ ScaledApplyWith(const ScaledApplyScalars& s, const StackJob& job)
        : ScaledApplyWith(s, in_global_memory(job.live)) {}

    __device__ ScaledApplyWith(const ScaledApplyScalars& s, const double* live)
        : keep(scalar<C>(s.beta1())),
          rest(scalar<C>(1.0 - s.beta1())),
          factor(scalar<C>(live[0])),
          decay(scalar<C>(live[1])),
          cautious(s.cautious()) {}

    __device__ C operator()(C (&x)[COUNT], const C* row, const C* col) const {
        C step = x[1] * (row[0] * factor) * col[0];
        if constexpr (COUNT == 3) {
            step = keep * x[2] + rest * step;
            x[2] = step;
        }
        x[0] = (cautious && x[0] * step < C(0) ? x[0] : x[0] - decay * x[0]) - step;
        return C(0);
    }
};

template <typename C>
using ScaledApply = ScaledApplyWith<C, ScaledApplyOperands>;
template <typename C>
using ScaledApplyAveraged = ScaledApplyWith<C, ScaledApplyAveragedOperands>;

// m <- beta1 m + (1 - beta1) u with u = factor g scale, then x as above along rate m scale, with a scale of
// its own. Live factor of a job: that of u. Operands: x, g, m.
template <typename C>
struct ConfidentApply : ConfidentApplyOperands {
    static constexpr int SCALES = 2;
    static constexpr bool SUMS = false;
    static constexpr bool TOTAL = false;
    C keep, rest, factor, rate, decay;
    bool cautious;

    __device__ ConfidentApply(const ConfidentApplyScalars& s, const StackJob& job)
        : keep(scalar<C>(s.beta1())),
          rest(scalar<C>(1.0 - s.beta1())),
          factor(scalar<C>(in_global_memory(job.live)[0])),
          rate(scalar<C>(s.rate())),
          decay(scalar<C>(s.decay())),
          cautious(s.cautious()) {}

    __device__ C operator()(C (&x)[3], const C* row, const C* col) const {
        x[2] = keep * x[2] + rest * (x[1] * (row[0] * factor) * col[0]);
        const C step = x[2] * (row[1] * rate) * col[1];
        x[0] = (cautious && x[0] * step < C(0) ? x[0] : x[0] - decay * x[0]) - step;
        return C(0);
    }
};
