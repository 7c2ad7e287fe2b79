// Instructions of sm_90a: barriers that count bytes, tensor copies, products of a warpgroup.
// tests/cuda/emulator/hopper.cuh has a twin of every name.
#pragma once
#include "ptx.cuh"

constexpr int GROUP = 128;  // threads of a warpgroup

// A tensor map as the driver encodes it.
struct __align__(128) TensorMap {
    u64 words[16];
};

// Barriers in shared memory. A phase ends when all have arrived and all announced bytes are there.
__device__ __forceinline__ void barrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes fresh barriers visible to the copy engine.
__device__ __forceinline__ void barriers_are_ready() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_arrive_expecting(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

// Waits for the end of the phase of this parity. A fresh barrier counts as past the phase of parity 1.
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    u32 done;
    do {
        asm volatile(
            "{\n.reg .pred p;\n"
            "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
            "selp.u32 %0, 1, 0, p;\n}"
            : "=r"(done)
            : "r"(barrier), "r"(parity)
            : "memory");
    } while (!done);
}

// This block's number in its cluster.
__device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// A barrier of all threads of a cluster.
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// How a thread arrives at a barrier of another block. A release at cluster scope compiles to MEMBAR.ALL.GPU, a
// fence of the whole device. The unqualified form, which CUTLASS has in ClusterBarrier, compiles to none. It
// orders the thread's writes for its own block alone, so it is enough where a thread has only read.
#ifdef OXIDION_UNQUALIFIED_ARRIVE
#define OXIDION_ARRIVE "mbarrier.arrive.shared::cluster.b64"
#else
#define OXIDION_ARRIVE "mbarrier.arrive.release.cluster.shared::cluster.b64"
#endif

// Arrives at the barrier that stands at this address in another block of the cluster.
__device__ __forceinline__ void barrier_arrive_at(u32 barrier, u32 rank) {
    asm volatile(
        "{\n.reg .b32 there;\n"
        "mapa.shared::cluster.u32 there, %0, %1;\n" OXIDION_ARRIVE " _, [there];\n}" ::"r"(barrier),
        "r"(rank)
        : "memory");
}

// A barrier of some of the block's threads.
__device__ __forceinline__ void named_barrier(int name, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

// Copies a box of a [z, y, x] tensor to shared memory and counts its bytes at the barrier.
__device__ __forceinline__ void tensor_load(u32 to, const TensorMap* map, u32 barrier, int x, int y, int z) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, "
        "%5}], [%2];" ::"r"(to),
        "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z)
        : "memory");
}

// The same to this address in all blocks of a cluster; each block's own barrier counts its bytes.
template <int Blocks>
__device__ __forceinline__ void tensor_load_to_cluster(u32 to, const TensorMap* map, u32 barrier, int x, int y,
                                                       int z) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
        "[%1, {%3, %4, %5}], [%2], %6;" ::"r"(to),
        "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "h"(static_cast<u16>((1 << Blocks) - 1))
        : "memory");
}

__device__ __forceinline__ void tensor_store(const TensorMap* map, u32 from, int x, int y, int z) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
                 "r"(from), "r"(x), "r"(y), "r"(z)
                 : "memory");
}

__device__ __forceinline__ void tensor_stores_commit() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until at most `Pending` groups of this thread's stores have yet to read shared memory.
template <int Pending>
__device__ __forceinline__ void tensor_stores_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(Pending) : "memory");
}

// Orders this thread's writes to shared memory before copies that the copy engine does later.
__device__ __forceinline__ void fence_shared_for_copies() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

template <int Registers>
__device__ __forceinline__ void give_registers_back() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}

template <int Registers>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}

// Four 8x8 matrices of 16-bit elements to shared memory; lane l gives the address of row l % 8 of
// matrix l / 8.
__device__ __forceinline__ void store_matrices(u32 row, const u32 (&bits)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(bits[0]),
                 "r"(bits[1]), "r"(bits[2]), "r"(bits[3])
                 : "memory");
}

__device__ __forceinline__ void store_matrices_transposed(u32 row, const u32 (&bits)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row),
                 "r"(bits[0]), "r"(bits[1]), "r"(bits[2]), "r"(bits[3])
                 : "memory");
}

__device__ __forceinline__ void store_shared(u32 address, u16 bits) {
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(bits) : "memory");
}

// 16 bytes to shared memory.
__device__ __forceinline__ void store_shared(u32 address, const u32 (&bits)[4]) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(bits[0]), "r"(bits[1]),
                 "r"(bits[2]), "r"(bits[3])
                 : "memory");
}

// Before the first product that uses registers which other instructions wrote.
__device__ __forceinline__ void products_begin() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void products_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int Pending>
__device__ __forceinline__ void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

// Keeps the compiler from reading sums before the wait in front of this.
__device__ __forceinline__ void fence_sums(float (&sum)[64]) {
#pragma unroll
    for (int i = 0; i < 64; ++i) asm volatile("" : "+f"(sum[i])::"memory");
}

#define OXIDION_EIGHT(array, i)                                                                     \
    "+f"(array[i]), "+f"(array[i + 1]), "+f"(array[i + 2]), "+f"(array[i + 3]), "+f"(array[i + 4]), \
        "+f"(array[i + 5]), "+f"(array[i + 6]), "+f"(array[i + 7])
#define OXIDION_GROUP_PRODUCT(element)                                                                   \
    asm volatile(                                                                                        \
        "{\n.reg .pred p;\nsetp.eq.u32 p, 0, 0;\n"                                                       \
        "wgmma.mma_async.sync.aligned.m64n128k16.f32." element "." element                               \
        " {"                                                                                             \
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                         \
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "               \
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "               \
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "              \
        "%64, %65, p, 1, 1, 0, 0;\n}"                                                                    \
        : OXIDION_EIGHT(sum, 0), OXIDION_EIGHT(sum, 8), OXIDION_EIGHT(sum, 16), OXIDION_EIGHT(sum, 24),  \
          OXIDION_EIGHT(sum, 32), OXIDION_EIGHT(sum, 40), OXIDION_EIGHT(sum, 48), OXIDION_EIGHT(sum, 56) \
        : "l"(left), "l"(right))

// sum += left right^T for 64 rows of left, 128 of right and 16 columns, by a warpgroup, asynchronously.
// Register 4 j + 2 h + e of lane l in warp w is row 16 w + l / 4 + 8 h and column 8 j + 2 (l % 4) + e.
__device__ __forceinline__ void group_product(float (&sum)[64], u64 left, u64 right, bfloat16) {
    OXIDION_GROUP_PRODUCT("bf16");
}

__device__ __forceinline__ void group_product(float (&sum)[64], u64 left, u64 right, float16) {
    OXIDION_GROUP_PRODUCT("f16");
}
