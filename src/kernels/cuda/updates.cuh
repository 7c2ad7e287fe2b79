// The operations of the elementwise passes, as src/kernels/cpu has them. Each takes one element of every
// operand.
//
// Scalars come in the order of the constructors. READS and WRITES have a bit for each operand.
#pragma once
#include "jobs.cuh"

template <typename C>
__device__ __forceinline__ C scalar(double x) {
    return static_cast<C>(x);
}

// In float32 to about two units in the last place: what is exact takes registers and a subroutine.
__device__ __forceinline__ float root(float x) { return estimated_root(x); }

__device__ __forceinline__ float quotient(float x, float y) { return estimated_quotient(x, y); }

__device__ __forceinline__ double root(double x) { return sqrt(x); }

__device__ __forceinline__ double quotient(double x, double y) { return x / y; }

// base to the power of a whole number.
__device__ __forceinline__ double power(double base, float steps) {
    double result = 1.0;
    for (u32 rest = static_cast<u32>(steps); rest; rest /= 2) {
        if (rest % 2) result *= base;
        base *= base;
    }
    return result;
}

// The factors of Adam's moments: rate / (1 - beta1^t) and 1 / sqrt(1 - beta2^t). The host has them where it
// counts the steps; where the device does, a job's factor is the rate. `unit` multiplies it.
struct Corrections {
    double first, second;

    __device__ Corrections(const Job& job, double beta1, double beta2, double unit)
        : first(job.factor[0] * unit), second(job.factor[1]) {
        if (job.steps) {
            const float steps = *in_global_memory(job.steps);
            first /= 1.0 - power(beta1, steps);
            second = 1.0 / sqrt(1.0 - power(beta2, steps));
        }
    }
};

// x <- x + 1. Operand: x.
template <typename C>
struct Count {
    static constexpr int OPERANDS = 1;
    static constexpr u32 READS = 0b1;
    static constexpr u32 WRITES = 0b1;

    __device__ Count(const Scalars&, const Job&) {}

    __device__ void operator()(C (&x)[1]) const { x[0] = x[0] + C(1); }
};

// m <- mu m + factor g; u <- mu m + factor g (nesterov) or m. Scalars: mu, factor, nesterov. Operands: g, m,
// u.
template <typename C>
struct Momentum {
    static constexpr int OPERANDS = 3;
    static constexpr u32 READS = 0b011;
    static constexpr u32 WRITES = 0b110;
    C mu, factor;
    bool nesterov;

    __device__ Momentum(const Scalars& s, const Job&)
        : mu(scalar<C>(s[0])), factor(scalar<C>(s[1])), nesterov(s[2] != 0) {}

    __device__ void operator()(C (&x)[3]) const {
        const C g = factor * x[0];
        x[1] = mu * x[1] + g;
        x[2] = nesterov ? mu * x[1] + g : x[1];
    }
};

// m <- mu m + factor g. Scalars: mu, factor. Operands: g, m.
template <typename C>
struct MomentumAlone {
    static constexpr int OPERANDS = 2;
    static constexpr u32 READS = 0b11;
    static constexpr u32 WRITES = 0b10;
    C mu, factor;

    __device__ MomentumAlone(const Scalars& s, const Job&)
        : mu(scalar<C>(s[0])), factor(scalar<C>(s[1])) {}

    __device__ void operator()(C (&x)[2]) const { x[1] = mu * x[1] + factor * x[0]; }
};

// u <- m + factor g. Scalar: factor. Operands: g, m, u.
template <typename C>
struct Accumulate {
    static constexpr int OPERANDS = 3;
    static constexpr u32 READS = 0b011;
    static constexpr u32 WRITES = 0b100;
    C factor;

    __device__ Accumulate(const Scalars& s, const Job&) : factor(scalar<C>(s[0])) {}

    __device__ void operator()(C (&x)[3]) const { x[2] = x[1] + factor * x[0]; }
};

// x <- (1 - decay) x - rate u; cautious: the decay acts where x u >= 0. Scalars: rate, decay, cautious.
// Operands: x, u.
template <typename C>
struct Apply {
    static constexpr int OPERANDS = 2;
    static constexpr u32 READS = 0b11;
    static constexpr u32 WRITES = 0b01;
    C rate, keep;
    bool cautious;

    __device__ Apply(const Scalars& s, const Job&)
        : rate(scalar<C>(s[0])), keep(scalar<C>(1.0 - s[1])), cautious(s[2] != 0 && s[1] != 0) {}

    __device__ void operator()(C (&x)[2]) const {
        const bool decays = !cautious || x[0] * x[1] >= C(0);
        x[0] = (decays ? x[0] * keep : x[0]) - rate * x[1];
    }
};

// x <- x - rate u, then x <- (1 - decay) x, as above. Scalars: rate, decay, cautious. Operands: x, u.
template <typename C>
struct ApplyLate {
    static constexpr int OPERANDS = 2;
    static constexpr u32 READS = 0b11;
    static constexpr u32 WRITES = 0b01;
    C rate, keep;
    bool cautious;

    __device__ ApplyLate(const Scalars& s, const Job&)
        : rate(scalar<C>(s[0])), keep(scalar<C>(1.0 - s[1])), cautious(s[2] != 0) {}

    __device__ void operator()(C (&x)[2]) const {
        const C y = x[0] - rate * x[1];
        x[0] = cautious && y * x[1] < C(0) ? y : y * keep;
    }
};

// y <- factor x. Scalar: factor. Operands: x, y.
template <typename C>
struct Convert {
    static constexpr int OPERANDS = 2;
    static constexpr u32 READS = 0b01;
    static constexpr u32 WRITES = 0b10;
    C factor;

    __device__ Convert(const Scalars& s, const Job&) : factor(scalar<C>(s[0])) {}

    __device__ void operator()(C (&x)[2]) const { x[1] = factor * x[0]; }
};

// u <- m, then m <- keep m. Scalar: keep. Operands: m, u.
template <typename C>
struct Release {
    static constexpr int OPERANDS = 2;
    static constexpr u32 READS = 0b01;
    static constexpr u32 WRITES = 0b11;
    C keep;

    __device__ Release(const Scalars& s, const Job&) : keep(scalar<C>(s[0])) {}

    __device__ void operator()(C (&x)[2]) const {
        x[1] = x[0];
        x[0] = keep * x[0];
    }
};

// x <- (1 - decay) x. Scalar: decay. Operand: x.
template <typename C>
struct Decay {
    static constexpr int OPERANDS = 1;
    static constexpr u32 READS = 0b1;
    static constexpr u32 WRITES = 0b1;
    C keep;

    __device__ Decay(const Scalars& s, const Job&) : keep(scalar<C>(1.0 - s[0])) {}

    __device__ void operator()(C (&x)[1]) const { x[0] = keep * x[0]; }
};

// AdamW with decoupled decay. Scalars: beta1, beta2, epsilon, decay, cautious, late, factor of the gradient.
// Factors of a job: see Corrections, the rate is lr. Operands: x, g, m, v[, the running maximum of v].
template <typename C, bool Largest>
struct AdamWith {
    static constexpr int OPERANDS = Largest ? 5 : 4;
    static constexpr u32 READS = Largest ? 0b11111 : 0b1111;
    static constexpr u32 WRITES = Largest ? 0b11101 : 0b1101;
    C factor, rest1, beta2, rest2, rate, inverse_root, epsilon, decay, keep;
    bool cautious, late;

    __device__ AdamWith(const Scalars& s, const Job& job)
        : AdamWith(s, Corrections(job, s[0], s[1], s.rate.value())) {}

    __device__ AdamWith(const Scalars& s, const Corrections& own)
        : factor(scalar<C>(s[6])),
          rest1(scalar<C>(1.0 - s[0])),
          beta2(scalar<C>(s[1])),
          rest2(scalar<C>(1.0 - s[1])),
          rate(scalar<C>(own.first)),
          inverse_root(scalar<C>(own.second)),
          epsilon(scalar<C>(s[2])),
          decay(scalar<C>(s[3])),
          keep(scalar<C>(1.0 - s[3])),
          cautious(s[4] != 0 && s[3] != 0),
          late(s[5] != 0 && s[3] != 0) {}

    __device__ void operator()(C (&x)[OPERANDS]) const {
        const C g = factor * x[1];
        x[2] = x[2] + rest1 * (g - x[2]);
        x[3] = beta2 * x[3] + rest2 * (g * g);
        C second = x[3];
        if constexpr (Largest) {
            // A NaN in v has to show: the comparison is false for it.
            x[4] = x[4] >= second ? x[4] : second;
            second = x[4];
        }
        const C step = quotient(rate * x[2], root(second) * inverse_root + epsilon);
        if (late) {
            const C y = x[0] - step;
            x[0] = cautious && x[2] * y < C(0) ? y : y * keep;
        } else if (cautious) {
            const C own_decay = x[2] * x[0] < C(0) ? C(0) : decay;
            x[0] = x[0] - own_decay * x[0] - step;
        } else {
            x[0] = x[0] * keep - step;
        }
    }
};

template <typename C>
using AdamW = AdamWith<C, false>;
template <typename C>
using AdamWLargest = AdamWith<C, true>;

// Lion: u = sign(beta1 m + (1 - beta1) g), m <- beta2 m + (1 - beta2) g, x <- (1 - decay) x - lr u.
// Scalars: lr, beta1, beta2, decay, cautious, factor of the gradient. Operands: x, g, m.
template <typename C>
struct Lion {
    static constexpr int OPERANDS = 3;
    static constexpr u32 READS = 0b111;
    static constexpr u32 WRITES = 0b101;
    C lr, beta1, rest1, beta2, rest2, keep, factor;
    bool cautious;

    __device__ Lion(const Scalars& s, const Job&)
        : lr(scalar<C>(s[0])),
          beta1(scalar<C>(s[1])),
          rest1(scalar<C>(1.0 - s[1])),
          beta2(scalar<C>(s[2])),
          rest2(scalar<C>(1.0 - s[2])),
          keep(scalar<C>(1.0 - s[3])),
          factor(scalar<C>(s[5])),
          cautious(s[4] != 0 && s[3] != 0) {}

    __device__ void operator()(C (&x)[3]) const {
        const C g = factor * x[1];
        const C blend = beta1 * x[2] + rest1 * g;
        const C sign = blend > C(0) ? lr : blend < C(0) ? -lr : C(0);
        // Nothing is added for a number; NaN for what is none, so that it shows.
        const C step = sign + C(0) * blend;
        x[2] = beta2 * x[2] + rest2 * g;
        x[0] = (cautious && x[0] * blend < C(0) ? x[0] : x[0] * keep) - step;
    }
};

// Adam's direction on low-rank gradients. Scalars: beta1, beta2, epsilon, factor of the gradient, unit.
// Factors of a job: see Corrections, the rate is f. Operands: r, m, v.
template <typename C>
struct Direction {
    static constexpr int OPERANDS = 3;
    static constexpr u32 READS = 0b111;
    static constexpr u32 WRITES = 0b111;
    C rest1, beta2, rest2, epsilon, factor, rate, inverse_root;

    __device__ Direction(const Scalars& s, const Job& job)
        : Direction(s, Corrections(job, s[0], s[1], s[4])) {}

    __device__ Direction(const Scalars& s, const Corrections& own)
        : rest1(scalar<C>(1.0 - s[0])),
          beta2(scalar<C>(s[1])),
          rest2(scalar<C>(1.0 - s[1])),
          epsilon(scalar<C>(s[2])),
          factor(scalar<C>(s[3])),
          rate(scalar<C>(own.first)),
          inverse_root(scalar<C>(own.second)) {}

    __device__ void operator()(C (&x)[3]) const {
        const C g = factor * x[0];
        x[1] = x[1] + rest1 * (g - x[1]);
        x[2] = beta2 * x[2] + rest2 * (g * g);
        x[0] = quotient(rate * x[1], root(x[2]) * inverse_root + epsilon);
    }
};
