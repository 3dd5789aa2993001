/* Residency caps for kernels of any library, closed ones too.
 *
 * Preloaded into a worker, this library defines dlsym. A caller that asks for the CUDA driver's launch functions,
 * through dlsym or cuGetProcAddress, is given the ones below. They raise the dynamic shared memory of a launch,
 * so that no more blocks of that kernel fit on an SM than the policy says. All else goes to the driver as it
 * came. The policy is `gpurt_residency`, which overlap/interposer.py mirrors and writes.
 *
 * It also keeps threads in the context that they were given, see `gpurt_instead`.
 *
 * No CUDA headers: the little of the driver's ABI that is needed stands here, from cuda.h of CUDA 13.0.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define LIKELY(condition) __builtin_expect(!!(condition), 1)
#define RELAXED memory_order_relaxed
/* The sanitizers and the loader ask for symbols before any instrumentation can run. */
#define BARE __attribute__((no_sanitize("address", "thread", "undefined")))

typedef int CUresult; /* 0: success */
typedef void *CUfunction, *CUstream, *CUcontext;

enum { MAX_DYNAMIC_SHARED_SIZE = 8 }; /* of CUfunction_attribute; also: */
enum { SHARED_SIZE = 1, REGISTERS = 4, CLUSTER_SIZE_MUST_BE_SET = 10, REQUIRED_CLUSTER_WIDTH = 11 };
enum { COOPERATIVE = 2, CLUSTER_DIMENSION = 4, PREFERRED_CLUSTER_DIMENSION = 11 }; /* CUlaunchAttributeID */
#define PER_THREAD_STREAM ((CUstream)2)
#define WARP 32u

struct attribute { /* CUlaunchAttribute */
    uint32_t id, pad;
    char value[64];
};

struct config { /* CUlaunchConfig */
    unsigned grid[3], block[3], shared;
    CUstream stream;
    const struct attribute *attributes;
    unsigned attribute_count;
};

/* ---- what Python shares ------------------------------------------------------------------ */

enum { LAYOUT = 2, ENTRIES = 1024, KERNELS = 8192, NAME = 256, DEVICES = 64, SHARDS = 8 };

/* Why a launch was left alone; a capped one is CAPPED. */
enum reason {
    CAPPED,
    NO_CAP,      /* the policy has none for this kernel */
    COOPERATING, /* blocks that wait for each other */
    CLUSTER,
    CAPTURED,    /* goes into a graph */
    SMALL,       /* no SM gets more blocks than the cap */
    NATURAL,     /* no more than the cap fit anyway */
    NO_OPT_IN,   /* more than 48 KiB were not granted */
    REFUSED,     /* the driver refused this kernel once */
    UNKNOWN,     /* the driver does not say what the kernel needs, or there are too many kernels */
    CHANGING,    /* the policy is being written */
    REASONS = 16
};

struct limits { /* of an SM, in the order of ATTRIBUTES */
    uint32_t sms, blocks, threads, registers, shared, reserved, opt_in;
};

/* All that a launch needs to know of its kernel, read and written in one piece. */
struct decision {
    uint64_t version : 26, cap : 8, warps : 8, shared : 18, reason : 4;
};

struct kernel {
    CUfunction handle; /* what is launched: a CUfunction or a CUkernel */
    CUcontext context;
    const struct limits *_Atomic limits;
    _Atomic(struct decision) decision;
    _Atomic uint32_t allowed; /* the most dynamic shared memory that was opted in to */
    bool raised, refused;     /* these and what follows: under the lock */
    _Atomic uint64_t launches, capped;
    CUfunction function; /* the same as a CUfunction */
    uint64_t id;         /* FNV-1a of the whole name */
    uint32_t registers, shared;
    char name[NAME];
};

struct entry {
    _Atomic uint64_t id;
    _Atomic uint64_t cap; /* 0: none */
};

struct residency {
    uint32_t layout, size;
    _Atomic uint32_t on;
    _Atomic uint32_t version; /* odd while the policy is written */
    _Atomic uint32_t cap;     /* of kernels that have no entry; 0: none */
    _Atomic uint32_t entries;
    struct entry table[ENTRIES];
    _Atomic uint64_t counts[SHARDS][REASONS]; /* so that threads do not wait for each other */
    _Atomic uint64_t repeated;
    _Atomic uint32_t kernel_count;
    struct kernel kernels[KERNELS];
};

EXPORT struct residency gpurt_residency;
#define policy gpurt_residency

/* Called before Python writes the table, and after it has: no launch goes by half of it. */
EXPORT void gpurt_residency_changed(void) {
    atomic_fetch_add(&policy.version, 1);
    atomic_thread_fence(memory_order_seq_cst);
}

/* ---- the driver -------------------------------------------------------------------------- */

static struct driver {
    CUresult (*ctx_get_current)(CUcontext *);
    CUresult (*ctx_get_device)(int *);
    CUresult (*device_get_attribute)(int *, int, int);
    CUresult (*func_get_attribute)(int *, int, CUfunction);
    CUresult (*func_set_attribute)(CUfunction, int, int);
    CUresult (*stream_is_capturing)(CUstream, int *);
    CUresult (*kernel_get_function)(CUfunction *, void *); /* since CUDA 12.0 */
    CUresult (*func_get_name)(const char **, CUfunction);  /* since CUDA 12.3 */
} driver;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static void lock(void) { pthread_mutex_lock(&mutex); }
static void unlock(void) { pthread_mutex_unlock(&mutex); }

__attribute__((constructor)) static void begin(void) {
    policy.layout = LAYOUT;
    policy.size = sizeof policy;
    pthread_atfork(lock, unlock, unlock); /* a thread may fork while another holds it */
}

typedef void *look_up(void *, const char *);
static look_up *next_dlsym;

BARE static void find_dlsym(void) {
    /* That of glibc by its version: since 2.34, and before that on x86-64 and on aarch64. */
    static const char *const versions[] = {"GLIBC_2.34", "GLIBC_2.2.5", "GLIBC_2.17"};
    look_up *libc = NULL;
    for (int i = 0; i < 3 && !libc; i++)
        *(void **)&libc = dlvsym(RTLD_NEXT, "dlsym", versions[i]);
    /* And by that the next one, which is another interposer's if there is one. */
    *(void **)&next_dlsym = libc(RTLD_NEXT, "dlsym");
}

static bool find_driver(struct driver *found) {
    void *library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    if (!library)
        return false;
    find_dlsym();
    *(void **)&found->ctx_get_current = next_dlsym(library, "cuCtxGetCurrent");
    *(void **)&found->ctx_get_device = next_dlsym(library, "cuCtxGetDevice");
    *(void **)&found->device_get_attribute = next_dlsym(library, "cuDeviceGetAttribute");
    *(void **)&found->func_get_attribute = next_dlsym(library, "cuFuncGetAttribute");
    *(void **)&found->func_set_attribute = next_dlsym(library, "cuFuncSetAttribute");
    *(void **)&found->stream_is_capturing = next_dlsym(library, "cuStreamIsCapturing");
    *(void **)&found->kernel_get_function = next_dlsym(library, "cuKernelGetFunction");
    *(void **)&found->func_get_name = next_dlsym(library, "cuFuncGetName");
    return found->ctx_get_current && found->ctx_get_device && found->device_get_attribute &&
           found->func_get_attribute && found->func_set_attribute && found->stream_is_capturing;
}

/* Python may ask before there is one. */
static bool have_driver(void) {
    static _Atomic bool have;
    if (LIKELY(atomic_load_explicit(&have, memory_order_acquire)))
        return true;
    struct driver found;
    if (!find_driver(&found)) /* not under our lock: the loader has one too */
        return false;
    lock();
    if (!atomic_load_explicit(&have, RELAXED))
        driver = found;
    atomic_store_explicit(&have, true, memory_order_release);
    unlock();
    return true;
}

/* ---- what fits on an SM ------------------------------------------------------------------ */

/* CUdevice_attribute, in the order of struct limits. */
static const int ATTRIBUTES[] = {16, 106, 39, 82, 81, 111, 97};
enum { LIMITS = sizeof ATTRIBUTES / sizeof *ATTRIBUTES };
/* Registers are handed out to warps, and shared memory to blocks, in units; an SM has four parts. */
enum { REGISTER_UNIT = 256, SHARED_UNIT = 128, PARTS = 4 };

static bool read_limits(int device, struct limits *limits) {
    uint32_t *fields = (uint32_t *)limits;
    for (int i = 0; i < LIMITS; i++)
        if (driver.device_get_attribute((int *)&fields[i], ATTRIBUTES[i], device))
            return false;
    return true;
}

/* For Python: 0, or why the limits of a device cannot be told (-1: no driver). */
EXPORT int gpurt_residency_limits(int device, struct limits *limits) {
    if (!have_driver())
        return -1;
    return read_limits(device, limits) ? 0 : 1;
}

static const struct limits *limits_of_current(void) {
    static struct limits known[DEVICES];
    int device;
    if (driver.ctx_get_device(&device) || device < 0 || device >= DEVICES)
        return NULL;
    if (!known[device].sms && !read_limits(device, &known[device]))
        known[device].sms = 0;
    return known[device].sms ? &known[device] : NULL;
}

static uint64_t round_up(uint64_t n, uint64_t unit) { return (n + unit - 1) / unit * unit; }

static unsigned most_warps(const struct limits *limits, unsigned registers) {
    unsigned each = round_up(registers * WARP, REGISTER_UNIT), warps = limits->threads / WARP;
    unsigned by_registers = each ? PARTS * (limits->registers / PARTS / each) : warps;
    return by_registers < warps ? by_registers : warps;
}

/* Whether an SM holds so many blocks. */
static bool hold(const struct limits *limits, struct decision kernel, unsigned blocks, uint64_t threads,
                 uint64_t dynamic) {
    return blocks <= limits->blocks && blocks * ((threads + WARP - 1) / WARP) <= kernel.warps &&
           blocks * round_up(kernel.shared + dynamic + limits->reserved, SHARED_UNIT) <= limits->shared;
}

/* Bytes a block, static and dynamic, with which one block more than the cap does not fit. */
static unsigned shared_for(const struct limits *limits, unsigned cap) {
    return (limits->shared / (cap + 1) / SHARED_UNIT + 1) * SHARED_UNIT - limits->reserved;
}

/* ---- kernels ----------------------------------------------------------------------------- */

enum { SLOTS = 2 * KERNELS };
static _Atomic uint16_t slots[SLOTS]; /* by handle and context: the number of the kernel, from 1 */

static unsigned slot_of(CUfunction handle, CUcontext context) {
    uint64_t mixed = ((uintptr_t)handle >> 4 ^ (uintptr_t)context << 7) * 0x9E3779B97F4A7C15u;
    return mixed >> 50; /* 14 bits */
}
_Static_assert(SLOTS == 1 << 14, "slot_of makes as many bits");

static struct kernel *find(CUfunction handle, CUcontext context, unsigned *slot) {
    for (*slot = slot_of(handle, context);; *slot = (*slot + 1) % SLOTS) {
        unsigned number = atomic_load_explicit(&slots[*slot], memory_order_acquire);
        if (!number)
            return NULL;
        struct kernel *kernel = &policy.kernels[number - 1];
        if (LIKELY(kernel->handle == handle && kernel->context == context))
            return kernel;
    }
}

/* Find a kernel, or make it known. Under the lock; NULL when there is no room. */
static struct kernel *add(CUfunction handle, CUcontext context) {
    unsigned slot, count = atomic_load_explicit(&policy.kernel_count, RELAXED);
    struct kernel *kernel = find(handle, context, &slot);
    if (kernel || count == KERNELS)
        return kernel;
    kernel = &policy.kernels[count];
    kernel->handle = handle;
    kernel->context = context;
    atomic_store_explicit(&kernel->decision, (struct decision){.reason = CHANGING}, RELAXED);
    atomic_store_explicit(&policy.kernel_count, count + 1, memory_order_release);
    atomic_store_explicit(&slots[slot], count + 1, memory_order_release);
    return kernel;
}

static uint64_t id_of(const char *name) {
    uint64_t id = 0xCBF29CE484222325u;
    for (; *name; name++)
        id = (id ^ (unsigned char)*name) * 0x100000001B3u;
    return id;
}

/* A handle may have become another function's, once its module was unloaded. */
static void identify(struct kernel *kernel) {
    const char *name = NULL;
    if (!driver.func_get_name || driver.func_get_name(&name, kernel->function) || !name)
        name = "";
    uint64_t id = id_of(name);
    if (id == kernel->id)
        return;
    kernel->id = id;
    kernel->refused = kernel->raised = false;
    atomic_store_explicit(&kernel->launches, 0, RELAXED);
    atomic_store_explicit(&kernel->capped, 0, RELAXED);
    strncpy(kernel->name, name, NAME - 1);
}

static uint8_t cap_of(uint64_t id) {
    unsigned entries = atomic_load_explicit(&policy.entries, memory_order_acquire);
    for (unsigned i = 0; i < entries && i < ENTRIES; i++)
        if (atomic_load_explicit(&policy.table[i].id, memory_order_acquire) == id)
            return atomic_load_explicit(&policy.table[i].cap, memory_order_acquire);
    return atomic_load_explicit(&policy.cap, memory_order_acquire);
}

static bool attribute(const struct kernel *kernel, int which, int *value) {
    return !driver.func_get_attribute(value, which, kernel->function) && *value >= 0;
}

/* A CUkernel, of which attributes cannot be asked, has a function in each context. */
static bool resolve(struct kernel *kernel, int *shared) {
    kernel->function = kernel->handle;
    return attribute(kernel, SHARED_SIZE, shared) ||
           (driver.kernel_get_function && !driver.kernel_get_function(&kernel->function, kernel->handle) &&
            attribute(kernel, SHARED_SIZE, shared));
}

/* Ask the driver and the policy about a kernel. Under the lock. */
static struct decision examine(struct kernel *kernel) {
    struct decision decision = {.reason = UNKNOWN};
    int shared, registers, dynamic, width, must;
    const struct limits *limits = limits_of_current();
    if (!limits || !resolve(kernel, &shared) || !attribute(kernel, REGISTERS, &registers) ||
        !attribute(kernel, MAX_DYNAMIC_SHARED_SIZE, &dynamic))
        return decision;
    identify(kernel);
    atomic_store_explicit(&kernel->limits, limits, RELAXED);
    kernel->shared = shared;
    kernel->registers = registers;
    atomic_store_explicit(&kernel->allowed, dynamic, RELAXED);
    decision.cap = cap_of(kernel->id);
    decision.shared = shared;
    decision.warps = most_warps(limits, registers);
    bool clustered = (attribute(kernel, CLUSTER_SIZE_MUST_BE_SET, &must) && must) ||
                     (attribute(kernel, REQUIRED_CLUSTER_WIDTH, &width) && width);
    decision.reason = kernel->refused ? REFUSED : clustered ? CLUSTER : decision.cap ? CAPPED : NO_CAP;
    return decision;
}

/* Compared in as many bits as a decision has for it; never 0, which is that of a kernel just added. */
static unsigned bits(uint32_t version) { return (version & ((1u << 25) - 1)) | 1u << 25; }

static struct kernel *refresh(CUfunction handle, CUcontext context, struct decision *decision) {
    lock();
    struct kernel *kernel = add(handle, context);
    uint32_t version = atomic_load_explicit(&policy.version, memory_order_acquire);
    *decision = (struct decision){.reason = kernel ? CHANGING : UNKNOWN};
    if (kernel && version % 2 == 0) {
        struct decision fresh = examine(kernel);
        fresh.version = bits(version);
        if (atomic_load_explicit(&policy.version, memory_order_acquire) == version) {
            atomic_store_explicit(&kernel->decision, fresh, memory_order_release);
            *decision = fresh;
        }
    }
    unlock();
    return kernel;
}

/* Opt in to as much as the device has, once: a later cap needs no more, and it is never lowered. */
static bool opt_in(struct kernel *kernel, unsigned dynamic) {
    lock();
    int most = atomic_load_explicit(&kernel->limits, RELAXED)->opt_in - kernel->shared;
    if (!kernel->raised && !driver.func_set_attribute(kernel->function, MAX_DYNAMIC_SHARED_SIZE, most))
        atomic_store_explicit(&kernel->allowed, most, RELAXED);
    kernel->raised = true;
    bool granted = dynamic <= atomic_load_explicit(&kernel->allowed, RELAXED);
    unlock();
    return granted;
}

static void refuse(struct kernel *kernel) {
    lock();
    kernel->refused = true;
    struct decision decision = atomic_load_explicit(&kernel->decision, RELAXED);
    decision.reason = REFUSED;
    atomic_store_explicit(&kernel->decision, decision, memory_order_release);
    unlock();
    atomic_fetch_add_explicit(&policy.repeated, 1, RELAXED);
}

/* ---- a launch ---------------------------------------------------------------------------- */

static void count(enum reason reason) {
    static _Atomic unsigned threads;
    static _Thread_local __attribute__((tls_model("initial-exec"))) unsigned shard;
    if (!shard)
        shard = 1 + atomic_fetch_add_explicit(&threads, 1, RELAXED) % SHARDS;
    atomic_fetch_add_explicit(&policy.counts[shard - 1][reason], 1, RELAXED);
}

struct launch {
    CUfunction handle;
    CUstream stream;
    uint64_t blocks, threads;
    unsigned dynamic;
    struct kernel *kernel; /* once it is known */
};

static enum reason judge(struct launch *launch, unsigned *dynamic) {
    int capturing;
    CUcontext context;
    unsigned slot;
    if (!have_driver() || driver.ctx_get_current(&context) || !context)
        return UNKNOWN;
    if (driver.stream_is_capturing(launch->stream, &capturing) || capturing)
        return CAPTURED;

    struct kernel *kernel = find(launch->handle, context, &slot);
    struct decision decision = {0};
    if (kernel)
        decision = atomic_load_explicit(&kernel->decision, memory_order_acquire);
    uint32_t version = atomic_load_explicit(&policy.version, memory_order_acquire);
    if (decision.version != bits(version))
        kernel = refresh(launch->handle, context, &decision);
    launch->kernel = kernel;
    if (decision.reason != CAPPED)
        return decision.reason;

    const struct limits *limits = atomic_load_explicit(&kernel->limits, RELAXED);
    if (!launch->threads || launch->blocks <= (uint64_t)decision.cap * limits->sms)
        return SMALL;
    if (!hold(limits, decision, decision.cap + 1, launch->threads, launch->dynamic))
        return NATURAL;
    *dynamic = shared_for(limits, decision.cap) - decision.shared;
    if (*dynamic > atomic_load_explicit(&kernel->allowed, RELAXED) && !opt_in(kernel, *dynamic))
        return NO_OPT_IN;
    return CAPPED;
}

/* The dynamic shared memory that a launch shall have. */
static unsigned shape(struct launch *launch) {
    unsigned dynamic = launch->dynamic;
    enum reason reason = judge(launch, &dynamic);
    count(reason);
    if (launch->kernel) {
        atomic_fetch_add_explicit(&launch->kernel->launches, 1, RELAXED);
        if (reason == CAPPED)
            atomic_fetch_add_explicit(&launch->kernel->capped, 1, RELAXED);
    }
    return reason == CAPPED ? dynamic : launch->dynamic;
}

static bool off(void) { return LIKELY(!atomic_load_explicit(&policy.on, RELAXED)); }

static CUstream stream_of(CUstream stream, bool per_thread) {
    return per_thread && !stream ? PER_THREAD_STREAM : stream;
}

static enum reason cooperates(const struct config *config) {
    for (unsigned i = 0; i < config->attribute_count; i++) {
        uint32_t id = config->attributes[i].id;
        if (id == COOPERATIVE)
            return COOPERATING;
        if (id == CLUSTER_DIMENSION || id == PREFERRED_CLUSTER_DIMENSION)
            return CLUSTER;
    }
    return CAPPED;
}

typedef CUresult launch_kernel(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                               CUstream, void **, void **);
typedef CUresult launch_kernel_ex(const struct config *, CUfunction, void **, void **);

/* Of both flavours of the null stream: the legacy one, and one for each thread. */
static _Atomic(launch_kernel *) real_launch[2];
static _Atomic(launch_kernel_ex *) real_launch_ex[2];

#define LAUNCH(name, per_thread)                                                                               \
    static CUresult name(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,       \
                         unsigned bz, unsigned shared, CUstream s, void **parameters, void **extra) {         \
        launch_kernel *real = atomic_load_explicit(&real_launch[per_thread], RELAXED);                        \
        if (off())                                                                                            \
            return real(f, gx, gy, gz, bx, by, bz, shared, s, parameters, extra);                             \
        struct launch launch = {f, stream_of(s, per_thread), (uint64_t)gx * gy * gz, (uint64_t)bx * by * bz,  \
                                shared, NULL};                                                                \
        unsigned dynamic = shape(&launch);                                                                    \
        CUresult result = real(f, gx, gy, gz, bx, by, bz, dynamic, s, parameters, extra);                     \
        if (LIKELY(!result) || dynamic == shared)                                                             \
            return result;                                                                                    \
        refuse(launch.kernel);                                                                                \
        return real(f, gx, gy, gz, bx, by, bz, shared, s, parameters, extra);                                 \
    }

LAUNCH(launch_legacy, 0)
LAUNCH(launch_per_thread, 1)

static CUresult launch_ex(const struct config *config, CUfunction f, void **parameters, void **extra,
                          launch_kernel_ex *real, bool per_thread) {
    enum reason reason = cooperates(config);
    if (reason != CAPPED) {
        count(reason);
        return real(config, f, parameters, extra);
    }
    const unsigned *grid = config->grid, *block = config->block;
    struct launch launch = {f, stream_of(config->stream, per_thread), (uint64_t)grid[0] * grid[1] * grid[2],
                            (uint64_t)block[0] * block[1] * block[2], config->shared, NULL};
    struct config shaped = *config;
    shaped.shared = shape(&launch);
    CUresult result = real(&shaped, f, parameters, extra);
    if (LIKELY(!result) || shaped.shared == config->shared)
        return result;
    refuse(launch.kernel);
    return real(config, f, parameters, extra);
}

#define LAUNCH_EX(name, per_thread)                                                                            \
    static CUresult name(const struct config *config, CUfunction f, void **parameters, void **extra) {        \
        launch_kernel_ex *real = atomic_load_explicit(&real_launch_ex[per_thread], RELAXED);                  \
        if (off() || !config)                                                                                 \
            return real(config, f, parameters, extra);                                                        \
        return launch_ex(config, f, parameters, extra, real, per_thread);                                     \
    }

LAUNCH_EX(launch_ex_legacy, 0)
LAUNCH_EX(launch_ex_per_thread, 1)

/* ---- what makes handles invalid ---------------------------------------------------------- */

typedef CUresult unload(uintptr_t);

/* Before the handles can be another's: so that its next launch asks the driver again. */
#define UNLOAD(name)                                                                                           \
    static _Atomic(unload *) real_##name;                                                                     \
    static CUresult name(uintptr_t what) {                                                                    \
        atomic_fetch_add(&policy.version, 2);                                                                 \
        return atomic_load_explicit(&real_##name, RELAXED)(what);                                             \
    }

UNLOAD(module_unload)
UNLOAD(library_unload)

/* ---- which context is current ------------------------------------------------------------ */

typedef CUresult make_current(CUcontext);

/* What this thread gets in place of the usual context, which much code makes current before it copies or
 * launches: that would leave the order of what the thread has launched before. */
static _Thread_local __attribute__((tls_model("initial-exec"))) CUcontext usual, instead;

EXPORT void gpurt_instead(CUcontext of_usual, CUcontext other) {
    usual = of_usual;
    instead = other;
}

#define MAKE_CURRENT(name)                                                                                     \
    static _Atomic(make_current *) real_##name;                                                               \
    static CUresult name(CUcontext context) {                                                                 \
        return atomic_load_explicit(&real_##name, RELAXED)(context && context == usual ? instead : context);  \
    }

MAKE_CURRENT(set_current)
MAKE_CURRENT(push_current)
MAKE_CURRENT(push_current_before) /* before CUDA 4.0 */

/* ---- who asks for the driver's functions ------------------------------------------------- */

typedef CUresult get_proc_address(const char *, void **, int, uint64_t);
typedef CUresult get_proc_address_v2(const char *, void **, int, uint64_t, int *);

static CUresult get_proc(const char *, void **, int, uint64_t);
static CUresult get_proc_v2(const char *, void **, int, uint64_t, int *);
static _Atomic(get_proc_address *) real_get_proc;
static _Atomic(get_proc_address_v2 *) real_get_proc_v2;

/* What is handed out, and where the driver's own goes, by the flavour of the null stream. */
#define EITHER(what) {what, what}
static const struct {
    const char *name;
    void *ours[2], *real[2];
} wrapped[] = {
    {"cuLaunchKernel", {launch_legacy, launch_per_thread}, {&real_launch[0], &real_launch[1]}},
    {"cuLaunchKernel_ptsz", EITHER(launch_per_thread), EITHER(&real_launch[1])},
    {"cuLaunchKernelEx", {launch_ex_legacy, launch_ex_per_thread}, {&real_launch_ex[0], &real_launch_ex[1]}},
    {"cuLaunchKernelEx_ptsz", EITHER(launch_ex_per_thread), EITHER(&real_launch_ex[1])},
    {"cuCtxSetCurrent", EITHER(set_current), EITHER(&real_set_current)},
    {"cuCtxPushCurrent", EITHER(push_current_before), EITHER(&real_push_current_before)},
    {"cuCtxPushCurrent_v2", EITHER(push_current), EITHER(&real_push_current)},
    {"cuModuleUnload", EITHER(module_unload), EITHER(&real_module_unload)},
    {"cuLibraryUnload", EITHER(library_unload), EITHER(&real_library_unload)},
    {"cuGetProcAddress", EITHER(get_proc), EITHER(&real_get_proc)},
    {"cuGetProcAddress_v2", EITHER(get_proc_v2), EITHER(&real_get_proc_v2)},
};

/* What to hand out for a function that the driver has given. */
static void *wrap(const char *name, void *found, bool per_thread) {
    for (unsigned i = 0; found && i < sizeof wrapped / sizeof *wrapped; i++)
        if (!strcmp(name, wrapped[i].name)) {
            void *ours = wrapped[i].ours[per_thread];
            /* Another interposer may have asked us. */
            if (found != ours)
                atomic_store_explicit((_Atomic(void *) *)wrapped[i].real[per_thread], found, RELAXED);
            return ours;
        }
    return found;
}

enum { PER_THREAD_DEFAULT_STREAM = 2, PUSH_V2_SINCE = 4000, V2_SINCE = 12000 };

static void wrap_at(const char *name, void **found, int cuda, uint64_t flags) {
    /* The name stays the same, but callers of later versions of CUDA are given the second version. */
    bool asking = !strcmp(name, "cuGetProcAddress") && cuda >= V2_SINCE;
    bool pushing = !strcmp(name, "cuCtxPushCurrent") && cuda >= PUSH_V2_SINCE;
    *found = wrap(asking ? "cuGetProcAddress_v2" : pushing ? "cuCtxPushCurrent_v2" : name, *found,
                  !!(flags & PER_THREAD_DEFAULT_STREAM));
}

static CUresult get_proc(const char *name, void **found, int cuda, uint64_t flags) {
    CUresult result = atomic_load_explicit(&real_get_proc, RELAXED)(name, found, cuda, flags);
    if (!result && found)
        wrap_at(name, found, cuda, flags);
    return result;
}

static CUresult get_proc_v2(const char *name, void **found, int cuda, uint64_t flags, int *status) {
    CUresult result = atomic_load_explicit(&real_get_proc_v2, RELAXED)(name, found, cuda, flags, status);
    if (!result && found)
        wrap_at(name, found, cuda, flags);
    return result;
}

/* The C library finds out who is asking, for RTLD_NEXT, by where it returns to: so all that is not the
 * driver's leaves by a jump. */
BARE __attribute__((optimize("O2"))) EXPORT void *dlsym(void *handle, const char *name) {
    if (!next_dlsym)
        find_dlsym();
    if (name[0] != 'c' || name[1] != 'u')
        return next_dlsym(handle, name);
    return wrap(name, next_dlsym(handle, name), false);
}
