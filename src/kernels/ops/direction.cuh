// Elementwise passes of the optimizers with low-rank moments.
#pragma once
#include "arithmetic.cuh"

// Adam's direction on low-rank gradients. Factors of a job: see Corrections, the rate is f. Operands: r, m,
// v.
template <typename C>
struct Direction : DirectionOperands {
    Lerp<C> first;
    C beta2, rest2, epsilon, factor, rate, inverse_root;

    __device__ Direction(const DirectionScalars& s, const Job& job)
        : Direction(s, Corrections(job, s.beta1(), s.beta2(), s.unit())) {}

    __device__ Direction(const DirectionScalars& s, const Corrections& own)
        : first(Lerp<C>::keeping(s.beta1())),
          beta2(scalar<C>(s.beta2())),
          rest2(scalar<C>(1.0 - s.beta2())),
          epsilon(scalar<C>(s.epsilon())),
          factor(scalar<C>(s.grad_factor())),
          rate(scalar<C>(own.first)),
          inverse_root(scalar<C>(own.second)) {}

    __device__ void operator()(C (&x)[3]) const {
        const C g = factor * x[0];
        x[1] = first(x[1], g);
        x[2] = beta2 * x[2] + rest2 * (g * g);
        x[0] = quotient(rate * x[1], root(x[2]) * inverse_root + epsilon);
    }
};

// x <- x - rate u, then x <- (1 - decay) x, as above. Operands: x, u.
template <typename C>
struct ApplyLate : ApplyLateOperands {
    C rate, keep;
    bool cautious;

    __device__ ApplyLate(const ApplyLateScalars& s, const Job&)
        : rate(scalar<C>(s.rate())), keep(scalar<C>(1.0 - s.decay())), cautious(s.cautious()) {}

    __device__ void operator()(C (&x)[2]) const {
        const C y = x[0] - rate * x[1];
        x[0] = cautious && y * x[1] < C(0) ? y : y * keep;
    }
};
