// Rows made orthogonal by rotations: the one-sided Jacobi method by blocks, float64.
//
// B = matrices, K = rows and columns of each, a multiple of PAIR, the rest zeros. W becomes J W, whose rows are
// orthogonal, and J, which starts as the identity, is orthogonal. Rows lie in blocks of BLOCK. In each round
// every block meets one other: their Gram matrix is diagonalized in shared memory (jacobi_angles), and what
// does it turns their rows (jacobi_turn). After a sweep of as many rounds as there are blocks, less one, each
// has met each.
//
// Nothing is asked of the host: there are as many sweeps as a matrix takes at most, and once one has turned
// nothing, the others return at once. What sums hold depends on no timing.
#include "common.cuh"

constexpr int BLOCK = 32;        // rows of a block
constexpr int PAIR = 2 * BLOCK;  // rows that are turned together
constexpr int CHUNK = 32;        // columns that are multiplied at a time
constexpr int THREADS = 256;     // 16 x 16, each with 4 x 4 elements of a PAIR x PAIR matrix
constexpr int SIDE = 16;
constexpr int EACH = PAIR / SIDE;
constexpr int INNER = 2;  // sweeps over a Gram matrix
constexpr double LARGEST = 1.7976931348623157e308;
// Pitches of matrices in shared memory: lanes of one column then fall on different banks.
constexpr int PITCH = PAIR + 1;
constexpr int CHUNK_PITCH = CHUNK + 1;

struct Jacobi {
    double* w;            // [B, K, K]
    double* j;            // [B, K, K]
    double* turns;        // [B, K / PAIR, PAIR, PAIR]
    double* is_turned;    // [B, K / PAIR]
    double* moved;        // [B, sweeps], zeros: whether a sweep has turned anything
    const double* norms;  // [B]: Frobenius norms of the matrices
    double tolerance;     // products of rows up to this share of the matrix's norm and of the longer one's are 0
    int size;             // K
    int sweep, round;
    int sweeps;
};

// The two that meet in a round of a tournament of `count`, which is even: place `pair` of count / 2.
struct Meeting {
    int first, second;

    __device__ __forceinline__ Meeting(int count, int round, int pair) {
        const int others = count - 1;
        const int one = (round + pair) % others, other = pair == 0 ? others : (round + others - pair) % others;
        first = min(one, other);
        second = max(one, other);
    }
};

// Whether the sweep before has turned nothing of matrix z.
__device__ __forceinline__ bool is_done(const Jacobi& p, int z) {
    return p.sweep > 0 && p.moved[static_cast<long long>(z) * p.sweeps + p.sweep - 1] == 0.0;
}

// The row of the matrix that is row `row` of a pair of blocks.
__device__ __forceinline__ int row_of(const Meeting& blocks, int row) {
    return row < BLOCK ? blocks.first * BLOCK + row : blocks.second * BLOCK + row - BLOCK;
}

struct Angles {
    double gram[PAIR * PITCH];
    double turn[PAIR * PITCH];
    double rows[PAIR * CHUNK_PITCH];
    double norm[PAIR];
    double cosine[BLOCK];
    double sine[BLOCK];
    int is_turned;
};

// Rotation of two rows whose products are a, b and, with each other, c: it makes c zero and leaves the longer
// row first, by which the next sweeps have less to do.
__device__ __forceinline__ void rotation(double a, double b, double c, double& cosine, double& sine) {
    cosine = 1.0;
    sine = 0.0;
    double tangent = 0.0;
    if (c != 0.0) {
        const double zeta = (b - a) / (2.0 * c);
        tangent = (zeta < 0.0 ? -1.0 : 1.0) / (fabs(zeta) + sqrt(1.0 + zeta * zeta));
        cosine = 1.0 / sqrt(1.0 + tangent * tangent);
        sine = tangent * cosine;
    }
    if (b + tangent * c > a - tangent * c) {
        const double across = sine;
        sine = -cosine;
        cosine = across;
    }
}

// A PAIR x PAIR product in shared memory, 4 x 4 elements of each thread: element (i, k) of the left factor is at
// i ROW + k, (k, j) of the right one at k STEP + j COL, and there are COUNT of k.
template <int COUNT, int ROW, int STEP, int COL>
__device__ __forceinline__ void multiply(double (&sums)[EACH][EACH], const double* a, const double* b) {
    const int thread = static_cast<int>(threadIdx.x), left = thread / SIDE, right = thread % SIDE;
#pragma unroll 4
    for (int k = 0; k < COUNT; ++k) {
        double x[EACH], y[EACH];
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            x[i] = a[(left + SIDE * i) * ROW + k];
            y[i] = b[k * STEP + (right + SIDE * i) * COL];
        }
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
#pragma unroll
            for (int j = 0; j < EACH; ++j) sums[i][j] += x[i] * y[j];
        }
    }
}

// The Gram matrix of the rows of two blocks.
__device__ __forceinline__ void multiply_rows(Angles& s, const double* w, int size, const Meeting& blocks) {
    const int thread = static_cast<int>(threadIdx.x), left = thread / SIDE, right = thread % SIDE;
    double sums[EACH][EACH] = {};
    for (int start = 0; start < size; start += CHUNK) {
        __syncthreads();  // the chunk before is read
        for (int i = thread; i < PAIR * CHUNK; i += THREADS) {
            const int row = i / CHUNK, col = i % CHUNK;
            s.rows[row * CHUNK_PITCH + col] =
                w[static_cast<long long>(row_of(blocks, row)) * size + start + col];
        }
        __syncthreads();
        multiply<CHUNK, CHUNK_PITCH, 1, CHUNK_PITCH>(sums, s.rows, s.rows);
    }
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
#pragma unroll
        for (int j = 0; j < EACH; ++j) {
            const int row = left + SIDE * i, col = right + SIDE * j;
            s.gram[row * PITCH + col] = sums[i][j];
            s.turn[row * PITCH + col] = row == col ? 1.0 : 0.0;
            if (row == col) s.norm[row] = sqrt(sums[i][j]);
        }
    }
}

// One round of rotations of all rows and columns of the Gram matrix.
__device__ __forceinline__ void rotate_all(Angles& s, int round) {
    const int thread = static_cast<int>(threadIdx.x);
    if (thread < BLOCK) {
        const Meeting rows(PAIR, round, thread);
        rotation(s.gram[rows.first * PITCH + rows.first], s.gram[rows.second * PITCH + rows.second],
                 s.gram[rows.first * PITCH + rows.second], s.cosine[thread], s.sine[thread]);
    }
    __syncthreads();
    // Each 2 x 2 block from both sides.
    for (int i = thread; i < BLOCK * BLOCK; i += THREADS) {
        const int left = i / BLOCK, right = i % BLOCK;
        const Meeting rows(PAIR, round, left), cols(PAIR, round, right);
        double& a = s.gram[rows.first * PITCH + cols.first];
        double& b = s.gram[rows.first * PITCH + cols.second];
        double& c = s.gram[rows.second * PITCH + cols.first];
        double& d = s.gram[rows.second * PITCH + cols.second];
        const double cosine = s.cosine[left], sine = s.sine[left];
        const double top[2] = {cosine * a - sine * c, cosine * b - sine * d};
        const double bottom[2] = {sine * a + cosine * c, sine * b + cosine * d};
        const double along = s.cosine[right], across = s.sine[right];
        a = along * top[0] - across * top[1];
        b = across * top[0] + along * top[1];
        c = along * bottom[0] - across * bottom[1];
        d = across * bottom[0] + along * bottom[1];
    }
    for (int i = thread; i < BLOCK * PAIR; i += THREADS) {
        const int pair = i / PAIR, col = i % PAIR;
        const Meeting rows(PAIR, round, pair);
        double& a = s.turn[rows.first * PITCH + col];
        double& b = s.turn[rows.second * PITCH + col];
        const double x = s.cosine[pair] * a - s.sine[pair] * b;
        b = s.sine[pair] * a + s.cosine[pair] * b;
        a = x;
    }
    __syncthreads();
}

// A block of threads for each pair of blocks of rows.
extern "C" __global__ void __launch_bounds__(THREADS, 1) jacobi_angles(const __grid_constant__ Jacobi p) {
    DYNAMIC_SHARED(memory);
    Angles& s = *reinterpret_cast<Angles*>(memory);
    const int pairs = p.size / PAIR, z = static_cast<int>(blockIdx.x) / pairs;
    const int thread = static_cast<int>(threadIdx.x);
    if (is_done(p, z)) return;
    const Meeting blocks(2 * pairs, p.round, static_cast<int>(blockIdx.x) % pairs);
    const long long square = static_cast<long long>(p.size) * p.size;
    if (thread == 0) s.is_turned = 0;
    multiply_rows(s, in_global_memory(p.w) + z * square, p.size, blocks);
    __syncthreads();
    const double bound = p.tolerance * in_global_memory(p.norms)[z];
    for (int i = thread; i < PAIR * PAIR; i += THREADS) {
        const int row = i / PAIR, col = i % PAIR;
        const double longer = s.norm[row] > s.norm[col] ? s.norm[row] : s.norm[col];
        const double product = fabs(s.gram[row * PITCH + col]);
        // Also where it is not a number, or infinite.
        if (row != col && !(product <= bound * longer && product <= LARGEST)) s.is_turned = 1;
    }
    __syncthreads();
    if (thread == 0) in_global_memory(p.is_turned)[blockIdx.x] = s.is_turned;
    if (!s.is_turned) return;
    if (thread == 0) in_global_memory(p.moved)[static_cast<long long>(z) * p.sweeps + p.sweep] = 1.0;
    for (int sweep = 0; sweep < INNER; ++sweep) {
        for (int round = 0; round < PAIR - 1; ++round) rotate_all(s, round);
    }
    double* out = in_global_memory(p.turns) + static_cast<long long>(blockIdx.x) * PAIR * PAIR;
    for (int i = thread; i < PAIR * PAIR; i += THREADS) out[i] = s.turn[i / PAIR * PITCH + i % PAIR];
}

struct Turned {
    double turn[PAIR * PITCH];
    double rows[PAIR * PITCH];
};

// A block of threads for PAIR columns of W or of J of each pair of blocks of rows.
extern "C" __global__ void __launch_bounds__(THREADS, 2) jacobi_turn(const __grid_constant__ Jacobi p) {
    DYNAMIC_SHARED(memory);
    Turned& s = *reinterpret_cast<Turned*>(memory);
    const int pairs = p.size / PAIR, parts = 2 * pairs;
    const int pair = static_cast<int>(blockIdx.x) / parts, part = static_cast<int>(blockIdx.x) % parts;
    const int z = pair / pairs;
    if (is_done(p, z) || in_global_memory(p.is_turned)[pair] == 0.0) return;
    const Meeting blocks(2 * pairs, p.round, pair % pairs);
    const long long square = static_cast<long long>(p.size) * p.size;
    double* matrix = in_global_memory(part < pairs ? p.w : p.j) + z * square + part % pairs * PAIR;
    const double* turn = in_global_memory(p.turns) + static_cast<long long>(pair) * PAIR * PAIR;
    const int thread = static_cast<int>(threadIdx.x), left = thread / SIDE, right = thread % SIDE;
    for (int i = thread; i < PAIR * PAIR; i += THREADS) {
        const int row = i / PAIR, col = i % PAIR;
        s.turn[row * PITCH + col] = turn[i];
        s.rows[row * PITCH + col] = matrix[static_cast<long long>(row_of(blocks, row)) * p.size + col];
    }
    __syncthreads();
    double sums[EACH][EACH] = {};
    multiply<PAIR, PITCH, PITCH, 1>(sums, s.turn, s.rows);
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const long long row = row_of(blocks, left + SIDE * i);
#pragma unroll
        for (int j = 0; j < EACH; ++j) matrix[row * p.size + right + SIDE * j] = sums[i][j];
    }
}

// J of the matrices that were still turned in the last sweep is not a number. A block of threads for each row.
extern "C" __global__ void __launch_bounds__(THREADS, 4) jacobi_end(const __grid_constant__ Jacobi p) {
    const long long row = blockIdx.x, z = row / p.size;
    if (in_global_memory(p.moved)[z * p.sweeps + p.sweeps - 1] == 0.0) return;
    double* out = in_global_memory(p.j) + row * p.size;
    for (int i = static_cast<int>(threadIdx.x); i < p.size; i += THREADS) out[i] = __uint_as_float(0x7FC00000u);
}
