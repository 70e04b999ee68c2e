/* A program that is linked statically and still loads the driver: says whether it got the shim, which alone has CUDA's and
 * NVML's functions in one library. */
#include <dlfcn.h>
#include <stdio.h>

int main(int argc, char **argv) {
    void *cuda = argc > 1 ? dlopen(argv[1], RTLD_NOW) : NULL;
    if (!cuda)
        return fprintf(stderr, "%s\n", dlerror()), 3;
    int (*init)(unsigned) = (int (*)(unsigned))dlsym(cuda, "cuInit");
    int result = init(0);
    printf("CUDA and NVML in one: %d, cuInit %d\n", dlsym(cuda, "nvmlDeviceGetMemoryInfo") != NULL, result);
    return 0;
}
