// Elementwise passes over runs of memory whose elements are more than numbers of their type: quantized values
// with a scale for each block, stochastically rounded numbers, and float32 weights in two halves. The
// operations are those of the plain passes.
//
// A job is cut into its quantization blocks, or into blocks of a fixed length if it has none. Some threads of
// a warp work on a block together: they dequantize and compute, leave what has to be quantized or rounded in
// shared memory, find the absmax, and quantize. Every thread reads there only what it has written. A thread
// block has 4 to 36 KiB of static shared memory, by the number of operands that are written.
//
// These kernels are in sources of their own, which are loaded when a parameter or state needs them.
#pragma once
#include "blocks.cuh"
#include "master.cuh"
#include "rounding.cuh"

constexpr int QUANTIZED_THREADS = 128;
constexpr int QUANTIZED_WARPS = QUANTIZED_THREADS / 32;
constexpr int QUANTIZED_BLOCKS = 4;  // on a multiprocessor
constexpr int MANY_QUANTIZED = 96;   // jobs of one launch

struct QuantizedJob {
    Job plain;
    float* scales[MOST_OPERANDS];  // of blocks, from the job's first one on; of weights the low halves
    long long width;               // elements of a row: its last block may be short
    u32 blocks;                    // of the job
    u32 in_row;                    // blocks of a row
    u32 before;                    // blocks of the job's first row that lie before the job
    u32 share;                     // blocks of a piece, whole rounds of all warps
    u32 block;                     // elements of a block, MOST_BLOCK at most
    u32 lanes;                     // threads that work on a block, each on 16 elements at most
    u32 tag[MOST_OPERANDS];        // of operands that are rounded at random: the last word of their keys
    u32 random;                    // a bit for each of these
    Rounding rounding;             // of all of these
};

template <int Most>
struct QuantizedJobs {
    Scalars scalars;
    int count;
    QuantizedJob job[Most];
};

__device__ __forceinline__ u32 end_of(const QuantizedJob& job) { return job.plain.end; }

__device__ __forceinline__ bool is_quantized(Type type) {
    return type == Type::q8 || type == Type::uq8;
}

__device__ __forceinline__ bool is_random(const QuantizedJob& job, int n) { return job.random >> n & 1; }

// A second moment in float16: a positive number never becomes 0.
__device__ __forceinline__ bool stays_positive(const QuantizedJob& job, int n) {
    return job.random >> (MOST_OPERANDS + n) & 1;
}

__device__ __forceinline__ bool is_formed(const QuantizedJob& job, int n) {
    return is_quantized(job.plain.type[n]) || job.plain.type[n] == Type::master || is_random(job, n);
}

__device__ __forceinline__ u32 stored_bytes(Type type) { return is_quantized(type) ? 1 : element_bytes(type); }

// Where an element of an operand is, as what it is read.
__device__ __forceinline__ Run stored_run(const QuantizedJob& job, int n, long long element) {
    const Type type = job.plain.type[n];
    char* first = static_cast<char*>(in_global_memory(job.plain.operand[n]));
    return {first + element * stored_bytes(type), type};
}

// The elements of a job that a few threads work on.
struct Segment {
    long long start;
    int length;
    int lane, lanes;

    // Block `number` of a job; nothing behind the last one.
    __device__ Segment(const QuantizedJob& job, u32 number, u32 lane_of_warp)
        : start(0),
          length(0),
          lane(static_cast<int>(lane_of_warp % job.lanes)),
          lanes(static_cast<int>(job.lanes)) {
        if (number >= job.blocks) return;
        const u32 at = number + job.before;
        const u32 row = at / job.in_row;
        const long long col = static_cast<long long>(at - row * job.in_row) * job.block;
        const long long rest = job.width - col;
        start = row * job.width + col - static_cast<long long>(job.before) * job.block;
        length = static_cast<int>(rest < job.block ? rest : job.block);
    }
};

template <typename C>
__device__ __forceinline__ C decoded(u32 code, const float (&value)[ENTRIES], float scale) {
    return static_cast<C>(rounded_product(value[code], scale));
}

// Returns the low half of a weight. A job may begin at any multiple of two bytes.
__device__ __forceinline__ short* low_halves(const QuantizedJob& job, int n, long long element) {
    return reinterpret_cast<short*>(in_global_memory(job.scales[n])) + element;
}

template <typename C>
__device__ __forceinline__ C load_stored(const Run& run, int i, const Tables& tables, float scale,
                                         const short* low) {
    if (run.type == Type::master) {
        return static_cast<C>(joined(reinterpret_cast<const u16*>(run.start)[i], low[i]));
    }
    if (!is_quantized(run.type)) return load<C>(run, i);
    const u32 code = reinterpret_cast<const unsigned char*>(run.start)[i];
    return decoded<C>(code, tables.value[run.type == Type::uq8], scale);
}

// A vector between memory and arithmetic, which may be quantized.
template <typename C>
struct FetchedStored {
    Fetched<C> fetched;

    __device__ __forceinline__ void load(const Run& run, int i, const short* low) {
        if (is_quantized(run.type)) {
            fetched.word[0] = *reinterpret_cast<const u32*>(run.start + i);
        } else if (run.type == Type::master) {
            u32 upper[2], lower[2];
            load_half_chunk(upper, run.start + 2LL * i);
            load_half_chunk(lower, low + i);
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                fetched.word[j] = upper[j];
                fetched.word[2 + j] = lower[j];
            }
        } else {
            fetched.load(run, i);
        }
    }

    __device__ __forceinline__ void decode(Type type, const Tables& tables, float scale,
                                           C (&to)[VECTOR]) const {
        if (type == Type::master) {
#pragma unroll
            for (int j = 0; j < VECTOR; ++j) {
                const u32 high = fetched.word[j / 2] >> 16 * (j % 2);
                const u32 low = fetched.word[2 + j / 2] >> 16 * (j % 2);
                to[j] = static_cast<C>(joined(static_cast<u16>(high), static_cast<short>(low)));
            }
            return;
        }
        if (!is_quantized(type)) {
            fetched.decode(type, to);
            return;
        }
        const float (&value)[ENTRIES] = tables.value[type == Type::uq8];
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) to[j] = decoded<C>(fetched.word[0] >> 8 * j & 0xFF, value, scale);
    }
};

// A vector of what is staged.
template <typename C>
__device__ __forceinline__ void stage(float* to, const C (&x)[VECTOR]) {
    *reinterpret_cast<float4*>(to) = {static_cast<float>(x[0]), static_cast<float>(x[1]),
                                      static_cast<float>(x[2]), static_cast<float>(x[3])};
}

// The first `count` elements of a vector, and zeros.
__device__ __forceinline__ void unstage(const float* from, int count, float (&x)[VECTOR]) {
    const float4 four = *reinterpret_cast<const float4*>(from);
    x[0] = four.x;
    x[1] = count > 1 ? four.y : 0.0f;
    x[2] = count > 2 ? four.z : 0.0f;
    x[3] = count > 3 ? four.w : 0.0f;
}

// A segment with its operands.
template <typename C, typename Op>
struct Work {
    static constexpr int N = Op::OPERANDS;
    const QuantizedJob& job;
    Segment segment;
    Run run[N];
    float scale[N];
    int whole;  // elements that go by vectors

    __device__ Work(const QuantizedJob& job, u32 number, const Segment& segment) : job(job), segment(segment) {
        bool is_aligned = true;
#pragma unroll
        for (int n = 0; n < N; ++n) {
            run[n] = stored_run(job, n, segment.start);
            const u64 bytes = VECTOR * stored_bytes(run[n].type);
            is_aligned = is_aligned && reinterpret_cast<u64>(run[n].start) % bytes == 0;
            scale[n] = 0.0f;
            is_aligned = is_aligned && reinterpret_cast<u64>(low(n)) % (VECTOR * sizeof(short)) == 0;
            if ((Op::READS >> n & 1) && is_quantized(run[n].type) && segment.length)
                scale[n] = in_global_memory(job.scales[n])[number];
        }
        whole = is_aligned ? segment.length / VECTOR * VECTOR : 0;
    }

    // The low halves of an operand, where it has some.
    __device__ __forceinline__ const short* low(int n) const {
        return run[n].type == Type::master ? low_halves(job, n, segment.start) : nullptr;
    }

    // Computes all elements. What is written to operands with a form goes to `staged`, by operand.
    __device__ __forceinline__ void compute(Op& op, const Tables& tables, float* staged, int step) const {
        const int stride = segment.lanes * VECTOR;
        for (int first = segment.lane * VECTOR; first < whole; first += AHEAD * stride) {
            FetchedStored<C> fetched[AHEAD][N];
#pragma unroll
            for (int a = 0; a < AHEAD; ++a) {
                const int i = first + a * stride;
                if (i < whole) {
#pragma unroll
                    for (int n = 0; n < N; ++n) {
                        if (Op::READS >> n & 1) fetched[a][n].load(run[n], i, low(n));
                    }
                }
            }
#pragma unroll
            for (int a = 0; a < AHEAD; ++a) {
                const int i = first + a * stride;
                if (i < whole) {
                    C x[N][VECTOR];
#pragma unroll
                    for (int n = 0; n < N; ++n) {
                        if (Op::READS >> n & 1) fetched[a][n].decode(run[n].type, tables, scale[n], x[n]);
                    }
#pragma unroll
                    for (int j = 0; j < VECTOR; ++j) {
                        C one[N];
#pragma unroll
                        for (int n = 0; n < N; ++n) one[n] = Op::READS >> n & 1 ? x[n][j] : C(0);
                        op(one);
#pragma unroll
                        for (int n = 0; n < N; ++n) x[n][j] = one[n];
                    }
                    float* to = staged + i;
#pragma unroll
                    for (int n = 0; n < N; ++n) {
                        if (!(Op::WRITES >> n & 1)) continue;
                        if (is_formed(job, n)) {
                            stage(to, x[n]);
                        } else {
                            store_vector(run[n], i, x[n]);
                        }
                        to += step;
                    }
                }
            }
        }
        for (int i = whole + segment.lane; i < segment.length; i += segment.lanes) {
            C one[N];
#pragma unroll
            for (int n = 0; n < N; ++n)
                one[n] = Op::READS >> n & 1 ? load_stored<C>(run[n], i, tables, scale[n], low(n)) : C(0);
            op(one);
            float* to = staged + i;
#pragma unroll
            for (int n = 0; n < N; ++n) {
                if (!(Op::WRITES >> n & 1)) continue;
                if (is_formed(job, n)) {
                    *to = static_cast<float>(one[n]);
                } else {
                    store<C>(run[n], i, one[n]);
                }
                to += step;
            }
        }
    }
};

// The largest absolute value of a segment, in all of its threads: NaN where there is one, as bits of absolute
// values are in the order of the values.
__device__ __forceinline__ float largest(const Segment& segment, const float* staged) {
    u32 most = 0;
    for (int i = segment.lane * VECTOR; i < segment.length; i += segment.lanes * VECTOR) {
        float x[VECTOR];
        unstage(staged + i, segment.length - i, x);
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) most = max(most, __float_as_uint(x[j]) & 0x7FFFFFFFu);
    }
    for (int lane = segment.lanes / 2; lane > 0; lane /= 2)
        most = max(most, __shfl_xor_sync(0xFFFFFFFF, most, lane));
    return __uint_as_float(most);
}

// Stores the first `count` elements of a vector, whose elements have type `Element`.
template <typename Element, typename Vector>
__device__ __forceinline__ void store_first(char* to, int count, Vector all) {
    constexpr int BITS = 8 * sizeof(Element);
    if (count >= VECTOR && reinterpret_cast<u64>(to) % sizeof(Vector) == 0) {
        *reinterpret_cast<Vector*>(to) = all;
    } else {
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) {
            if (j < count) reinterpret_cast<Element*>(to)[j] = static_cast<Element>(all >> BITS * j);
        }
    }
}

// Gives `each` the number of each element of a segment that this thread has, and random bits: those of an operand,
// or where it has none the half of all. What it returns has the bits of `Element`.
template <typename Element, typename Vector, typename Each>
__device__ __forceinline__ void each_rounded(const QuantizedJob& job, int n, const Segment& segment, char* to,
                                             Each each) {
    RandomBits random(job.rounding, job.tag[n]);
    const bool has_bits = is_random(job, n);
    for (int i = segment.lane * VECTOR; i < segment.length; i += segment.lanes * VECTOR) {
        const int count = min(segment.length - i, VECTOR);
        Vector four = 0;
        random.left = 0;
        // One copy of the generator for all.
#pragma unroll 1
        for (int j = 0; j < count; ++j) {
            const Vector bits = each(i + j, has_bits ? random.next(segment.start + i + j) : 1u << 15);
            four |= (bits & static_cast<Element>(~Element(0))) << 8 * sizeof(Element) * j;
        }
        store_first<Element>(to + sizeof(Element) * i, count, four);
    }
}

__device__ __forceinline__ void encode(const QuantizedJob& job, int n, const Segment& segment, const float* staged,
                                       const Scaling& scaling, char* to) {
    const bool is_signed = job.plain.type[n] == Type::q8;
    each_rounded<unsigned char, u32>(job, n, segment, to, [&](int i, u32 random) {
        if (scaling.is_lost) return is_signed ? static_cast<u32>(ZERO) : 0u;
        const float q = scaling(staged[i]);
        return is_signed ? signed_code(q, random) : positive_code(q, random);
    });
}

__device__ __forceinline__ void round_at_random(const QuantizedJob& job, int n, const Segment& segment,
                                                const float* staged, char* to) {
    if (job.plain.type[n] == Type::float16) {
        const u32 least = stays_positive(job, n);
        each_rounded<u16, u64>(job, n, segment, to, [&](int i, u32 random) {
            return half_rounded_by(staged[i], random, least);
        });
    } else {
        each_rounded<u16, u64>(job, n, segment, to,
                               [&](int i, u32 random) { return rounded_by(staged[i], random); });
    }
}

__device__ __forceinline__ void split_weights(const Segment& segment, const float* staged, char* to,
                                              short* low) {
    for (int i = segment.lane * VECTOR; i < segment.length; i += segment.lanes * VECTOR) {
        const int count = min(segment.length - i, VECTOR);
        u64 upper = 0;
        u64 lower = 0;
        for (int j = 0; j < count; ++j) {
            const Halves halves(staged[i + j]);
            upper |= static_cast<u64>(halves.high) << 16 * j;
            lower |= static_cast<u64>(halves.low) << 16 * j;
        }
        store_first<u16>(to + 2 * i, count, upper);
        store_first<u16>(reinterpret_cast<char*>(low + i), count, lower);
    }
}

constexpr int ones_of(u32 bits) { return bits ? static_cast<int>(bits & 1) + ones_of(bits >> 1) : 0; }

// Takes an operation over blocks of a job, from `first` on.
template <typename C, typename Op>
__device__ __forceinline__ void each_block(const QuantizedJob& job, u32 first, Op& op) {
    constexpr int STEP = QUANTIZED_WARPS * MOST_BLOCK;
    constexpr int STAGED = ones_of(Op::WRITES);
    __shared__ Tables tables;
    __shared__ float4 staged[STAGED ? STAGED * STEP / VECTOR : 1];
    const u32 warp = threadIdx.x / 32;
    const u32 lane = threadIdx.x % 32;
    const u32 together = 32 / job.lanes;
    fill_tables(tables, static_cast<int>(threadIdx.x), QUANTIZED_THREADS);
    __syncthreads();
    float* const own =
        reinterpret_cast<float*>(staged) + warp * MOST_BLOCK + lane / job.lanes * (MOST_BLOCK / together);
    // All lanes of a warp come to every exchange, with or without elements.
    for (u32 done = warp * together; done < job.share; done += QUANTIZED_WARPS * together) {
        if (first + done >= job.blocks) break;
        const u32 block = first + done + lane / job.lanes;
        const Work<C, Op> work(job, block, Segment(job, block, lane));
        work.compute(op, tables, own, STEP);
        __syncwarp();
        const float* from = own;
#pragma unroll 1
        for (int n = 0; n < Op::OPERANDS; ++n) {
            if (!(Op::WRITES >> n & 1)) continue;
            const Segment& segment = work.segment;
            char* const to = stored_run(job, n, segment.start).start;
            if (job.plain.type[n] == Type::master) {
                split_weights(segment, from, to, low_halves(job, n, segment.start));
            } else if (is_quantized(job.plain.type[n])) {
                const float scale = largest(segment, from);
                const Scaling scaling(scale);
                encode(job, n, segment, from, scaling, to);
                if (segment.lane == 0 && segment.length) in_global_memory(job.scales[n])[block] = scale;
            } else if (is_random(job, n)) {
                round_at_random(job, n, segment, from, to);
            }
            from += STEP;
        }
        __syncwarp();
    }
}

// The piece of this block.
template <typename Number, template <typename> class Operation, int Most>
__device__ __forceinline__ void update_quantized(const QuantizedJobs<Most>& jobs) {
    using C = Unfused<Number>;
    const int number = job_of(jobs, blockIdx.x);
    const QuantizedJob& job = jobs.job[number];
    Operation<C> op(jobs.scalars, job.plain);
    each_block<C>(job, piece_of(jobs, number, blockIdx.x) * job.share, op);
}

// The kernels of one operation, in float32 and in float64.
#define UPDATE_QUANTIZED(name, Op)                                                   \
    extern "C" __global__ void __launch_bounds__(QUANTIZED_THREADS, QUANTIZED_BLOCKS)    \
        name##_quantized_many(const __grid_constant__ QuantizedJobs<MANY_QUANTIZED> table) { \
        update_quantized<float, Op>(table);                                          \
    }                                                                            \
    extern "C" __global__ void __launch_bounds__(QUANTIZED_THREADS, 1)               \
        name##_quantized_wide(const __grid_constant__ QuantizedJobs<FEW> table) {        \
        update_quantized<double, Op>(table);                                         \
    }
