// Rows of matrices, or parts of them, each by a warp or by the whole block.
#pragma once
#include "jobs.cuh"

constexpr int MOST_LINES = 128;     // jobs of one launch
constexpr int LONG = 2048;          // elements from which a line takes all threads of a block
constexpr int LINES_OF_A_TEAM = 4;  // that one warp or block works on, one after the other

// The parameter of a launch: what all jobs have in common, and the jobs.
template <typename Head, typename Job>
struct Lines {
    Head head;
    int count;
    Job job[MOST_LINES];
};

// The threads that work on one line.
struct Team {
    int size;    // how many
    int rank;    // which of them this one is
    int number;  // which of the block's teams it is
    int count;   // teams of the block

    __device__ explicit Team(bool block) {
        const int thread = static_cast<int>(threadIdx.x);
        size = block ? THREADS : 32;
        rank = thread % size;
        number = thread / size;
        count = THREADS / size;
    }

    // The first of the lines that the team has of piece `piece`; the others follow at a distance of `count`.
    __device__ int first_line(u32 piece) const {
        return static_cast<int>(piece) * LINES_OF_A_TEAM * count + number;
    }

    // The sum over the team, added in one order, in each of its threads. All threads of the block take part.
    __device__ double sum(double x) const {
        for (int lane = 16; lane > 0; lane /= 2) x += __shfl_xor_sync(0xFFFFFFFF, x, lane);
        if (size == 32) return x;
        __shared__ double warps[THREADS / 32];
        __syncthreads();  // the sums before are read
        if (rank % 32 == 0) warps[rank / 32] = x;
        __syncthreads();
        double all = 0;
        for (int w = 0; w < THREADS / 32; ++w) all += warps[w];
        return all;
    }
};

// `length` elements from `offset` on.
__device__ __forceinline__ Run run_at(void* first, Type type, long long offset) {
    return {static_cast<char*>(in_global_memory(first)) + offset * element_bytes(type), type};
}

// Hands element i of all runs to `op`, as an array and with i. Reads and writes have a bit for each run.
template <typename C, u32 Reads, u32 Writes, int N, typename Op>
__device__ __forceinline__ void each_in_line(const Team& team, const Run (&run)[N], int length, Op op) {
    bool is_aligned = true;
#pragma unroll
    for (int n = 0; n < N; ++n) is_aligned = is_aligned && run[n].is_aligned();
    const int whole = is_aligned ? length / VECTOR * VECTOR : 0;
    for (int first = team.rank * VECTOR; first < whole; first += AHEAD * team.size * VECTOR) {
        Fetched<C> fetched[AHEAD][N];
#pragma unroll
        for (int a = 0; a < AHEAD; ++a) {
            const int i = first + a * team.size * VECTOR;
            if (i < whole) {
#pragma unroll
                for (int n = 0; n < N; ++n) {
                    if (Reads >> n & 1) fetched[a][n].load(run[n], i);
                }
            }
        }
#pragma unroll
        for (int a = 0; a < AHEAD; ++a) {
            const int i = first + a * team.size * VECTOR;
            if (i < whole) {
                C x[N][VECTOR];
#pragma unroll
                for (int n = 0; n < N; ++n) {
                    if (Reads >> n & 1) fetched[a][n].decode(run[n].type, x[n]);
                }
#pragma unroll
                for (int j = 0; j < VECTOR; ++j) {
                    C one[N];
#pragma unroll
                    for (int n = 0; n < N; ++n) one[n] = Reads >> n & 1 ? x[n][j] : C(0);
                    op(one, i + j);
#pragma unroll
                    for (int n = 0; n < N; ++n) x[n][j] = one[n];
                }
#pragma unroll
                for (int n = 0; n < N; ++n) {
                    if (Writes >> n & 1) store_vector(run[n], i, x[n]);
                }
            }
        }
    }
    for (int i = whole + team.rank; i < length; i += team.size) {
        C one[N];
#pragma unroll
        for (int n = 0; n < N; ++n) one[n] = Reads >> n & 1 ? load<C>(run[n], i) : C(0);
        op(one, i);
#pragma unroll
        for (int n = 0; n < N; ++n) {
            if (Writes >> n & 1) store<C>(run[n], i, one[n]);
        }
    }
}

// Slices of a matrix that were chosen: their numbers counted from 1, ascending, filled up with 0.
struct Chosen {
    const double* numbers;  // null: all of them
    int most;               // how many numbers there are room for
    int first;  // the number of the matrix's first slice; -1: chosen slices follow each other in U

    __device__ double number(int i) const { return in_global_memory(numbers)[i]; }

    // The place of a slice of the matrix among those that were chosen, or -1.
    __device__ int find(int slice) const {
        const double wanted = slice + 1 + (first < 0 ? 0 : first);
        int low = 0, high = most;
        while (low < high) {
            const int middle = (low + high) / 2;
            const double found = number(middle);
            if (found == 0 || found >= wanted) {
                high = middle;
            } else {
                low = middle + 1;
            }
        }
        return low < most && number(low) == wanted ? low : -1;
    }

    // The slice of U that a slice of the matrix has, or -1.
    __device__ int in_update(int slice) const {
        if (!numbers) return slice;
        const int place = find(slice);
        return first < 0 ? place : place < 0 ? -1 : slice;
    }

    // The slice of the matrix that a slice of U has, or -1.
    __device__ int in_matrix(int slice) const {
        if (!numbers) return slice;
        if (first >= 0) return find(slice) < 0 ? -1 : slice;
        return slice < most ? static_cast<int>(number(slice)) - 1 : -1;
    }
};
