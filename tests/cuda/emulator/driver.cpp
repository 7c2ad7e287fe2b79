// A driver without a device, as libcuda.so.1: memory of the device is memory of the host, and kernels run on the
// emulator, at once or when a captured graph is replayed. Has the calls that the package makes, and their rules.
// Whatever is launched is taken to use the same memory: a launch has to come after all that streams were given before.
#include "tensor_copies.h"
#include <dlfcn.h>
#include <map>
#include <string>
#include <vector>

#define DRIVER_CALL extern "C" __attribute__((visibility("default"))) int

// The version of CUDA whose driver this is, as 12040 for 12.4: older ones have no symbol of what came later.
#ifndef DRIVER_VERSION
#define DRIVER_VERSION 13000
#endif

namespace {

enum Result {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    NOT_INITIALIZED = 3,
    INVALID_DEVICE = 101,
    INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201,
    NO_BINARY = 209,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    LAUNCH_FAILED = 719,
    CAPTURE_UNSUPPORTED = 900,
    CAPTURE_IMPLICIT = 906,
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

// How many launches and replays a stream was given, and which of other streams come before what it is given next.
struct Stream {
    long given, launches;
    std::map<void*, long> after;
};

bool initialized, capturing;
thread_local int current_device = -1;
int contexts[DEVICES];  // how often each was retained
std::map<std::string, Kernel> kernels[DEVICES];
std::vector<void*> libraries;
std::vector<Recorded> graph;
std::map<void*, Stream> streams{{nullptr, {}}};
void* capturing_on;
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

// Compute capability, as 90 for 9.0; below 0 the driver does not know it.
int capability() {
    const char* said = getenv("OXIDION_EMULATED_CAPABILITY");
    return said ? atoi(said) : 90;
}

// Whether an image is an ELF for CUDA devices of the same major capability, with the same minor one or a lower, or PTX of a
// version of CUDA and for an architecture that are not newer.
bool runs_here(const void* image) {
    constexpr int FORM_AT = 7, MACHINE_AT = 18, FLAGS_AT = 48, CUDA_MACHINE = 190, OLDER_FORM = 0x33;
    const char* text = static_cast<const char*>(image);
    if (memcmp(text, "\x7f" "ELF", 4)) {
        const char* target = strstr(text, ".target sm_");
        return target && !getenv("OXIDION_EMULATED_NO_PTX") && atoi(target + strlen(".target sm_")) <= capability();
    }
    uint16_t machine;
    uint32_t flags;
    memcpy(&machine, text + MACHINE_AT, sizeof machine);
    memcpy(&flags, text + FLAGS_AT, sizeof flags);
    const int built_for = (text[FORM_AT] == OLDER_FORM ? flags : flags >> 8) & 255;
    return machine == CUDA_MACHINE && built_for / 10 == capability() / 10 && built_for <= capability();
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

bool is_capturing(void* stream) {
    return capturing && stream == capturing_on;
}

// Has a stream wait for what another was given.
void wait_for(Stream& stream, void* other) {
    auto reach = [&](void* name, long count) {
        if (stream.after[name] < count) stream.after[name] = count;
    };
    const Stream before = streams[other];
    for (const auto& [name, count] : before.after) reach(name, count);
    reach(other, before.given);
}

// Gives a stream something to do. Its own order is that in which it was given; that among streams has to be said.
int give(void* name, const char* what) {
    Stream& stream = streams[name];
    for (const auto& [other, state] : streams) {
        if (other == name || stream.after[other] >= state.given) continue;
        snprintf(last_failure, sizeof last_failure, "%s on stream %ld: what stream %ld was given may still run", what,
                 reinterpret_cast<long>(name), reinterpret_cast<long>(other));
        return LAUNCH_FAILED;
    }
    ++stream.given;
    return SUCCESS;
}

}  // namespace

DRIVER_CALL cuInit(unsigned flags) {
    if (flags) return INVALID_VALUE;
    if (!initialized) open_libraries();
    initialized = true;
    return SUCCESS;
}

// Who asks decides: torch's own runtime is to find no driver here, and then says nothing.
DRIVER_CALL cuDriverGetVersion(int* version) {
    Dl_info caller;
    const bool ours = dladdr(__builtin_return_address(0), &caller) && strstr(caller.dli_fname, "_oxidion");
    *version = ours ? DRIVER_VERSION : 0;
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
    if (attribute != 16 && capability() < 0) return INVALID_VALUE;
    static const char* many = getenv("OXIDION_EMULATED_MULTIPROCESSORS");
    static const int multiprocessors = many ? atoi(many) : MULTIPROCESSORS;
    // Multiprocessors, compute capability major and minor.
    *value = attribute == 16 ? multiprocessors : attribute == 75 ? capability() / 10 : capability() % 10;
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

DRIVER_CALL cuStreamIsCapturing(void* stream, int* status) {
    if (!streams.count(stream)) return INVALID_HANDLE;
    *status = is_capturing(stream);
    return SUCCESS;
}

// A node is its place in the graph, counted from 1.
static int captured(void* stream, int* status, void*** nodes, size_t* count) {
    if (!streams.count(stream)) return INVALID_HANDLE;
    static void* last;
    last = reinterpret_cast<void*>(graph.size());
    *status = is_capturing(stream);
    *nodes = &last;
    *count = graph.empty() || !*status ? 0 : 1;
    return SUCCESS;
}

#if DRIVER_VERSION >= 11030
DRIVER_CALL cuStreamGetCaptureInfo_v2(void* stream, int* status, unsigned long*, void**, void*** nodes,
                                      size_t* count) {
    return captured(stream, status, nodes, count);
}
#endif

#if DRIVER_VERSION >= 12030
DRIVER_CALL cuStreamGetCaptureInfo_v3(void* stream, int* status, unsigned long*, void**, void*** nodes, void**,
                                      size_t* count) {
    return captured(stream, status, nodes, count);
}
#endif

struct NodeParameters {
    void* function;
    unsigned blocks, blocks_y, blocks_z, threads, threads_y, threads_z, shared;
    void** parameters;
    void** extra;
    void* kern;
    void* context;
};

#if DRIVER_VERSION >= 12000 && !defined(WITHOUT_PARAMETERS_OF_GRAPHS)
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
#endif

DRIVER_CALL cuModuleLoadData(void** module, const void* image) {
    if (current_device < 0) return INVALID_CONTEXT;
    if (capturing) return CAPTURE_UNSUPPORTED;
    static long refusals = getenv("OXIDION_EMULATED_REFUSALS") ? atol(getenv("OXIDION_EMULATED_REFUSALS")) : 0;
    if (!runs_here(image)) return NO_BINARY;
    if (refusals-- > 0) return INVALID_IMAGE;
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
                           unsigned threads_y, unsigned threads_z, unsigned shared, void* stream, void** parameters,
                           void**) {
    if (!function || !streams.count(stream)) return INVALID_HANDLE;
    if (capturing && stream != capturing_on) return CAPTURE_IMPLICIT;
    Kernel& kernel = *static_cast<Kernel*>(function);
    if (current_device < 0 || &kernels[current_device][kernel.name] != &kernel) return INVALID_CONTEXT;
    if (!blocks || blocks_y != 1 || blocks_z != 1 || !threads || threads > emulator::MAX_THREADS) return INVALID_VALUE;
    if (threads_y != 1 || threads_z != 1 || shared > kernel.shared_limit) return INVALID_VALUE;
    const auto bytes = static_cast<unsigned char*>(parameters[0]);
    const emulator::Launch how{static_cast<int>(blocks), static_cast<int>(threads), ++seed, shared};
    const Recorded what{&kernel, how, {bytes, bytes + kernel.parameter_bytes}};
    ++launches;
    ++launched_by_name[kernel.name];
    ++streams[stream].launches;
    if (capturing) {
        graph.push_back(what);
        return SUCCESS;
    }
    const int refused = give(stream, kernel.name.c_str());
    return refused ? refused : run(what);
}

#if DRIVER_VERSION >= 12000
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
#endif

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
        case NO_BINARY: *name = "CUDA_ERROR_NO_BINARY_FOR_GPU"; break;
        case INVALID_HANDLE: *name = "CUDA_ERROR_INVALID_HANDLE"; break;
        case NOT_FOUND: *name = "CUDA_ERROR_NOT_FOUND"; break;
        case CAPTURE_UNSUPPORTED: *name = "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"; break;
        case CAPTURE_IMPLICIT: *name = "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT"; break;
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

// Launches that were given to a stream, also those that were captured.
extern "C" __attribute__((visibility("default"))) long emulator_launches_on(void* stream) {
    return streams.count(stream) ? streams[stream].launches : -1;
}

// A stream that waits for no other. The default one is 0.
extern "C" __attribute__((visibility("default"))) long emulator_make_stream() {
    const long number = static_cast<long>(streams.size());
    streams[reinterpret_cast<void*>(number)] = {};
    return number;
}

extern "C" __attribute__((visibility("default"))) void emulator_wait(void* stream, void* other) {
    wait_for(streams[stream], other);
}

// The host waits for the device: all streams are after everything.
extern "C" __attribute__((visibility("default"))) void emulator_synchronize() {
    for (auto& [name, stream] : streams)
        for (const auto& [other, state] : streams) stream.after[other] = state.given;
}

extern "C" __attribute__((visibility("default"))) void emulator_begin_capture_on(void* stream) {
    graph.clear();
    capturing = true;
    capturing_on = stream;
}

extern "C" __attribute__((visibility("default"))) void emulator_begin_capture() {
    emulator_begin_capture_on(nullptr);
}

extern "C" __attribute__((visibility("default"))) long emulator_end_capture() {
    capturing = false;
    return static_cast<long>(graph.size());
}

// Runs the launches of a captured graph from number `first` to before `last`.
DRIVER_CALL emulator_replay_some_on(void* stream, long first, long last) {
    if (first < 0 || first > last || last > static_cast<long>(graph.size())) return INVALID_VALUE;
    if (const int refused = give(stream, "a graph")) return refused;
    for (long i = first; i < last; ++i) {
        if (const int failed = run(graph[i])) return failed;
    }
    return SUCCESS;
}

DRIVER_CALL emulator_replay() {
    return emulator_replay_some_on(nullptr, 0, static_cast<long>(graph.size()));
}
