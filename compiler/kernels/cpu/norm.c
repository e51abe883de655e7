/* RMS norms and the quantization of activations. One task is a few rows. */
#include "quantize.h"

#define ROWS 8

static int row_tasks(const tp_launch *l, const tp_step *s) {
    (void)l;
    return tp_ceil_div(s->rows, ROWS);
}

/* 1 / sqrt(mean of squares + eps). */
static float inverse_rms(const float *x, int k, float eps) {
    __m256 sum[4];
    for (int j = 0; j < 4; j++) sum[j] = _mm256_setzero_ps();
    int i = 0;
    for (; i + 32 <= k; i += 32) {
        for (int j = 0; j < 4; j++) {
            const __m256 v = _mm256_loadu_ps(x + i + 8 * j);
            sum[j] = _mm256_fmadd_ps(v, v, sum[j]);
        }
    }
    for (; i < k; i += 8) {
        const __m256 v = _mm256_maskload_ps(x + i, tp_mask8(tp_min(8, k - i)));
        sum[0] = _mm256_fmadd_ps(v, v, sum[0]);
    }
    const float total = tp_sum8(_mm256_add_ps(_mm256_add_ps(sum[0], sum[1]), _mm256_add_ps(sum[2], sum[3])));
    return 1.0f / tp_sqrt(total / (float)k + eps);
}

/* Elements [i, i + 8) of the normed row, zero past k. */
TP_INLINE __m256 normed8(const float *x, const float *weight, __m256 inverse, int i, int k) {
    if (i + 8 <= k)
        return _mm256_mul_ps(_mm256_mul_ps(_mm256_loadu_ps(x + i), inverse), _mm256_loadu_ps(weight + i));
    const __m256i mask = tp_mask8(tp_max(0, k - i));
    const __m256 v = _mm256_mul_ps(_mm256_maskload_ps(x + i, mask), inverse);
    return _mm256_mul_ps(v, _mm256_maskload_ps(weight + i, mask));
}

/* rmsnorm_f32: 0 x f32, 1 ldx, 2 weight f32[k], 3 y f32 [rows][k], 4 k, 5 eps. y = x / rms(x) * weight.
 * rmsnorm_add: the same with y += */
static void norm_rows(const tp_launch *l, const tp_step *s, int task, int add) {
    const int k = (int)l->arg[4];
    const float *weight = TP_PTR(const float, l, 2);
    for (int row = task * ROWS; row < tp_min(s->rows, (task + 1) * ROWS); row++) {
        const float *x = TP_PTR(const float, l, 0) + row * l->arg[1];
        float *y = TP_PTR(float, l, 3) + (int64_t)row * k;
        const __m256 inverse = _mm256_set1_ps(inverse_rms(x, k, tp_float(l, 5)));
        for (int i = 0; i < k; i += 8) {
            const __m256i mask = tp_mask8(tp_min(8, k - i));
            const __m256 v = normed8(x, weight, inverse, i, k);
            _mm256_maskstore_ps(y + i, mask, add ? _mm256_add_ps(_mm256_maskload_ps(y + i, mask), v) : v);
        }
    }
}

static void rmsnorm_f32(const tp_launch *l, const tp_step *s, int task, void *scratch) {
    (void)scratch;
    norm_rows(l, s, task, 0);
}

static void rmsnorm_add(const tp_launch *l, const tp_step *s, int task, void *scratch) {
    (void)scratch;
    norm_rows(l, s, task, 1);
}

/* rmsnorm_x8: 0 x f32, 1 ldx, 2 weight f32[k], 3 y x8, 4 k, 5 eps, 6 cap, 7 terms. */
static void rmsnorm_x8(const tp_launch *l, const tp_step *s, int task, void *scratch) {
    (void)scratch;
    const int k = (int)l->arg[4], groups = tp_ceil_div(k, 32), terms = l->arg[7] == 2 ? 2 : 1;
    for (int row = task * ROWS; row < tp_min(s->rows, (task + 1) * ROWS); row++) {
        const float *x = TP_PTR(const float, l, 0) + row * l->arg[1];
        const __m256 inverse = _mm256_set1_ps(inverse_rms(x, k, tp_float(l, 5)));
        for (int g = 0; g < groups; g++) {
            __m256 v[4];
            for (int j = 0; j < 4; j++) v[j] = normed8(x, TP_PTR(const float, l, 2), inverse, g * 32 + 8 * j, k);
            tp_store_x8(TP_PTR(void, l, 3), groups, l->arg[6], g, row, terms, v);
        }
    }
}

/* quantize_x8: 0 x f32, 1 ldx, 2 y x8, 3 k, 4 cap, 5 terms. */
static void quantize_x8(const tp_launch *l, const tp_step *s, int task, void *scratch) {
    (void)scratch;
    const int terms = l->arg[5] == 2 ? 2 : 1;
    for (int row = task * ROWS; row < tp_min(s->rows, (task + 1) * ROWS); row++)
        tp_quantize_row(TP_PTR(const float, l, 0) + row * l->arg[1], (int)l->arg[3], TP_PTR(void, l, 2), l->arg[4], row, terms);
}

const tp_kernel tp_kernel_rmsnorm_f32 = {"rmsnorm_f32", row_tasks, rmsnorm_f32};
const tp_kernel tp_kernel_rmsnorm_add = {"rmsnorm_add", row_tasks, rmsnorm_add};
const tp_kernel tp_kernel_rmsnorm_x8 = {"rmsnorm_x8", row_tasks, rmsnorm_x8};
const tp_kernel tp_kernel_quantize_x8 = {"quantize_x8", row_tasks, quantize_x8};
