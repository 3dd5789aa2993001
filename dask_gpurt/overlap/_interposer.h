/* The driver's ABI, the policy that Python writes, and what the two halves of the interposer share.
 *
 * No CUDA headers: the little of the driver's ABI that is needed stands here, from cuda.h of CUDA 13.0.
 */
#ifndef GPURT_INTERPOSER_H
#define GPURT_INTERPOSER_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))
#define LIKELY(condition) __builtin_expect(!!(condition), 1)
#define RELAXED memory_order_relaxed
#define THREAD_LOCAL _Thread_local __attribute__((tls_model("initial-exec")))

/* ---- the driver's ABI -------------------------------------------------------------------- */

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

EXPORT extern struct residency gpurt_residency;
#define policy gpurt_residency

/* ---- between the halves ------------------------------------------------------------------ */

struct launch {
    CUfunction handle;
    CUstream stream;
    uint64_t blocks, threads;
    unsigned dynamic;
    struct kernel *kernel; /* once it is known */
};

/* The dynamic shared memory that a launch shall have; counts it. */
unsigned gpurt_shape(struct launch *launch);
/* Count a launch that is left alone before its kernel is looked up. */
void gpurt_count(enum reason reason);
/* The driver has refused what gpurt_shape gave: never raise this kernel again. */
void gpurt_refuse(struct kernel *kernel);

/* The next library's dlsym, which does not ask the interposer. */
typedef void *look_up(void *, const char *);
look_up *gpurt_next_dlsym(void);

#endif
