/* Wrap a function of the C library, and find the original with RTLD_NEXT. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <unistd.h>

pid_t getppid(void) {
    pid_t (*real)(void);
    *(void **)&real = dlsym(RTLD_NEXT, "getppid");
    return real && real != getppid ? -real() : 0;
}
