// Passes over stacks of matrices: every operand is read and written once.
#include "each_row.cuh"

// For small tables of stacks, for large ones, and in float64.
#define ROWS(name, Op)                                                    \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)         \
        name##_few(const __grid_constant__ Stacks<FEW_STACKS> stacks) {   \
        each_row<float, Op>(stacks);                                      \
    }                                                                     \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)         \
        name##_many(const __grid_constant__ Stacks<MANY_STACKS> stacks) { \
        each_row<float, Op>(stacks);                                      \
    }                                                                     \
    extern "C" __global__ void __launch_bounds__(THREADS, 1)              \
        name##_wide(const __grid_constant__ Stacks<FEW_STACKS> stacks) {  \
        each_row<double, Op>(stacks);                                     \
    }

EACH_ROW(ROWS)
