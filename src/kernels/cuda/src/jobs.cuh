// Elementwise passes over many runs of memory at once: the table of a launch, and loads and stores of
// elements.
//
// A job is a few operands of equal length, one run of memory each. Jobs are cut into pieces, one block each.
// The table is a parameter of the kernel: nothing is copied to the device before a launch, so a step can be
// captured. Parameters of this size need CUDA 12.1.
#pragma once
#include "search.cuh"

// As `DType` numbers them. Quantized types are for the kernels of `quantized.cu` only.
enum class Type : unsigned char {
    float16,
    bfloat16,
    float32,
    float64,
    q8,
    uq8,
    master  // bfloat16, and the low halves of float32 weights elsewhere
};

constexpr int MOST_OPERANDS = 5;
constexpr int MOST_SCALARS = 12;
constexpr int THREADS = 256;
constexpr int BLOCKS = 2;  // on a multiprocessor: 2 x 256 threads with 8 chunks each have 64 KiB under way
constexpr int VECTOR = 4;  // elements that a thread loads at once: 16 bytes of float32
constexpr int AHEAD = 2;   // vectors that a thread has under way
constexpr int PIECE = 1 << 14;

// Jobs of one launch: an even number that fits into the 32764 bytes of parameters; the small table costs the
// host less to hand over.
constexpr int FEW = 32;
constexpr int MANY = 338;

// A learning rate in device memory, so that a replayed graph uses its present value: scalars that are
// proportional to the learning rate are multiplied by it. Null where the host has done that.
struct Rate {
    const void* at;
    u32 scalars;  // of an operation: a bit for each that is for each unit
    Type type;

    __device__ double value() const;
};

// Scalars of an operation in the order in which its constructor takes them.
struct Scalars {
    Rate rate;
    double value[MOST_SCALARS];

    __device__ double operator[](int i) const {
        return rate.scalars >> i & 1 ? value[i] * rate.value() : value[i];
    }
};

struct Job {
    void* operand[MOST_OPERANDS];
    long long length;
    double factor[2];    // of this job alone
    const float* steps;  // where the number of steps is counted, or null
    const double* live;  // where the device left factors of this job, or null
    u32 end;             // pieces of this job and all before it
    Type type[MOST_OPERANDS];
};

template <int Most>
struct Jobs {
    Scalars scalars;
    int count;
    Job job[Most];
};

__device__ __forceinline__ u32 element_bytes(Type type) {
    return type == Type::float64 ? 8 : type == Type::float32 ? 4 : 2;
}

template <typename Job>
__device__ __forceinline__ u32 end_of(const Job& job) {
    return job.end;
}

// The job of a block.
template <typename Table>
__device__ __forceinline__ int job_of(const Table& table, u32 block) {
    return first_behind(table.count, block, [&](int job) { return end_of(table.job[job]); });
}

// Which of a job's blocks this one is.
template <typename Table>
__device__ __forceinline__ u32 piece_of(const Table& table, int job, u32 block) {
    return block - (job ? end_of(table.job[job - 1]) : 0);
}

// What a block works on: a job, and which of the job's pieces.
struct Share {
    const Job& job;
    u32 piece;
};

template <int Most>
__device__ __forceinline__ Share share_of(const Jobs<Most>& jobs, u32 block) {
    const int job = job_of(jobs, block);
    return {jobs.job[job], piece_of(jobs, job, block)};
}

// The kernels of one operation: for small tables, for large ones, and in float64.
#define EACH_FORM(name, Table, function, Op)                      \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) \
        name##_few(const __grid_constant__ Table<FEW> table) {    \
        function<float, Op>(table);                               \
    }                                                             \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) \
        name##_many(const __grid_constant__ Table<MANY> table) {  \
        function<float, Op>(table);                               \
    }                                                             \
    extern "C" __global__ void __launch_bounds__(THREADS, 1)      \
        name##_wide(const __grid_constant__ Table<FEW> table) {   \
        function<double, Op>(table);                              \
    }

// Some elements of one operand.
struct Run {
    char* start;
    Type type;

    __device__ bool is_aligned() const {
        return reinterpret_cast<u64>(start) % (VECTOR * element_bytes(type)) == 0;
    }
};

template <typename C>
__device__ __forceinline__ C load(const Run& run, int i) {
    switch (run.type) {
        case Type::float64:
            return static_cast<C>(reinterpret_cast<const double*>(run.start)[i]);
        case Type::float32:
            return static_cast<C>(reinterpret_cast<const float*>(run.start)[i]);
        case Type::bfloat16:
            return static_cast<C>(to_float(reinterpret_cast<const bfloat16*>(run.start)[i]));
        default:
            return static_cast<C>(to_float(reinterpret_cast<const float16*>(run.start)[i]));
    }
}

__device__ __forceinline__ double Rate::value() const {
    if (!at) return 1.0;
    return load<double>({static_cast<char*>(in_global_memory(const_cast<void*>(at))), type}, 0);
}

template <typename C>
__device__ __forceinline__ void store(const Run& run, int i, C x) {
    const float single = static_cast<float>(x);
    switch (run.type) {
        case Type::float64:
            reinterpret_cast<double*>(run.start)[i] = static_cast<double>(x);
            break;
        case Type::float32:
            reinterpret_cast<float*>(run.start)[i] = single;
            break;
        case Type::bfloat16:
            reinterpret_cast<u16*>(run.start)[i] = static_cast<u16>(pack(single, 0.0f, bfloat16{}));
            break;
        default:
            reinterpret_cast<u16*>(run.start)[i] = static_cast<u16>(pack(single, 0.0f, float16{}));
            break;
    }
}

struct alignas(8) Half4 {
    u32 low;
    u32 high;
};

template <typename Half>
__device__ __forceinline__ float half_of(u32 pair, bool upper) {
    return to_float(Half{static_cast<u16>(upper ? pair >> 16 : pair)});
}

// A vector between memory and arithmetic: the bits as they are stored. A pass loads all vectors that a thread
// has under way before it decodes the first one, because a conversion waits for its load. Arithmetic is
// float64 where an operand is, so there are no float64 elements where C is float.
template <typename C>
struct Fetched {
    static constexpr bool IS_WIDE = sizeof(C) == sizeof(double);
    u32 word[VECTOR * sizeof(C) / sizeof(u32)];

    // Elements i .. i + VECTOR of an aligned run.
    __device__ __forceinline__ void load(const Run& run, int i) {
        if (run.type == Type::float32) {
            u32 bits[4];
            load_chunk(bits, run.start + 4LL * i);
            for (int j = 0; j < 4; ++j) word[j] = bits[j];
            return;
        }
        if constexpr (IS_WIDE) {
            if (run.type == Type::float64) {
                for (int half = 0; half < 2; ++half) {
                    u32 bits[4];
                    load_chunk(bits, run.start + 8LL * i + 16 * half);
                    for (int j = 0; j < 4; ++j) word[4 * half + j] = bits[j];
                }
                return;
            }
        }
        u32 bits[2];
        load_half_chunk(bits, run.start + 2LL * i);
        for (int j = 0; j < 2; ++j) word[j] = bits[j];
    }

    // Takes numbers in place of a load; `own_type` decodes them.
    __device__ __forceinline__ void keep(const C (&x)[VECTOR]) {
        for (int j = 0; j < VECTOR; ++j) {
            if constexpr (IS_WIDE) {
                const long long bits = __double_as_longlong(static_cast<double>(x[j]));
                word[2 * j] = static_cast<u32>(bits);
                word[2 * j + 1] = static_cast<u32>(bits >> 32);
            } else {
                word[j] = __float_as_uint(static_cast<float>(x[j]));
            }
        }
    }

    static constexpr Type own_type = IS_WIDE ? Type::float64 : Type::float32;

    // Converts what was loaded from a run of this type.
    __device__ __forceinline__ void decode(Type type, C (&to)[VECTOR]) const {
        if (type == Type::float16 || type == Type::bfloat16) {
            for (int j = 0; j < VECTOR; ++j) {
                const u32 pair = word[j / 2];
                const float single =
                    type == Type::bfloat16 ? half_of<bfloat16>(pair, j % 2) : half_of<float16>(pair, j % 2);
                to[j] = static_cast<C>(single);
            }
            return;
        }
        for (int j = 0; j < VECTOR; ++j) {
            if constexpr (IS_WIDE) {
                const u64 bits = word[2 * j] | static_cast<u64>(word[2 * j + 1]) << 32;
                to[j] = type == Type::float32
                            ? static_cast<C>(__uint_as_float(word[j]))
                            : static_cast<C>(__longlong_as_double(static_cast<long long>(bits)));
            } else {
                to[j] = static_cast<C>(__uint_as_float(word[j]));
            }
        }
    }
};

// Elements i .. i + VECTOR of an aligned run, where nothing else is under way.
template <typename C>
__device__ __forceinline__ void load_vector(const Run& run, int i, C (&to)[VECTOR]) {
    Fetched<C> fetched;
    fetched.load(run, i);
    fetched.decode(run.type, to);
}

template <typename C>
__device__ __forceinline__ void store_vector(const Run& run, int i, const C (&x)[VECTOR]) {
    if (run.type == Type::float32) {
        u32 bits[VECTOR];
        for (int j = 0; j < VECTOR; ++j) bits[j] = __float_as_uint(static_cast<float>(x[j]));
        store_chunk(run.start + 4LL * i, bits);
    } else if (run.type == Type::float64) {
        for (int j = 0; j < VECTOR; ++j)
            reinterpret_cast<double*>(run.start)[i + j] = static_cast<double>(x[j]);
    } else {
        float y[VECTOR];
        for (int j = 0; j < VECTOR; ++j) y[j] = static_cast<float>(x[j]);
        const bool brain = run.type == Type::bfloat16;
        const u32 low = brain ? pack(y[0], y[1], bfloat16{}) : pack(y[0], y[1], float16{});
        const u32 high = brain ? pack(y[2], y[3], bfloat16{}) : pack(y[2], y[3], float16{});
        *reinterpret_cast<Half4*>(run.start + 2LL * i) = {low, high};
    }
}

// The piece of this block: its operands and how many elements there are.
template <int N>
struct Piece {
    Run run[N];
    int count;
    bool is_aligned;

    __device__ Piece(const Job& job, u32 number) {
        const long long start = static_cast<long long>(number) * PIECE;
        const long long rest = job.length - start;
        count = static_cast<int>(rest < PIECE ? rest : PIECE);
        is_aligned = true;
#pragma unroll
        for (int n = 0; n < N; ++n) {
            char* first = static_cast<char*>(in_global_memory(job.operand[n]));
            run[n] = {first + start * element_bytes(job.type[n]), job.type[n]};
            is_aligned = is_aligned && run[n].is_aligned();
        }
    }
};

template <typename C, typename Op>
__device__ __forceinline__ void one_element(const Piece<Op::OPERANDS>& piece, Op& op, int i) {
    constexpr int N = Op::OPERANDS;
    C one[N];
#pragma unroll
    for (int n = 0; n < N; ++n) one[n] = Op::READS >> n & 1 ? load<C>(piece.run[n], i) : C(0);
    op(one);
#pragma unroll
    for (int n = 0; n < N; ++n) {
        if (Op::WRITES >> n & 1) store<C>(piece.run[n], i, one[n]);
    }
}

// Applies `op` to every element of this block's piece. Of the Op::OPERANDS operands, those in Op::WRITES are
// stored. Where `Grouped`, each thread has the same elements in the same order whatever the alignment.
template <typename C, bool Grouped = false, typename Op>
__device__ __forceinline__ void each_element(const Piece<Op::OPERANDS>& piece, Op& op) {
    constexpr int N = Op::OPERANDS;
    const int thread = static_cast<int>(threadIdx.x);
    const int whole = piece.is_aligned ? piece.count / VECTOR * VECTOR : 0;
    for (int first = thread * VECTOR; first < whole; first += AHEAD * THREADS * VECTOR) {
        Fetched<C> fetched[AHEAD][N];
#pragma unroll
        for (int a = 0; a < AHEAD; ++a) {
            const int i = first + a * THREADS * VECTOR;
            if (i < whole) {
#pragma unroll
                for (int n = 0; n < N; ++n) {
                    if (Op::READS >> n & 1) fetched[a][n].load(piece.run[n], i);
                }
            }
        }
#pragma unroll
        for (int a = 0; a < AHEAD; ++a) {
            const int i = first + a * THREADS * VECTOR;
            if (i < whole) {
                C x[N][VECTOR];
#pragma unroll
                for (int n = 0; n < N; ++n) {
                    if (Op::READS >> n & 1) fetched[a][n].decode(piece.run[n].type, x[n]);
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
#pragma unroll
                for (int n = 0; n < N; ++n) {
                    if (Op::WRITES >> n & 1) store_vector(piece.run[n], i, x[n]);
                }
            }
        }
    }
    int done = whole;
    if constexpr (Grouped) {
        done = piece.count / VECTOR * VECTOR;
        for (int first = whole + thread * VECTOR; first < done; first += THREADS * VECTOR) {
            for (int j = 0; j < VECTOR; ++j) one_element<C>(piece, op, first + j);
        }
    }
    for (int i = done + thread; i < piece.count; i += THREADS) one_element<C>(piece, op, i);
}
