// The direction of LAMB, as src/kernels/ops/lamb.rs has it.
#pragma once
#include "updates.cuh"

// m <- beta1 m + blend g, v <- beta2 v + (1 - beta2) g^2, u = m^ / (sqrt(v^) + epsilon) + decay x.
// Scalars: beta1, blend, beta2, epsilon, decay, cautious. Live factors of a job: 1 / (1 - beta1^t),
// 1 / sqrt(1 - beta2^t), the factor of the gradient and the rate of u.
template <typename C>
struct LambDirection {
    C beta1, blend, beta2, rest2, epsilon, decay, first, second, factor, rate;
    bool cautious;

    __device__ LambDirection(const Scalars& s, const Job& job)
        : LambDirection(s, in_global_memory(job.live)) {}

    __device__ LambDirection(const Scalars& s, const double* own)
        : beta1(scalar<C>(s[0])),
          blend(scalar<C>(s[1])),
          beta2(scalar<C>(s[2])),
          rest2(scalar<C>(1.0 - s[2])),
          epsilon(scalar<C>(s[3])),
          decay(scalar<C>(s[4])),
          first(scalar<C>(own[0])),
          second(scalar<C>(own[1])),
          factor(scalar<C>(own[2])),
          rate(scalar<C>(own[3])),
          cautious(s[5] != 0) {}

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
struct Lamb {
    static constexpr int OPERANDS = 4;
    static constexpr u32 READS = 0b1111;
    static constexpr u32 WRITES = 0b1101;
    LambDirection<C> direction;

    __device__ Lamb(const Scalars& s, const Job& job) : direction(s, job) {}

    __device__ void operator()(C (&x)[4]) const {
        x[0] -= direction.rate * direction.next(x[0], x[1], x[2], x[3]);
    }
};

// x <- x - rate u along moments that are written. Operands: x, m, v.
template <typename C>
struct LambAlong {
    static constexpr int OPERANDS = 3;
    static constexpr u32 READS = 0b111;
    static constexpr u32 WRITES = 0b001;
    LambDirection<C> direction;

    __device__ LambAlong(const Scalars& s, const Job& job) : direction(s, job) {}

    __device__ void operator()(C (&x)[3]) const {
        x[0] -= direction.rate * direction.along(x[0], x[1], x[2]);
    }
};
