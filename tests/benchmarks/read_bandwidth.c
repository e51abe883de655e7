/* read_bandwidth MIB THREADS REPEATS: GB/s of reading MIB of memory once, a line a repeat. */
#include <immintrin.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef struct {
    const char *first, *last;
    int64_t sum;
} part;

static void *read_part(void *argument) {
    part *p = argument;
    __m256i sum[4] = {0};
    for (const char *at = p->first; at < p->last; at += 128)
        for (int i = 0; i < 4; i++) sum[i] = _mm256_add_epi64(sum[i], _mm256_load_si256((const void *)(at + 32 * i)));
    sum[0] = _mm256_add_epi64(_mm256_add_epi64(sum[0], sum[1]), _mm256_add_epi64(sum[2], sum[3]));
    p->sum = _mm256_extract_epi64(sum[0], 0);
    return NULL;
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

int main(int argc, char **argv) {
    if (argc != 4) return 2;
    size_t bytes = (size_t)atoi(argv[1]) << 20;
    int threads = atoi(argv[2]), repeats = atoi(argv[3]);
    char *memory = aligned_alloc(4096, bytes);
    if (!memory || threads < 1 || threads > 64) return 1;
    memset(memory, 1, bytes);
    for (int r = 0; r < repeats; r++) {
        pthread_t thread[64];
        part parts[64];
        double start = now();
        for (int t = 0; t < threads; t++) {
            size_t share = bytes / threads / 128 * 128;
            parts[t] = (part){memory + t * share, memory + (t + 1) * share, 0};
            pthread_create(&thread[t], NULL, read_part, &parts[t]);
        }
        for (int t = 0; t < threads; t++) pthread_join(thread[t], NULL);
        printf("%.3f\n", bytes / (now() - start) / 1e9);
    }
    return 0;
}
