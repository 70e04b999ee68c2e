/* A CUDA program that does what it is told, a command a line: `alloc 1048576` → `0 138247372800`, the driver's result and
 * what it gave. With `stress SEED COUNT` it does as it likes with everything that takes memory. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

typedef uint64_t u64;
static void *cuda, *nvml;

static void *function(const char *name) {
    static struct { const char *name; void *address; } known[128];
    for (int n = 0; n < 128; n++) {
        if (known[n].name == name)
            return known[n].address;
        if (!known[n].name) {
            void *address = NULL;
            if (getenv("SESSION_RESOLVES") && strncmp(name, "nvml", 4)) {
                /* As a runtime does: one look-up by name, and through what that gives one of itself, then all others. */
                typedef int (*get)(const char *, void **, int, u64, int *);
                static get resolve;
                if (!resolve) {
                    get first = (get)dlsym(cuda, "cuGetProcAddress_v2");
                    if (!first || first("cuGetProcAddress", (void **)&resolve, 12040, 0, NULL) || !resolve)
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
                resolve(base, &address, 12040, flags, NULL);
            } else
                address = dlsym(strncmp(name, "nvml", 4) ? cuda : nvml, name);
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

static int command(const char *name, u64 a, u64 b, u64 c, u64 *out) {
    struct properties properties = {1, 0, 1, 0, {0}};
    out[0] = out[1] = 0;
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
    if (!strcmp(name, "release-primary")) return CALL("cuDevicePrimaryCtxRelease_v2", a);
    if (!strcmp(name, "reset")) return CALL("cuDevicePrimaryCtxReset_v2", a);
    if (!strcmp(name, "current")) return CALL("cuCtxSetCurrent", a);
    if (!strcmp(name, "primary")) {
        u64 context;
        CALL("cuDevicePrimaryCtxRetain", &context, a);
        return CALL("cuCtxSetCurrent", context);
    }
    if (!strcmp(name, "alloc")) return CALL("cuMemAlloc_v2", out, a);
    if (!strcmp(name, "managed")) return CALL("cuMemAllocManaged", out, a, 1UL);
    if (!strcmp(name, "pitch")) return CALL("cuMemAllocPitch_v2", out, out + 1, a, b, 4UL);
    if (!strcmp(name, "free")) return CALL("cuMemFree_v2", a);
    if (!strcmp(name, "array")) {
        struct shape shape = {a, b, 0, 0x20, 1, c};
        return CALL("cuArray3DCreate_v2", out, &shape);
    }
    if (!strcmp(name, "array2")) {
        struct { size_t width, height; unsigned format, channels; } shape = {a, b, 1, 4};
        return CALL("cuArrayCreate_v2", out, &shape);
    }
    if (!strcmp(name, "free-array")) return CALL("cuArrayDestroy", a);
    if (!strcmp(name, "mipmap")) {
        struct shape shape = {a, b, 0, 0x20, 4, 0};
        return CALL("cuMipmappedArrayCreate", out, &shape, c);
    }
    if (!strcmp(name, "free-mipmap")) return CALL("cuMipmappedArrayDestroy", a);
    if (!strcmp(name, "create")) {
        properties.location = b;
        return CALL("cuMemCreate", out, a, &properties, 0UL);
    }
    if (!strcmp(name, "create-host")) {
        properties.location_kind = 3, properties.location = 850725928;
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
        return CALL("cuMemPoolCreate", out, &properties);
    }
    if (!strcmp(name, "free-pool")) return CALL("cuMemPoolDestroy", a);
    if (!strcmp(name, "from-pool")) return CALL("cuMemAllocFromPoolAsync", out, a, b, 0UL);
    if (!strcmp(name, "keep")) {
        u64 pool;
        CALL("cuDeviceGetDefaultMemPool", &pool, a);
        return CALL("cuMemPoolSetAttribute", pool, 4UL, &b);
    }
    if (!strcmp(name, "trim")) {
        u64 pool = b;
        if (!pool)
            CALL("cuDeviceGetDefaultMemPool", &pool, a);
        return CALL("cuMemPoolTrimTo", pool, c);
    }
    if (!strcmp(name, "stream")) return CALL("cuStreamCreate", out, 0UL);
    if (!strcmp(name, "wait")) return CALL("cuStreamSynchronize", a);
    if (!strcmp(name, "wait-context")) return CALL("cuCtxSynchronize");
    if (!strcmp(name, "graph")) return CALL("cuGraphCreate", out, 0UL);
    if (!strcmp(name, "graph-alloc")) {
        struct alloc alloc = {properties, NULL, 0, b, 0};
        alloc.pool.location = c;
        u64 node;
        return CALL("cuGraphAddMemAllocNode", &node, a, NULL, 0UL, &alloc);
    }
    if (!strcmp(name, "graph-inner")) return CALL("cuGraphAddChildGraphNode", out, a, NULL, 0UL, b);
    if (!strcmp(name, "capture")) return CALL("cuStreamBeginCapture_v2", a, 0UL);
    if (!strcmp(name, "end-capture")) return CALL("cuStreamEndCapture", a, out);
    if (!strcmp(name, "exec")) return CALL("cuGraphInstantiateWithFlags", out, a, 0UL);
    if (!strcmp(name, "launch")) return CALL("cuGraphLaunch", a, 0UL);
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
