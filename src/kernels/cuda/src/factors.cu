// Factors of jobs that follow from sums on the device: one thread for each job.
#include "arithmetic.cuh"

constexpr int MOST = 384;

struct LambJob {
    const double* norms;   // the sums of x^2 and u^2, or null where they are not known yet
    const float* steps;    // where the number of steps is counted, or null
    double correction[2];  // of m and of the root of v, where the host counts
};

struct LambFactors {
    Rate rate;            // lr is for each unit of it
    double* out;          // four for each job: see LambDirection
    const double* group;  // the sum of squares over all gradients of the group, or null
    double max_grad_norm, grad_factor, lr, low, high, trust_clip, beta1, beta2;
    int count, adapts, corrects_moments, corrects_step;
    LambJob job[MOST];
};

// The trust ratio times lr, as src/kernels/ops/trust.rs has it.
__device__ __forceinline__ double lamb_rate(const LambFactors& what, const double* squares,
                                            const double (&correction)[2]) {
    double x = sqrt(squares[0]);
    const double u = sqrt(squares[1]);
    // A bound that is not set is NaN.
    if (what.low == what.low && what.high == what.high) x = fmin(fmax(x, what.low), what.high);
    double ratio = what.adapts && !(x <= 0 || u <= 0) ? x / u : 1.0;
    if (what.adapts && ratio > what.trust_clip) ratio = what.trust_clip;
    if (what.corrects_step) ratio *= correction[0] / correction[1];
    return what.lr * what.rate.value() * ratio;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    lamb_factors(const __grid_constant__ LambFactors what) {
    const int number = static_cast<int>(blockIdx.x) * THREADS + static_cast<int>(threadIdx.x);
    if (number >= what.count) return;
    const LambJob& job = what.job[number];
    double correction[2] = {job.correction[0], job.correction[1]};
    if (job.steps) {
        const float steps = *in_global_memory(job.steps);
        correction[0] = 1.0 / (1.0 - power(what.beta1, steps));
        correction[1] = 1.0 / sqrt(1.0 - power(what.beta2, steps));
    }
    double clip = 1.0;
    if (what.group) {
        const double norm = sqrt(*in_global_memory(what.group));
        if (norm > what.max_grad_norm) clip = what.max_grad_norm / norm;
    }
    double* out = in_global_memory(what.out) + 4 * number;
    out[0] = what.corrects_moments ? correction[0] : 1.0;
    out[1] = what.corrects_moments ? correction[1] : 1.0;
    out[2] = what.grad_factor * clip;
    out[3] = job.norms ? lamb_rate(what, in_global_memory(job.norms), correction) : 0.0;
}

struct UpdateJob {
    const double* updates;  // the sum of u^2
    const double* param;    // the sum of x^2, or null where rates do not follow it
    const float* steps;     // where the number of steps is counted, or null
    double rate;            // where the host knows it
    double count;           // elements
};

struct UpdateFactors {
    Rate unit;    // what the rates of the host are for each unit of
    double* out;  // for each job what the update is multiplied by, and the decay
    double grad_factor, threshold, floor, weight_decay;
    int count;
    int warms_up;
    UpdateJob job[MOST];
};

// Clipping and rates of Adafactor, as src/kernels/clipping.rs has them.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    update_factors(const __grid_constant__ UpdateFactors what) {
    const int number = static_cast<int>(blockIdx.x) * THREADS + static_cast<int>(threadIdx.x);
    if (number >= what.count) return;
    const UpdateJob& job = what.job[number];
    double rate = job.rate * what.unit.value();
    if (job.steps) {
        const double steps = static_cast<double>(*in_global_memory(job.steps));
        rate = fmin(what.warms_up ? 1e-6 * steps : 1e-2, 1.0 / sqrt(steps));
    }
    if (job.param) {
        const double size = sqrt(*in_global_memory(job.param) / job.count);
        rate *= size < what.floor ? what.floor : size;
    }
    const double ratio = sqrt(*in_global_memory(job.updates) / job.count) / what.threshold;
    double* out = in_global_memory(what.out) + 2 * number;
    // A NaN has to show.
    out[0] = rate * what.grad_factor / (ratio < 1.0 ? 1.0 : ratio);
    out[1] = rate * what.weight_decay;
}
