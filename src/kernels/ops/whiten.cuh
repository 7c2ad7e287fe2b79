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

// v <- b2 v + (1 - b2) y^2, y <- y / max(v, least)^p. Operands: y, v.
template <typename C>
struct Temper : TemperOperands {
    C beta2, rest2, least;
    double exponent;

    __device__ Temper(const TemperScalars& s, const Job&)
        : beta2(scalar<C>(s.beta2())),
          rest2(scalar<C>(1.0 - s.beta2())),
          least(scalar<C>(s.least())),
          exponent(s.power()) {}

    __device__ void operator()(C (&x)[2]) const {
        x[1] = beta2 * x[1] + rest2 * (x[0] * x[0]);
        const C base = x[1] < least ? least : x[1];
        if (exponent == 0.5) {
            x[0] = quotient(x[0], root(base));
        } else if (exponent != 0.0) {
            x[0] = quotient(x[0], scalar<C>(pow(static_cast<double>(base), exponent)));
        }
    }
};
