// Functions that the formulas of src/kernels/ops are printed with.
#pragma once
#include "jobs.cuh"

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

template <typename C>
__device__ __forceinline__ C to_power(C x, double exponent) {
    return static_cast<C>(pow(static_cast<double>(x), exponent));
}
