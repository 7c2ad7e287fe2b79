// An NVRTC that compiles nothing: of the version MAJOR.MINOR, it notes what it is asked for in the file that
// FAKE_NVRTC_LOG names, takes FAKE_NVRTC_MILLISECONDS, and makes the head of an image that the emulated driver takes. It
// does not know the architecture that FAKE_NVRTC_UNKNOWN names.
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID_OPTION = 5, HEAD_BYTES = 64, CUDA_MACHINE = 190 };

struct Program {
    char name[64], architecture[32];
};

int nvrtcVersion(int* major, int* minor) {
    *major = MAJOR;
    *minor = MINOR;
    return SUCCESS;
}

int nvrtcCreateProgram(struct Program** program, const char* text, const char* name, int headers, const char** texts,
                       const char** names) {
    *program = calloc(1, sizeof **program);
    strncpy((*program)->name, name, 63);
    return text && headers > 0 && texts && names ? SUCCESS : INVALID_OPTION;
}

int nvrtcCompileProgram(struct Program* program, int count, const char** options) {
    const char* option = "--gpu-architecture=";
    for (int i = 0; i < count; ++i)
        if (!strncmp(options[i], option, strlen(option)))
            strncpy(program->architecture, options[i] + strlen(option), 31);
    const char *log = getenv("FAKE_NVRTC_LOG"), *slow = getenv("FAKE_NVRTC_MILLISECONDS");
    char line[160];
    const int length =
        snprintf(line, sizeof line, "%d.%d %s %s\n", MAJOR, MINOR, program->name, program->architecture);
    if (log) {
        const int file = open(log, O_WRONLY | O_CREAT | O_APPEND, 0600);
        if (write(file, line, length) != length) abort();
        close(file);
    }
    if (slow) usleep(1000 * atoi(slow));
    const char* unknown = getenv("FAKE_NVRTC_UNKNOWN");
    return unknown && !strcmp(unknown, program->architecture) ? INVALID_OPTION : SUCCESS;
}

int nvrtcGetCUBINSize(struct Program* program, size_t* size) {
    *size = program ? HEAD_BYTES : 0;
    return SUCCESS;
}

int nvrtcGetCUBIN(struct Program* program, char* to) {
    const uint16_t machine = CUDA_MACHINE;
    const uint32_t flags = (uint32_t)atoi(program->architecture + strlen("sm_")) << 8;
    memset(to, 0, HEAD_BYTES);
    memcpy(to, "\x7f" "ELF", 4);
    memcpy(to + 18, &machine, sizeof machine);
    memcpy(to + 48, &flags, sizeof flags);
    return SUCCESS;
}

static int ptx(struct Program* program, char* to, size_t size) {
    return snprintf(to, size, "//\n.target sm_%s\n", program->architecture + strlen("compute_")) + 1;
}

int nvrtcGetPTXSize(struct Program* program, size_t* size) {
    *size = ptx(program, NULL, 0);
    return SUCCESS;
}

int nvrtcGetPTX(struct Program* program, char* to) {
    ptx(program, to, 64);
    return SUCCESS;
}

static const char said[] = "this architecture is not known";

int nvrtcGetProgramLogSize(struct Program* program, size_t* size) {
    *size = program ? sizeof said : 0;
    return SUCCESS;
}

int nvrtcGetProgramLog(struct Program* program, char* to) {
    memcpy(to, said, sizeof said);
    return program ? SUCCESS : INVALID_OPTION;
}

int nvrtcDestroyProgram(struct Program** program) {
    free(*program);
    *program = NULL;
    return SUCCESS;
}

const char* nvrtcGetErrorString(int code) {
    return code == INVALID_OPTION ? "NVRTC_ERROR_INVALID_OPTION" : "NVRTC_SUCCESS";
}
