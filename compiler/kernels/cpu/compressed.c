/* Attention over the last `window` tokens and over compressed entries, with one key for all heads that is the value too
 * and a sink a head (DeepSeek-V4, transformers modeling_deepseek_v4.py). One task is a row and a few heads. */
#include "compressed.h"

#define HEADS 32    /* of a task, at most */
#define FEW_HEADS 8 /* in steps of few rows, which keep more threads busy so */
#define FEW_ROWS 8
#define KEYS 32
#define MAX_D 1024
#define PADDING 16 /* floats between keys in scratch: a power of two apart they would evict each other */

_Static_assert((KEYS * (MAX_D + PADDING) + HEADS * KEYS) * 4 <= TP_SCRATCH, "keys and scores fit scratch");

/* compressed_attention_f16, _f32: 0 q f32 [rows][heads][d], 1 kv f32, 2 ldkv, 3 y f32 [rows][heads][d], 4 ring of kv
 * (window rows), 5 entries, 6 selection f32 [rows][top_k] (entries in ascending order, then -1) or 0: all, 7 top_k,
 * 8 sinks f32 [heads], 9 heads, 10 d (a multiple of 16), 11 window, 12 m (0: no entries), 13 page_tokens, 14 scale. */
typedef struct call {
    const float *q, *selection, *sinks;
    float *y;
    tp_rows kv;
    tp_entries entries;
    int heads, from; /* heads of the task; first key of the window */
    int own, keys;   /* keys of the window, and all */
    float scale;
} call;

static int heads_of_task(const tp_step *s) { return s->rows <= FEW_ROWS ? FEW_HEADS : HEADS; }

static int tasks(const tp_launch *l, const tp_step *s) {
    return s->rows * tp_ceil_div((int)l->arg[9], heads_of_task(s));
}

static int selected(const float *selection, int top_k) {
    int count = 0;
    while (count < top_k && selection[count] >= 0) count++;
    return count;
}

static call call_of(const tp_launch *l, const tp_step *s, int task) {
    const int heads = (int)l->arg[9], d = (int)l->arg[10], window = (int)l->arg[11], m = (int)l->arg[12];
    const int most = heads_of_task(s), groups = tp_ceil_div(heads, most), row = task / groups;
    const int first = task % groups * most;
    const tp_segment *g = &s->segment[s->row_segment[row]];
    const int position = s->positions[row];
    const int64_t at = ((int64_t)row * heads + first) * d;
    call c = {.q = TP_PTR(const float, l, 0) + at, .y = TP_PTR(float, l, 3) + at, .scale = tp_float(l, 14)};
    c.heads = tp_min(most, heads - first);
    c.sinks = TP_PTR(const float, l, 8) + first;
    c.kv = tp_rows_of(g, TP_PTR(const float, l, 1), l->arg[2], TP_PTR(const float, l, 4), window, d);
    c.entries = (tp_entries){TP_PTR(entry_t, l, 5), g->pages, d, m, (int)l->arg[13]};
    c.from = tp_max(0, position - window + 1);
    c.own = position + 1 - c.from;
    c.keys = c.own + tp_visible(position, m);
    if (l->arg[6]) {
        c.selection = TP_PTR(const float, l, 6) + row * l->arg[7];
        c.keys = c.own + selected(c.selection, (int)l->arg[7]);
    }
    return c;
}

static const float *key_of(const call *c, int i, float *copy) {
    if (i < c->own) return memcpy(copy, tp_row(&c->kv, c->from + i), (size_t)c->entries.d * sizeof(float));
    const int entry = i - c->own;
    return tp_read_entry(&c->entries, c->selection ? (int64_t)c->selection[entry] : entry, copy);
}

/* Scores to weights by the new maximum; returns what older sums and outputs are to be multiplied with. */
static float soften(float *score, int keys, float scale, float *max, float *sum) {
    float top = *max;
    for (int j = 0; j < keys; j++) {
        score[j] *= scale;
        top = score[j] > top ? score[j] : top;
    }
    const float decay = _mm256_cvtss_f32(tp_exp8(_mm256_set1_ps(*max - top)));
    __m256 total = _mm256_setzero_ps();
    for (int j = 0; j < KEYS; j += 8) {
        const __m256i mask = tp_mask8(tp_max(0, tp_min(8, keys - j)));
        const __m256 p = tp_exp8(_mm256_sub_ps(_mm256_maskload_ps(score + j, mask), _mm256_set1_ps(top)));
        const __m256 kept = _mm256_and_ps(p, _mm256_castsi256_ps(mask));
        _mm256_storeu_ps(score + j, kept);
        total = _mm256_add_ps(total, kept);
    }
    *max = top;
    *sum = *sum * decay + tp_sum8(total);
    return decay;
}

/* y[i] = y[i] * decay[i] + sum over j of p[i][j] key[j], for TP_DOT_ROWS heads or one; d in steps of two vectors. */
TP_INLINE void weigh(int rows, float *y, const float *decay, const float *p, const float *const *key, int keys, int d,
                     int wide) {
    const int step = wide * TP_LANES;
    for (int c = 0; c < d; c += step) {
        tp_lanes sum[TP_DOT_ROWS][2];
        TP_UNROLL for (int i = 0; i < rows; i++) TP_UNROLL for (int v = 0; v < wide; v++)
            sum[i][v] = tp_lanes_mul(tp_lanes_load(y + i * d + c + v * TP_LANES), tp_lanes_all(decay[i]));
        for (int j = 0; j < keys; j++) {
            tp_lanes x[2];
            TP_UNROLL for (int v = 0; v < wide; v++) x[v] = tp_lanes_load(key[j] + c + v * TP_LANES);
            TP_UNROLL for (int i = 0; i < rows; i++) {
                const tp_lanes share = tp_lanes_all(p[i * KEYS + j]);
                TP_UNROLL for (int v = 0; v < wide; v++) sum[i][v] = tp_lanes_fma(share, x[v], sum[i][v]);
            }
        }
        TP_UNROLL for (int i = 0; i < rows; i++) TP_UNROLL for (int v = 0; v < wide; v++)
            tp_lanes_store(y + i * d + c + v * TP_LANES, sum[i][v]);
    }
}

/* All heads of a task. */
static void weigh_heads(const call *c, const float *decay, const float *p, const float *const *key, int keys) {
    const int d = c->entries.d, wide = d % (2 * TP_LANES) == 0;
    int h = 0;
    for (; wide && h + TP_DOT_ROWS <= c->heads; h += TP_DOT_ROWS)
        weigh(TP_DOT_ROWS, c->y + h * d, decay + h, p + h * KEYS, key, keys, d, 2);
    for (; h < c->heads; h++) weigh(1, c->y + h * d, decay + h, p + h * KEYS, key, keys, d, 1);
}

static void run(const tp_launch *l, const tp_step *s, int task, void *scratch) {
    const call c = call_of(l, s, task);
    const int d = c.entries.d;
    float *copies = scratch, *score = copies + KEYS * (MAX_D + PADDING), max[HEADS], sum[HEADS], decay[HEADS];
    for (int h = 0; h < c.heads; h++) {
        max[h] = c.sinks[h];
        sum[h] = 1;
        memset(c.y + h * d, 0, (size_t)d * sizeof(float));
    }
    for (int first = 0; first < c.keys; first += KEYS) {
        const float *key[KEYS];
        const int keys = tp_min(KEYS, c.keys - first);
        for (int j = 0; j < keys; j++) key[j] = key_of(&c, first + j, copies + j * (d + PADDING));
        tp_scores(c.q, c.heads, key, keys, d, score, KEYS);
        for (int h = 0; h < c.heads; h++) decay[h] = soften(score + h * KEYS, keys, c.scale, &max[h], &sum[h]);
        weigh_heads(&c, decay, score, key, keys);
    }
    for (int h = 0; h < c.heads; h++) {
        const float inverse = 1.0f / sum[h];
        for (int i = 0; i < d; i++) c.y[h * d + i] *= inverse;
    }
}

#if TP_KV_F16
const tp_kernel tp_kernel_compressed_attention_f16 = {"compressed_attention_f16", tasks, run};
#else
const tp_kernel tp_kernel_compressed_attention_f32 = {"compressed_attention_f32", tasks, run};
#endif
