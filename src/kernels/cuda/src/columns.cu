// Passes over the columns of thin row-major matrices, all matrices of a bucket at once: sums of squares, and
// columns divided by their norms.
//
// A block takes 32 columns of up to 256 rows, one column for each lane. What it sums up is left in `partial`,
// and another kernel adds the pieces of a column in order: no atomics, so results repeat.
#include "jobs.cuh"

constexpr int WARPS = THREADS / 32;
constexpr int COLUMNS = 32;         // of a block: a warp reads 32 neighbours of a row
constexpr int ROWS = 256;           // of a block
constexpr int UNDER_WAY = 8;        // rows that a thread loads before it uses them
constexpr int MOST_MATRICES = 128;  // of a launch

// Share of the norm of the matrix at which a column holds rounding noise only, as in src/kernels/ops/columns.
__device__ __forceinline__ double dead_share(Type type) {
    if (type == Type::bfloat16) return 0x1p-8;
    return type == Type::float16 ? 0x1p-11 : 0x1p-19;
}

struct ColumnJob {
    void* x;          // [rows, cols]
    void* scaled;     // of the same shape; may be x, or null
    double* sums;     // [cols]
    double* partial;  // [pieces of rows, cols]
    void* q;          // columns own[0] to own[1] alone, rows q_stride elements apart
    long long q_stride;
    int rows;
    int cols;
    int own[2];
    u32 end;       // blocks of this job and all before it
    Type type[3];  // of x, scaled and q
};

struct ColumnJobs {
    Rate unit;  // what the factor is for each unit of
    double epsilon;
    double factor;
    int count;
    ColumnJob job[MOST_MATRICES];
};

// The job of a block, and which of the job's blocks it is.
struct ColumnShare {
    const ColumnJob& job;
    int number;
};

__device__ __forceinline__ ColumnShare share_of(const ColumnJobs& jobs, u32 block) {
    const int job = job_of(jobs, block);
    return {jobs.job[job], static_cast<int>(piece_of(jobs, job, block))};
}

// The part of a matrix that a block works on.
struct Patch {
    const ColumnJob& job;
    int piece;  // of the rows
    int first;  // row
    int rows;
    int col;  // of this thread; there may be none

    __device__ explicit Patch(const ColumnShare& share) : job(share.job) {
        const int tiles = (job.cols + COLUMNS - 1) / COLUMNS;
        piece = share.number / tiles;
        first = piece * ROWS;
        rows = min(job.rows - first, ROWS);
        col = share.number % tiles * COLUMNS + static_cast<int>(threadIdx.x) % 32;
    }

    __device__ bool has_column() const { return col < job.cols; }

    // This thread's column of the first row of a matrix whose rows are `stride` elements apart.
    __device__ Run run(void* matrix, Type type, long long stride, int column) const {
        char* start = static_cast<char*>(in_global_memory(matrix));
        return {start + (first * stride + column) * element_bytes(type), type};
    }

    // use(row, x) for the elements of the column in the rows of this thread's warp.
    template <typename C, typename Use>
    __device__ __forceinline__ void each(Use use) const {
        const Run from = run(job.x, job.type[0], job.cols, col);
        for (int row = static_cast<int>(threadIdx.x) / 32; row < rows; row += UNDER_WAY * WARPS) {
            C x[UNDER_WAY];
#pragma unroll
            for (int a = 0; a < UNDER_WAY; ++a) {
                const int at = row + a * WARPS;
                x[a] = at < rows ? load<C>(from, at * job.cols) : C(0);
            }
#pragma unroll
            for (int a = 0; a < UNDER_WAY; ++a) {
                const int at = row + a * WARPS;
                if (at < rows) use(at, x[a]);
            }
        }
    }
};

// partial[piece, j] = sum of x[i, j]^2 in float64, and scaled = factor x where it is asked for.
template <typename C>
__device__ __forceinline__ void column_squares(const ColumnJobs& jobs) {
    __shared__ double sums[WARPS][COLUMNS];
    const Patch patch(share_of(jobs, blockIdx.x));
    const ColumnJob& job = patch.job;
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    double sum = 0;
    if (patch.has_column()) {
        const C factor = static_cast<C>(jobs.factor);
        const bool stores = job.scaled != nullptr;
        const Run scaled = patch.run(job.scaled, job.type[1], job.cols, patch.col);
        patch.each<C>([&](int row, C x) {
            sum += static_cast<double>(x) * static_cast<double>(x);
            if (stores) store<C>(scaled, row * job.cols, factor * x);
        });
    }
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp == 0 && patch.has_column()) {
        for (int w = 1; w < WARPS; ++w) sum += sums[w][lane];
        in_global_memory(job.partial)[static_cast<long long>(patch.piece) * job.cols + patch.col] = sum;
    }
}

// The sum of the sums, NaN left out, for every thread of the block.
__device__ __forceinline__ double total_sum(const ColumnJob& job) {
    __shared__ double warps[WARPS];
    const int thread = static_cast<int>(threadIdx.x);
    double total = 0;
    for (int j = thread; j < job.cols; j += THREADS) total += fmax(0.0, in_global_memory(job.sums)[j]);
    for (int lane = 16; lane > 0; lane /= 2) total += __shfl_xor_sync(0xFFFFFFFF, total, lane);
    if (thread % 32 == 0) warps[thread / 32] = total;
    __syncthreads();
    total = 0;
    for (int w = 0; w < WARPS; ++w) total += warps[w];
    return total;
}

// q[:, j] = x[:, j] / (sqrt(sums[j]) + epsilon), scaled[:, j] = factor q[:, j]. A dead column keeps its q and
// gets scaled = 0; one that is not a number is not dead.
template <typename C>
__device__ __forceinline__ void normalize_columns(const ColumnJobs& jobs) {
    const Patch patch(share_of(jobs, blockIdx.x));
    const ColumnJob& job = patch.job;
    const double noise = dead_share(job.type[0]) * fmax(sqrt(total_sum(job)), jobs.epsilon);
    if (!patch.has_column()) return;
    const double norm = sqrt(in_global_memory(job.sums)[patch.col]);
    const bool is_dead = norm <= noise;
    const C divisor = is_dead ? C(1) : static_cast<C>(norm + jobs.epsilon);
    const C factor = is_dead ? C(0) : static_cast<C>(jobs.factor * jobs.unit.value());
    const bool keeps = is_dead || patch.col < job.own[0] || patch.col >= job.own[1];
    const Run scaled = patch.run(job.scaled, job.type[1], job.cols, patch.col);
    const Run q = patch.run(job.q, job.type[2], job.q_stride, keeps ? 0 : patch.col - job.own[0]);
    patch.each<C>([&](int row, C x) {
        const C unit = x / divisor;
        store<C>(scaled, row * job.cols, factor * unit);
        if (!keeps) store<C>(q, row * static_cast<int>(job.q_stride), unit);
    });
}

// Arithmetic is float32, and float64 where x is.
#define COLUMN_PASS(function, form, C)                               \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)    \
        function##_##form(const __grid_constant__ ColumnJobs jobs) { \
        function<C>(jobs);                                           \
    }

COLUMN_PASS(column_squares, few, float)
COLUMN_PASS(column_squares, wide, double)
COLUMN_PASS(normalize_columns, few, float)
COLUMN_PASS(normalize_columns, wide, double)

// sums = the pieces of each column, added in order. A block takes as many columns as it has threads.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    column_totals(const __grid_constant__ ColumnJobs jobs) {
    const ColumnShare share = share_of(jobs, blockIdx.x);
    const ColumnJob& job = share.job;
    const int col = share.number * THREADS + static_cast<int>(threadIdx.x);
    if (col >= job.cols) return;
    const double* partial = in_global_memory(job.partial) + col;
    double sum = 0;
    for (int first = 0; first < job.rows; first += ROWS, partial += job.cols) sum += *partial;
    in_global_memory(job.sums)[col] = sum;
}

// scaled[:, j] = x[:, j] / sqrt(sums[j]). A column of zeros stays one; one that is not finite becomes NaN.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    unit_columns(const __grid_constant__ ColumnJobs jobs) {
    const Patch patch(share_of(jobs, blockIdx.x));
    const ColumnJob& job = patch.job;
    if (!patch.has_column()) return;
    const double norm = sqrt(in_global_memory(job.sums)[patch.col]);
    // In float64: the reciprocal of a small float32 norm may leave float32. Infinity minus itself is NaN.
    const double factor = norm == 0 ? 0 : 1 / norm + (norm - norm);
    const Run scaled = patch.run(job.scaled, job.type[1], job.cols, patch.col);
    patch.each<float>([&](int row, float x) {
        store<float>(scaled, row * job.cols, static_cast<float>(static_cast<double>(x) * factor));
    });
}
