/* A CUDA program that does what it is told, a command a line: `alloc 1048576` → `0 138247372800`, the driver's result and
 * what it gave. With `stress SEED COUNT` it does as it likes with everything that takes memory. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <fenv.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

typedef uint64_t u64;
static void *cuda, *nvml;

/* Looks up what is about to be called, and leaves its name in the folder SESSION_CALLS. */
static void *look_up(void *library, const char *name) {
    char path[4096];
    int before = errno;
    void *address = dlsym(library, name);
    if (address && getenv("SESSION_CALLS")) {
        snprintf(path, sizeof path, "%s/%s", getenv("SESSION_CALLS"), name);
        close(open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0666));
    }
    return errno = before, address;
}

static void *function(const char *name) {
    static struct { const char *name; void *address; } known[128];
    for (int n = 0; n < 128; n++) {
        if (known[n].name == name)
            return known[n].address;
        if (!known[n].name) {
            void *address = NULL;
            if (getenv("SESSION_RESOLVES") && strncmp(name, "nvml", 4)) {
                /* As a runtime of that version does: one look-up by name, and, from 12.0 on, through what that gives one of itself;
                   then all others. */
                typedef int (*get)(const char *, void **, int, u64, int *);
                static get resolve;
                int version = atoi(getenv("SESSION_RESOLVES"));
                if (!resolve) {
                    get first = (get)look_up(cuda, version < 12000 ? "cuGetProcAddress" : "cuGetProcAddress_v2");
                    if (!first || first("cuGetProcAddress", (void **)&resolve, version, 0, NULL) || !resolve)
                        exit(3);
                }
                char base[80];
                strcpy(base, name);
                char *end = strstr(base, "_ptsz"), *number = strstr(base, "_v2");
                u64 flags = end ? 2 : 0;
                if (end)
                    *end = 0;
                if (number)
                    *number = 0;
                resolve(base, &address, version, flags, NULL);
            } else if (getenv("SESSION_PER_THREAD")) {
                /* By the name for per-thread default streams, where there is one. */
                char other[96];
                sprintf(other, "%s_ptsz", name);
                address = look_up(cuda, other);
            }
            if (!address)
                address = look_up(strncmp(name, "nvml", 4) ? cuda : nvml, name);
            if (!address)
                fprintf(stderr, "%s: %s\n", name, dlerror()), exit(3);
            known[n].address = address;
            return known[n].name = name, address;
        }
    }
    abort();
}
/* All arguments are integers or pointers, which are passed alike. */
#define CALL(name, ...) ((int (*)())function(name))(__VA_ARGS__)

static void *of_model(const char *name) { return dlsym(dlopen("/usr/local/vcuda/driver/libcuda.so.1", RTLD_NOW), name); }

struct properties { int kind, handle_types, location_kind, location; u64 rest[9]; };
struct shape { size_t width, height, depth; unsigned format, channels, flags; };
struct alloc { struct properties pool; void *access; size_t access_count, bytes; u64 address; };

/* Launches a kernel that takes so long, by one of the doors. */
static int launch_by(int door, u64 takes, u64 stream) {
    static u64 exec;
    struct { unsigned extents[7]; u64 stream; void *attributes; unsigned count; } config = {{1, 1, 1, 1, 1, 1, 0}, stream, NULL, 0};
    struct { u64 f; unsigned extents[7]; u64 stream; void *parameters; } list = {takes, {1, 1, 1, 1, 1, 1, 0}, stream, NULL};
    switch (door) {
    case 0: return CALL("cuLaunchKernel", takes, 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL);
    case 1: return CALL("cuLaunchKernelEx", &config, takes, NULL, NULL);
    case 2: return CALL("cuLaunchCooperativeKernel", takes, 1, 1, 1, 1, 1, 1, 0, stream, NULL);
    case 3: return CALL("cuLaunchCooperativeKernelMultiDevice", &list, 1, 0);
    case 4: return CALL("cuLaunchGridAsync", takes, 1, 1, stream);
    case 5: return CALL("cuLaunch", takes);
    case 6: return CALL("cuLaunchGrid", takes, 1, 1);
    case 7: return CALL("cuLaunchKernel_ptsz", takes, 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL);
    case 8: return CALL("cuLaunchKernelEx_ptsz", &config, takes, NULL, NULL);
    case 9: return CALL("cuLaunchCooperativeKernel_ptsz", takes, 1, 1, 1, 1, 1, 1, 0, stream, NULL);
    default:
        if (!exec) {
            u64 graph;
            if (CALL("cuGraphCreate", &graph, 0UL) || CALL("cuGraphInstantiateWithFlags", &exec, graph, 0UL))
                return -1;
            ((void (*)(u64))of_model("modelGraphTakes"))(takes);
        }
        return CALL("cuGraphLaunch", exec, stream);
    }
}

static u64 now_ms(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000ull + time.tv_nsec / 1000000;
}

static int command(const char *name, u64 a, u64 b, u64 c, u64 *out);

/* What another thread does to the arguments of the next call: see modelChanges. */
static struct { int wanted, at_end, after_calls, from, size; u64 with; } change_in, change_out;
static void passes(typeof(change_in) *change, void *argument) {
    void (*changes)(int, int, void *, const void *, size_t) = (void (*)(int, int, void *, const void *, size_t))of_model("modelChanges");
    if (change->wanted)
        changes(change->at_end, change->after_calls, (char *)argument + change->from, &change->with, change->size);
    change->wanted = 0;
}

/* Commands that other threads do. */
static struct beside { pthread_t id; const char *name; u64 a, b, c, context, out[2]; int result; _Atomic int ended; } besides[4];
static int beside_count;
/* Who waits for a lock of the library's sleeps by this. */
static _Atomic pthread_t asleep;
int nanosleep(const struct timespec *time, struct timespec *left) {
    asleep = pthread_self();
    return syscall(SYS_nanosleep, time, left);
}
static void *do_beside(void *argument) {
    struct beside *of = argument;
    CALL("cuCtxSetCurrent", of->context);
    of->result = command(of->name, of->a, of->b, of->c, of->out);
    of->ended = 1;
    return NULL;
}
/* Starts one, and comes back when it has ended, is held in the driver, or waits for a lock. */
static int start_beside(const char *name, u64 a, u64 b, u64 c) {
    pthread_t (*held)(void) = (pthread_t (*)(void))of_model("modelHeldThread");
    struct beside *of = &besides[beside_count++];
    *of = (struct beside){.name = strdup(name), .a = a, .b = b, .c = c};
    CALL("cuCtxGetCurrent", &of->context);
    asleep = 0;
    if (pthread_create(&of->id, NULL, do_beside, of))
        return -1;
    while (!of->ended && held() != of->id && asleep != of->id)
        sched_yield();
    return 0;
}
/* All go on to their end: the results of the first two, and what the first made. */
static int end_besides(u64 *out) {
    ((void (*)(void))of_model("modelGoOn"))();
    for (int n = 0; n < beside_count; n++)
        pthread_join(besides[n].id, NULL);
    out[0] = besides[0].out[0], out[1] = beside_count > 1 ? besides[1].result : 0, beside_count = 0;
    return besides[0].result;
}

/* What a child tries with what it has from its parent: the parent's block, memory of its own, a new start. */
static void as_child(u64 block) {
    u64 got[2];
    ((void (*)(void))of_model("modelInChild"))();
    CALL("cuMemFree_v2", block);
    CALL("cuMemAlloc_v2", got, 512UL);
    CALL("cuMemGetInfo_v2", got, got + 1);
    CALL("cuInit", 0UL);
}
static int run_child(void *block) { return as_child((u64)block), 0; }
static int exit_child(void *unused) { (void)unused, exit(0); }
static int quiet_child(void *unused) { (void)unused, _exit(0); }
static void *run_thread(void *unused) { return unused; }

static int child_by(const char *how, u64 block) {
    static char stack[1 << 20] __attribute__((aligned(16)));
    int status = 0;
    pid_t child = -1;
    fflush(stdout);
    if (!strcmp(how, "fork"))
        child = fork();
    else if (!strcmp(how, "clone")) /* Past the C library's handlers. */
        child = syscall(SYS_clone, SIGCHLD, NULL, NULL, NULL, NULL);
    else if (!strcmp(how, "clone3")) {
        struct { u64 flags, pidfd, child_tid, parent_tid, exit_signal, rest[3]; } arguments = {.exit_signal = SIGCHLD};
        child = syscall(SYS_clone3, &arguments, sizeof arguments);
    } else if (!strcmp(how, "clone-shared-files")) /* It closes nothing of its parent's by ending. */
        child = clone(run_child, stack + sizeof stack, CLONE_FILES | CLONE_FS | SIGCHLD, (void *)block);
    else if (!strcmp(how, "vfork")) {
        child = vfork();
        if (!child)
            _exit(0);
    } else if (!strcmp(how, "clone-vm"))
        child = clone(quiet_child, stack + sizeof stack, CLONE_VM | CLONE_VFORK | SIGCHLD, NULL);
    else if (!strcmp(how, "clone-vm-exit")) /* Runs what is registered for the parent's end (HAMi-core#292). */
        child = clone(exit_child, stack + sizeof stack, CLONE_VM | CLONE_VFORK | SIGCHLD, NULL);
    else if (!strcmp(how, "spawn")) {
        char *arguments[] = {"true", NULL};
        if (posix_spawn(&child, "/bin/true", NULL, NULL, arguments, NULL))
            return -1;
    } else if (!strcmp(how, "thread")) {
        pthread_t thread;
        return pthread_create(&thread, NULL, run_thread, NULL) || pthread_join(thread, NULL);
    }
    if (!child)
        as_child(block), _exit(0);
    if (child < 0 || waitpid(child, &status, 0) != child)
        return -1;
    return status;
}

static void *end_thread(void *unused) { (void)unused, exit(0); }
static void end_handler(int unused) { (void)unused, _exit(0); }
static void end_by(const char *how) {
    if (!strcmp(how, "exit")) exit(0);
    if (!strcmp(how, "quick-exit")) quick_exit(0);
    if (!strcmp(how, "raw-exit")) syscall(SYS_exit_group, 0);
    struct rlimit none = {0, 0};
    setrlimit(RLIMIT_CORE, &none);
    if (!strcmp(how, "abort")) abort();
    if (!strcmp(how, "segfault")) signal(SIGSEGV, SIG_DFL), raise(SIGSEGV);
    if (!strcmp(how, "exit-in-handler")) signal(SIGUSR1, end_handler), raise(SIGUSR1);
    pthread_t thread;
    pthread_create(&thread, NULL, end_thread, NULL);
    for (;;)
        pause();
}

/* What a library must leave alone, each as one number. */
enum { HANDLERS, MASK, UMASK, ENVIRONMENT, FOLDER, ROUNDING, STACK, TIMER, PARTS };
static u64 mix(u64 hash, const void *bytes, size_t size) {
    for (size_t n = 0; n < size; n++)
        hash = (hash ^ ((const unsigned char *)bytes)[n]) * 1099511628211ull;
    return hash;
}
static void surroundings(u64 *parts) {
    extern char **environ;
    memset(parts, 0, PARTS * sizeof *parts);
    for (int n = 1; n < 65; n++) {
        struct sigaction action;
        memset(&action, 0, sizeof action);
        if (!sigaction(n, NULL, &action))
            parts[HANDLERS] = mix(parts[HANDLERS], &action.sa_handler, sizeof action.sa_handler) + action.sa_flags;
    }
    sigset_t mask;
    memset(&mask, 0, sizeof mask);
    pthread_sigmask(SIG_SETMASK, NULL, &mask);
    parts[MASK] = mix(0, &mask, sizeof mask);
    umask(parts[UMASK] = umask(0));
    for (char **at = environ; *at; at++)
        parts[ENVIRONMENT] = mix(mix(parts[ENVIRONMENT], at, sizeof at), *at, strlen(*at));
    char folder[4096];
    parts[FOLDER] = mix(0, folder, strlen(getcwd(folder, sizeof folder)));
    parts[ROUNDING] = fegetround();
    stack_t stack;
    sigaltstack(NULL, &stack);
    parts[STACK] = stack.ss_flags;
    struct itimerval timer;
    getitimer(ITIMER_REAL, &timer);
    parts[TIMER] = timer.it_value.tv_sec | timer.it_value.tv_usec;
}
static int untouched(u64 *out) {
    static const char *all[][2] = {{"alloc", "free"}, {"managed", "free"}, {"create", "release"}, {"async", "free-async"}};
    u64 before[PARTS], after[PARTS], got[2], unused[2];
    surroundings(before);
    int result = command("init", 0, 0, 0, got);
    for (int n = 0; n < 4 && !result; n++) {
        errno = 78;
        if (!(result = command(all[n][0], 2 << 20, 0, 0, got)))
            result = command(all[n][1], got[0], 0, 0, unused);
        if (errno != 78)
            return -2;
        if (command("alloc", 1ull << 40, 0, 0, got) != 2 || errno != 78)
            return -3;
    }
    for (int n = 0; n < 100 && !result; n++)
        result = launch_by(0, 20000, 0);
    if (!result)
        result = command("sync", 0, 0, 0, got);
    if (!result)
        result = command("nvml", 0, 0, 0, got);
    if (errno != 78)
        return -4;
    DIR *tasks = opendir("/proc/self/task");
    for (out[1] = 0; readdir(tasks); out[1]++)
        ;
    closedir(tasks);
    out[1] -= 2;
    surroundings(after);
    for (int n = 0; n < PARTS; n++)
        out[0] |= (u64)(before[n] != after[n]) << n;
    return result;
}

static int reach(u64 number, int from) {
    struct sockaddr_un name = {.sun_family = AF_UNIX};
    snprintf(name.sun_path, sizeof name.sun_path, "%s.%lu", getenv("MODEL_STATE"), (unsigned long)number);
    int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    int failed = from ? bind(fd, (void *)&name, sizeof name) : connect(fd, (void *)&name, sizeof name);
    return failed ? -1 : fd;
}
static int send_descriptor(int to, int fd) {
    union { struct cmsghdr head; char room[CMSG_SPACE(sizeof fd)]; } control = {0};
    struct iovec part = {"x", 1};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    control.head.cmsg_level = SOL_SOCKET, control.head.cmsg_type = SCM_RIGHTS, control.head.cmsg_len = CMSG_LEN(sizeof fd);
    memcpy(CMSG_DATA(&control.head), &fd, sizeof fd);
    return sendmsg(to, &message, 0) != 1;
}
static int receive_descriptor(int from) {
    union { struct cmsghdr head; char room[CMSG_SPACE(sizeof(int))]; } control;
    char byte;
    int fd;
    struct iovec part = {&byte, 1};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    if (recvmsg(from, &message, MSG_CMSG_CLOEXEC) != 1 || message.msg_controllen < sizeof control.head)
        return -1;
    return memcpy(&fd, CMSG_DATA(&control.head), sizeof fd), fd;
}

static int command(const char *name, u64 a, u64 b, u64 c, u64 *out) {
    struct properties properties = {1, 0, 1, 0, {0}};
    out[0] = out[1] = 0;
    /* At OFFSET of a structure VALUE of SIZE, or of what is told VALUE, after some calls. */
    if (!strncmp(name, "change-in", 9)) return change_in = (typeof(change_in)){1, name[9] == '-', 0, a, c, b}, 0;
    if (!strcmp(name, "change-out")) return change_out = (typeof(change_in)){1, 1, b, 0, c ? c : 8, a}, 0;
    if (!strcmp(name, "was")) return out[0] = ((u64 (*)(void))of_model("modelWas"))(), 0;
    if (strcmp(name, "export")) passes(&change_out, out);
    if (!strcmp(name, "init")) {
        if (CALL("cuInit", 0UL))
            return CALL("cuInit", 0UL);
        u64 context;
        int result = CALL("cuDevicePrimaryCtxRetain", &context, a);
        return result ? result : CALL("cuCtxSetCurrent", context);
    }
    if (!strcmp(name, "only-init")) return CALL("cuInit", 0UL);
    if (!strcmp(name, "context")) return CALL("cuCtxCreate_v2", out, 0UL, a);
    if (!strcmp(name, "destroy")) return CALL("cuCtxDestroy_v2", a);
    if (!strcmp(name, "destroy-1")) return CALL("cuCtxDestroy", a);
    if (!strcmp(name, "detach")) return CALL("cuCtxDetach", a);
    if (!strcmp(name, "release-primary-1")) return CALL("cuDevicePrimaryCtxRelease", a);
    if (!strcmp(name, "reset-1")) return CALL("cuDevicePrimaryCtxReset", a);
    if (!strcmp(name, "green")) {
        /* A green context, and its context, which is made the current one. */
        int result = CALL("cuGreenCtxCreate", out, NULL, a, 1UL);
        if (result || (result = CALL("cuCtxFromGreenCtx", out + 1, *out)))
            return result;
        return CALL("cuCtxSetCurrent", out[1]);
    }
    if (!strcmp(name, "destroy-green")) return CALL("cuGreenCtxDestroy", a);
    if (!strcmp(name, "retain-primary")) return CALL("cuDevicePrimaryCtxRetain", out, a);
    if (!strcmp(name, "release-primary")) return CALL("cuDevicePrimaryCtxRelease_v2", a);
    if (!strcmp(name, "reset")) return CALL("cuDevicePrimaryCtxReset_v2", a);
    if (!strcmp(name, "current")) return CALL("cuCtxSetCurrent", a);
    if (!strcmp(name, "limit")) return CALL("cuCtxSetLimit", a, b);
    if (!strcmp(name, "primary")) {
        u64 context;
        CALL("cuDevicePrimaryCtxRetain", &context, a);
        return CALL("cuCtxSetCurrent", context);
    }
    if (!strcmp(name, "alloc")) return CALL("cuMemAlloc_v2", out, a);
    /* Addresses, sizes and shapes of 32 bits. */
    if (!strcmp(name, "alloc-32")) return CALL("cuMemAlloc", out, a);
    if (!strcmp(name, "pitch-32")) return CALL("cuMemAllocPitch", out, out + 1, a, b, 4UL);
    if (!strcmp(name, "free-32")) return CALL("cuMemFree", a);
    if (!strcmp(name, "info-32")) return CALL("cuMemGetInfo", out, out + 1);
    if (!strcmp(name, "total-32")) return CALL("cuDeviceTotalMem", out, a);
    if (!strcmp(name, "array-32")) {
        struct { unsigned width, height, depth, format, channels, flags; } shape = {a, b, 0, 0x20, 1, c};
        return CALL("cuArray3DCreate", out, &shape);
    }
    if (!strcmp(name, "array2-32")) {
        struct { unsigned width, height, format, channels; } shape = {a, b, 1, 4};
        return CALL("cuArrayCreate", out, &shape);
    }
    if (!strcmp(name, "managed")) return CALL("cuMemAllocManaged", out, a, 1UL);
    if (!strcmp(name, "pitch")) return CALL("cuMemAllocPitch_v2", out, out + 1, a, b, 4UL);
    if (!strcmp(name, "free")) return CALL("cuMemFree_v2", a);
    if (!strcmp(name, "array")) {
        struct shape shape = {a, b, 0, 0x20, 1, c};
        passes(&change_in, &shape);
        return CALL("cuArray3DCreate_v2", out, &shape);
    }
    if (!strcmp(name, "array2")) {
        struct { size_t width, height; unsigned format, channels; } shape = {a, b, 1, 4};
        passes(&change_in, &shape);
        return CALL("cuArrayCreate_v2", out, &shape);
    }
    if (!strcmp(name, "free-array")) return CALL("cuArrayDestroy", a);
    if (!strcmp(name, "mipmap")) {
        struct shape shape = {a, b, 0, 0x20, 4, 0};
        passes(&change_in, &shape);
        return CALL("cuMipmappedArrayCreate", out, &shape, c);
    }
    if (!strcmp(name, "free-mipmap")) return CALL("cuMipmappedArrayDestroy", a);
    if (!strcmp(name, "create")) {
        properties.location = b;
        return CALL("cuMemCreate", out, a, &properties, 0UL);
    }
    if (!strcmp(name, "create-host")) {
        properties.location_kind = 3, properties.location = 850725928;
        passes(&change_in, &properties);
        return CALL("cuMemCreate", out, a, &properties, 0UL);
    }
    if (!strcmp(name, "release")) return CALL("cuMemRelease", a);
    if (!strcmp(name, "map")) {
        int result = CALL("cuMemAddressReserve", out, b, 0UL, 0UL, 0UL);
        return result ? result : CALL("cuMemMap", *out, b, 0UL, a, 0UL);
    }
    if (!strcmp(name, "map-at")) return CALL("cuMemMap", a, b, 0UL, c, 0UL);
    if (!strcmp(name, "unmap")) return CALL("cuMemUnmap", a, b);
    if (!strcmp(name, "retain")) return CALL("cuMemRetainAllocationHandle", out, a);
    if (!strcmp(name, "async")) return CALL("cuMemAllocAsync", out, a, b);
    if (!strcmp(name, "async-thread")) return CALL("cuMemAllocAsync_ptsz", out, a, b);
    if (!strcmp(name, "free-async")) return CALL("cuMemFreeAsync", a, b);
    if (!strcmp(name, "pool")) {
        properties.location_kind = a, properties.location = b;
        passes(&change_in, &properties);
        return CALL("cuMemPoolCreate", out, &properties);
    }
    if (!strcmp(name, "managed-pool")) {
        properties.kind = 2, properties.location_kind = a, properties.location = b;
        return CALL("cuMemPoolCreate", out, &properties);
    }
    if (!strcmp(name, "managed-pool-past")) {
        /* As by the driver's own tables. */
        properties.kind = 2, properties.location_kind = a, properties.location = b;
        return ((int (*)(u64 *, struct properties *))of_model("cuMemPoolCreate"))(out, &properties);
    }
    if (!strcmp(name, "free-pool")) return CALL("cuMemPoolDestroy", a);
    if (!strcmp(name, "from-pool")) return CALL("cuMemAllocFromPoolAsync", out, a, b, c);
    if (!strcmp(name, "pool-of")) return CALL("cuDeviceGetDefaultMemPool", out, a);
    if (!strcmp(name, "default-pool")) {
        /* Of a kind of memory at a kind of location. */
        int location[] = {b, 0};
        return CALL("cuMemGetDefaultMemPool", out, location, a);
    }
    if (!strcmp(name, "keep")) {
        u64 pool;
        CALL("cuDeviceGetDefaultMemPool", &pool, a);
        return CALL("cuMemPoolSetAttribute", pool, 4UL, &b);
    }
    if (!strcmp(name, "keep-in")) return CALL("cuMemPoolSetAttribute", a, 4UL, &b);
    if (!strcmp(name, "trim")) {
        u64 pool = b;
        if (!pool)
            CALL("cuDeviceGetDefaultMemPool", &pool, a);
        return CALL("cuMemPoolTrimTo", pool, c);
    }
    if (!strcmp(name, "no-dependencies")) {
        u64 pool, allowed = 0;
        CALL("cuDeviceGetDefaultMemPool", &pool, a);
        return CALL("cuMemPoolSetAttribute", pool, 3UL, &allowed);
    }
    if (!strcmp(name, "tile")) {
        /* Maps the memory of handle `b`, or nothing, in array `a`, as tile number `c` % 100 of it, in stream `c` / 100. */
        struct {
            unsigned kind;
            u64 array;
            unsigned part_kind, padding, level, layer, x, y, z, width, height, depth, operation, handle_kind;
            u64 handle, offset;
            unsigned devices, flags, reserved[2];
        } info = {0, a, 0, 0, 0, 0, c % 100 * 64, 0, 0, 64, 64, 1, b ? 1 : 2, 0, b, 0, 1, 0, {0}};
        passes(&change_in, &info);
        return CALL("cuMemMapArrayAsync", &info, 1UL, c / 100);
    }
    if (!strcmp(name, "multicast")) {
        u64 properties[4] = {1, 64 << 20};
        return CALL("cuMulticastCreate", out, properties);
    }
    if (!strcmp(name, "bind")) return CALL("cuMulticastBindMem", a, c, b, 0UL, 2UL << 20, 0UL);
    if (!strcmp(name, "bind-address")) return CALL("cuMulticastBindAddr", a, c, b, 2UL << 20, 0UL);
    if (!strcmp(name, "bind-2")) return CALL("cuMulticastBindMem_v2", a, 0UL, c, b, 0UL, 2UL << 20, 0UL);
    if (!strcmp(name, "bind-address-2")) return CALL("cuMulticastBindAddr_v2", a, 0UL, c, b, 2UL << 20, 0UL);
    if (!strcmp(name, "unbind")) return CALL("cuMulticastUnbind", a, b, c, 2UL << 20);
    if (!strcmp(name, "endpoint")) {
        u64 properties[4] = {1, 64 << 20};
        return CALL("cuLogicalEndpointCreate", a, properties);
    }
    if (!strcmp(name, "endpoint-bind")) return CALL("cuLogicalEndpointBindMem", a, 0, c, b, 0UL, 2UL << 20, 0UL);
    if (!strcmp(name, "endpoint-bind-address")) return CALL("cuLogicalEndpointBindAddr", a, 0, c, b, 2UL << 20, 0UL);
    if (!strcmp(name, "endpoint-unbind")) return CALL("cuLogicalEndpointUnbind", a, b, c, 2UL << 20);
    if (!strcmp(name, "endpoint-destroy")) return CALL("cuLogicalEndpointDestroy", a);
    if (!strcmp(name, "stream")) return CALL("cuStreamCreate", out, 0UL);
    if (!strcmp(name, "wait")) return CALL("cuStreamSynchronize", a);
    if (!strcmp(name, "wait-event")) {
        u64 event;
        int result = CALL("cuEventCreate", &event, 0UL);
        result = result ? result : CALL("cuEventRecord", event, a);
        result = result ? result : CALL("cuEventSynchronize", event);
        return result ? result : CALL("cuEventDestroy_v2", event);
    }
    if (!strcmp(name, "wait-context")) return CALL("cuCtxSynchronize");
    if (!strcmp(name, "wait-context-2")) return CALL("cuCtxSynchronize_v2", a);
    if (!strcmp(name, "graph")) return CALL("cuGraphCreate", out, 0UL);
    if (!strcmp(name, "graph-alloc") || !strcmp(name, "graph-leave")) {
        struct alloc alloc = {properties, NULL, 0, b, 0};
        alloc.pool.location = c;
        u64 node;
        int result = CALL("cuGraphAddMemAllocNode", &node, a, NULL, 0UL, &alloc);
        return result || name[6] == 'l' ? result : CALL("cuGraphAddMemFreeNode", &node, a, NULL, 0UL, alloc.address);
    }
    if (!strcmp(name, "graph-managed")) {
        struct alloc alloc = {properties, NULL, 0, b, 0};
        u64 node;
        alloc.pool.kind = 2, alloc.pool.location_kind = c;
        int result = CALL("cuGraphAddMemAllocNode", &node, a, NULL, 0UL, &alloc);
        return result ? result : CALL("cuGraphAddMemFreeNode", &node, a, NULL, 0UL, alloc.address);
    }
    if (!strcmp(name, "graph-inner")) return CALL("cuGraphAddChildGraphNode", out, a, NULL, 0UL, b);
    if (!strcmp(name, "hide-nodes")) {
        /* They are added while the next call is at it. */
        int *count = (int *)a;
        change_in = (typeof(change_in)){1, 0, 0, 0, sizeof *count, *count};
        return *count = 0, passes(&change_in, count), 0;
    }
    if (!strcmp(name, "hold")) return ((void (*)(int))of_model("modelHold"))(a), 0;
    if (!strncmp(name, "beside-", 7)) return start_beside(name + 7, a, b, c);
    if (!strcmp(name, "go-on")) return end_besides(out);
    if (!strcmp(name, "clock")) return ((void (*)(int))of_model("modelClock"))(a), 0;
    if (!strcmp(name, "dead-asked")) return out[0] = ((int (*)(void))of_model("modelDeadAsked"))(), 0;
    if (!strcmp(name, "capture")) return CALL("cuStreamBeginCapture_v2", a, 0UL);
    if (!strcmp(name, "end-capture")) return CALL("cuStreamEndCapture", a, out);
    if (!strcmp(name, "end-capture-to-cig")) return CALL("cuStreamEndCaptureToCig", a);
    if (!strcmp(name, "exec")) return CALL("cuGraphInstantiateWithFlags", out, a, 0UL);
    if (!strcmp(name, "exec-1")) return CALL("cuGraphInstantiate", out, a, NULL, NULL, 0UL);
    if (!strcmp(name, "exec-2")) return CALL("cuGraphInstantiate_v2", out, a, NULL, NULL, 0UL);
    if (!strcmp(name, "upload")) return CALL("cuGraphUpload", a, b);
    if (!strcmp(name, "exec-uploaded")) {
        /* Its memory is taken at once. Told are the handle, and what the parameters say then. */
        struct { u64 flags, stream, node; int result; } parameters = {2, b, 77, 77};
        int result = CALL("cuGraphInstantiateWithParams", out, a, &parameters);
        return out[1] = parameters.node + parameters.result, result;
    }
    if (!strncmp(name, "update", 6)) {
        u64 node;
        struct { int result; u64 node, from; } outcome;
        return name[6] ? CALL("cuGraphExecUpdate_v2", a, b, &outcome) : CALL("cuGraphExecUpdate", a, b, &node, &outcome.result);
    }
    if (!strcmp(name, "destroy-graph")) return CALL("cuGraphDestroy", a);
    if (!strcmp(name, "launch-thread")) return CALL("cuGraphLaunch_ptsz", a, b);
    if (!strcmp(name, "launch")) return CALL("cuGraphLaunch", a, b);
    if (!strcmp(name, "free-exec")) return CALL("cuGraphExecDestroy", a);
    if (!strcmp(name, "trim-graphs")) return CALL("cuDeviceGraphMemTrim", a);
    if (!strcmp(name, "info")) {
        errno = 77;
        int result = CALL("cuMemGetInfo_v2", a ? NULL : out, b ? NULL : out + 1);
        return errno == 77 ? result : -1;
    }
    if (!strcmp(name, "total")) return CALL("cuDeviceTotalMem_v2", out, a);
    if (!strcmp(name, "fail")) {
        void (*fail)(int) = (void (*)(int))of_model("modelFailNext");
        return fail(a), 0;
    }
    if (!strcmp(name, "nvml")) {
        u64 device, memory[3], memory2[5] = {40 | 2 << 24};
        CALL("nvmlInit_v2");
        CALL("nvmlDeviceGetHandleByIndex_v2", a, &device);
        int result = CALL("nvmlDeviceGetMemoryInfo", device, memory);
        if (result)
            return result;
        if (memory[0] != memory[1] + memory[2])
            return -1;
        result = CALL("nvmlDeviceGetMemoryInfo_v2", device, memory2);
        if (memory2[1] != memory[0] || memory2[2] + memory2[3] + memory2[4] != memory[0] || memory2[4] != memory[2])
            return -2;
        return out[0] = memory[1], out[1] = memory[0], result;
    }
    if (!strcmp(name, "nvml-processes")) {
        /* How many, and what those of room for two hold together. */
        u64 device, graphics;
        struct { unsigned pid; u64 bytes; unsigned gi, ci; } list[2] = {{0}};
        unsigned count = 0;
        CALL("nvmlInit_v2");
        CALL("nvmlDeviceGetHandleByIndex_v2", a, &device);
        graphics = 0;
        if (CALL("nvmlDeviceGetGraphicsRunningProcesses_v3", device, &graphics, NULL) || graphics)
            return -1;
        int result = CALL("nvmlDeviceGetComputeRunningProcesses_v3", device, &count, NULL);
        if (count && result != 7)
            return -2;
        out[0] = count;
        result = CALL("nvmlDeviceGetComputeRunningProcesses_v3", device, &count, list);
        out[1] = list[0].bytes + list[1].bytes;
        return result;
    }
    if (!strcmp(name, "nvml-lists")) {
        /* Every other list of processes, and what is told of one; B is a neighbour's. How many of this container hold memory, and
           how much. */
        u64 device;
        struct { unsigned pid; u64 bytes; } list1[8];
        struct { unsigned pid; u64 bytes; unsigned gi, ci; } list2[8];
        unsigned count = 8, none, stats[64] = {0}, pids[512], own = getpid();
        CALL("nvmlInit_v2");
        CALL("nvmlDeviceGetHandleByIndex_v2", a, &device);
        if (CALL("nvmlDeviceGetComputeRunningProcesses", device, &count, list1) || count > 8)
            return -1;
        out[0] = count, out[1] = 0;
        for (unsigned n = 0; n < count; n++)
            out[1] += list1[n].bytes;
        if (CALL("nvmlDeviceGetComputeRunningProcesses_v2", device, &count, list2) || count != out[0])
            return -2;
        for (unsigned n = 0; n < count; n++)
            if (list1[n].pid != list2[n].pid || list1[n].bytes != list2[n].bytes)
                return -3;
        /* A macro keeps each name a constant, by which its address is remembered. */
#define NONE(name, room, list) (none = room, CALL(name, device, &none, list) || none)
        if (NONE("nvmlDeviceGetGraphicsRunningProcesses", 8, list1) || NONE("nvmlDeviceGetGraphicsRunningProcesses_v2", 8, list2) ||
            NONE("nvmlDeviceGetMPSComputeRunningProcesses", 8, list1) || NONE("nvmlDeviceGetMPSComputeRunningProcesses_v2", 0, NULL) ||
            NONE("nvmlDeviceGetMPSComputeRunningProcesses_v3", 8, list2))
            return -4;
        struct { u64 time; unsigned pid, utilization[6]; } used[512];
        struct { unsigned version, count; u64 since; void *list; } infos = {1 << 24 | sizeof infos, 512, 0, used};
        if (CALL("nvmlDeviceGetProcessesUtilizationInfo", device, &infos) || infos.count != 1 || used[0].pid != own)
            return -5;
        struct { unsigned pid; u64 bytes; unsigned gi, ci; u64 protected_bytes; } held[512];
        struct { unsigned version, mode, count; void *list; } details = {1 << 24 | sizeof details, 0, 512, held};
        if (CALL("nvmlDeviceGetRunningProcessDetailList", device, &details) || details.count != 1 || held[0].pid != own)
            return -6;
        count = 512;
        if (CALL("nvmlDeviceGetAccountingPids", device, &count, pids) || count != 1 || pids[0] != own)
            return -7;
        const int not_found = 6;
        if (CALL("nvmlDeviceGetAccountingStats", device, b, stats) != not_found || stats[0] ||
            CALL("nvmlDeviceGetAccountingStats", device, own, stats) || stats[0] != own)
            return -8;
        stats[0] = 0;
        if (CALL("nvmlDeviceGetAccountingStats_v2", device, b, stats) != not_found || stats[0] ||
            CALL("nvmlDeviceGetAccountingStats_v2", device, own, stats) || stats[0] != own)
            return -9;
        return 0;
    }
    if (!strcmp(name, "nvml-utilization")) {
        /* Processes that were seen at work, and the busy time of the GPU and its memory. */
        u64 device;
        struct { unsigned pid; u64 time; unsigned utilization[4]; } samples[512];
        unsigned count = 512, rates[2];
        CALL("nvmlInit_v2");
        CALL("nvmlDeviceGetHandleByIndex_v2", a, &device);
        int result = CALL("nvmlDeviceGetProcessUtilization", device, samples, &count, 0UL);
        out[0] = count;
        CALL("nvmlDeviceGetUtilizationRates", device, rates);
        out[1] = rates[0] * 1000 + rates[1];
        return result;
    }
    if (!strcmp(name, "fork")) {
        /* In the child the driver is not initialised; what it frees is not its own. It asks all the same. */
        fflush(stdout);
        pid_t child = fork();
        if (!child) {
            u64 got[2];
            CALL("cuMemFree_v2", a);
            CALL("cuMemAlloc_v2", got, 512UL);
            CALL("cuMemGetInfo_v2", got, got + 1);
            if (b)
                _exit(CALL("cuInit", 0UL));
            _exit(0);
        }
        int status;
        waitpid(child, &status, 0);
        return status;
    }
    if (!strcmp(name, "vfork")) {
        pid_t child = vfork();
        if (!child)
            execl("/bin/true", "true", NULL), _exit(1);
        int status;
        waitpid(child, &status, 0);
        return status;
    }
    if (!strcmp(name, "spin")) {
        /* Kernels of `a` ns for `b` ms, by a door, in so many streams, waiting for each or not: `c` is door + 100 × streams
         * + 10000 × waits. How many, and the events that were alive. */
        static u64 streams[64];
        u64 count = c / 100 % 100, end = now_ms() + b;
        for (u64 n = 0; n < count; n++)
            if (!streams[n] && CALL("cuStreamCreate", &streams[n], 0UL))
                return -1;
        for (int result; now_ms() < end; out[0]++) {
            u64 stream = count ? streams[out[0] % count] : 0;
            errno = 77;
            if ((result = launch_by(c % 100, a, stream)))
                return result;
            if (errno != 77)
                return -2;
            if (c / 10000 && (result = CALL("cuStreamSynchronize", stream)))
                return result;
        }
        out[1] = ((int (*)(void))of_model("modelEvents"))();
        return 0;
    }
    if (!strcmp(name, "launch-by")) return launch_by(c, a, b);
    if (!strcmp(name, "sync")) return CALL("cuCtxSynchronize");
    if (!strcmp(name, "destroy-stream")) return CALL("cuStreamDestroy_v2", a);
    if (!strcmp(name, "destroy-stream-1")) return CALL("cuStreamDestroy", a);
    if (!strcmp(name, "marks-captured")) return out[0] = ((int (*)(void))of_model("modelRecordedWhileCapturing"))(), 0;
    if (!strcmp(name, "fork-spin")) {
        /* For `b` ms, a child for each launch of `a` ns, which waits for it or (`c`) does not. */
        for (u64 end = now_ms() + b; now_ms() < end; out[0]++) {
            pid_t child = fork();
            if (!child) {
                u64 got[2];
                if (command("init", 0, 0, 0, got) || launch_by(0, a, 0) || (!c && CALL("cuCtxSynchronize")))
                    _exit(1);
                _exit(0);
            }
            int status;
            waitpid(child, &status, 0);
            if (status)
                return status;
        }
        return 0;
    }
    if (!strcmp(name, "tiled")) {
        /* A sparse array with `a` bytes, to which there is no handle. */
        u64 handle, unused[2];
        int result = command("create", a, 0, 0, &handle);
        if (result)
            return result;
        command("array", 4096, 4096, 64, out);
        command("tile", out[0], handle, 0, unused);
        return command("release", handle, 0, 0, unused);
    }
    if (!strcmp(name, "bound")) {
        /* A multicast object with `a` bytes, the same. */
        u64 handle, unused[2];
        int result = command("create", a, 0, 0, &handle);
        if (result)
            return result;
        command("multicast", 0, 0, 0, out);
        command("bind", out[0], handle, 0, unused);
        return command("release", handle, 0, 0, unused);
    }
    if (!strcmp(name, "run-graph")) {
        u64 graph, unused[2];
        command("graph", 0, 0, 0, &graph), command("graph-alloc", graph, a, 0, unused), command("exec", graph, 0, 0, out);
        CALL("cuGraphDestroy", graph);
        int result = command("launch", out[0], 0, 0, unused);
        if (result)
            command("free-exec", out[0], 0, 0, unused);
        return result;
    }
    if (!strcmp(name, "end-graph")) {
        u64 unused[2];
        int result = command("free-exec", a, 0, 0, unused);
        return result ? result : command("trim-graphs", 0, 0, 0, unused);
    }
    if (!strcmp(name, "in-context")) {
        u64 got[2], unused[2];
        command("context", 0, 0, 0, out);
        int result = command("alloc", a, 0, 0, got);
        if (result)
            command("destroy", out[0], 0, 0, unused);
        return command("primary", 0, 0, 0, unused), result;
    }
    if (!strcmp(name, "own-pool")) {
        u64 pool, unused[2];
        command("pool", 1, 0, 0, &pool);
        int result = command("from-pool", a, pool, 0, out);
        command("free-pool", pool, 0, 0, unused);
        return result;
    }
    if (!strcmp(name, "own-managed")) {
        u64 pool, unused[2];
        command("managed-pool", 2, 0, 0, &pool);
        int result = command("from-pool", a, pool, 0, out);
        command("free-pool", pool, 0, 0, unused);
        return result;
    }
    if (!strcmp(name, "run-managed")) {
        u64 graph, unused[2];
        command("graph", 0, 0, 0, &graph), command("graph-managed", graph, a, 2, unused), command("exec", graph, 0, 0, out);
        CALL("cuGraphDestroy", graph);
        int result = command("launch", out[0], 0, 0, unused);
        if (result)
            command("free-exec", out[0], 0, 0, unused);
        return result;
    }
    /* What others may have. A descriptor is sent to who listens under a number. */
    static int descriptor = -1, listening = -1;
    if (!strcmp(name, "export")) return passes(&change_out, &descriptor), CALL("cuMemExportToShareableHandle", &descriptor, a, 1UL, 0UL);
    if (!strcmp(name, "dma-buf")) return CALL("cuMemGetHandleForAddressRange", &descriptor, a, b, 1UL, 0UL);
    if (!strcmp(name, "listen")) return listening = reach(a, 1), listening < 0;
    if (!strcmp(name, "send")) {
        int to = reach(a, 0), failed = send_descriptor(to, descriptor);
        return close(to), close(descriptor), failed;
    }
    if (!strcmp(name, "receive")) return descriptor = receive_descriptor(listening), descriptor < 0;
    if (!strcmp(name, "import")) return CALL("cuMemImportFromShareableHandle", out, (u64)descriptor, 1UL);
    if (!strcmp(name, "close-descriptors")) {
        ((void (*)(void))of_model("modelDescriptorsClosed"))();
        return close(descriptor);
    }
    u64 handle[8] = {a};
    if (!strcmp(name, "export-fabric")) return out[1] = CALL("cuMemExportToShareableHandle", handle, a, 8UL, 0UL), out[0] = *handle, out[1];
    if (!strcmp(name, "import-fabric")) return CALL("cuMemImportFromShareableHandle", out, handle, 8UL);
    if (!strcmp(name, "ipc-get")) return out[1] = CALL("cuIpcGetMemHandle", handle, a), out[0] = *handle, out[1];
    if (!strncmp(name, "ipc-open", 8)) {
        typedef struct { u64 words[8]; } ipc;
        void *open = name[8] ? function("cuIpcOpenMemHandle") : function("cuIpcOpenMemHandle_v2");
        return ((int (*)(u64 *, ipc, unsigned))open)(out, (ipc){{a}}, 1);
    }
    if (!strcmp(name, "ipc-close")) return CALL("cuIpcCloseMemHandle", a);
    if (!strcmp(name, "leave-child")) {
        pid_t child = fork();
        while (!child)
            pause();
        return out[0] = child, child < 0;
    }
    if (!strncmp(name, "child-by-", 9)) return child_by(name + 9, a);
    if (!strncmp(name, "end-by-", 7)) end_by(name + 7);
    if (!strcmp(name, "untouched")) return untouched(out);
    if (!strcmp(name, "elsewhere")) {
        /* By copies of the libraries, in another namespace of the loader: allocates `a` bytes, frees `b`, or asks. */
        static void *there, *(*find)(void *, const char *);
        if (!there) {
            there = dlmopen(LM_ID_NEWLM, "libcuda.so.1", RTLD_NOW);
            /* The C library's own, which nobody has overridden. */
            find = (void *(*)(void *, const char *))dlsym(dlopen("libc.so.6", RTLD_NOW), "dlsym");
        }
        if (!there || find(there, "cuMemAlloc_v2") == dlsym(cuda, "cuMemAlloc_v2"))
            return -1;
#define THERE(name, ...) ((int (*)())find(there, name))(__VA_ARGS__)
        u64 context;
        if (THERE("cuInit", 0UL) || THERE("cuDevicePrimaryCtxRetain", &context, 0UL) || THERE("cuCtxSetCurrent", context))
            return -2;
        return a ? THERE("cuMemAlloc_v2", out, a) : b ? THERE("cuMemFree_v2", b) : THERE("cuMemGetInfo_v2", out, out + 1);
    }
    if (!strcmp(name, "become")) {
        fflush(stdout);
        execl("/bin/cat", "cat", NULL);
    }
    fprintf(stderr, "no such command: %s\n", name);
    exit(3);
}

/* ---- doing as it likes ---- */

static u64 seed;
static u64 chance(u64 below) {
    seed ^= seed << 13, seed ^= seed >> 7, seed ^= seed << 17;
    return seed % below;
}

static const struct { const char *make, *end; u64 unit; } KINDS[] = {
    {"alloc", "free", 1},       {"managed", "free", 1},         {"pitch", "free", 0},       {"array", "free-array", 0},
    {"mipmap", "free-mipmap", 0}, {"create", "release", 2 << 20}, {"async", "free-async", 1}, {"async", "free", 1},
    {"tiled", "free-array", 2 << 20}, {"bound", "release", 2 << 20}, {"run-graph", "end-graph", 1}, {"in-context", "destroy", 1},
    {"own-pool", "free-async", 1}, {"own-managed", "free-async", 1}, {"run-managed", "free-exec", 1},
};

/* `alone`: no other process holds memory, so what CUDA says is in use must be what the driver gave out, after every step. */
static int stress(u64 start, u64 count, u64 largest, int alone) {
    static struct { int kind; u64 key; u64 address; u64 bytes; } live[256];
    u64 out[2], refused = 0, made = 0;
    int n = 0, result;
    seed = start * 0x9e3779b97f4a7c15ull | 1;
    u64 (*held_by_driver)(int) = (u64 (*)(int))of_model("modelHeld");
    if ((result = command("init", 0, 0, 0, out)))
        return result;
    for (u64 round = 0; round < count; round++) {
        if (n < 256 && (!n || chance(100) < 52)) {
            int kind = chance(sizeof KINDS / sizeof *KINDS);
            u64 bytes = 1 + chance(largest);
            if (KINDS[kind].unit > 1)
                bytes = (bytes + KINDS[kind].unit - 1) / KINDS[kind].unit * KINDS[kind].unit;
            u64 wide = KINDS[kind].unit ? bytes : 1 + chance(5000), high = 1 + chance(largest / 20000 + 1);
            result = command(KINDS[kind].make, wide, KINDS[kind].unit ? 0 : high, kind == 4 ? 3 : 0, out);
            if (result == 2)
                refused++;
            else if (result)
                return printf("%s: %d\n", KINDS[kind].make, result), 1;
            else {
                made++;
                live[n].kind = kind, live[n].key = out[0], live[n].address = 0, live[n].bytes = bytes;
                /* Physical memory is sometimes mapped, and its handle released before. */
                if (kind == 5 && chance(2)) {
                    if ((result = command("map", live[n].key, bytes, 0, out)))
                        return printf("map: %d\n", result), 1;
                    live[n].address = out[0];
                    if (chance(2)) {
                        command("release", live[n].key, 0, 0, out);
                        live[n].key = 0;
                    }
                }
                n++;
            }
        } else if (n) {
            int at = chance(n);
            if (live[at].address && (result = command("unmap", live[at].address, live[at].bytes, 0, out)))
                return printf("unmap: %d\n", result), 1;
            if (live[at].key && (result = command(KINDS[live[at].kind].end, live[at].key, 0, 0, out)))
                return printf("%s: %d\n", KINDS[live[at].kind].end, result), 1;
            live[at] = live[--n];
        }
        if (!chance(50))
            command("wait", 0, 0, 0, out);
        if (alone || !chance(500)) {
            if (command("info", 0, 0, 0, out) || out[0] > out[1])
                return printf("info\n"), 1;
            u64 held = alone ? held_by_driver(0) : 0;
            if (alone && out[1] - out[0] != held)
                return printf("round %lu: %lu accounted, %lu held\n", (unsigned long)round,
                              (unsigned long)(out[1] - out[0]), (unsigned long)held),
                       1;
        }
    }
    printf("made %lu refused %lu\n", (unsigned long)made, (unsigned long)refused);
    return 0;
}

struct thread { u64 count, bytes, errors; };
static void *work(void *argument) {
    struct thread *thread = argument;
    u64 out[2];
    command("primary", 0, 0, 0, out);
    for (u64 n = 0; n < thread->count; n++) {
        if (command("alloc", thread->bytes, 0, 0, out) || command("free", out[0], 0, 0, out))
            thread->errors++;
    }
    return NULL;
}

int main(int argc, char **argv) {
    cuda = dlopen("libcuda.so.1", RTLD_NOW), nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    if (!cuda || !nvml)
        return fprintf(stderr, "%s\n", dlerror()), 3;
    if (argc > 4 && !strcmp(argv[1], "stress"))
        return stress(strtoull(argv[2], NULL, 0), strtoull(argv[3], NULL, 0), strtoull(argv[4], NULL, 0), argc > 5);
    char line[256], name[64];
    setvbuf(stdin, NULL, _IONBF, 0); /* What is not read yet stays for the program this turns into. */
    while (fgets(line, sizeof line, stdin)) {
        u64 a = 0, b = 0, c = 0, out[2] = {0};
        if (sscanf(line, "%63s %lu %lu %lu", name, (unsigned long *)&a, (unsigned long *)&b, (unsigned long *)&c) < 1)
            continue;
        if (!strcmp(name, "threads")) {
            /* THREADS COUNT BYTES */
            static pthread_t ids[4096];
            static struct thread threads[4096];
            u64 errors = 0;
            /* Looked up before there are threads. */
            command("primary", 0, 0, 0, out), command("alloc", 512, 0, 0, out), command("free", out[0], 0, 0, out);
            for (u64 n = 0; n < a; n++) {
                threads[n] = (struct thread){b, c, 0};
                if (pthread_create(&ids[n], NULL, work, &threads[n]))
                    return 3;
            }
            for (u64 n = 0; n < a; n++)
                pthread_join(ids[n], NULL), errors += threads[n].errors;
            printf("%lu 0 0\n", (unsigned long)errors);
        } else {
            int result = command(name, a, b, c, out);
            printf("%d %lu %lu\n", result, (unsigned long)out[0], (unsigned long)out[1]);
        }
        fflush(stdout);
    }
    return 0;
}
