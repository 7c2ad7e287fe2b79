// The twin of src/kernels/cuda/src/ptx.cuh: the same names, done by the emulator.
#pragma once
#include "copies.h"
#include "language.h"
#include "matrix_units.h"

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

struct bfloat16 {
    u16 bits;
};
struct float16 {
    u16 bits;
};

inline u32 shared_address(const void* pointer) {
    const auto first = emulator::shared_memory + emulator::rank() * emulator::SHARED_BYTES;
    return static_cast<u32>(static_cast<const unsigned char*>(pointer) - first);
}

template <typename T>
inline T* in_global_memory(T* pointer) {
    return pointer;
}

inline void load_chunk(u32 (&bits)[4], const void* from) {
    if (reinterpret_cast<uintptr_t>(from) % sizeof bits) emulator::fail("a load of 16 bytes is not aligned");
    memcpy(bits, from, sizeof bits);
}

inline void load_half_chunk(u32 (&bits)[2], const void* from) {
    if (reinterpret_cast<uintptr_t>(from) % sizeof bits) emulator::fail("a load of 8 bytes is not aligned");
    memcpy(bits, from, sizeof bits);
}

inline void store_chunk(void* to, const u32 (&bits)[4]) {
    if (reinterpret_cast<uintptr_t>(to) % sizeof bits) emulator::fail("a store of 16 bytes is not aligned");
    memcpy(to, bits, sizeof bits);
}

inline float estimated_root(float x) {
    return std::sqrt(x);
}

inline float estimated_quotient(float x, float y) {
    return x / y;
}

inline float to_float(bfloat16 x) {
    return emulator::from_bfloat16(x.bits);
}

inline float to_float(float16 x) {
    return emulator::from_float16(x.bits);
}

inline u32 pack(float low, float high, bfloat16) {
    return emulator::bfloat16_of(low) | static_cast<u32>(emulator::bfloat16_of(high)) << 16;
}

inline u32 pack(float low, float high, float16) {
    return emulator::float16_of(low) | static_cast<u32>(emulator::float16_of(high)) << 16;
}

inline u32 to_tf32(float x) {
    return emulator::tf32_of(x);
}

inline void copy_async_16(u32 to, const void* from, u32 bytes) {
    emulator::copy_async(to, from, bytes, 16);
}

inline void copy_async_4(u32 to, const void* from, u32 bytes) {
    emulator::copy_async(to, from, bytes, 4);
}

inline void copy_async_commit() {
    emulator::commit_copies();
}

template <int Pending>
inline void copy_async_wait() {
    emulator::wait_for_copies(Pending);
}

inline void load_matrices(u32 (&to)[4], u32 row) {
    emulator::load_four_matrices(to, row, false);
}

inline void load_matrices_transposed(u32 (&to)[4], u32 row) {
    emulator::load_four_matrices(to, row, true);
}

inline void multiply_add(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1, bfloat16) {
    emulator::multiply_add_16_bit<emulator::from_bfloat16>(sum, a, b0, b1);
}

inline void multiply_add(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1, float16) {
    emulator::multiply_add_16_bit<emulator::from_float16>(sum, a, b0, b1);
}

inline void multiply_add_tf32(float (&sum)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    emulator::multiply_add_tf32_lanes(sum, a, b);
}
