/* The first call of a program that uses a CUDA runtime, shared (named by the first argument) or static: the runtime looks
 * hundreds of driver functions up before it answers. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>

#ifdef STATIC
int cudaGetDeviceCount(int *);
int cudaRuntimeGetVersion(int *);
int cudaDriverGetVersion(int *);
#endif

int main(int argc, char **argv) {
    int count = -1, runtime = -1, driver = -1;
#ifdef STATIC
    (void)argc, (void)argv;
#else
    void *library = argc > 1 ? dlopen(argv[1], RTLD_NOW) : NULL;
    if (!library)
        return printf("%s\n", dlerror()), 1;
    int (*cudaGetDeviceCount)(int *) = dlsym(library, "cudaGetDeviceCount");
    int (*cudaRuntimeGetVersion)(int *) = dlsym(library, "cudaRuntimeGetVersion");
    int (*cudaDriverGetVersion)(int *) = dlsym(library, "cudaDriverGetVersion");
#endif
    int a = cudaRuntimeGetVersion(&runtime), b = cudaDriverGetVersion(&driver), c = cudaGetDeviceCount(&count);
    printf("%d runtime %d, %d driver %d, %d devices %d\n", a, runtime, b, driver, c, count);
    return 0;
}
