// Elementwise passes of the optimizers that work in an eigenbasis.
#pragma once
#include "arithmetic.cuh"

// v <- b2 v + (1 - b2) y^2, n <- f n / (sqrt v + eps). Factors of a job: f. Operands: n, y, v.
template <typename C>
struct Whiten : WhitenOperands {
    C beta2, rest2, epsilon, factor;

    __device__ Whiten(const WhitenScalars& s, const Job& job)
        : beta2(scalar<C>(s.beta2())),
          rest2(scalar<C>(1.0 - s.beta2())),
          epsilon(scalar<C>(s.epsilon())),
          factor(scalar<C>(job.factor[0])) {}

    __device__ void operator()(C (&x)[3]) const {
        x[2] = beta2 * x[2] + rest2 * (x[1] * x[1]);
        x[0] = quotient(factor * x[0], root(x[2]) + epsilon);
    }
};
