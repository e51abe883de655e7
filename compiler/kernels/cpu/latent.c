/* Multi-head latent attention, absorbed: all heads share one cached key [latent | rope] a token, whose latent part is
 * the value. TP_KV_F16 says whether the cache is float16 or float32; a page is [page_tokens][latent + rope].
 *
 * A block is up to 32 query vectors (rows x heads). It brings the keys of a stretch to float32 once, and both products
 * read that copy: scores[token][vector] = keys x Q^T, with the keys as scalars, and out = P x V. Scores lie with one
 * vector a lane, so that softmax needs no sums across lanes, and the weights are the scalars of the second product. */
#include "attention.h"
#include "attention_tile.h"

#if TP_KV_F16
typedef uint16_t kv_t;
#define KERNEL(name) tp_kernel_##name##_f16
#define NAME(name) name "_f16"
#else
typedef float kv_t;
#define KERNEL(name) tp_kernel_##name##_f32
#define NAME(name) name "_f32"
#endif

#define VECTORS 32   /* of one block; also floats from one token's scores to the next */
#define TOKENS 48    /* of one stretch: whole bands */
#define MAX_KEY 576  /* latent + rope */
#define STRIDE 592   /* floats from one key to the next; an odd number of cache lines */
#define WRITE_ROWS 8 /* of one task that writes keys */

/* One task: the query vectors of some rows and heads of a segment. Vector v is row v / group, head v % group. */
typedef struct block {
    const tp_launch *launch;
    const tp_segment *segment;
    int heads, latent, d, page_tokens; /* d = latent + rope */
    int group, head;                   /* heads of one block, and its first one */
    int row, rows;                     /* in the segment */
    int vectors, lanes;                /* rows * group, and the same rounded up to 16 */
    float *q;                          /* times the scale, [d][lanes] */
    float *out;                        /* [vectors][latent] */
    float *max, *sum;                  /* [VECTORS] */
    float *score;                      /* [TOKENS][VECTORS] */
    float *key;                        /* [TOKENS][STRIDE] */
} block;

_Static_assert((MAX_KEY * VECTORS + VECTORS * 512 + (TOKENS + 2) * VECTORS + TOKENS * STRIDE) * 4 <= TP_SCRATCH, "fits");

static block block_of(const tp_launch *l) {
    block b = {.launch = l, .heads = (int)l->arg[4], .latent = (int)l->arg[6], .page_tokens = (int)l->arg[7]};
    b.d = b.latent + (int)l->arg[5];
    int cuts = tp_ceil_div(b.heads, VECTORS);
    while (b.heads % cuts) cuts++;
    b.group = b.heads / cuts;
    return b;
}

/* How a segment is split over its keys: as attention_combine.c will see it, for one KV head and no window. */
static tp_attention splitting(const tp_launch *l, const tp_step *s) {
    tp_launch plain = *l;
    for (int i = 12; i < TP_ARGS; i++) plain.arg[i] = 0;
    plain.arg[5] = 1;
    plain.arg[9] = 0;
    return tp_attention_of(&plain, s);
}

/* Where the key of a position lies. */
TP_INLINE kv_t *key_at(const block *b, int position) {
    const int64_t page = b->segment->pages[position / b->page_tokens];
    return TP_PTR(kv_t, b->launch, 3) + (page * b->page_tokens + position % b->page_tokens) * b->d;
}

TP_INLINE void to_f32(float *out, const kv_t *x, int n) {
#if TP_KV_F16
    for (int i = 0; i < n; i += 8) _mm256_storeu_ps(out + i, tp_load8_f16(x + i));
#else
    memcpy(out, x, (size_t)n * sizeof(float));
#endif
}

/* Channels of all vectors to [n][lanes], times the scale; lanes without a vector are 0. */
static __attribute__((noinline)) void pack(const block *b, const float *const *from, int n, float scale, float *to) {
    for (int i = 0; i < n; i++, to += b->lanes) {
        for (int v = 0; v < b->vectors; v++) to[v] = from[v][i] * scale;
        for (int v = b->vectors; v < b->lanes; v++) to[v] = 0;
    }
}

/* Scratch for `rows` rows, queries times the scale, and empty sums. */
static void start(block *b, int row, int rows, void *scratch) {
    const tp_launch *l = b->launch;
    const float scale = tp_float(l, 8);
    b->row = row, b->rows = rows;
    b->vectors = rows * b->group;
    b->lanes = tp_ceil_div(b->vectors, 16) * 16;
    b->key = scratch;
    b->score = b->key + TOKENS * STRIDE;
    b->max = b->score + TOKENS * VECTORS;
    b->sum = b->max + VECTORS;
    b->q = b->sum + VECTORS;
    b->out = b->q + b->d * b->lanes;
    memset(b->out, 0, (size_t)b->vectors * b->latent * sizeof(float));
    for (int v = 0; v < VECTORS; v++) b->max[v] = -__builtin_inff(), b->sum[v] = 0;
    const float *latent[VECTORS], *rope[VECTORS];
    for (int v = 0; v < b->vectors; v++) {
        const int64_t at = b->segment->row + row + v / b->group, head = b->head + v % b->group;
        latent[v] = TP_PTR(const float, l, 0) + (at * b->heads + head) * b->latent;
        rope[v] = TP_PTR(const float, l, 12) + at * l->arg[1] + head * l->arg[9];
    }
    pack(b, latent, b->latent, scale, b->q);
    pack(b, rope, b->d - b->latent, scale, b->q + b->latent * b->lanes);
}

/* score[tokens][lanes] = keys x Q^T. */
static __attribute__((noinline)) void score_tokens(const block *b, int tokens) {
    const float *first = b->key, *q = b->q;
    float *c = b->score;
    const int64_t row_step = STRIDE, band_step = TP_BAND * STRIDE, step = 1, ldb = b->lanes, ldc = VECTORS;
    const int rows = tokens, n = b->d, exact = 0, add = 0;
    int j = 0;
    { /* the names that the macro reads */
        const float *const b = q;
#ifdef __AVX512F__
        if (ldb == VECTORS) {
            TP_STRIP(tp_tile16_f32, 2);
        } else {
            TP_STRIP(tp_tile16_f32, 1);
        }
#else
        for (; j < ldb; j += 16) TP_STRIP(tp_tile8_f32, 2);
#endif
    }
}

/* Turns the scores of 16 vectors from lane `at` on into weights, and brings maxima, sums and outputs up to date. */
TP_INLINE void soften(const block *b, int at, int tokens) {
    float *score = b->score + at, decay[16];
    const tp_wide old = tp_wide_load(b->max + at);
    tp_wide top = old, sum = tp_wide_all(0);
    for (int t = 0; t < tokens; t++) top = tp_wide_max(top, tp_wide_load(score + t * VECTORS));
    tp_wide_store(b->max + at, top);
    /* where nothing is visible yet, -inf - -inf would be a NaN; the lowest number gives weights of 0 */
    top = tp_wide_max(top, tp_wide_all(-3.4028235e38f));
    for (int t = 0; t < tokens; t++) {
        const tp_wide p = tp_wide_exp_of_difference(tp_wide_load(score + t * VECTORS), top);
        tp_wide_store(score + t * VECTORS, p);
        sum = tp_wide_add(sum, p);
    }
    tp_wide_store(decay, tp_wide_exp_of_difference(old, top));
    for (int v = 0; v < 16 && at + v < b->vectors; v++) {
        float *out = b->out + (int64_t)(at + v) * b->latent;
        b->sum[at + v] *= decay[v];
        if (decay[v] == 1) continue;
        for (int i = 0; i < b->latent; i += 8)
            _mm256_storeu_ps(out + i, _mm256_mul_ps(_mm256_loadu_ps(out + i), _mm256_set1_ps(decay[v])));
    }
    tp_wide_store(b->sum + at, tp_wide_add(tp_wide_load(b->sum + at), sum));
}

/* `tokens` keys that were brought to scratch; the first has `position`, and later ones follow it, if it is not negative. */
static void attend(const block *b, int tokens, int position) {
    score_tokens(b, tokens);
    const int seen = b->segment->position + b->row; /* the last position that the first row sees */
    for (int t = position < 0 ? tokens : tp_max(0, seen + 1 - position); t < tokens; t++)
        for (int v = 0; v < tp_min(b->vectors, (position + t - seen) * b->group); v++)
            b->score[t * VECTORS + v] = -__builtin_inff();
    for (int at = 0; at < b->lanes; at += 16) soften(b, at, tokens);
    tp_product_f32(b->vectors, b->latent, 8, 1, b->score, TP_BAND, 1, VECTORS, b->key, STRIDE, tokens, b->out,
                   b->latent, 1);
}

/* Results to their rows, or unnormalized to part `split` of the split buffer (attention.h). */
static void finish(const block *b, int split) {
    const tp_launch *l = b->launch;
    const int d = b->latent;
    for (int v = 0; v < b->vectors; v++) {
        const int64_t at = (b->segment->row + b->row + v / b->group) * (int64_t)b->heads + b->head + v % b->group;
        const float *out = b->out + (int64_t)v * d;
        if (split < 0) {
            float *y = TP_PTR(float, l, 2) + at * d;
            const float inverse = 1.0f / b->sum[v];
            for (int i = 0; i < d; i++) y[i] = out[i] * inverse;
        } else {
            float *part = TP_PTR(float, l, 10) + (at * TP_SPLITS + split) * tp_part_floats(d);
            memcpy(part, out, (size_t)d * sizeof(float));
            part[d] = b->max[v];
            part[d + 1] = b->sum[v];
        }
    }
}

/* latent_attention_f16, latent_attention_f32: 0 q f32 [rows][heads * latent], 1 floats from one row of 12 to the next,
 * 2 out f32 [rows][heads * latent], 3 kv, 4 heads, 5 rope, 6 latent (multiples of 8, together at most 576), 7 page_tokens,
 * 8 scale, 9 floats from one head of 12 to the next, 10 split buffer or 0, 11 its bytes, 12 q f32 of the rope part.
 * attention_combine follows, with heads, 1 KV head and head_dim latent.
 *
 * sparse_latent_attention_f16, sparse_latent_attention_f32: the same over selected positions only: 13 positions f32
 * [rows][top_k], then -1, 14 top_k. A row's selection is split where all its keys would be. */
typedef struct place {
    const tp_segment *segment;
    int block, group, split, splits, keys; /* keys of one split, were all of them seen */
} place;

/* Tasks of blocks of `rows` rows. */
static int count_tasks(const tp_launch *l, const tp_step *s, int rows) {
    const tp_attention a = splitting(l, s);
    const block b = block_of(l);
    int count = 0, keys;
    for (const tp_segment *g = s->segment; g < s->segment + s->segments; g++)
        count += tp_ceil_div(g->rows, rows) * tp_splits(&a, g, &keys);
    return count * (b.heads / b.group);
}

/* Which part of the step a task is; of a segment the longest blocks first. */
static place find_task(const tp_launch *l, const tp_step *s, int rows, int task) {
    const tp_attention a = splitting(l, s);
    const block b = block_of(l);
    const int groups = b.heads / b.group;
    place p = {.segment = s->segment};
    for (;; p.segment++) {
        const int blocks = tp_ceil_div(p.segment->rows, rows);
        p.splits = tp_splits(&a, p.segment, &p.keys);
        if (task < groups * blocks * p.splits) {
            p.split = task % p.splits;
            p.group = task / p.splits % groups;
            p.block = blocks - 1 - task / (p.splits * groups);
            return p;
        }
        task -= groups * blocks * p.splits;
    }
}

static block open_block(const tp_launch *l, const place *p, int rows, void *scratch) {
    block b = block_of(l);
    b.segment = p->segment;
    b.head = p->group * b.group;
    start(&b, p->block * rows, tp_min(rows, p->segment->rows - p->block * rows), scratch);
    return b;
}

static int dense_rows(const tp_launch *l) { return VECTORS / block_of(l).group; }

static int dense_tasks(const tp_launch *l, const tp_step *s) { return count_tasks(l, s, dense_rows(l)); }

static void dense(const tp_launch *l, const tp_step *s, int task, void *scratch) {
    const place p = find_task(l, s, dense_rows(l), task);
    const block b = open_block(l, &p, dense_rows(l), scratch);
    int first = 0, last = b.segment->position + b.row + b.rows;
    if (p.splits > 1) first = p.split * p.keys, last = tp_min(last, first + p.keys);
    for (int t = first; t < last; t += TOKENS) {
        const int tokens = tp_min(TOKENS, last - t);
        for (int i = 0; i < tokens; i++) to_f32(b.key + i * STRIDE, key_at(&b, t + i), b.d);
        attend(&b, tokens, t);
    }
    finish(&b, p.splits > 1 ? p.split : -1);
}

static int sparse_tasks(const tp_launch *l, const tp_step *s) { return count_tasks(l, s, 1); }

static void sparse(const tp_launch *l, const tp_step *s, int task, void *scratch) {
    const place p = find_task(l, s, 1, task);
    const block b = open_block(l, &p, 1, scratch);
    const int top_k = (int)l->arg[14];
    const float *position = TP_PTR(const float, l, 13) + (int64_t)(b.segment->row + b.row) * top_k;
    int count = 0;
    while (count < top_k && position[count] >= 0) count++;
    const int share = tp_ceil_div(count, p.splits), last = tp_min(count, (p.split + 1) * share);
    for (int first = p.split * share; first < last; first += TOKENS) {
        const int tokens = tp_min(TOKENS, last - first);
        for (int i = 0; i < tokens; i++) to_f32(b.key + i * STRIDE, key_at(&b, (int)position[first + i]), b.d);
        attend(&b, tokens, -1);
    }
    finish(&b, p.splits > 1 ? p.split : -1);
}

/* latent_kv_f16, latent_kv_f32: 0 latent f32, 1 its row stride, 2 rope f32, 3 its row stride, 4 kv, 5 latent, 6 rope,
 * 7 page_tokens. Writes every row's key to its page. */
static int write_tasks(const tp_launch *l, const tp_step *s) {
    (void)l;
    return tp_ceil_div(s->rows, WRITE_ROWS);
}

TP_INLINE void from_f32(kv_t *out, const float *x, int n) {
#if TP_KV_F16
    for (int i = 0; i < n; i += 8)
        _mm_storeu_si128((__m128i *)(out + i), _mm256_cvtps_ph(_mm256_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT));
#else
    memcpy(out, x, (size_t)n * sizeof(float));
#endif
}

static void write_keys(const tp_launch *l, const tp_step *s, int task, void *scratch) {
    (void)scratch;
    const int latent = (int)l->arg[5], rope = (int)l->arg[6], page_tokens = (int)l->arg[7];
    for (int row = task * WRITE_ROWS; row < tp_min(s->rows, (task + 1) * WRITE_ROWS); row++) {
        const int position = s->positions[row];
        const int64_t page = s->segment[s->row_segment[row]].pages[position / page_tokens];
        kv_t *key = TP_PTR(kv_t, l, 4) + (page * page_tokens + position % page_tokens) * (latent + rope);
        from_f32(key, TP_PTR(const float, l, 0) + row * l->arg[1], latent);
        from_f32(key + latent, TP_PTR(const float, l, 2) + row * l->arg[3], rope);
    }
}

const tp_kernel KERNEL(latent_attention) = {NAME("latent_attention"), dense_tasks, dense};
const tp_kernel KERNEL(sparse_latent_attention) = {NAME("sparse_latent_attention"), sparse_tasks, sparse};
const tp_kernel KERNEL(latent_kv) = {NAME("latent_kv"), write_tasks, write_keys};
