// Averages of weights.
#pragma once
#include "arithmetic.cuh"
#include "lerp.cuh"

// e <- (1 - c) e + c x, exactly x for c = 1. Operands: x, e.
template <typename C>
struct Average : AverageOperands {
    Lerp<C> mean;

    __device__ Average(const AverageScalars& s, const Job&) : mean(Lerp<C>::adding(s.share())) {}

    __device__ void operator()(C (&x)[2]) const { x[1] = mean(x[1], x[0]); }
};

// From y = (1 - b) z + b x and z to z - decay y and x. Operands: y, z.
template <typename C>
struct TakeApart : TakeApartOperands {
    C beta, rest, decay;

    __device__ TakeApart(const TakeApartScalars& s, const Job&)
        : beta(scalar<C>(s.beta())), rest(scalar<C>(1.0 - s.beta())), decay(scalar<C>(s.decay())) {}

    __device__ void operator()(C (&x)[2]) const {
        const C y = x[0], z = x[1];
        x[0] = z - decay * y;
        x[1] = quotient(y - rest * z, beta);
    }
};

// x <- (1 - c) x + c z, then from z and x to y = (1 - b) z + b x and z. Operands: z, x.
template <typename C>
struct PutTogether : PutTogetherOperands {
    Lerp<C> mean, between;

    __device__ PutTogether(const PutTogetherScalars& s, const Job&)
        : mean(Lerp<C>::adding(s.share())), between(Lerp<C>::adding(s.beta())) {}

    __device__ void operator()(C (&x)[2]) const {
        const C z = x[0];
        x[0] = between(z, mean(x[1], z));
        x[1] = z;
    }
};
