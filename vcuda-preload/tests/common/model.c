/* A driver in small, libcuda and NVML in one library, for what no real driver does without a GPU: it gives memory out by
 * the rules of the real one (pools grow in steps and shrink when waited for, physical memory lives as long as a handle or
 * a mapping, contexts take their blocks along, graphs take their memory when they first run), and keeps in a file what
 * each process holds, so that a test can tell whether the ceiling ever was passed. Kernels take the nanoseconds that their
 * handle says, one after another whoever launched them, and compute nothing. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define GPUS 4
#define CLIENTS 512
#define SHARED 64
#define MIB (1ull << 20)
#define POOL_STEP (32 * MIB)

enum { OK, INVALID_VALUE, OUT_OF_MEMORY, NOT_INITIALIZED, NO_DEVICE = 100, INVALID_DEVICE, INVALID_CONTEXT = 201,
       INVALID_HANDLE = 400, NOT_FOUND = 500, NOT_SUPPORTED = 801, CAPTURE_IMPLICIT = 906, UPDATE_FAILURE = 910, FAILED = 999 };

/* The file, which tests/common/mod.rs reads and writes too. */
struct state {
    uint64_t total[GPUS];             /* bytes of each GPU */
    uint64_t ceiling[GPUS];           /* what a container may hold, or 0 */
    _Atomic uint64_t peak[GPUS];      /* most that was ever held */
    _Atomic uint64_t passed;          /* times that the ceiling was passed */
    _Atomic uint64_t clients_used;    /* of those below, the first so many */
    struct { _Atomic int64_t pid; _Atomic uint64_t used[GPUS]; } clients[CLIENTS];
    _Atomic uint64_t free_at[GPUS];   /* CLOCK_MONOTONIC at which all that was launched is done, in nanoseconds */
    _Atomic uint64_t busy[GPUS];      /* nanoseconds that kernels took, or will have taken */
    /* Memory that several processes may hold: which do, by client, and whether a descriptor stands for it. */
    struct { _Atomic uint64_t bytes, gpu, described; char holders[CLIENTS]; } shared[SHARED];
};

static struct state *state;
static int self = -1;
static int fail_next;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* As the real driver's kernel module knows a process by its open descriptors, so that a child which has copies of them keeps
 * its memory, this one knows it by a lock of its open state file: byte `n` for client `n`. */
static int state_fd = -1;
static int lock_client(int command, int n, short type) {
    struct flock lock = {.l_type = type, .l_whence = SEEK_SET, .l_start = n, .l_len = 1};
    return fcntl(state_fd, command, &lock) ? -1 : lock.l_type;
}

static uint64_t held(int gpu) {
    uint64_t sum = 0;
    int used = state->clients_used;
    for (int n = 0; n < used; n++)
        if (state->clients[n].pid)
            sum += state->clients[n].used[gpu];
    for (int n = 0; n < SHARED; n++)
        if (state->shared[n].bytes && state->shared[n].gpu == (uint64_t)gpu)
            sum += state->shared[n].bytes;
    return sum;
}
/* Frees shared memory that nobody holds. */
static void sweep_shared(void) {
    for (int n = 0; n < SHARED; n++)
        if (state->shared[n].bytes && !state->shared[n].described && !memchr(state->shared[n].holders, 1, CLIENTS))
            state->shared[n].bytes = 0;
}
static int holds[SHARED]; /* in how many ways this process does */
static int share(int gpu, uint64_t bytes) {
    for (int n = 0; n < SHARED; n++) {
        uint64_t none = 0;
        if (atomic_compare_exchange_strong(&state->shared[n].bytes, &none, bytes)) {
            state->shared[n].gpu = gpu;
            state->shared[n].described = 0;
            holds[n] = state->shared[n].holders[self] = 1;
            return n;
        }
    }
    abort();
}
void modelDescriptorsClosed(void) {
    for (int n = 0; n < SHARED; n++)
        state->shared[n].described = 0;
    sweep_shared();
}

/* Client number 1 of the test's is a neighbour without a lock. Called with the lock of entry `n`. */
static void clear_client(int n) {
    for (int gpu = 0; gpu < GPUS; gpu++)
        state->clients[n].used[gpu] = 0;
    for (int at = 0; at < SHARED; at++)
        state->shared[at].holders[n] = 0;
    sweep_shared();
    state->clients[n].pid = 0;
}

/* What the kernel does when a process is gone. If the one who clears is killed, another does it again. */
static void clear_the_dead(void) {
    static pthread_mutex_t clearing = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&clearing);
    for (int n = 0; n < CLIENTS; n++)
        if (state->clients[n].pid > 1 && n != self && lock_client(F_OFD_SETLK, n, F_WRLCK) >= 0) {
            clear_client(n);
            lock_client(F_OFD_SETLK, n, F_UNLCK);
        }
    pthread_mutex_unlock(&clearing);
}

static int take(int gpu, uint64_t bytes) {
    if (fail_next) {
        fail_next--;
        return FAILED;
    }
    uint64_t limit = state->ceiling[gpu];
    state->clients[self].used[gpu] += bytes;
    uint64_t now = held(gpu);
    if (now > state->total[gpu] || (limit && now > limit)) {
        clear_the_dead();
        now = held(gpu);
    }
    if (now > state->total[gpu]) {
        state->clients[self].used[gpu] -= bytes;
        return OUT_OF_MEMORY;
    }
    if (limit && now > limit)
        state->passed++;
    uint64_t peak = state->peak[gpu];
    while (now > peak && !atomic_compare_exchange_weak(&state->peak[gpu], &peak, now))
        ;
    return OK;
}

static void give(int gpu, uint64_t bytes) { state->clients[self].used[gpu] -= bytes; }

/* What another thread of the application does while the driver is at it: memory that an argument points to changes as a call
 * begins, or when it is done. What was there then is told. */
static struct { int armed, at_end, calls; void *at; size_t size; char with[128], was[128]; } change;
void modelChanges(int at_end, int after_calls, void *at, const void *with, size_t size) {
    change.armed = 1, change.at_end = at_end, change.calls = after_calls, change.at = at, change.size = size;
    memcpy(change.with, with, size);
}
uint64_t modelWas(void) { return *(uint64_t *)change.was; }
static int meanwhile(int at_end) {
    if (change.armed && change.at_end == at_end && !change.calls--) {
        memcpy(change.was, change.at, change.size);
        memcpy(change.at, change.with, change.size);
        change.armed = 0;
    }
    return 1;
}
/* One call waits where the test wants it to: at the first HOLD of that number that it comes to, until all go on. */
enum { BEFORE_LAUNCH = 1, AFTER_LAUNCH, AFTER_INSTANTIATION, BEFORE_EXEC_DESTROY, AFTER_CONTEXT_DESTROY, BEFORE_ALLOCATION,
       BEFORE_FREE };
static _Atomic int hold_wanted;
static _Atomic pthread_t held_thread;
void modelHold(int where) { hold_wanted = where; }
pthread_t modelHeldThread(void) { return held_thread; }
void modelGoOn(void) {
    hold_wanted = 0;
    held_thread = 0;
}
static void hold(int where) {
    if (!atomic_compare_exchange_strong(&hold_wanted, &where, 0))
        return;
    for (held_thread = pthread_self(); held_thread;)
        usleep(100);
}
static void after_it(int *begun) { meanwhile(*begun); }
#define CHANGED_MEANWHILE __attribute__((cleanup(after_it))) int begun = meanwhile(0)

/* Test control, looked up in this very library. */
void modelFailNext(int times) { fail_next = times; }
uint64_t modelHeld(int gpu) { return state->clients[self].used[gpu]; }

/* ---- devices ---- */

static int device_count = 2, order[GPUS] = {0, 1, 2, 3};

static void in_child(void) { self = -1, state = NULL, state_fd = -1; }
/* The real one notices by itself when it was forked past the C library. */
void modelInChild(void) { in_child(); }

int cuInit(unsigned flags) {
    (void)flags;
    if (state)
        return OK;
    int fd = open(getenv("MODEL_STATE"), O_RDWR | O_CLOEXEC);
    if (fd < 0)
        return NO_DEVICE;
    struct state *mapped = mmap(NULL, sizeof *state, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    state = mapped, state_fd = fd;
    for (int n = 0; n < CLIENTS && self < 0; n++)
        if (mapped->clients[n].pid != 1 && lock_client(F_OFD_SETLK, n, F_WRLCK) >= 0) {
            self = n;
            clear_client(n);
            mapped->clients[n].pid = getpid();
        }
    uint64_t used = mapped->clients_used;
    while (used <= (uint64_t)self && !atomic_compare_exchange_weak(&mapped->clients_used, &used, self + 1))
        ;
    if (self < 0)
        return state = NULL, OUT_OF_MEMORY;
    /* CUDA_VISIBLE_DEVICES, indices and UUIDs. */
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    if (visible) {
        device_count = 0;
        for (char *rest = strdup(visible), *part; (part = strsep(&rest, ",")) && device_count < GPUS;)
            order[device_count++] = strncmp(part, "GPU-", 4) ? atoi(part) : part[strlen(part) - 1] - '0';
    }
    static int registered;
    if (!registered++)
        pthread_atfork(NULL, NULL, in_child);
    return OK;
}

int cuDriverGetVersion(int *version) { return *version = 12040, OK; }
int cuDeviceGetCount(int *count) { return state ? (*count = device_count, OK) : NOT_INITIALIZED; }
int cuDeviceGet(int *device, int ordinal) {
    return !state ? NOT_INITIALIZED : ordinal < 0 || ordinal >= device_count ? INVALID_DEVICE : (*device = ordinal, OK);
}
static int gpu_of(int device) { return order[device]; }
static int device_of(int gpu) {
    int device = 0;
    while (order[device] != gpu)
        device++;
    return device;
}
int cuDeviceGetUuid(unsigned char *uuid, int device) {
    if (!state || device < 0 || device >= device_count)
        return INVALID_DEVICE;
    memset(uuid, 0, 16);
    uuid[0] = 0x67, uuid[15] = gpu_of(device);
    return OK;
}
int cuDeviceGetUuid_v2(unsigned char *uuid, int device) { return cuDeviceGetUuid(uuid, device); }
int cuDeviceTotalMem_v2(size_t *bytes, int device) {
    if (!state || !bytes || device < 0 || device >= device_count)
        return INVALID_VALUE;
    return *bytes = state->total[gpu_of(device)], OK;
}

/* ---- contexts ---- */

struct context { int device, alive, primary, green; uint64_t limits[3]; };
static struct context contexts[4096], primary_contexts[GPUS];
static int primary_uses[GPUS];
static __thread struct context *stack[16];
static __thread int depth;
#define CURRENT (depth ? stack[depth - 1] : NULL)

int cuCtxCreate_v2(struct context **context, unsigned flags, int device) {
    (void)flags;
    if (!state || device < 0 || device >= device_count)
        return INVALID_DEVICE;
    pthread_mutex_lock(&lock);
    int n = 0;
    while (contexts[n].alive)
        n++;
    contexts[n] = (struct context){device, 1, 0, 0, {0}};
    pthread_mutex_unlock(&lock);
    return stack[depth++] = *context = &contexts[n], OK;
}
int cuCtxGetCurrent(struct context **context) { return state ? (*context = CURRENT, OK) : NOT_INITIALIZED; }
int cuCtxGetDevice(int *device) { return CURRENT ? (*device = CURRENT->device, OK) : INVALID_CONTEXT; }
int cuCtxPushCurrent_v2(struct context *context) { return stack[depth++] = context, OK; }
int cuCtxPopCurrent_v2(struct context **context) {
    return !depth ? INVALID_CONTEXT : (*context = stack[--depth], OK);
}
int cuCtxSetCurrent(struct context *context) {
    depth = 0;
    if (context)
        stack[depth++] = context;
    return OK;
}
int cuCtxGetApiVersion(struct context *context, unsigned *version) {
    return context->alive ? (*version = 3020, OK) : INVALID_CONTEXT;
}
int cuDevicePrimaryCtxRetain(struct context **context, int device) {
    CHANGED_MEANWHILE;
    if (!state || device < 0 || device >= device_count)
        return INVALID_DEVICE;
    if (!primary_contexts[device].alive)
        primary_contexts[device] = (struct context){device, 1, 1, 0, {0}};
    primary_uses[device]++;
    return *context = &primary_contexts[device], OK;
}
/* Green contexts: the context is their own, its blocks are the primary one's. */
int cuGreenCtxCreate(struct context **green, void *resources, int device, unsigned flags) {
    struct context *current;
    (void)resources;
    int result = cuCtxCreate_v2(green, flags, device);
    if (!result)
        (*green)->green = 1, cuCtxPopCurrent_v2(&current);
    return result;
}
int cuCtxFromGreenCtx(struct context **context, struct context *green) {
    return green && green->alive && green->green ? (*context = green, OK) : INVALID_CONTEXT;
}
int cuGreenCtxDestroy(struct context *green) {
    if (!green || !green->alive || !green->green)
        return INVALID_CONTEXT;
    return green->alive = 0, OK;
}
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    return *flags = 0, *active = primary_contexts[device].alive, OK;
}

/* Of 10 multiprocessors with 1000 threads. */
int cuDeviceGetAttribute(int *value, int which, int device) {
    return (void)device, *value = which == 16 ? 10 : which == 39 ? 1000 : 1, OK;
}
static const uint64_t limits_begin[3] = {1024, MIB, 8 * MIB};
static uint64_t taken_for(int limit, uint64_t value) {
    return value <= limits_begin[limit] ? 0 : (value - limits_begin[limit]) * (limit ? 1 : 10000);
}
int cuCtxSetLimit(int limit, size_t value) {
    if (!CURRENT)
        return INVALID_CONTEXT;
    if (limit > 2)
        return OK;
    value = (value + 511) & ~511ull;
    uint64_t had = taken_for(limit, CURRENT->limits[limit]), has = taken_for(limit, value);
    int result = has > had ? take(gpu_of(CURRENT->device), has - had) : (give(gpu_of(CURRENT->device), had - has), OK);
    return result ? result : (CURRENT->limits[limit] = value, OK);
}
int cuCtxGetLimit(size_t *value, int limit) {
    return *value = limit > 2 ? 0 : CURRENT->limits[limit] ? CURRENT->limits[limit] : limits_begin[limit], OK;
}

/* ---- blocks: address = base + number * 2 MiB, so that finding one costs the same among few and among many ---- */

struct block { uint64_t bytes, taken; struct context *context; struct pool *pool; int gpu, next_free, shared; };
#define BLOCKS (1 << 22)
#define BASE 0x7e0000000000ull
static struct block *blocks;
static int first_free = -1, fresh = 1;

static struct block *block_at(uint64_t address) {
    uint64_t n = (address - BASE) / (2 * MIB);
    return address < BASE || n >= BLOCKS || !blocks || !blocks[n].bytes || (address - BASE) % (2 * MIB) ? NULL : &blocks[n];
}

/* Numbers that a thread has freed, so that threads that allocate and free do not wait here for each other: what they then
 * wait for in the bench is the shim's. */
static __thread struct { int count, numbers[32]; } spare;

static uint64_t add_block(struct block block) {
    int n = spare.count ? spare.numbers[--spare.count] : -1;
    if (n < 0) {
        pthread_mutex_lock(&lock);
        if (!blocks)
            blocks = mmap(NULL, BLOCKS * sizeof *blocks, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        n = first_free;
        if (n < 0)
            n = fresh++;
        else
            first_free = blocks[n].next_free;
        pthread_mutex_unlock(&lock);
    }
    blocks[n] = block;
    return BASE + n * 2 * MIB;
}

/* Called with the lock held. */
static void drop_block(struct block *block) {
    block->bytes = 0;
    block->next_free = first_free;
    first_free = block - blocks;
}

static int allocate(uint64_t *address, uint64_t bytes) {
    CHANGED_MEANWHILE;
    if (!state)
        return NOT_INITIALIZED;
    if (!CURRENT)
        return INVALID_CONTEXT;
    if (!address || !bytes)
        return INVALID_VALUE;
    int gpu = gpu_of(CURRENT->device), result;
    /* Small blocks share pages, larger ones have their own. */
    uint64_t unit = bytes > MIB ? 2 * MIB : 512, taken = (bytes + unit - 1) / unit * unit;
    if (bytes > ~0ull - unit)
        return OUT_OF_MEMORY;
    if ((result = take(gpu, taken)))
        return result;
    struct context *of = CURRENT->green ? &primary_contexts[CURRENT->device] : CURRENT;
    return *address = add_block((struct block){bytes, taken, of, NULL, gpu, 0, 0}), OK;
}

int cuMemAlloc_v2(uint64_t *address, size_t bytes) { return allocate(address, bytes); }
int cuMemAllocManaged(uint64_t *address, size_t bytes, unsigned flags) { return (void)flags, allocate(address, bytes); }
int cuMemAllocPitch_v2(uint64_t *address, size_t *pitch, size_t width, size_t height, unsigned element) {
    (void)element;
    *pitch = (width + 511) & ~511ull;
    /* Rows longer than anybody would expect. */
    if (getenv("MODEL_LONG_ROWS"))
        *pitch += 512;
    return allocate(address, *pitch * height);
}

static void pool_free(struct pool *pool, uint64_t bytes);
static void let_go(int shared) {
    if (--holds[shared])
        return;
    state->shared[shared].holders[self] = 0;
    sweep_shared();
}
static void give_block(struct block *block) {
    if (block->shared)
        let_go(block->shared - 1);
    else
        give(block->gpu, block->taken);
}

int cuMemFree_v2(uint64_t address) {
    if (!state)
        return NOT_INITIALIZED;
    if (!address)
        return OK;
    struct block *block = block_at(address);
    if (block && !block->pool && !block->shared && spare.count < 32) {
        /* Whoever takes the bytes away frees it. */
        if (!__atomic_exchange_n(&block->bytes, 0, __ATOMIC_SEQ_CST))
            return INVALID_VALUE;
        give(block->gpu, block->taken);
        return spare.numbers[spare.count++] = block - blocks, OK;
    }
    pthread_mutex_lock(&lock);
    block = block_at(address);
    int result = block ? OK : INVALID_VALUE;
    if (block) {
        if (block->pool)
            pool_free(block->pool, block->taken);
        else
            give_block(block);
        drop_block(block);
    }
    pthread_mutex_unlock(&lock);
    return result;
}

static void end_streams(struct context *context);
static void end_arrays(struct context *context);
static void take_along(struct context *context) {
    end_streams(context);
    end_arrays(context);
    for (int limit = 0; limit < 3; limit++) {
        give(gpu_of(context->device), taken_for(limit, context->limits[limit]));
        context->limits[limit] = 0;
    }
    for (int n = 1; n < fresh; n++)
        if (blocks[n].bytes && blocks[n].context == context && !blocks[n].pool) {
            give_block(&blocks[n]);
            drop_block(&blocks[n]);
        }
}
int cuCtxDestroy_v2(struct context *context) {
    if (!context || !context->alive || context->primary)
        return INVALID_CONTEXT;
    pthread_mutex_lock(&lock);
    take_along(context);
    context->alive = 0;
    pthread_mutex_unlock(&lock);
    if (CURRENT == context)
        depth--;
    return hold(AFTER_CONTEXT_DESTROY), OK;
}
int cuDevicePrimaryCtxRelease_v2(int device) {
    pthread_mutex_lock(&lock);
    if (primary_uses[device] && !--primary_uses[device]) {
        take_along(&primary_contexts[device]);
        primary_contexts[device].alive = 0;
    }
    pthread_mutex_unlock(&lock);
    return hold(AFTER_CONTEXT_DESTROY), OK;
}

int cuMemGetInfo_v2(size_t *free, size_t *total) {
    if (!state)
        return NOT_INITIALIZED;
    if (!CURRENT)
        return INVALID_CONTEXT;
    int gpu = gpu_of(CURRENT->device);
    if (free)
        *free = state->total[gpu] - held(gpu);
    if (total)
        *total = state->total[gpu];
    return OK;
}

/* ---- arrays: tiles of 64 KiB; those to be mapped later take nothing, and tell what they would ---- */

struct shape { size_t width, height, depth; unsigned format, channels, flags; };
struct array { uint64_t size, taken; int gpu; struct context *context; struct array *next; };
static struct array *arrays;
static uint64_t size_of(const struct shape *shape) {
    uint64_t element = (shape->format == 1 || shape->format == 8 ? 1 : shape->format == 0x20 ? 4 : 2) * shape->channels;
    uint64_t depth = shape->depth ? shape->depth : 1, height = shape->height ? shape->height : 1;
    return (shape->width * element * height * depth + 65535) & ~65535ull;
}
static int make_array(struct array **array, uint64_t size, int mapped_later) {
    if (!CURRENT)
        return INVALID_CONTEXT;
    int gpu = gpu_of(CURRENT->device), result;
    if (!mapped_later && (result = take(gpu, size)))
        return result;
    *array = malloc(sizeof **array);
    pthread_mutex_lock(&lock);
    **array = (struct array){size, mapped_later ? 0 : size, gpu, CURRENT, arrays};
    arrays = *array;
    pthread_mutex_unlock(&lock);
    return OK;
}
int cuArray3DCreate_v2(struct array **array, const struct shape *shape) {
    CHANGED_MEANWHILE;
    return make_array(array, size_of(shape), !!(shape->flags & 0xc0));
}
int cuArrayCreate_v2(struct array **array, const void *shape) {
    CHANGED_MEANWHILE;
    const struct { size_t width, height; unsigned format, channels; } *of = shape;
    return make_array(array, size_of(&(struct shape){of->width, of->height, 0, of->format, of->channels, 0}), 0);
}
int cuMipmappedArrayCreate(struct array **array, const struct shape *shape, unsigned levels) {
    CHANGED_MEANWHILE;
    uint64_t size = 0;
    struct shape level = *shape;
    for (unsigned n = 0; n < levels; n++) {
        size += size_of(&level);
        level.width = level.width > 1 ? level.width / 2 : 1;
        level.height = level.height > 1 ? level.height / 2 : level.height;
    }
    return make_array(array, size, !!(shape->flags & 0xc0));
}
struct requirements { size_t size, alignment; unsigned reserved[4]; };
int cuArrayGetMemoryRequirements(struct requirements *out, struct array *array, int device) {
    (void)device;
    return array->taken ? INVALID_VALUE : (out->size = array->size, out->alignment = 65536, OK);
}
int cuMipmappedArrayGetMemoryRequirements(struct requirements *out, struct array *array, int device) {
    return cuArrayGetMemoryRequirements(out, array, device);
}

/* ---- physical memory ---- */

struct physical { uint64_t bytes; int gpu, handles, maps, multicast, shared; };
struct properties { int kind, handle_types, location_kind, location; };
#define MAPPINGS 65536
static struct { uint64_t address, bytes; struct physical *of; } mappings[MAPPINGS];
static uint64_t next_address = 0x7d0000000000ull;

static void unbind_all(struct physical *object);
static void settle(struct physical *physical) {
    if (!physical->handles && !physical->maps) {
        if (physical->shared)
            let_go(physical->shared - 1);
        else if (physical->gpu >= 0)
            give(physical->gpu, physical->bytes);
        physical->bytes = 0; /* The structure stays: a handle that is used again must not be a new one's. */
        if (physical->multicast)
            unbind_all(physical);
    }
}
static void unmap(struct physical *physical) {
    physical->maps--;
    settle(physical);
}
int cuMemCreate(struct physical **handle, size_t bytes, const struct properties *properties, uint64_t flags) {
    CHANGED_MEANWHILE;
    (void)flags;
    if (!state)
        return NOT_INITIALIZED;
    if (!bytes || bytes % (2 * MIB))
        return INVALID_VALUE;
    int gpu = -1, result;
    if (properties->location_kind == 1) {
        if (properties->location < 0 || properties->location >= device_count)
            return INVALID_DEVICE;
        if ((result = take(gpu = gpu_of(properties->location), bytes)))
            return result;
    }
    *handle = malloc(sizeof **handle);
    **handle = (struct physical){bytes, gpu, 1, 0, 0, 0};
    return OK;
}
int cuMemRelease(struct physical *handle) {
    if (!handle || !handle->handles)
        return INVALID_VALUE;
    pthread_mutex_lock(&lock);
    handle->handles--;
    settle(handle);
    pthread_mutex_unlock(&lock);
    return OK;
}
int cuMemAddressReserve(uint64_t *address, size_t bytes, size_t align, uint64_t hint, uint64_t flags) {
    (void)align, (void)hint, (void)flags;
    return *address = __atomic_fetch_add(&next_address, (bytes + 2 * MIB - 1) & ~(2 * MIB - 1), __ATOMIC_SEQ_CST), OK;
}
int cuMemMap(uint64_t address, size_t bytes, size_t offset, struct physical *handle, uint64_t flags) {
    (void)offset, (void)flags;
    if (!handle->handles)
        return INVALID_VALUE;
    pthread_mutex_lock(&lock);
    int n = 0;
    while (mappings[n].of)
        n++;
    mappings[n].address = address, mappings[n].bytes = bytes, mappings[n].of = handle;
    handle->maps++;
    pthread_mutex_unlock(&lock);
    return OK;
}
int cuMemUnmap(uint64_t address, size_t bytes) {
    pthread_mutex_lock(&lock);
    for (int n = 0; n < MAPPINGS; n++)
        if (mappings[n].of && mappings[n].address >= address && mappings[n].address < address + bytes) {
            unmap(mappings[n].of);
            mappings[n].of = NULL;
        }
    pthread_mutex_unlock(&lock);
    return OK;
}
int cuMemRetainAllocationHandle(struct physical **handle, uint64_t address) {
    pthread_mutex_lock(&lock);
    int result = INVALID_VALUE;
    for (int n = 0; n < MAPPINGS; n++)
        if (mappings[n].of && address >= mappings[n].address && address < mappings[n].address + mappings[n].bytes) {
            *handle = mappings[n].of;
            (*handle)->handles++;
            result = OK;
            break;
        }
    pthread_mutex_unlock(&lock);
    return result;
}

/* What others may have: by a descriptor, which tells by where it is in the file, or by a handle. */
#define HANDLE 0xabcd0000ull
static int shared_by(uint64_t handle) {
    uint64_t n = handle - HANDLE;
    return n >= SHARED || !state->shared[n].bytes ? -1 : (int)n;
}
static int describe(int shared) {
    int fd = open(getenv("MODEL_STATE"), O_RDWR | O_CLOEXEC);
    state->shared[shared].described = 1;
    lseek(fd, HANDLE + shared, SEEK_SET);
    return fd;
}
int cuMemExportToShareableHandle(void *to, struct physical *of, int kind, uint64_t flags) {
    CHANGED_MEANWHILE;
    if (flags || !of || !of->handles || of->gpu < 0)
        return INVALID_VALUE;
    pthread_mutex_lock(&lock);
    if (!of->shared)
        give(of->gpu, of->bytes), of->shared = 1 + share(of->gpu, of->bytes);
    if (kind == 1)
        *(int *)to = describe(of->shared - 1);
    else
        *(uint64_t *)memset(to, 0, 64) = HANDLE + of->shared - 1;
    pthread_mutex_unlock(&lock);
    return OK;
}
int cuMemImportFromShareableHandle(struct physical **handle, void *from, int kind) {
    int n = shared_by(kind == 1 ? (uint64_t)lseek((int)(intptr_t)from, 0, SEEK_CUR) : *(uint64_t *)from);
    if (n < 0)
        return INVALID_VALUE;
    /* Another import of the same is another handle, and the memory goes with the last. */
    static struct physical *known[SHARED];
    pthread_mutex_lock(&lock);
    if (!known[n] || !known[n]->bytes) {
        known[n] = malloc(sizeof **handle);
        *known[n] = (struct physical){state->shared[n].bytes, state->shared[n].gpu, 0, 0, 0, n + 1};
        holds[n]++;
    }
    known[n]->handles++;
    state->shared[n].holders[self] = 1;
    pthread_mutex_unlock(&lock);
    return *handle = known[n], OK;
}
int cuMemGetAddressRange_v2(uint64_t *base, size_t *bytes, uint64_t address) {
    struct block *block = block_at(BASE + (address - BASE) / (2 * MIB) * (2 * MIB));
    if (!block)
        return INVALID_VALUE;
    return *base = BASE + (block - blocks) * 2 * MIB, *bytes = block->bytes, OK;
}
struct ipc { uint64_t words[8]; };
int cuIpcGetMemHandle(struct ipc *handle, uint64_t address) {
    CHANGED_MEANWHILE;
    struct block *block = block_at(BASE + (address - BASE) / (2 * MIB) * (2 * MIB));
    if (!block || block->pool)
        return INVALID_VALUE;
    if (!block->shared)
        give(block->gpu, block->taken), block->shared = 1 + share(block->gpu, block->taken);
    memset(handle, 0, sizeof *handle);
    return handle->words[0] = HANDLE + block->shared - 1, OK;
}
/* A dma-buf keeps memory as a descriptor does. */
int cuMemGetHandleForAddressRange(void *to, uint64_t address, size_t bytes, int kind, uint64_t flags) {
    struct block *block = block_at(address);
    struct physical *of = NULL;
    if (flags || kind != 1 || !bytes || (!block && cuMemRetainAllocationHandle(&of, address)))
        return INVALID_VALUE;
    if (of) {
        int result = cuMemExportToShareableHandle(to, of, 1, 0);
        return cuMemRelease(of), result;
    }
    if (!block->shared)
        give(block->gpu, block->taken), block->shared = 1 + share(block->gpu, block->taken);
    return *(int *)to = describe(block->shared - 1), OK;
}
static int opened[SHARED];
#define OPENED 0x7f0000000000ull
int cuIpcOpenMemHandle_v2(uint64_t *address, struct ipc handle, unsigned flags) {
    int n = shared_by(handle.words[0]);
    if (n < 0 || flags != 1)
        return INVALID_VALUE;
    holds[n] += !opened[n]++;
    state->shared[n].holders[self] = 1;
    return *address = OPENED + n * 2 * MIB, OK;
}
int cuIpcCloseMemHandle(uint64_t address) {
    uint64_t n = (address - OPENED) / (2 * MIB);
    if (n >= SHARED || !opened[n])
        return INVALID_VALUE;
    if (!--opened[n])
        let_go(n);
    return OK;
}

/* Bindings of multicast objects: by object, device and offset. */
#define BINDINGS 256
static struct { struct physical *object, *of; uint64_t at, bytes; int gpu; } bindings[BINDINGS];

int cuMulticastCreate(struct physical **object, const void *properties) {
    (void)properties;
    *object = malloc(sizeof **object);
    **object = (struct physical){0, -1, 1, 0, 1, 0};
    return OK;
}
int cuMulticastBindMem(struct physical *object, size_t at, struct physical *of, size_t offset, size_t bytes, uint64_t flags) {
    (void)offset, (void)flags;
    if (!object->multicast || !of->handles)
        return INVALID_VALUE;
    int n = 0;
    while (bindings[n].object)
        n++;
    bindings[n].object = object, bindings[n].of = of, bindings[n].at = at, bindings[n].bytes = bytes, bindings[n].gpu = of->gpu;
    of->maps++;
    return OK;
}
int cuMulticastBindMem_v2(struct physical *object, int device, size_t at, struct physical *of, size_t offset, size_t bytes,
                          uint64_t flags) {
    return (void)device, cuMulticastBindMem(object, at, of, offset, bytes, flags);
}
int cuMulticastBindAddr(struct physical *object, size_t at, uint64_t address, size_t bytes, uint64_t flags) {
    struct physical *of = NULL;
    int result = cuMemRetainAllocationHandle(&of, address);
    if (!result)
        result = cuMulticastBindMem(object, at, of, 0, bytes, flags), cuMemRelease(of);
    return result;
}
int cuMulticastBindAddr_v2(struct physical *object, int device, size_t at, uint64_t address, size_t bytes, uint64_t flags) {
    return (void)device, cuMulticastBindAddr(object, at, address, bytes, flags);
}
static void unbind(struct physical *object, int gpu, uint64_t at, uint64_t end) {
    for (int n = 0; n < BINDINGS; n++)
        if (bindings[n].object == object && (gpu < 0 || bindings[n].gpu == gpu) && bindings[n].at >= at &&
            bindings[n].at + bindings[n].bytes <= end) {
            bindings[n].object = NULL;
            unmap(bindings[n].of);
        }
}
static void unbind_all(struct physical *object) { unbind(object, -1, 0, ~0ull); }
int cuMulticastUnbind(struct physical *object, int device, size_t at, size_t bytes) {
    pthread_mutex_lock(&lock);
    unbind(object, gpu_of(device), at, at + bytes);
    pthread_mutex_unlock(&lock);
    return OK;
}

/* Logical endpoints, by number: bound to as multicast objects are. */
static struct physical *endpoints[16];
int cuLogicalEndpointCreate(unsigned id, const void *properties) {
    return id >= 16 || endpoints[id] ? INVALID_VALUE : cuMulticastCreate(&endpoints[id], properties);
}
int cuLogicalEndpointBindMem(unsigned id, int device, uint64_t at, struct physical *of, uint64_t offset, uint64_t bytes,
                             uint64_t flags) {
    return (void)device, cuMulticastBindMem(endpoints[id], at, of, offset, bytes, flags);
}
int cuLogicalEndpointBindAddr(unsigned id, int device, uint64_t at, uint64_t address, uint64_t bytes, uint64_t flags) {
    return (void)device, cuMulticastBindAddr(endpoints[id], at, address, bytes, flags);
}
int cuLogicalEndpointUnbind(unsigned id, int device, uint64_t at, uint64_t bytes) {
    return cuMulticastUnbind(endpoints[id], device, at, bytes);
}
int cuLogicalEndpointDestroy(unsigned id) {
    struct physical *of = endpoints[id];
    return endpoints[id] = NULL, cuMemRelease(of);
}

/* ---- streams, pools ---- */

struct graph;
/* One that is gone stays, for the next one to have its handle. */
struct stream { struct context *context; struct graph *capture; _Atomic uint64_t done_at; int alive; pthread_t of_thread; struct stream *next; };
static struct stream *streams;
/* While the clock stands, no work that takes any time is done. */
static _Atomic uint64_t stands_at;
static uint64_t now_ns(void) {
    struct timespec time;
    if (stands_at)
        return stands_at;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000ull + time.tv_nsec;
}
void modelClock(int goes) {
    stands_at = 0;
    if (!goes)
        stands_at = now_ns();
}
/* A stream that has waited for another one, or for all of a context, as of now. */
static struct { struct stream *stream, *other; struct context *all_of; } waits[64];
static struct stream *add_stream(struct context *context, pthread_t of_thread) {
    static pthread_mutex_t adding = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&adding);
    struct stream *stream = streams;
    while (stream && (stream->alive || stream->of_thread || of_thread))
        stream = stream->next;
    if (!stream) {
        stream = calloc(1, sizeof *stream);
        stream->next = streams, streams = stream;
    }
    stream->context = context, stream->of_thread = of_thread, stream->alive = 1;
    stream->done_at = 0;
    for (int n = 0; n < 64; n++)
        if (waits[n].stream == stream || waits[n].other == stream)
            waits[n].stream = waits[n].other = NULL, waits[n].all_of = NULL;
    pthread_mutex_unlock(&adding);
    return stream;
}
/* Of the default streams, a context has one, and each thread one in it. */
static struct stream of_context[sizeof contexts / sizeof *contexts + GPUS];
static struct stream *stream_of(struct stream *stream) {
    if ((uintptr_t)stream > 2)
        return stream;
    if ((uintptr_t)stream == 2) {
        for (stream = streams; stream; stream = stream->next)
            if (stream->alive && stream->context == CURRENT && stream->of_thread == pthread_self())
                return stream;
        return add_stream(CURRENT, pthread_self());
    }
    stream = !CURRENT || CURRENT->primary ? &of_context[CURRENT ? CURRENT - primary_contexts : 0]
                                          : &of_context[GPUS + (CURRENT - contexts)];
    return stream->context = CURRENT, stream->alive = 1, stream;
}
static _Atomic int dead_asked;
int modelDeadAsked(void) { return dead_asked; }
static int is_dead(struct stream *stream) { return (uintptr_t)stream > 2 && !stream->alive && ++dead_asked; }
static void wait_until(uint64_t at) {
    while (now_ns() < at)
        usleep(50);
}
/* What is mapped in sparse arrays, by the element where it begins; gone when the stream has come to the end of it. */
#define TILES 1024
static struct { struct array *array; uint64_t x, gone_at; struct stream *gone_in; struct physical *of; } tiles[TILES];
struct map_info {
    unsigned kind;
    struct array *array;
    unsigned part_kind, padding, level, layer, x, y, z, width, height, depth, operation, handle_kind;
    struct physical *handle;
    uint64_t offset;
    unsigned devices, flags, reserved[2];
};
/* Called with the lock held. */
static void drop_tiles(struct array *of_array) {
    for (int n = 0; n < TILES; n++)
        if (tiles[n].of && (tiles[n].array == of_array || (tiles[n].gone_at && tiles[n].gone_at <= now_ns()))) {
            unmap(tiles[n].of);
            tiles[n].of = NULL;
        }
}
int cuMemMapArrayAsync(struct map_info *list, unsigned count, struct stream *stream) {
    CHANGED_MEANWHILE;
    struct stream *in = stream_of(stream);
    pthread_mutex_lock(&lock);
    for (; count--; list++) {
        for (int n = 0; n < TILES; n++)
            if (tiles[n].of && tiles[n].array == list->array && tiles[n].x == list->x && !tiles[n].gone_at)
                tiles[n].gone_at = in->done_at + 1, tiles[n].gone_in = in;
        int n = 0;
        while (tiles[n].of)
            n++;
        if (list->operation == 1) {
            tiles[n].array = list->array, tiles[n].x = list->x, tiles[n].of = list->handle;
            tiles[n].gone_at = 0, tiles[n].gone_in = NULL;
            list->handle->maps++;
        }
    }
    drop_tiles(NULL);
    pthread_mutex_unlock(&lock);
    return OK;
}
/* Called with the lock held. */
static void end_array(struct array **at) {
    struct array *array = *at;
    *at = array->next;
    drop_tiles(array);
    give(array->gpu, array->taken);
    free(array);
}
int cuArrayDestroy(struct array *array) {
    pthread_mutex_lock(&lock);
    struct array **at = &arrays;
    while (*at != array)
        at = &(*at)->next;
    end_array(at);
    pthread_mutex_unlock(&lock);
    return OK;
}
static void end_arrays(struct context *context) {
    for (struct array **at = &arrays; *at;)
        if ((*at)->context == context)
            end_array(at);
        else
            at = &(*at)->next;
}
int cuMipmappedArrayDestroy(struct array *array) { return cuArrayDestroy(array); }

/* What was freed is free to work that comes after it: in the same stream, in one that waits for that, or once it is done. */
#define PENDING 64
struct pool {
    int gpu, managed;
    uint64_t reserved, used, threshold;
    int live, destroyed, no_dependencies, known;
    struct { struct stream *in; uint64_t at, bytes; } pending[PENDING];
    struct pool *next;
};
static struct pool default_pools[GPUS], *current_pools[GPUS], *pools;

int cuStreamCreate(struct stream **stream, unsigned flags) {
    (void)flags;
    return *stream = add_stream(CURRENT, 0), OK;
}
int cuStreamGetCtx(struct stream *stream, struct context **context) {
    return is_dead(stream) ? INVALID_HANDLE : (*context = (uintptr_t)stream > 2 ? stream->context : CURRENT, OK);
}
/* The default stream of a context cannot be used while one of those that it waits for is captured. */
int cuStreamIsCapturing(struct stream *stream, int *status) {
    if (is_dead(stream))
        return INVALID_HANDLE;
    for (struct stream *other = streams; (uintptr_t)stream < 2 && other; other = other->next)
        if (other->alive && other->context == CURRENT && other->capture)
            return CAPTURE_IMPLICIT;
    return *status = (uintptr_t)stream > 2 && stream->capture, OK;
}
/* Called with the lock held: what was in the streams is done. */
static void end_streams(struct context *context) {
    for (struct pool *pool = pools; pool; pool = pool->next)
        for (int n = 0; n < PENDING; n++)
            if (pool->pending[n].bytes && pool->pending[n].in->context == context)
                pool->pending[n].bytes = 0;
    for (int n = 0; n < TILES; n++)
        if (tiles[n].of && tiles[n].gone_in && tiles[n].gone_in->context == context)
            tiles[n].gone_at = 1;
    drop_tiles(NULL);
    for (struct stream *stream = streams; stream; stream = stream->next)
        if (stream->context == context)
            stream->alive = 0, stream->capture = NULL;
    of_context[context->primary ? context - primary_contexts : GPUS + (context - contexts)].done_at = 0;
}
static struct pool *pool_of(int device) {
    if (!current_pools[device]) {
        default_pools[device].gpu = gpu_of(device);
        if (!default_pools[device].known++)
            default_pools[device].next = pools, pools = &default_pools[device];
        current_pools[device] = &default_pools[device];
    }
    return current_pools[device];
}
int cuDeviceGetMemPool(struct pool **pool, int device) { return *pool = pool_of(device), OK; }
int cuDeviceGetDefaultMemPool(struct pool **pool, int device) { return pool_of(device), *pool = &default_pools[device], OK; }
int cuDeviceSetMemPool(int device, struct pool *pool) { return current_pools[device] = pool, OK; }
int cuMemPoolCreate(struct pool **pool, const struct properties *properties) {
    CHANGED_MEANWHILE;
    *pool = calloc(1, sizeof **pool);
    (*pool)->next = pools, pools = *pool;
    (*pool)->gpu = properties->location_kind == 1 ? gpu_of(properties->location) : -1;
    (*pool)->managed = properties->kind == 2;
    return OK;
}
static int comes_after(struct stream *stream, struct stream *other);
static uint64_t pending(struct pool *pool, struct stream *to) {
    uint64_t sum = 0;
    for (int n = 0; n < PENDING; n++) {
        if (pool->pending[n].bytes && (pool->pending[n].at <= now_ns() || (to && comes_after(to, pool->pending[n].in))))
            pool->pending[n].bytes = 0;
        sum += pool->pending[n].bytes;
    }
    return sum;
}
static void pool_shrink(struct pool *pool, uint64_t keep) {
    uint64_t wanted = (pool->used + pending(pool, NULL) + 2 * MIB - 1) & ~(2 * MIB - 1);
    wanted = wanted > keep ? wanted : keep;
    if (pool->reserved > wanted) {
        if (pool->gpu >= 0)
            give(pool->gpu, pool->reserved - wanted);
        pool->reserved = wanted;
    }
}
static void pool_free(struct pool *pool, uint64_t bytes) {
    pool->used -= bytes;
    pool->live--;
    if (pool->destroyed && !pool->live)
        pool_shrink(pool, 0);
}
static int add_alloc_node(struct graph *graph, uint64_t bytes, int device, uint64_t *address);
static int add_free_node(struct graph *graph, uint64_t address);
int cuMemAllocFromPoolAsync(uint64_t *address, size_t bytes, struct pool *pool, struct stream *stream) {
    CHANGED_MEANWHILE;
    hold(BEFORE_ALLOCATION);
    if (!bytes || !address)
        return INVALID_VALUE;
    if ((uintptr_t)stream > 2 && stream->capture)
        return add_alloc_node(stream->capture, bytes, stream->context->device, address);
    uint64_t taken = (bytes + 511) & ~511ull;
    if (pool->managed && pool->gpu < 0) {
        /* It is the host's, until a kernel draws all of it to its GPU, of which the pool tells nothing. */
        int gpu = gpu_of((uintptr_t)stream > 2 ? stream->context->device : CURRENT->device), result = take(gpu, taken);
        return result ? result : (*address = add_block((struct block){bytes, taken, NULL, NULL, gpu, 0, 0}), OK);
    }
    pthread_mutex_lock(&lock);
    uint64_t used = pool->used + pending(pool, stream_of(stream));
    /* All that is free is in pieces that are too small. */
    if (getenv("MODEL_POOL_PIECES"))
        used = pool->reserved;
    int result = fail_next && used + taken <= pool->reserved ? (fail_next--, FAILED) : OK;
    if (!result && used + taken > pool->reserved) {
        uint64_t more = (used + taken - pool->reserved + POOL_STEP - 1) / POOL_STEP * POOL_STEP;
        result = pool->gpu >= 0 ? take(pool->gpu, more) : OK;
        if (!result)
            pool->reserved += more;
    }
    if (!result) {
        pool->used += taken;
        pool->live++;
    }
    pthread_mutex_unlock(&lock);
    if (!result)
        *address = add_block((struct block){bytes, taken, NULL, pool, pool->gpu, 0, 0});
    return result;
}
int cuMemAllocAsync(uint64_t *address, size_t bytes, struct stream *stream) {
    struct context *context = (uintptr_t)stream > 2 ? stream->context : CURRENT;
    return context ? cuMemAllocFromPoolAsync(address, bytes, pool_of(context->device), stream) : INVALID_CONTEXT;
}
int cuMemAllocAsync_ptsz(uint64_t *address, size_t bytes, struct stream *stream) {
    return cuMemAllocAsync(address, bytes, stream);
}
int cuMemFreeAsync(uint64_t address, struct stream *stream) {
    hold(BEFORE_FREE);
    if ((uintptr_t)stream > 2 && stream->capture)
        return add_free_node(stream->capture, address);
    pthread_mutex_lock(&lock);
    struct block *block = block_at(address);
    for (int n = 0; block && block->pool && n < PENDING; n++)
        if (!block->pool->pending[n].bytes && stream_of(stream)->done_at > now_ns()) {
            block->pool->pending[n].in = stream_of(stream);
            block->pool->pending[n].at = stream_of(stream)->done_at, block->pool->pending[n].bytes = block->taken;
            break;
        }
    pthread_mutex_unlock(&lock);
    return cuMemFree_v2(address);
}
static void shrink_all(void) {
    pthread_mutex_lock(&lock);
    for (int device = 0; device < device_count; device++) {
        if (default_pools[device].reserved)
            pool_shrink(&default_pools[device], default_pools[device].threshold);
        struct pool *current = current_pools[device];
        if (current && current != &default_pools[device])
            pool_shrink(current, current->threshold);
    }
    drop_tiles(NULL);
    pthread_mutex_unlock(&lock);
}
static _Atomic uint64_t all_done_at;
int cuStreamSynchronize(struct stream *stream) { return wait_until(stream_of(stream)->done_at), shrink_all(), OK; }
int cuCtxSynchronize(void) { return wait_until(all_done_at), shrink_all(), OK; }

/* Events: when the stream they were recorded in will have come to them. */
struct event { uint64_t at; struct stream *in; struct context *context, *all_of; };
#define NOT_READY 600
static _Atomic int events_alive, recorded_while_capturing;
int cuEventCreate(struct event **event, unsigned flags) {
    (void)flags;
    if (!CURRENT)
        return INVALID_CONTEXT;
    events_alive++;
    return *event = calloc(1, sizeof **event), (*event)->context = CURRENT, OK;
}
int cuEventDestroy_v2(struct event *event) {
    events_alive--;
    return free(event), OK;
}
int cuEventRecord(struct event *event, struct stream *stream) {
    struct stream *in = stream_of(stream);
    if (is_dead(stream) || in->context != event->context)
        return INVALID_HANDLE;
    if (in->capture)
        recorded_while_capturing++;
    uint64_t now = now_ns(), done = in->done_at;
    /* The default stream of a context comes after its others. */
    event->all_of = (uintptr_t)stream < 2 ? in->context : NULL;
    for (struct stream *other = streams; event->all_of && other; other = other->next)
        if (other->alive && other->context == in->context && other->done_at > done)
            done = other->done_at;
    return event->at = done > now ? done : now, event->in = in, OK;
}
int cuStreamWaitEvent(struct stream *stream, struct event *event, unsigned flags) {
    static int count;
    (void)flags;
    stream = stream_of(stream);
    if (stream->done_at < event->at)
        stream->done_at = event->at;
    waits[count % 64].stream = stream, waits[count % 64].all_of = event->all_of, waits[count++ % 64].other = event->in;
    return OK;
}
static int comes_after(struct stream *stream, struct stream *other) {
    for (int n = 0; n < 64; n++)
        if (stream == other ||
            (waits[n].stream == stream && (waits[n].other == other || (waits[n].all_of && waits[n].all_of == other->context))))
            return 1;
    return 0;
}
int cuStreamQuery(struct stream *stream) {
    if (is_dead(stream))
        return INVALID_HANDLE;
    return stream_of(stream)->done_at > now_ns() ? NOT_READY : OK;
}
int cuEventQuery(struct event *event) { return event->at && now_ns() < event->at ? NOT_READY : OK; }
int cuEventSynchronize(struct event *event) { return wait_until(event->at), shrink_all(), OK; }
int cuEventElapsedTime(float *milliseconds, struct event *from, struct event *to) {
    return *milliseconds = ((double)to->at - (double)from->at) / 1e6, OK;
}
int cuStreamDestroy_v2(struct stream *stream) {
    return is_dead(stream) ? INVALID_HANDLE : (stream->alive = 0, stream->capture = NULL, OK);
}
int modelEvents(void) { return events_alive; }
int modelRecordedWhileCapturing(void) { return recorded_while_capturing; }
int cuMemPoolTrimTo(struct pool *pool, size_t keep) {
    pthread_mutex_lock(&lock);
    pool_shrink(pool, keep);
    pthread_mutex_unlock(&lock);
    return OK;
}
int cuMemPoolGetAttribute(struct pool *pool, int which, void *value) {
    switch (which) {
    case 1: return *(int *)value = 1, OK;
    case 3: return *(int *)value = !pool->no_dependencies, OK;
    case 4: return *(uint64_t *)value = pool->threshold, OK;
    case 5: return *(uint64_t *)value = pool->reserved, OK;
    case 7: return *(uint64_t *)value = pool->used, OK;
    /* Drivers before 13.0 do not say where it is. */
    case 9: return getenv("MODEL_POOL_LOCATION") ? (*(int *)value = 1 + pool->managed, OK) : INVALID_VALUE;
    case 11: return getenv("MODEL_POOL_LOCATION") ? (*(int *)value = device_of(pool->gpu), OK) : INVALID_VALUE;
    case 12: return getenv("MODEL_POOL_LOCATION") ? (*(int *)value = pool->gpu < 0 ? 2 : 1, OK) : INVALID_VALUE;
    default: return INVALID_VALUE;
    }
}
int cuMemPoolSetAttribute(struct pool *pool, int which, void *value) {
    if (which == 3)
        return pool->no_dependencies = !*(int *)value, OK;
    return which == 4 ? (pool->threshold = *(uint64_t *)value, OK) : INVALID_VALUE;
}
int cuMemPoolDestroy(struct pool *pool) {
    pthread_mutex_lock(&lock);
    pool->destroyed = 1;
    if (!pool->live)
        pool_shrink(pool, 0);
    for (int device = 0; device < device_count; device++)
        if (current_pools[device] == pool)
            current_pools[device] = NULL;
    pthread_mutex_unlock(&lock);
    return OK;
}
static void drop_drawn(int gpu);
int cuDevicePrimaryCtxReset_v2(int device) {
    pthread_mutex_lock(&lock);
    take_along(&primary_contexts[device]);
    primary_contexts[device].alive = 0;
    drop_drawn(gpu_of(device));
    struct pool *pool = &default_pools[device];
    for (int n = 1; n < fresh; n++)
        if (blocks[n].bytes && blocks[n].pool == pool)
            drop_block(&blocks[n]);
    pool->used = pool->live = 0;
    pool_shrink(pool, 0);
    pthread_mutex_unlock(&lock);
    return OK;
}

/* ---- graphs: chains of nodes, of which only those that allocate and free do anything ---- */

struct node { int kind, device; uint64_t bytes, address; struct graph *inner; int managed_at; /* a kind of location, and 1 */ };
struct graph { int count; struct node nodes[64]; };
/* Graphs of one stream have the same memory, one after the other. One that is launched in another stream has that one's, of which
 * the driver may pull some from a stream that is idle, and so has one after memory was left behind in its stream. */
struct exec { struct stream *mapped_in; int device, leaves, left, count; uint64_t bytes, managed, drawn; int drawn_to; struct exec *next; };
static struct exec *execs;
static struct { struct stream *of; uint64_t bytes[GPUS]; } graph_memory[64];
static uint64_t graph_left[GPUS]; /* what was left behind, which is nobody's to use */
static uint64_t *graph_memory_of(struct stream *stream) {
    int n = 0;
    while (graph_memory[n].of && graph_memory[n].of != stream)
        n++;
    graph_memory[n].of = stream;
    return graph_memory[n].bytes;
}
static void unmap_execs(int device, struct stream *in) {
    for (struct exec *exec = execs; exec; exec = exec->next)
        if (exec->device == device && exec->mapped_in == in)
            exec->mapped_in = NULL;
}
static void drop_drawn(int gpu) {
    for (struct exec *exec = execs; exec; exec = exec->next)
        if (exec->drawn && exec->drawn_to == gpu)
            give(gpu, exec->drawn), exec->drawn = 0;
}
static uint64_t graph_reserved(int device) {
    uint64_t sum = graph_left[device];
    for (int n = 0; n < 64; n++)
        sum += graph_memory[n].bytes[device];
    return sum;
}

int cuGraphCreate(struct graph **graph, unsigned flags) { return (void)flags, *graph = calloc(1, sizeof **graph), OK; }
static int add_alloc_node(struct graph *graph, uint64_t bytes, int device, uint64_t *address) {
    *address = 0x7c0000000000ull + (uint64_t)rand() * MIB;
    return graph->nodes[graph->count++] = (struct node){10, device, bytes, *address, NULL, 0}, OK;
}
static int add_free_node(struct graph *graph, uint64_t address) {
    return graph->nodes[graph->count++] = (struct node){11, 0, 0, address, NULL, 0}, OK;
}
int cuGraphAddMemFreeNode(struct node **node, struct graph *graph, void *after, size_t count, uint64_t address) {
    (void)after, (void)count;
    return *node = &graph->nodes[graph->count], add_free_node(graph, address);
}
int cuGraphMemFreeNodeGetParams(struct node *node, uint64_t *address) { return *address = node->address, OK; }
struct alloc { struct properties pool; uint64_t rest[9]; void *access; size_t access_count, bytes; uint64_t address; };
int cuGraphAddMemAllocNode(struct node **node, struct graph *graph, void *after, size_t count, struct alloc *alloc) {
    (void)after, (void)count;
    *node = &graph->nodes[graph->count];
    add_alloc_node(graph, alloc->bytes, alloc->pool.location, &alloc->address);
    if (alloc->pool.kind == 2 && alloc->pool.location_kind != 1)
        (*node)->managed_at = alloc->pool.location_kind + 1;
    return OK;
}
int cuGraphAddChildGraphNode(struct node **node, struct graph *graph, void *after, size_t count, struct graph *inner) {
    (void)after, (void)count;
    *node = &graph->nodes[graph->count];
    graph->nodes[graph->count++] = (struct node){4, 0, 0, 0, inner, 0};
    return OK;
}
int cuGraphGetNodes(struct graph *graph, struct node **nodes, size_t *count) {
    for (int n = 0; nodes && n < graph->count && n < (int)*count; n++)
        nodes[n] = &graph->nodes[n];
    return *count = graph->count, OK;
}
int cuGraphNodeGetType(struct node *node, int *kind) { return *kind = node->kind, OK; }
int cuGraphChildGraphNodeGetGraph(struct node *node, struct graph **graph) { return *graph = node->inner, OK; }
int cuGraphMemAllocNodeGetParams(struct node *node, struct alloc *alloc) {
    memset(alloc, 0, sizeof *alloc);
    alloc->pool = (struct properties){1, 0, 1, node->device};
    if (node->managed_at)
        alloc->pool.kind = 2, alloc->pool.location_kind = node->managed_at - 1;
    return alloc->bytes = node->bytes, alloc->address = node->address, OK;
}
/* Small allocations share pages. */
static void add_up(struct graph *graph, int managed, uint64_t *large, uint64_t *small) {
    for (int n = 0; n < graph->count; n++) {
        uint64_t bytes = graph->nodes[n].bytes;
        if (graph->nodes[n].kind == 4)
            add_up(graph->nodes[n].inner, managed, large, small);
        else if (!graph->nodes[n].managed_at != !managed)
            continue;
        else if (graph->nodes[n].kind == 10 && bytes > MIB)
            *large += (bytes + 2 * MIB - 1) & ~(2 * MIB - 1);
        else if (graph->nodes[n].kind == 10)
            *small += (bytes + 511) & ~511ull;
    }
}
static uint64_t size_of_graph(struct graph *graph, int managed) {
    uint64_t large = 0, small = 0;
    add_up(graph, managed, &large, &small);
    return large + ((small + 2 * MIB - 1) & ~(2 * MIB - 1));
}
static int leaves(struct graph *graph) {
    int count = 0;
    for (int n = 0; n < graph->count; n++)
        count += graph->nodes[n].kind == 10 ? 1 : graph->nodes[n].kind == 11 ? -1 : graph->nodes[n].kind == 4 && leaves(graph->nodes[n].inner);
    return count > 0;
}
int cuGraphInstantiateWithFlags(struct exec **exec, struct graph *graph, uint64_t flags) {
    CHANGED_MEANWHILE;
    (void)flags;
    struct exec *made = calloc(1, sizeof *made);
    made->device = CURRENT->device;
    made->bytes = size_of_graph(graph, 0), made->managed = size_of_graph(graph, 1);
    made->leaves = leaves(graph);
    made->count = graph->count;
    pthread_mutex_lock(&lock);
    made->next = execs, execs = made;
    pthread_mutex_unlock(&lock);
    return *exec = made, hold(AFTER_INSTANTIATION), OK;
}
int cuGraphUpload(struct exec *exec, struct stream *stream);
struct instantiate { uint64_t flags; struct stream *upload_stream; struct node *error_node; int result; };
int cuGraphInstantiateWithParams(struct exec **exec, struct graph *graph, struct instantiate *parameters) {
    parameters->error_node = NULL;
    int result = cuGraphInstantiateWithFlags(exec, graph, parameters->flags);
    if (!result && parameters->flags & 2)
        result = cuGraphUpload(*exec, parameters->upload_stream);
    return parameters->result = !!result, result;
}
/* The same nodes, with other parameters. */
int cuGraphExecUpdate_v2(struct exec *exec, struct graph *graph, int *result) {
    if (exec->count != graph->count)
        return *result = 2, UPDATE_FAILURE;
    exec->bytes = size_of_graph(graph, 0), exec->leaves = leaves(graph), exec->mapped_in = NULL;
    exec->managed = size_of_graph(graph, 1);
    return *result = 0, OK;
}
int cuGraphExecUpdate(struct exec *exec, struct graph *graph, struct node **node, int *result) {
    return *node = NULL, cuGraphExecUpdate_v2(exec, graph, result);
}
static uint64_t graph_takes;
void modelGraphTakes(uint64_t takes) { graph_takes = takes; }
static int kernel(uint64_t takes, struct stream *stream);
int cuGraphLaunch(struct exec *exec, struct stream *stream) {
    int result = OK, device = exec->device;
    stream = stream_of(stream);
    hold(BEFORE_LAUNCH);
    pthread_mutex_lock(&lock);
    uint64_t *has = &graph_memory_of(stream)[device];
    /* Its kernels draw all of its managed memory to where it first runs; no figure of graphs tells of that. */
    if (exec->managed != exec->drawn) {
        if (!exec->drawn)
            exec->drawn_to = gpu_of(stream->context->device);
        give(exec->drawn_to, exec->drawn);
        exec->drawn = 0;
        if (!(result = take(exec->drawn_to, exec->managed)))
            exec->drawn = exec->managed;
    }
    if (!result && exec->bytes && exec->mapped_in != stream && !exec->left) {
        uint64_t more = exec->bytes > *has ? exec->bytes - *has : 0;
        for (int n = 0; n < 64 && more && getenv("MODEL_GRAPHS_PULL"); n++) {
            uint64_t *other = &graph_memory[n].bytes[device];
            if (!*other || graph_memory[n].of == stream || graph_memory[n].of->done_at > now_ns())
                continue;
            uint64_t pulled = *other < more ? *other : more;
            unmap_execs(device, graph_memory[n].of);
            *other -= pulled, *has += pulled, more -= pulled;
        }
        result = more ? take(gpu_of(device), more) : OK;
        if (!result)
            *has += more, exec->mapped_in = stream;
    }
    if (!result && exec->leaves && !exec->left) {
        /* It keeps what it has; others must do without. */
        unmap_execs(device, stream);
        *has -= exec->bytes, graph_left[device] += exec->bytes, exec->left = 1;
    }
    pthread_mutex_unlock(&lock);
    hold(AFTER_LAUNCH);
    return result ? result : kernel(graph_takes, stream);
}
int cuGraphLaunch_ptsz(struct exec *exec, struct stream *stream) {
    return cuGraphLaunch(exec, stream ? stream : (struct stream *)2);
}
int cuGraphUpload(struct exec *exec, struct stream *stream) {
    uint64_t takes = graph_takes;
    graph_takes = 0;
    int result = cuGraphLaunch(exec, stream);
    return graph_takes = takes, result;
}
int cuGraphExecDestroy(struct exec *exec) {
    hold(BEFORE_EXEC_DESTROY);
    if (fail_next)
        return fail_next--, FAILED;
    pthread_mutex_lock(&lock);
    struct exec **at = &execs;
    while (*at && *at != exec)
        at = &(*at)->next;
    if (*at)
        *at = exec->next;
    give(exec->drawn_to, exec->drawn);
    pthread_mutex_unlock(&lock);
    return free(exec), OK;
}
/* Whoever looks into it later finds nothing there. */
int cuGraphDestroy(struct graph *graph) { return graph->count = 0, OK; }
int cuDeviceGraphMemTrim(int device) {
    pthread_mutex_lock(&lock);
    for (int n = 0; n < 64; n++)
        if (graph_memory[n].of && graph_memory[n].of->done_at <= now_ns()) {
            unmap_execs(device, graph_memory[n].of);
            give(gpu_of(device), graph_memory[n].bytes[device]);
            graph_memory[n].bytes[device] = 0;
        }
    pthread_mutex_unlock(&lock);
    return OK;
}
int cuDeviceGetGraphMemAttribute(int device, int which, void *value) {
    return which == 2 ? (*(uint64_t *)value = graph_reserved(device), OK) : INVALID_VALUE;
}
int cuStreamBeginCapture_v2(struct stream *stream, int mode) { return (void)mode, cuGraphCreate(&stream->capture, 0); }
int cuStreamEndCapture(struct stream *stream, struct graph **graph) {
    return *graph = stream->capture, stream->capture = NULL, OK;
}
int cuStreamEndCaptureToCig(struct stream *stream) { return stream->capture = NULL, OK; }
int cuStreamEndCaptureToCig_ptsz(struct stream *stream) { return cuStreamEndCaptureToCig(stream); }

/* ---- launches ---- */

static int kernel(uint64_t takes, struct stream *stream) {
    stream = stream_of(stream);
    if (!takes || stream->capture)
        return OK;
    if (!CURRENT)
        return INVALID_CONTEXT;
    int gpu = gpu_of(CURRENT->device);
    uint64_t free_at = state->free_at[gpu], done;
    do {
        uint64_t start = now_ns();
        start = start > free_at ? start : free_at;
        start = start > stream->done_at ? start : stream->done_at;
        done = start + takes;
    } while (!atomic_compare_exchange_weak(&state->free_at[gpu], &free_at, done));
    stream->done_at = done;
    if (all_done_at < done)
        all_done_at = done;
    state->busy[gpu] += takes;
    return OK;
}
int cuLaunchKernel(void *f, unsigned a, unsigned b, unsigned c, unsigned d, unsigned e, unsigned g, unsigned h, void *i,
                   void **j, void **k) {
    static volatile int launched;
    (void)a, (void)b, (void)c, (void)d, (void)e, (void)g, (void)h, (void)j, (void)k;
    launched = 1;
    return f ? kernel((uintptr_t)f, i) : launched - 1;
}
int cuLaunchKernel_ptsz(void *f, unsigned a, unsigned b, unsigned c, unsigned d, unsigned e, unsigned g, unsigned h,
                        void *i, void **j, void **k) {
    return cuLaunchKernel(f, a, b, c, d, e, g, h, i ? i : (void *)2, j, k);
}
struct config { unsigned extents[7]; struct stream *stream; void *attributes; unsigned count; };
int cuLaunchKernelEx(const struct config *config, void *f, void **parameters, void **extra) {
    return (void)parameters, (void)extra, kernel((uintptr_t)f, config->stream);
}
int cuLaunchKernelEx_ptsz(const struct config *config, void *f, void **parameters, void **extra) {
    return (void)parameters, (void)extra, kernel((uintptr_t)f, config->stream ? config->stream : (struct stream *)2);
}
int cuLaunchCooperativeKernel(void *f, unsigned a, unsigned b, unsigned c, unsigned d, unsigned e, unsigned g, unsigned h,
                              void *i, void **j) {
    return cuLaunchKernel(f, a, b, c, d, e, g, h, i, j, NULL);
}
int cuLaunchCooperativeKernel_ptsz(void *f, unsigned a, unsigned b, unsigned c, unsigned d, unsigned e, unsigned g,
                                   unsigned h, void *i, void **j) {
    return cuLaunchKernel(f, a, b, c, d, e, g, h, i ? i : (void *)2, j, NULL);
}
struct multi { void *f; unsigned extents[7]; struct stream *stream; void **parameters; };
int cuLaunchCooperativeKernelMultiDevice(struct multi *list, unsigned count, unsigned flags) {
    (void)flags;
    for (unsigned n = 0; n < count; n++)
        kernel((uintptr_t)list[n].f, list[n].stream);
    return OK;
}
int cuLaunch(void *f) { return kernel((uintptr_t)f, NULL); }
int cuLaunchGrid(void *f, int width, int height) { return (void)width, (void)height, kernel((uintptr_t)f, NULL); }
int cuLaunchGridAsync(void *f, int width, int height, struct stream *stream) {
    return (void)width, (void)height, kernel((uintptr_t)f, stream);
}

int cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags, int *status) {
    /* The newest there is here, but its own first version for those that know no other. */
    const char *suffixes[] = {flags == 2 ? "_ptsz" : "_v2", "_v2", ""};
    for (int n = version < 12000 && !strcmp(symbol, "cuGetProcAddress") ? 2 : 0; n < 3; n++) {
        char name[128];
        snprintf(name, sizeof name, "%s%s", symbol, suffixes[n]);
        /* The C library's dlsym, as the real driver's table is its own. */
        static void *(*look)(void *, const char *);
        if (!look)
            look = dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5");
        if ((*function = look(dlopen("/usr/local/vcuda/driver/libcuda.so.1", RTLD_NOW), name)))
            return status ? *status = 0 : 0, OK;
    }
    return status ? *status = 1 : 0, OK;
}
/* Whoever asks so is not told why there is none. */
int cuGetProcAddress(const char *symbol, void **function, int version, uint64_t flags) {
    int status, result = cuGetProcAddress_v2(symbol, function, version, flags, &status);
    return !result && status ? NOT_FOUND : result;
}

/* ---- NVML ---- */

int nvmlInit_v2(void) {
    if (state)
        return 0;
    int fd = open(getenv("MODEL_STATE"), O_RDWR | O_CLOEXEC);
    if (fd < 0)
        return 999;
    state = mmap(NULL, sizeof *state, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    return close(fd), 0;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    return index >= GPUS ? 2 : (*device = (void *)(uintptr_t)(0x1000 + index), 0);
}
#define INDEX(device) ((int)((uintptr_t)(device) - 0x1000))
int nvmlDeviceGetUUID(void *device, char *text, unsigned size) {
    return snprintf(text, size, "GPU-67000000-0000-0000-0000-%012x", INDEX(device)), 0;
}
int nvmlDeviceGetMemoryInfo(void *device, uint64_t *memory) {
    if (!memory || INDEX(device) < 0 || INDEX(device) >= GPUS)
        return 2;
    uint64_t used = held(INDEX(device));
    return memory[0] = state->total[INDEX(device)], memory[1] = memory[0] - used, memory[2] = used, 0;
}
int nvmlDeviceGetMemoryInfo_v2(void *device, uint64_t *memory) {
    if (!memory || (unsigned)memory[0] != (40 | 2 << 24))
        return 25;
    uint64_t used = held(INDEX(device)), total = state->total[INDEX(device)];
    return memory[1] = total, memory[2] = 500 * MIB, memory[3] = total - used - 500 * MIB, memory[4] = used, 0;
}
struct process { unsigned pid; uint64_t bytes; unsigned gpu_instance, compute_instance; };
int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, struct process *list) {
    if (!count || INDEX(device) < 0 || INDEX(device) >= GPUS)
        return 2;
    unsigned room = *count, found = 0;
    for (int n = 0; n < CLIENTS; n++)
        if (state->clients[n].pid) {
            if (found < room && list)
                list[found] = (struct process){state->clients[n].pid, state->clients[n].used[INDEX(device)], -1, -1};
            found++;
        }
    return *count = found, found > room ? 7 : 0;
}
int nvmlDeviceGetGraphicsRunningProcesses_v3(void *device, unsigned *count, struct process *list) {
    return nvmlDeviceGetComputeRunningProcesses_v3(device, count, list);
}
struct process_v1 { unsigned pid; uint64_t bytes; };
int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *count, struct process_v1 *list) {
    struct process all[CLIENTS];
    int result = nvmlDeviceGetComputeRunningProcesses_v3(device, count, list ? all : NULL);
    for (unsigned n = 0; !result && list && n < *count; n++)
        list[n] = (struct process_v1){all[n].pid, all[n].bytes};
    return result;
}
#define ALIKE(name, type, other) int name(void *device, unsigned *count, type *list) { return other(device, count, list); }
ALIKE(nvmlDeviceGetComputeRunningProcesses_v2, struct process, nvmlDeviceGetComputeRunningProcesses_v3)
ALIKE(nvmlDeviceGetGraphicsRunningProcesses, struct process_v1, nvmlDeviceGetComputeRunningProcesses)
ALIKE(nvmlDeviceGetGraphicsRunningProcesses_v2, struct process, nvmlDeviceGetComputeRunningProcesses_v3)
ALIKE(nvmlDeviceGetMPSComputeRunningProcesses, struct process_v1, nvmlDeviceGetComputeRunningProcesses)
ALIKE(nvmlDeviceGetMPSComputeRunningProcesses_v2, struct process, nvmlDeviceGetComputeRunningProcesses_v3)
ALIKE(nvmlDeviceGetMPSComputeRunningProcesses_v3, struct process, nvmlDeviceGetComputeRunningProcesses_v3)
struct detail { unsigned pid; uint64_t bytes; unsigned instances[2]; uint64_t protected_bytes; };
struct details { unsigned version, mode, count; struct detail *list; };
int nvmlDeviceGetRunningProcessDetailList(void *device, struct details *details) {
    struct process all[CLIENTS];
    int result = nvmlDeviceGetComputeRunningProcesses_v3(device, &details->count, all);
    for (unsigned n = 0; !result && n < details->count; n++)
        details->list[n] = (struct detail){all[n].pid, all[n].bytes, {-1, -1}, 0};
    return result;
}
int nvmlDeviceGetAccountingPids(void *device, unsigned *count, unsigned *pids) {
    struct process all[CLIENTS];
    int result = nvmlDeviceGetComputeRunningProcesses_v3(device, count, all);
    for (unsigned n = 0; !result && n < *count; n++)
        pids[n] = all[n].pid;
    return result;
}
int nvmlDeviceGetAccountingStats(void *device, unsigned pid, unsigned *stats) { return (void)device, stats[0] = pid, 0; }
int nvmlDeviceGetAccountingStats_v2(void *device, unsigned pid, unsigned *stats) { return (void)device, stats[0] = pid, 0; }
struct sample { unsigned pid; uint64_t time; unsigned utilization[4]; };
int nvmlDeviceGetProcessUtilization(void *device, struct sample *samples, unsigned *count, uint64_t since) {
    (void)device, (void)since;
    unsigned found = 0, room = *count;
    for (int n = 0; n < CLIENTS; n++)
        if (state->clients[n].pid > 0) {
            if (samples && found < room)
                samples[found] = (struct sample){state->clients[n].pid, 1, {50, 0, 0, 0}};
            found++;
        }
    return *count = found, !samples || found > room ? 7 : 0;
}
struct info { uint64_t time; unsigned pid, utilization[6]; };
struct infos { unsigned version, count; uint64_t since; struct info *list; };
int nvmlDeviceGetProcessesUtilizationInfo(void *device, struct infos *infos) {
    struct process all[CLIENTS];
    int result = nvmlDeviceGetComputeRunningProcesses_v3(device, &infos->count, all);
    for (unsigned n = 0; !result && n < infos->count; n++)
        infos->list[n] = (struct info){1, all[n].pid, {50}};
    return result;
}
int nvmlDeviceGetUtilizationRates(void *device, unsigned *rates) { return (void)device, rates[0] = 90, rates[1] = 80, 0; }

/* ---- names of other ABIs: for per-thread default streams, as they were before _v2, and with 32 bits ---- */

int cuMemAllocFromPoolAsync_ptsz(uint64_t *address, size_t bytes, struct pool *pool, struct stream *stream) {
    return cuMemAllocFromPoolAsync(address, bytes, pool, stream);
}
int cuMemFreeAsync_ptsz(uint64_t address, struct stream *stream) { return cuMemFreeAsync(address, stream); }
int cuMemMapArrayAsync_ptsz(struct map_info *list, unsigned count, struct stream *stream) {
    return cuMemMapArrayAsync(list, count, stream);
}
int cuStreamSynchronize_ptsz(struct stream *stream) { return cuStreamSynchronize(stream); }
int cuStreamEndCapture_ptsz(struct stream *stream, struct graph **graph) { return cuStreamEndCapture(stream, graph); }
int cuGraphUpload_ptsz(struct exec *exec, struct stream *stream) { return cuGraphUpload(exec, stream); }
int cuGraphInstantiateWithParams_ptsz(struct exec **exec, struct graph *graph, struct instantiate *parameters) {
    return cuGraphInstantiateWithParams(exec, graph, parameters);
}
int cuGraphInstantiate(struct exec **exec, struct graph *graph, struct node **node, char *log, size_t size) {
    return (void)node, (void)log, (void)size, cuGraphInstantiateWithFlags(exec, graph, 0);
}
int cuGraphInstantiate_v2(struct exec **exec, struct graph *graph, struct node **node, char *log, size_t size) {
    return cuGraphInstantiate(exec, graph, node, log, size);
}
int cuCtxDestroy(struct context *context) { return cuCtxDestroy_v2(context); }
int cuCtxDetach(struct context *context) { return cuCtxDestroy_v2(context); }
int cuCtxSynchronize_v2(struct context *context) { return (void)context, cuCtxSynchronize(); }
int cuStreamDestroy(struct stream *stream) { return cuStreamDestroy_v2(stream); }
int cuIpcOpenMemHandle(uint64_t *address, struct ipc handle, unsigned flags) {
    return cuIpcOpenMemHandle_v2(address, handle, flags);
}
int cuDevicePrimaryCtxRelease(int device) { return cuDevicePrimaryCtxRelease_v2(device); }
int cuDevicePrimaryCtxReset(int device) { return cuDevicePrimaryCtxReset_v2(device); }
int cuMemAlloc(uint32_t *address, uint32_t bytes) {
    uint64_t made;
    int result = cuMemAlloc_v2(&made, bytes);
    return result ? result : (*address = made - BASE, OK);
}
int cuMemAllocPitch(uint32_t *address, uint32_t *pitch, uint32_t width, uint32_t height, unsigned element) {
    uint64_t made;
    size_t length;
    int result = cuMemAllocPitch_v2(&made, &length, width, height, element);
    return result ? result : (*address = made - BASE, *pitch = length, OK);
}
int cuMemFree(uint32_t address) { return cuMemFree_v2(BASE + address); }
int cuMemGetInfo(uint32_t *free, uint32_t *total) {
    size_t left, all;
    int result = cuMemGetInfo_v2(&left, &all);
    return result ? result : (*free = left, *total = all, OK);
}
int cuDeviceTotalMem(uint32_t *bytes, int device) {
    size_t all;
    int result = cuDeviceTotalMem_v2(&all, device);
    return result ? result : (*bytes = all, OK);
}
struct flat_32 { uint32_t width, height; unsigned format, channels; };
int cuArrayCreate(struct array **array, const struct flat_32 *of) {
    return make_array(array, size_of(&(struct shape){of->width, of->height, 0, of->format, of->channels, 0}), 0);
}
struct shape_32 { uint32_t width, height, depth; unsigned format, channels, flags; };
int cuArray3DCreate(struct array **array, const struct shape_32 *of) {
    struct shape shape = {of->width, of->height, of->depth, of->format, of->channels, of->flags};
    return cuArray3DCreate_v2(array, &shape);
}
