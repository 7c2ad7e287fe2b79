// Elementwise passes over operands that may be codes or rounded at random.
#include "coded.cuh"
#include "each_elementwise.cuh"

EACH_ENCODED_ELEMENTWISE(UPDATE_CODED)
