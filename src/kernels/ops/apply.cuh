// Updates of parameters and their decay.
#pragma once
#include "arithmetic.cuh"

// x <- (1 - decay) x - rate u; cautious: the decay acts where x u >= 0. Operands: x, u.
template <typename C>
struct Apply : ApplyOperands {
    C rate, keep;
    bool cautious;

    __device__ Apply(const ApplyScalars& s, const Job&)
        : rate(scalar<C>(s.rate())), keep(scalar<C>(1.0 - s.decay())), cautious(s.cautious() && s.decay() != 0) {}

    __device__ void operator()(C (&x)[2]) const {
        const bool decays = !cautious || x[0] * x[1] >= C(0);
        x[0] = (decays ? x[0] * keep : x[0]) - rate * x[1];
    }
};

// x <- (1 - decay) x. Operand: x.
template <typename C>
struct Decay : DecayOperands {
    C keep;

    __device__ Decay(const DecayScalars& s, const Job&) : keep(scalar<C>(1.0 - s.decay())) {}

    __device__ void operator()(C (&x)[1]) const { x[0] = keep * x[0]; }
};
