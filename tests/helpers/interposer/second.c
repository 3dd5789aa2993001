/* Another interposer, which counts launches: it also defines dlsym, and wraps the same functions.
 *
 * Built with RUDE, it calls the C library's dlsym directly, and so bypasses the next interposer.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <string.h>

typedef int launch(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void *,
                   void *);
typedef int get_proc(const char *, void **, int, uint64_t, int *);

static launch *real_launch;
static get_proc *real_get_proc;
static int launches;

int second_launches(void) { return launches; }

static int counted(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void *stream, void *parameters, void *extra) {
    launches++;
    return real_launch(f, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra);
}

static int wrapping(const char *name, void **found, int cuda, uint64_t flags, int *status);

static void *wrap(const char *name, void *found) {
    if (found && !strcmp(name, "cuLaunchKernel")) {
        *(void **)&real_launch = found;
        return (void *)counted;
    }
    if (found && !strcmp(name, "cuGetProcAddress_v2")) {
        *(void **)&real_get_proc = found;
        return (void *)wrapping;
    }
    return found;
}

static int wrapping(const char *name, void **found, int cuda, uint64_t flags, int *status) {
    int result = real_get_proc(name, found, cuda, flags, status);
    *found = wrap(name, *found);
    return result;
}

void *dlsym(void *handle, const char *name) {
    static void *(*next)(void *, const char *);
    if (!next)
        *(void **)&next = dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.34");
    if (!next)
        *(void **)&next = dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5");
#ifndef RUDE
    static int found;
    if (!found++)
        *(void **)&next = next(RTLD_NEXT, "dlsym");
#endif
    if (!strncmp(name, "cu", 2))
        return wrap(name, next(handle, name));
    return next(handle, name);
}
