// The direction of LAMB, as src/kernels/ops/lamb.rs has it.
#pragma once
#include "arithmetic.cuh"

// m <- beta1 m + blend g, v <- beta2 v + (1 - beta2) g^2, u = m^ / (sqrt(v^) + epsilon) + decay x.
// Live factors of a job: 1 / (1 - beta1^t),
// 1 / sqrt(1 - beta2^t), the factor of the gradient and the rate of u.
template <typename C>
struct LambDirection {
    C beta1, blend, beta2, rest2, epsilon, decay, first, second, factor, rate;
    bool cautious;

    __device__ LambDirection(const LambScalars& s, const Job& job)
        : LambDirection(s, in_global_memory(job.live)) {}

    __device__ LambDirection(const LambScalars& s, const double* own)
        : beta1(scalar<C>(s.beta1())),
          blend(scalar<C>(s.blend())),
          beta2(scalar<C>(s.beta2())),
          rest2(scalar<C>(1.0 - s.beta2())),
          epsilon(scalar<C>(s.epsilon())),
          decay(scalar<C>(s.weight_decay())),
          first(scalar<C>(own[0])),
          second(scalar<C>(own[1])),
          factor(scalar<C>(own[2])),
          rate(scalar<C>(own[3])),
          cautious(s.cautious()) {}

    __device__ C along(C x, C m, C v) const {
        const C adam = quotient(m * first, root(v) * second + epsilon);
        return cautious && x * adam < C(0) ? adam : adam + decay * x;
    }

    // Updates both moments and returns the direction.
    __device__ C next(C x, C g, C& m, C& v) const {
        const C scaled = factor * g;
        m = beta1 * m + blend * scaled;
        v = beta2 * v + rest2 * (scaled * scaled);
        return along(x, m, v);
    }
};

// The moments, and x <- x - rate u. Operands: x, g, m, v.
template <typename C>
struct Lamb : LambOperands {
    LambDirection<C> direction;

    __device__ Lamb(const LambScalars& s, const Job& job) : direction(s, job) {}

    __device__ void operator()(C (&x)[4]) const {
        x[0] -= direction.rate * direction.next(x[0], x[1], x[2], x[3]);
    }
};

// x <- x - rate u along moments that are written. Operands: x, m, v.
template <typename C>
struct LambAlong : LambAlongOperands {
    LambDirection<C> direction;

    __device__ LambAlong(const LambScalars& s, const Job& job) : direction(s, job) {}

    __device__ void operator()(C (&x)[3]) const {
        x[0] -= direction.rate * direction.along(x[0], x[1], x[2]);
    }
};

// Sums of x^2 and u^2 of LAMB. Operands: x, g, m, v. The moments are written where they are among
// those that are.
template <typename C, typename Operands>
struct LambNorms : Operands {
    static constexpr int SUMS = 2;
    LambDirection<C> direction;
    double sum[2] = {0, 0};

    __device__ LambNorms(const LambScalars& s, const Job& job) : direction(s, job) {}

    __device__ void operator()(C (&x)[4]) {
        const double u = static_cast<double>(direction.next(x[0], x[1], x[2], x[3]));
        sum[0] += static_cast<double>(x[0]) * static_cast<double>(x[0]);
        sum[1] += u * u;
    }
};

template <typename C>
using LambNormsKept = LambNorms<C, LambNormsKeptOperands>;
template <typename C>
using LambNormsOnly = LambNorms<C, LambNormsOnlyOperands>;
