// Adds up, in a fixed order, what the blocks of other kernels left.
#include "block_sum.cuh"

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
