// What happens around a block, and the entry that Python calls.
#pragma once
#include "barriers.h"
#include "copies.h"
#include "fibers.h"
#include "group_products.h"
#include "tensor_copies.h"

namespace emulator {

inline void deliver() {
    deliver_loads();
}

inline void begin_blocks() {
    for (Meeting& meeting : meetings) meeting.arrived = 0;
    forget_copies();
    forget_tensor_copies();
    forget_products();
    forget_barriers();
    share_registers();
}

inline void end_blocks() {
    for (int thread = 0; thread < fiber_count(); ++thread) {
        const CopyQueue& queue = copy_queues[thread];
        bool left = !queue.open.empty();
        for (const CopyGroup& group : queue.committed) left |= !group.empty();
        current = thread;
        if (left) fail("a copy to shared memory is never waited for");
    }
    check_tensor_copies_are_over();
}

}  // namespace emulator

// A C function that launches a kernel taking one structure by value. The copy has the alignment of the
// structure.
// It runs `together` blocks at a time.
#define EMULATED_KERNEL(kernel, Parameters, together)                                              \
    extern "C" __attribute__((used)) const size_t parameters_of_##kernel = sizeof(Parameters);     \
    extern "C" int launch_##kernel(const emulator::Launch* how, const void* bytes, size_t size) {  \
        static Parameters parameters;                                                              \
        if (size != sizeof parameters) return 2;                                                   \
        memcpy(&parameters, bytes, sizeof parameters);                                             \
        return emulator::launch(                                                                   \
            *how, together, [](const void* p) { kernel(*static_cast<const Parameters*>(p)); }, &parameters); \
    }

extern "C" __attribute__((used)) inline const char* emulator_failure() {
    return emulator::failure;
}

extern "C" __attribute__((used)) inline void emulator_let_lanes_lag(int lag) {
    emulator::lanes_lag = lag;
}

extern "C" __attribute__((used)) inline void emulator_forget_ranges() {
    emulator::ranges = 0;
}

extern "C" __attribute__((used)) inline int emulator_add_range(const void* first, size_t bytes) {
    if (emulator::ranges == emulator::MAX_RANGES) return 1;
    const uintptr_t start = reinterpret_cast<uintptr_t>(first);
    emulator::readable[emulator::ranges++] = {start, start + bytes};
    return 0;
}

// Lets asynchronous copies read all memory, as those of a driver may.
extern "C" __attribute__((used)) inline void emulator_allow_all() {
    emulator::readable[0] = {0, UINTPTR_MAX};
    emulator::ranges = 1;
}
