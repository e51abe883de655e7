/* The caches of compressed attention (DeepSeek-V4). Every m consecutive tokens of a sequence, a window, make one entry.
 *
 * Entry w lies in the page that holds the window's last token, token (w + 1) m - 1, behind the entries of windows that
 * end earlier in the page; a page has room for ceil(page_tokens / m). Entries are [d] float16 or float32 (TP_KV_F16).
 * A ring [sequence slot][size][width] of float32 keeps the last `size` rows of a value of each sequence, row p at
 * p % size. A step reads rows before its own from the ring and its own from where they were computed. */
#ifndef TP_COMPRESSED_H
#define TP_COMPRESSED_H
#include "tapeout_cpu.h"
#include "tp_math.h"

#if TP_KV_F16
typedef uint16_t entry_t;
#define TP_ENTRY_NAME(name) name##_f16
#else
typedef float entry_t;
#define TP_ENTRY_NAME(name) name##_f32
#endif

typedef struct tp_entries {
    entry_t *pool;
    const int32_t *pages;
    int d, m, page_tokens;
} tp_entries;

TP_INLINE entry_t *tp_entry(const tp_entries *e, int64_t w) {
    const int64_t page = ((w + 1) * e->m - 1) / e->page_tokens;
    const int64_t first = page * e->page_tokens / e->m; /* the first window that ends in the page */
    return e->pool + (e->pages[page] * (int64_t)tp_ceil_div(e->page_tokens, e->m) + w - first) * e->d;
}

/* Entries that position p sees: those whose window has ended. */
TP_INLINE int tp_visible(int position, int m) { return m ? (position + 1) / m : 0; }

/* Entry w as float32: in place, or converted to `copy`. */
TP_INLINE const float *tp_read_entry(const tp_entries *e, int64_t w, float *copy) {
    const entry_t *entry = tp_entry(e, w);
#if TP_KV_F16
    for (int i = 0; i < e->d; i += 8)
        _mm256_storeu_ps(copy + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(entry + i))));
    return copy;
#else
    (void)copy;
    return entry;
#endif
}

typedef struct tp_rows {
    const float *now, *ring; /* rows of the step from the segment's first on, and the ring of its sequence */
    int64_t ldx, width;
    int size, position; /* of the ring; of the segment's first row */
} tp_rows;

TP_INLINE tp_rows tp_rows_of(const tp_segment *g, const float *x, int64_t ldx, const float *rings, int size, int64_t width) {
    return (tp_rows){x + g->row * ldx, rings + g->slot * size * width, ldx, width, size, g->position};
}

/* Row of position p: of this step, or one of the `size` before it. */
TP_INLINE const float *tp_row(const tp_rows *r, int p) {
    return p >= r->position ? r->now + (p - r->position) * r->ldx : r->ring + p % r->size * r->width;
}

/* Products of rows of float32, d a multiple of 16: score[i * ld + j] = q[i] . key[j] for TP_DOT_ROWS rows q, 4 keys. */
#ifdef __AVX512F__
#define TP_DOT_ROWS 4
typedef __m512 tp_lanes;
#define TP_LANES 16
#define tp_lanes_load(x) _mm512_loadu_ps(x)
#define tp_lanes_store(x, v) _mm512_storeu_ps(x, v)
#define tp_lanes_all(x) _mm512_set1_ps(x)
#define tp_lanes_mul(a, b) _mm512_mul_ps(a, b)
#define tp_lanes_fma(a, b, c) _mm512_fmadd_ps(a, b, c)
TP_INLINE float tp_lanes_sum(tp_lanes x) {
    return tp_sum8(_mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1)));
}
#else
#define TP_DOT_ROWS 2
typedef __m256 tp_lanes;
#define TP_LANES 8
#define tp_lanes_load(x) _mm256_loadu_ps(x)
#define tp_lanes_store(x, v) _mm256_storeu_ps(x, v)
#define tp_lanes_all(x) _mm256_set1_ps(x)
#define tp_lanes_mul(a, b) _mm256_mul_ps(a, b)
#define tp_lanes_fma(a, b, c) _mm256_fmadd_ps(a, b, c)
TP_INLINE float tp_lanes_sum(tp_lanes x) { return tp_sum8(x); }
#endif
#define TP_UNROLL _Pragma("clang loop unroll(full)")

TP_INLINE void tp_dots(const float *const *q, const float *const *key, int d, float *score, int ld) {
    tp_lanes sum[TP_DOT_ROWS][4];
    TP_UNROLL for (int i = 0; i < TP_DOT_ROWS; i++) TP_UNROLL for (int j = 0; j < 4; j++) sum[i][j] = tp_lanes_all(0);
    for (int c = 0; c < d; c += TP_LANES) {
        tp_lanes k[4];
        TP_UNROLL for (int j = 0; j < 4; j++) k[j] = tp_lanes_load(key[j] + c);
        TP_UNROLL for (int i = 0; i < TP_DOT_ROWS; i++) {
            const tp_lanes v = tp_lanes_load(q[i] + c);
            TP_UNROLL for (int j = 0; j < 4; j++) sum[i][j] = tp_lanes_fma(v, k[j], sum[i][j]);
        }
    }
    TP_UNROLL for (int i = 0; i < TP_DOT_ROWS; i++) TP_UNROLL for (int j = 0; j < 4; j++)
        score[i * ld + j] = tp_lanes_sum(sum[i][j]);
}

/* All scores of `rows` rows [rows][d] with `keys` keys, [rows padded to TP_DOT_ROWS][ld], ld at least keys padded to 4.
 * `key` has room for the padding. */
TP_INLINE void tp_scores(const float *q, int rows, const float **key, int keys, int d, float *score, int ld) {
    for (int j = keys; j % 4; j++) key[j] = key[keys - 1];
    for (int i = 0; i < rows; i += TP_DOT_ROWS) {
        const float *row[TP_DOT_ROWS];
        for (int r = 0; r < TP_DOT_ROWS; r++) row[r] = q + (int64_t)tp_min(i + r, rows - 1) * d;
        for (int j = 0; j < keys; j += 4) tp_dots(row, key + j, d, score + i * ld + j, ld);
    }
}

#endif
