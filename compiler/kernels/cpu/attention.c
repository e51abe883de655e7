/* Paged attention with an online softmax. TP_KV_F16 says whether the cache is float16 or float32.
 *
 * Everything is the product of a few rows of scalars and a matrix whose rows are vectors: scores = Q x K^T (pages hold
 * keys transposed) and out = P x V. `tile` is that product on one block of registers. Blocks of many query vectors
 * first bring their keys and values to float32 in scratch; those of a decode step read them straight from the pages. */
#include "attention.h"
#include "attention_tile.h"

#if TP_KV_F16
typedef uint16_t kv_t;
#define product_kv tp_product_f16
#define KERNEL tp_kernel_attention_f16
#define NAME "attention_f16"
#else
typedef float kv_t;
#define product_kv tp_product_f32
#define KERNEL tp_kernel_attention_f32
#define NAME "attention_f32"
#endif

#define DIRECT_VECTORS 12 /* up to this many query vectors read pages in place */
#define DIRECT_TOKENS 512 /* keys of one stretch then */
#define DIRECT_STRIDE 528 /* floats from one vector's scores to the next; not a power of two */
#define COPIED_STRIDE 64  /* the same, and keys of one stretch, where they are copied to float32 */

/* One task: `vectors` query vectors against keys [first, last) of one segment and KV head. */
typedef struct block {
    const tp_attention *shape;
    const tp_segment *segment;
    const kv_t *pool;
    int head;             /* first query head */
    int row, rows;        /* in the segment */
    int first, last;      /* keys; first at the start of a page */
    int vectors;          /* rows * group; vector v is row v / group, head v % group */
    float *q;             /* times the scale; bands of TP_BAND vectors, of each [d][TP_BAND] */
    float *out;           /* [vectors][d] */
    float *max, *sum;     /* [vectors] */
    float *score;         /* [vectors][stride] */
    float *key, *value;   /* float32 copies of a stretch: [d][tokens], [tokens][d]; not used in place */
    int tokens, stride;   /* keys of one stretch at most; see above */
} block;

/* Where the keys and values of `token` lie; keys are [d][page_tokens] from their page's start. */
TP_INLINE const kv_t *page_of(const block *b, int token) {
    const tp_attention *a = b->shape;
    const int64_t page = b->segment->pages[token / a->page_tokens];
    return b->pool + page * 2 * a->kv_heads * a->d * a->page_tokens;
}

TP_INLINE int kv_head(const block *b) { return b->head / (b->shape->heads / b->shape->kv_heads); }

TP_INLINE const kv_t *keys_at(const block *b, int token) {
    const tp_attention *a = b->shape;
    return page_of(b, token) + (int64_t)kv_head(b) * a->d * a->page_tokens + token % a->page_tokens;
}

TP_INLINE const kv_t *values_at(const block *b, int token) {
    const tp_attention *a = b->shape;
    return page_of(b, token) + ((int64_t)(a->kv_heads + kv_head(b)) * a->page_tokens + token % a->page_tokens) * a->d;
}

static void to_f32(float *out, const kv_t *x, int n) {
#if TP_KV_F16
    for (int i = 0; i < n; i += 8) _mm256_storeu_ps(out + i, tp_load8_f16(x + i));
#else
    memcpy(out, x, (size_t)n * sizeof(float));
#endif
}

/* Keys and values of tokens [first, last), within one page, to float32 at token `at` of the stretch. */
static void copy(const block *b, int first, int last, int at) {
    const tp_attention *a = b->shape;
    const int width = tp_ceil_div(last - first, 16) * 16;
    const kv_t *key = keys_at(b, first);
    for (int i = 0; i < a->d; i++) to_f32(b->key + i * b->tokens + at, key + i * a->page_tokens, width);
    to_f32(b->value + (int64_t)at * a->d, values_at(b, first), (last - first) * a->d);
}

/* Ends the page-wise walk over [first, last) at the next page boundary, or after what one stretch holds. */
TP_INLINE int piece_end(const block *b, int token, int last) {
    const int page = b->shape->page_tokens, end = (token / page + 1) * page;
    return tp_min(tp_min(end, last), token + b->tokens);
}

/* Scores out of sight of a vector become -inf: later keys, and those that its window has left behind. */
static __attribute__((noinline)) void mask(const block *b, int first, int last, int width) {
    const tp_attention *a = b->shape;
    const int position = b->segment->position + b->row;
    const int all_seen = position >= last - 1 && first + width == last &&
                         (a->window <= 0 || position + b->rows - 1 - a->window < first);
    for (int v = 0; v < b->vectors && !all_seen; v++) {
        const int mine = position + v / a->group;
        const int from = a->window > 0 ? tp_max(0, mine - a->window + 1 - first) : 0;
        float *score = b->score + v * b->stride;
        for (int j = 0; j < tp_min(from, width); j++) score[j] = -__builtin_inff();
        for (int j = tp_max(0, tp_min(mine, last - 1) + 1 - first); j < width; j++) score[j] = -__builtin_inff();
    }
}

/* Turns the scores of one vector into weights and brings its maximum, sum and output up to date. */
TP_INLINE void soften(const block *b, int v, int width) {
    float *score = b->score + v * b->stride, *out = b->out + (int64_t)v * b->shape->d;
    tp_wide top = tp_wide_all(-__builtin_inff()), sum = tp_wide_all(0);
    for (int j = 0; j < width; j += 16) top = tp_wide_max(top, tp_wide_load(score + j));
    const float max = tp_wide_top(top) > b->max[v] ? tp_wide_top(top) : b->max[v];
    if (max == -__builtin_inff()) { /* nothing visible yet; a NaN stays one, as the sum stays 0 */
        memset(score, 0, (size_t)width * sizeof(float));
        return;
    }
    for (int j = 0; j < width; j += 16) {
        const tp_wide p = tp_wide_exp_of_difference(tp_wide_load(score + j), tp_wide_all(max));
        tp_wide_store(score + j, p);
        sum = tp_wide_add(sum, p);
    }
    if (max != b->max[v]) {
        const __m256 decay = tp_exp8(_mm256_set1_ps(b->max[v] - max));
        for (int i = 0; i < b->shape->d; i += 8)
            _mm256_storeu_ps(out + i, _mm256_mul_ps(_mm256_loadu_ps(out + i), decay));
        b->sum[v] *= _mm256_cvtss_f32(decay);
        b->max[v] = max;
    }
    b->sum[v] += tp_wide_sum(sum);
}

/* Asks for the start of the next page's piece while this one is worked on; the hardware foresees the rest of it. */
static void prefetch(const kv_t *from, int count) {
    const char *start = (const char *)from;
    for (int i = 0; i < tp_min(2048, count * (int)sizeof(kv_t)); i += 64) _mm_prefetch(start + i, _MM_HINT_T0);
}

/* Keys [first, last) of a stretch, read from the pages. */
static __attribute__((noinline)) void stretch_in_place(const block *b, int first, int last) {
    const tp_attention *a = b->shape;
    const int d = a->d, width = tp_ceil_div(last - first, 16) * 16;
    for (int t = first, end; t < last; t = end) {
        end = piece_end(b, t, last);
        prefetch(end < last ? keys_at(b, end) : values_at(b, first), d * a->page_tokens);
        product_kv(b->vectors, tp_ceil_div(end - t, 16) * 16, 16, 1, b->q, TP_BAND * d, 1, TP_BAND, keys_at(b, t),
                   a->page_tokens, d, b->score + (t - first), DIRECT_STRIDE, 0);
    }
    mask(b, first, last, width);
    for (int v = 0; v < b->vectors; v++) soften(b, v, width);
    for (int t = first, end; t < last; t = end) {
        end = piece_end(b, t, last);
        if (end < last) prefetch(values_at(b, end), d * tp_min(a->page_tokens, last - end));
        product_kv(b->vectors, d, 8, 1, b->score + (t - first), TP_BAND * DIRECT_STRIDE, DIRECT_STRIDE, 1,
                   values_at(b, t), d, end - t, b->out, d, 1);
    }
}

/* The same through float32 copies, which many vectors share. */
static __attribute__((noinline)) void stretch_copied(const block *b, int first, int last) {
    const int d = b->shape->d, width = tp_ceil_div(last - first, 16) * 16;
    for (int t = first, end; t < last; t = end) {
        end = piece_end(b, t, last);
        copy(b, t, end, t - first);
    }
    tp_product_f32(b->vectors, width, 16, 0, b->q, TP_BAND * d, 1, TP_BAND, b->key, b->tokens, d, b->score,
                   COPIED_STRIDE, 0);
    mask(b, first, last, width);
    for (int v = 0; v < b->vectors; v++) soften(b, v, width);
    tp_product_f32(b->vectors, d, 8, 0, b->score, TP_BAND * COPIED_STRIDE, COPIED_STRIDE, 1, b->value, d, last - first,
                   b->out, d, 1);
}

/* Queries, times the scale, to scratch; empty sums. The sink of a head is the first logit of its first split: weight 1
 * of that maximum, with a value of 0. */
static void start(const block *b, const tp_launch *l, int split) {
    const tp_attention *a = b->shape;
    const float scale = tp_float(l, 8), *sinks = split > 0 ? 0 : TP_PTR(const float, l, 12);
    for (int v = 0; v < b->vectors; v++) {
        const int64_t row = b->segment->row + b->row + v / a->group;
        const float *q = TP_PTR(const float, l, 0) + row * l->arg[1] + (int64_t)(b->head + v % a->group) * a->d;
        float *packed = b->q + (int64_t)(v / TP_BAND) * TP_BAND * a->d + v % TP_BAND;
        for (int i = 0; i < a->d; i++) packed[i * TP_BAND] = q[i] * scale;
        memset(b->out + (int64_t)v * a->d, 0, (size_t)a->d * sizeof(float));
        b->max[v] = sinks ? sinks[b->head + v % a->group] : -__builtin_inff();
        b->sum[v] = sinks ? 1 : 0;
    }
}

/* Results to their rows, or unnormalized to part `split` of the split buffer. */
static void finish(const block *b, const tp_launch *l, int split) {
    const tp_attention *a = b->shape;
    for (int v = 0; v < b->vectors; v++) {
        const int64_t row = b->segment->row + b->row + v / a->group, head = b->head + v % a->group;
        const float *out = b->out + (int64_t)v * a->d;
        if (split < 0) {
            float *y = TP_PTR(float, l, 2) + (row * a->heads + head) * a->d;
            const float inverse = 1.0f / b->sum[v];
            for (int i = 0; i < a->d; i++) y[i] = out[i] * inverse;
        } else {
            float *part = TP_PTR(float, l, 10) + ((row * a->heads + head) * TP_SPLITS + split) * tp_part_floats(a->d);
            memcpy(part, out, (size_t)a->d * sizeof(float));
            part[a->d] = b->max[v];
            part[a->d + 1] = b->sum[v];
        }
    }
}

static void place(block *b, float *scratch) {
    const int d = b->shape->d, in_place = b->vectors <= DIRECT_VECTORS;
    b->tokens = in_place ? DIRECT_TOKENS : d <= 256 ? 64 : 32;
    b->stride = in_place ? DIRECT_STRIDE : COPIED_STRIDE;
    b->max = scratch;
    b->sum = b->max + 64;
    b->q = b->sum + 64;
    b->out = b->q + tp_ceil_div(b->vectors, TP_BAND) * TP_BAND * d;
    b->score = b->out + b->vectors * d;
    b->key = b->score + b->vectors * b->stride;
    b->value = b->key + (in_place ? 0 : d * b->tokens);
}

_Static_assert((128 + DIRECT_VECTORS * (2 * TP_MAX_HEAD_DIM + DIRECT_STRIDE)) * 4 <= TP_SCRATCH, "decode fits scratch");
_Static_assert((128 + 2 * 12288 + 48 * COPIED_STRIDE + 2 * 64 * 256) * 4 <= TP_SCRATCH, "d 256 fits scratch");
_Static_assert((128 + 2 * 12288 + 48 * COPIED_STRIDE + 2 * 32 * 512) * 4 <= TP_SCRATCH, "and 512 wide");

static int tasks(const tp_launch *l, const tp_step *s) {
    const tp_attention a = tp_attention_of(l, s);
    int count = 0, tokens;
    for (int i = 0; i < s->segments; i++)
        count += a.groups * tp_ceil_div(s->segment[i].rows, a.block_rows) * tp_splits(&a, &s->segment[i], &tokens);
    return count;
}

static void run(const tp_launch *l, const tp_step *s, int task, void *scratch) {
    const tp_attention a = tp_attention_of(l, s);
    const tp_segment *g = s->segment;
    int blocks, splits, tokens;
    for (;; g++) {
        blocks = tp_ceil_div(g->rows, a.block_rows);
        splits = tp_splits(&a, g, &tokens);
        if (task < a.groups * blocks * splits) break;
        task -= a.groups * blocks * splits;
    }
    const int split = task % splits, group = task / splits % a.groups;
    const int index = blocks - 1 - task / (splits * a.groups); /* the longest first */
    block b = {.shape = &a, .segment = g, .pool = TP_PTR(const kv_t, l, 3), .head = group * a.group};
    b.row = index * a.block_rows;
    b.rows = tp_min(a.block_rows, g->rows - b.row);
    b.vectors = b.rows * a.group;
    b.first = tp_first_key(&a, g, b.row);
    b.last = g->position + b.row + b.rows;
    if (splits > 1) {
        b.first += split * tokens;
        b.last = tp_min(b.last, b.first + tokens);
    }
    place(&b, scratch);
    start(&b, l, split);
    for (int t = b.first; t < b.last; t += b.tokens) {
        const int end = tp_min(b.last, t + b.tokens);
        if (b.vectors <= DIRECT_VECTORS) stretch_in_place(&b, t, end);
        else stretch_copied(&b, t, end);
    }
    finish(&b, l, splits > 1 ? split : -1);
}

const tp_kernel KERNEL = {NAME, tasks, run};
