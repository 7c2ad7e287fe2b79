// A driver without a device, as libcuda.so.1: memory of the device is memory of the host, and kernels run on the
// emulator, at once or when a captured graph is replayed. Has the calls that the package makes, and their rules.
#include "tensor_copies.h"
#include <dlfcn.h>
#include <map>
#include <string>
#include <vector>

#define DRIVER_CALL extern "C" __attribute__((visibility("default"))) int

namespace {

enum Result {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    NOT_INITIALIZED = 3,
    INVALID_DEVICE = 101,
    INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    LAUNCH_FAILED = 719,
    CAPTURE_UNSUPPORTED = 900,
};

constexpr int DEVICES = 2;
constexpr int MULTIPROCESSORS = 4;
constexpr int MAX_DYNAMIC_SHARED = 227 * 1024;
constexpr unsigned USUAL_SHARED = 48 * 1024;

using Entry = int (*)(const emulator::Launch*, const void*, size_t);

struct Kernel {
    std::string name;
    Entry entry;
    size_t parameter_bytes;
    const char* (*failure)();
    void (*allow_all_memory)();
    unsigned shared_limit;
};

struct Recorded {
    Kernel* kernel;
    emulator::Launch how;
    std::vector<unsigned char> parameters;
};

struct Module {
    int device;
};

bool initialized, capturing;
thread_local int current_device = -1;
int contexts[DEVICES];  // how often each was retained
std::map<std::string, Kernel> kernels[DEVICES];
std::vector<void*> libraries;
std::vector<Recorded> graph;
long launches, loads, updates;
std::map<std::string, long> launched_by_name;
unsigned seed;
char last_failure[512];

void open_libraries() {
    const char* paths = getenv("OXIDION_EMULATED_KERNELS");
    std::string path;
    for (const char* at = paths ? paths : ""; *at; ++at) {
        if (*at == ':') continue;
        path += *at;
        if (at[1] == ':' || !at[1]) {
            if (void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) libraries.push_back(library);
            path.clear();
        }
    }
}

int run(const Recorded& what) {
    what.kernel->allow_all_memory();
    if (what.kernel->entry(&what.how, what.parameters.data(), what.parameters.size())) {
        snprintf(last_failure, sizeof last_failure, "%s: %s", what.kernel->name.c_str(), what.kernel->failure());
        return LAUNCH_FAILED;
    }
    return SUCCESS;
}

void* context_of(int device) {
    return &contexts[device];
}

}  // namespace

DRIVER_CALL cuInit(unsigned flags) {
    if (flags) return INVALID_VALUE;
    if (!initialized) open_libraries();
    initialized = true;
    return SUCCESS;
}

DRIVER_CALL cuDeviceGet(int* device, int ordinal) {
    if (!initialized) return NOT_INITIALIZED;
    if (ordinal < 0 || ordinal >= DEVICES) return INVALID_DEVICE;
    *device = ordinal;
    return SUCCESS;
}

DRIVER_CALL cuDeviceGetName(char* name, int length, int device) {
    snprintf(name, length, "oxidion emulator");
    return device < DEVICES ? SUCCESS : INVALID_DEVICE;
}

DRIVER_CALL cuDeviceGetAttribute(int* value, int attribute, int device) {
    if (device >= DEVICES) return INVALID_DEVICE;
    // Multiprocessors, compute capability major and minor.
    *value = attribute == 16 ? MULTIPROCESSORS : attribute == 75 ? 9 : 0;
    return SUCCESS;
}

DRIVER_CALL cuDevicePrimaryCtxRetain(void** context, int device) {
    if (device >= DEVICES) return INVALID_DEVICE;
    ++contexts[device];
    *context = context_of(device);
    return SUCCESS;
}

DRIVER_CALL cuCtxGetCurrent(void** context) {
    *context = current_device < 0 ? nullptr : context_of(current_device);
    return initialized ? SUCCESS : NOT_INITIALIZED;
}

DRIVER_CALL cuCtxSetCurrent(void* context) {
    current_device = -1;
    for (int device = 0; device < DEVICES; ++device)
        if (context == context_of(device)) current_device = device;
    return SUCCESS;
}

DRIVER_CALL cuStreamIsCapturing(void*, int* status) {
    *status = capturing;
    return SUCCESS;
}

// A node is its place in the graph, counted from 1.
DRIVER_CALL cuStreamGetCaptureInfo_v3(void*, int* status, unsigned long*, void**, void*** nodes, void**,
                                      size_t* count) {
    static void* last;
    last = reinterpret_cast<void*>(graph.size());
    *status = capturing;
    *nodes = &last;
    *count = graph.empty() ? 0 : 1;
    return SUCCESS;
}

struct NodeParameters {
    void* function;
    unsigned blocks, blocks_y, blocks_z, threads, threads_y, threads_z, shared;
    void** parameters;
    void** extra;
    void* kern;
    void* context;
};

DRIVER_CALL cuGraphExecKernelNodeSetParams_v2(void* executable, void* node, const NodeParameters* how) {
    const size_t at = reinterpret_cast<size_t>(node);
    if (!executable || capturing || at < 1 || at > graph.size()) return INVALID_HANDLE;
    Recorded& what = graph[at - 1];
    if (how->function != what.kernel || how->extra || how->kern || how->context) return INVALID_VALUE;
    if (static_cast<int>(how->blocks) != what.how.blocks || static_cast<int>(how->threads) != what.how.threads)
        return INVALID_VALUE;
    const auto bytes = static_cast<unsigned char*>(how->parameters[0]);
    what.parameters.assign(bytes, bytes + what.kernel->parameter_bytes);
    ++updates;
    return SUCCESS;
}

DRIVER_CALL cuModuleLoadData(void** module, const void* image) {
    if (current_device < 0) return INVALID_CONTEXT;
    if (capturing) return CAPTURE_UNSUPPORTED;
    static long refusals = getenv("OXIDION_EMULATED_REFUSALS") ? atol(getenv("OXIDION_EMULATED_REFUSALS")) : 0;
    if (memcmp(image, "\x7f" "ELF", 4) || refusals-- > 0) return INVALID_IMAGE;
    ++loads;
    *module = new Module{current_device};
    return SUCCESS;
}

DRIVER_CALL cuModuleGetFunction(void** function, void* module, const char* name) {
    const int device = static_cast<Module*>(module)->device;
    if (device != current_device) return INVALID_CONTEXT;
    for (void* library : libraries) {
        const auto entry = reinterpret_cast<Entry>(dlsym(library, (std::string("launch_") + name).c_str()));
        if (!entry) continue;
        const auto bytes = static_cast<size_t*>(dlsym(library, (std::string("parameters_of_") + name).c_str()));
        const auto failure = reinterpret_cast<const char* (*)()>(dlsym(library, "emulator_failure"));
        const auto allow = reinterpret_cast<void (*)()>(dlsym(library, "emulator_allow_all"));
        if (!bytes || !failure || !allow) return NOT_FOUND;
        Kernel& kernel = kernels[device][name];
        kernel = {name, entry, *bytes, failure, allow, USUAL_SHARED};
        *function = &kernel;
        return SUCCESS;
    }
    return NOT_FOUND;
}

DRIVER_CALL cuFuncSetAttribute(void* function, int attribute, int value) {
    if (attribute != 8 || value < 0 || value > MAX_DYNAMIC_SHARED) return INVALID_VALUE;
    static_cast<Kernel*>(function)->shared_limit = value;
    return SUCCESS;
}

DRIVER_CALL cuLaunchKernel(void* function, unsigned blocks, unsigned blocks_y, unsigned blocks_z, unsigned threads,
                           unsigned threads_y, unsigned threads_z, unsigned shared, void*, void** parameters, void**) {
    if (!function) return INVALID_HANDLE;
    Kernel& kernel = *static_cast<Kernel*>(function);
    if (current_device < 0 || &kernels[current_device][kernel.name] != &kernel) return INVALID_CONTEXT;
    if (!blocks || blocks_y != 1 || blocks_z != 1 || !threads || threads > emulator::MAX_THREADS) return INVALID_VALUE;
    if (threads_y != 1 || threads_z != 1 || shared > kernel.shared_limit) return INVALID_VALUE;
    const auto bytes = static_cast<unsigned char*>(parameters[0]);
    const emulator::Launch how{static_cast<int>(blocks), static_cast<int>(threads), ++seed, shared};
    const Recorded what{&kernel, how, {bytes, bytes + kernel.parameter_bytes}};
    ++launches;
    ++launched_by_name[kernel.name];
    if (!capturing) return run(what);
    graph.push_back(what);
    return SUCCESS;
}

// What the encoding says, in the form in which the emulator reads a map. A row of a box is a period of the swizzle.
DRIVER_CALL cuTensorMapEncodeTiled(void* map, int element, unsigned rank, void* start, const uint64_t* extent,
                                   const uint64_t* strides, const unsigned* box, const unsigned* steps, int interleave,
                                   int swizzle, int, int fill) {
    constexpr int FLOAT16 = 6, BFLOAT16 = 9, SWIZZLE_128 = 3;
    if ((element != FLOAT16 && element != BFLOAT16) || rank != 3 || interleave || swizzle != SWIZZLE_128 || fill)
        return INVALID_VALUE;
    if (reinterpret_cast<uintptr_t>(map) % 64 || reinterpret_cast<uintptr_t>(start) % 16) return INVALID_VALUE;
    emulator::TensorLayout layout{start, {}, {1}, {static_cast<int>(box[0]), static_cast<int>(box[1])}};
    for (int d = 0; d < 3; ++d) {
        if (!extent[d] || extent[d] >> 32 || !box[d] || box[d] > 256 || steps[d] != 1) return INVALID_VALUE;
        if (d < 2 && (!strides[d] || strides[d] % 16 || strides[d] >> 40)) return INVALID_VALUE;
        layout.extent[d] = static_cast<int64_t>(extent[d]);
        if (d < 2) layout.step[d + 1] = static_cast<int64_t>(strides[d]) / emulator::ELEMENT_BYTES;
    }
    if (box[0] * emulator::ELEMENT_BYTES > 128 || box[2] != 1) return INVALID_VALUE;
    memcpy(map, &layout, sizeof layout);
    return SUCCESS;
}

// NVRTC asks a driver that it finds for its inner tables: there are none.
DRIVER_CALL cuGetExportTable(const void**, const void*) {
    return NOT_FOUND;
}

DRIVER_CALL cuGetErrorName(int code, const char** name) {
    switch (code) {
        case INVALID_VALUE: *name = "CUDA_ERROR_INVALID_VALUE"; break;
        case NOT_INITIALIZED: *name = "CUDA_ERROR_NOT_INITIALIZED"; break;
        case INVALID_DEVICE: *name = "CUDA_ERROR_INVALID_DEVICE"; break;
        case INVALID_IMAGE: *name = "CUDA_ERROR_INVALID_IMAGE"; break;
        case INVALID_CONTEXT: *name = "CUDA_ERROR_INVALID_CONTEXT"; break;
        case INVALID_HANDLE: *name = "CUDA_ERROR_INVALID_HANDLE"; break;
        case NOT_FOUND: *name = "CUDA_ERROR_NOT_FOUND"; break;
        case CAPTURE_UNSUPPORTED: *name = "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"; break;
        case LAUNCH_FAILED: *name = last_failure; break;
        default: return INVALID_VALUE;
    }
    return SUCCESS;
}

// What tests ask of the driver and tell it.
extern "C" __attribute__((visibility("default"))) long emulator_launches() {
    return launches;
}

// Launches of kernels whose name begins so.
extern "C" __attribute__((visibility("default"))) long emulator_launches_of(const char* prefix) {
    long count = 0;
    for (const auto& [name, launched] : launched_by_name)
        if (!name.compare(0, strlen(prefix), prefix)) count += launched;
    return count;
}

extern "C" __attribute__((visibility("default"))) long emulator_loads() {
    return loads;
}

extern "C" __attribute__((visibility("default"))) long emulator_updates() {
    return updates;
}

extern "C" __attribute__((visibility("default"))) int emulator_current_device() {
    return current_device;
}

extern "C" __attribute__((visibility("default"))) void emulator_begin_capture() {
    graph.clear();
    capturing = true;
}

extern "C" __attribute__((visibility("default"))) long emulator_end_capture() {
    capturing = false;
    return static_cast<long>(graph.size());
}

// Runs the launches of a captured graph from number `first` to before `last`.
DRIVER_CALL emulator_replay_some(long first, long last) {
    if (first < 0 || first > last || last > static_cast<long>(graph.size())) return INVALID_VALUE;
    for (long i = first; i < last; ++i) {
        if (const int failed = run(graph[i])) return failed;
    }
    return SUCCESS;
}

DRIVER_CALL emulator_replay() {
    return emulator_replay_some(0, static_cast<long>(graph.size()));
}
