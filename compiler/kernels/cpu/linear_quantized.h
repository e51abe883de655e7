/* Products of tile16 codes with x8 activations. Dot products of 32 (or 16) elements are exact integers; each is scaled
 * and added in float32, in the order of k, so results are the same bytes for every target, block and thread. */
#ifndef TAPEOUT_LINEAR_QUANTIZED_H
#define TAPEOUT_LINEAR_QUANTIZED_H
#include "tile16.h"

#define TP_CHUNK 2048 /* elements of k between two visits of a row's accumulator: bounds the side table */

#define TP_CORRECTED (TP_CODE_ZERO > 0)
#define TP_ROWS (TP_WIDTH == 16 ? 16 : 4) /* rows of activations that advance together: as many as registers hold */
#define TP_OWN_ZERO (TP_ZERO == TP_OWN)
#define TP_SIDE (TP_CORRECTED || TP_OWN_ZERO || TP_MIN)

/* What a row of activations contributes apart from its codes, by half group: scale * sum for the minimum, -zero * sum
 * where a dot product starts, or -sum where every weight row has a zero of its own. */
typedef union side { float minimum; int32_t zero; float sum; } side;

/* Where the activations of rows `row` .. `row + rows` stand, from the group `group` on. */
typedef struct operand {
    const int8_t *codes;
    const float *scale;
    int64_t cap;
    side *side; /* [groups][rows][TP_HALVES] */
    int rows;
} operand;

TP_FN operand operand_of(const void *x, int64_t k, int64_t cap, int64_t k0, int64_t k1, int row, int rows, void *work) {
    int64_t all = (k + 31) / 32, group = k0 / 32, groups = k1 / 32 - group;
    operand o = { tp_x8_codes(x, group, cap) + row * 32, tp_x8_scale(x, all, group, cap) + row, cap, work, rows };
    if (TP_SIDE) {
        for (int64_t g = 0; g < groups; g++) {
            const int32_t *sums = tp_x8_sums(x, all, group + g, cap) + row * 2;
            side *out = o.side + g * rows * TP_HALVES;
            for (int t = 0; t < rows * TP_HALVES; t++) {
                int32_t sum = TP_HALVES == 2 ? sums[t] : sums[2 * t] + sums[2 * t + 1];
                if (TP_MIN) out[t].minimum = o.scale[g * cap + t / TP_HALVES] * (float)sum;
                else if (TP_OWN_ZERO) out[t].sum = (float)-sum;
                else out[t].zero = -TP_CODE_ZERO * sum;
            }
        }
    }
    return o;
}

/* The compiler would put the steps of one row together again, and they wait for each other. */
#define TP_KEEP_ORDER(x) __asm__ volatile("" : "+v"(x))

/* Add to sums[r] the products of steps first .. first + steps of row r of activations with the codes, by weight row.
 * Rows advance together, one step at a time: consecutive instructions do not wait for each other. */
TP_INLINE void dot(vi *sums, int rows, const vb codes[8], const int8_t *x, int first, int steps) {
    const int32_t *packed = (const int32_t *)x;
#if TP_WIDTH == 16
    TP_UNROLL for (int s = first; s < first + steps; s++)
        TP_UNROLL for (int r = 0; r < rows; r++) {
            sums[r] = __builtin_ia32_vpdpbusd512(sums[r], (vub)codes[s], (vb)vi_all(packed[r * 8 + s]));
            TP_KEEP_ORDER(sums[r]);
        }
#elif TP_SIGNED
    TP_UNROLL for (int s = first; s < first + steps; s++) {
        vb magnitude = __builtin_elementwise_abs(codes[s]);
        TP_UNROLL for (int r = 0; r < rows; r++) {
            vb signed_x = __builtin_ia32_psignb256((vb)vi_all(packed[r * 8 + s]), codes[s]);
            vh pairs = (vh)__builtin_ia32_pmaddubsw256(magnitude, signed_x);
            sums[r] += (vi)__builtin_ia32_pmaddwd256(pairs, (vh){ 0 } + 1);
        }
    }
#else
    /* as many steps as fit 16 bits: codes * 127 * 2 * steps <= 32767 */
    enum { fit = TP_CODE_BITS <= 4 ? 8 : TP_CODE_BITS == 5 ? 4 : 2 };
    TP_UNROLL for (int s = first; s < first + steps; s += fit) {
        vh pairs[TP_ROWS];
        TP_UNROLL for (int r = 0; r < rows; r++) pairs[r] = (vh){ 0 };
        TP_UNROLL for (int i = s; i < s + fit && i < first + steps; i++)
            TP_UNROLL for (int r = 0; r < rows; r++) {
                pairs[r] += (vh)__builtin_ia32_pmaddubsw256(codes[i], (vb)vi_all(packed[r * 8 + i]));
                TP_KEEP_ORDER(pairs[r]);
            }
        TP_UNROLL for (int r = 0; r < rows; r++) sums[r] += (vi)__builtin_ia32_pmaddwd256(pairs[r], (vh){ 0 } + 1);
    }
#endif
}

/* product[r] = the weight-scaled products of one group of 32 elements with row r, before the activation's scale. */
TP_INLINE void products(vf *product, int rows, const tile16_group *w, const int8_t *x, const side *at) {
    TP_UNROLL for (int h = 0; h < TP_HALVES; h++) {
        vi exact[TP_ROWS];
        TP_UNROLL for (int r = 0; r < rows; r++)
            exact[r] = TP_CORRECTED ? vi_all(at[r * TP_HALVES + h].zero) : (vi){ 0 };
        dot(exact, rows, w->codes, x, h * (8 / TP_HALVES), 8 / TP_HALVES);
        TP_UNROLL for (int r = 0; r < rows; r++) {
            vf part = vf_from_int(exact[r]);
#if TP_OWN_ZERO
            part = vf_fma(w->zero, vf_all(at[r * TP_HALVES + h].sum), part); /* exact: all are integers below 2^24 */
#endif
            product[r] = h ? vf_fma(part, w->scale[h], product[r]) : part * w->scale[h];
        }
    }
}

/* sum + one group of 32 elements with one row of activations. */
TP_INLINE vf add_product(vf sum, vf product, const tile16_group *w, float scale, const side *at) {
    sum = vf_fma(product, vf_all(scale), sum);
#if TP_MIN
    TP_UNROLL for (int h = 0; h < TP_HALVES; h++) sum = vf_fma(w->min[h], vf_all(at[h].minimum), sum);
#else
    (void)w, (void)at;
#endif
    return sum;
}

/* Ask for the weights that come TP_AHEAD bytes behind group i of a record. */
TP_INLINE void read_ahead(const uint8_t *record, int i) {
    enum { bytes = TP_RECORD_BYTES / (TP_SUPER / 32) };
    for (int b = 0; b < bytes; b += 64) __builtin_prefetch(record + TP_AHEAD + i * bytes + b, 0, 3);
}

/* One or two rows of activations and one tile: the decode step, bound by the reading of weights. */
TP_INLINE void multiply_few(const uint8_t *tile, int rows, int64_t k0, int64_t groups, const operand *x, float *sums) {
    const uint8_t *w = tile + TP_TILE_BYTES(k0);
    vf sum[TP_UNITS][2];
    TP_UNROLL for (int u = 0; u < TP_UNITS; u++)
        TP_UNROLL for (int r = 0; r < rows; r++) sum[u][r] = vf_load(sums + r * TP_TILE + u * TP_WIDTH);
    for (int64_t g = 0; g < groups; w += TP_RECORD_BYTES) {
        for (int i = 0; i < TP_SUPER / 32; i++, g++) {
            const float *scale = x->scale + g * x->cap;
            const side *at = x->side + g * rows * TP_HALVES;
            read_ahead(w, i);
            TP_UNROLL for (int u = 0; u < TP_UNITS; u++) {
                tile16_group group;
                tile16_decode(tile, w, i, u, &group);
                vf product[2];
                products(product, rows, &group, x->codes + g * x->cap * 32, at);
                TP_UNROLL for (int r = 0; r < rows; r++)
                    sum[u][r] = add_product(sum[u][r], product[r], &group, scale[r], at + r * TP_HALVES);
            }
        }
    }
    TP_UNROLL for (int u = 0; u < TP_UNITS; u++)
        TP_UNROLL for (int r = 0; r < rows; r++) vf_store(sums + r * TP_TILE + u * TP_WIDTH, sum[u][r]);
}

TP_FN void multiply_one(const uint8_t *tile, int64_t k0, int64_t groups, const operand *x, float *sums) {
    multiply_few(tile, 1, k0, groups, x, sums);
}

TP_FN void multiply_two(const uint8_t *tile, int64_t k0, int64_t groups, const operand *x, float *sums) {
    multiply_few(tile, 2, k0, groups, x, sums);
}

/* Rows t .. t + rows of one group against one unit of a tile, in memory. */
TP_INLINE void add_group(float *sums, int t, int rows, const tile16_group *w, const int8_t *x, const float *scale,
                         const side *at) {
    vf product[TP_ROWS];
    products(product, rows, w, x + t * 32, at + t * TP_HALVES);
    TP_UNROLL for (int r = t; r < t + rows; r++) {
        float *sum = sums + r * TP_TILE;
        vf_store(sum, add_product(vf_load(sum), product[r - t], w, scale[r], at + r * TP_HALVES));
    }
}

/* Several rows of activations and one unit of a tile: codes stay in registers while the rows pass. */
TP_FN void multiply_many(const uint8_t *tile, int unit, int64_t k0, int64_t groups, const operand *x, float *sums) {
    const int8_t *codes = x->codes;
    const float *scale = x->scale;
    const side *at = x->side;
    for (int64_t g = 0; g < groups; g++) {
        const uint8_t *record = tile + TP_TILE_BYTES(k0) + g / (TP_SUPER / 32) * TP_RECORD_BYTES;
        int i = (int)(g % (TP_SUPER / 32));
        tile16_group group;
        if (unit == 0) read_ahead(record, i);
        tile16_decode(tile, record, i, unit, &group);
        int t = 0;
        for (; t + TP_ROWS <= x->rows; t += TP_ROWS) add_group(sums, t, TP_ROWS, &group, codes, scale, at);
        for (; t + 4 <= x->rows; t += 4) add_group(sums, t, 4, &group, codes, scale, at);
        for (; t < x->rows; t++) add_group(sums, t, 1, &group, codes, scale, at);
        codes += x->cap * 32, scale += x->cap, at += x->rows * TP_HALVES;
    }
}

/* Add the products of elements k0 .. k1 into sums[tile][rows][16] for `tiles` tiles. */
TP_FN void multiply(const uint8_t *const *w, int tiles, int64_t k0, int64_t k1, const operand *x, float *sums) {
    int64_t groups = (k1 - k0) / 32;
    int64_t stride = (int64_t)x->rows * TP_TILE;
    for (int n = 0; n < tiles; n++, sums += stride) {
        if (x->rows == 1) multiply_one(w[n], k0, groups, x, sums);
        else if (x->rows == 2) multiply_two(w[n], k0, groups, x, sums);
        else
            for (int u = 0; u < TP_UNITS; u++) multiply_many(w[n], u, k0, groups, x, sums + u * TP_WIDTH);
    }
}
#endif
