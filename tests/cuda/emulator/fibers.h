// A block of CUDA threads as fibers of one host thread; the blocks of a cluster as fibers of the same one. A fiber runs until it has to wait for others, so
// a missing barrier lets one thread run far ahead of the rest: about the worst order a device could choose.
#pragma once
#include <csetjmp>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ucontext.h>

namespace emulator {

constexpr int MAX_THREADS = 1024;
constexpr int WARP_THREADS = 32;
constexpr int GROUP_THREADS = 128;  // a warpgroup
constexpr size_t STACK_BYTES = 64 * 1024;
constexpr uint32_t SHARED_BYTES = 227 * 1024;  // what one block may have on sm_90
constexpr int MAX_CLUSTER = 2;
constexpr uint32_t MAPPED = 1u << 31;  // an address that names its block, in the bits from 24 on
constexpr int PATIENCE = 20000;                // rounds without any event after which a block is called dead
constexpr int NAP_EVERY = 16;                  // rounds between naps of a warp, on average
constexpr int LONGEST_NAP = 64;                // rounds that a warp may fall behind at a time
constexpr int LATEST_START = 512;              // rounds that a block may begin after others of its cluster
constexpr int LONGEST_LAG = 1024;              // rounds that a lane may fall behind its warp, where lanes lag

struct Size {
    int x, y, z;
};

struct Fiber {
    ucontext_t entry;
    jmp_buf start, place;
    bool has_start, started, done;
    const unsigned* watched;  // what it waits for to change, if it waits for a meeting
    unsigned seen;

    bool is_waiting() const { return watched && *watched == seen; }
};

// Arguments of a launch. `seed` picks the order of warps and the moment of each asynchronous operation.
struct Launch {
    int blocks, threads;
    unsigned seed;
    unsigned shared_bytes;
};

inline Fiber fibers[MAX_THREADS];
inline unsigned char* stacks;
inline int order[MAX_THREADS];  // fibers in the order in which they take turns
inline int position;            // index of the running fiber in `order`
inline int current, threads, blocks, cluster, first_block, alive;
inline int alive_of[MAX_CLUSTER];
inline long asleep_until[MAX_THREADS / WARP_THREADS];
inline bool lanes_lag;  // nothing but what the language promises keeps the lanes of a warp together
inline long lags_until[MAX_THREADS];
inline unsigned shared_limit;
inline long rounds, last_event;
inline uint32_t random_state;
inline jmp_buf launcher;
inline char failure[256];
inline void (*body)(const void*);
inline const void* argument;
alignas(1024) inline unsigned char shared_memory[MAX_CLUSTER * SHARED_BYTES];

// Fibers of all blocks that run together.
inline int fiber_count() {
    return threads * cluster;
}

// The running block: its number in the cluster, and in the grid.
inline int rank() {
    return current / threads;
}

inline int block() {
    return first_block + rank();
}

inline uint32_t random_number() {
    random_state = random_state * 1664525u + 1013904223u;
    return random_state >> 16;
}

inline bool coin() {
    return random_number() & 1;
}

// Ends the launch: the fiber found something that is undefined on the device.
template <typename... Values>
[[noreturn]] void fail(const char* format, Values... values) {
    char what[160];
    snprintf(what, sizeof what, format, values...);
    snprintf(failure, sizeof failure, "block %d thread %d: %s", block(), current % threads, what);
    _longjmp(launcher, 2);
}

void deliver();  // lets asynchronous operations that are due happen; called once a round

// Something happened that a waiting fiber may have waited for.
inline void event() {
    last_event = rounds;
}

// Warps fall behind now and then: without that they would march in step and hide a missing barrier.
inline void begin_round() {
    ++rounds;
    if (random_number() % NAP_EVERY == 0) {
        const int warp = random_number() % (fiber_count() / WARP_THREADS);
        asleep_until[warp] = rounds + random_number() % LONGEST_NAP;
    }
    if (lanes_lag && random_number() % NAP_EVERY == 0)
        lags_until[random_number() % fiber_count()] = rounds + random_number() % LONGEST_LAG;
    deliver();
    if (rounds - last_event > PATIENCE) fail("deadlock");
}

// Goes to the next fiber that is awake; the caller has saved its own place.
[[noreturn]] inline void resume_next() {
    while (alive > 0) {
        if (++position == fiber_count()) {
            position = 0;
            begin_round();
        }
        current = order[position];
        Fiber& fiber = fibers[current];
        if (fiber.done || fiber.is_waiting()) continue;
        if (asleep_until[current / WARP_THREADS] > rounds || lags_until[current] > rounds) continue;
        if (fiber.started) _longjmp(fiber.place, 1);
        fiber.started = true;
        if (fiber.has_start) _longjmp(fiber.start, 1);
        setcontext(&fiber.entry);
    }
    _longjmp(launcher, 1);
}

__attribute__((noinline)) inline void yield() {
    if (_setjmp(fibers[current].place) == 0) resume_next();
}

inline void run_fiber() {
    fibers[current].has_start = true;
    _setjmp(fibers[current].start);  // where the next block begins
    body(argument);
    fibers[current].done = true;
    --alive;
    --alive_of[rank()];
    event();
    resume_next();
}

// Warps take turns in an order drawn from the seed; lanes keep their order.
inline void shuffle_warps() {
    const int warps = fiber_count() / WARP_THREADS;
    int drawn[MAX_THREADS / WARP_THREADS];
    for (int i = 0; i < warps; ++i) {
        const int other = random_number() % (i + 1);
        drawn[i] = drawn[other];
        drawn[other] = i;
    }
    for (int i = 0; i < fiber_count(); ++i) order[i] = drawn[i / WARP_THREADS] * WARP_THREADS + i % WARP_THREADS;
}

// Every fiber has its stack for good; each block enters them again.
inline void make_stacks() {
    stacks = static_cast<unsigned char*>(malloc(MAX_THREADS * STACK_BYTES));
    for (int i = 0; i < MAX_THREADS; ++i) {
        ucontext_t& entry = fibers[i].entry;
        getcontext(&entry);
        entry.uc_stack.ss_sp = stacks + i * STACK_BYTES;
        entry.uc_stack.ss_size = STACK_BYTES;
        entry.uc_link = nullptr;
        makecontext(&entry, run_fiber, 0);
    }
}

// A block of a cluster begins some rounds after the others.
inline void begin_late(int block, long round) {
    const int warps = threads / WARP_THREADS;
    for (int warp = block * warps; warp < (block + 1) * warps; ++warp) asleep_until[warp] = round;
}

inline void prepare_fibers() {
    alive = fiber_count();
    for (int& left : alive_of) left = threads;
    memset(asleep_until, 0, sizeof asleep_until);
    memset(lags_until, 0, sizeof lags_until);
    if (!stacks) make_stacks();
    for (int i = 0; i < fiber_count(); ++i) {
        fibers[i].started = fibers[i].done = false;
        fibers[i].watched = nullptr;
    }
    shuffle_warps();
    if (cluster > 1) begin_late(random_number() % cluster, random_number() % LATEST_START);
}

// Static arrays of shared memory that this block has come to.
constexpr int MAX_STATIC = 32;
inline void* found_static[MAX_STATIC];
inline int statics;

// Where a static array is declared: the first fiber of a block finds NaN there.
inline void leave_unwritten(void* array, size_t bytes) {
    if (cluster > 1) fail("a static array, which the blocks of a cluster would share here");
    for (int i = 0; i < statics; ++i)
        if (found_static[i] == array) return;
    if (statics == MAX_STATIC) fail("more than %d static arrays", MAX_STATIC);
    found_static[statics++] = array;
    memset(array, 0xFF, bytes);
}

void begin_blocks();  // forgets barriers and pending operations
void end_blocks();    // finishes what blocks may leave behind, or fails

// Runs a kernel, `together` blocks after others. 0: ran; 1: found a fault, described in `failure`.
inline int launch(const Launch& how, int together, void (*kernel)(const void*), const void* parameters) {
    if (how.blocks % together || together > MAX_CLUSTER || how.threads * together > MAX_THREADS) {
        snprintf(failure, sizeof failure, "%d blocks of %d threads in clusters of %d", how.blocks, how.threads, together);
        return 1;
    }
    cluster = together;
    threads = how.threads;
    blocks = how.blocks;
    shared_limit = how.shared_bytes;
    random_state = how.seed * 2654435761u + 1;
    body = kernel;
    argument = parameters;
    failure[0] = 0;
    for (first_block = 0; first_block < blocks; first_block += cluster) {
        for (int i = 0; i < cluster; ++i)  // not a number in every floating-point format
            memset(shared_memory + i * SHARED_BYTES, 0xFF, shared_limit);
        rounds = last_event = 0;
        statics = 0;
        begin_blocks();
        prepare_fibers();
        position = -1;
        const int how_it_ended = _setjmp(launcher);
        if (how_it_ended == 0) resume_next();
        if (how_it_ended == 2) return 1;
        current = 0;
        if (_setjmp(launcher) != 0) return 1;
        end_blocks();
    }
    return 0;
}

// A meeting of `count` fibers: the last one to come runs `work` on what all of them brought.
struct Meeting {
    int arrived;
    unsigned generation;
    void* brought[MAX_THREADS];
};

enum Place {
    CLUSTER_OF_BLOCKS,
    BLOCK,
    NAMED = BLOCK + MAX_CLUSTER,
    WARPS = NAMED + 16 * MAX_CLUSTER,
    GROUPS = WARPS + MAX_THREADS / WARP_THREADS,
    PLACES = GROUPS + 8
};
inline Meeting meetings[PLACES];

template <typename Work>
void meet(int place, int index, int count, void* mine, Work work) {
    Meeting& meeting = meetings[place];
    const unsigned generation = meeting.generation;
    meeting.brought[index] = mine;
    if (++meeting.arrived == count) {
        work(meeting.brought);
        meeting.arrived = 0;
        ++meeting.generation;
        event();
        return;
    }
    Fiber& fiber = fibers[current];
    fiber.watched = &meeting.generation;
    fiber.seen = generation;
    while (meeting.generation == generation) yield();
    fiber.watched = nullptr;
}

template <typename Work>
void meet_warp(void* mine, Work work) {
    const int warp = current / WARP_THREADS;
    meet(WARPS + warp, current % WARP_THREADS, WARP_THREADS, mine, work);
}

template <typename Work>
void meet_group(void* mine, Work work) {
    const int group = current / GROUP_THREADS;
    meet(GROUPS + group, current % GROUP_THREADS, GROUP_THREADS, mine, work);
}

// The barriers of a block and of all that run together.
inline void meet_block() {
    meet(BLOCK + rank(), current % threads, threads, nullptr, [](void**) {});
}

inline void meet_cluster() {
    meet(CLUSTER_OF_BLOCKS, current, fiber_count(), nullptr, [](void**) {});
}

// Memory that asynchronous copies may read.
struct Range {
    uintptr_t first, end;
};
constexpr int MAX_RANGES = 16;
inline Range readable[MAX_RANGES];
inline int ranges;

inline void check_readable(const void* from, size_t bytes) {
    const uintptr_t first = reinterpret_cast<uintptr_t>(from);
    for (int i = 0; i < ranges; ++i)
        if (first >= readable[i].first && first + bytes <= readable[i].end) return;
    fail("a copy reads outside of the arrays");
}

// The same address in a block of the cluster, and as it is in the block.
inline uint32_t mapped(uint32_t address, int block) {
    return MAPPED | static_cast<uint32_t>(block) << 24 | address;
}

inline uint32_t mapped(uint32_t address) {
    return address & MAPPED ? address : mapped(address, rank());
}

inline uint32_t unmapped(uint32_t address) {
    return address & 0xFFFFFF;
}

// Where in the memory of all blocks it is.
inline uint32_t placed(uint32_t address) {
    const int owner = mapped(address) >> 24 & 0x7F;
    if (owner >= cluster || !alive_of[owner]) fail("shared memory of block %d, which has ended", owner);
    return owner * SHARED_BYTES + unmapped(address);
}

// Bytes of shared memory behind a 32-bit address.
inline unsigned char* shared_bytes(uint32_t address, uint32_t bytes) {
    if (unmapped(address) + bytes > shared_limit || address % bytes)
        fail("shared address %u of %u bytes", unmapped(address), bytes);
    return shared_memory + placed(address);
}

}  // namespace emulator
