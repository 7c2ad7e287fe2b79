// Momentum: its update, the look ahead, and what is taken out of it.
#pragma once
#include "arithmetic.cuh"

// m <- mu m + factor g; u <- mu m + factor g (nesterov) or m. Operands: g, m, u.
template <typename C>
struct Momentum : MomentumOperands {
    C mu, factor;
    bool nesterov;

    __device__ Momentum(const MomentumScalars& s, const Job&)
        : mu(scalar<C>(s.mu())), factor(scalar<C>(s.grad_factor())), nesterov(s.nesterov()) {}

    __device__ void operator()(C (&x)[3]) const {
        const C g = factor * x[0];
        x[1] = mu * x[1] + g;
        x[2] = nesterov ? mu * x[1] + g : x[1];
    }
};

// m <- mu m + factor g. Operands: g, m.
template <typename C>
struct MomentumAlone : MomentumAloneOperands {
    C mu, factor;

    __device__ MomentumAlone(const MomentumScalars& s, const Job&)
        : mu(scalar<C>(s.mu())), factor(scalar<C>(s.grad_factor())) {}

    __device__ void operator()(C (&x)[2]) const { x[1] = mu * x[1] + factor * x[0]; }
};

// u <- m + factor g. Operands: g, m, u.
template <typename C>
struct Accumulate : AccumulateOperands {
    C factor;

    __device__ Accumulate(const AccumulateScalars& s, const Job&) : factor(scalar<C>(s.grad_factor())) {}

    __device__ void operator()(C (&x)[3]) const { x[2] = x[1] + factor * x[0]; }
};

// u <- m, then m <- keep m. Operands: m, u.
template <typename C>
struct Release : ReleaseOperands {
    C keep;

    __device__ Release(const ReleaseScalars& s, const Job&) : keep(scalar<C>(s.keep())) {}

    __device__ void operator()(C (&x)[2]) const {
        x[1] = x[0];
        x[0] = keep * x[0];
    }
};
