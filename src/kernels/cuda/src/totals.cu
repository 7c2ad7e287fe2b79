// Adds up, in a fixed order, what the blocks of other kernels left.
#include "stacks.cuh"

// Where the pieces of each job end, and where its totals go.
struct PieceSums {
    const double* partial;  // `sums` for each piece
    double factor;          // totals are multiplied by its square
    double* total[MANY];    // `sums` for each job
    u32 end[MANY];
    int sums;
};

// One block for each job: totals of its pieces.
extern "C" __global__ void __launch_bounds__(THREADS, 1) add_pieces(const __grid_constant__ PieceSums what) {
    const int job = static_cast<int>(blockIdx.x);
    const u32 first = job ? what.end[job - 1] : 0;
    for (int k = 0; k < what.sums; ++k) {
        double own = 0;
        for (u32 piece = first + threadIdx.x; piece < what.end[job]; piece += THREADS) {
            own += in_global_memory(what.partial)[static_cast<long long>(piece) * what.sums + k];
        }
        const double sum = block_sum(own);
        if (threadIdx.x == 0) in_global_memory(what.total[job])[k] = sum * what.factor * what.factor;
    }
}

// Numbers in several places.
struct Numbers {
    const double* first;
    long long count;
};

struct Addends {
    double* total;
    int count;
    int adds;  // whether what is there is added to
    Numbers part[MANY];
};

// One block: the total of all numbers.
extern "C" __global__ void __launch_bounds__(THREADS, 1) add_numbers(const __grid_constant__ Addends what) {
    double own = 0;
    for (int p = 0; p < what.count; ++p) {
        const double* first = in_global_memory(what.part[p].first);
        for (long long i = threadIdx.x; i < what.part[p].count; i += THREADS) own += first[i];
    }
    const double sum = block_sum(own);
    if (threadIdx.x == 0) {
        double* total = in_global_memory(what.total);
        *total = what.adds ? *total + sum : sum;
    }
}

// One thread for each row and each column of a stack: its sum over tiles.
template <int Most>
__device__ __forceinline__ void add_strips(const Stacks<Most>& stacks) {
    const StackShare share = stack_share<&StackJob::strips>(stacks, blockIdx.x);
    const StackJob& job = share.job;
    const Tiling tiling(job);
    const long long number = static_cast<long long>(share.number) * THREADS + threadIdx.x;
    const long long rows = job.stack * job.rows;
    const bool by_row = number < rows;
    const long long at = by_row ? number : number - rows;
    const long long length = by_row ? job.rows : job.cols;
    if (at >= job.stack * length) return;
    const long long tiles = by_row ? tiling.across : tiling.down;
    const double* partial = in_global_memory(by_row ? job.partial_rows : job.partial_cols);
    const double* first = partial + at / length * tiles * length + at % length;
    double sum = 0;
    for (long long tile = 0; tile < tiles; ++tile) sum += first[tile * length];
    in_global_memory(by_row ? job.row_sums : job.col_sums)[at] = sum;
}

// One block for each matrix whose sum is wanted, and one for the operation's own total.
template <int Most>
__device__ __forceinline__ void add_tiles(const Stacks<Most>& stacks) {
    const StackShare share = stack_share<&StackJob::totals>(stacks, blockIdx.x);
    const StackJob& job = share.job;
    const Tiling tiling(job);
    const bool of_matrix = job.all_sums && share.number < job.stack;
    const long long tiles = tiling.down * tiling.across * (of_matrix ? 1 : job.stack);
    const double* first = in_global_memory(job.partial_totals) +
                          (of_matrix ? 2 * tiles * static_cast<long long>(share.number) : 1);
    double own = 0;
    for (long long tile = threadIdx.x; tile < tiles; tile += THREADS) own += first[2 * tile];
    const double sum = block_sum(own);
    if (threadIdx.x == 0) *in_global_memory(of_matrix ? job.all_sums + share.number : job.total) = sum;
}

#define OF_STACKS(function)                                                   \
    extern "C" __global__ void __launch_bounds__(THREADS, 1)                  \
        function##_few(const __grid_constant__ Stacks<FEW_STACKS> stacks) {   \
        function(stacks);                                                     \
    }                                                                         \
    extern "C" __global__ void __launch_bounds__(THREADS, 1)                  \
        function##_many(const __grid_constant__ Stacks<MANY_STACKS> stacks) { \
        function(stacks);                                                     \
    }

OF_STACKS(add_strips)
OF_STACKS(add_tiles)
