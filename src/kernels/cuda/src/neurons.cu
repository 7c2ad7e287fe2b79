// Normalization by neuron, as src/kernels/ops/neurons has it: runs of equal length inside the rows of a
// matrix, with one running number each.
//
// Neurons are numbered through the matrix in row-major order; `group` of them share a norm.
#include "lerp.cuh"
#include "lines.cuh"

constexpr double EPSILON = 1e-8;   // added to the root of the running mean square
constexpr double SMALLEST = 1e-8;  // the smallest norm that is divided by

struct NeuronJob {
    void* update;     // U
    void* variance;   // V
    double* squares;  // for each neuron of U
    double* totals;   // two for each group
    Chosen chosen;    // rows of V's parameter that U has
    long long stride, variance_stride;
    int rows;    // of U
    int across;  // neurons of a row
    int length;  // elements of a neuron that are stored here
    int group;
    int groups;
    u32 end;  // blocks of this job and all before it
    Type type, variance_type;
};

struct NeuronMean {
    double beta2;
    double length;  // of whole neurons
};
using NeuronJobs = Lines<NeuronMean, NeuronJob>;

// Element `column` of row `row` of V.
__device__ __forceinline__ Run variance_at(const NeuronJob& job, int row, int column) {
    return run_at(job.variance, job.variance_type, row * job.variance_stride + column);
}

// Elements of a neuron.
__device__ __forceinline__ Run neuron_at(const NeuronJob& job, int neuron) {
    const int row = neuron / job.across, column = neuron % job.across;
    return run_at(job.update, job.type, row * job.stride + static_cast<long long>(column) * job.length);
}

// Calls `work` with each neuron that this team has.
template <typename Work>
__device__ __forceinline__ void each_neuron(const NeuronJob& job, u32 piece, const Team& team, Work work) {
    const int first = team.first_line(piece);
    for (int k = 0; k < LINES_OF_A_TEAM; ++k) {
        const int neuron = first + k * team.count;
        if (neuron >= job.rows * job.across) return;
        work(neuron, job.chosen.in_matrix(neuron / job.across));
    }
}

// squares = the sum of squares of each neuron.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    neuron_squares(const __grid_constant__ NeuronJobs table) {
    const int number = job_of(table, blockIdx.x);
    const NeuronJob& job = table.job[number];
    const Team team(job.length >= LONG);
    each_neuron(job, piece_of(table, number, blockIdx.x), team, [&](int neuron, int row) {
        double own = 0;
        if (row >= 0) {
            const Run line[1] = {neuron_at(job, neuron)};
            const auto add = [&](auto(&x)[1], int) {
                own += static_cast<double>(x[0]) * static_cast<double>(x[0]);
            };
            if (job.type == Type::float64) {
                each_in_line<double, 1, 0>(team, line, job.length, add);
            } else {
                each_in_line<float, 1, 0>(team, line, job.length, add);
            }
        }
        const double sum = team.sum(own);
        if (team.rank == 0) in_global_memory(job.squares)[neuron] = sum;
    });
}

// V <- beta2 V + (1 - beta2) s / length with s the sum of squares of a neuron; totals = the sums over a group
// of s and of s / (sqrt(V) + epsilon)^2. A team works on each group.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    neuron_variance(const __grid_constant__ NeuronJobs table) {
    const int number = job_of(table, blockIdx.x);
    const NeuronJob& job = table.job[number];
    const Team team(job.group > 32);
    const int first = team.first_line(piece_of(table, number, blockIdx.x));
    for (int k = 0; k < LINES_OF_A_TEAM; ++k) {
        const int group = first + k * team.count;
        if (group >= job.groups) return;
        double before = 0, after = 0;
        const long long start = static_cast<long long>(group) * job.group;
        const long long end = min(start + job.group, static_cast<long long>(job.rows) * job.across);
        for (long long neuron = start + team.rank; neuron < end; neuron += team.size) {
            const int row = job.chosen.in_matrix(static_cast<int>(neuron / job.across));
            if (row < 0) continue;
            const double square = in_global_memory(job.squares)[neuron];
            const Run run = variance_at(job, row, static_cast<int>(neuron % job.across));
            const auto lerp = Lerp<double>::keeping(table.head.beta2);
            const double old = load<double>(run, 0);
            store(run, 0, lerp(old, square / table.head.length));
            // What was stored is what the update is divided by.
            const double root = sqrt(load<double>(run, 0)) + EPSILON;
            before += square;
            after += square / (root * root);
        }
        before = team.sum(before);
        after = team.sum(after);
        if (team.rank == 0) {
            in_global_memory(job.totals)[2 * group] = before;
            in_global_memory(job.totals)[2 * group + 1] = after;
        }
    }
}

template <typename C>
__device__ __forceinline__ void scale_neuron(const Team& team, const Run& run, int length, double factor) {
    const Run line[1] = {run};
    const C own = static_cast<C>(factor);
    each_in_line<C, 1, 1>(team, line, length, [=](C(&x)[1], int) { x[0] = own * x[0]; });
}

// Multiplies every neuron by (sqrt(a) / max(sqrt(b), smallest)) / (sqrt(V) + epsilon) with a and b the totals
// of its group.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    neuron_scale(const __grid_constant__ NeuronJobs table) {
    const int number = job_of(table, blockIdx.x);
    const NeuronJob& job = table.job[number];
    const Team team(job.length >= LONG);
    each_neuron(job, piece_of(table, number, blockIdx.x), team, [&](int neuron, int row) {
        if (row < 0) return;
        const double* totals = in_global_memory(job.totals) + 2 * (neuron / job.group);
        const double root = sqrt(load<double>(variance_at(job, row, neuron % job.across), 0));
        const double factor = sqrt(totals[0]) / fmax(sqrt(totals[1]), SMALLEST) / (root + EPSILON);
        if (job.type == Type::float64) {
            scale_neuron<double>(team, neuron_at(job, neuron), job.length, factor);
        } else {
            scale_neuron<float>(team, neuron_at(job, neuron), job.length, factor);
        }
    });
}
