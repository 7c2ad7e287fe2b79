// What the optimizers with low-rank moments are made of, beside their products: random projections, and
// updates whose rows or columns ("channels") have factors of their own, as src/kernels/ops/channels has
// them.
#include "lines.cuh"
#include "normal.cuh"

constexpr int NUMBERS = 4 * THREADS * 4;  // of a block
constexpr double GROWTH = 1.01;  // by how much the norm of an update may exceed that of the one before
constexpr double NEGLIGIBLE = 3.4526698e-4;  // share at which a norm is no start: sqrt of float32's epsilon
constexpr double TINY = 1e-8;

struct NormalJob {
    void* out;
    Stream stream;
    u64 first;  // the place of the first number in the stream
    long long count;
    u32 end;  // blocks of this job and all before it
    Type type;
};

struct NormalScale {
    float factor;
};
using NormalJobs = Lines<NormalScale, NormalJob>;

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    low_rank_normals(const __grid_constant__ NormalJobs table) {
    const int number = job_of(table, blockIdx.x);
    const NormalJob& job = table.job[number];
    const u64 first = job.first / 4, last = (job.first + job.count + 3) / 4;
    const u64 start = first + static_cast<u64>(piece_of(table, number, blockIdx.x)) * (NUMBERS / 4);
    for (int k = 0; k < NUMBERS / 4 / THREADS; ++k) {
        const u64 block = start + k * THREADS + threadIdx.x;
        if (block >= last) return;
        float numbers[4];
        normals(job.stream, block, numbers);
#pragma unroll
        for (int lane = 0; lane < 4; ++lane) {
            const long long at = static_cast<long long>(4 * block + lane - job.first);
            if (at < 0 || at >= job.count) continue;
            store(run_at(job.out, job.type, at), 0, mul(numbers[lane], table.head.factor));
        }
    }
}

constexpr int NONZEROS = 8;  // of a row of signs, if there are as many columns

struct SignJob {
    void* out;  // [rows, cols], float64, zeros
    Stream stream;
    u64 first;  // the place of the first row among those of the stream
    int rows, cols;
    u32 end;
};

struct SignOf {
    int none;
};
using SignJobs = Lines<SignOf, SignJob>;

// Sparse sign matrices as src/kernels/ops/signs has them: the columns are cut into NONZEROS blocks, and a
// row has 1 or -1 at one place of each: row i in column i, if that is one of the block. A thread for each row.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    low_rank_signs(const __grid_constant__ SignJobs table) {
    const int number = job_of(table, blockIdx.x);
    const SignJob& job = table.job[number];
    const long long row = static_cast<long long>(piece_of(table, number, blockIdx.x)) * THREADS + threadIdx.x;
    if (row >= job.rows) return;
    double* out = static_cast<double*>(in_global_memory(job.out)) + row * job.cols;
    const int blocks = min(job.cols, NONZEROS);
    for (int half = 0; half < 2; ++half) {
        const u64 block = 2 * (job.first + row) + half;
        const Stream& of = job.stream;
        u32 words[4] = {static_cast<u32>(block), static_cast<u32>(block >> 32), of.high[0], of.high[1]};
        philox(words, of.key[0], of.key[1]);
#pragma unroll
        for (int lane = 0; lane < 4; ++lane) {
            const long long at = 4 * half + lane;
            if (at >= blocks) return;
            const u64 begin = at * job.cols / blocks, length = (at + 1) * job.cols / blocks - begin;
            const u64 own = static_cast<u64>(row) - begin;
            const u64 place = own < length ? own : words[lane] * length >> 32;
            out[begin + place] = words[lane] & 1 ? -1.0 : 1.0;
        }
    }
}

struct GuardJob {
    void* basis;  // [rows, cols]
    void* out;    // of `count` elements
    long long stride, count;
    int rows, cols;
    u32 end;
    Type type, out_type;
};

struct GuardOf {
    int none;
};
using GuardJobs = Lines<GuardOf, GuardJob>;

// Clears `out` where every element of the basis is zero. One block for each job, which stops at the first
// that is not.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    low_rank_guard(const __grid_constant__ GuardJobs table) {
    __shared__ int found[THREADS / 32];
    const GuardJob& job = table.job[blockIdx.x];
    const int thread = static_cast<int>(threadIdx.x);
    if (thread < THREADS / 32) found[thread] = 0;
    __syncthreads();
    const long long all = static_cast<long long>(job.rows) * job.cols;
    for (long long start = 0; start < all; start += THREADS) {
        const long long i = start + thread;
        bool alive = false;
        if (i < all) {
            const double x =
                load<double>(run_at(job.basis, job.type, i / job.cols * job.stride + i % job.cols), 0);
            alive = x != 0;  // also when it is not a number
        }
        if (alive) found[thread / 32] = 1;
        __syncthreads();
        int any = 0;
        for (int warp = 0; warp < THREADS / 32; ++warp) any |= found[warp];
        if (any) return;
        __syncthreads();
    }
    for (long long i = thread; i < job.count; i += THREADS) store(run_at(job.out, job.out_type, i), 0, 0.0);
}

struct ChannelJob {
    void* param;      // x
    void* grad;       // g
    double* factors;  // one for each channel
    double* norms;    // null, or the squared norms of N and R, which give all channels one factor
    double* squares;  // of N, one for each channel; or what blocks leave
    double* total;    // squared norm of the update
    void* last;       // norm of the last update that was not zero, 0 if there was none
    double* step;     // rate of this update
    double rate;      // the same before it is limited
    long long stride, grad_stride;
    int rows, cols;
    int channels;
    int pieces;  // blocks that leave sums
    u32 end;
    Type type, grad_type, last_type;
};

struct ChannelOf {
    Rate unit;      // what rates and the decay are for each unit of
    double factor;  // of the gradient
    double decay;
    int by_row;  // channels are rows; else columns
    int cautious, late;
};
using ChannelJobs = Lines<ChannelOf, ChannelJob>;

// The factor of channels that have one together.
__device__ __forceinline__ double common_factor(const double* norms) {
    return sqrt(in_global_memory(norms)[0]) / (sqrt(in_global_memory(norms)[1]) + TINY);
}

// Where there is a factor for each channel, `factors` holds squares of R and becomes |N| / (|R| + tiny); else
// the norms are summed up. One block for each job.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    low_rank_ratios(const __grid_constant__ ChannelJobs table) {
    const ChannelJob& job = table.job[blockIdx.x];
    const int thread = static_cast<int>(threadIdx.x);
    const double factor = fabs(table.head.factor);
    double* factors = in_global_memory(job.factors);
    const double* squares = in_global_memory(job.squares);
    double after = 0, before = 0;
    for (int i = thread; i < job.channels; i += THREADS) {
        const double norm = factor * sqrt(factors[i]);
        if (job.norms) {
            after += squares[i];
            before += norm * norm;
        } else {
            factors[i] = sqrt(squares[i]) / (norm + TINY);
        }
    }
    if (!job.norms) return;
    const Team block(true);
    after = block.sum(after);
    before = block.sum(before);
    if (thread == 0) {
        in_global_memory(job.norms)[0] = after;
        in_global_memory(job.norms)[1] = before;
    }
}

// Each block leaves the sum of (f g)^2 over its rows.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    low_rank_measure(const __grid_constant__ ChannelJobs table) {
    const int number = job_of(table, blockIdx.x);
    const ChannelJob& job = table.job[number];
    const u32 piece = piece_of(table, number, blockIdx.x);
    const Team team(job.cols >= LONG), block(true);
    const int first = team.first_line(piece);
    const double* factors = in_global_memory(job.factors);
    const double common = job.norms ? common_factor(job.norms) : 0;
    double sum = 0;
    for (int k = 0; k < LINES_OF_A_TEAM; ++k) {
        const int row = first + k * team.count;
        if (row >= job.rows) break;
        const Run line[1] = {run_at(job.grad, job.grad_type, row * job.grad_stride)};
        if (job.norms || table.head.by_row) {
            const double own = job.norms ? common : factors[row];
            each_in_line<double, 1, 0>(team, line, job.cols,
                                       [&](double (&x)[1], int) { sum += own * x[0] * (own * x[0]); });
        } else {
            each_in_line<double, 1, 0>(team, line, job.cols, [&](double (&x)[1], int i) {
                const double scaled = factors[i] * x[0];
                sum += scaled * scaled;
            });
        }
    }
    sum = block.sum(sum);
    if (threadIdx.x == 0) in_global_memory(job.squares)[piece] = sum;
}

// total = the sum of what the blocks left. One block for each job.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    low_rank_total(const __grid_constant__ ChannelJobs table) {
    const ChannelJob& job = table.job[blockIdx.x];
    double sum = 0;
    for (int piece = threadIdx.x; piece < job.pieces; piece += THREADS)
        sum += in_global_memory(job.squares)[piece];
    sum = Team(true).sum(sum);
    if (threadIdx.x == 0) in_global_memory(job.total)[0] = sum;
}

// The rate of an update whose norm grows by 1 % at most, and the norm that it has. One block for each job.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    low_rank_limit(const __grid_constant__ ChannelJobs table) {
    const ChannelJob& job = table.job[blockIdx.x];
    if (threadIdx.x != 0) return;
    const double norm = sqrt(in_global_memory(job.total)[0]) * fabs(table.head.factor);
    const Run last = run_at(job.last, job.last_type, 0);
    double limiter = 1;
    // The first update that is not zero starts, and one beside which the last is negligible. A gradient of zero
    // says nothing of the next one.
    const double before = load<double>(last, 0), growth = norm / (before + TINY);
    const bool starts = before <= NEGLIGIBLE * norm;
    if (!starts && !(growth < GROWTH)) limiter = growth / GROWTH;  // NaN is not less
    if (norm != 0) store(last, 0, norm / limiter);
    in_global_memory(job.step)[0] = job.rate * table.head.unit.value() / limiter * table.head.factor;
}

// x <- x - step f g, with the decay before or after it.
template <typename C>
__device__ __forceinline__ void step_channels(const ChannelOf& head, const ChannelJob& job, u32 piece) {
    const Team team(job.cols >= LONG);
    const int first = team.first_line(piece);
    const double rate = in_global_memory(job.step)[0];
    const double* factors = in_global_memory(job.factors);
    const C keep = static_cast<C>(1.0 - head.decay * head.unit.value());
    const bool late = head.late, cautious = head.cautious && head.decay != 0;
    const auto step = [=](C x, C u) {
        const C y = late ? x - u : x;
        const C kept = cautious && y * u < C(0) ? y : y * keep;
        return late ? kept : kept - u;
    };
    for (int k = 0; k < LINES_OF_A_TEAM; ++k) {
        const int row = first + k * team.count;
        if (row >= job.rows) return;
        const Run runs[2] = {run_at(job.param, job.type, row * job.stride),
                             run_at(job.grad, job.grad_type, row * job.grad_stride)};
        if (job.norms || head.by_row) {
            const C own = static_cast<C>(rate * (job.norms ? common_factor(job.norms) : factors[row]));
            each_in_line<C, 0b11, 0b01>(team, runs, job.cols,
                                        [=](C(&x)[2], int) { x[0] = step(x[0], own * x[1]); });
        } else {
            each_in_line<C, 0b11, 0b01>(team, runs, job.cols, [=](C(&x)[2], int i) {
                x[0] = step(x[0], static_cast<C>(rate * factors[i]) * x[1]);
            });
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    low_rank_step(const __grid_constant__ ChannelJobs table) {
    const int number = job_of(table, blockIdx.x);
    const ChannelJob& job = table.job[number];
    const u32 piece = piece_of(table, number, blockIdx.x);
    if (job.type == Type::float64 || job.grad_type == Type::float64) {
        step_channels<double>(table.head, job, piece);
    } else {
        step_channels<float>(table.head, job, piece);
    }
}
