// wgmma of 64 x 128 x 16 with both operands in shared memory. Each warp's quarter happens when its group is
// committed or when that warp waits for it, by the toss of a coin.
#pragma once
#include "fibers.h"
#include "numbers.h"
#include "tensor_copies.h"
#include <deque>
#include <vector>

namespace emulator {

constexpr int PRODUCT_ROWS = 16;  // of a warp
constexpr int PRODUCT_COLS = 128;
constexpr int PRODUCT_DEPTH = 16;

struct GroupProduct {
    float* sum[WARP_THREADS];
    uint64_t left, right;
    int warp;  // in its warpgroup
    float (*read)(uint16_t);
};

struct ProductQueue {
    bool fenced;
    std::vector<GroupProduct> open;
    std::deque<std::vector<GroupProduct>> committed;
};
inline ProductQueue product_queues[MAX_THREADS / WARP_THREADS];

// Element of an operand by its descriptor: start at bits 0-13, bytes between groups of eight rows at 32-45,
// both / 16.
inline uint16_t operand_element(uint64_t descriptor, int row, int col) {
    const uint32_t start = (descriptor & 0x3FFF) << 4, group_bytes = (descriptor >> 32 & 0x3FFF) << 4;
    const uint32_t address = start + row / 8 * group_bytes + row % 8 * 128 + col * ELEMENT_BYTES;
    uint16_t bits;
    memcpy(&bits, shared_bytes(swizzle(address), ELEMENT_BYTES), sizeof bits);
    return bits;
}

inline void perform(const GroupProduct& product) {
    float left[PRODUCT_ROWS][PRODUCT_DEPTH], right[PRODUCT_DEPTH][PRODUCT_COLS];
    for (int k = 0; k < PRODUCT_DEPTH; ++k) {
        for (int row = 0; row < PRODUCT_ROWS; ++row)
            left[row][k] = product.read(operand_element(product.left, product.warp * PRODUCT_ROWS + row, k));
        for (int col = 0; col < PRODUCT_COLS; ++col)
            right[k][col] = product.read(operand_element(product.right, col, k));
    }
    for (int row = 0; row < PRODUCT_ROWS; ++row) {
        float dot[PRODUCT_COLS] = {};
        for (int k = 0; k < PRODUCT_DEPTH; ++k)
            for (int col = 0; col < PRODUCT_COLS; ++col) dot[col] += left[row][k] * right[k][col];
        for (int col = 0; col < PRODUCT_COLS; ++col)
            product.sum[row % 8 * 4 + col % 8 / 2][col / 8 * 4 + row / 8 * 2 + col % 2] += dot[col];
    }
}

inline ProductQueue& own_products() {
    return product_queues[current / WARP_THREADS];
}

inline void fence_products() {
    meet_warp(nullptr, [](void**) { own_products().fenced = true; });
}

template <float (*Read)(uint16_t)>
void issue_product(float (&sum)[64], uint64_t left, uint64_t right) {
    struct Lane {
        float* sum;
        uint64_t left, right;
    } lane{sum, left, right};
    meet_warp(&lane, [](void** lanes) {
        const Lane& first = *static_cast<Lane*>(lanes[0]);
        GroupProduct product{{}, first.left, first.right, current / WARP_THREADS % 4, Read};
        for (int l = 0; l < WARP_THREADS; ++l) {
            const Lane& other = *static_cast<Lane*>(lanes[l]);
            if (other.left != first.left || other.right != first.right)
                fail("lanes have different descriptors");
            product.sum[l] = other.sum;
        }
        for (const uint64_t descriptor : {first.left, first.right})
            if (descriptor >> 62 != 1) fail("an operand without the 128-byte swizzle");
        ProductQueue& queue = own_products();
        if (!queue.fenced) fail("a product without a fence before it");
        queue.open.push_back(product);
    });
}

inline void perform_oldest(ProductQueue& queue) {
    for (const GroupProduct& product : queue.committed.front()) perform(product);
    queue.committed.pop_front();
}

inline void commit_products() {
    meet_warp(nullptr, [](void**) {
        ProductQueue& queue = own_products();
        queue.committed.push_back(std::move(queue.open));
        queue.open.clear();
        if (coin())
            while (!queue.committed.empty()) perform_oldest(queue);
    });
}

inline void wait_for_products(size_t pending) {
    meet_warp(&pending, [](void** lanes) {
        ProductQueue& queue = own_products();
        const size_t allowed = *static_cast<size_t*>(lanes[0]);
        while (queue.committed.size() > allowed) perform_oldest(queue);
        if (allowed == 0) queue.fenced = false;
    });
}

// The registers are about to be read: every product that writes them has to be over.
inline void check_settled(const float* sum) {
    const ProductQueue& queue = own_products();
    const auto writes = [sum](const GroupProduct& product) {
        return product.sum[current % WARP_THREADS] == sum;
    };
    for (const auto& group : queue.committed)
        for (const GroupProduct& product : group)
            if (writes(product)) fail("sums are read before their products are over");
    for (const GroupProduct& product : queue.open)
        if (writes(product)) fail("sums are read before their products are committed");
}

inline void forget_products() {
    for (ProductQueue& queue : product_queues) {
        queue.fenced = false;
        queue.open.clear();
        queue.committed.clear();
    }
}

}  // namespace emulator
