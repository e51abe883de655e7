/* Products of tile16 codes with x8 activations. Dot products of 32 (or 16) elements are exact integers; each is scaled
 * and added in float32, in the order of k, so results are the same bytes for every target, block and thread. */
#ifndef TAPEOUT_LINEAR_QUANTIZED_H
#define TAPEOUT_LINEAR_QUANTIZED_H
#include "tile16.h"

#define TP_CHUNK 2048 /* elements of k between two visits of a row's accumulator: bounds the side table */

#if TP_WIDTH == 8 && TP_BITS == 8
#define TP_CORRECTED 0 /* codes are made signed instead */
#else
#define TP_CORRECTED (TP_ZERO != 0)
#endif
#define TP_SIDE (TP_CORRECTED || TP_MIN)

/* What a row of activations contributes apart from its codes, by half group: scale * sum for the minimum, or -zero * sum
 * where a dot product starts. */
typedef union side { float minimum; int32_t zero; } side;

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
                else out[t].zero = -TP_ZERO * sum;
            }
        }
    }
    return o;
}

/* sum + the products of steps first .. first + steps of one row of activations with the codes, by weight row. */
TP_INLINE vi dot(vi sum, const vb codes[8], const int8_t *x, int first, int steps) {
    const vi_memory *unused = 0;
    (void)unused;
    const int32_t *packed = (const int32_t *)x;
#if TP_WIDTH == 16
    for (int s = first; s < first + steps; s++)
        sum = __builtin_ia32_vpdpbusd512(sum, (vub)codes[s], (vb)vi_all(packed[s]));
#elif TP_BITS == 8
    for (int s = first; s < first + steps; s++) {
        vb q = codes[s] ^ (vb)vi_all((int32_t)0x80808080);
        vh pairs = (vh)__builtin_ia32_pmaddubsw256(__builtin_elementwise_abs(q), __builtin_ia32_psignb256((vb)vi_all(packed[s]), q));
        sum += (vi)__builtin_ia32_pmaddwd256(pairs, (vh){ 0 } + 1);
    }
#else
    /* as many steps as fit 16 bits: codes * 127 * 2 * steps <= 32767 */
    enum { fit = TP_BITS <= 4 ? 8 : TP_BITS == 5 ? 4 : 2 };
    for (int s = first; s < first + steps; s += fit) {
        vh pairs = { 0 };
        for (int i = s; i < s + fit && i < first + steps; i++)
            pairs += (vh)__builtin_ia32_pmaddubsw256(codes[i], (vb)vi_all(packed[i]));
        sum += (vi)__builtin_ia32_pmaddwd256(pairs, (vh){ 0 } + 1);
    }
#endif
    return sum;
}

/* sum + one group of 32 elements of one row of activations. */
TP_INLINE vf multiply_group(vf sum, const tile16_group *w, const int8_t *x, float scale, const side *at) {
    vf product = { 0 };
    for (int h = 0; h < TP_HALVES; h++) {
        vi start = TP_CORRECTED ? vi_all(at[h].zero) : (vi){ 0 };
        vf exact = vf_from_int(dot(start, w->codes, x, h * (8 / TP_HALVES), 8 / TP_HALVES));
        product = h ? vf_fma(exact, w->scale[h], product) : exact * w->scale[h];
    }
    sum = vf_fma(product, vf_all(scale), sum);
#if TP_MIN
    for (int h = 0; h < TP_HALVES; h++) sum = vf_fma(w->min[h], vf_all(at[h].minimum), sum);
#endif
    return sum;
}

/* One row of activations and one tile: the decode step, bound by the reading of weights. */
TP_FN void multiply_one(const uint8_t *w, int64_t groups, const operand *x, float *sums) {
    vf sum[TP_UNITS];
    for (int u = 0; u < TP_UNITS; u++) sum[u] = vf_load(sums + u * TP_WIDTH);
    for (int64_t g = 0; g < groups; w += TP_RECORD_BYTES) {
        for (int i = 0; i < TP_SUPER / 32; i++, g++) {
            const uint8_t *ahead = w + TP_AHEAD + i * (TP_RECORD_BYTES / (TP_SUPER / 32));
            for (int b = 0; b < TP_RECORD_BYTES / (TP_SUPER / 32); b += 64) __builtin_prefetch(ahead + b, 0, 3);
            for (int u = 0; u < TP_UNITS; u++) {
                tile16_group group;
                tile16_decode(w, i, u, &group);
                sum[u] = multiply_group(sum[u], &group, x->codes + g * x->cap * 32, x->scale[g * x->cap], x->side + g * TP_HALVES);
            }
        }
    }
    for (int u = 0; u < TP_UNITS; u++) vf_store(sums + u * TP_WIDTH, sum[u]);
}

/* Several rows of activations and one unit of `tiles` tiles: codes stay in registers while the rows pass. */
TP_INLINE void multiply_rows(const uint8_t *const *w, int tiles, int unit, int64_t groups, const operand *x, float *const *sums) {
    for (int64_t g = 0; g < groups; g++) {
        tile16_group group[2];
        for (int n = 0; n < tiles; n++)
            tile16_decode(w[n] + g / (TP_SUPER / 32) * TP_RECORD_BYTES, (int)(g % (TP_SUPER / 32)), unit, &group[n]);
        const int8_t *codes = x->codes + g * x->cap * 32;
        const float *scale = x->scale + g * x->cap;
        const side *at = x->side + g * x->rows * TP_HALVES;
        for (int t = 0; t < x->rows; t++)
            for (int n = 0; n < tiles; n++) {
                float *p = sums[n] + t * TP_TILE + unit * TP_WIDTH;
                vf_store(p, multiply_group(vf_load(p), &group[n], codes + t * 32, scale[t], at + t * TP_HALVES));
            }
    }
}

/* Add the products of elements k0 .. k1 into sums[tile][rows][16] for `tiles` tiles. */
TP_FN void multiply(const uint8_t *const *w, int tiles, int64_t k0, int64_t k1, const operand *x, float *sums) {
    int64_t groups = (k1 - k0) / 32, skip = TP_TILE_BYTES(k0);
    int64_t stride = (int64_t)x->rows * TP_TILE;
    int n = 0;
    if (x->rows == 1) {
        for (; n < tiles; n++) multiply_one(w[n] + skip, groups, x, sums + n * stride);
        return;
    }
#if TP_WIDTH == 16
    for (; n + 2 <= tiles; n += 2)
        multiply_rows((const uint8_t *[]){ w[n] + skip, w[n + 1] + skip }, 2, 0, groups, x,
                      (float *[]){ sums + n * stride, sums + (n + 1) * stride });
#endif
    for (; n < tiles; n++)
        for (int u = 0; u < TP_UNITS; u++)
            multiply_rows((const uint8_t *[]){ w[n] + skip }, 1, u, groups, x, (float *[]){ sums + n * stride });
}
#endif
