// Elementwise passes over operands that may be quantized or stochastically rounded.
#include "quantized.cuh"
#include "each_elementwise.cuh"

EACH_ENCODED_ELEMENTWISE(UPDATE_QUANTIZED)
