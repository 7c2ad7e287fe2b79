// Passes over stacks of matrices, row by row, with scales by row and by column and sums by row, by column, of
// each matrix and of all.
//
// A block has a tile of a matrix and leaves sums of it; kernels of totals.cu add those up in a fixed order.
//
// A tile is 128 x 128, 256 x 64 or 512 x 32, by the width of the matrix. Many tiny matrices leave most
// threads of a block without work.
#pragma once
#include "block_sum.cuh"

constexpr int MOST_STACKED = 3;  // operands
constexpr int MOST_SCALES = 2;
constexpr int FEW_STACKS = 16;
constexpr int MANY_STACKS = 177;
constexpr int DOWN = 16;        // rows of a tile for each thread
constexpr int TOGETHER = 4;     // rows whose loads are in flight at once
constexpr int LEAST_LANES = 8;  // threads along a row, at least
constexpr int MOST_ROWS = DOWN * THREADS / LEAST_LANES;

// Second moments: 1 / sqrt(V) of an element is sqrt(all) / (sqrt(row) sqrt(col)), with those of its matrix,
// row and column. Each of the two factors takes a root of sqrt(all), as one with all of it may leave the
// range of float32. Without row the moments are by element; without all three the factor is 1.
struct Moments {
    const void* row;
    const void* col;
    const void* all;
};

// `stack` matrices rows x cols that lie one after the other.
struct StackJob {
    void* operand[MOST_STACKED];
    Moments moments[MOST_SCALES];
    const double* live;    // where the device left factors of this job, or null
    double* partial_rows;  // for each matrix and tile across it one for each row; null where none are wanted
    double* partial_cols;  // for each matrix and tile down it one for each column
    double* partial_totals;  // for each tile the sum of what rows sum, and the operation's own
    double* row_sums;
    double* col_sums;
    double* all_sums;  // of what rows sum, for each matrix
    double* total;     // the operation's own
    long long stack;
    long long rows;
    long long cols;
    u32 tiles;   // of this job and all before it
    u32 strips;  // blocks that add up rows and columns, likewise
    u32 totals;  // blocks that add up tiles, likewise
    Type type[MOST_STACKED];
    Type moments_type[MOST_SCALES];
    unsigned char lanes;  // threads along a row: a power of two
};

template <int Most>
struct Stacks {
    Scalars scalars;
    int count;
    StackJob job[Most];
};

// What a block works on: a job, and which of the job's blocks it is.
struct StackShare {
    const StackJob& job;
    u32 number;
};

// The share of a block; `End` counts the blocks of a job and all before it.
template <u32 StackJob::* End, int Most>
__device__ __forceinline__ StackShare stack_share(const Stacks<Most>& stacks, u32 block) {
    const int job = first_behind(stacks.count, block, [&](int i) { return stacks.job[i].*End; });
    return {stacks.job[job], block - (job ? stacks.job[job - 1].*End : 0)};
}

// How a matrix is cut: a tile has DOWN rows for each thread of a column, and a vector for each thread of a
// row.
struct Tiling {
    int lanes, slots;        // threads along a row and along a column
    long long down, across;  // tiles

    __device__ explicit Tiling(const StackJob& job) : lanes(job.lanes), slots(THREADS / job.lanes) {
        down = (job.rows + DOWN * slots - 1) / (DOWN * slots);
        across = (job.cols + VECTOR * lanes - 1) / (VECTOR * lanes);
    }
};

__device__ __forceinline__ double moment(const void* moments, Type type, long long i) {
    const Run run{static_cast<char*>(const_cast<void*>(in_global_memory(moments))) + i * element_bytes(type),
                  type};
    return load<double>(run, 0);
}

// What goes with either.
__device__ __forceinline__ double half_of_all(const Moments& of, Type type, long long matrix) {
    return of.all ? sqrt(sqrt(moment(of.all, type, matrix))) : 1.0;
}

// The row's share of 1 / sqrt(V), and the column's.
__device__ __forceinline__ double row_scale(const Moments& of, Type type, long long matrix, long long row) {
    return of.row ? half_of_all(of, type, matrix) / sqrt(moment(of.row, type, row)) : 1.0;
}

__device__ __forceinline__ double col_scale(const Moments& of, Type type, long long matrix, long long col) {
    return of.col ? half_of_all(of, type, matrix) / sqrt(moment(of.col, type, col)) : 1.0;
}

// Applies an operation to every element of this block's tile. Op::SCALES scales; where Op::SUMS what it
// returns is summed by row, by column and over the tile, where Op::TOTAL its member `total` over the tile.
template <typename C, template <typename> class Operation, int Most>
__device__ __forceinline__ void each_row(const Stacks<Most>& stacks) {
    using Op = Operation<C>;
    constexpr int N = Op::OPERANDS;
    constexpr int S = Op::SCALES;
    const StackShare share = stack_share<&StackJob::tiles>(stacks, blockIdx.x);
    const StackJob& job = share.job;
    const Tiling tiling(job);
    const int thread = static_cast<int>(threadIdx.x);
    const int lane = thread % tiling.lanes;
    const int slot = thread / tiling.lanes;
    const long long matrix = share.number / (tiling.down * tiling.across);
    const long long within = share.number % (tiling.down * tiling.across);
    const long long tile_row = within / tiling.across;
    const long long tile_col = within % tiling.across;
    const long long first_row = tile_row * DOWN * tiling.slots;
    const long long col = (tile_col * tiling.lanes + lane) * VECTOR;
    const int height =
        static_cast<int>(min(job.rows - first_row, static_cast<long long>(DOWN) * tiling.slots));
    const int width = static_cast<int>(max(min(job.cols - col, static_cast<long long>(VECTOR)), 0LL));
    const long long row_number = matrix * job.rows + first_row;

    Run run[N];
    bool is_aligned = job.cols % VECTOR == 0;
#pragma unroll
    for (int n = 0; n < N; ++n) {
        run[n] = {static_cast<char*>(in_global_memory(job.operand[n])), job.type[n]};
        is_aligned = is_aligned && run[n].is_aligned();
    }
    __shared__ C row_scales[S ? S : 1][S ? MOST_ROWS : 1];
    C col_scales[S ? S : 1][VECTOR];
    if constexpr (S > 0) {
#pragma unroll
        for (int s = 0; s < S; ++s) {
            const Type type = job.moments_type[s];
            for (int r = thread; r < height; r += THREADS) {
                row_scales[s][r] = static_cast<C>(row_scale(job.moments[s], type, matrix, row_number + r));
            }
            for (int j = 0; j < VECTOR; ++j) {
                const long long at = matrix * job.cols + col + j;
                col_scales[s][j] = j < width ? static_cast<C>(col_scale(job.moments[s], type, matrix, at)) : C(0);
            }
        }
        __syncthreads();
    }

    Op op(stacks.scalars, job);
    double below[VECTOR] = {};  // sums by column
    double all = 0;
    // Rows of this warp begin here.
    const int top = thread / 32 * 32 / tiling.lanes;
    for (int first = 0; first < DOWN && top + first * tiling.slots < height; first += TOGETHER) {
        Fetched<C> fetched[TOGETHER][N];
#pragma unroll
        for (int a = 0; a < TOGETHER; ++a) {
            const int r = slot + (first + a) * tiling.slots;
            if (r >= height || width == 0) continue;
#pragma unroll
            for (int n = 0; n < N; ++n) {
                if (!(Op::READS >> n & 1)) continue;
                const long long at = (row_number + r) * job.cols + col;
                const Run here{run[n].start + at * element_bytes(run[n].type), run[n].type};
                if (is_aligned) {
                    fetched[a][n].load(here, 0);
                } else {
                    C x[VECTOR];
#pragma unroll
                    for (int j = 0; j < VECTOR; ++j) x[j] = j < width ? load<C>(here, j) : C(0);
                    fetched[a][n].keep(x);
                }
            }
        }
#pragma unroll
        for (int a = 0; a < TOGETHER; ++a) {
            const int r = slot + (first + a) * tiling.slots;
            const bool inside = r < height && width > 0;
            double others = 0;
            if (inside) {
                C row_of[S ? S : 1];
#pragma unroll
                for (int s = 0; s < S; ++s) row_of[s] = row_scales[s][r];
                C x[N][VECTOR];
#pragma unroll
                for (int n = 0; n < N; ++n) {
                    if (!(Op::READS >> n & 1)) continue;
                    fetched[a][n].decode(is_aligned ? run[n].type : Fetched<C>::own_type, x[n]);
                }
#pragma unroll
                for (int j = 0; j < VECTOR; ++j) {
                    C one[N];
                    C col_of[S ? S : 1];
#pragma unroll
                    for (int n = 0; n < N; ++n) one[n] = x[n][j];
#pragma unroll
                    for (int s = 0; s < S; ++s) col_of[s] = col_scales[s][j];
                    if (j < width) {
                        const auto summed = op(one, row_of, col_of);
                        if constexpr (Op::SUMS) {
                            others += summed;
                            below[j] += summed;
                        }
                    }
#pragma unroll
                    for (int n = 0; n < N; ++n) x[n][j] = one[n];
                }
#pragma unroll
                for (int n = 0; n < N; ++n) {
                    if (!(Op::WRITES >> n & 1)) continue;
                    const long long at = (row_number + r) * job.cols + col;
                    const Run here{run[n].start + at * element_bytes(run[n].type), run[n].type};
                    if (is_aligned) {
                        store_vector(here, 0, x[n]);
                    } else {
#pragma unroll
                        for (int j = 0; j < VECTOR; ++j) {
                            if (j < width) store<C>(here, j, x[n][j]);
                        }
                    }
                }
            }
            if constexpr (Op::SUMS) {
                double sum = others;
                all += sum;
                if (job.partial_rows) {
                    for (int other = tiling.lanes / 2; other > 0; other /= 2) {
                        sum += __shfl_xor_sync(0xFFFFFFFF, sum, other);
                    }
                    if (lane == 0 && r < height) {
                        const long long strip = (matrix * tiling.across + tile_col) * job.rows;
                        in_global_memory(job.partial_rows)[strip + first_row + r] = sum;
                    }
                }
            }
        }
    }

    if constexpr (Op::SUMS) {
        __shared__ double columns[THREADS][VECTOR];
        for (int j = 0; j < VECTOR; ++j) columns[thread][j] = below[j];
        __syncthreads();
        const long long own = tile_col * tiling.lanes * VECTOR + thread;
        if (job.partial_cols && thread < tiling.lanes * VECTOR && own < job.cols) {
            double sum = 0;
            for (int s = 0; s < tiling.slots; ++s) {
                sum += columns[s * tiling.lanes + thread / VECTOR][thread % VECTOR];
            }
            in_global_memory(job.partial_cols)[(matrix * tiling.down + tile_row) * job.cols + own] = sum;
        }
    }
    if constexpr (Op::SUMS || Op::TOTAL) {
        const double rows = block_sum(all);
        const double total = block_sum(op.total);
        if (thread == 0 && job.partial_totals) {
            double* totals = in_global_memory(job.partial_totals) + 2LL * share.number;
            totals[0] = rows;
            totals[1] = total;
        }
    }
}
