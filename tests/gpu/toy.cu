/* The kernels of the toy model in tests/unit/tiny_gpu.py, one thread each, so that the runtime meets a real driver. */
#ifndef MAX_PAGES
#define MAX_PAGES 128
#endif
#define VOCAB 64
#define PAGE 4
typedef unsigned long long u64;
typedef unsigned short u16;

/* Wait for the kernels before, then let one thread work. */
static __device__ bool alone() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    return blockIdx.x == 0 && threadIdx.x == 0;
}

static __device__ u16 to_f16(float value) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

static __device__ float from_f16(u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

static __device__ float from_bf16(u16 bits) { return __uint_as_float((unsigned)bits << 16); }

extern "C" __global__ void tp_embed(const int *tokens, float *y, const int *counts) {
    if (!alone()) return;
    for (int row = 0; row < counts[0]; row++) y[row] = tokens[row];
}

extern "C" __global__ void tp_mix(const float *x, const int *positions, const int *row_segment, const int *page_table,
                                  u16 *kv, u16 *y, const int *counts, void *extra0, void *extra1) {
    if (!alone()) return;
    if (extra0 || extra1) asm volatile("trap;");
    for (int row = 0; row < counts[0]; row++) {
        const int *table = page_table + row_segment[row] * MAX_PAGES, p = positions[row];
        kv[table[p / PAGE] * PAGE + p % PAGE] = to_f16(x[row]);
    }
    for (int row = 0; row < counts[0]; row++) {
        const int *table = page_table + row_segment[row] * MAX_PAGES;
        int total = 0;
        for (int p = 0; p <= positions[row]; p++)
            total += (p + 1) * ((int)from_f16(kv[table[p / PAGE] * PAGE + p % PAGE]) + 1);
        y[row] = (u16)(__float_as_uint((float)(total % VOCAB)) >> 16);
    }
}

extern "C" __global__ void tp_gather(const u16 *x, const int *out_row, u16 *y, const int *counts) {
    if (!alone()) return;
    for (int row = 0; row < counts[2]; row++) y[row] = to_f16(from_bf16(x[out_row[row]]));
}

static __device__ void logits_of(float value, const int *w, float *y) {
    for (int token = 0; token < VOCAB; token++) {
        const int away = token - (value == value ? w[(int)value] : 0);
        y[token] = value == value ? -(float)(away < 0 ? -away : away) / VOCAB : value;
    }
}

extern "C" __global__ void tp_head(const u16 *x, const int *w, float *y, const int *counts) {
    extern __shared__ char shared[];
    shared[threadIdx.x * 800] = 1; /* as much as the launch asks for */
    if (!alone()) return;
    for (int row = 0; row < counts[2]; row++) logits_of(from_f16(x[row]), w, y + row * VOCAB);
}

extern "C" __global__ void tp_head_body(const u16 *x, const int *w, float *y, const int *counts) {
    if (!alone()) return;
    for (int row = 0; row < counts[0]; row++) logits_of(from_bf16(x[row]), w, y + row * VOCAB);
}

static __device__ void sample(const float *logits, const float *temperature, const u64 *seed,
                              const u64 *sample_position, int *sampled, int *partial, const int *counts) {
    if (*partial) asm volatile("trap;");
    for (int row = 0; row < counts[2]; row++) {
        int best = 0;
        for (int token = 0; token < VOCAB; token++) {
            const float value = logits[row * VOCAB + token];
            if (value != value) best = -1;
            if (best >= 0 && value > logits[row * VOCAB + best]) best = token;
        }
        if (temperature[row] > 0) best = (int)((best + seed[row] + sample_position[row]) % VOCAB);
        sampled[row] = best;
    }
}

extern "C" __global__ void tp_sample(const float *logits, const float *temperature, const u64 *seed,
                                     const u64 *sample_position, int *sampled, int *partial, const int *counts) {
    if (alone()) sample(logits, temperature, seed, sample_position, sampled, partial, counts);
}

extern "C" __global__ void tp_sample_advance(const float *logits, const float *temperature, const u64 *seed,
                                             u64 *sample_position, int *sampled, int *partial, const int *counts,
                                             int *tokens, int *positions) {
    if (!alone()) return;
    sample(logits, temperature, seed, sample_position, sampled, partial, counts);
    for (int row = 0; row < counts[0]; row++) {
        tokens[row] = sampled[row];
        positions[row]++;
        sample_position[row]++;
    }
}
