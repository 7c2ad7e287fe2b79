// Updates of matrices whose norm they keep, or that they follow.
#pragma once
#include "arithmetic.cuh"

// Sums of x^2, u^2 and x u in float64. Operands: x, u.
template <typename C>
struct WeightNorms : WeightNormsOperands {
    static constexpr int SUMS = 3;
    double sum[3] = {0, 0, 0};

    __device__ WeightNorms(const WeightNormsScalars&, const Job&) {}

    __device__ void operator()(C (&x)[2]) {
        const double weight = static_cast<double>(x[0]), update = static_cast<double>(x[1]);
        sum[0] += weight * weight;
        sum[1] += update * update;
        sum[2] += weight * update;
    }
};

// x <- a ((1 - decay) x - rate f u), late x <- a (1 - decay) (x - rate f u); cautious: the decay acts where x u >= 0, of
// the x that it is about to act on. Live factors of a job: f, the radius r, the square of the norm of x, f <x, u>,
// f^2 <u, u>; spherical: a = r / |x - rate f u|, else 1. Operands: x, u.
template <typename C>
struct Scaled : ScaledOperands {
    C rate, keep, scale;
    bool cautious, late;

    __device__ Scaled(const ScaledScalars& s, const Job& job)
        : keep(scalar<C>(1.0 - s.decay())), cautious(s.cautious() && s.decay() != 0), late(s.late()) {
        const double* live = in_global_memory(job.live);
        const double lr = s.rate();
        rate = scalar<C>(lr * live[0]);
        double factor = 1.0;
        if (s.spherical()) {
            const double square = live[2] - 2.0 * lr * live[3] + lr * lr * live[4];
            const double norm = sqrt(square < 0.0 ? 0.0 : square);
            factor = live[1] / (norm < 1e-10 ? 1e-10 : norm);
        }
        scale = scalar<C>(factor);
    }

    __device__ void operator()(C (&x)[2]) const {
        if (late) {
            const C y = x[0] - rate * x[1];
            x[0] = scale * (cautious && y * x[1] < C(0) ? y : y * keep);
            return;
        }
        const bool decays = !cautious || x[0] * x[1] >= C(0);
        x[0] = scale * ((decays ? x[0] * keep : x[0]) - rate * x[1]);
    }
};
