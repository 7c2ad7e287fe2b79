// ldmatrix and mma.sync with the fragment layouts of the PTX manual (group = lane / 4, place = lane % 4).
#pragma once
#include "fibers.h"
#include "numbers.h"

namespace emulator {

// Row r of matrix i lies at the address of lane 8 i + r. Lane l receives elements 2 (l % 4) and the next of
// row l / 4, or, transposed, the elements of column l / 4 in rows 2 (l % 4) and the next.
inline void load_four_matrices(uint32_t (&to)[4], uint32_t row, bool transposed) {
    struct Lane {
        uint32_t* to;
        uint32_t row;
    } lane{to, row};
    meet_warp(&lane, [transposed](void** lanes) {
        for (int i = 0; i < 4; ++i) {
            uint16_t matrix[8][8];
            for (int r = 0; r < 8; ++r)
                memcpy(matrix[r], shared_bytes(static_cast<Lane*>(lanes[8 * i + r])->row, 16), 16);
            for (int l = 0; l < WARP_THREADS; ++l) {
                const int group = l / 4, place = l % 4 * 2;
                const uint32_t low = transposed ? matrix[place][group] : matrix[group][place];
                const uint32_t high = transposed ? matrix[place + 1][group] : matrix[group][place + 1];
                static_cast<Lane*>(lanes[l])->to[i] = low | high << 16;
            }
        }
    });
}

struct MatrixLane {
    float* sum;
    const uint32_t* a;
    uint32_t b[2];
};

// sum += a b^T over `Depth` columns; both operands are given row by row.
template <int Depth>
void accumulate(void** lanes, const float (&a)[16][Depth], const float (&b)[8][Depth]) {
    for (int l = 0; l < WARP_THREADS; ++l) {
        float* sum = static_cast<MatrixLane*>(lanes[l])->sum;
        for (int q = 0; q < 4; ++q) {
            const int row = l / 4 + q / 2 * 8, col = l % 4 * 2 + q % 2;
            float dot = 0;
            for (int k = 0; k < Depth; ++k) dot += a[row][k] * b[col][k];
            sum[q] += dot;
        }
    }
}

template <float (*Read)(uint16_t)>
void multiply_add_16_bit(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    MatrixLane lane{sum, a, {b0, b1}};
    meet_warp(&lane, [](void** lanes) {
        float left[16][16], right[8][16];
        for (int l = 0; l < WARP_THREADS; ++l) {
            const MatrixLane& from = *static_cast<MatrixLane*>(lanes[l]);
            const int group = l / 4;
            for (int i = 0; i < 8; ++i) {
                const int half = i % 2, word = i / 2;
                const int k = l % 4 * 2 + half + word / 2 * 8;
                left[group + word % 2 * 8][k] = Read(static_cast<uint16_t>(from.a[word] >> 16 * half));
                if (word < 2)
                    right[group][l % 4 * 2 + half + word * 8] =
                        Read(static_cast<uint16_t>(from.b[word] >> 16 * half));
            }
        }
        accumulate(lanes, left, right);
    });
}

inline void multiply_add_tf32_lanes(float (&sum)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    MatrixLane lane{sum, a, {b[0], b[1]}};
    meet_warp(&lane, [](void** lanes) {
        float left[16][8], right[8][8];
        for (int l = 0; l < WARP_THREADS; ++l) {
            const MatrixLane& from = *static_cast<MatrixLane*>(lanes[l]);
            for (int word = 0; word < 4; ++word)
                left[l / 4 + word % 2 * 8][l % 4 + word / 2 * 4] = from_tf32(from.a[word]);
            for (int word = 0; word < 2; ++word) right[l / 4][l % 4 + word * 4] = from_tf32(from.b[word]);
        }
        accumulate(lanes, left, right);
    });
}

}  // namespace emulator
