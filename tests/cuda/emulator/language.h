// The words of CUDA C++ that kernels use, for a host compiler.
#pragma once
#include "fibers.h"
#include "numbers.h"
#include <algorithm>
#include <cmath>

#define __device__
#define __host__
#define __global__ inline  // only the kernels that are asked for are compiled
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __cluster_dims__(...)  // library.py reads it
#define __grid_constant__
#define __align__(bytes) alignas(bytes)
#define __restrict__
#define __shared__ static
#define threadIdx (emulator::Size{emulator::current % emulator::threads, 0, 0})
#define blockIdx (emulator::Size{emulator::block(), 0, 0})
#define gridDim (emulator::Size{emulator::blocks, 1, 1})
#define DYNAMIC_SHARED(name) \
    unsigned char* const name = emulator::shared_memory + emulator::rank() * emulator::SHARED_BYTES

using std::max;
using std::min;

struct uint4 {
    unsigned x, y, z, w;
};
struct alignas(16) float4 {
    float x, y, z, w;
};

inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) {
    return {x, y, z, w};
}

inline float4 make_float4(float x, float y, float z, float w) {
    return {x, y, z, w};
}

inline float __uint_as_float(unsigned bits) {
    return emulator::float_of(bits);
}

inline unsigned __float_as_uint(float x) {
    return emulator::bits_of(x);
}

inline double __longlong_as_double(long long bits) {
    double x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

inline long long __double_as_longlong(double x) {
    long long bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

// Arithmetic that is rounded once each, as the host's is.
inline float __fmul_rn(float x, float y) {
    return x * y;
}

inline float __fadd_rn(float x, float y) {
    return x + y;
}

inline double __dmul_rn(double x, double y) {
    return x * y;
}

inline double __dadd_rn(double x, double y) {
    return x + y;
}

inline float __fdiv_rn(float x, float y) {
    return x / y;
}

inline float __fsqrt_rn(float x) {
    return std::sqrt(x);
}

inline unsigned __umulhi(unsigned x, unsigned y) {
    return static_cast<unsigned>(static_cast<unsigned long long>(x) * y >> 32);
}

inline void __syncthreads() {
    emulator::meet_block();
}

inline void __syncwarp() {
    emulator::meet_warp(nullptr, [](void**) {});
}

template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask) {
    struct Lane {
        T mine, theirs;
        int mask;
    } lane{value, value, mask};
    emulator::meet_warp(&lane, [](void** lanes) {
        for (int i = 0; i < emulator::WARP_THREADS; ++i) {
            Lane& own = *static_cast<Lane*>(lanes[i]);
            own.theirs = static_cast<Lane*>(lanes[i ^ own.mask])->mine;
        }
    });
    return lane.theirs;
}
