/* A program as applications are: it reaches the driver through every door there is and tells what it found behind each.
 * Built by the tests, with and without linking to libcuda.so.1, and as a plugin. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *shim, *driver_cuda, *driver_nvml;

/* Who defines the function at an address. */
static const char *owner(void *address) {
    Dl_info info;
    if (!address)
        return "none";
    if (!dladdr(address, &info))
        return "unknown";
    const char *name = strrchr(info.dli_fname, '/');
    name = name ? name + 1 : info.dli_fname;
    if (!strcmp(info.dli_fname, driver_cuda) || !strcmp(info.dli_fname, driver_nvml))
        return "driver";
    if (dlsym(RTLD_DEFAULT, "cuInit") && !strcmp(info.dli_fname, shim))
        return "shim";
    return name;
}

#ifdef PLUGIN

void *plugin_dlsym(void *handle, const char *name) { return dlsym(handle, name); }

/* An interposer's function, which is not the driver's although it is named so. */
int cuMemAlloc_v2(uint64_t *address, size_t bytes) { (void)address, (void)bytes; return 12345; }

#else

static void say(const char *door, const char *name, void *address) {
    char *error = address ? NULL : dlerror();
    printf("%s %s %s%s%s\n", door, name, owner(address), error ? " " : "", error ? error : "");
}

#ifdef LINKED
int cuInit(unsigned);
int cuMemAlloc_v2(uint64_t *, size_t);
int cuEventCreate(void **, unsigned);
int nvmlInit_v2(void);
#endif

typedef int (*get_v1)(const char *, void **, int, uint64_t);
typedef int (*get_v2)(const char *, void **, int, uint64_t, int *);

/* Compares the shim's proc addresses with the driver's own, for every name, version and flag. */
static int oracle(const char *names_file) {
    /* The C library's dlsym, which nobody has overridden. */
    void *libc = dlopen("libc.so.6", RTLD_NOW);
    void *(*real_dlsym)(void *, const char *) = (void *(*)(void *, const char *))dlsym(libc, "dlsym");
    void *real = dlopen(driver_cuda, RTLD_NOW);
    void *ours = dlopen("libcuda.so.1", RTLD_NOW);
    get_v1 driver_1 = (get_v1)real_dlsym(real, "cuGetProcAddress"), shim_1 = (get_v1)dlsym(ours, "cuGetProcAddress");
    get_v2 driver_2 = (get_v2)real_dlsym(real, "cuGetProcAddress_v2"),
           shim_2 = (get_v2)dlsym(ours, "cuGetProcAddress_v2");
    if (!driver_1 || !driver_2 || driver_1 == shim_1 || driver_2 == shim_2)
        return printf("no two sides to compare\n"), 1;

    static char names[4096][80];
    static int handled[4096], versions[256];
    int count = 0, version_count = 0, compared = 0, replaced = 0;
    FILE *file = fopen(names_file, "r");
    char line[200], kind[8];
    while (fgets(line, sizeof line, file)) {
        int value;
        if (sscanf(line, "version %d", &value) == 1)
            versions[version_count++] = value;
        else if (sscanf(line, "%7s %79s", kind, names[count]) == 2)
            handled[count++] = !strcmp(kind, "ours");
    }
    fclose(file);
    strcpy(names[count++], "cuNoSuchThing");
    names[count++][0] = 0;

    for (int n = 0; n < count; n++)
        for (int v = 0; v < version_count; v++)
            for (int flags = 0; flags < 9; flags++) {
                void *untouched = (void *)0xdead, *a = untouched, *b = untouched;
                int status_a = -7, status_b = -7;
                int result_a = driver_2(names[n], &a, versions[v], flags, &status_a);
                int result_b = shim_2(names[n], &b, versions[v], flags, &status_b);
                void *c = untouched, *d = untouched;
                int result_c = driver_1(names[n], &c, versions[v], flags);
                int result_d = shim_1(names[n], &d, versions[v], flags);
                void *expected = a, *expected_1 = c;
                for (int m = 0; m < count; m++)
                    if (handled[m]) {
                        static void *of_driver[4096], *of_shim[4096];
                        if (!of_shim[m]) {
                            of_driver[m] = real_dlsym(real, names[m]);
                            of_shim[m] = real_dlsym(ours, names[m]);
                        }
                        if (a && a != untouched && a == of_driver[m])
                            expected = of_shim[m], replaced++;
                        if (c && c != untouched && c == of_driver[m])
                            expected_1 = of_shim[m];
                    }
                compared++;
                if (result_a != result_b || status_a != status_b || expected != b || result_c != result_d ||
                    expected_1 != d)
                    return printf("%s version %d flags %d: driver %d/%d %p and %d %p, shim %d/%d %p and %d %p\n",
                                  names[n], versions[v], flags, result_a, status_a, a, result_c, c, result_b, status_b,
                                  b, result_d, d),
                           1;
            }
    printf("compared %d replaced %d\n", compared, replaced);
    return 0;
}

int main(int argc, char **argv) {
    shim = getenv("CLIENT_SHIM"), driver_cuda = getenv("CLIENT_CUDA"), driver_nvml = getenv("CLIENT_NVML");
    if (argc > 2 && !strcmp(argv[1], "oracle"))
        return oracle(argv[2]);

    /* client DOOR FILE NAME...: looks the names up behind the door. */
    const char *door = argv[1], *file = argv[2];
    for (int n = 3; n < argc; n++) {
        const char *name = argv[n];
        if (!strcmp(door, "default"))
            say(door, name, dlsym(RTLD_DEFAULT, name));
        else if (!strcmp(door, "next"))
            for (int again = 0; again < 3; again++)
                say(door, name, dlsym(RTLD_NEXT, name));
        else if (!strcmp(door, "open"))
            say(door, name, dlsym(dlopen(file, RTLD_NOW), name));
        else if (!strcmp(door, "versioned"))
            say(door, name, dlvsym(dlopen(file, RTLD_NOW), name, "NONE_1.0"));
        else if (!strcmp(door, "own-dlsym")) {
            /* As other interposers do: the C library's dlsym on what dlopen gave. */
            void *libc = dlopen("libc.so.6", RTLD_NOW);
            void *(*real)(void *, const char *) = (void *(*)(void *, const char *))dlsym(libc, "dlsym");
            say(door, name, real(dlopen(file, RTLD_NOW), name));
        } else if (!strcmp(door, "plugin-next") || !strcmp(door, "plugin-default") || !strcmp(door, "deep")) {
            void *plugin = dlopen(file, RTLD_NOW | (strcmp(door, "deep") ? 0 : RTLD_DEEPBIND));
            void *(*look)(void *, const char *) = (void *(*)(void *, const char *))dlsym(plugin, "plugin_dlsym");
            void *handle = !strcmp(door, "plugin-next") ? RTLD_NEXT
                           : !strcmp(door, "deep")      ? dlopen(strncmp(name, "nvml", 4) ? "libcuda.so.1" : "libnvidia-ml.so.1", RTLD_NOW)
                                                        : RTLD_DEFAULT;
            say(door, name, look(handle, name));
        } else if (!strcmp(door, "namespace"))
            say(door, name, dlsym(dlmopen(LM_ID_NEWLM, file, RTLD_NOW), name));
        else if (!strcmp(door, "same")) {
            void *handle = dlopen(file, RTLD_NOW), *other = dlopen(name, RTLD_NOW);
            printf("%s %s %s\n", door, name, handle && handle == other ? "once" : "again");
        } else if (!strcmp(door, "own-namespace")) {
            void *libc = dlopen("libc.so.6", RTLD_NOW), *here = dlopen("libcuda.so.1", RTLD_NOW);
            void *(*real)(void *, const char *) = (void *(*)(void *, const char *))dlsym(libc, "dlsym");
            void *handle = dlmopen(LM_ID_NEWLM, file, RTLD_NOW);
            if (!handle)
                return printf("dlmopen: %s\n", dlerror()), 1;
            int (*init)(unsigned) = (int (*)(unsigned))real(here, "cuInit");
            int (*init_there)(unsigned) = (int (*)(unsigned))real(handle, "cuInit");
            Dl_info info;
            dladdr(real(handle, name), &info);
            init(0);
            printf("%s %s %s %d\n", door, name,
                   real(handle, name) != real(here, name) && !strcmp(info.dli_fname, file) ? "copy" : "same",
                   init_there(0));
        }
#ifdef LINKED
        else if (!strcmp(door, "linked")) {
            void *address = !strcmp(name, "cuInit")          ? (void *)cuInit
                            : !strcmp(name, "cuMemAlloc_v2") ? (void *)cuMemAlloc_v2
                            : !strcmp(name, "nvmlInit_v2")   ? (void *)nvmlInit_v2
                                                             : (void *)cuEventCreate;
            say(door, name, address);
        } else if (!strcmp(door, "call"))
            /* Without a GPU the real driver says 100. */
            printf("cuInit %d\n", cuInit(0));
#endif
        else
            return printf("no such door: %s\n", door), 1;
    }
    return 0;
}
#endif
