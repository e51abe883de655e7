/* Rotary position embedding, and the way of keys and values into the paged cache. */
#include "tapeout_cpu.h"
#include "tp_math.h"

#define ROWS 8
#define MAX_HEAD_DIM 512

static int row_tasks(const tp_launch *l, const tp_step *s) {
    (void)l;
    return tp_ceil_div(s->rows, ROWS);
}

/* rope_table: 0 inv_freq f32[d/2], 1 out f32 [rows][d] (d/2 cosines, then d/2 sines), 2 d, 3 attention factor.
 * The angle is rounded to float32, as transformers computes it; sine and cosine are exact to float32. */
static void rope_table(const tp_launch *l, const tp_step *s, int task, void *scratch) {
    (void)scratch;
    const float *frequency = TP_PTR(const float, l, 0);
    const int d = (int)l->arg[2], half = d / 2;
    const float factor = tp_float(l, 3);
    for (int row = task * ROWS; row < tp_min(s->rows, (task + 1) * ROWS); row++) {
        float *out = TP_PTR(float, l, 1) + (int64_t)row * d;
        for (int i = 0; i < half; i++) {
            const float angle = (float)s->positions[row] * frequency[i];
            double sine, cosine;
            tp_sincos((double)angle, &sine, &cosine);
            out[i] = (float)cosine * factor;
            out[half + i] = (float)sine * factor;
        }
    }
}

/* x[d] to x / rms(x) * weight in place; d is a multiple of 8. */
static void norm_head(float *x, const float *weight, int d, float eps) {
    __m256 sum = _mm256_setzero_ps();
    for (int i = 0; i < d; i += 8) {
        const __m256 v = _mm256_loadu_ps(x + i);
        sum = _mm256_fmadd_ps(v, v, sum);
    }
    const __m256 inverse = _mm256_set1_ps(1.0f / tp_sqrt(tp_sum8(sum) / (float)d + eps));
    for (int i = 0; i < d; i += 8) {
        const __m256 v = _mm256_mul_ps(_mm256_loadu_ps(x + i), inverse);
        _mm256_storeu_ps(x + i, _mm256_mul_ps(v, _mm256_loadu_ps(weight + i)));
    }
}

/* (a, b) = (a cos - b sin, b cos + a sin) for the halves a, b of x[d]. */
static void rotate(float *x, const float *table, int d) {
    const int half = d / 2;
    for (int i = 0; i < half; i += 4) {
        const __m128 a = _mm_loadu_ps(x + i), b = _mm_loadu_ps(x + half + i);
        const __m128 c = _mm_loadu_ps(table + i), s = _mm_loadu_ps(table + half + i);
        _mm_storeu_ps(x + i, _mm_sub_ps(_mm_mul_ps(a, c), _mm_mul_ps(b, s)));
        _mm_storeu_ps(x + half + i, _mm_add_ps(_mm_mul_ps(b, c), _mm_mul_ps(a, s)));
    }
}

TP_INLINE void to_f16(uint16_t *out, const float *x, int d) {
    for (int i = 0; i < d; i += 8)
        _mm_storeu_si128((__m128i *)(out + i), _mm256_cvtps_ph(_mm256_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT));
}

/* One head's key (a column of the page, the page being transposed) and value (a row). */
TP_INLINE void store_kv(char *page, const float *key, const float *value, int head, int kv_heads, int d, int tokens,
                        int slot, int f16) {
    const int64_t key_at = (int64_t)head * d * tokens + slot;
    const int64_t value_at = ((int64_t)kv_heads * tokens + (int64_t)head * tokens + slot) * d;
    if (f16) {
        uint16_t half[MAX_HEAD_DIM], *pool = (uint16_t *)page;
        to_f16(half, key, d);
        for (int i = 0; i < d; i++) pool[key_at + (int64_t)i * tokens] = half[i];
        to_f16(pool + value_at, value, d);
    } else {
        float *pool = (float *)page;
        for (int i = 0; i < d; i++) pool[key_at + (int64_t)i * tokens] = key[i];
        memcpy(pool + value_at, value, (size_t)d * sizeof(float));
    }
}

/* rope_kv_f16, rope_kv_f32: 0 q f32, 1 ldq, 2 k f32, 3 ldk, 4 v f32, 5 ldv, 6 table f32 [rows][d], 7 kv, 8 heads,
 * 9 kv_heads, 10 head_dim, 11 page_tokens, 12 q norm f32[d] or 0, 13 k norm or 0, 14 eps.
 * Norms q and k by head where asked, rotates both in place, writes k and v to their page. */
TP_INLINE void rope_kv(const tp_launch *l, const tp_step *s, int row, int f16) {
    const int heads = (int)l->arg[8], kv_heads = (int)l->arg[9], d = (int)l->arg[10], tokens = (int)l->arg[11];
    const float *table = TP_PTR(const float, l, 6) + (int64_t)row * d;
    const float *q_norm = TP_PTR(const float, l, 12), *k_norm = TP_PTR(const float, l, 13);
    const float eps = tp_float(l, 14);
    float *q = TP_PTR(float, l, 0) + row * l->arg[1];
    float *k = TP_PTR(float, l, 2) + row * l->arg[3];
    const float *v = TP_PTR(const float, l, 4) + row * l->arg[5];
    const int position = s->positions[row];
    const int page = s->segment[s->row_segment[row]].pages[position / tokens];
    const int64_t page_bytes = (int64_t)2 * kv_heads * d * tokens * (f16 ? 2 : 4);
    for (int h = 0; h < heads; h++) {
        if (q_norm) norm_head(q + h * d, q_norm, d, eps);
        rotate(q + h * d, table, d);
    }
    for (int h = 0; h < kv_heads; h++) {
        if (k_norm) norm_head(k + h * d, k_norm, d, eps);
        rotate(k + h * d, table, d);
        store_kv(TP_PTR(char, l, 7) + page * page_bytes, k + h * d, v + h * d, h, kv_heads, d, tokens,
                 position % tokens, f16);
    }
}

static void rope_kv_f16(const tp_launch *l, const tp_step *s, int task, void *scratch) {
    (void)scratch;
    for (int row = task * ROWS; row < tp_min(s->rows, (task + 1) * ROWS); row++) rope_kv(l, s, row, 1);
}

static void rope_kv_f32(const tp_launch *l, const tp_step *s, int task, void *scratch) {
    (void)scratch;
    for (int row = task * ROWS; row < tp_min(s->rows, (task + 1) * ROWS); row++) rope_kv(l, s, row, 0);
}

const tp_kernel tp_kernel_rope_table = {"rope_table", row_tasks, rope_table};
const tp_kernel tp_kernel_rope_kv_f16 = {"rope_kv_f16", row_tasks, rope_kv_f16};
const tp_kernel tp_kernel_rope_kv_f32 = {"rope_kv_f32", row_tasks, rope_kv_f32};
