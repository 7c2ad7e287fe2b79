// The twin of src/kernels/cuda/src/hopper.cuh: the same names, done by the emulator.
#pragma once
#include "barriers.h"
#include "group_products.h"
#include "ptx.cuh"
#include "tensor_copies.h"

constexpr int GROUP = emulator::GROUP_THREADS;

struct alignas(128) TensorMap {
    emulator::TensorLayout layout;
    unsigned char rest[128 - sizeof(emulator::TensorLayout)];
};
static_assert(sizeof(TensorMap) == 128, "the driver's size");

inline void barrier_init(u32 barrier, u32 arrivals) {
    emulator::setup_barrier(barrier, arrivals);
}

inline void barriers_are_ready() {}

inline void barrier_arrive(u32 barrier) {
    emulator::arrive(barrier, 0);
}

inline void barrier_arrive_expecting(u32 barrier, u32 bytes) {
    emulator::arrive(barrier, bytes);
}

inline void barrier_wait(u32 barrier, u32 parity) {
    emulator::wait_for_phase(barrier, parity);
}

inline u32 cluster_rank() {
    return emulator::rank();
}

inline void cluster_sync() {
    emulator::meet_cluster();
}

inline void barrier_arrive_at(u32 barrier, u32 rank) {
    emulator::arrive(emulator::mapped(barrier, rank), 0);
}

inline void named_barrier(int name, int threads) {
    emulator::meet_named(name, threads);
}

inline void tensor_load(u32 to, const TensorMap* map, u32 barrier, int x, int y, int z) {
    emulator::issue_load(to, map, barrier, x, y, z);
}

template <int Blocks>
inline void tensor_load_to_cluster(u32 to, const TensorMap* map, u32 barrier, int x, int y, int z) {
    if (Blocks != emulator::cluster) emulator::fail("a copy to %d blocks", Blocks);
    emulator::issue_load_to_all(to, map, barrier, x, y, z);
}

inline void tensor_store(const TensorMap* map, u32 from, int x, int y, int z) {
    emulator::issue_store(map, from, x, y, z);
}

inline void tensor_stores_commit() {
    emulator::commit_stores();
}

template <int Pending>
inline void tensor_stores_wait_read() {
    emulator::wait_for_stores(Pending);
}

inline void fence_shared_for_copies() {
    emulator::fence_writes();
}

template <int Registers>
inline void give_registers_back() {
    emulator::change_registers(Registers, false);
}

template <int Registers>
inline void take_registers() {
    emulator::change_registers(Registers, true);
}

// stmatrix: lane l holds elements 2 (l % 4) and the next of row l / 4 of each matrix.
inline void store_four_matrices(u32 row, const u32 (&bits)[4], bool transposed) {
    struct Lane {
        u32 row;
        const u32* bits;
    } lane{row, bits};
    emulator::meet_warp(&lane, [transposed](void** lanes) {
        for (int l = 0; l < emulator::WARP_THREADS; ++l) {
            const int writer = emulator::current / emulator::WARP_THREADS * emulator::WARP_THREADS + l;
            for (int i = 0; i < 8; ++i) {
                const int matrix = i / 2, pair = l % 4 * 2 + i % 2;
                const int r = transposed ? pair : l / 4, c = transposed ? l / 4 : pair;
                const u32 start = static_cast<Lane*>(lanes[8 * matrix + r])->row;
                const u32 two = static_cast<Lane*>(lanes[l])->bits[matrix];
                emulator::write_shared(writer, start + c * 2, static_cast<u16>(two >> 16 * (i % 2)));
            }
        }
    });
}

inline void store_matrices(u32 row, const u32 (&bits)[4]) {
    store_four_matrices(row, bits, false);
}

inline void store_matrices_transposed(u32 row, const u32 (&bits)[4]) {
    store_four_matrices(row, bits, true);
}

inline void store_shared(u32 address, u16 bits) {
    emulator::write_shared(emulator::current, address, bits);
}

inline void store_shared(u32 address, const u32 (&bits)[4]) {
    if (address % sizeof bits) emulator::fail("a store of 16 bytes is not aligned");
    for (u32 i = 0; i < 8; ++i) store_shared(address + 2 * i, static_cast<u16>(bits[i / 2] >> 16 * (i % 2)));
}

inline void products_begin() {
    emulator::fence_products();
}

inline void products_commit() {
    emulator::commit_products();
}

template <int Pending>
inline void products_wait() {
    emulator::wait_for_products(Pending);
}

inline void fence_sums(float (&sum)[64]) {
    emulator::check_settled(sum);
}

inline void group_product(float (&sum)[64], u64 left, u64 right, bfloat16) {
    emulator::issue_product<emulator::from_bfloat16>(sum, left, right);
}

inline void group_product(float (&sum)[64], u64 left, u64 right, float16) {
    emulator::issue_product<emulator::from_float16>(sum, left, right);
}
