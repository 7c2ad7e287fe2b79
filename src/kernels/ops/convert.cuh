// Conversion of one type to another, and counters.
#pragma once
#include "arithmetic.cuh"

// y <- factor x. Operands: x, y.
template <typename C>
struct Convert : ConvertOperands {
    C factor;

    __device__ Convert(const ConvertScalars& s, const Job&) : factor(scalar<C>(s.factor())) {}

    __device__ void operator()(C (&x)[2]) const { x[1] = factor * x[0]; }
};

// x <- x + 1. Operand: x.
template <typename C>
struct Count : CountOperands {
    __device__ Count(const CountScalars&, const Job&) {}

    __device__ void operator()(C (&x)[1]) const { x[0] = x[0] + C(1); }
};
