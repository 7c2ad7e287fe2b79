// A block of CUDA threads as fibers of one host thread. A fiber runs until it has to wait for others, so
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
constexpr int PATIENCE = 20000;                // rounds without any event after which a block is called dead
constexpr int NAP_EVERY = 16;                  // rounds between naps of a warp, on average
constexpr int LONGEST_NAP = 64;                // rounds that a warp may fall behind at a time
constexpr int LONGEST_LAG = 1024;              // rounds that a lane may fall behind its warp, where lanes lag

struct Size {
    int x, y, z;
};

struct Fiber {
    ucontext_t entry;
    jmp_buf place;
    bool started, done;
};

// What a launch is told. `seed` picks the order of warps and the moment of each asynchronous operation.
struct Launch {
    int blocks, threads;
    unsigned seed;
    unsigned shared_bytes;
};

inline Fiber fibers[MAX_THREADS];
inline unsigned char* stacks;
inline int order[MAX_THREADS];  // fibers in the order in which they take turns
inline int position;            // index of the running fiber in `order`
inline int current, threads, blocks, block, alive;
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
alignas(1024) inline unsigned char shared_memory[SHARED_BYTES];

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
    snprintf(failure, sizeof failure, "block %d thread %d: %s", block, current, what);
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
        const int warp = random_number() % (threads / WARP_THREADS);
        asleep_until[warp] = rounds + random_number() % LONGEST_NAP;
    }
    if (lanes_lag && random_number() % NAP_EVERY == 0)
        lags_until[random_number() % threads] = rounds + random_number() % LONGEST_LAG;
    deliver();
    if (rounds - last_event > PATIENCE) fail("deadlock");
}

// Goes to the next fiber that is awake; the caller has saved its own place.
[[noreturn]] inline void resume_next() {
    while (alive > 0) {
        if (++position == threads) {
            position = 0;
            begin_round();
        }
        current = order[position];
        Fiber& fiber = fibers[current];
        if (fiber.done || asleep_until[current / WARP_THREADS] > rounds || lags_until[current] > rounds) continue;
        if (fiber.started) _longjmp(fiber.place, 1);
        fiber.started = true;
        setcontext(&fiber.entry);
    }
    _longjmp(launcher, 1);
}

__attribute__((noinline)) inline void yield() {
    if (_setjmp(fibers[current].place) == 0) resume_next();
}

inline void run_fiber() {
    body(argument);
    fibers[current].done = true;
    --alive;
    event();
    resume_next();
}

// Warps take turns in an order drawn from the seed; lanes stay in order.
inline void shuffle_warps() {
    const int warps = threads / WARP_THREADS;
    int drawn[MAX_THREADS / WARP_THREADS];
    for (int i = 0; i < warps; ++i) {
        const int other = random_number() % (i + 1);
        drawn[i] = drawn[other];
        drawn[other] = i;
    }
    for (int i = 0; i < threads; ++i) order[i] = drawn[i / WARP_THREADS] * WARP_THREADS + i % WARP_THREADS;
}

inline void prepare_fibers() {
    alive = threads;
    memset(asleep_until, 0, sizeof asleep_until);
    memset(lags_until, 0, sizeof lags_until);
    if (!stacks) stacks = static_cast<unsigned char*>(malloc(MAX_THREADS * STACK_BYTES));
    for (int i = 0; i < threads; ++i) {
        Fiber& fiber = fibers[i];
        getcontext(&fiber.entry);
        fiber.entry.uc_stack.ss_sp = stacks + i * STACK_BYTES;
        fiber.entry.uc_stack.ss_size = STACK_BYTES;
        fiber.entry.uc_link = nullptr;
        makecontext(&fiber.entry, run_fiber, 0);
        fiber.started = fiber.done = false;
    }
    shuffle_warps();
}

// Static arrays of shared memory that this block has come to.
constexpr int MAX_STATIC = 32;
inline void* found_static[MAX_STATIC];
inline int statics;

// Where a static array is declared: the first fiber of a block finds there what is no number.
inline void leave_unwritten(void* array, size_t bytes) {
    for (int i = 0; i < statics; ++i)
        if (found_static[i] == array) return;
    if (statics == MAX_STATIC) fail("more than %d static arrays", MAX_STATIC);
    found_static[statics++] = array;
    memset(array, 0xFF, bytes);
}

void begin_block();  // forgets barriers and pending operations
void end_block();    // finishes what a block may leave behind, or fails

// Runs a kernel block after block. 0: ran; 1: found a fault, described in `failure`.
inline int launch(const Launch& how, void (*kernel)(const void*), const void* parameters) {
    threads = how.threads;
    blocks = how.blocks;
    shared_limit = how.shared_bytes;
    random_state = how.seed * 2654435761u + 1;
    body = kernel;
    argument = parameters;
    failure[0] = 0;
    for (block = 0; block < blocks; ++block) {
        memset(shared_memory, 0xFF, sizeof shared_memory);  // not a number in every floating-point format
        rounds = last_event = 0;
        statics = 0;
        begin_block();
        prepare_fibers();
        position = -1;
        const int how_it_ended = _setjmp(launcher);
        if (how_it_ended == 0) resume_next();
        if (how_it_ended == 2) return 1;
        current = 0;
        if (_setjmp(launcher) != 0) return 1;
        end_block();
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
    BLOCK,
    NAMED,
    WARPS = NAMED + 16,
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
    while (meeting.generation == generation) yield();
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

// Bytes of shared memory behind a 32-bit address.
inline unsigned char* shared_bytes(uint32_t address, uint32_t bytes) {
    if (address + bytes > shared_limit || address % bytes)
        fail("shared address %u of %u bytes", address, bytes);
    return shared_memory + address;
}

}  // namespace emulator
