// Tensor copies with the 128-byte swizzle. A load arrives at once, soon or late; a store reads shared memory
// at once or as late as its waits allow.
#pragma once
#include "barriers.h"
#include "fibers.h"
#include <deque>
#include <vector>

namespace emulator {

constexpr int ELEMENT_BYTES = 2;
constexpr int PATTERN_BYTES = 1024;

// What stands in a TensorMap here: extents and steps in elements, innermost first.
struct TensorLayout {
    void* start;
    int64_t extent[3], step[3];
    int32_t box[2];
};

// The 128-byte swizzle flips bits 4-6 of an address by its bits 7-9.
inline uint32_t swizzle(uint32_t address) {
    return address ^ (((address >> 7) & 7) << 4);
}

template <typename Visit>
void for_each_element(const TensorLayout& layout, uint32_t shared, int x, int y, int z, Visit visit) {
    const uint32_t start = placed(shared);
    for (int row = 0; row < layout.box[1]; ++row)
        for (int col = 0; col < layout.box[0]; ++col) {
            const bool inside =
                x + col < layout.extent[0] && y + row < layout.extent[1] && z < layout.extent[2];
            const int64_t offset =
                (x + col) * layout.step[0] + (y + row) * layout.step[1] + z * layout.step[2];
            unsigned char* there = static_cast<unsigned char*>(layout.start) + offset * ELEMENT_BYTES;
            const uint32_t here = (row * layout.box[0] + col) * ELEMENT_BYTES;
            visit(shared_memory + swizzle(start + here), inside ? there : nullptr);
        }
}

inline void check_box(const TensorLayout& layout, uint32_t address) {
    const uint32_t shared = unmapped(address);
    if (shared % PATTERN_BYTES) fail("a swizzled box at shared address %u", shared);
    if (layout.box[0] * ELEMENT_BYTES != 128) fail("a box of %d columns", layout.box[0]);
    if (reinterpret_cast<uintptr_t>(layout.start) % 16 || layout.step[1] % 8 || layout.step[2] % 8)
        fail("a tensor map of unaligned rows");
    if (shared + layout.box[0] * layout.box[1] * ELEMENT_BYTES > shared_limit)
        fail("a box behind shared memory");
}

struct TensorLoad {
    TensorLayout layout;
    uint32_t to, barrier;
    int x, y, z;
    long due;
};
inline std::vector<TensorLoad> loads;

inline void perform(const TensorLoad& load) {
    for_each_element(load.layout, load.to, load.x, load.y, load.z,
                     [](unsigned char* here, unsigned char* there) {
                         if (there)
                             memcpy(here, there, ELEMENT_BYTES);
                         else
                             memset(here, 0, ELEMENT_BYTES);
                     });
    Barrier& barrier = barrier_at(load.barrier);
    barrier.bytes -= load.layout.box[0] * load.layout.box[1] * ELEMENT_BYTES;
    end_phase_if_complete(barrier);
    event();
}

inline void issue_load(uint32_t to, const void* map, uint32_t barrier, int x, int y, int z) {
    TensorLoad load{*static_cast<const TensorLayout*>(map), mapped(to), mapped(barrier), x, y, z, 0};
    check_box(load.layout, to);
    const unsigned fate = random_number() % 8;
    load.due = rounds + (fate == 0 ? 100 + random_number() % 300 : random_number() % 8);
    if (fate == 1)
        perform(load);
    else
        loads.push_back(load);
}

// A copy for each block, at a moment of its own.
inline void issue_load_to_all(uint32_t to, const void* map, uint32_t barrier, int x, int y, int z) {
    for (int there = 0; there < cluster; ++there)
        issue_load(mapped(to, there), map, mapped(barrier, there), x, y, z);
}

// Elements of shared memory that a thread wrote and has not fenced for the copy engine: thread + 1, or 0.
inline uint16_t unfenced[MAX_CLUSTER * SHARED_BYTES / ELEMENT_BYTES];
inline std::vector<uint32_t> unfenced_by[MAX_THREADS];

inline void write_shared(int writer, uint32_t address, uint16_t bits) {
    memcpy(shared_bytes(address, ELEMENT_BYTES), &bits, sizeof bits);
    const uint32_t element = placed(address) / ELEMENT_BYTES;
    unfenced[element] = static_cast<uint16_t>(writer + 1);
    unfenced_by[writer].push_back(element);
}

inline void fence_writes() {
    for (uint32_t element : unfenced_by[current])
        if (unfenced[element] == current + 1) unfenced[element] = 0;
    unfenced_by[current].clear();
}

struct TensorStore {
    TensorLayout layout;
    uint32_t from;
    int x, y, z;
};
using StoreGroup = std::vector<TensorStore>;
inline StoreGroup open_stores[MAX_THREADS];
inline std::deque<StoreGroup> committed_stores[MAX_THREADS];

inline void perform(const TensorStore& store) {
    for_each_element(store.layout, store.from, store.x, store.y, store.z,
                     [](unsigned char* here, unsigned char* there) {
                         if (unfenced[(here - shared_memory) / ELEMENT_BYTES])
                             fail("a store reads what no fence made visible");
                         if (there) memcpy(there, here, ELEMENT_BYTES);
                     });
}

inline void issue_store(const void* map, uint32_t from, int x, int y, int z) {
    const TensorStore store{*static_cast<const TensorLayout*>(map), mapped(from), x, y, z};
    check_box(store.layout, from);
    if (coin())
        perform(store);
    else
        open_stores[current].push_back(store);
}

inline void commit_stores() {
    committed_stores[current].push_back(std::move(open_stores[current]));
    open_stores[current].clear();
}

inline void wait_for_stores(size_t pending) {
    auto& groups = committed_stores[current];
    while (groups.size() > pending) {
        for (const TensorStore& store : groups.front()) perform(store);
        groups.pop_front();
    }
}

inline void deliver_loads() {
    for (size_t i = 0; i < loads.size();) {
        if (loads[i].due > rounds) {
            ++i;
            continue;
        }
        const TensorLoad load = loads[i];
        loads.erase(loads.begin() + i);
        perform(load);
    }
}

inline void forget_tensor_copies() {
    loads.clear();
    for (int i = 0; i < cluster; ++i)
        memset(unfenced + i * SHARED_BYTES / ELEMENT_BYTES, 0, shared_limit / ELEMENT_BYTES * sizeof *unfenced);
    for (int thread = 0; thread < fiber_count(); ++thread) {
        unfenced_by[thread].clear();
        open_stores[thread].clear();
        committed_stores[thread].clear();
    }
}

inline void check_tensor_copies_are_over() {
    if (!loads.empty()) fail("a tensor load arrives after the end of the block");
    for (current = 0; current < fiber_count(); ++current) {
        if (!open_stores[current].empty()) fail("a tensor store is never committed");
        for (const StoreGroup& group : committed_stores[current])
            if (!group.empty()) fail("shared memory ends before a tensor store has read it");
    }
}

}  // namespace emulator
