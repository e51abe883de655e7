/* The best keys of an index: exact selection of the top_k highest scores in time proportional to how many there are.
 *
 * index_select_f16, index_select_f32, index_merge: 0 q f32, 1 ldq, 2 out f32 [rows][top_k], 3 kv, 4 heads, 5 head_dim,
 * 6 weights f32 (one a head), 7 their row stride, 8 page_tokens, 9 top_k, 10 scale, 11 parts or 0, 12 their bytes.
 * index_merge takes the same launch and follows directly.
 *
 * out[row] holds the positions of the top_k highest sum over heads of weight * relu(q key) * scale, ascending, then -1;
 * of equal scores the lower position wins. Rows of a small step with many keys are split over them, if the parts have
 * room: each split leaves its own best there. The cut depends on the step alone. */
#ifndef TP_INDEX_H
#define TP_INDEX_H
#include "tapeout_cpu.h"
#include "tp_math.h"

#define TP_INDEX_SPLITS 16
#define TP_INDEX_SPLIT_TOKENS 512 /* at least, in one split */
#define TP_INDEX_TOP_K 4096       /* at most */

/* Up to 2 * top_k candidates in order of position; scores as integers of the same order. */
typedef struct tp_best {
    int top_k, count;
    uint32_t floor; /* scores up to it have lost */
    uint32_t *score;
    int32_t *position;
} tp_best;

static inline int tp_best_room(int top_k) { return 2 * top_k; }

/* Of floats without NaN, the order of the integers is that of the numbers; 0 is below all. */
static inline uint32_t tp_ordered(float x) {
    uint32_t bits;
    x += 0.0f; /* -0 equals 0 */
    memcpy(&bits, &x, sizeof bits);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

/* The top_k-th highest of score[count], count >= top_k, by one byte after the other; `above` is how many are higher. */
static uint32_t tp_best_threshold(const tp_best *b, int *above) {
    uint32_t prefix = 0, known = 0;
    int wanted = b->top_k;
    for (int shift = 24; shift >= 0; shift -= 8) {
        int counts[256] = {0}, digit = 255;
        for (int i = 0; i < b->count; i++)
            if ((b->score[i] & known) == prefix) counts[b->score[i] >> shift & 255]++;
        for (; counts[digit] < wanted; digit--) wanted -= counts[digit];
        prefix |= (uint32_t)digit << shift;
        known |= 255u << shift;
    }
    *above = b->top_k - wanted;
    return prefix;
}

/* Keeps the top_k best. */
static void tp_best_prune(tp_best *b) {
    if (b->count <= b->top_k) return;
    int above, kept = 0;
    const uint32_t threshold = tp_best_threshold(b, &above);
    int equal = b->top_k - above;
    for (int i = 0; i < b->count; i++) {
        if (b->score[i] < threshold || (b->score[i] == threshold && equal-- <= 0)) continue;
        b->score[kept] = b->score[i];
        b->position[kept++] = b->position[i];
    }
    b->count = kept;
    b->floor = threshold;
}

/* One candidate more; positions ascend. */
TP_INLINE void tp_best_offer(tp_best *b, uint32_t score, int position) {
    if (score <= b->floor) return;
    if (b->count == tp_best_room(b->top_k)) {
        tp_best_prune(b);
        if (score <= b->floor) return;
    }
    b->score[b->count] = score;
    b->position[b->count++] = position;
}

static inline void tp_best_write(tp_best *b, float *out) {
    tp_best_prune(b);
    for (int i = 0; i < b->top_k; i++) out[i] = i < b->count ? (float)b->position[i] : -1.0f;
}

/* A part: top_k scores, top_k positions, their count; padded to 64 bytes. */
static inline int64_t tp_index_part(int top_k) { return (2 * (int64_t)top_k + 16) / 16 * 16; }

/* The last key that a row sees: that of its position, or of its last whole m tokens where a key is made of arg 13 = m. */
static inline int tp_index_last(const tp_launch *l, const tp_step *s, int row) {
    return l->arg[13] ? (s->positions[row] + 1) / (int)l->arg[13] - 1 : s->positions[row];
}

/* Keys of each split (a multiple of 64) and how many splits, for a row that sees keys up to `position`. */
static inline int tp_index_splits(const tp_launch *l, const tp_step *s, int position, int *tokens) {
    const int keys = position + 1, top_k = (int)l->arg[9];
    const int64_t room = l->arg[12] / (TP_INDEX_SPLITS * tp_index_part(top_k) * 4);
    *tokens = keys;
    if (!l->arg[11] || s->rows > room || keys <= top_k) return 1;
    *tokens = tp_max(TP_INDEX_SPLIT_TOKENS, tp_ceil_div(tp_ceil_div(keys, TP_INDEX_SPLITS), 64) * 64);
    return tp_ceil_div(keys, *tokens);
}

static inline uint32_t *tp_index_part_of(const tp_launch *l, int row, int split) {
    return TP_PTR(uint32_t, l, 11) + ((int64_t)row * TP_INDEX_SPLITS + split) * tp_index_part((int)l->arg[9]);
}

/* Leaves the best as a part. */
static inline void tp_best_leave(tp_best *b, uint32_t *part) {
    tp_best_prune(b);
    memcpy(part, b->score, (size_t)b->count * 4);
    memcpy(part + b->top_k, b->position, (size_t)b->count * 4);
    part[2 * b->top_k] = (uint32_t)b->count;
}

#endif
