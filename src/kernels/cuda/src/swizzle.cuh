// Where operands of a warpgroup's product lie in shared memory.
#pragma once
#include "hopper.cuh"

constexpr int SWIZZLE_ROW_BYTES = 128;     // a row of an operand in shared memory: 64 elements of 16 bits
constexpr int SWIZZLE_GROUP_BYTES = 1024;  // eight rows, after which the pattern repeats

// Where chunk `chunk` (16 bytes) of a row lies under the 128-byte swizzle. The matrix starts at a multiple of
// 1024.
__device__ __forceinline__ u32 swizzled(u32 matrix, int row, int chunk) {
    return matrix + row * SWIZZLE_ROW_BYTES + ((chunk ^ (row % 8)) * 16);
}

// Descriptor of an operand whose rows are 128 bytes of consecutive columns, swizzled.
// Bits 0-13: address / 16; 16-29: unused here, 1 by convention; 32-45: bytes between groups of eight rows /
// 16; 62-63: 1 is the 128-byte swizzle.
__device__ __forceinline__ u64 operand_descriptor(u32 address) {
    return static_cast<u64>((address & 0x3FFFF) >> 4) | 1ull << 16 |
           static_cast<u64>(SWIZZLE_GROUP_BYTES >> 4) << 32 | 1ull << 62;
}
