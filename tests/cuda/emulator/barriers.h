// mbarrier objects, named barriers and the register pools of blocks.
#pragma once
#include "fibers.h"

namespace emulator {

struct Barrier {
    bool ready;
    int arrivals, missing;
    long bytes;
    uint32_t parity;
};
inline Barrier barriers[MAX_CLUSTER * SHARED_BYTES / 8];

inline void forget_barriers() {
    for (int i = 0; i < cluster; ++i)
        memset(barriers + i * SHARED_BYTES / 8, 0, shared_limit / 8 * sizeof(Barrier));
}

inline Barrier& barrier_at(uint32_t address) {
    shared_bytes(address, 8);
    Barrier& barrier = barriers[placed(address) / 8];
    if (!barrier.ready) fail("barrier at %u is used before it is set up", unmapped(address));
    return barrier;
}

inline void end_phase_if_complete(Barrier& barrier) {
    if (barrier.missing < 0) fail("more arrivals than a barrier was set up for (%d)", barrier.arrivals);
    if (barrier.missing > 0 || barrier.bytes != 0) return;
    barrier.parity ^= 1;
    barrier.missing = barrier.arrivals;
    event();
}

inline void setup_barrier(uint32_t address, uint32_t arrivals) {
    shared_bytes(address, 8);
    barriers[placed(address) / 8] = {true, static_cast<int>(arrivals), static_cast<int>(arrivals), 0, 0};
}

inline void arrive(uint32_t address, long expected_bytes) {
    Barrier& barrier = barrier_at(address);
    barrier.bytes += expected_bytes;
    --barrier.missing;
    end_phase_if_complete(barrier);
}

inline void wait_for_phase(uint32_t address, uint32_t parity) {
    while (barrier_at(address).parity == (parity & 1)) yield();
}

inline void meet_named(int name, int count) {
    if (name < 1 || name > 15 || count % WARP_THREADS) fail("bar.sync %d, %d", name, count);
    const int place = NAMED + 16 * rank() + name;
    Meeting& meeting = meetings[place];
    meet(place, meeting.arrived, count, nullptr, [](void**) {});
}

// setmaxnreg: every warpgroup starts with an equal share; taking waits until others have given back.
constexpr int FILE_REGISTERS = 65536;
inline int free_registers[MAX_CLUSTER];
inline int group_registers[MAX_THREADS / GROUP_THREADS];

inline void share_registers() {
    const int share = FILE_REGISTERS / threads / 8 * 8;
    for (int& registers : group_registers) registers = share;
    for (int& registers : free_registers) registers = FILE_REGISTERS - share * threads;
}

inline void change_registers(int wanted, bool more) {
    const int group = current / GROUP_THREADS;
    const int change = (wanted - group_registers[group]) * GROUP_THREADS;
    if (more != (change > 0) || wanted % 8) fail("setmaxnreg %d from %d", wanted, group_registers[group]);
    while (change > free_registers[rank()]) yield();
    meet_group(nullptr, [=](void**) {
        free_registers[rank()] -= change;
        group_registers[group] = wanted;
    });
}

}  // namespace emulator
