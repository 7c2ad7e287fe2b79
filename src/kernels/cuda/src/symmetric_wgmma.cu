// Symmetric products on Hopper's warpgroup instructions (sm_90a): the same equation as symmetric_mma.cu.
//
// Operands and result go through tensor maps, so rows have to start at multiples of 16 bytes; m and k are
// any. Clusters of two blocks walk over batch x pairs of tiles of 128 x 128, a tile for each block. One
// warpgroup of a block fills a ring of stages by tensor copies. For adjacent tiles of a row, each block
// copies half of the left operand to both. Two other warpgroups multiply in turns, a tile each, so that one
// multiplies while the other stores squares of 64 x 64 and their transposes by tensor copies.
//
// Shared left operands: for a stage a block reads 24 KiB from the cache and does 2.1 million operations,
// which are 85 for a byte. A block without a neighbour reads 32 KiB: 64 operations for a byte.
//
// A thread is compiled for 168 registers. Shared memory, 224 KiB of a block, is the bound of one block for a
// multiprocessor, so the best grid is a block for each of them.
//
// The first version had tiles of 256 x 128 for a whole block. Share of the time of 132 multiprocessors that
// is spent on tiles, by arithmetic:
//
//   matrices   rows   256 x 128: tiles, waves, share   pairs of 128 x 128: pairs, waves, share       gain
//          1   4096               272, 3, 0.69                        264, 4, 1.00                  1.50
//          3   4096               816, 7, 0.88                        792, 12, 1.00                 1.17
//          1   2048                72, 1, 0.55                         68, 2, 0.52                  1.00
//          2   2048               144, 2, 0.55                        136, 3, 0.69                  1.33
//          8   2048               576, 5, 0.87                        544, 9, 0.92                  1.11
//         24    768               288, 3, 0.73                        264, 4, 1.00                  1.50
//         32    512               192, 2, 0.73                        160, 3, 0.81                  1.33
//
// The first version also loaded addends element by element, with the same results. NVRTC 13.0, two addends:
//
//   addends                              by element    in chunks
//   instructions of the kernel                 7624         4200
//   loads of a thread for a tile                256           32
//   bytes of a load                               2           16
//   bytes under way at once, of a block        1024        32768
//
// Off the diagonal, an element of a square took 28 instructions then and takes 12 now.
#include "swizzle.cuh"
#include "symmetric.cuh"

constexpr int CLUSTER = 2;    // blocks that share left operands
constexpr int CONSUMERS = 2;  // warpgroups that multiply
constexpr int TILE = 128;     // rows and columns of a tile
constexpr int HALF = TILE / CLUSTER;  // rows of the left operand in one tensor copy, and of an instruction
constexpr int DEPTH = 64;             // 128 bytes: one period of the swizzle
constexpr int STAGES = 6;
constexpr int THREADS = (CONSUMERS + 1) * GROUP;
constexpr int PRODUCER_REGISTERS = 40;  // 128 * 40 + 256 * 232 = 64512 of 65536
constexpr int CONSUMER_REGISTERS = 232;
constexpr int INSTRUCTION_DEPTH = 16;
constexpr int SQUARE = 64;  // rows and columns that one tensor copy stores
constexpr int HALF_BYTES = HALF * DEPTH * 2;
constexpr int LEFT_BYTES = TILE * DEPTH * 2;
constexpr int STAGE_BYTES = 2 * LEFT_BYTES;
constexpr int SQUARE_BYTES = SQUARE * SQUARE * 2;
constexpr int SQUARE_CHUNKS = SQUARE / CHUNK;    // of a row
constexpr int LANE_ROWS = WARP / SQUARE_CHUNKS;  // rows that a warp's lanes have at once
constexpr int LANE_CHUNKS = 16 / LANE_ROWS;      // of a lane: its warp has 16 rows of a square
constexpr int SQUARES_AT = STAGES * STAGE_BYTES;  // per consumer a square and its transpose
constexpr int BARRIERS_AT = SQUARES_AT + CONSUMERS * 2 * SQUARE_BYTES;
constexpr int TURNS_AT = BARRIERS_AT + 2 * STAGES * 8;
constexpr int SHARED_BYTES = TURNS_AT + CONSUMERS * 8;
static_assert(SHARED_BYTES <= 227 * 1024, "one block has at most 227 KiB");

// Maps of 3-d tensors [B, rows, columns] with the 128-byte swizzle and boxes of one matrix: left 64 x 64,
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
    int pairs;  // pairs of 128 x 128 tiles of one triangle
    int batch;  // B
};

// The map of matrix z and its coordinate in it.
struct Place {
    const TensorMap* map;
    int z;

    __device__ __forceinline__ Place(const TensorMap& common, const TensorMap* each, int z)
        : map(each ? each + z : &common), z(each ? 0 : z) {}
};

// One tile of a pair. Tiles of a pair are neighbours in a row, or both on the diagonal: row r has r + 1
// tiles, so of every other row one is left. The second one of the last such pair may be behind the matrix.
struct PairedTile {
    int row, col;
    bool is_adjacent;  // the other tile of the pair is a neighbour

    // The first down^2 / 4 pairs are neighbours, counted row by row.
    __device__ __forceinline__ PairedTile(int pair, int size, int rank) {
        const int down = ceil_div(size, TILE), last = pair - down * down / 4;
        is_adjacent = last < 0;
        row = col = 4 * last + 2 * rank;
        if (!is_adjacent) return;
        row = static_cast<int>(estimated_root(4.0f * static_cast<float>(pair) + 3.0f));
        while ((row + 1) * (row + 1) / 4 <= pair) ++row;
        while (row * row / 4 > pair) --row;
        col = 2 * (pair - row * row / 4) + rank;
    }

    __device__ __forceinline__ bool is_behind(int size) const { return row * TILE >= size; }
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
    __device__ __forceinline__ void skip(int blocks) {
        slot += blocks;
        parity ^= slot / STAGES & 1;
        slot %= STAGES;
    }
};

__device__ __forceinline__ void fill_stages(const SymmetricTensorProduct& p, u32 shared) {
    Ring ring(shared);
    const int rank = cluster_rank(), blocks = ceil_div(p.depth, DEPTH);
    for (int t = blockIdx.x / CLUSTER; t < p.pairs * p.batch; t += gridDim.x / CLUSTER) {
        const int z = t / p.pairs;
        const PairedTile tile(t % p.pairs, p.size, rank);
        const Place left(p.left, p.left_each, z), right(p.right, p.right_each, z);
        for (int block = 0; block < blocks; ++block, ring.next()) {
            barrier_wait(ring.emptied(), ring.parity ^ 1);
            if (tile.is_behind(p.size)) {
                barrier_arrive(ring.filled());
                continue;
            }
            barrier_arrive_expecting(ring.filled(), STAGE_BYTES);
            const int column = block * DEPTH, row = tile.row * TILE;
            if (tile.is_adjacent) {
                tensor_load_to_cluster<CLUSTER>(ring.stage() + rank * HALF_BYTES, left.map, ring.filled(),
                                                column, row + rank * HALF, left.z);
            } else {
                tensor_load(ring.stage(), left.map, ring.filled(), column, row, left.z);
                tensor_load(ring.stage() + HALF_BYTES, left.map, ring.filled(), column, row + HALF, left.z);
            }
            tensor_load(ring.stage() + LEFT_BYTES, right.map, ring.filled(), column, tile.col * TILE, right.z);
        }
    }
}

// Lets the producers of both blocks refill a stage. Every warp says so for itself: a wait covers the warp
// that waits. Its own block hears it first: what the other one does next may depend on that.
__device__ __forceinline__ void release(u32 emptied) {
    if (threadIdx.x % WARP != 0) return;
    barrier_arrive(emptied);
    barrier_arrive_at(emptied, cluster_rank() ^ 1);
}

// The other group may multiply. No lane of a warp waits for stages any more.
__device__ __forceinline__ void pass_turn(u32 other) {
    __syncwarp();
    if (threadIdx.x % WARP == 0) barrier_arrive(other);
}

// Multiplies what fills the ring; returns what has to be released once the last products are over.
template <typename T>
__device__ __forceinline__ u32 multiply(float (&sum)[2][64], Ring& ring, int blocks) {
    u32 previous = 0;
    for (int block = 0; block < blocks; ++block) {
        barrier_wait(ring.filled(), ring.parity);
        const u32 left = ring.stage(), right = left + LEFT_BYTES;
        products_begin();
#pragma unroll
        for (int step = 0; step < DEPTH / INSTRUCTION_DEPTH; ++step) {
            const u32 column = step * INSTRUCTION_DEPTH * 2;
            const u64 b = operand_descriptor(right + column);
#pragma unroll
            for (int half = 0; half < 2; ++half)
                group_product(sum[half], operand_descriptor(left + half * HALF_BYTES + column), b, T{});
        }
        products_commit();
        products_wait<1>();  // the block before this one is done
        if (block) release(previous);
        previous = ring.emptied();
        ring.next();
    }
    return previous;
}

// What a warp needs of the addends for its 16 rows of a square: chunks on their way from memory.
template <typename T>
struct Addends {
    const T* matrix[ADDENDS];
    long long row_stride[ADDENDS];
    bool aligned[ADDENDS];
    int size;
    u32 bits[ADDENDS][LANE_CHUNKS][4];

    __device__ __forceinline__ Addends(const SymmetricTerms& terms, int z, int size) : size(size) {
#pragma unroll
        for (int a = 0; a < ADDENDS; ++a) {
            const MatrixBatch& batch = terms.addend[a];
            matrix[a] = batch.first || batch.each ? matrix_start<const T>(batch, z) : nullptr;
            row_stride[a] = batch.row_stride;
            aligned[a] = matrix[a] && rows_are_aligned(matrix[a], batch);
        }
    }

    // Row of a lane's chunk in its square: a warp has four rows at once.
    static __device__ __forceinline__ int row(int i) {
        return threadIdx.x % GROUP / WARP * 16 + threadIdx.x % WARP / SQUARE_CHUNKS + i * LANE_ROWS;
    }
    static __device__ __forceinline__ int chunk() { return threadIdx.x % SQUARE_CHUNKS; }

    __device__ __forceinline__ const T* address(int a, int row, int col) const {
        return in_global_memory(matrix[a] + row * row_stride[a] + col);
    }

    // Has the chunks of a square loaded that are in the lower triangle as a whole, all before one is used.
    __device__ __forceinline__ void fetch(int first_row, int first_col) {
        const int first = first_row + row(0), col = first_col + chunk() * CHUNK;
#pragma unroll
        for (int a = 0; a < ADDENDS; ++a) {
            if (!aligned[a]) continue;
            const T* from = address(a, first, col);
#pragma unroll
            for (int i = 0; i < LANE_CHUNKS; ++i)
                if (is_whole(first + i * LANE_ROWS, col, size))
                    load_chunk(bits[a][i], from + i * LANE_ROWS * row_stride[a]);
        }
    }

    // The chunks of an addend in the square at an address; the others one element after the other.
    __device__ __forceinline__ void write(u32 at, int a, int first_row, int first_col) const {
        const int first = first_row + row(0), col = first_col + chunk() * CHUNK;
        bool all = true;
#pragma unroll
        for (int i = 0; i < LANE_CHUNKS; ++i) {
            const bool whole = aligned[a] && is_whole(first + i * LANE_ROWS, col, size);
            if (whole) store_shared(swizzled(at, row(i), chunk()), bits[a][i]);
            all = all && whole;
        }
        if (all) return;
#pragma unroll 1
        for (int i = 0; i < LANE_CHUNKS; ++i) {
            const int count = lower_count(first + i * LANE_ROWS, col, size);
            if (count == 0 || (aligned[a] && count == CHUNK)) continue;
            const T* from = address(a, first + i * LANE_ROWS, col);
            u16 elements[CHUNK];
#pragma unroll
            for (int e = 0; e < CHUNK; ++e) elements[e] = e < count ? from[e].bits : 0;
            u32 pairs[4];
#pragma unroll
            for (int e = 0; e < 4; ++e)
                pairs[e] = elements[2 * e] | static_cast<u32>(elements[2 * e + 1]) << 16;
            store_shared(swizzled(at, row(i), chunk()), pairs);
        }
    }
};

// Address of a lane's row in a 2 x 2 grid of 8x8 matrices, which has 16 columns.
__device__ __forceinline__ u32 matrix_row(u32 square, int pair) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP % 4;
    return swizzled(square, warp * 16 + lane % 16, pair * 2 + lane / 16);
}

// Where the sums of such a matrix begin.
__device__ __forceinline__ constexpr int sums_of(int part, int pair, int matrix) {
    return (part * 8 + pair * 2 + matrix / 2) * 4 + matrix % 2 * 2;
}

// The sums of a 64 x 64 square with factors and addends, which go through the place of the square. A warp
// reads what itself wrote.
template <typename T>
__device__ __forceinline__ void add_terms(float (&sum)[64], int part, u32 at, const Factors& factors,
                                          const Addends<T>& addends, int first_row, int first_col) {
#pragma unroll
    for (int i = 0; i < 32; ++i) sum[part * 32 + i] *= factors.alpha;
#pragma unroll
    for (int a = 0; a < ADDENDS; ++a) {
        if (!factors.present[a]) continue;
        addends.write(at, a, first_row, first_col);
        __syncwarp();
#pragma unroll
        for (int pair = 0; pair < SQUARE / 16; ++pair) {
            u32 bits[4];
            load_matrices(bits, matrix_row(at, pair));
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float* pair_of = &sum[sums_of(part, pair, i)];
                add_pair(pair_of[0], pair_of[1], factors.beta[a], bits[i], T{});
            }
        }
        __syncwarp();  // all lanes have read it
    }
}

// A 64 x 64 square of a group's sums into shared memory, and its transpose behind it.
template <typename T>
__device__ __forceinline__ void write_square(u32 at, const float (&sum)[64], int part) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP % 4;
#pragma unroll
    for (int pair = 0; pair < SQUARE / 16; ++pair) {
        u32 bits[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int from = sums_of(part, pair, i);
            bits[i] = pack(sum[from], sum[from + 1], T{});
        }
        const int below = lane / 8 % 2, across = pair * 2 + lane / 16;
        store_matrices(matrix_row(at, pair), bits);
        store_matrices_transposed(swizzled(at + SQUARE_BYTES, across * 8 + lane % 8, warp * 2 + below), bits);
    }
}

// A square on the diagonal: the lower half with the identity, and the same above.
template <typename T>
__device__ __forceinline__ void write_diagonal_square(u32 at, const float (&sum)[64], int part, float gamma) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP % 4;
#pragma unroll
    for (int j = 0; j < SQUARE / 8; ++j) {
#pragma unroll
        for (int q = 0; q < 4; ++q) {
            const int row = warp * 16 + lane / 4 + q / 2 * 8, col = j * 8 + lane % 4 * 2 + q % 2;
            if (col > row) continue;
            const float value = sum[(part * 8 + j) * 4 + q];
            const u16 bits = static_cast<u16>(pack(row == col ? value + gamma : value, 0.0f, T{}));
            store_shared(swizzled(at, row, col / 8) + col % 8 * 2, bits);
            store_shared(swizzled(at, col, row / 8) + row % 8 * 2, bits);
        }
    }
}

template <typename T>
__device__ __forceinline__ void store_squares(const SymmetricTensorProduct& p, float (&sum)[2][64],
                                              const Factors& factors, Addends<T>& addends, u32 at, int group,
                                              int z, int first_row, int first_col) {
    const Place out(p.out, p.out_each, z);
    const bool leader = threadIdx.x % GROUP == 0;
    constexpr int ACROSS = TILE / SQUARE, SQUARES = ACROSS * ACROSS;
#pragma unroll
    for (int square = 0; square < SQUARES; ++square) {
        const int half = square / ACROSS, part = square % ACROSS, next = square + 1;
        const int row = first_row + half * SQUARE, col = first_col + part * SQUARE;
        const bool stored = col <= row && row < p.size;    // else above the diagonal or outside
        const bool diagonal = half == part && row == col;  // a tile's rows begin with columns of a tile
        if (stored) {
            if (leader) tensor_stores_wait_read<0>();
            named_barrier(1 + group, GROUP);  // the square before this one has left shared memory
            add_terms<T>(sum[half], part, at, factors, addends, row, col);
        }
        if (next < SQUARES)  // while this one is finished
            addends.fetch(first_row + next / ACROSS * SQUARE, first_col + next % ACROSS * SQUARE);
        if (!stored) continue;
        if (diagonal) {
            named_barrier(1 + group, GROUP);  // no warp reads addends where others write above the diagonal
            write_diagonal_square<T>(at, sum[half], part, factors.gamma);
        } else {
            write_square<T>(at, sum[half], part);
        }
        fence_shared_for_copies();
        named_barrier(1 + group, GROUP);
        if (leader) {
            tensor_store(out.map, at, col, row, out.z);
            if (!diagonal) tensor_store(out.map, at + SQUARE_BYTES, row, col, out.z);
            tensor_stores_commit();
        }
    }
}

// The groups take every other tile. One begins once the other has seen all stages of the tile before: a wait
// for a stage can only distinguish this filling from the one before it.
template <typename T>
__device__ __forceinline__ void consume_stages(const SymmetricTensorProduct& p, u32 shared) {
    Ring ring(shared);
    const int group = threadIdx.x / GROUP - 1;
    const u32 turn = shared + TURNS_AT + group * 8, other = shared + TURNS_AT + (group ^ 1) * 8;
    const u32 squares = shared + SQUARES_AT + group * 2 * SQUARE_BYTES;
    const int rank = cluster_rank(), blocks = ceil_div(p.depth, DEPTH);
    u32 parity = group ^ 1;  // the first one has its first turn at once
    int taken = 0;
    for (int t = blockIdx.x / CLUSTER; t < p.pairs * p.batch; t += gridDim.x / CLUSTER, ++taken) {
        if (taken % CONSUMERS != group) {
            ring.skip(blocks);
            continue;
        }
        barrier_wait(turn, parity);
        parity ^= 1;
        const PairedTile tile(t % p.pairs, p.size, rank);
        if (tile.is_behind(p.size)) {
            for (int block = 0; block < blocks; ++block) {
                barrier_wait(ring.filled(), ring.parity);
                __syncwarp();  // no lane still waits for this filling when the next one may begin
                release(ring.emptied());
                ring.next();
            }
            pass_turn(other);
            continue;
        }
        float sum[2][64] = {};
        const u32 last = multiply<T>(sum, ring, blocks);
        pass_turn(other);
        const int first_row = tile.row * TILE, first_col = tile.col * TILE;
        Addends<T> addends(p.terms, t / p.pairs, p.size);
        addends.fetch(first_row, first_col);  // during the last products
        const Factors factors(p.terms);
        products_wait<0>();
        if (blocks) release(last);
        fence_sums(sum[0]);
        fence_sums(sum[1]);
        store_squares<T>(p, sum, factors, addends, squares, group, t / p.pairs, first_row, first_col);
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
            barrier_init(shared + BARRIERS_AT + (STAGES + slot) * 8, CLUSTER * GROUP / WARP);
        }
        for (int group = 0; group < CONSUMERS; ++group)
            barrier_init(shared + TURNS_AT + group * 8, GROUP / WARP);
        barriers_are_ready();
    }
    cluster_sync();  // what comes from the other block finds barriers
    if (threadIdx.x < GROUP) {
        give_registers_back<PRODUCER_REGISTERS>();
        if (threadIdx.x == 0) fill_stages(p, shared);
    } else {
        take_registers<CONSUMER_REGISTERS>();
        consume_stages<T>(p, shared);
    }
    __syncwarp();    // the lane that fills stages comes last
    cluster_sync();  // the other block may still copy here, or say that a stage is empty
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    symmetric_wgmma_bfloat16(const __grid_constant__ SymmetricTensorProduct p) {
    symmetric_product<bfloat16>(p);
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    symmetric_wgmma_float16(const __grid_constant__ SymmetricTensorProduct p) {
    symmetric_product<float16>(p);
}
