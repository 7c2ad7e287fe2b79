// The sum of what the ranks contributed, in the order of the ranks, as src/kernels/cpu/pack.rs has it: in
// float64, so the result has the same bits as there.
#include "jobs.cuh"

constexpr int PART = 4096;  // elements of one block

struct Messages {
    const void* first;
    void* to;
    long long pitch;   // elements from one message to the next
    long long length;  // elements of each, and of the sum
    double factor;
    int count;
    Type from_type, to_type;
};

template <Type type>
__device__ __forceinline__ void sum_part(const Messages& what, const char* first, const Run& to, int count,
                                         bool aligned) {
    const int thread = static_cast<int>(threadIdx.x);
    const long long pitch = what.pitch * element_bytes(type);
    const int whole = aligned ? count / VECTOR * VECTOR : 0;
    for (int i = thread * VECTOR; i < whole; i += THREADS * VECTOR) {
        double sum[VECTOR] = {};
#pragma unroll 4
        for (int rank = 0; rank < what.count; ++rank) {
            double term[VECTOR];
            load_vector(Run{const_cast<char*>(first) + rank * pitch, type}, i, term);
#pragma unroll
            for (int j = 0; j < VECTOR; ++j) sum[j] += term[j];
        }
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) sum[j] *= what.factor;
        store_vector(to, i, sum);
    }
    for (int i = whole + thread; i < count; i += THREADS) {
        double sum = 0;
        for (int rank = 0; rank < what.count; ++rank) {
            sum += load<double>(Run{const_cast<char*>(first) + rank * pitch, type}, i);
        }
        store<double>(to, i, sum * what.factor);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    sum_messages(const __grid_constant__ Messages what) {
    const long long start = static_cast<long long>(blockIdx.x) * PART;
    const long long rest = what.length - start;
    const int count = rest < PART ? static_cast<int>(rest) : PART;
    char* from = static_cast<char*>(const_cast<void*>(in_global_memory(what.first)));
    const Run first{from + start * element_bytes(what.from_type), what.from_type};
    const Run to{static_cast<char*>(in_global_memory(what.to)) + start * element_bytes(what.to_type),
                 what.to_type};
    const bool aligned = first.is_aligned() && to.is_aligned() && what.pitch % VECTOR == 0;
    switch (what.from_type) {
        case Type::float64:
            sum_part<Type::float64>(what, first.start, to, count, aligned);
            break;
        case Type::float32:
            sum_part<Type::float32>(what, first.start, to, count, aligned);
            break;
        case Type::bfloat16:
            sum_part<Type::bfloat16>(what, first.start, to, count, aligned);
            break;
        default:
            sum_part<Type::float16>(what, first.start, to, count, aligned);
            break;
    }
}
