/* Residency caps: how much dynamic shared memory a launch gets, so that no more blocks of its kernel fit on an SM
 * than the policy says. overlap/interposer.py does the same arithmetic.
 */
#define _GNU_SOURCE
#include "_interposer.h"

#include <dlfcn.h>
#include <pthread.h>
#include <string.h>

struct residency gpurt_residency;

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

static bool find_driver(struct driver *found) {
    void *library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    if (!library)
        return false;
    look_up *find = gpurt_next_dlsym();
    *(void **)&found->ctx_get_current = find(library, "cuCtxGetCurrent");
    *(void **)&found->ctx_get_device = find(library, "cuCtxGetDevice");
    *(void **)&found->device_get_attribute = find(library, "cuDeviceGetAttribute");
    *(void **)&found->func_get_attribute = find(library, "cuFuncGetAttribute");
    *(void **)&found->func_set_attribute = find(library, "cuFuncSetAttribute");
    *(void **)&found->stream_is_capturing = find(library, "cuStreamIsCapturing");
    *(void **)&found->kernel_get_function = find(library, "cuKernelGetFunction");
    *(void **)&found->func_get_name = find(library, "cuFuncGetName");
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

void gpurt_refuse(struct kernel *kernel) {
    lock();
    kernel->refused = true;
    struct decision decision = atomic_load_explicit(&kernel->decision, RELAXED);
    decision.reason = REFUSED;
    atomic_store_explicit(&kernel->decision, decision, memory_order_release);
    unlock();
    atomic_fetch_add_explicit(&policy.repeated, 1, RELAXED);
}

/* ---- a launch ---------------------------------------------------------------------------- */

void gpurt_count(enum reason reason) {
    static _Atomic unsigned threads;
    static THREAD_LOCAL unsigned shard;
    if (!shard)
        shard = 1 + atomic_fetch_add_explicit(&threads, 1, RELAXED) % SHARDS;
    atomic_fetch_add_explicit(&policy.counts[shard - 1][reason], 1, RELAXED);
}

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

unsigned gpurt_shape(struct launch *launch) {
    unsigned dynamic = launch->dynamic;
    enum reason reason = judge(launch, &dynamic);
    gpurt_count(reason);
    if (launch->kernel) {
        atomic_fetch_add_explicit(&launch->kernel->launches, 1, RELAXED);
        if (reason == CAPPED)
            atomic_fetch_add_explicit(&launch->kernel->capped, 1, RELAXED);
    }
    return reason == CAPPED ? dynamic : launch->dynamic;
}
