/* Launch from many threads while policies are switched and written, modules are unloaded, and the process forks.
 *
 *     launcher stress THREADS LAUNCHES FORKS    exits with 1 and a message after an invalid launch
 *     launcher cost THREADS LAUNCHES            prints the CPU time of a launch in nanoseconds as JSON
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { FUNCTIONS = 96, MOST_THREADS = 64, GRID = 100000 };

typedef int launch(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **,
                   void **);

struct record {
    void *handle, *stream, *parameters, *extra;
    uint32_t grid[3], block[3], shared, per_thread, ex, attributes;
    int result;
};

/* The first fields of `gpurt_residency`, as declared in Python. */
static struct {
    uint32_t layout, size;
    _Atomic uint32_t on, version, cap, entries;
    struct {
        _Atomic uint64_t id, cap;
    } table[1024];
} *policy;

static void (*changed)(void);
static launch *do_launch, *bare;
static void *functions[FUNCTIONS], *driver;
static _Atomic int ended, wrong;
static long launches;

static void *find(const char *name) {
    void *found = dlsym(driver, name);
    if (!found) {
        fprintf(stderr, "no %s\n", name);
        exit(2);
    }
    return found;
}

static int is_allowed(unsigned shared) {
    /* Shared memory that limits an H200 to 1 to 8 blocks. */
    static const unsigned known[] = {0, 115840, 76928, 57472, 45696, 38016, 32384, 28288, 24960};
    for (unsigned i = 0; i < sizeof known / sizeof *known; i++)
        if (shared == known[i])
            return 1;
    return 0;
}

static void *launch_all(void *seed) {
    unsigned state = (uintptr_t)seed + 1;
    for (long i = 0; i < launches; i++) {
        void *function = functions[rand_r(&state) % FUNCTIONS];
        if (do_launch(function, GRID, 1, 1, 128, 1, 1, 0, NULL, NULL, NULL))
            wrong = 1;
    }
    return NULL;
}

static void *write_policy(void *unused) {
    for (unsigned turn = 0; !ended; turn++) {
        policy->on = turn % 3 != 0;
        if (turn % 2) {
            changed();
            policy->cap = turn % 9;
            for (int i = 0; i < 16; i++) {
                policy->table[i].id = turn * i;
                policy->table[i].cap = (turn + i) % 9;
            }
            policy->entries = turn % 17;
            changed();
        }
        usleep(50);
    }
    return unused;
}

static void *unload(void *unused) {
    int (*cuModuleUnload)(void *);
    *(void **)&cuModuleUnload = find("cuModuleUnload");
    while (!ended) {
        cuModuleUnload(&ended);
        usleep(200);
    }
    return unused;
}

static int fork_and_launch(void) {
    pid_t child = fork();
    if (!child)
        _exit(do_launch(functions[0], GRID, 1, 1, 128, 1, 1, 0, NULL, NULL, NULL) || wrong);
    int status;
    waitpid(child, &status, 0);
    return status;
}

static int stress(int threads, int forks) {
    struct record *(*fake_record)(unsigned);
    unsigned (*fake_recorded)(void);
    void (*fake_refuse_above)(void *, int);
    void (*fake_slow)(void *, long);
    *(void **)&fake_record = find("fake_record");
    *(void **)&fake_recorded = find("fake_recorded");
    *(void **)&fake_refuse_above = find("fake_refuse_above");
    *(void **)&fake_slow = find("fake_slow");
    for (int i = 0; i < FUNCTIONS; i += 2)
        fake_refuse_above(functions[i], 40000);
    for (int i = 1; i < FUNCTIONS; i += 8)
        fake_slow(functions[i], 1000);
    pthread_t running[MOST_THREADS], others[2];
    pthread_create(&others[0], NULL, write_policy, NULL);
    pthread_create(&others[1], NULL, unload, NULL);
    for (long i = 0; i < threads; i++)
        pthread_create(&running[i], NULL, launch_all, (void *)i);
    for (int i = 0; i < forks; i++)
        if (fork_and_launch())
            wrong = 2;
    for (int i = 0; i < threads; i++)
        pthread_join(running[i], NULL);
    ended = 1;
    pthread_join(others[0], NULL);
    pthread_join(others[1], NULL);
    unsigned recorded = fake_recorded(), shaped = 0;
    for (unsigned i = 0; i < recorded && i < 1 << 16; i++) {
        if (!is_allowed(fake_record(i)->shared))
            wrong = 3;
        shaped += fake_record(i)->shared > 0;
    }
    if (wrong || recorded < threads * launches || !shaped) {
        fprintf(stderr, "wrong: %d, recorded %u, capped %u\n", wrong, recorded, shaped);
        return 1;
    }
    return 0;
}

/* CPU time of all threads, since other processes may be running. */
static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return now.tv_sec + now.tv_nsec * 1e-9;
}

static void *launch_one(void *function) {
    for (long i = 0; i < launches; i++)
        do_launch(function, GRID, 1, 1, 128, 1, 1, 0, NULL, NULL, NULL);
    return NULL;
}

static double cost(launch *through, int threads) {
    pthread_t running[MOST_THREADS];
    launch *kept = do_launch;
    do_launch = through;
    double start = seconds();
    for (int i = 0; i < threads; i++)
        pthread_create(&running[i], NULL, launch_one, functions[i]);
    for (int i = 0; i < threads; i++)
        pthread_join(running[i], NULL);
    double ns = (seconds() - start) / launches / threads * 1e9;
    do_launch = kept;
    return ns;
}

static int costs(int threads) {
    void (*fake_silent)(int);
    *(void **)&fake_silent = find("fake_silent");
    fake_silent(1);
    double without = cost(bare, 1), off = cost(do_launch, 1);
    changed();
    policy->cap = 4;
    changed();
    policy->on = 1;
    double on = cost(do_launch, 1), together = cost(do_launch, threads);
    changed();
    policy->cap = 0;
    changed();
    double left_alone = cost(do_launch, 1);
    printf("{\"bare\": %.3f, \"off\": %.3f, \"capped\": %.3f, \"left_alone\": %.3f, \"capped_threads\": %.3f}\n",
           without, off, on, left_alone, together);
    return 0;
}

int main(int count, char **arguments) {
    if (count < 4)
        return 2;
    int threads = atoi(arguments[2]);
    launches = atol(arguments[3]);
    driver = dlopen("libcuda.so.1", RTLD_NOW);
    *(void **)&policy = dlsym(RTLD_DEFAULT, "gpurt_residency");
    *(void **)&changed = dlsym(RTLD_DEFAULT, "gpurt_residency_changed");
    if (!driver || !policy || !changed || threads > MOST_THREADS) {
        fprintf(stderr, "no driver, or no interposer\n");
        return 2;
    }
    *(void **)&do_launch = find("cuLaunchKernel");
    *(void **)&bare = dlvsym(driver, "cuLaunchKernel", "FAKE");
    void *(*fake_function)(const char *, int, int, int);
    *(void **)&fake_function = find("fake_function");
    for (int i = 0; i < FUNCTIONS; i++) {
        char name[16];
        snprintf(name, sizeof name, "kernel%d", i);
        functions[i] = fake_function(name, 32, 0, 0);
    }
    return strcmp(arguments[1], "cost") ? stress(threads, count > 4 ? atoi(arguments[4]) : 0) : costs(threads);
}
