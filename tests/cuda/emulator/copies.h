// cp.async: a copy happens when it is issued or when its group is waited for, by the toss of a coin.
// The first shows a slot that is refilled too early, the second one that is read too early.
#pragma once
#include "fibers.h"
#include <deque>
#include <vector>

namespace emulator {

struct Copy {
    unsigned char* to;
    const void* from;
    unsigned bytes, width;
};

using CopyGroup = std::vector<Copy>;
struct CopyQueue {
    CopyGroup open;
    std::deque<CopyGroup> committed;
};
inline CopyQueue copy_queues[MAX_THREADS];

inline void perform(const Copy& copy) {
    memset(copy.to, 0, copy.width);
    if (copy.bytes) memcpy(copy.to, copy.from, copy.bytes);
}

inline void copy_async(uint32_t to, const void* from, unsigned bytes, unsigned width) {
    if (reinterpret_cast<uintptr_t>(from) % width) fail("cp.async of %u bytes from an odd place", width);
    if (bytes > width) fail("cp.async reads %u of %u bytes", bytes, width);
    if (bytes) check_readable(from, bytes);
    const Copy copy{shared_bytes(to, width), from, bytes, width};
    if (coin())
        perform(copy);
    else
        copy_queues[current].open.push_back(copy);
}

inline void commit_copies() {
    CopyQueue& queue = copy_queues[current];
    queue.committed.push_back(std::move(queue.open));
    queue.open.clear();
}

inline void wait_for_copies(size_t pending) {
    auto& groups = copy_queues[current].committed;
    while (groups.size() > pending) {
        for (const Copy& copy : groups.front()) perform(copy);
        groups.pop_front();
    }
}

inline void forget_copies() {
    for (CopyQueue& queue : copy_queues) {
        queue.open.clear();
        queue.committed.clear();
    }
}

}  // namespace emulator
