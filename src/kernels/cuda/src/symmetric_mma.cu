// Symmetric products on mma.sync (sm_80 and newer): out = alpha left right^T + sum_i beta_i addend_i + gamma
// I.
//
// B = matrices in the batch, m = rows of left and right, k = their columns. out and addends are [B, m, m].
// The product has to be symmetric: right = left, or both symmetric and commuting (then right^T = right).
// Only tiles of the lower triangle are computed; the upper one is written from the same tiles, so out is
// symmetric to the last bit. Addends are read in their lower triangle only and may be `out` itself.
// m and k are any; rows that start at multiples of 16 bytes take the wide path.
//
// Where that is few tiles, `symmetric_mma_part` computes those of parts of the depth, a block each, and
// `symmetric_mma_total` adds the parts of a tile in order and finishes it.
//
// The caller vouches for the symmetry. The result may take the place of an addend, not of left or right.
//
// Registers of a thread on sm_80, sm_90a and sm_100: 128, 128, 128; of a part 128, 126, 128; of a total 126,
// 128, 128. They are the bound of two blocks for a multiprocessor. Halves of addends follow the operands
// through the stages. The first version loaded addends element by element, with the same results. NVRTC 13.0
// for sm_80, two addends:
//
//   addends                              by element    in chunks
//   instructions of the kernel                 3712         3488
//   loads of a thread for a tile                128           16
//   bytes of a load                               2           16
//   bytes under way at once, of a block        2048        65536
#include "symmetric.cuh"

constexpr int TILE = 128;  // rows and columns of out that one block computes
constexpr int DEPTH = 32;  // columns of left and right per pipeline stage
constexpr int STAGES = 4;
constexpr int THREADS = 256;  // 8 warps, 2 down and 4 across
constexpr int WARP_ROWS = 64;
constexpr int WARP_COLS = 32;
constexpr int STAGE_ROW_CHUNKS = DEPTH / CHUNK;
constexpr int OPERAND_BYTES = TILE * DEPTH * 2;
constexpr int STAGE_BYTES = 2 * OPERAND_BYTES;
constexpr int LOADS = TILE * STAGE_ROW_CHUNKS / THREADS;  // chunks of one operand per thread and stage
constexpr int OUT_ROW_CHUNKS = TILE / CHUNK;
constexpr int HALF = TILE / 2;  // columns of a tile of an addend or of out that take the place of a stage
constexpr int HALF_ROW_CHUNKS = HALF / CHUNK;
constexpr int HALF_LOADS = TILE * HALF_ROW_CHUNKS / THREADS;
static_assert(TILE * HALF * 2 == STAGE_BYTES && 2 * ADDENDS == STAGES, "addends fill the stages");
constexpr int FRAGMENT_ROWS = WARP_ROWS / 16;
constexpr int FRAGMENT_COLS = WARP_COLS / 8;
constexpr int FRAGMENTS = FRAGMENT_ROWS * FRAGMENT_COLS;  // of a thread, four sums each

struct SymmetricProduct {
    MatrixBatch left;
    MatrixBatch right;
    MatrixBatch out;
    SymmetricTerms terms;
    int size;   // m
    int depth;  // k
    int tiles;  // tiles of one triangle; the grid is tiles * B blocks, that of parts as many times larger
    int parts;  // of the depth
    float4* partial;  // [B, tiles, parts, FRAGMENTS, THREADS]: sums of parts, where there are several
};

// What a block does of a tile.
enum Share { WHOLE, PART, TOTAL };

// Offset of a chunk in a stage. Two rows share 128 bytes, so the row's bits 1 and 2 spread the banks.
__device__ __forceinline__ u32 stage_offset(int row, int chunk) {
    return (row * STAGE_ROW_CHUNKS + (chunk ^ ((row >> 1) & (STAGE_ROW_CHUNKS - 1)))) * CHUNK_BYTES;
}

// Offset of a chunk in half of a tile. Rows 0..7 and rows {8q + h} both fall on eight different bank
// groups: the first when fragments are read and written, the second when the mirror is read.
__device__ __forceinline__ u32 half_offset(int row, int chunk) {
    return (row * HALF_ROW_CHUNKS + (chunk ^ ((row & 7) ^ (((row >> 3) & 3) << 1)))) * CHUNK_BYTES;
}

// Tiles of the addends, in the stages that follow those of the operands. The finished tile replaces the first
// one. Each tile has two halves.
struct Tiles {
    unsigned char* shared;
    int first;  // stage of the first half

    __device__ __forceinline__ unsigned char* half(int number) const {
        return shared + (first + number) % STAGES * STAGE_BYTES;
    }
    __device__ __forceinline__ unsigned char* chunk(int row, int chunk) const {
        return half(chunk / HALF_ROW_CHUNKS) + half_offset(row, chunk % HALF_ROW_CHUNKS);
    }
};

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

// Half a tile of an addend, on its way to shared memory in its lower triangle, with zeros elsewhere.
template <typename T>
__device__ __forceinline__ void load_half(const SymmetricProduct& p, unsigned char* to, int number, int z,
                                          int first_row, int first_col) {
    const MatrixBatch& batch = p.terms.addend[number / 2];
    if (!batch.first && !batch.each) return;
    const T* matrix = matrix_start<const T>(batch, z);
    const bool aligned = rows_are_aligned(matrix, batch);
    const int chunk = threadIdx.x % HALF_ROW_CHUNKS;
    const int col = first_col + number % 2 * HALF + chunk * CHUNK;
#pragma unroll
    for (int i = 0; i < HALF_LOADS; ++i) {
        const int tile_row = (threadIdx.x + i * THREADS) / HALF_ROW_CHUNKS;
        const int row = first_row + tile_row;
        const int valid = lower_count(row, col, p.size);
        const T* from = matrix + (valid ? row * batch.row_stride + col : 0);
        unsigned char* slot = to + half_offset(tile_row, chunk);
        if (aligned) {
            copy_async_16(shared_address(slot), from, valid * 2);
        } else {
            for (int e = 0; e < CHUNK; ++e) reinterpret_cast<u16*>(slot)[e] = e < valid ? from[e].bits : 0;
        }
    }
}

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

// The sums with factors and addends. Each warp has 16 x 16 of an addend at once, as a product's sums lie.
template <typename T>
__device__ __forceinline__ void add_terms(float (&sum)[FRAGMENT_ROWS][FRAGMENT_COLS][4],
                                          const Factors& factors, const Tiles& tiles, int warp_row,
                                          int warp_col) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int i = 0; i < FRAGMENT_ROWS; ++i)
#pragma unroll
        for (int j = 0; j < FRAGMENT_COLS; ++j)
#pragma unroll
            for (int q = 0; q < 4; ++q) sum[i][j][q] *= factors.alpha;
#pragma unroll
    for (int a = 0; a < ADDENDS; ++a) {
        if (!factors.present[a]) continue;
        const u32 half = shared_address(tiles.half(2 * a + warp_col / HALF));
#pragma unroll
        for (int i = 0; i < FRAGMENT_ROWS; ++i) {
#pragma unroll
            for (int j = 0; j < FRAGMENT_COLS; j += 2) {
                const int row = warp_row + i * 16, col = warp_col + j * 8;
                const int lane_row = row + lane % 16, lane_chunk = col % HALF / CHUNK + lane / 16;
                u32 bits[4];
                load_matrices(bits, half + half_offset(lane_row, lane_chunk));
#pragma unroll
                for (int q = 0; q < 4; ++q) {
                    float* at = &sum[i][j + q / 2][q % 2 * 2];
                    add_pair(at[0], at[1], factors.beta[a], bits[q], T{});
                }
            }
        }
    }
}

// The identity, and everything rounded once, into the finished tile in shared memory. A tile on the diagonal
// keeps its lower half and repeats it above.
template <typename T>
__device__ __forceinline__ void finish_tile(const float (&sum)[FRAGMENT_ROWS][FRAGMENT_COLS][4], float gamma,
                                            const Tiles& tiles, bool diagonal, int warp_row, int warp_col) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int i = 0; i < FRAGMENT_ROWS; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = warp_row + i * 16 + lane / 4 + half * 8;
#pragma unroll
            for (int j = 0; j < FRAGMENT_COLS; ++j) {
                const int col = warp_col + j * 8 + lane % 4 * 2;
                float value[2] = {sum[i][j][half * 2], sum[i][j][half * 2 + 1]};
                unsigned char* at = tiles.chunk(row, col / CHUNK) + col % CHUNK * 2;
                if (!diagonal) {
                    *reinterpret_cast<u32*>(at) = pack(value[0], value[1], T{});
                    continue;
                }
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const int mirrored = col + e;
                    if (mirrored > row) continue;
                    if (mirrored == row) value[e] += gamma;
                    const u16 element = static_cast<u16>(pack(value[e], 0.0f, T{}));
                    *reinterpret_cast<u16*>(at + 2 * e) = element;
                    *reinterpret_cast<u16*>(tiles.chunk(mirrored, row / CHUNK) + row % CHUNK * 2) = element;
                }
            }
        }
    }
}

template <typename T>
__device__ __forceinline__ void store_tile(T* matrix, const MatrixBatch& batch, const Tiles& tiles,
                                           int first_row, int first_col, int size) {
    const bool aligned = rows_are_aligned(matrix, batch);
    for (int id = threadIdx.x; id < TILE * OUT_ROW_CHUNKS; id += THREADS) {
        const int row = id / OUT_ROW_CHUNKS, chunk = id % OUT_ROW_CHUNKS;
        const int col = first_col + chunk * CHUNK;
        const int count = min(size - col, CHUNK);
        if (first_row + row >= size || count <= 0) continue;
        const uint4 got = *reinterpret_cast<const uint4*>(tiles.chunk(row, chunk));
        const u32 bits[4] = {got.x, got.y, got.z, got.w};
        store_chunk(matrix + (first_row + row) * batch.row_stride + col, bits, count, aligned);
    }
}

// The tile transposed. Matrix i of the four that a warp loads has rows {8q + 2i + h}: a lane then holds eight
// neighbours of one column, which are 16 bytes of a row of the mirror.
template <typename T>
__device__ __forceinline__ void store_mirror(T* matrix, const MatrixBatch& batch, const Tiles& tiles,
                                             int first_row, int first_col, int size) {
    constexpr int ROWS = 32;
    const bool aligned = rows_are_aligned(matrix, batch);
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int source_row = (lane % 8 / 2) * 8 + lane / 8 * 2 + lane % 2;
    for (int id = warp; id < TILE / ROWS * OUT_ROW_CHUNKS; id += THREADS / WARP) {
        const int row = id % (TILE / ROWS) * ROWS, chunk = id / (TILE / ROWS);
        u32 bits[4];
        load_matrices_transposed(bits, shared_address(tiles.chunk(row + source_row, chunk)));
        const int mirror_row = first_col + chunk * CHUNK + lane / 4;
        const int mirror_col = first_row + row + lane % 4 * CHUNK;
        const int count = min(size - mirror_col, CHUNK);
        if (mirror_row < size && count > 0)
            store_chunk(matrix + mirror_row * batch.row_stride + mirror_col, bits, count, aligned);
    }
}

// Stores the sums of a part of a tile; the float4 values of all threads are contiguous.
__device__ __forceinline__ void store_part(float4* part, const float (&sum)[FRAGMENT_ROWS][FRAGMENT_COLS][4]) {
#pragma unroll
    for (int i = 0; i < FRAGMENTS; ++i) {
        const float(&four)[4] = sum[i / FRAGMENT_COLS][i % FRAGMENT_COLS];
        part[i * THREADS + threadIdx.x] = make_float4(four[0], four[1], four[2], four[3]);
    }
}

__device__ __forceinline__ void add_part(float (&sum)[FRAGMENT_ROWS][FRAGMENT_COLS][4], const float4* part) {
#pragma unroll
    for (int i = 0; i < FRAGMENTS; ++i) {
        float(&four)[4] = sum[i / FRAGMENT_COLS][i % FRAGMENT_COLS];
        const float4 more = part[i * THREADS + threadIdx.x];
        four[0] += more.x;
        four[1] += more.y;
        four[2] += more.z;
        four[3] += more.w;
    }
}

template <typename T, Share Does>
__device__ __forceinline__ void symmetric_product(const SymmetricProduct& p) {
    DYNAMIC_SHARED(shared);
    const int block_of_tile = Does == PART ? blockIdx.x / p.parts : blockIdx.x;
    const int z = block_of_tile / p.tiles;
    const Tile tile = triangular_tile(block_of_tile % p.tiles);
    const int first_row = tile.row * TILE, first_col = tile.col * TILE;
    const int warp = threadIdx.x / WARP;
    const int warp_row = warp % 2 * WARP_ROWS, warp_col = warp / 2 * WARP_COLS;
    const int all = Does == TOTAL ? 0 : ceil_div(p.depth, DEPTH);
    const int each = Does == PART ? ceil_div(all, p.parts) : all;
    const int before = Does == PART ? min(blockIdx.x % p.parts * each, all) : 0;
    const int blocks = min(each, all - before);
    float sum[FRAGMENT_ROWS][FRAGMENT_COLS][4] = {};
    {
        const Operand<T> left(p.left, z, first_row, p.size), right(p.right, z, first_col, p.size);
        auto load = [&](int block) {
            unsigned char* stage = shared + block % STAGES * STAGE_BYTES;
            if (block < blocks) {
                left.load(stage, (before + block) * DEPTH, p.depth);
                right.load(stage + OPERAND_BYTES, (before + block) * DEPTH, p.depth);
            } else if (Does != PART) {
                load_half<T>(p, stage, block - blocks, z, first_row, first_col);
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
        if (Does == PART) {
            store_part(p.partial + static_cast<long long>(blockIdx.x) * FRAGMENTS * THREADS, sum);
            return;
        }
        __syncthreads();            // all warps have left the stage of the last block
        load(blocks + STAGES - 1);  // the last half of an addend; the others came with the last products
        copy_async_wait<0>();
    }
    if (Does == TOTAL) {
        const float4* part = p.partial + static_cast<long long>(blockIdx.x) * p.parts * FRAGMENTS * THREADS;
        for (int i = 0; i < p.parts; ++i) add_part(sum, part + static_cast<long long>(i) * FRAGMENTS * THREADS);
    }
    __syncthreads();  // the addends are there for all warps, and the finished tile takes the place of stages
    const Factors factors(p.terms);
    const Tiles tiles{shared, blocks};
    const bool diagonal = tile.row == tile.col;
    add_terms<T>(sum, factors, tiles, warp_row, warp_col);
    if (diagonal) __syncthreads();  // no warp reads addends where others write above the diagonal
    finish_tile<T>(sum, factors.gamma, tiles, diagonal, warp_row, warp_col);
    __syncthreads();
    T* out = matrix_start<T>(p.out, z);
    store_tile(out, p.out, tiles, first_row, first_col, p.size);
    if (!diagonal) store_mirror(out, p.out, tiles, first_row, first_col, p.size);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    symmetric_mma_bfloat16(const __grid_constant__ SymmetricProduct p) {
    symmetric_product<bfloat16, WHOLE>(p);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    symmetric_mma_float16(const __grid_constant__ SymmetricProduct p) {
    symmetric_product<float16, WHOLE>(p);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    symmetric_mma_part_bfloat16(const __grid_constant__ SymmetricProduct p) {
    symmetric_product<bfloat16, PART>(p);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    symmetric_mma_part_float16(const __grid_constant__ SymmetricProduct p) {
    symmetric_product<float16, PART>(p);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    symmetric_mma_total_bfloat16(const __grid_constant__ SymmetricProduct p) {
    symmetric_product<bfloat16, TOTAL>(p);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    symmetric_mma_total_float16(const __grid_constant__ SymmetricProduct p) {
    symmetric_product<float16, TOTAL>(p);
}
