// Symmetric products on Hopper's warpgroup instructions (sm_90a): the same equation as symmetric_mma.cu.
//
// Operands and result go through tensor maps, so rows have to start at multiples of 16 bytes; m and k are
// any. A persistent grid walks over batch x tiles. One warpgroup fills a ring of stages by tensor copies; two
// others multiply, each 128 x 128 of a 256 x 128 tile, and store squares of 64 x 64 and their transposes by
// tensor copies.
#include "swizzle.cuh"
#include "symmetric.cuh"

constexpr int CONSUMERS = 2;     // warpgroups that multiply
constexpr int GROUP_ROWS = 128;  // rows of one of them: two instructions of 64
constexpr int TILE_ROWS = CONSUMERS * GROUP_ROWS;
constexpr int TILE_COLS = 128;
constexpr int DEPTH = 64;  // 128 bytes: one period of the swizzle
constexpr int STAGES = 4;
constexpr int THREADS = (CONSUMERS + 1) * GROUP;
constexpr int PRODUCER_REGISTERS = 40;  // 128 * 40 + 256 * 232 = 64512 of 65536
constexpr int CONSUMER_REGISTERS = 232;
constexpr int INSTRUCTION_ROWS = 64;
constexpr int INSTRUCTION_DEPTH = 16;
constexpr int SQUARE = 64;  // rows and columns that one tensor copy stores
constexpr int LEFT_BYTES = TILE_ROWS * DEPTH * 2;
constexpr int STAGE_BYTES = LEFT_BYTES + TILE_COLS * DEPTH * 2;
constexpr int SQUARE_BYTES = SQUARE * SQUARE * 2;
constexpr int SQUARES_AT = STAGES * STAGE_BYTES;  // per consumer a square and its transpose
constexpr int BARRIERS_AT = SQUARES_AT + CONSUMERS * 2 * SQUARE_BYTES;
constexpr int SHARED_BYTES = BARRIERS_AT + 2 * STAGES * 8;
static_assert(SHARED_BYTES <= 227 * 1024, "one block has at most 227 KiB");

// Maps of 3-d tensors [B, rows, columns] with the 128-byte swizzle and boxes of one matrix: left 256 x 64,
// right 128 x 64, out 64 x 64. Where `*_each` is set, matrix z has a map of its own there, with B = 1.
struct SymmetricTensorProduct {
    TensorMap left;
    TensorMap right;
    TensorMap out;
    const TensorMap* left_each;
    const TensorMap* right_each;
    const TensorMap* out_each;
    SymmetricTerms terms;
    int size;   // m
    int depth;  // k
    int tiles;  // 256 x 128 tiles of one triangle
    int batch;  // B
};

// The map of matrix z and its coordinate in it.
struct Place {
    const TensorMap* map;
    int z;

    __device__ __forceinline__ Place(const TensorMap& common, const TensorMap* each, int z)
        : map(each ? each + z : &common), z(each ? 0 : z) {}
};

// A turn through the ring of stages. Filled and emptied barriers change parity once a turn.
struct Ring {
    u32 start;
    u32 barriers;
    u32 slot = 0;
    u32 parity = 0;

    __device__ __forceinline__ Ring(u32 shared) : start(shared), barriers(shared + BARRIERS_AT) {}
    __device__ __forceinline__ u32 stage() const { return start + slot * STAGE_BYTES; }
    __device__ __forceinline__ u32 filled() const { return barriers + slot * 8; }
    __device__ __forceinline__ u32 emptied() const { return barriers + (STAGES + slot) * 8; }
    __device__ __forceinline__ void next() {
        if (++slot == STAGES) {
            slot = 0;
            parity ^= 1;
        }
    }
};

__device__ __forceinline__ void fill_stages(const SymmetricTensorProduct& p, u32 shared) {
    Ring ring(shared);
    const int blocks = ceil_div(p.depth, DEPTH);
    for (int t = blockIdx.x; t < p.tiles * p.batch; t += gridDim.x) {
        const int z = t / p.tiles;
        const Tile tile = triangular_tile<TILE_ROWS / TILE_COLS>(t % p.tiles);
        const Place left(p.left, p.left_each, z), right(p.right, p.right_each, z);
        for (int block = 0; block < blocks; ++block) {
            barrier_wait(ring.emptied(), ring.parity ^ 1);
            barrier_arrive_expecting(ring.filled(), STAGE_BYTES);
            tensor_load(ring.stage(), left.map, ring.filled(), block * DEPTH, tile.row * TILE_ROWS, left.z);
            tensor_load(ring.stage() + LEFT_BYTES, right.map, ring.filled(), block * DEPTH,
                        tile.col * TILE_COLS, right.z);
            ring.next();
        }
    }
}

// Lets the producer refill a stage. Every warp says so for itself: a wait covers the warp that waits.
__device__ __forceinline__ void release(u32 emptied) {
    if (threadIdx.x % WARP == 0) barrier_arrive(emptied);
}

template <typename T>
__device__ __forceinline__ void multiply(float (&sum)[2][64], Ring& ring, int blocks, int group) {
    u32 previous = 0;
    for (int block = 0; block < blocks; ++block) {
        barrier_wait(ring.filled(), ring.parity);
        const u32 left = ring.stage() + group * GROUP_ROWS * SWIZZLE_ROW_BYTES;
        const u32 right = ring.stage() + LEFT_BYTES;
        products_begin();
#pragma unroll
        for (int step = 0; step < DEPTH / INSTRUCTION_DEPTH; ++step) {
            const u32 column = step * INSTRUCTION_DEPTH * 2;
            const u64 b = operand_descriptor(right + column);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const u32 rows = left + half * INSTRUCTION_ROWS * SWIZZLE_ROW_BYTES;
                group_product(sum[half], operand_descriptor(rows + column), b, T{});
            }
        }
        products_commit();
        products_wait<1>();  // the block before this one is done
        if (block) release(previous);
        previous = ring.emptied();
        ring.next();
    }
    products_wait<0>();
    if (blocks) release(previous);
    settle(sum[0]);
    settle(sum[1]);
}

// A 64 x 64 square of a group's sums into shared memory, and its transpose behind it.
template <typename T>
__device__ __forceinline__ void write_square(u32 at, const float (&sum)[64], int part,
                                             const Finish<T>& finish, int first_row, int first_col) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP % 4;
    const int row = warp * 16 + lane / 4;
#pragma unroll
    for (int pair = 0; pair < SQUARE / 16;
         ++pair) {  // 16 columns: two 8x8 matrices beside each other, two below
        u32 bits[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int j = pair * 2 + i / 2;
            const int from = (part * 8 + j) * 4 + i % 2 * 2;
            const int r = first_row + row + i % 2 * 8, c = first_col + j * 8 + lane % 4 * 2;
            bits[i] = pack(finish(sum[from], r, c), finish(sum[from + 1], r, c + 1), T{});
        }
        const int below = lane / 8 % 2, beside = pair * 2 + lane / 16;
        store_matrices(swizzled(at, warp * 16 + below * 8 + lane % 8, beside), bits);
        store_matrices_transposed(swizzled(at + SQUARE_BYTES, beside * 8 + lane % 8, warp * 2 + below), bits);
    }
}

// A square on the diagonal: the lower half, and the same above.
template <typename T>
__device__ __forceinline__ void write_diagonal_square(u32 at, const float (&sum)[64], int part,
                                                      const Finish<T>& finish, int first) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP % 4;
#pragma unroll
    for (int j = 0; j < SQUARE / 8; ++j) {
#pragma unroll
        for (int q = 0; q < 4; ++q) {
            const int row = warp * 16 + lane / 4 + q / 2 * 8, col = j * 8 + lane % 4 * 2 + q % 2;
            if (col > row) continue;
            const u16 bits = static_cast<u16>(
                pack(finish(sum[(part * 8 + j) * 4 + q], first + row, first + col), 0.0f, T{}));
            store_shared(swizzled(at, row, col / 8) + col % 8 * 2, bits);
            store_shared(swizzled(at, col, row / 8) + row % 8 * 2, bits);
        }
    }
}

template <typename T>
__device__ __forceinline__ void store_squares(const SymmetricTensorProduct& p, const float (&sum)[2][64],
                                              u32 at, int group, int z, int first_row, int first_col) {
    const Finish<T> finish(p.terms, z, p.size);
    const Place out(p.out, p.out_each, z);
    const bool leader = threadIdx.x % GROUP == 0;
#pragma unroll
    for (int half = 0; half < GROUP_ROWS / SQUARE; ++half) {
#pragma unroll
        for (int part = 0; part < TILE_COLS / SQUARE; ++part) {
            const int row = first_row + half * SQUARE, col = first_col + part * SQUARE;
            if (col > row || row >= p.size) continue;  // above the diagonal or outside: nothing to store
            if (leader) tensor_stores_wait_read<0>();
            named_barrier(1 + group, GROUP);  // the square before this one has left shared memory
            if (row == col)
                write_diagonal_square<T>(at, sum[half], part, finish, row);
            else
                write_square<T>(at, sum[half], part, finish, row, col);
            fence_shared_for_copies();
            named_barrier(1 + group, GROUP);
            if (leader) {
                tensor_store(out.map, at, col, row, out.z);
                if (row != col) tensor_store(out.map, at + SQUARE_BYTES, row, col, out.z);
                tensor_stores_commit();
            }
        }
    }
}

template <typename T>
__device__ __forceinline__ void consume_stages(const SymmetricTensorProduct& p, u32 shared) {
    Ring ring(shared);
    const int group = threadIdx.x / GROUP - 1;
    const u32 squares = shared + SQUARES_AT + group * 2 * SQUARE_BYTES;
    const int blocks = ceil_div(p.depth, DEPTH);
    for (int t = blockIdx.x; t < p.tiles * p.batch; t += gridDim.x) {
        const Tile tile = triangular_tile<TILE_ROWS / TILE_COLS>(t % p.tiles);
        const int first_row = tile.row * TILE_ROWS + group * GROUP_ROWS, first_col = tile.col * TILE_COLS;
        if (first_col > first_row || first_row >= p.size) {  // nothing of this group's rows is stored
            for (int block = 0; block < blocks; ++block) {
                barrier_wait(ring.filled(), ring.parity);
                __syncwarp();  // no lane still waits for this filling when the next one may begin
                release(ring.emptied());
                ring.next();
            }
            continue;
        }
        float sum[2][64] = {};
        multiply<T>(sum, ring, blocks, group);
        store_squares<T>(p, sum, squares, group, t / p.tiles, first_row, first_col);
    }
    if (threadIdx.x % GROUP == 0) tensor_stores_wait_read<0>();  // shared memory ends with the block
}

template <typename T>
__device__ __forceinline__ void symmetric_product(const SymmetricTensorProduct& p) {
    DYNAMIC_SHARED(memory);
    const u32 shared = shared_address(memory);
    if (threadIdx.x == 0) {
        for (int slot = 0; slot < STAGES; ++slot) {
            barrier_init(shared + BARRIERS_AT + slot * 8, 1);
            barrier_init(shared + BARRIERS_AT + (STAGES + slot) * 8, CONSUMERS * GROUP / WARP);
        }
        barriers_are_ready();
    }
    __syncthreads();
    if (threadIdx.x < GROUP) {
        give_registers_back<PRODUCER_REGISTERS>();
        if (threadIdx.x == 0) fill_stages(p, shared);
    } else {
        take_registers<CONSUMER_REGISTERS>();
        consume_stages<T>(p, shared);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    symmetric_wgmma_bfloat16(const __grid_constant__ SymmetricTensorProduct p) {
    symmetric_product<bfloat16>(p);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    symmetric_wgmma_float16(const __grid_constant__ SymmetricTensorProduct p) {
    symmetric_product<float16>(p);
}
