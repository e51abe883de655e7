/* What linear.c and linear_grouped.c share: the sums of some tiles with some rows of x, and what becomes of them. */
#ifndef TAPEOUT_LINEAR_FINISH_H
#define TAPEOUT_LINEAR_FINISH_H
#include "tile16.h"

#define TP_AHEAD 4096 /* bytes of weights prefetched ahead in decode */
#if TP_KIND != TP_CODES
#include "linear_float.h"
#else
#include "linear_quantized.h"
#endif

enum { store, add, gated_silu, gated_gelu, gated_swiglu_oai };
enum { block_rows = 64, task_tiles = 32, sums_bytes = 64 * 1024 };

/* Where products go: row t of y is `row_of[t]` (t without row_of), its values times `scale[t]` (1 without scale). */
typedef struct target {
    float *y;
    int64_t n, ldy, epilogue;
    const float *bias; /* one a row of w, or 0 */
    const int32_t *row_of;
    const float *scale;
    float limit; /* of the gated epilogues: gate <= limit, -limit <= up <= limit first; 0 without one */
} target;

/* x * sigmoid(x), x * Phi(x) by tanh: tanh(u) = 2 sigmoid(2u) - 1, and x * sigmoid(1.702 x). */
TP_INLINE vf activate(vf x, int64_t epilogue) {
    vf u = epilogue == gated_silu ? x : epilogue == gated_swiglu_oai ? x * 1.702f
         : x * vf_fma(x * x, vf_all(0.0713548162726f), vf_all(1.59576912161f));
    return x / (vf_exp(-u) + 1.0f);
}

/* The lesser of x and most; NaN stays NaN. */
TP_INLINE vf at_most(vf x, vf most) {
    vi over = x > most;
    return (vf)((over & (vi)most) | (~over & (vi)x));
}

/* act(gate) * up. */
TP_INLINE vf gated_value(vf gate, vf up, const target *to) {
    if (to->limit > 0) {
        vf limit = vf_all(to->limit);
        gate = at_most(gate, limit);
        up = -at_most(-at_most(up, limit), limit);
    }
    return activate(gate, to->epilogue) * (to->epilogue == gated_swiglu_oai ? up + 1.0f : up);
}

/* y[rows][columns of `tiles` tiles from `column` on] from the sums of the tiles; when gated, of all tiles of the gate and
 * then of all of up, so that either is read in one run. */
TP_FN void finish(const target *to, int rows, int tiles, const float *sums, int64_t column) {
    int64_t n = to->n, stride = (int64_t)rows * TP_TILE;
    int gated = to->epilogue >= gated_silu;
    float none[TP_TILE] = { 0 }, last[TP_TILE] = { 0 };
    for (int64_t c = n / TP_TILE * TP_TILE; to->bias && c < n; c++) last[c % TP_TILE] = to->bias[c];
    for (int t = 0; t < rows; t++) {
        float *row = to->y + (to->row_of ? to->row_of[t] : t) * to->ldy + column;
        vf scale = vf_all(to->scale ? to->scale[t] : 1.0f);
        for (int i = 0; i < tiles; i++) {
            const float *sum = sums + i * stride + t * TP_TILE, *sum_up = sum + tiles * stride;
            int64_t at = column + i * TP_TILE;
            const float *shift = !to->bias ? none : at + TP_TILE <= n ? to->bias + at : last;
            const float *shift_up = to->bias && gated ? to->bias + n + at : none;
            float out[TP_TILE], *y = row + i * TP_TILE;
            TP_UNROLL for (int u = 0; u < TP_TILE; u += TP_WIDTH) {
                vf value = vf_load(sum + u) + vf_load(shift + u);
                if (gated) value = gated_value(value, vf_load(sum_up + u) + vf_load(shift_up + u), to);
                vf_store(out + u, value * scale);
            }
            if (at + TP_TILE <= n) {
                TP_UNROLL for (int u = 0; u < TP_TILE; u += TP_WIDTH)
                    vf_store(y + u, to->epilogue == add ? vf_load(y + u) + vf_load(out + u) : vf_load(out + u));
            } else {
                for (int r = 0; r < n - at; r++) y[r] = to->epilogue == add ? y[r] + out[r] : out[r];
            }
        }
    }
}

/* sums[streams][rows / 2][16]: the sums of both terms of each row. */
TP_FN void join_terms(float *sums, int streams, int rows) {
    for (int64_t t = 0; t < (int64_t)streams * rows / 2; t++)
        for (int u = 0; u < TP_TILE; u += TP_WIDTH)
            vf_store(sums + t * TP_TILE + u, vf_load(sums + 2 * t * TP_TILE + u) + vf_load(sums + (2 * t + 1) * TP_TILE + u));
}

/* The activations of a product: `ldx` values a row, of which `k` from `first` on are multiplied. */
typedef struct activations {
    const void *x;
    int64_t ldx, first, k, cap;
    int terms;
} activations;

/* sums[streams][rows / terms][16] in scratch: the products of tiles w with rows `row` .. `row + rows` of x. */
TP_FN float *sums_of(const uint8_t *const *w, int streams, const activations *a, int row, int rows, void *scratch) {
    float *sums = scratch;
    for (int i = 0; i < streams * rows * TP_TILE; i += TP_TILE)
        for (int u = 0; u < TP_TILE; u += TP_WIDTH) vf_store(sums + i + u, (vf){ 0 });
    for (int64_t k0 = 0; k0 < a->k; k0 += TP_CHUNK) {
        int64_t k1 = k0 + TP_CHUNK < a->k ? k0 + TP_CHUNK : a->k;
        operand x = operand_of(a->x, a->ldx, a->cap, a->first + k0, a->first + k1, row, rows, (char *)scratch + sums_bytes);
        multiply(w, streams, k0, k1, &x, sums);
    }
    if (a->terms == 2) join_terms(sums, streams, rows);
    return sums;
}
#endif
