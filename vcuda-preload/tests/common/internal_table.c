/* Compares the internal table that nvidia-smi asks NVML for, as the shim hands it out, with the driver's own: prints the
 * slots that differ, and whether a second request gives the same table. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

static const unsigned char SMI[16] = {0xc4, 0xfe, 0x3e, 0x6c, 0xc9, 0x8f, 0x6c, 0x4e,
                                      0xa3, 0x27, 0xee, 0x69, 0x6e, 0x12, 0xf7, 0xc4};

typedef int (*Get)(void **, const void *);

int main(void) {
    void *ours = dlopen("libnvidia-ml.so.1", RTLD_NOW), *theirs = dlopen(getenv("CLIENT_NVML"), RTLD_NOW);
    if (!ours || !theirs)
        return fprintf(stderr, "%s\n", dlerror()), 1;
    Get of_ours = (Get)dlsym(ours, "nvmlInternalGetExportTable");
    /* The C library's dlsym, which nobody has overridden. */
    void *(*real_dlsym)(void *, const char *) = (void *(*)(void *, const char *))dlsym(dlopen("libc.so.6", RTLD_NOW), "dlsym");
    Get of_theirs = (Get)real_dlsym(theirs, "nvmlInternalGetExportTable");
    void **a = NULL, **b = NULL, **again = NULL, *none = NULL;
    unsigned char unknown[16] = {1};
    if (of_ours((void **)&a, SMI) || of_theirs((void **)&b, SMI) || of_ours((void **)&again, SMI))
        return 2;
    if (a[0] != b[0] || of_ours(&none, unknown) != of_theirs(&none, unknown) || of_ours(NULL, SMI) != of_theirs(NULL, SMI))
        return 3;
    printf("same table again: %d, slots:", a == again);
    for (size_t slot = 1; slot < (size_t)a[0] / sizeof(void *); slot++)
        if (a[slot] != b[slot])
            printf(" %zu", slot);
    printf("\n");
    return 0;
}
