// 16-bit floats and tf32 as the device rounds them.
#pragma once
#include <cstdint>
#include <cstring>

namespace emulator {

inline uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

inline float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

inline uint16_t bfloat16_of(float x) {
    const uint32_t bits = bits_of(x);
    if ((bits & 0x7FFFFFFF) > 0x7F800000) return 0x7FFF;
    return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

inline float from_bfloat16(uint16_t bits) {
    return float_of(static_cast<uint32_t>(bits) << 16);
}

inline uint16_t float16_of(float x) {
    const _Float16 rounded = static_cast<_Float16>(x);
    uint16_t bits;
    memcpy(&bits, &rounded, sizeof bits);
    return bits;
}

inline float from_float16(uint16_t bits) {
    _Float16 x;
    memcpy(&x, &bits, sizeof x);
    return static_cast<float>(x);
}

constexpr uint32_t TF32_DROPPED = 0x1FFF;  // mantissa bits that tf32 does not have

inline uint32_t tf32_of(float x) {
    const uint32_t bits = bits_of(x);
    if ((bits & 0x7F800000) == 0x7F800000) return bits;
    return (bits + (TF32_DROPPED + 1) / 2) & ~TF32_DROPPED;  // half away from zero
}

// Matrix units ignore the dropped bits of an operand.
inline float from_tf32(uint32_t bits) {
    return float_of(bits & ~TF32_DROPPED);
}

}  // namespace emulator
