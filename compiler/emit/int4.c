/* Groups of integers under a scale, operation for operation as compiler/formats/int4.py and int8.py.
 *
 * A group's sums run in eight lanes, which are then added in a fixed order. No state and no allocation.
 */
#include "blocks.h"

#pragma STDC FP_CONTRACT OFF

enum { OK = 0, NOT_FINITE = 3, TOO_LARGE = 4, LANES = 8, STEPS = 16 };
#define LIMIT_BITS 0x5d800000u /* 2^60 */

typedef float lanes __attribute__((vector_size(4 * LANES)));

/* One group: its values, and what was found so far. */
typedef struct {
    lanes x[STEPS];
    int steps;      /* vectors in use */
    float zero;
    float scale, explained;
} group;

static inline lanes all(float v) { return (lanes){v, v, v, v, v, v, v, v}; }
static inline lanes least(lanes a, lanes b) { return __builtin_elementwise_min(a, b); }
static inline lanes most(lanes a, lanes b) { return __builtin_elementwise_max(a, b); }

/* The nearest integer, ties to even, of values far below 2^22. */
static inline lanes nearest(lanes value) { return (value + all(12582912.0f)) - all(12582912.0f); }

/* numerator / denominator, or 0 where the denominator's magnitude is not above 1e-30. */
static inline float ratio(float numerator, float denominator) {
    return denominator > 1e-30f || denominator < -1e-30f ? numerator / denominator : 0.0f;
}

static inline float across(lanes v) {
    float four[4];
    for (int i = 0; i < 4; i++) four[i] = v[i] + v[i + 4];
    return (four[0] + four[2]) + (four[1] + four[3]);
}

/* code - zero of one vector. */
static inline lanes integers(lanes x, float factor, float zero) {
    lanes low = all(0.0f - zero);
    return nearest(most(least(x * all(factor), low + all(15.0f)), low));
}

/* Least squares under the codes that `factor` gives; kept when it explains more. True when it was. */
static int improve(group *g, float zero, float factor) {
    lanes qq = all(0.0f), qx = all(0.0f);
    for (int i = 0; i < g->steps; i++) {
        lanes q = integers(g->x[i], factor, zero);
        qq += q * q;
        qx += q * g->x[i];
    }
    float sqx = across(qx), slope = ratio(sqx, across(qq)), explained = slope * sqx;
    if (!(explained > g->explained)) return 0;
    g->scale = slope, g->explained = explained, g->zero = zero;
    return 1;
}

static void fit_symmetric(group *g, int n) {
    float peak = 0.0f, x[STEPS * LANES];
    memcpy(x, g->x, sizeof(float) * (size_t)n);
    float largest = 0.0f;
    for (int i = 0; i < n; i++) {
        float magnitude = x[i] < 0.0f ? -x[i] : x[i];
        largest = magnitude > largest ? magnitude : largest;
    }
    for (int i = n - 1; i >= 0; i--) peak = (x[i] < 0.0f ? -x[i] : x[i]) == largest ? x[i] : peak;
    g->zero = 8.0f;
    for (int c = 0; c < 9; c++) {
        float stretch = -1.25f + 0.25f * (float)c;
        improve(g, 8.0f, ratio(-8.0f + stretch, peak));
        improve(g, 8.0f, ratio(7.0f - stretch, peak));
    }
    for (int c = 0; c < 2; c++) improve(g, 8.0f, ratio(1.0f, g->scale));
}

static void fit_affine(group *g) {
    lanes low = all(0.0f), high = all(0.0f);
    for (int i = 0; i < g->steps; i++) low = least(low, g->x[i]), high = most(high, g->x[i]);
    float bottom = 0.0f, top = 0.0f;
    for (int j = 0; j < LANES; j++) {
        bottom = low[j] < bottom ? low[j] : bottom;
        top = high[j] > top ? high[j] : top;
    }
    g->zero = 0.0f;
    for (int c = 0; c < 11; c++) {
        float factor = ratio(13.0f + 0.25f * (float)c, top - bottom);
        float start = (float)(int)((0.0f - bottom) * factor);
        for (int step = 0; step < 2; step++) {
            float tried = start + (float)step;
            improve(g, tried < 15.0f ? tried : 15.0f, factor);
        }
    }
    for (int c = 0; c < 2; c++) improve(g, g->zero, ratio(1.0f, g->scale));
}

static float of_upper(uint32_t upper) {
    uint32_t word = upper << 16;
    float value;
    memcpy(&value, &word, 4);
    return value;
}

static float squared_error(const group *g, float d) {
    lanes sum = all(0.0f);
    float factor = ratio(1.0f, d);
    for (int i = 0; i < g->steps; i++) {
        lanes residual = g->x[i] - all(d) * integers(g->x[i], factor, g->zero);
        sum += residual * residual;
    }
    return across(sum);
}

/* The bfloat16 value (its 16 bits) of least error among the nearest to the scale and its two neighbours. */
static uint16_t best_neighbour(const group *g) {
    static const int steps[] = {0, -1, 1};
    uint32_t word, chosen = 0;
    memcpy(&word, &g->scale, 4);
    uint32_t near = (word + (0x7fff + ((word >> 16) & 1))) >> 16;
    float best = __builtin_inff();
    for (int i = 0; i < 3; i++) {
        uint32_t moved = near & 0x7fff ? near + (uint32_t)steps[i] : near;
        float error = squared_error(g, of_upper(moved));
        if (error < best) best = error, chosen = moved;
    }
    return (uint16_t)chosen;
}

static void store(const group *g, uint16_t d, int zeros, uint8_t *dst) {
    uint8_t codes[STEPS * LANES];
    float factor = ratio(1.0f, of_upper(d));
    for (int i = 0; i < g->steps; i++) {
        lanes code = integers(g->x[i], factor, g->zero) + all(g->zero);
        for (int j = 0; j < LANES; j++) codes[LANES * i + j] = (uint8_t)code[j];
    }
    memcpy(dst, &d, 2), dst += 2;
    if (zeros) *dst++ = (uint8_t)g->zero;
    for (int k = 0; k < g->steps * LANES; k += 32, dst += 16)
        for (int i = 0; i < 16; i++) dst[i] = (uint8_t)(codes[k + i] | codes[k + 16 + i] << 4);
}

static int check(const float *src, int n) {
    uint32_t largest = 0;
    for (int i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, src + i, 4);
        bits &= 0x7fffffff;
        largest = bits > largest ? bits : largest;
    }
    return largest >= 0x7f800000u ? NOT_FINITE : largest > LIMIT_BITS ? TOO_LARGE : OK;
}

/* One group of `f->super` values as a block. */
int tp_encode_int4(const format *f, const float *src, uint8_t *dst) {
    group g = {.steps = f->super / LANES};
    int status = check(src, f->super);
    if (status) return status;
    memcpy(g.x, src, sizeof(float) * (size_t)f->super);
    if (f->has_zero) fit_affine(&g);
    else fit_symmetric(&g, f->super);
    store(&g, best_neighbour(&g), f->has_zero, dst);
    return OK;
}

void tp_decode_int4(const format *f, const uint8_t *src, float *dst) {
    parts p = {.zero = f->bits == 8 ? 128 : 8};
    tp_take(f, src, &p);
    _Float16 half;
    memcpy(&half, &p.d, 2);
    float d = f->bf16 ? of_upper(p.d) : (float)half, zero = (float)p.zero;
    for (int i = 0; i < f->super; i++) dst[i] = ((float)p.codes[i] - zero) * d;
}
