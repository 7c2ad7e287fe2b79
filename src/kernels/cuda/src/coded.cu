// Elementwise passes over operands that may be quantized or stochastically rounded.
#include "coded.cuh"
#include "each_elementwise.cuh"

EACH_ENCODED_ELEMENTWISE(UPDATE_CODED)
