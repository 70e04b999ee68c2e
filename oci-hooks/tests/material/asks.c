/* A CUDA program in small, for any root with glibc 2.17: it opens the driver as programs do.
 *
 *   asks memory WITHIN PAST    whose cuMemAlloc it got, how much memory there seems to be, and the driver's answers to a
 *                              block of WITHIN bytes, one of PAST bytes beside it, and WITHIN again when the first is free
 *   asks runtime FILE          what a CUDA runtime answers to the first call that needs the driver
 *   asks nccl FILE             the same of the one that is linked into NCCL, which says it in a warning */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void end(const char *why) {
    printf("%s\n", why);
    exit(1);
}

static void *open_library(const char *file) {
    void *library = dlopen(file, RTLD_NOW);
    if (!library)
        end(dlerror());
    return library;
}

static void *function(void *library, const char *name) {
    void *found = dlsym(library, name);
    if (!found)
        end(dlerror());
    return found;
}

static void must(const char *call, int result) {
    if (result) {
        printf("%s %d\n", call, result);
        exit(1);
    }
}

static void memory(size_t within, size_t past) {
    void *cuda = open_library("libcuda.so.1");
    int (*init)(unsigned) = function(cuda, "cuInit");
    int (*get)(int *, int) = function(cuda, "cuDeviceGet");
    int (*create)(void **, unsigned, int) = function(cuda, "cuCtxCreate_v2");
    int (*total_of)(size_t *, int) = function(cuda, "cuDeviceTotalMem_v2");
    int (*alloc)(uint64_t *, size_t) = function(cuda, "cuMemAlloc_v2");
    int (*give)(uint64_t) = function(cuda, "cuMemFree_v2");
    Dl_info info;
    printf("answers %s\n", dladdr((void *)alloc, &info) ? info.dli_fname : "nobody");
    int device;
    void *context;
    size_t total;
    uint64_t first, second;
    must("cuInit", init(0));
    must("cuDeviceGet", get(&device, 0));
    must("cuCtxCreate", create(&context, 0, device));
    must("cuDeviceTotalMem", total_of(&total, device));
    printf("total %zu\n", total);
    printf("within %d\n", alloc(&first, within));
    printf("past %d\n", alloc(&second, past));
    must("cuMemFree", give(first));
    printf("again %d\n", alloc(&first, within));
}

int main(int argc, char **argv) {
    if (argc == 4 && !strcmp(argv[1], "memory")) {
        memory(strtoull(argv[2], NULL, 10), strtoull(argv[3], NULL, 10));
    } else if (argc == 3 && !strcmp(argv[1], "runtime")) {
        int (*count)(int *) = function(open_library(argv[2]), "cudaGetDeviceCount");
        int devices;
        printf("%d\n", count(&devices));
    } else if (argc == 3 && !strcmp(argv[1], "nccl")) {
        setenv("NCCL_DEBUG", "WARN", 1);
        int (*init)(void **, int, const int *) = function(open_library(argv[2]), "ncclCommInitAll");
        void *communicator;
        init(&communicator, 1, NULL);
    } else {
        end("asks memory WITHIN PAST, asks runtime FILE, or asks nccl FILE");
    }
    return 0;
}
