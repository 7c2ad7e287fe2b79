// Arithmetic in which every operation rounds by itself, as on the CPU. Of plain numbers the compiler makes
// one operation of a product and a sum, and a code or a random rounding may hang on the last bit.
//
// All moments have the bits of the CPU, as nothing is estimated before they are stored. A parameter follows
// an estimated root and quotient: it may be on the other side of a random threshold now and then.
#pragma once
#include "arithmetic.cuh"

__device__ __forceinline__ float rounded_product(float x, float y) { return __fmul_rn(x, y); }
__device__ __forceinline__ float rounded_sum(float x, float y) { return __fadd_rn(x, y); }
__device__ __forceinline__ double rounded_product(double x, double y) { return __dmul_rn(x, y); }
__device__ __forceinline__ double rounded_sum(double x, double y) { return __dadd_rn(x, y); }

template <typename T>
struct Unfused {
    T x;

    Unfused() = default;

    template <typename From>
    __device__ explicit Unfused(From from) : x(static_cast<T>(from)) {}

    template <typename To>
    __device__ explicit operator To() const {
        return static_cast<To>(x);
    }

    __device__ Unfused operator-() const { return Unfused(-x); }
    __device__ Unfused operator+(Unfused y) const { return Unfused(rounded_sum(x, y.x)); }
    __device__ Unfused operator-(Unfused y) const { return Unfused(rounded_sum(x, -y.x)); }
    __device__ Unfused operator*(Unfused y) const { return Unfused(rounded_product(x, y.x)); }
    __device__ Unfused& operator-=(Unfused y) { return *this = *this - y; }
    __device__ bool operator<(Unfused y) const { return x < y.x; }
    __device__ bool operator>(Unfused y) const { return x > y.x; }
    __device__ bool operator>=(Unfused y) const { return x >= y.x; }
};

template <typename T>
__device__ __forceinline__ Unfused<T> root(Unfused<T> x) {
    return Unfused<T>(root(x.x));
}

template <typename T>
__device__ __forceinline__ Unfused<T> quotient(Unfused<T> x, Unfused<T> y) {
    return Unfused<T>(quotient(x.x, y.x));
}
