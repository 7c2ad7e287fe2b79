// The generator Philox4x32-10, as src/kernels/cpu/philox.rs has it.
#pragma once
#include "ptx.cuh"

// One block of random numbers: ten rounds on a counter under a key.
__device__ __forceinline__ void philox(u32 (&counter)[4], u32 key0, u32 key1) {
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const u64 first = static_cast<u64>(0xD2511F53u) * counter[0];
        const u64 second = static_cast<u64>(0xCD9E8D57u) * counter[2];
        counter[0] = static_cast<u32>(second >> 32) ^ counter[1] ^ key0;
        counter[1] = static_cast<u32>(second);
        counter[2] = static_cast<u32>(first >> 32) ^ counter[3] ^ key1;
        counter[3] = static_cast<u32>(first);
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
}
