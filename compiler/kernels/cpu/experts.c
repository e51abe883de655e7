/* Everything around the products of a mixture of experts. A pair is a row and one of its top_k experts; after `dispatch`
 * pairs stand sorted by expert, those of one expert in the order of their rows. */
#include "quantize.h"

#define ROWS 8
#define PAIRS 64
#define EXPERTS_MOST 4096 /* scores of a row stand in scratch */

enum { softmax, sigmoid, sqrt_softplus, softmax_chosen };

static int row_tasks(const tp_launch *l, const tp_step *s) {
    (void)l;
    return tp_ceil_div(s->rows, ROWS);
}

/* Numerators of a softmax of x[count] in place, and their sum. */
static float exponentials(float *x, int count) {
    float most = x[0], sum = 0;
    for (int i = 1; i < count; i++) most = x[i] > most ? x[i] : most;
    for (int i = 0; i < count; i += 8) {
        const __m256i mask = tp_mask8(tp_min(8, count - i));
        const __m256 shifted = _mm256_sub_ps(_mm256_maskload_ps(x + i, mask), _mm256_set1_ps(most));
        _mm256_maskstore_ps(x + i, mask, tp_exp8(shifted));
    }
    for (int i = 0; i < count; i++) sum += x[i];
    return sum;
}

static void softmax_of(float *x, int count) {
    const float sum = exponentials(x, count);
    for (int i = 0; i < count; i++) x[i] /= sum;
}

/* sqrt(ln(1 + e^x)); e^x small against 1 by its series. */
static float sqrt_softplus_of(float x) {
    if (!(x <= 20)) return tp_sqrt(x); /* NaN too */
    const double e = _mm256_cvtss_f32(tp_exp8(_mm256_set1_ps(x)));
    return tp_sqrt((float)(e < 1e-4 ? e - 0.5 * e * e : tp_log(1 + e)));
}

/* What the logits of a row score: x[experts] in place. */
static void score_all(float *x, int experts, int kind) {
    if (kind == softmax) softmax_of(x, experts);
    if (kind == sqrt_softplus)
        for (int i = 0; i < experts; i++) x[i] = sqrt_softplus_of(x[i]);
    for (int i = 0; kind == sigmoid && i < experts; i += 8) {
        const __m256i mask = tp_mask8(tp_min(8, experts - i));
        _mm256_maskstore_ps(x + i, mask, tp_sigmoid8(_mm256_maskload_ps(x + i, mask)));
    }
}

/* The largest of x[count] that is not taken, the first among equals; one that is not taken even if all are NaN. */
static int best_of(const float *x, const uint8_t *taken, int count) {
    int best = -1;
    for (int i = 0; i < count; i++)
        if (!taken[i] && (best < 0 || x[i] > x[best])) best = i;
    return best < 0 ? 0 : best;
}

/* Take every expert but those of the `top` best of equal groups, by the largest or the two largest of their scores. */
static void close_groups(const float *x, uint8_t *taken, int experts, int groups, int top, int two) {
    float score[EXPERTS_MOST];
    uint8_t open[EXPERTS_MOST] = { 0 };
    const int size = experts / groups;
    for (int g = 0; g < groups; g++) {
        float first = x[g * size], second = -__builtin_inff();
        for (int i = 1; i < size; i++) {
            const float v = x[g * size + i];
            if (v > first) second = first, first = v;
            else if (v > second) second = v;
        }
        score[g] = two && size > 1 ? first + second : first;
    }
    for (int i = 0; i < top; i++) open[best_of(score, open, groups)] = 1;
    for (int i = 0; i < experts; i++) taken[i] = !open[i / size];
}

/* Scores of the chosen experts to their weights. */
static void finish_weights(float *weight, int top_k, int kind, int normalize, float scale) {
    float sum = 0;
    if (kind == softmax_chosen) softmax_of(weight, top_k);
    for (int i = 0; i < top_k; i++) sum += weight[i];
    const float divisor = normalize ? sum + 1e-20f : 1.0f;
    for (int i = 0; i < top_k; i++) weight[i] = weight[i] / divisor * scale;
}

/* route: 0 x f32 [rows][ldx] logits, 1 ldx, 2 y f32 [rows][2 top_k], 3 experts, 4 top_k, 5 score, 6 bias f32[experts] that
 * only chooses or 0, 7 groups, 8 top_groups, 9 whether groups are scored by two experts, 10 normalize, 11 scale.
 * y holds the ids in order of falling score, the lower first among equals, then the weights. */
static void route(const tp_launch *l, const tp_step *s, int task, void *scratch) {
    const int experts = (int)l->arg[3], top_k = (int)l->arg[4], kind = (int)l->arg[5], groups = (int)l->arg[7];
    const float *bias = TP_PTR(const float, l, 6);
    float *score = scratch, *choice = score + EXPERTS_MOST;
    uint8_t *taken = (uint8_t *)(choice + EXPERTS_MOST);
    for (int row = task * ROWS; row < tp_min(s->rows, (task + 1) * ROWS); row++) {
        float *id = TP_PTR(float, l, 2) + (int64_t)row * 2 * top_k, *weight = id + top_k;
        memcpy(score, TP_PTR(const float, l, 0) + row * l->arg[1], (size_t)experts * sizeof(float));
        score_all(score, experts, kind);
        for (int i = 0; i < experts; i++) choice[i] = bias ? score[i] + bias[i] : score[i];
        memset(taken, 0, (size_t)experts);
        if (groups > 1) close_groups(choice, taken, experts, groups, (int)l->arg[8], (int)l->arg[9]);
        for (int i = 0; i < top_k; i++) {
            const int best = best_of(choice, taken, experts);
            taken[best] = 1, id[i] = (float)best, weight[i] = score[best];
        }
        finish_weights(weight, top_k, kind, l->arg[10] != 0, tp_float(l, 11));
    }
}

/* route_by_token: 0 x f32 [rows][ldx] logits, 1 ldx, 2 table f32 [vocab][top_k], 3 y f32 [rows][2 top_k], 4 experts,
 * 5 top_k, 6 score, 7 normalize, 8 scale. The ids are those that the table has for the row's token. */
static void route_by_token(const tp_launch *l, const tp_step *s, int task, void *scratch) {
    const int experts = (int)l->arg[4], top_k = (int)l->arg[5], kind = (int)l->arg[6];
    float *score = scratch;
    for (int row = task * ROWS; row < tp_min(s->rows, (task + 1) * ROWS); row++) {
        float *id = TP_PTR(float, l, 3) + (int64_t)row * 2 * top_k, *weight = id + top_k;
        memcpy(score, TP_PTR(const float, l, 0) + row * l->arg[1], (size_t)experts * sizeof(float));
        score_all(score, experts, kind);
        memcpy(id, TP_PTR(const float, l, 2) + (int64_t)s->tokens[row] * top_k, (size_t)top_k * sizeof(float));
        for (int i = 0; i < top_k; i++) weight[i] = score[(int)id[i]];
        finish_weights(weight, top_k, kind, l->arg[7] != 0, tp_float(l, 8));
    }
}

/* dispatch: 0 route f32 [rows][2 top_k], 1 top_k, 2 experts, 3 starts int32 [experts + 1] and what linear_grouped.c wants
 * behind it, 4 row_of int32 a pair, 5 weight f32 a pair, 6 first: experts are those from this id on, and pairs with
 * others (which other ranks hold) are left out. */
static int one_task(const tp_launch *l, const tp_step *s) {
    (void)l;
    return s->rows > 0;
}

static int held(float id, int first, int experts) { return (int)id >= first && (int)id < first + experts; }

static void dispatch(const tp_launch *l, const tp_step *s, int task, void *scratch) {
    (void)task;
    const int top_k = (int)l->arg[1], experts = (int)l->arg[2], first = (int)l->arg[6];
    int32_t *starts = TP_PTR(int32_t, l, 3), *row_of = TP_PTR(int32_t, l, 4), *next = scratch;
    float *weight = TP_PTR(float, l, 5);
    memset(next, 0, (size_t)experts * sizeof(int32_t));
    for (int row = 0; row < s->rows; row++) {
        const float *id = TP_PTR(const float, l, 0) + row * 2 * top_k;
        for (int i = 0; i < top_k; i++)
            if (held(id[i], first, experts)) next[(int)id[i] - first]++;
    }
    int32_t *active = starts + experts + 1, start = 0;
    *active = 0;
    for (int e = 0; e < experts; e++) {
        const int count = next[e];
        if (count) active[++*active] = e;
        starts[e] = next[e] = start;
        start += count;
    }
    starts[experts] = start;
    for (int row = 0; row < s->rows; row++) {
        const float *id = TP_PTR(const float, l, 0) + row * 2 * top_k;
        for (int i = 0; i < top_k; i++) {
            if (!held(id[i], first, experts)) continue;
            const int at = next[(int)id[i] - first]++;
            row_of[at] = row, weight[at] = id[top_k + i];
        }
    }
    for (int at = start; at < s->rows * top_k; at++) row_of[at] = 0, weight[at] = 0; /* pairs of other ranks */
}

/* Pairs [first, last) of a task of `step` pairs; the argument `at` is top_k. */
static int pair_tasks(const tp_step *s, int64_t top_k, int step) { return tp_ceil_div(s->rows * (int)top_k, step); }
static int last_pair(const tp_step *s, int64_t top_k, int step, int task) {
    return tp_min(s->rows * (int)top_k, (task + 1) * step);
}

/* sort_x8: 0 x x8, 1 cap of x, 2 y x8, 3 cap of y, 4 k, 5 row_of, 6 top_k, 7 terms. Pair p of y is row row_of[p] of x. */
static int sort_x8_tasks(const tp_launch *l, const tp_step *s) { return pair_tasks(s, l->arg[6], PAIRS); }

static void sort_x8(const tp_launch *l, const tp_step *s, int task, void *scratch) {
    (void)scratch;
    const void *x = TP_PTR(const void, l, 0);
    const int64_t cap_x = l->arg[1], cap_y = l->arg[3], groups = (l->arg[4] + 31) / 32;
    const int last = last_pair(s, l->arg[6], PAIRS, task), terms = l->arg[7] == 2 ? 2 : 1;
    const int32_t *row_of = TP_PTR(const int32_t, l, 5);
    for (int64_t g = 0; g < groups; g++) {
        char *y = TP_PTR(char, l, 2), *codes = y + g * cap_y * 32;
        float *scale = (float *)(y + groups * cap_y * 32) + g * cap_y;
        int32_t *sums = (int32_t *)(y + groups * cap_y * 36) + g * cap_y * 2;
        for (int to = task * PAIRS * terms; to < last * terms; to++) {
            const int from = row_of[to / terms] * terms + to % terms;
            memcpy(codes + to * 32, tp_x8_codes(x, g, cap_x) + from * 32, 32);
            scale[to] = tp_x8_scale(x, groups, g, cap_x)[from];
            memcpy(sums + to * 2, tp_x8_sums(x, groups, g, cap_x) + from * 2, 2 * sizeof(int32_t));
        }
    }
}

/* sort_f32: 0 x f32 [rows][ldx], 1 ldx, 2 y f32 [pairs][k], 3 k, 4 row_of, 5 top_k. */
static int sort_f32_tasks(const tp_launch *l, const tp_step *s) { return pair_tasks(s, l->arg[5], PAIRS); }

static void sort_f32(const tp_launch *l, const tp_step *s, int task, void *scratch) {
    (void)scratch;
    const int64_t k = l->arg[3];
    for (int p = task * PAIRS; p < last_pair(s, l->arg[5], PAIRS, task); p++)
        memcpy(TP_PTR(float, l, 2) + p * k, TP_PTR(const float, l, 0) + TP_PTR(const int32_t, l, 4)[p] * l->arg[1],
               (size_t)k * sizeof(float));
}

/* pairs_x8: 0 x f32 [pairs][k], 1 y x8, 2 k, 3 cap of y, 4 top_k. */
static int pairs_x8_tasks(const tp_launch *l, const tp_step *s) { return pair_tasks(s, l->arg[4], ROWS); }

static void pairs_x8(const tp_launch *l, const tp_step *s, int task, void *scratch) {
    (void)scratch;
    const int k = (int)l->arg[2];
    for (int64_t p = task * ROWS; p < last_pair(s, l->arg[4], ROWS, task); p++)
        tp_quantize_row(TP_PTR(const float, l, 0) + p * k, k, TP_PTR(void, l, 1), l->arg[3], p, 1);
}

/* add_pairs: 0 x f32 [pairs][k], 1 y f32 [rows][k], 2 k, 3 row_of, 4 starts, 5 experts. y[row_of[p]] += x[p] in the order
 * of p; nothing for more pairs than linear_grouped.c leaves to it. */
#define COLUMNS 1024

static int pairs_of(const tp_launch *l) { return TP_PTR(const int32_t, l, 4)[l->arg[5]]; }

static int add_pairs_tasks(const tp_launch *l, const tp_step *s) {
    return s->rows && pairs_of(l) <= TP_FEW_PAIRS ? tp_ceil_div((int)l->arg[2], COLUMNS) : 0;
}

static void add_pairs(const tp_launch *l, const tp_step *s, int task, void *scratch) {
    (void)s, (void)scratch;
    const int64_t k = l->arg[2], first = task * COLUMNS, last = first + COLUMNS < k ? first + COLUMNS : k;
    for (int64_t p = 0; p < pairs_of(l); p++) {
        const float *x = TP_PTR(const float, l, 0) + p * k;
        float *y = TP_PTR(float, l, 1) + TP_PTR(const int32_t, l, 3)[p] * k;
        for (int64_t i = first; i < last; i++) y[i] += x[i];
    }
}

/* zero_f32: 0 y f32 [rows][k], 1 k. y = 0. */
static void zero_f32(const tp_launch *l, const tp_step *s, int task, void *scratch) {
    (void)scratch;
    const int64_t k = l->arg[1], rows = tp_min(ROWS, s->rows - task * ROWS);
    memset(TP_PTR(float, l, 0) + task * ROWS * k, 0, (size_t)(rows * k) * sizeof(float));
}

const tp_kernel tp_kernel_route = {"route", row_tasks, route};
const tp_kernel tp_kernel_route_by_token = {"route_by_token", row_tasks, route_by_token};
const tp_kernel tp_kernel_dispatch = {"dispatch", one_task, dispatch};
const tp_kernel tp_kernel_sort_x8 = {"sort_x8", sort_x8_tasks, sort_x8};
const tp_kernel tp_kernel_sort_f32 = {"sort_f32", sort_f32_tasks, sort_f32};
const tp_kernel tp_kernel_pairs_x8 = {"pairs_x8", pairs_x8_tasks, pairs_x8};
const tp_kernel tp_kernel_add_pairs = {"add_pairs", add_pairs_tasks, add_pairs};
const tp_kernel tp_kernel_zero_f32 = {"zero_f32", row_tasks, zero_f32};
