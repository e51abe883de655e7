/* Paged attention with an online softmax. TP_KV_F16 says whether the cache is float16 or float32.
 *
 * Everything is the product of a few rows of scalars and a matrix whose rows are vectors: scores = Q x K^T (pages hold
 * keys transposed) and out = P x V. `tile` is that product on one block of registers. Blocks of many query vectors
 * first bring their keys and values to float32 in scratch; those of a decode step read them straight from the pages. */
#include "attention.h"

#if TP_KV_F16
typedef uint16_t kv_t;
#define KERNEL tp_kernel_attention_f16
#define NAME "attention_f16"
#else
typedef float kv_t;
#define KERNEL tp_kernel_attention_f32
#define NAME "attention_f32"
#endif

#ifdef __AVX512F__
#define TILE_ROWS 12
#else
#define TILE_ROWS 6
#endif
#define DIRECT_VECTORS 12 /* up to this many query vectors read pages in place */
#define DIRECT_TOKENS 512
#define SCORE_FLOATS (DIRECT_VECTORS * DIRECT_TOKENS)

/* One task: `vectors` query vectors against keys [first, last) of one segment and KV head. */
typedef struct block {
    const tp_attention *shape;
    const tp_segment *segment;
    const kv_t *pool;
    int head;             /* first query head */
    int row, rows;        /* in the segment */
    int first, last;      /* keys; first at the start of a page */
    int vectors;          /* rows * group; vector v is row v / group, head v % group */
    float *q, *out;       /* [vectors][d] */
    float *max, *sum;     /* [vectors] */
    float *score;         /* [vectors][tokens] */
    float *key, *value;   /* float32 copies of a stretch: [d][tokens], [tokens][d]; not used in place */
    int tokens;           /* keys of one stretch at most */
} block;

TP_INLINE __m256 load_f32_8(const float *x) { return _mm256_loadu_ps(x); }
TP_INLINE __m256 load_f16_8(const uint16_t *x) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)x)); }
#ifdef __AVX512F__
TP_INLINE __m512 load_f32_16(const float *x) { return _mm512_loadu_ps(x); }
TP_INLINE __m512 load_f16_16(const uint16_t *x) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)x)); }
#endif

/* c[rows][width] (+)= a[rows][n] b[n][width]: `count` vectors of LANES floats, rows <= TILE_ROWS and constant. */
#define DEFINE_TILE(NAME_, B, VECTOR, LANES, LOAD, PREFIX)                                                              \
    TP_INLINE void NAME_(int rows, int count, const float *a, int64_t lda, const B *b, int64_t ldb, int n, float *c,   \
                         int64_t ldc, int add) {                                                                       \
        VECTOR sum[TILE_ROWS][2];                                                                                      \
        _Pragma("clang loop unroll(full)") for (int r = 0; r < rows; r++)                                              \
            _Pragma("clang loop unroll(full)") for (int j = 0; j < count; j++) sum[r][j] =                             \
                add ? PREFIX##_loadu_ps(c + r * ldc + j * LANES) : PREFIX##_setzero_ps();                              \
        for (int i = 0; i < n; i++) {                                                                                  \
            VECTOR v[2];                                                                                               \
            _Pragma("clang loop unroll(full)") for (int j = 0; j < count; j++) v[j] = LOAD(b + i * ldb + j * LANES);   \
            _Pragma("clang loop unroll(full)") for (int r = 0; r < rows; r++) {                                        \
                const VECTOR x = PREFIX##_set1_ps(a[r * lda + i]);                                                     \
                _Pragma("clang loop unroll(full)") for (int j = 0; j < count; j++) sum[r][j] =                         \
                    PREFIX##_fmadd_ps(x, v[j], sum[r][j]);                                                             \
            }                                                                                                          \
        }                                                                                                              \
        _Pragma("clang loop unroll(full)") for (int r = 0; r < rows; r++)                                              \
            _Pragma("clang loop unroll(full)") for (int j = 0; j < count; j++)                                         \
                PREFIX##_storeu_ps(c + r * ldc + j * LANES, sum[r][j]);                                                \
    }

DEFINE_TILE(tile_f32_8, float, __m256, 8, load_f32_8, _mm256)
DEFINE_TILE(tile_f16_8, uint16_t, __m256, 8, load_f16_8, _mm256)
#ifdef __AVX512F__
DEFINE_TILE(tile_f32_16, float, __m512, 16, load_f32_16, _mm512)
DEFINE_TILE(tile_f16_16, uint16_t, __m512, 16, load_f16_16, _mm512)
#endif

/* The product for a constant number of rows and any width that is a multiple of 8. */
#ifdef __AVX512F__
#define DEFINE_BAND(NAME_, B, T8, T16)                                                                                 \
    TP_INLINE void NAME_(int rows, int width, const float *a, int64_t lda, const B *b, int64_t ldb, int n, float *c,   \
                         int64_t ldc, int add) {                                                                       \
        int j = 0;                                                                                                     \
        for (; j + 32 <= width; j += 32) T16(rows, 2, a, lda, b + j, ldb, n, c + j, ldc, add);                         \
        for (; j + 16 <= width; j += 16) T16(rows, 1, a, lda, b + j, ldb, n, c + j, ldc, add);                         \
        for (; j < width; j += 8) T8(rows, 1, a, lda, b + j, ldb, n, c + j, ldc, add);                                 \
    }
#else
#define DEFINE_BAND(NAME_, B, T8, T16)                                                                                 \
    TP_INLINE void NAME_(int rows, int width, const float *a, int64_t lda, const B *b, int64_t ldb, int n, float *c,   \
                         int64_t ldc, int add) {                                                                       \
        int j = 0;                                                                                                     \
        for (; j + 16 <= width; j += 16) T8(rows, 2, a, lda, b + j, ldb, n, c + j, ldc, add);                          \
        for (; j < width; j += 8) T8(rows, 1, a, lda, b + j, ldb, n, c + j, ldc, add);                                 \
    }
#endif
DEFINE_BAND(band_f32, float, tile_f32_8, tile_f32_16)
#if TP_KV_F16
DEFINE_BAND(band_f16, uint16_t, tile_f16_8, tile_f16_16)
#endif

#define CASE(BAND, R) \
    case R: BAND(R, width, a, lda, b, ldb, n, c, ldc, add); break;

/* The product for any number of rows. */
#define DEFINE_PRODUCT(NAME_, B, BAND)                                                                                 \
    static void NAME_(int rows, int width, const float *a, int64_t lda, const B *b, int64_t ldb, int n, float *c,      \
                      int64_t ldc, int add) {                                                                          \
        for (; rows >= TILE_ROWS; rows -= TILE_ROWS, a += TILE_ROWS * lda, c += TILE_ROWS * ldc)                       \
            BAND(TILE_ROWS, width, a, lda, b, ldb, n, c, ldc, add);                                                    \
        if (rows >= 6 && TILE_ROWS > 6) {                                                                              \
            BAND(6, width, a, lda, b, ldb, n, c, ldc, add);                                                            \
            rows -= 6, a += 6 * lda, c += 6 * ldc;                                                                     \
        }                                                                                                              \
        switch (rows) { CASE(BAND, 1) CASE(BAND, 2) CASE(BAND, 3) CASE(BAND, 4) CASE(BAND, 5) }                        \
    }

DEFINE_PRODUCT(product_f32, float, band_f32)
#if TP_KV_F16
DEFINE_PRODUCT(product_kv, uint16_t, band_f16)
#else
#define product_kv product_f32
#endif

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
    for (int i = 0; i < n; i += 8) _mm256_storeu_ps(out + i, load_f16_8(x + i));
#else
    memcpy(out, x, (size_t)n * sizeof(float));
#endif
}

/* Keys and values of tokens [first, last), within one page, to float32 at token `at` of the stretch. */
static void convert(const block *b, int first, int last, int at) {
    const tp_attention *a = b->shape;
    const int width = tp_ceil_div(last - first, 8) * 8;
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
static void mask(const block *b, int first, int last) {
    const tp_attention *a = b->shape;
    const int position = b->segment->position + b->row, width = tp_ceil_div(last - first, 8) * 8;
    for (int v = 0; v < b->vectors; v++) {
        const int mine = position + v / a->group;
        const int from = a->window > 0 ? tp_max(0, mine - a->window + 1 - first) : 0;
        float *score = b->score + v * b->tokens;
        for (int j = 0; j < tp_min(from, width); j++) score[j] = -__builtin_inff();
        for (int j = tp_max(0, tp_min(mine, last - 1) + 1 - first); j < width; j++) score[j] = -__builtin_inff();
    }
}

/* Turns the scores of one vector into weights and brings its maximum, sum and output up to date. */
static void soften(const block *b, int v, int width) {
    float *score = b->score + v * b->tokens, *out = b->out + (int64_t)v * b->shape->d;
    __m256 top = _mm256_set1_ps(-__builtin_inff());
    for (int j = 0; j < width; j += 8) top = _mm256_max_ps(top, _mm256_loadu_ps(score + j));
    const float max = tp_max8(top) > b->max[v] ? tp_max8(top) : b->max[v];
    __m256 sum = _mm256_setzero_ps();
    if (max == -__builtin_inff()) { /* nothing visible yet; a NaN stays one, as the sum stays 0 */
        for (int j = 0; j < width; j += 8) _mm256_storeu_ps(score + j, sum);
        return;
    }
    for (int j = 0; j < width; j += 8) {
        const __m256 p = tp_exp8(_mm256_sub_ps(_mm256_loadu_ps(score + j), _mm256_set1_ps(max)));
        _mm256_storeu_ps(score + j, p);
        sum = _mm256_add_ps(sum, p);
    }
    if (max != b->max[v]) {
        const __m256 decay = tp_exp8(_mm256_set1_ps(b->max[v] - max));
        for (int i = 0; i < b->shape->d; i += 8)
            _mm256_storeu_ps(out + i, _mm256_mul_ps(_mm256_loadu_ps(out + i), decay));
        b->sum[v] *= _mm256_cvtss_f32(decay);
        b->max[v] = max;
    }
    b->sum[v] += tp_sum8(sum);
}

/* Keys [first, last) of a stretch, read from the pages. */
static void stretch_in_place(const block *b, int first, int last) {
    const tp_attention *a = b->shape;
    for (int t = first, end; t < last; t = end) {
        end = piece_end(b, t, last);
        product_kv(b->vectors, tp_ceil_div(end - t, 8) * 8, b->q, a->d, keys_at(b, t), a->page_tokens, a->d,
                   b->score + (t - first), b->tokens, 0);
    }
    mask(b, first, last);
    for (int v = 0; v < b->vectors; v++) soften(b, v, tp_ceil_div(last - first, 8) * 8);
    for (int t = first, end; t < last; t = end) {
        end = piece_end(b, t, last);
        product_kv(b->vectors, a->d, b->score + (t - first), b->tokens, values_at(b, t), a->d, end - t, b->out, a->d, 1);
    }
}

/* The same through float32 copies, which many vectors share. */
static void stretch_converted(const block *b, int first, int last) {
    const tp_attention *a = b->shape;
    const int width = tp_ceil_div(last - first, 8) * 8;
    for (int t = first, end; t < last; t = end) {
        end = piece_end(b, t, last);
        convert(b, t, end, t - first);
    }
    product_f32(b->vectors, width, b->q, a->d, b->key, b->tokens, a->d, b->score, b->tokens, 0);
    const int position = b->segment->position + b->row;
    const int all_seen = position >= last - 1 && last % 8 == 0 &&
                         (a->window <= 0 || position + b->rows - 1 - a->window < first);
    if (!all_seen) mask(b, first, last);
    for (int v = 0; v < b->vectors; v++) soften(b, v, width);
    product_f32(b->vectors, a->d, b->score, b->tokens, b->value, a->d, last - first, b->out, a->d, 1);
}

/* Queries, times the scale, to scratch; empty sums. */
static void start(const block *b, const tp_launch *l) {
    const tp_attention *a = b->shape;
    const float scale = tp_float(l, 8);
    for (int v = 0; v < b->vectors; v++) {
        const int64_t row = b->segment->row + b->row + v / a->group;
        const float *q = TP_PTR(const float, l, 0) + row * l->arg[1] + (int64_t)(b->head + v % a->group) * a->d;
        for (int i = 0; i < a->d; i++) {
            b->q[v * a->d + i] = q[i] * scale;
            b->out[v * a->d + i] = 0;
        }
        b->max[v] = -__builtin_inff();
        b->sum[v] = 0;
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
            for (int i = 0; i < a->d; i++) y[i] = out[i] / b->sum[v];
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
    b->max = scratch;
    b->sum = b->max + 64;
    b->q = b->sum + 64;
    b->out = b->q + b->vectors * d;
    b->score = b->out + b->vectors * d;
    b->key = b->score + b->vectors * b->tokens;
    b->value = b->key + (in_place ? 0 : d * b->tokens);
}

_Static_assert((128 + 2 * DIRECT_VECTORS * TP_MAX_HEAD_DIM + SCORE_FLOATS) * 4 <= TP_SCRATCH, "decode fits scratch");
_Static_assert((128 + 2 * 12288 + 48 * 64 + 2 * 64 * 256) * 4 <= TP_SCRATCH, "prefill fits scratch");

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
    start(&b, l);
    for (int t = b.first; t < b.last; t += b.tokens) {
        const int end = tp_min(b.last, t + b.tokens);
        if (b.vectors <= DIRECT_VECTORS) stretch_in_place(&b, t, end);
        else stretch_converted(&b, t, end);
    }
    finish(&b, l, splits > 1 ? split : -1);
}

const tp_kernel KERNEL = {NAME, tasks, run};
