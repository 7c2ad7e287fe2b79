// Rows or columns ("slices") of matrices: their sums, which of them are the largest, and what is done to
// those, as src/kernels/ops/slices has it. All in the same order at every launch.
#include "common.cuh"
#include "lines.cuh"

constexpr int STRIP = 32 * VECTOR;  // columns that a warp sums up
constexpr int CHUNK = 256;          // rows of a strip that a block sums up
constexpr int WARPS = THREADS / 32;
constexpr int BITS = 4;  // of a key that are looked at together
constexpr int DIGITS = 1 << BITS;
constexpr int MOVED = 32;      // rows in which a block moves its columns
constexpr int ROWS_AHEAD = 4;  // of these, under way at a time

struct SumJob {
    void* matrix;
    double* sums;     // one for each row, or each column
    double* partial;  // of columns: of a strip and a chunk each
    long long stride;
    int rows, cols;
    u32 end;  // blocks of this job and all before it
    Type type;
};

struct SumOf {
    int absolute;  // sums of absolute values; else of squares
};
using LineSums = Lines<SumOf, SumJob>;

__device__ __forceinline__ double term(double x, bool absolute) { return absolute ? fabs(x) : x * x; }

// sums[row]
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    slice_rows(const __grid_constant__ LineSums table) {
    const int number = job_of(table, blockIdx.x);
    const SumJob& job = table.job[number];
    const Team team(job.cols >= LONG);
    const int first = team.first_line(piece_of(table, number, blockIdx.x));
    const bool absolute = table.head.absolute;
    for (int k = 0; k < LINES_OF_A_TEAM; ++k) {
        const int row = first + k * team.count;
        if (row >= job.rows) return;
        double own = 0;
        const Run line[1] = {run_at(job.matrix, job.type, row * job.stride)};
        each_in_line<double, 1, 0>(team, line, job.cols,
                                   [&](double (&x)[1], int) { own += term(x[0], absolute); });
        const double sum = team.sum(own);
        if (team.rank == 0) in_global_memory(job.sums)[row] = sum;
    }
}

// partial[strip][chunk][column of the strip]
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    slice_columns(const __grid_constant__ LineSums table) {
    __shared__ double warps[WARPS][STRIP];
    const int number = job_of(table, blockIdx.x);
    const SumJob& job = table.job[number];
    const u32 piece = piece_of(table, number, blockIdx.x);
    const int chunks = ceil_div(job.rows, CHUNK);
    const int strip = static_cast<int>(piece) / chunks, chunk = static_cast<int>(piece) % chunks;
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const int column = strip * STRIP + lane * VECTOR;
    const int end = min((chunk + 1) * CHUNK, job.rows);
    const bool absolute = table.head.absolute;
    double sum[VECTOR] = {0, 0, 0, 0};
#pragma unroll 2
    for (int row = chunk * CHUNK + warp; row < end; row += WARPS) {
        const Run run = run_at(job.matrix, job.type, row * job.stride + column);
        double x[VECTOR] = {0, 0, 0, 0};
        if (column + VECTOR <= job.cols && run.is_aligned()) {
            load_vector(run, 0, x);
        } else {
#pragma unroll
            for (int j = 0; j < VECTOR; ++j) {
                if (column + j < job.cols) x[j] = load<double>(run, j);
            }
        }
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) sum[j] += term(x[j], absolute);
    }
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) warps[warp][lane * VECTOR + j] = sum[j];
    __syncthreads();
    const int own = static_cast<int>(threadIdx.x);
    if (own < STRIP) {
        double all = 0;
        for (int w = 0; w < WARPS; ++w) all += warps[w][own];
        in_global_memory(job.partial)[static_cast<long long>(piece) * STRIP + own] = all;
    }
}

// sums[column] = the sum over the chunks, in their order. A block has 256 columns.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    slice_chunks(const __grid_constant__ LineSums table) {
    const int number = job_of(table, blockIdx.x);
    const SumJob& job = table.job[number];
    const int column = static_cast<int>(piece_of(table, number, blockIdx.x)) * THREADS + threadIdx.x;
    if (column >= job.cols) return;
    const int chunks = ceil_div(job.rows, CHUNK);
    const double* partial = in_global_memory(job.partial) +
                            static_cast<long long>(column / STRIP) * chunks * STRIP + column % STRIP;
    double sum = 0;
    for (int chunk = 0; chunk < chunks; ++chunk) sum += partial[static_cast<long long>(chunk) * STRIP];
    in_global_memory(job.sums)[column] = sum;
}

struct ChoiceJob {
    const double* scores;
    double* chosen;
    int count;  // of scores
    int room;   // of chosen
    u32 end;
};

struct ChoiceOf {
    int wanted;
};
using Choices = Lines<ChoiceOf, ChoiceJob>;

// A score in float32 as a number that is larger where the score is: NaN is the largest.
__device__ __forceinline__ u32 key_of(double score) {
    if (score != score) return 0xFFFFFFFF;
    const u32 bits = __float_as_uint(static_cast<float>(score));
    return bits & 0x80000000 ? ~bits : bits | 0x80000000;
}

// The sum of what the threads before this one have, and of what all have.
__device__ __forceinline__ int sum_before(int own, int (&sums)[THREADS], int& all) {
    const int thread = static_cast<int>(threadIdx.x);
    sums[thread] = own;
    __syncthreads();
    for (int step = 1; step < THREADS; step *= 2) {
        const int other = thread >= step ? sums[thread - step] : 0;
        __syncthreads();
        sums[thread] += other;
        __syncthreads();
    }
    const int before = sums[thread] - own;
    all = sums[THREADS - 1];
    __syncthreads();
    return before;
}

// The numbers of the largest scores, counted from 1 and ascending, then zeros. One block for each job: it
// finds the key of the last one that is chosen by four bits at a time, and then the places.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    slice_choice(const __grid_constant__ Choices table) {
    __shared__ u16 found[DIGITS][THREADS];
    __shared__ int sums[THREADS];
    const ChoiceJob& job = table.job[blockIdx.x];
    const int thread = static_cast<int>(threadIdx.x);
    const int wanted = min(table.head.wanted, job.count);
    const double* scores = in_global_memory(job.scores);
    u32 last = 0;       // the upper bits of the key of the last one
    int rest = wanted;  // how many with these bits are chosen
    for (int shift = 32 - BITS; shift >= 0; shift -= BITS) {
        for (int digit = 0; digit < DIGITS; ++digit) found[digit][thread] = 0;
        for (int i = thread; i < job.count; i += THREADS) {
            const u32 key = key_of(scores[i]);
            // No shift by all 32 bits: it has no value.
            if ((key >> shift) / DIGITS == (last >> shift) / DIGITS)
                ++found[key >> shift & (DIGITS - 1)][thread];
        }
        __syncthreads();
        if (thread < DIGITS) {
            int all = 0;
            for (int i = 0; i < THREADS; ++i) all += found[thread][(i + thread) % THREADS];
            sums[thread] = all;
        }
        __syncthreads();
        int digit = DIGITS - 1;
        while (digit > 0 && sums[digit] < rest) rest -= sums[digit--];
        last |= static_cast<u32>(digit) << shift;
        __syncthreads();
    }
    // Each thread has neighbours, so that numbers ascend.
    const int share = ceil_div(job.count, THREADS);
    const int start = min(thread * share, job.count), end = min(start + share, job.count);
    int above = 0, equal = 0;
    for (int i = start; i < end; ++i) {
        const u32 key = key_of(scores[i]);
        above += key > last;
        equal += key == last;
    }
    int all_above, all_equal;
    const int above_before = sum_before(above, sums, all_above);
    int equal_before = sum_before(equal, sums, all_equal);
    int place = above_before + min(equal_before, rest);
    for (int i = start; i < end; ++i) {
        const u32 key = key_of(scores[i]);
        if (key > last || (key == last && equal_before < rest)) {
            if (place < job.room) in_global_memory(job.chosen)[place] = i + 1;
            ++place;
        }
        equal_before += key == last;
    }
    for (int i = wanted + thread; i < job.room; i += THREADS) in_global_memory(job.chosen)[i] = 0;
}

struct SliceJob {
    void* matrix;  // x
    void* update;  // U
    Chosen chosen;
    long long stride, update_stride;
    int rows, cols;                // of x
    int update_rows, update_cols;  // of U
    u32 end;
    Type type, update_type;

    __device__ Run at(int row, int column) const { return run_at(matrix, type, row * stride + column); }
    __device__ Run in_update(int row, int column) const {
        return run_at(update, update_type, row * update_stride + column);
    }
    __device__ bool is_wide() const { return type == Type::float64 || update_type == Type::float64; }
};

struct SliceMove {
    Rate unit;  // what rate and decay are for each unit of
    double rate, decay;
    double keep;    // what is left when slices are taken
    int cautious;   // when applied, x decays where x u >= 0
    int columns;    // slices are columns; else rows
    int give_back;  // when taken: the other way
};
using SliceJobs = Lines<SliceMove, SliceJob>;

// A column of this thread, in some rows of the block.
struct Column {
    int number, row, end;

    __device__ Column(u32 piece, int rows, int cols) {
        const int across = ceil_div(cols, THREADS);
        number = static_cast<int>(piece) % across * THREADS + threadIdx.x;
        row = static_cast<int>(piece) / across * MOVED;
        end = min(row + MOVED, rows);
    }
};

// u <- x and x <- keep x for slices that were chosen, u <- 0 for the others; or back, x <- u.
template <typename C>
__device__ __forceinline__ void take(const SliceJobs& table, const SliceJob& job, u32 piece) {
    const C keep = static_cast<C>(table.head.keep);
    if (table.head.columns) {
        const Column column(piece, job.rows, job.update_cols);
        if (column.number >= job.update_cols) return;
        const int from = job.chosen.in_matrix(column.number);
        for (int row = column.row; row < column.end; row += ROWS_AHEAD) {
            C x[ROWS_AHEAD];
#pragma unroll
            for (int a = 0; a < ROWS_AHEAD; ++a) {
                const bool inside = row + a < column.end && from >= 0;
                const Run run =
                    table.head.give_back ? job.in_update(row + a, column.number) : job.at(row + a, from);
                x[a] = inside ? load<C>(run, 0) : C(0);
            }
#pragma unroll
            for (int a = 0; a < ROWS_AHEAD; ++a) {
                if (row + a >= column.end) continue;
                if (from >= 0) store(job.at(row + a, from), 0, table.head.give_back ? x[a] : keep * x[a]);
                if (!table.head.give_back) store(job.in_update(row + a, column.number), 0, x[a]);
            }
        }
        return;
    }
    const Team team(job.cols >= LONG);
    const int first = team.first_line(piece);
    for (int k = 0; k < LINES_OF_A_TEAM; ++k) {
        const int row = first + k * team.count;
        if (row >= job.update_rows) return;
        const int from = job.chosen.in_matrix(row);
        const Run runs[2] = {job.at(from < 0 ? 0 : from, 0), job.in_update(row, 0)};
        if (table.head.give_back) {
            if (from < 0) continue;
            each_in_line<C, 0b10, 0b01>(team, runs, job.cols, [](C(&x)[2], int) { x[0] = x[1]; });
        } else if (from < 0) {
            each_in_line<C, 0, 0b10>(team, runs, job.cols, [](C(&x)[2], int) { x[1] = C(0); });
        } else {
            each_in_line<C, 0b01, 0b11>(team, runs, job.cols, [=](C(&x)[2], int) {
                x[1] = x[0];
                x[0] = keep * x[0];
            });
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    slice_take(const __grid_constant__ SliceJobs table) {
    const int number = job_of(table, blockIdx.x);
    const SliceJob& job = table.job[number];
    const u32 piece = piece_of(table, number, blockIdx.x);
    if (job.is_wide()) {
        take<double>(table, job, piece);
    } else {
        take<float>(table, job, piece);
    }
}

// x <- (1 - decay) x - rate u for slices that were chosen, x <- (1 - decay) x for the others.
template <typename C>
__device__ __forceinline__ void apply(const SliceJobs& table, const SliceJob& job, u32 piece) {
    const double unit = table.head.unit.value();
    const C keep = static_cast<C>(1.0 - table.head.decay * unit);
    const C rate = static_cast<C>(table.head.rate * unit);
    const bool decays_at_all = table.head.decay != 0;
    const bool cautious = table.head.cautious && decays_at_all;
    const auto step = [=](C x, C u) {
        const bool decays = !cautious || x * u >= C(0);
        return (decays ? x * keep : x) - rate * u;
    };
    if (table.head.columns) {
        const Column column(piece, job.rows, job.cols);
        if (column.number >= job.cols) return;
        const int from = job.chosen.in_update(column.number);
        if (from < 0 && !decays_at_all) return;
        for (int row = column.row; row < column.end; row += ROWS_AHEAD) {
            C x[ROWS_AHEAD], u[ROWS_AHEAD];
#pragma unroll
            for (int a = 0; a < ROWS_AHEAD; ++a) {
                const bool inside = row + a < column.end;
                x[a] = inside ? load<C>(job.at(row + a, column.number), 0) : C(0);
                u[a] = inside && from >= 0 ? load<C>(job.in_update(row + a, from), 0) : C(0);
            }
#pragma unroll
            for (int a = 0; a < ROWS_AHEAD; ++a) {
                if (row + a >= column.end) continue;
                store(job.at(row + a, column.number), 0, from < 0 ? x[a] * keep : step(x[a], u[a]));
            }
        }
        return;
    }
    const Team team(job.cols >= LONG);
    const int first = team.first_line(piece);
    for (int k = 0; k < LINES_OF_A_TEAM; ++k) {
        const int row = first + k * team.count;
        if (row >= job.rows) return;
        const int from = job.chosen.in_update(row);
        if (from >= 0) {
            const Run runs[2] = {job.at(row, 0), job.in_update(from, 0)};
            each_in_line<C, 0b11, 0b01>(team, runs, job.cols,
                                        [=](C(&x)[2], int) { x[0] = step(x[0], x[1]); });
        } else if (decays_at_all) {
            const Run runs[1] = {job.at(row, 0)};
            each_in_line<C, 1, 1>(team, runs, job.cols, [=](C(&x)[1], int) { x[0] = x[0] * keep; });
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    slice_apply(const __grid_constant__ SliceJobs table) {
    const int number = job_of(table, blockIdx.x);
    const SliceJob& job = table.job[number];
    const u32 piece = piece_of(table, number, blockIdx.x);
    if (job.is_wide()) {
        apply<double>(table, job, piece);
    } else {
        apply<float>(table, job, piece);
    }
}
