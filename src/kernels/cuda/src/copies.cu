// Copies of many rectangles at once: packs and unpacks the messages that ranks send each other.
//
// The table is a parameter of the kernel, as in jobs.cuh. A rectangle is `rows` runs of `units` units of one
// width, at any distance. Units that are not whole, at the end of each row, are a rectangle of their own.
// A thread has 64 registers, the most with which a multiprocessor has four blocks.
#include "search.cuh"

constexpr int THREADS = 256;
constexpr int BLOCKS =
    4;  // on a multiprocessor: 4 x 256 threads with 4 units of 16 bytes have 64 KiB under way
constexpr int AHEAD = 4;     // units that a thread has under way
constexpr int PIECE = 4096;  // units of one block

// Rectangles of one launch. 682 is what fits into the 32764 bytes of parameters.
constexpr int FEW = 32;
constexpr int MANY = 682;

struct Rectangle {
    const void* from;
    void* to;
    long long from_step, to_step;  // bytes from one row to the next
    u32 rows;
    u32 units;  // of a row
    u32 end;    // pieces of this rectangle and all before it
    u32 width;  // bytes of a unit: 2, 4, 8 or 16
};

template <int Most>
struct Rectangles {
    int count;
    Rectangle each[Most];
};

// 16 bytes that are moved at once.
struct Chunk {
    u32 bits[4];
};

template <typename Unit>
__device__ __forceinline__ Unit unit_at(const char* from) {
    return *reinterpret_cast<const Unit*>(from);
}

template <>
__device__ __forceinline__ Chunk unit_at<Chunk>(const char* from) {
    Chunk chunk;
    load_chunk(chunk.bits, from);
    return chunk;
}

template <typename Unit>
__device__ __forceinline__ void put_unit(char* to, const Unit& unit) {
    *reinterpret_cast<Unit*>(to) = unit;
}

__device__ __forceinline__ void put_unit(char* to, const Chunk& unit) { store_chunk(to, unit.bits); }

// A unit of a rectangle, and the step to the one that the same thread moves next.
struct Walk {
    u32 row, col;
    u32 units, rows_on, cols_on;

    __device__ Walk(const Rectangle& rectangle, u64 first) : units(rectangle.units) {
        row = static_cast<u32>(first / units);
        col = static_cast<u32>(first - static_cast<u64>(row) * units) + threadIdx.x;
        row += col / units;
        col %= units;
        rows_on = THREADS / units;
        cols_on = THREADS % units;
    }

    __device__ void advance() {
        row += rows_on;
        col += cols_on;
        if (col >= units) {
            col -= units;
            ++row;
        }
    }
};

template <typename Unit>
__device__ __forceinline__ void copy_piece(const Rectangle& rectangle, u32 piece) {
    const char* from = static_cast<const char*>(in_global_memory(rectangle.from));
    char* to = static_cast<char*>(in_global_memory(rectangle.to));
    const u64 first = static_cast<u64>(piece) * PIECE;
    const u64 rest = static_cast<u64>(rectangle.rows) * rectangle.units - first;
    const int count = rest < PIECE ? static_cast<int>(rest) : PIECE;
    Walk walk(rectangle, first);
    for (int i = static_cast<int>(threadIdx.x); i < count; i += AHEAD * THREADS) {
        Unit unit[AHEAD];
        long long place[AHEAD];
#pragma unroll
        for (int a = 0; a < AHEAD; ++a) {
            if (i + a * THREADS < count) {
                const long long col = static_cast<long long>(walk.col) * static_cast<int>(sizeof(Unit));
                unit[a] = unit_at<Unit>(from + walk.row * rectangle.from_step + col);
                place[a] = walk.row * rectangle.to_step + col;
                walk.advance();
            }
        }
#pragma unroll
        for (int a = 0; a < AHEAD; ++a) {
            if (i + a * THREADS < count) put_unit(to + place[a], unit[a]);
        }
    }
}

template <int Most>
__device__ __forceinline__ void copy_rectangles(const Rectangles<Most>& table) {
    const u32 block = blockIdx.x;
    const int number = first_behind(table.count, block, [&](int i) { return table.each[i].end; });
    const Rectangle& rectangle = table.each[number];
    const u32 piece = block - (number ? table.each[number - 1].end : 0);
    switch (rectangle.width) {
        case 16:
            copy_piece<Chunk>(rectangle, piece);
            break;
        case 8:
            copy_piece<u64>(rectangle, piece);
            break;
        case 4:
            copy_piece<u32>(rectangle, piece);
            break;
        default:
            copy_piece<u16>(rectangle, piece);
            break;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    copy_few(const __grid_constant__ Rectangles<FEW> table) {
    copy_rectangles(table);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    copy_many(const __grid_constant__ Rectangles<MANY> table) {
    copy_rectangles(table);
}
