// Cholesky QR of many panels, after gram.cu: gram = L L^T and Q = panel L^-T, float32.
//
// B = panels, m = rows, r = columns (up to 1024 in use; any fits). One block factors one matrix, or several
// do, by columns of 64 x 64 tiles, each from the finished ones to its left, in the same order. Only the
// inverses of the diagonal tiles are formed: off the diagonal, factor and solve are then products alone. What
// is above the diagonal of the factor is neither written nor read.
//
// Scaling the columns of a panel scales the rows of L and changes no rounding that matters, so nothing is
// scaled: `ratio` divides each pivot by its column's norm instead. Columns whose norm squared is above
// float32 fail; one of zeros is left out, and where `left_out` says so also one that depends on those before
// it. What is left out has zeros in L and in the inverse tiles, so its column of Q is zero.
//
// With 1024 columns one block computes 120 tiles off the diagonal one after the other. By columns 15 of them
// are waited for.
//
// Registers of a thread on sm_80, sm_90a and sm_100: cholesky_factor 202, 210, 210; cholesky_diagonal 154,
// 156, 165; cholesky_below 148, 154, 163; cholesky_solve 228, 232, 196.
#include "panel.cuh"

constexpr int PITCH = DEPTH + 4;      // of operands; as below, lanes fall on 32 different banks
constexpr int TILE_PITCH = TILE + 4;  // of whole tiles
constexpr int OPERAND = TILE * PITCH;
constexpr int TILE_FLOATS = TILE * TILE_PITCH;
constexpr float FLOAT32_EPSILON = 1.1920929e-7f;

// Shared memory of both kernels.
struct Workspace {
    float stages[STAGES * 2 * OPERAND];
    float tile[TILE_FLOATS];
    float inverse[TILE_FLOATS];
    float root[TILE];      // diagonal of the factor
    float original[TILE];  // diagonal of the gram matrix
};

// sums -= left right^T over the first `depth` columns, for 64 rows of each.
__device__ __forceinline__ void subtract_product(Sums& sums, Workspace& w, const float* left,
                                                 long long left_stride, int left_row, int left_end,
                                                 const float* right, int right_row, int size, int depth) {
    auto load = [&](int block, int slot) {
        float* to = w.stages + slot * 2 * OPERAND;
        const int k = block * DEPTH;
        load_tile<TILE, DEPTH, PITCH>(to, left, left_stride, left_row, left_end, k, depth);
        load_tile<TILE, DEPTH, PITCH>(to + OPERAND, right, size, right_row, size, k, depth);
    };
    pipeline(depth / DEPTH, load, [&](int slot) {
        const float* a = w.stages + slot * 2 * OPERAND;
        const float* b = a + OPERAND;
        Sums product;
        multiply(
            product, [=](int row, int k) { return a[row * PITCH + k]; },
            [=](int col, int k) { return b[col * PITCH + k]; });
        accumulate(sums, product, -1.0f);
    });
}

// sums = tile inverse^T.
__device__ __forceinline__ void multiply_by_inverse(Sums& sums, const Workspace& w) {
    for_each_sum(sums, [](int, int, float& x) { x = 0.0f; });
#pragma unroll 1
    for (int from = 0; from < TILE; from += DEPTH) {
        Sums product;
        multiply(
            product, [&](int row, int k) { return w.tile[row * TILE_PITCH + from + k]; },
            [&](int col, int k) { return w.inverse[col * TILE_PITCH + from + k]; });
        accumulate(sums, product, 1.0f);
    }
}

// Factors the tile in place and inverts the factor; the tile's lower half is read. Returns 0, or 1 + the
// first column whose pivot is lost in rounding. Two threads work on a row. In round k the rows below k lose
// their share of row k, in the tile right of k and in the inverse left of it: 64 columns for each row in each
// round.
__device__ __forceinline__ int factor_diagonal(Workspace& w, float left_out) {
    const int row = threadIdx.x / 2, first = threadIdx.x % 2;
    for (int c = first; c < TILE; c += 2) w.inverse[row * TILE_PITCH + c] = row == c ? 1.0f : 0.0f;
    for (int k = 0; k < TILE; ++k) {
        __syncthreads();
        const float pivot = w.tile[k * TILE_PITCH + k], original = w.original[k];
        const bool is_left_out = original == 0.0f || (left_out > 0.0f && pivot <= left_out * original);
        // Also when it is not a number.
        if (!is_left_out && !(pivot > FLOAT32_EPSILON * original)) return k + 1;
        if (threadIdx.x == 0) w.root[k] = is_left_out ? 0.0f : sqrtf(pivot);
        if (row <= k || is_left_out) continue;
        const float share = w.tile[row * TILE_PITCH + k] / pivot;
        for (int c = first; c < TILE; c += 2) {
            if (c > row) break;
            float& to = c > k ? w.tile[row * TILE_PITCH + c] : w.inverse[row * TILE_PITCH + c];
            to -= share * (c > k ? w.tile[c * TILE_PITCH + k] : w.inverse[k * TILE_PITCH + c]);
        }
    }
    __syncthreads();
    const float own = w.root[row];
    for (int c = first; c <= row; c += 2) {
        float& element = w.tile[row * TILE_PITCH + c];
        const float root = w.root[c];
        element = row == c ? root : root > 0.0f ? element / root : 0.0f;
        float& inverse = w.inverse[row * TILE_PITCH + c];
        inverse = own > 0.0f ? inverse / own : 0.0f;
    }
    __syncthreads();
    return 0;
}

struct CholeskyFactor {
    const float* gram;  // [B, S, r, r] as gram.cu leaves it
    float* factor;      // [B, r, r], lower
    float* inverses;    // [B, tiles, 64, 64]: inverses of the factor's diagonal tiles, padded by the identity
    PanelStatus* status;  // [B]
    Selection selection;
    Factor shift;  // of those that failed before, the diagonal is multiplied by 1 + shift: about r * 1.2e-7
    float left_out;  // a pivot of up to this share of the column's square is left out; 0: it fails
    int size;        // r
    int parts;       // S
    int column;      // of tiles, where a launch factors one
};

// Tile (row_tile, col_tile) of the gram matrix, padded by the identity.
__device__ __forceinline__ void load_gram(Sums& sums, const CholeskyFactor& p, int z, int row_tile,
                                          int col_tile, float shift) {
    const long long square = static_cast<long long>(p.size) * p.size;
    const float* gram = p.gram + z * p.parts * square;
    for_each_sum(sums, [&](int row, int col, float& sum) {
        const int r = row_tile * TILE + row, c = col_tile * TILE + col;
        sum = r == c ? 1.0f : 0.0f;
        if (r >= p.size || c > r) return;
        sum = 0.0f;
#pragma unroll 1
        for (int part = 0; part < p.parts; ++part)
            sum += gram[part * square + static_cast<long long>(r) * p.size + c];
        if (r == c) sum += shift * sum;
    });
}

// What is added to the diagonal, as a share of it.
__device__ __forceinline__ float shift_of(const CholeskyFactor& p, int z) {
    const bool has_failed = p.selection.which == EVERY || p.selection.status[z].info != 0;
    return has_failed ? factor_value(p.shift) : 0.0f;
}

// Tile (i, j) of the gram matrix without what the columns to its left have of it, in shared memory.
__device__ __forceinline__ void begin_tile(Sums& sums, Workspace& w, const CholeskyFactor& p,
                                           const float* factor, int z, int i, int j, float shift) {
    load_gram(sums, p, z, i, j, shift);
    if (i == j) {
        for_each_sum(sums, [&](int row, int col, float& sum) {
            if (row == col) w.original[row] = sum;
        });
    }
    subtract_product(sums, w, factor, p.size, i * TILE, p.size, factor, j * TILE, p.size, j * TILE);
    for_each_sum(sums, [&](int row, int col, float& sum) { w.tile[row * TILE_PITCH + col] = sum; });
}

// Factors the tile of a column on the diagonal and keeps its inverse; returns 0, or 1 + the first bad column.
__device__ __forceinline__ int finish_diagonal(Sums& sums, Workspace& w, const CholeskyFactor& p, int z, int j) {
    const int info = factor_diagonal(w, p.left_out);
    if (info) return j * TILE + info;
    float* inverse = p.inverses + (static_cast<long long>(z) * ceil_div(p.size, TILE) + j) * TILE * TILE;
    for (int id = threadIdx.x; id < TILE * TILE; id += THREADS)
        inverse[id] = w.inverse[id / TILE * TILE_PITCH + id % TILE];
    for_each_sum(sums, [&](int row, int col, float& sum) { sum = w.tile[row * TILE_PITCH + col]; });
    return 0;
}

__device__ __forceinline__ void store_tile(Sums& sums, const CholeskyFactor& p, float* factor, int i, int j) {
    for_each_sum(sums, [&](int row, int col, float& sum) {
        const int r = i * TILE + row, c = j * TILE + col;
        if (r < p.size && c <= r) factor[static_cast<long long>(r) * p.size + c] = sum;
    });
}

// Smallest over largest pivot of a whole factor, each over its column's norm; columns that are left out do not
// count. All threads come; the first one has the result.
__device__ __forceinline__ float ratio_of(Workspace& w, const CholeskyFactor& p, const float* factor, int z,
                                          float shift) {
    const long long square = static_cast<long long>(p.size) * p.size;
    const float* gram = p.gram + z * p.parts * square;
    float smallest = 1.0f, largest = 0.0f;  // each pivot is between 0 and about 1
    for (int c = threadIdx.x; c < p.size; c += THREADS) {
        const long long at = static_cast<long long>(c) * p.size + c;
        const float root = factor[at];
        if (!(root > 0.0f)) continue;
        float original = 0.0f;
        for (int part = 0; part < p.parts; ++part) original += gram[part * square + at];
        original += shift * original;
        const float pivot = root / sqrtf(original);
        smallest = min(smallest, pivot);
        largest = max(largest, pivot);
    }
    float* both = w.tile;
    both[threadIdx.x] = smallest;
    both[THREADS + threadIdx.x] = largest;
    __syncthreads();
    for (int t = 1; threadIdx.x == 0 && t < THREADS; ++t) {
        smallest = min(smallest, both[t]);
        largest = max(largest, both[THREADS + t]);
    }
    return smallest / largest;
}

// One block factors a matrix.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    cholesky_factor(const __grid_constant__ CholeskyFactor p) {
    DYNAMIC_SHARED(memory);
    Workspace& w = *reinterpret_cast<Workspace*>(memory);
    const int z = blockIdx.x;
    if (!is_selected(p.selection, z)) {
        if (threadIdx.x == 0) p.status[z] = p.selection.status[z];
        return;
    }
    const int tiles = ceil_div(p.size, TILE);
    const float shift = shift_of(p, z);
    float* factor = p.factor + static_cast<long long>(z) * p.size * p.size;
    for (int j = 0; j < tiles; ++j) {
        for (int i = j; i < tiles; ++i) {
            Sums sums;
            begin_tile(sums, w, p, factor, z, i, j, shift);
            if (i == j) {
                const int info = finish_diagonal(sums, w, p, z, j);
                if (info) {
                    if (threadIdx.x == 0) p.status[z] = {info, 0.0f};
                    return;
                }
            } else {
                __syncthreads();  // the tile is whole
                multiply_by_inverse(sums, w);
            }
            store_tile(sums, p, factor, i, j);
            __syncthreads();  // the factor is read by all from here on, the tile is written again
        }
    }
    const float ratio = ratio_of(w, p, factor, z, shift);
    if (threadIdx.x == 0) p.status[z] = {0, ratio};
}

// Several blocks factor a matrix, a column of tiles after the other by two launches each: the tile on the
// diagonal of column `column`, a block for each matrix.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    cholesky_diagonal(const __grid_constant__ CholeskyFactor p) {
    DYNAMIC_SHARED(memory);
    Workspace& w = *reinterpret_cast<Workspace*>(memory);
    const int z = blockIdx.x, j = p.column;
    if (!is_selected(p.selection, z)) {
        if (j == 0 && threadIdx.x == 0) p.status[z] = p.selection.status[z];
        return;
    }
    if (j > 0 && p.status[z].info != 0) return;  // a column before this one failed
    const float shift = shift_of(p, z);
    float* factor = p.factor + static_cast<long long>(z) * p.size * p.size;
    Sums sums;
    begin_tile(sums, w, p, factor, z, j, j, shift);
    const int info = finish_diagonal(sums, w, p, z, j);
    if (info) {
        if (threadIdx.x == 0) p.status[z] = {info, 0.0f};
        return;
    }
    store_tile(sums, p, factor, j, j);
    __syncthreads();  // the diagonal of the factor is whole, and the tile is written again
    const bool is_last = j + 1 == ceil_div(p.size, TILE);
    const float ratio = is_last ? ratio_of(w, p, factor, z, shift) : 0.0f;
    if (threadIdx.x == 0) p.status[z] = {0, ratio};
}

// The tiles below it, a block each.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    cholesky_below(const __grid_constant__ CholeskyFactor p) {
    DYNAMIC_SHARED(memory);
    Workspace& w = *reinterpret_cast<Workspace*>(memory);
    const int tiles = ceil_div(p.size, TILE), j = p.column, below = tiles - 1 - j;
    const int z = blockIdx.x / below, i = j + 1 + blockIdx.x % below;
    if (!is_selected(p.selection, z) || p.status[z].info != 0) return;
    float* factor = p.factor + static_cast<long long>(z) * p.size * p.size;
    const float* inverse = p.inverses + (static_cast<long long>(z) * tiles + j) * TILE * TILE;
    for (int id = threadIdx.x; id < TILE * TILE; id += THREADS)
        w.inverse[id / TILE * TILE_PITCH + id % TILE] = inverse[id];
    Sums sums;
    begin_tile(sums, w, p, factor, z, i, j, 0.0f);
    __syncthreads();  // tile and inverse are there for all
    multiply_by_inverse(sums, w);
    store_tile(sums, p, factor, i, j);
}

struct CholeskySolve {
    MatrixBatch panel;  // [B, m, r]
    MatrixBatch out;    // [B, m, r]; may be the panel
    const float* factor;
    const float* inverses;
    const PanelStatus* status;  // of the factor: where it failed, out is left as it is
    Selection selection;
    int rows;   // m
    int cols;   // r
    int tiles;  // 64-row tiles of a panel; the grid is B * tiles blocks
};

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    cholesky_solve(const __grid_constant__ CholeskySolve p) {
    DYNAMIC_SHARED(memory);
    Workspace& w = *reinterpret_cast<Workspace*>(memory);
    const int z = blockIdx.x / p.tiles, first_row = blockIdx.x % p.tiles * TILE;
    if (!is_selected(p.selection, z) || p.status[z].info != 0) return;
    const int tiles = ceil_div(p.cols, TILE);
    const float* factor = p.factor + static_cast<long long>(z) * p.cols * p.cols;
    const float* panel = matrix_start<const float>(p.panel, z);
    float* out = matrix_start<float>(p.out, z);
    for (int j = 0; j < tiles; ++j) {
        const float* inverse = p.inverses + (static_cast<long long>(z) * tiles + j) * TILE * TILE;
        for (int id = threadIdx.x; id < TILE * TILE; id += THREADS)
            w.inverse[id / TILE * TILE_PITCH + id % TILE] = inverse[id];
        Sums sums;
        for_each_sum(sums, [&](int row, int col, float& sum) {
            const int r = first_row + row, c = j * TILE + col;
            sum = r < p.rows && c < p.cols ? panel[r * p.panel.row_stride + c] : 0.0f;
        });
        subtract_product(sums, w, out, p.out.row_stride, first_row, p.rows, factor, j * TILE, p.cols,
                         j * TILE);
        for_each_sum(sums, [&](int row, int col, float& sum) { w.tile[row * TILE_PITCH + col] = sum; });
        __syncthreads();  // tile and inverse are whole
        multiply_by_inverse(sums, w);
        for_each_sum(sums, [&](int row, int col, float& sum) {
            const int r = first_row + row, c = j * TILE + col;
            if (r < p.rows && c < p.cols) out[r * p.out.row_stride + c] = sum;
        });
        __syncthreads();  // these columns are read by all from here on, tile and inverse are written again
    }
}
