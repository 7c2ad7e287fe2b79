// The update of Lion.
#pragma once
#include "arithmetic.cuh"

// Lion: u = sign(beta1 m + (1 - beta1) g), m <- beta2 m + (1 - beta2) g, x <- (1 - decay) x - lr u. Operands:
// x, g, m.
template <typename C>
struct Lion : LionOperands {
    C lr, beta1, rest1, beta2, rest2, keep, factor;
    bool cautious;

    __device__ Lion(const LionScalars& s, const Job&)
        : lr(scalar<C>(s.lr())),
          beta1(scalar<C>(s.beta1())),
          rest1(scalar<C>(1.0 - s.beta1())),
          beta2(scalar<C>(s.beta2())),
          rest2(scalar<C>(1.0 - s.beta2())),
          keep(scalar<C>(1.0 - s.decay())),
          factor(scalar<C>(s.grad_factor())),
          cautious(s.cautious() && s.decay() != 0) {}

    __device__ void operator()(C (&x)[3]) const {
        const C g = factor * x[1];
        const C blend = beta1 * x[2] + rest1 * g;
        // As torch.sign: of what is no number zero.
        const C step = blend > C(0) ? lr : blend < C(0) ? -lr : C(0);
        x[2] = beta2 * x[2] + rest2 * g;
        x[0] = (cautious && x[0] * blend < C(0) ? x[0] : x[0] * keep) - step;
    }
};
