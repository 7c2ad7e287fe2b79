// The update of AdamW.
#pragma once
#include "arithmetic.cuh"

// AdamW with decoupled decay. Factors of a job: see Corrections, the rate is lr. Operands: x, g, m, v[, the
// running maximum of v].
template <typename C, typename Operands>
struct AdamWith : Operands {
    static constexpr int COUNT = Operands::OPERANDS;
    Lerp<C> first;
    C factor, beta2, rest2, rate, inverse_root, epsilon;
    C decay;  // what is left of the parameter, but where a decay before the update is cautious
    int way;  // of the decay: 1 where it is cautious, and 2 where it comes late

    __device__ AdamWith(const AdamWScalars& s, const Job& job)
        : AdamWith(s, Corrections(job, s.beta1(), s.beta2(), s.all.rate.value())) {}

    __device__ AdamWith(const AdamWScalars& s, const Corrections& own)
        : first(Lerp<C>::keeping(s.beta1())),
          factor(scalar<C>(s.grad_factor())),
          beta2(scalar<C>(s.beta2())),
          rest2(scalar<C>(1.0 - s.beta2())),
          rate(scalar<C>(own.first)),
          inverse_root(scalar<C>(own.second)),
          epsilon(scalar<C>(s.epsilon())),
          decay(scalar<C>(s.cautious() && !s.late() && s.decay() != 0 ? s.decay() : 1.0 - s.decay())),
          way(s.decay() == 0 ? 0 : (s.cautious() ? 1 : 0) + (s.late() ? 2 : 0)) {}

    __device__ void operator()(C (&x)[COUNT]) const {
        const C g = factor * x[1];
        x[2] = first(x[2], g);
        x[3] = beta2 * x[3] + rest2 * (g * g);
        C second = x[3];
        if constexpr (COUNT == 5) {
            // A NaN in v has to show: the comparison is false for it.
            x[4] = x[4] >= second ? x[4] : second;
            second = x[4];
        }
        const C step = quotient(rate * x[2], root(second) * inverse_root + epsilon);
        if (way >= 2) {
            const C y = x[0] - step;
            x[0] = way == 3 && x[2] * y < C(0) ? y : y * decay;
        } else if (way == 1) {
            const C own_decay = x[2] * x[0] < C(0) ? C(0) : decay;
            x[0] = x[0] - own_decay * x[0] - step;
        } else {
            x[0] = x[0] * decay - step;
        }
    }
};

template <typename C>
using AdamW = AdamWith<C, AdamWOperands>;
template <typename C>
using AdamWLargest = AdamWith<C, AdamWLargestOperands>;
