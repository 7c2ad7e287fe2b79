// Which part of a launch a block belongs to.
#pragma once
#include "ptx.cuh"

// The first of `count` parts that ends behind a block; `end_of` says where one does.
template <typename EndOf>
__device__ __forceinline__ int first_behind(int count, u32 block, EndOf end_of) {
    int low = 0, high = count - 1;
    while (low < high) {
        const int middle = (low + high) / 2;
        if (end_of(middle) > block) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    return low;
}
