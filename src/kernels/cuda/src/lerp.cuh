// Linear interpolation of a running mean, as src/kernels/ops/lerp.rs has it.
#pragma once

// beta old + (1 - beta) new: exactly one of them for beta = 0 and beta = 1. Their difference would lose the
// small one, or overflow: it is taken of products with the lighter weight.
template <typename C>
struct Lerp {
    C weight;  // of what weighs less, negative for what is old: -0 keeps nothing of it

    // With the decay rate of what is old.
    static __device__ __forceinline__ Lerp keeping(double beta) {
        return {static_cast<C>(beta <= 0.5 ? -beta : 1.0 - beta)};
    }

    // With the share of what is new.
    static __device__ __forceinline__ Lerp adding(double share) {
        return {static_cast<C>(share >= 0.5 ? -(1.0 - share) : share)};
    }

    __device__ __forceinline__ C operator()(C before, C now) const {
        // The same in both directions, but for what it is added to.
        const C change = weight * now - weight * before;
        const bool towards_new = __float_as_uint(static_cast<float>(weight)) >> 31;
        return (towards_new ? now : before) + change;
    }
};
