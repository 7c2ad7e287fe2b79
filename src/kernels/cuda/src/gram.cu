// Gram products of panels: gram = panel^T panel, float32, lower tiles only.
//
// B = panels, m = rows, r = columns of a panel, S = parts that the rows are cut into so that a few tall
// panels still fill the device. Part s of panel z is gram[z, s]; the factorization sums the parts in order,
// so the result does not depend on timing. Elements above the diagonal are not written.
//
// Registers of a thread on sm_80, sm_90a and sm_100: 168, 168, 143.
#include "panel.cuh"

constexpr int PITCH = TILE + 8;  // lanes at distance 4 in k and 8 in columns then use 32 different banks
constexpr int OPERAND = DEPTH * PITCH;

struct GramProduct {
    MatrixBatch panel;
    float* gram;  // [B, S, r, r]
    Selection selection;
    int rows;   // m
    int cols;   // r
    int tiles;  // 64 x 64 tiles of one triangle; the grid is B * S * tiles blocks
    int parts;  // S
};

extern "C" __global__ void __launch_bounds__(THREADS, 3) gram_product(const __grid_constant__ GramProduct p) {
    DYNAMIC_SHARED(memory);
    float* stages = reinterpret_cast<float*>(memory);
    const int index = blockIdx.x / p.tiles, z = index / p.parts, part = index % p.parts;
    if (!is_selected(p.selection, z)) return;
    const Tile tile = triangular_tile(blockIdx.x % p.tiles);
    const int first_row = tile.row * TILE, first_col = tile.col * TILE;
    const float* panel = matrix_start<const float>(p.panel, z);
    const int part_rows = ceil_div(ceil_div(p.rows, DEPTH), p.parts) * DEPTH;
    const int start = part * part_rows, end = min(p.rows, start + part_rows);

    auto load = [&](int block, int slot) {
        float* to = stages + slot * 2 * OPERAND;
        const int k = start + block * DEPTH;
        load_tile<DEPTH, TILE, PITCH>(to, panel, p.panel.row_stride, k, end, first_row, p.cols);
        load_tile<DEPTH, TILE, PITCH>(to + OPERAND, panel, p.panel.row_stride, k, end, first_col, p.cols);
    };
    Sums sums = {};
    pipeline(ceil_div(max(end - start, 0), DEPTH), load, [&](int slot) {
        const float* left = stages + slot * 2 * OPERAND;
        const float* right = left + OPERAND;
        Sums product;
        multiply(
            product, [=](int row, int k) { return left[k * PITCH + row]; },
            [=](int col, int k) { return right[k * PITCH + col]; });
        accumulate(sums, product, 1.0f);
    });
    float* gram = p.gram + static_cast<long long>(index) * p.cols * p.cols;
    for_each_sum(sums, [&](int row, int col, float& sum) {
        const int r = first_row + row, c = first_col + col;
        if (r < p.cols && c <= r) gram[static_cast<long long>(r) * p.cols + c] = sum;
    });
}
