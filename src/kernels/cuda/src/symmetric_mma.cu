// Symmetric products on mma.sync (sm_80 and newer): out = alpha left right^T + sum_i beta_i addend_i + gamma
// I.
//
// B = matrices in the batch, m = rows of left and right, k = their columns. out and addends are [B, m, m].
// The product has to be symmetric: right = left, or both symmetric and commuting (then right^T = right).
// Only tiles of the lower triangle are computed; the upper one is written from the same tiles, so out is
// symmetric to the last bit. Addends are read in their lower triangle only and may be `out` itself.
// m and k are any; rows that start at multiples of 16 bytes take the wide path.
#include "symmetric.cuh"

constexpr int TILE = 128;  // rows and columns of out that one block computes
constexpr int DEPTH = 32;  // columns of left and right per pipeline stage
constexpr int STAGES = 4;
constexpr int THREADS = 256;  // 8 warps, 2 down and 4 across
constexpr int WARP_ROWS = 64;
constexpr int WARP_COLS = 32;
constexpr int CHUNK = CHUNK_BYTES / 2;  // 16-bit elements per 16 bytes
constexpr int STAGE_ROW_CHUNKS = DEPTH / CHUNK;
constexpr int OPERAND_BYTES = TILE * DEPTH * 2;
constexpr int STAGE_BYTES = 2 * OPERAND_BYTES;
constexpr int LOADS = TILE * STAGE_ROW_CHUNKS / THREADS;  // chunks of one operand per thread and stage
constexpr int OUT_ROW_CHUNKS = TILE / CHUNK;
constexpr int FRAGMENT_ROWS = WARP_ROWS / 16;
constexpr int FRAGMENT_COLS = WARP_COLS / 8;

struct SymmetricProduct {
    MatrixBatch left;
    MatrixBatch right;
    MatrixBatch out;
    SymmetricTerms terms;
    int size;   // m
    int depth;  // k
    int tiles;  // tiles of one triangle; the grid is tiles * B blocks
};

// Offset of a chunk in a stage. Two rows share 128 bytes, so the row's bits 1 and 2 spread the banks.
__device__ __forceinline__ u32 stage_offset(int row, int chunk) {
    return (row * STAGE_ROW_CHUNKS + (chunk ^ ((row >> 1) & (STAGE_ROW_CHUNKS - 1)))) * CHUNK_BYTES;
}

// Offset of a chunk in the finished tile. Rows 0..7 and rows {8q + h} both fall on eight different bank
// groups: the first when fragments are written, the second when the mirror is read.
__device__ __forceinline__ u32 out_offset(int row, int chunk) {
    return (row * OUT_ROW_CHUNKS + (chunk ^ ((row & 7) ^ (((row >> 3) & 3) << 1)))) * CHUNK_BYTES;
}

// Where one thread reads one operand: rows that do not exist are read nowhere and count as zero.
template <typename T>
struct Operand {
    const T* row[LOADS];
    u32 slot[LOADS];
    bool inside[LOADS];
    bool aligned;

    __device__ __forceinline__ Operand(const MatrixBatch& batch, int z, int first_row, int size) {
        const T* matrix = matrix_start<const T>(batch, z);
        aligned = rows_are_aligned(matrix, batch);
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            const int id = threadIdx.x + i * THREADS;
            const int tile_row = id / STAGE_ROW_CHUNKS;
            inside[i] = first_row + tile_row < size;
            row[i] = matrix + (inside[i] ? first_row + tile_row : 0) * batch.row_stride;
            slot[i] = stage_offset(tile_row, id % STAGE_ROW_CHUNKS);
        }
    }

    __device__ __forceinline__ void load(unsigned char* stage, int from_col, int depth) const {
        const int col = from_col + (threadIdx.x % STAGE_ROW_CHUNKS) * CHUNK;
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            const int valid = inside[i] ? min(max(depth - col, 0), CHUNK) : 0;
            if (aligned) {
                copy_async_16(shared_address(stage + slot[i]), row[i] + (valid ? col : 0), valid * 2);
            } else {
                u16* to = reinterpret_cast<u16*>(stage + slot[i]);
                for (int e = 0; e < CHUNK; ++e) to[e] = e < valid ? row[i][col + e].bits : 0;
            }
        }
    }
};

// `count` (1 to 8) elements of a row of out.
template <typename T>
__device__ __forceinline__ void store_chunk(T* to, const u32 (&bits)[4], int count, bool aligned) {
    if (aligned && count == CHUNK) {
        *reinterpret_cast<uint4*>(to) = make_uint4(bits[0], bits[1], bits[2], bits[3]);
        return;
    }
#pragma unroll
    for (int e = 0; e < CHUNK; ++e)
        if (e < count) to[e].bits = static_cast<u16>(bits[e / 2] >> (16 * (e % 2)));
}

template <typename T>
__device__ __forceinline__ void multiply_stage(float (&sum)[FRAGMENT_ROWS][FRAGMENT_COLS][4], u32 left,
                                               u32 right) {
    const int lane = threadIdx.x % WARP;
    const int left_row = lane % 16;
    const int left_chunk = lane / 16;
    const int right_row = lane % 8 + (lane / 16) * 8;
    const int right_chunk = (lane / 8) % 2;
#pragma unroll
    for (int step = 0; step < DEPTH / 16; ++step) {
        u32 a[FRAGMENT_ROWS][4], b[FRAGMENT_COLS / 2][4];
#pragma unroll
        for (int i = 0; i < FRAGMENT_ROWS; ++i)
            load_matrices(a[i], left + stage_offset(i * 16 + left_row, step * 2 + left_chunk));
#pragma unroll
        for (int j = 0; j < FRAGMENT_COLS / 2; ++j)
            load_matrices(b[j], right + stage_offset(j * 16 + right_row, step * 2 + right_chunk));
#pragma unroll
        for (int i = 0; i < FRAGMENT_ROWS; ++i)
#pragma unroll
            for (int j = 0; j < FRAGMENT_COLS; ++j)
                multiply_add(sum[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1], T{});
    }
}

// Factors, addends and identity, rounded once, into the finished tile in shared memory. A tile on the
// diagonal keeps its lower half and repeats it above.
template <typename T>
__device__ __forceinline__ void finish_tile(const SymmetricProduct& p, unsigned char* out,
                                            const float (&sum)[FRAGMENT_ROWS][FRAGMENT_COLS][4], int z,
                                            Tile tile, int warp_row, int warp_col) {
    const int lane = threadIdx.x % WARP;
    const Finish<T> finish(p.terms, z, p.size);
#pragma unroll
    for (int i = 0; i < FRAGMENT_ROWS; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int tile_row = warp_row + i * 16 + lane / 4 + half * 8;
            const int row = tile.row * TILE + tile_row;
#pragma unroll
            for (int j = 0; j < FRAGMENT_COLS; ++j) {
                const int tile_col = warp_col + j * 8 + lane % 4 * 2;
                const int col = tile.col * TILE + tile_col;
                const u32 bits = pack(finish(sum[i][j][half * 2], row, col),
                                      finish(sum[i][j][half * 2 + 1], row, col + 1), T{});
                const u32 at = out_offset(tile_row, tile_col / CHUNK) + tile_col % CHUNK * 2;
                if (tile.row != tile.col) {
                    *reinterpret_cast<u32*>(out + at) = bits;
                    continue;
                }
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const int mirrored = tile_col + e;
                    if (mirrored > tile_row) continue;
                    const u16 element = static_cast<u16>(bits >> (16 * e));
                    *reinterpret_cast<u16*>(out + at + 2 * e) = element;
                    *reinterpret_cast<u16*>(out + out_offset(mirrored, tile_row / CHUNK) +
                                            tile_row % CHUNK * 2) = element;
                }
            }
        }
    }
}

template <typename T>
__device__ __forceinline__ void store_tile(T* matrix, const MatrixBatch& batch, const unsigned char* tile,
                                           int first_row, int first_col, int size) {
    const bool aligned = rows_are_aligned(matrix, batch);
    for (int id = threadIdx.x; id < TILE * OUT_ROW_CHUNKS; id += THREADS) {
        const int row = id / OUT_ROW_CHUNKS, chunk = id % OUT_ROW_CHUNKS;
        const int col = first_col + chunk * CHUNK;
        const int count = min(size - col, CHUNK);
        if (first_row + row >= size || count <= 0) continue;
        const uint4 got = *reinterpret_cast<const uint4*>(tile + out_offset(row, chunk));
        const u32 bits[4] = {got.x, got.y, got.z, got.w};
        store_chunk(matrix + (first_row + row) * batch.row_stride + col, bits, count, aligned);
    }
}

// The tile transposed. Matrix i of the four that a warp loads has rows {8q + 2i + h}: a lane then holds eight
// neighbours of one column, which are 16 bytes of a row of the mirror.
template <typename T>
__device__ __forceinline__ void store_mirror(T* matrix, const MatrixBatch& batch, const unsigned char* tile,
                                             int first_row, int first_col, int size) {
    constexpr int ROWS = 32;
    const bool aligned = rows_are_aligned(matrix, batch);
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int source_row = (lane % 8 / 2) * 8 + lane / 8 * 2 + lane % 2;
    for (int id = warp; id < TILE / ROWS * OUT_ROW_CHUNKS; id += THREADS / WARP) {
        const int row = id % (TILE / ROWS) * ROWS, chunk = id / (TILE / ROWS);
        u32 bits[4];
        load_matrices_transposed(bits, shared_address(tile + out_offset(row + source_row, chunk)));
        const int mirror_row = first_col + chunk * CHUNK + lane / 4;
        const int mirror_col = first_row + row + lane % 4 * CHUNK;
        const int count = min(size - mirror_col, CHUNK);
        if (mirror_row < size && count > 0)
            store_chunk(matrix + mirror_row * batch.row_stride + mirror_col, bits, count, aligned);
    }
}

template <typename T>
__device__ __forceinline__ void symmetric_product(const SymmetricProduct& p) {
    DYNAMIC_SHARED(shared);
    const int z = blockIdx.x / p.tiles;
    const Tile tile = triangular_tile<1>(blockIdx.x % p.tiles);
    const int first_row = tile.row * TILE, first_col = tile.col * TILE;
    const int warp = threadIdx.x / WARP;
    const int warp_row = warp % 2 * WARP_ROWS, warp_col = warp / 2 * WARP_COLS;
    const int blocks = ceil_div(p.depth, DEPTH);
    float sum[FRAGMENT_ROWS][FRAGMENT_COLS][4] = {};
    {
        const Operand<T> left(p.left, z, first_row, p.size), right(p.right, z, first_col, p.size);
        auto load = [&](int block) {
            if (block < blocks) {
                unsigned char* stage = shared + block % STAGES * STAGE_BYTES;
                left.load(stage, block * DEPTH, p.depth);
                right.load(stage + OPERAND_BYTES, block * DEPTH, p.depth);
            }
            copy_async_commit();  // a group per block even when empty: the count below stays right to the end
        };
        for (int block = 0; block < STAGES - 1; ++block) load(block);
        for (int block = 0; block < blocks; ++block) {
            copy_async_wait<STAGES - 2>();
            __syncthreads();  // the stage is full for all warps, and all have left the stage that is filled
                              // next
            load(block + STAGES - 1);
            const u32 stage = shared_address(shared + block % STAGES * STAGE_BYTES);
            multiply_stage<T>(sum, stage + stage_offset(warp_row, 0),
                              stage + OPERAND_BYTES + stage_offset(warp_col, 0));
        }
    }
    __syncthreads();  // the finished tile takes the place of the stages
    finish_tile<T>(p, shared, sum, z, tile, warp_row, warp_col);
    __syncthreads();
    T* out = matrix_start<T>(p.out, z);
    store_tile(out, p.out, shared, first_row, first_col, p.size);
    if (tile.row != tile.col) store_mirror(out, p.out, shared, first_row, first_col, p.size);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    symmetric_mma_bfloat16(const __grid_constant__ SymmetricProduct p) {
    symmetric_product<bfloat16>(p);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    symmetric_mma_float16(const __grid_constant__ SymmetricProduct p) {
    symmetric_product<float16>(p);
}
