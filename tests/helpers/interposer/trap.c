/* Count waits for the whole device or for the default streams, on threads that have enabled the trap.
 *
 * Preloaded, it defines dlsym, and wraps functions looked up there and through cuGetProcAddress.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

/* cuCtxSynchronize takes a context since CUDA 13; before, the forwarded argument is ignored. */
typedef int wait(void *);
typedef int get_proc(const char *, void **, int, uint64_t, int *);

enum { PER_THREAD = 2 };

static _Thread_local int on;
static atomic_int for_device, for_default;
static void (*tell)(void);

int trap_on(void) { return on = 1; }
int trap_off(void) { return on = 0; }
int trap_device(void) { return for_device; }
int trap_default(void) { return for_default; }

/* Set a function to call on the waiting thread, before a counted wait. */
void trap_tell(void (*function)(void)) { tell = function; }

static void count(atomic_int *waits, int too_much) {
    if (!on || !too_much)
        return;
    (*waits)++;
    if (tell)
        tell();
}

static wait *real_context, *real_stream[2];
static get_proc *real_get_proc, *real_get_proc_v2;

static int context(void *which) {
    count(&for_device, 1);
    return real_context(which);
}

/* 0 is the default stream, 1 the legacy one, 2 the per-thread one. */
static int waits(void *stream, int per_thread) {
    count(&for_default, (uintptr_t)stream <= 2);
    return real_stream[per_thread](stream);
}

static int stream(void *which) { return waits(which, 0); }
static int stream_ptsz(void *which) { return waits(which, 1); }

static int getting(const char *, void **, int, uint64_t, int *);
static int getting_v2(const char *, void **, int, uint64_t, int *);

static void *wrap(const char *name, int flags, void *found) {
    int per_thread = !!(flags & PER_THREAD) || !strcmp(name, "cuStreamSynchronize_ptsz");
    if (!found)
        return found;
    if (!strcmp(name, "cuCtxSynchronize") || !strcmp(name, "cuCtxSynchronize_v2")) {
        *(void **)&real_context = found;
        return (void *)context;
    }
    if (!strcmp(name, "cuStreamSynchronize") || !strcmp(name, "cuStreamSynchronize_ptsz")) {
        *(void **)&real_stream[per_thread] = found;
        return per_thread ? (void *)stream_ptsz : (void *)stream;
    }
    if (!strcmp(name, "cuGetProcAddress")) {
        *(void **)&real_get_proc = found;
        return (void *)getting;
    }
    if (!strcmp(name, "cuGetProcAddress_v2")) {
        *(void **)&real_get_proc_v2 = found;
        return (void *)getting_v2;
    }
    return found;
}

/* Since CUDA 12 a lookup of "cuGetProcAddress" returns the second version. */
static const char *answered(const char *name, int cuda) {
    return cuda >= 12000 && !strcmp(name, "cuGetProcAddress") ? "cuGetProcAddress_v2" : name;
}

static int getting(const char *name, void **found, int cuda, uint64_t flags, int *status) {
    int result = real_get_proc(name, found, cuda, flags, status);
    *found = wrap(answered(name, cuda), (int)flags, *found);
    return result;
}

static int getting_v2(const char *name, void **found, int cuda, uint64_t flags, int *status) {
    int result = real_get_proc_v2(name, found, cuda, flags, status);
    *found = wrap(answered(name, cuda), (int)flags, *found);
    return result;
}

void *dlsym(void *handle, const char *name) {
    static void *(*next)(void *, const char *);
    if (!next)
        *(void **)&next = dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.34");
    if (!next)
        *(void **)&next = dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5");
    if (!strncmp(name, "cu", 2))
        return wrap(name, 0, next(handle, name));
    return next(handle, name);
}
