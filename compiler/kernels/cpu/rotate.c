/* Work on parts of heads: rotary embedding in place, gathering columns; and the layer norm. One task is a few rows. */
#include "tapeout_cpu.h"
#include "tp_math.h"

#define ROWS 8

static int row_tasks(const tp_launch *l, const tp_step *s) {
    (void)l;
    return tp_ceil_div(s->rows, ROWS);
}

/* The pair (a, b) to (a cos - b sin, b cos + a sin). */
TP_INLINE void turn(float *a, float *b, float cosine, float sine) {
    const float x = *a, y = *b;
    *a = x * cosine - y * sine;
    *b = y * cosine + x * sine;
}

/* rotate: 0 x f32 (first rotated channel), 1 ldx, 2 table f32 [rows][rotated] (cosines, then sines), 3 heads, 4 period
 * (floats from one head to the next), 5 rotated, 6 pairs: 1 turns channels 2i and 2i + 1, 0 turns i and i + rotated / 2,
 * 7 sign: -1 turns back. */
static void rotate_rows(const tp_launch *l, const tp_step *s, int task, void *scratch) {
    (void)scratch;
    const int heads = (int)l->arg[3], rotated = (int)l->arg[5], half = rotated / 2;
    const int step = l->arg[6] ? 2 : 1, apart = l->arg[6] ? 1 : half;
    const float sign = (float)l->arg[7];
    for (int row = task * ROWS; row < tp_min(s->rows, (task + 1) * ROWS); row++) {
        const float *cosine = TP_PTR(const float, l, 2) + (int64_t)row * rotated, *sine = cosine + half;
        float *x = TP_PTR(float, l, 0) + row * l->arg[1];
        for (int h = 0; h < heads; h++, x += l->arg[4])
            for (int i = 0; i < half; i++) turn(x + i * step, x + i * step + apart, cosine[i], sign * sine[i]);
    }
}

/* Sum over x[k] of (x - shift)^power, power 1 or 2, always in the same order. */
TP_INLINE float sum_of(const float *x, int k, float shift, int power) {
    __m256 sum = _mm256_setzero_ps();
    for (int i = 0; i < k; i += 8) {
        const __m256i mask = tp_mask8(tp_min(8, k - i));
        __m256 v = _mm256_sub_ps(_mm256_maskload_ps(x + i, mask), _mm256_set1_ps(shift));
        v = _mm256_and_ps(v, _mm256_castsi256_ps(mask));
        sum = power == 2 ? _mm256_fmadd_ps(v, v, sum) : _mm256_add_ps(sum, v);
    }
    return tp_sum8(sum);
}

/* layernorm: 0 x f32, 1 ldx, 2 weight f32[k], 3 bias f32[k], 4 y f32 [rows][k], 5 k, 6 eps.
 * y = (x - mean) / sqrt(variance + eps) * weight + bias. */
static void layernorm_rows(const tp_launch *l, const tp_step *s, int task, void *scratch) {
    (void)scratch;
    const int k = (int)l->arg[5];
    const float *weight = TP_PTR(const float, l, 2), *bias = TP_PTR(const float, l, 3);
    for (int row = task * ROWS; row < tp_min(s->rows, (task + 1) * ROWS); row++) {
        const float *x = TP_PTR(const float, l, 0) + row * l->arg[1];
        float *y = TP_PTR(float, l, 4) + (int64_t)row * k;
        const float mean = sum_of(x, k, 0, 1) / (float)k;
        const float inverse = 1.0f / tp_sqrt(sum_of(x, k, mean, 2) / (float)k + tp_float(l, 6));
        for (int i = 0; i < k; i++) y[i] = (x[i] - mean) * inverse * weight[i] + bias[i];
    }
}

/* gather_columns: 0 x f32 (first column), 1 ldx, 2 y f32 [rows][heads * width], 3 heads, 4 period (floats from one head to
 * the next), 5 width. y = the first `width` columns of every head. */
static void gather_rows(const tp_launch *l, const tp_step *s, int task, void *scratch) {
    (void)scratch;
    const int64_t heads = l->arg[3], width = l->arg[5];
    for (int row = task * ROWS; row < tp_min(s->rows, (task + 1) * ROWS); row++)
        for (int64_t h = 0; h < heads; h++)
            memcpy(TP_PTR(float, l, 2) + (row * heads + h) * width,
                   TP_PTR(const float, l, 0) + row * l->arg[1] + h * l->arg[4], (size_t)width * sizeof(float));
}

const tp_kernel tp_kernel_rotate = {"rotate", row_tasks, rotate_rows};
const tp_kernel tp_kernel_layernorm = {"layernorm", row_tasks, layernorm_rows};
const tp_kernel tp_kernel_gather_columns = {"gather_columns", row_tasks, gather_rows};
