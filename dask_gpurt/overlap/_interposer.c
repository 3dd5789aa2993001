/* Launches of any library, closed ones too, by way of the functions below.
 *
 * Preloaded into a worker, this library defines dlsym. A caller that asks for the CUDA driver's launch functions,
 * through dlsym or cuGetProcAddress, is given the ones below. They raise the dynamic shared memory of a launch as
 * _residency.c says. All else goes to the driver as it came. The policy is `gpurt_residency`, which
 * overlap/interposer.py mirrors and writes.
 */
#define _GNU_SOURCE
#include "_interposer.h"

#include <dlfcn.h>
#include <string.h>

/* The sanitizers and the loader ask for symbols before any instrumentation can run. */
#define BARE __attribute__((no_sanitize("address", "thread", "undefined")))

/* ---- a launch ---------------------------------------------------------------------------- */

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

#define LAUNCH(name, per_thread)                                                                              \
    static CUresult name(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,       \
                         unsigned bz, unsigned shared, CUstream s, void **parameters, void **extra) {         \
        launch_kernel *real = atomic_load_explicit(&real_launch[per_thread], RELAXED);                        \
        if (off())                                                                                            \
            return real(f, gx, gy, gz, bx, by, bz, shared, s, parameters, extra);                             \
        struct launch launch = {f, stream_of(s, per_thread), (uint64_t)gx * gy * gz, (uint64_t)bx * by * bz,  \
                                shared, NULL};                                                                \
        unsigned dynamic = gpurt_shape(&launch);                                                              \
        CUresult result = real(f, gx, gy, gz, bx, by, bz, dynamic, s, parameters, extra);                     \
        if (LIKELY(!result) || dynamic == shared)                                                             \
            return result;                                                                                    \
        gpurt_refuse(launch.kernel);                                                                          \
        return real(f, gx, gy, gz, bx, by, bz, shared, s, parameters, extra);                                 \
    }

LAUNCH(launch_legacy, 0)
LAUNCH(launch_per_thread, 1)

static CUresult launch_ex(const struct config *config, CUfunction f, void **parameters, void **extra,
                          launch_kernel_ex *real, bool per_thread) {
    enum reason reason = cooperates(config);
    if (reason != CAPPED) {
        gpurt_count(reason);
        return real(config, f, parameters, extra);
    }
    const unsigned *grid = config->grid, *block = config->block;
    struct launch launch = {f, stream_of(config->stream, per_thread), (uint64_t)grid[0] * grid[1] * grid[2],
                            (uint64_t)block[0] * block[1] * block[2], config->shared, NULL};
    struct config shaped = *config;
    shaped.shared = gpurt_shape(&launch);
    CUresult result = real(&shaped, f, parameters, extra);
    if (LIKELY(!result) || shaped.shared == config->shared)
        return result;
    gpurt_refuse(launch.kernel);
    return real(config, f, parameters, extra);
}

#define LAUNCH_EX(name, per_thread)                                                                           \
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
#define UNLOAD(name)                                                                                          \
    static _Atomic(unload *) real_##name;                                                                     \
    static CUresult name(uintptr_t what) {                                                                    \
        atomic_fetch_add(&policy.version, 2);                                                                 \
        return atomic_load_explicit(&real_##name, RELAXED)(what);                                             \
    }

UNLOAD(module_unload)
UNLOAD(library_unload)

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

enum { PER_THREAD_DEFAULT_STREAM = 2, V2_SINCE = 12000 };

static void wrap_at(const char *name, void **found, int cuda, uint64_t flags) {
    /* The name stays the same, but callers of later versions of CUDA are given the second version. */
    bool asking = !strcmp(name, "cuGetProcAddress") && cuda >= V2_SINCE;
    *found = wrap(asking ? "cuGetProcAddress_v2" : name, *found, !!(flags & PER_THREAD_DEFAULT_STREAM));
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

look_up *gpurt_next_dlsym(void) {
    find_dlsym();
    return next_dlsym;
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
