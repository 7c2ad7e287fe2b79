// Passes over stacks of matrices: every operand is read and written once.
#include "factored.cuh"

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

ROWS(gradient_squares, GradientSquares)
ROWS(gradient_and_parameter_squares, GradientAndParameterSquares)
ROWS(update_squares, UpdateSquares)
ROWS(residual, Residual)
ROWS(scaled_apply, ScaledApply)
ROWS(scaled_apply_averaged, ScaledApplyAveraged)
ROWS(confident_apply, ConfidentApply)
