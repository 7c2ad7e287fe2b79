// Random normal numbers, for the projections of APOLLO, which are drawn again in every step.
#include "lines.cuh"
#include "normal.cuh"

constexpr int NUMBERS = 4 * THREADS * 4;  // of a block

struct NormalJob {
    void* out;
    Stream stream;
    u64 first;  // the place of the first number in the stream
    long long count;
    u32 end;  // blocks of this job and all before it
    Type type;
};

struct NormalScale {
    float factor;
};
using NormalJobs = Lines<NormalScale, NormalJob>;

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    fill_normals(const __grid_constant__ NormalJobs table) {
    const int number = job_of(table, blockIdx.x);
    const NormalJob& job = table.job[number];
    const u64 first = job.first / 4, last = (job.first + job.count + 3) / 4;
    const u64 start = first + static_cast<u64>(piece_of(table, number, blockIdx.x)) * (NUMBERS / 4);
    for (int k = 0; k < NUMBERS / 4 / THREADS; ++k) {
        const u64 block = start + k * THREADS + threadIdx.x;
        if (block >= last) return;
        float numbers[4];
        normals(job.stream, block, numbers);
#pragma unroll
        for (int lane = 0; lane < 4; ++lane) {
            const long long at = static_cast<long long>(4 * block + lane - job.first);
            if (at < 0 || at >= job.count) continue;
            store(run_at(job.out, job.type, at), 0, mul(numbers[lane], table.head.factor));
        }
    }
}
