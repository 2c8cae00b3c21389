/* Loaded before CUDA's runtime (LD_PRELOAD): a card has at most SMALL_CARD_BYTES.

   The free memory stays what CUDA says, because a balloon holds the rest of the real card. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <stdlib.h>

typedef int (*mem_get_info)(size_t *, size_t *);

static mem_get_info real_function(void) {
    void *function = dlsym(RTLD_NEXT, "cudaMemGetInfo");
    /* Not among the global symbols if a library that Python loaded brought the runtime. */
    const char *names[] = {"libcudart.so.13", "libcudart.so.12"};
    for (int i = 0; function == NULL && i < 2; i++) {
        void *runtime = dlopen(names[i], RTLD_LAZY | RTLD_NOLOAD);
        if (runtime != NULL) function = dlsym(runtime, "cudaMemGetInfo");
    }
    return (mem_get_info)function;
}

int cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
    mem_get_info function = real_function();
    if (function == NULL) return 3; /* cudaErrorInitializationError */
    int error = function(free_bytes, total_bytes);
    const char *limit = getenv("SMALL_CARD_BYTES");
    if (error == 0 && limit != NULL) {
        size_t bytes = strtoull(limit, NULL, 10);
        if (*total_bytes > bytes) *total_bytes = bytes;
        if (*free_bytes > bytes) *free_bytes = bytes;
    }
    return error;
}
