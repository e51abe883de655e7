/* The compressor of DeepSeek-V4 (transformers modeling_deepseek_v4.py): windows of tokens become entries of a cache; see
 * compressed.h. */
#include "compressed.h"

#define ROWS 4
#define MAX_D 1024
#define MAX_SLOTS 512 /* rows that make up one entry */

static int row_tasks(const tp_launch *l, const tp_step *s) {
    (void)l;
    return tp_ceil_div(s->rows, ROWS);
}

/* compress_f16, _f32: 0 x f32 (of each row c [w], then g [w]), 1 ldx, 2 ape f32 [m][w], 3 norm f32 [d], 4 inv_freq f32
 * [rotated / 2], 5 ring of x, 6 entries, 7 y f32 [rows][d], 8 d (a multiple of 16), 9 m, 10 overlap, 11 rotated,
 * 12 page_tokens, 13 eps. w is d, or 2 d with overlap: [a | b].
 *
 * The row that ends a window writes its entry, and the others zeros: sum over the window of c * softmax(g + ape), by
 * channel, normed, its last channels rotated (in pairs) by the position of the window's first token. With overlap the
 * sum is over a of the window before (none before the first) and b of this one. The ring has m or 2 m rows. */
typedef struct window {
    const float *c[MAX_SLOTS], *g[MAX_SLOTS], *ape[MAX_SLOTS];
    int slots;
} window;

static void add_slots(window *w, const tp_rows *rows, const float *ape, int first, int m, int width, int column) {
    for (int j = 0; j < m; j++, w->slots++) {
        const float *x = tp_row(rows, first + j);
        w->c[w->slots] = x + column;
        w->g[w->slots] = x + width + column;
        w->ape[w->slots] = ape + j * width + column;
    }
}

static void pool(const window *w, int d, float *out) {
    for (int i = 0; i < d; i += 8) {
        __m256 top = _mm256_set1_ps(-__builtin_inff()), sum = _mm256_setzero_ps(), total = _mm256_setzero_ps();
        for (int j = 0; j < w->slots; j++)
            top = _mm256_max_ps(top, _mm256_add_ps(_mm256_loadu_ps(w->g[j] + i), _mm256_loadu_ps(w->ape[j] + i)));
        for (int j = 0; j < w->slots; j++) {
            const __m256 gate = _mm256_add_ps(_mm256_loadu_ps(w->g[j] + i), _mm256_loadu_ps(w->ape[j] + i));
            const __m256 p = tp_exp8(_mm256_sub_ps(gate, top));
            sum = _mm256_add_ps(sum, p);
            total = _mm256_fmadd_ps(p, _mm256_loadu_ps(w->c[j] + i), total);
        }
        _mm256_storeu_ps(out + i, _mm256_div_ps(total, sum));
    }
}

static void normalize(float *x, const float *weight, int d, float eps) {
    __m256 square = _mm256_setzero_ps();
    for (int i = 0; i < d; i += 8) {
        const __m256 v = _mm256_loadu_ps(x + i);
        square = _mm256_fmadd_ps(v, v, square);
    }
    const float inverse = 1.0f / tp_sqrt(tp_sum8(square) / (float)d + eps);
    for (int i = 0; i < d; i++) x[i] = x[i] * inverse * weight[i];
}

static void rotate_pairs(float *x, const float *frequency, int rotated, int position) {
    for (int i = 0; i < rotated / 2; i++) {
        double sine, cosine;
        tp_sincos((double)((float)position * frequency[i]), &sine, &cosine);
        const float a = x[2 * i], b = x[2 * i + 1], c = (float)cosine, s = (float)sine;
        x[2 * i] = a * c - b * s;
        x[2 * i + 1] = b * c + a * s;
    }
}

static void store_entry(entry_t *to, const float *x, int d) {
#if TP_KV_F16
    for (int i = 0; i < d; i += 8)
        _mm_storeu_si128((__m128i *)(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT));
#else
    memcpy(to, x, (size_t)d * sizeof(float));
#endif
}

static void compress(const tp_launch *l, const tp_step *s, int task, void *scratch) {
    const int d = (int)l->arg[8], m = (int)l->arg[9], overlap = (int)l->arg[10], rotated = (int)l->arg[11];
    const int width = d * (1 + overlap);
    window *w = scratch;
    for (int row = task * ROWS; row < tp_min(s->rows, (task + 1) * ROWS); row++) {
        const tp_segment *g = &s->segment[s->row_segment[row]];
        const int index = (s->positions[row] + 1) / m - 1, first = index * m;
        float *y = TP_PTR(float, l, 7) + (int64_t)row * d;
        memset(y, 0, (size_t)d * sizeof(float));
        if ((s->positions[row] + 1) % m) continue;
        const float *ape = TP_PTR(const float, l, 2);
        const tp_rows rows = tp_rows_of(g, TP_PTR(const float, l, 0), l->arg[1], TP_PTR(const float, l, 5),
                                        m * (1 + overlap), 2 * width);
        w->slots = 0;
        if (overlap && index > 0) add_slots(w, &rows, ape, first - m, m, width, 0);
        add_slots(w, &rows, ape, first, m, width, overlap * d);
        pool(w, d, y);
        normalize(y, TP_PTR(const float, l, 3), d, tp_float(l, 13));
        rotate_pairs(y + d - rotated, TP_PTR(const float, l, 4), rotated, first);
        const tp_entries entries = {TP_PTR(entry_t, l, 6), g->pages, d, m, (int)l->arg[12]};
        store_entry(tp_entry(&entries, index), y, d);
    }
}

#if TP_KV_F16
const tp_kernel tp_kernel_compress_f16 = {"compress_f16", row_tasks, compress};
#else
const tp_kernel tp_kernel_compress_f32 = {"compress_f32", row_tasks, compress};
#endif
