// What operations of elementwise passes are written with. An operation takes one element of every operand, as
// its CPU body in src/kernels/ops has it. scalars.cuh is written from the declarations there: of each operation
// its operands, a bit of READS and WRITES for each, and its scalars by name.
#pragma once
#include "lerp.cuh"
#include "scalars.cuh"

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
