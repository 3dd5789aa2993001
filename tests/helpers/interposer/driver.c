/* Fake a CUDA driver without a device, for tests of the interposer: record, refuse or delay launches.
 *
 * Built as libcuda.so.1. cu* functions have the driver's ABI; tests control the driver by fake_* functions.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef int CUresult;
enum { OK = 0, INVALID_VALUE = 1, INVALID_CONTEXT = 201, INVALID_HANDLE = 400, CAPTURE_IMPLICIT = 906 };
enum { DEVICES = 2, RECORDS = 1 << 16 };

enum tag { FUNCTION = 0xF0, KERNEL = 0xCE };

struct function {
    enum tag tag;
    const char *name;
    int registers, shared, cluster;
    _Atomic int most_dynamic, refuse_above, sets;
    _Atomic long slow; /* ns */
    _Atomic long launches;
};

struct kernel {
    enum tag tag;
    struct function *functions[DEVICES];
};

struct stream {
    _Atomic int capturing;
};

struct record {
    void *handle, *stream, *parameters, *extra;
    uint32_t grid[3], block[3], shared, per_thread, ex, attributes;
    int result;
};

/* By device: an H200, and something smaller. CUdevice_attribute and its value. */
static const int ATTRIBUTES[DEVICES][7][2] = {
    {{16, 132}, {106, 32}, {39, 2048}, {82, 65536}, {81, 233472}, {111, 1024}, {97, 232448}},
    {{16, 84}, {106, 16}, {39, 1536}, {82, 65536}, {81, 102400}, {111, 1024}, {97, 101376}},
};
static int contexts[DEVICES];
static _Thread_local int *current = contexts;
static struct record records[RECORDS];
static _Atomic unsigned recorded;
static _Atomic int silent, implicit_capture, thread_capture, refuse_sets;

/* ---- for tests --------------------------------------------------------------------------- */

void *fake_function(const char *name, int registers, int shared, int cluster) {
    struct function *made = calloc(1, sizeof *made);
    *made = (struct function){FUNCTION, strdup(name), registers, shared, cluster, 49152 - shared, 1 << 30, 0, 0, 0};
    return made;
}

void *fake_kernel(void *first, void *second) {
    struct kernel *made = calloc(1, sizeof *made);
    *made = (struct kernel){KERNEL, {first, second}};
    return made;
}

/* Reuse the handle for another function, as when a module is unloaded and another is loaded. */
void fake_become(struct function *function, const char *name, int registers, int shared) {
    function->name = strdup(name);
    function->registers = registers;
    function->shared = shared;
    function->refuse_above = 1 << 30;
    function->most_dynamic = 49152 - shared;
}

/* The context of a device, NULL for -1. */
void *fake_context(int device) { return device < 0 ? NULL : &contexts[device]; }
void fake_use(int device) { current = fake_context(device); }

void *fake_stream(int capturing) {
    struct stream *made = calloc(1, sizeof *made);
    made->capturing = capturing;
    return made;
}

void fake_refuse_above(struct function *function, int dynamic) { function->refuse_above = dynamic; }
void fake_slow(struct function *function, long ns) { function->slow = ns; }
int fake_sets(struct function *function) { return function->sets; }
long fake_launches(struct function *function) { return function->launches; }
void fake_refuse_sets(int on) { refuse_sets = on; }
void fake_silent(int on) { silent = on; }
void fake_capture(int implicit, int thread) {
    implicit_capture = implicit;
    thread_capture = thread;
}
unsigned fake_recorded(void) { return recorded; }
struct record *fake_record(unsigned i) { return &records[i % RECORDS]; }

/* ---- the driver -------------------------------------------------------------------------- */

CUresult cuInit(unsigned flags) { return flags ? INVALID_VALUE : OK; }

CUresult cuDeviceGetAttribute(int *value, int attribute, int device) {
    for (int i = 0; device < DEVICES && i < 7; i++)
        if (ATTRIBUTES[device][i][0] == attribute) {
            *value = ATTRIBUTES[device][i][1];
            return OK;
        }
    return INVALID_VALUE;
}

CUresult cuCtxGetCurrent(void **context) {
    *context = current;
    return OK;
}

CUresult cuCtxGetDevice(int *device) {
    if (!current)
        return INVALID_CONTEXT;
    *device = current - contexts;
    return OK;
}

CUresult cuFuncGetAttribute(int *value, int attribute, struct function *function) {
    if (function->tag != FUNCTION)
        return INVALID_HANDLE;
    *value = attribute == 1    ? function->shared
             : attribute == 4  ? function->registers
             : attribute == 8  ? function->most_dynamic
             : attribute == 10 ? 0
             : attribute == 11 ? function->cluster
                               : -1;
    return *value < 0 ? INVALID_VALUE : OK;
}

CUresult cuFuncSetAttribute(struct function *function, int attribute, int value) {
    if (function->tag != FUNCTION)
        return INVALID_HANDLE;
    function->sets++;
    if (refuse_sets || attribute != 8 || function->shared + value > ATTRIBUTES[current - contexts][6][1])
        return INVALID_VALUE;
    function->most_dynamic = value;
    return OK;
}

CUresult cuFuncGetName(const char **name, struct function *function) {
    if (function->tag != FUNCTION)
        return INVALID_HANDLE;
    *name = function->name;
    return OK;
}

CUresult cuKernelGetFunction(void **function, struct kernel *kernel) {
    if (kernel->tag != KERNEL || !current)
        return INVALID_HANDLE;
    *function = kernel->functions[current - contexts];
    return OK;
}

CUresult cuStreamIsCapturing(struct stream *stream, int *capturing) {
    if (!stream && implicit_capture)
        return CAPTURE_IMPLICIT;
    *capturing = (uintptr_t)stream > 2 ? stream->capturing : (uintptr_t)stream == 2 ? thread_capture : 0;
    return OK;
}

static CUresult launch(void *handle, struct record record) {
    struct function *function = handle;
    if (function->tag == KERNEL)
        function = ((struct kernel *)handle)->functions[current - contexts];
    record.handle = handle;
    int dynamic = record.shared;
    if (dynamic > function->most_dynamic || dynamic > function->refuse_above)
        record.result = INVALID_VALUE;
    if (function->slow)
        nanosleep(&(struct timespec){0, function->slow}, NULL);
    /* Relaxed: otherwise each launch would synchronise the threads and hide races from the sanitizer. */
    atomic_fetch_add_explicit(&function->launches, 1, memory_order_relaxed);
    records[atomic_fetch_add_explicit(&recorded, 1, memory_order_relaxed) % RECORDS] = record;
    return record.result;
}

static CUresult launch_plain(int per_thread, void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                             unsigned by, unsigned bz, unsigned shared, void *stream, void *parameters,
                             void *extra) {
    if (silent)
        return OK;
    return launch(f, (struct record){.stream = stream,
                                     .parameters = parameters,
                                     .extra = extra,
                                     .grid = {gx, gy, gz},
                                     .block = {bx, by, bz},
                                     .shared = shared,
                                     .per_thread = per_thread});
}

CUresult cuLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                        unsigned shared, void *stream, void **parameters, void **extra) {
    return launch_plain(0, f, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra);
}

CUresult cuLaunchKernel_ptsz(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                             unsigned bz, unsigned shared, void *stream, void **parameters, void **extra) {
    return launch_plain(1, f, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra);
}

CUresult cuLaunchCooperativeKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                                   unsigned bz, unsigned shared, void *stream, void **parameters) {
    return launch_plain(0, f, gx, gy, gz, bx, by, bz, shared, stream, parameters, NULL);
}

struct config {
    unsigned grid[3], block[3], shared;
    void *stream, *attributes;
    unsigned attribute_count;
};

static CUresult launch_ex(int per_thread, const struct config *config, void *f, void *parameters, void *extra) {
    if (!config)
        return INVALID_VALUE;
    struct record record = {.stream = config->stream,
                            .parameters = parameters,
                            .extra = extra,
                            .shared = config->shared,
                            .per_thread = per_thread,
                            .ex = 1,
                            .attributes = config->attribute_count};
    memcpy(record.grid, config->grid, sizeof record.grid);
    memcpy(record.block, config->block, sizeof record.block);
    return launch(f, record);
}

CUresult cuLaunchKernelEx(const struct config *config, void *f, void **parameters, void **extra) {
    return launch_ex(0, config, f, parameters, extra);
}

CUresult cuLaunchKernelEx_ptsz(const struct config *config, void *f, void **parameters, void **extra) {
    return launch_ex(1, config, f, parameters, extra);
}

CUresult cuCtxSynchronize(void) { return OK; }
CUresult cuStreamSynchronize(void *stream) { return (uintptr_t)stream < 16 ? OK : INVALID_HANDLE; }
CUresult cuStreamSynchronize_ptsz(void *stream) { return cuStreamSynchronize(stream); }

CUresult cuModuleUnload(void *module) { return module ? OK : INVALID_HANDLE; }
CUresult cuLibraryUnload(void *library) { return library ? OK : INVALID_HANDLE; }

CUresult cuGetExportTable(const void **table, const void *id) {
    *table = id;
    return OK;
}

CUresult cuGetProcAddress_v2(const char *, void **, int, uint64_t, int *);

CUresult cuGetProcAddress(const char *name, void **found, int cuda, uint64_t flags) {
    static void *self;
    char full[64] = "";
    strncat(full, name, 50);
    if ((!strncmp(name, "cuLaunchKernel", 14) || !strcmp(name, "cuStreamSynchronize")) && flags & 2)
        strcat(full, "_ptsz");
    if (!strcmp(name, "cuGetProcAddress") && cuda >= 12000)
        strcat(full, "_v2");
    if (!self)
        self = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    /* dlvsym: a driver finds its own functions, whatever interposes dlsym. */
    *found = self ? dlvsym(self, full, "FAKE") : NULL;
    return *found ? OK : INVALID_VALUE;
}

CUresult cuGetProcAddress_v2(const char *name, void **found, int cuda, uint64_t flags, int *status) {
    if (status)
        *status = 0;
    return cuGetProcAddress(name, found, cuda, flags);
}
