/* Which keys a sparse attention sees: the best of an index with a few small heads over one cached key a token.
 * TP_KV_F16 says whether the cache is float16 or float32; a page is [head_dim][page_tokens]. See index.h. */
#include "index.h"
#include "attention_tile.h"

#if TP_KV_F16
typedef uint16_t kv_t;
#define product_kv tp_product_f16
#define KERNEL(name) tp_kernel_##name##_f16
#define NAME(name) name "_f16"
#else
typedef float kv_t;
#define product_kv tp_product_f32
#define KERNEL(name) tp_kernel_##name##_f32
#define NAME(name) name "_f32"
#endif

#define TOKENS 64         /* a page at most */
#define MAX_HEADS 128
#define MAX_QUERIES 16384 /* floats of all heads */
#define WRITE_ROWS 8

/* One row against keys [first, last). */
typedef struct search {
    const tp_launch *launch;
    const tp_segment *segment;
    int heads, d, page_tokens;
    float *q;      /* [d][heads] */
    float *weight; /* [heads], times the scale */
    float *score;  /* [heads][TOKENS] */
    float *total;  /* [TOKENS] */
    tp_best best;
} search;

_Static_assert((MAX_QUERIES + MAX_HEADS + (MAX_HEADS + 1) * TOKENS + 4 * TP_INDEX_TOP_K) * 4 <= TP_SCRATCH, "fits");

/* Queries and weights of a row to scratch, and no candidates. */
static search start(const tp_launch *l, const tp_step *s, int row, void *scratch) {
    search f = {.launch = l, .segment = &s->segment[s->row_segment[row]]};
    f.heads = (int)l->arg[4], f.d = (int)l->arg[5], f.page_tokens = (int)l->arg[8];
    f.q = scratch;
    f.weight = f.q + MAX_QUERIES;
    f.score = f.weight + MAX_HEADS;
    f.total = f.score + MAX_HEADS * TOKENS;
    f.best = (tp_best){.top_k = (int)l->arg[9], .score = (uint32_t *)(f.total + TOKENS)};
    f.best.position = (int32_t *)f.best.score + tp_best_room(f.best.top_k);
    for (int h = 0; h < f.heads; h++) {
        const float *q = TP_PTR(const float, l, 0) + row * l->arg[1] + (int64_t)h * f.d;
        for (int i = 0; i < f.d; i++) f.q[i * f.heads + h] = q[i];
        f.weight[h] = TP_PTR(const float, l, 6)[row * l->arg[7] + h] * tp_float(l, 10);
    }
    return f;
}

/* total[t] = sum over heads of weight * relu(q key) for the keys of one page from its start on. */
static __attribute__((noinline)) void score_page(const search *f, const kv_t *keys, int tokens) {
    const int width = tp_ceil_div(tokens, 16) * 16;
    const tp_wide zero = tp_wide_all(0);
    product_kv(f->heads, width, 16, 1, f->q, TP_BAND, 1, f->heads, keys, f->page_tokens, f->d, f->score, TOKENS, 0);
    for (int h = 0; h < f->heads; h++)
        for (int t = 0; t < width; t += 16) {
            float *score = f->score + h * TOKENS + t;
            tp_wide_store(score, tp_wide_max(zero, tp_wide_load(score))); /* a NaN stays one */
        }
    tp_product_f32(1, width, 16, 0, f->weight, 0, 0, 1, f->score, TOKENS, f->heads, f->total, TOKENS, 0);
}

static void find(search *f, int first, int last) {
    for (int t = first; t < last; t += f->page_tokens) {
        const int64_t page = f->segment->pages[t / f->page_tokens];
        const int tokens = tp_min(f->page_tokens, last - t);
        score_page(f, TP_PTR(const kv_t, f->launch, 3) + page * f->page_tokens * f->d, tokens);
        for (int i = 0; i < tokens; i++) tp_best_offer(&f->best, tp_ordered(f->total[i]), t + i);
    }
}

/* Every row has tasks for the most splits of any row; those it does not need end at once. */
static int most_splits(const tp_launch *l, const tp_step *s) {
    int most = 1, tokens;
    for (int row = 0; row < s->rows; row++) most = tp_max(most, tp_index_splits(l, s, s->positions[row], &tokens));
    return most;
}

static int select_tasks(const tp_launch *l, const tp_step *s) { return s->rows * most_splits(l, s); }

static void select_keys(const tp_launch *l, const tp_step *s, int task, void *scratch) {
    const int row = task % s->rows, split = task / s->rows, position = s->positions[row], top_k = (int)l->arg[9];
    float *out = TP_PTR(float, l, 2) + (int64_t)row * top_k;
    int tokens;
    const int splits = tp_index_splits(l, s, position, &tokens);
    if (split >= splits) return;
    if (position < top_k) { /* all of them */
        for (int i = 0; i < top_k; i++) out[i] = i <= position ? (float)i : -1.0f;
        return;
    }
    search f = start(l, s, row, scratch);
    find(&f, split * tokens, tp_min(position + 1, (split + 1) * tokens));
    if (splits == 1) {
        tp_best_write(&f.best, out);
        return;
    }
    tp_best_leave(&f.best, tp_index_part_of(l, row, split));
}

/* index_kv_f16, index_kv_f32: 0 key f32, 1 its row stride, 2 kv, 3 head_dim, 4 page_tokens. */
static int write_tasks(const tp_launch *l, const tp_step *s) {
    (void)l;
    return tp_ceil_div(s->rows, WRITE_ROWS);
}

static void write_keys(const tp_launch *l, const tp_step *s, int task, void *scratch) {
    (void)scratch;
    const int d = (int)l->arg[3], page_tokens = (int)l->arg[4];
    for (int row = task * WRITE_ROWS; row < tp_min(s->rows, (task + 1) * WRITE_ROWS); row++) {
        const int position = s->positions[row];
        const int64_t page = s->segment[s->row_segment[row]].pages[position / page_tokens];
        const float *key = TP_PTR(const float, l, 0) + row * l->arg[1];
        kv_t *to = TP_PTR(kv_t, l, 2) + page * page_tokens * d + position % page_tokens;
        for (int i = 0; i < d; i++)
#if TP_KV_F16
            to[i * page_tokens] = _cvtss_sh(key[i], _MM_FROUND_TO_NEAREST_INT);
#else
            to[i * page_tokens] = key[i];
#endif
    }
}

const tp_kernel KERNEL(index_select) = {NAME("index_select"), select_tasks, select_keys};
const tp_kernel KERNEL(index_kv) = {NAME("index_kv"), write_tasks, write_keys};
