/* Products of float tile16 weights with float32 activations, one FMA an element, in the order of k. The sum of a chunk,
 * times the scale of its record where the format has scales, is added to the sums of those before. */
#ifndef TAPEOUT_LINEAR_FLOAT_H
#define TAPEOUT_LINEAR_FLOAT_H
#include "tile16.h"

/* elements of k between two visits of a row's accumulator: 16 KiB of weights stay in L1; one record of scales */
#define TP_CHUNK (TP_SCALE ? TP_SUPER : 256)
#define TP_SIDE 0

typedef struct operand {
    const float *x; /* first row, first element of the chunk */
    int64_t k;      /* floats a row */
    float *weights; /* [TP_CHUNK][16], the chunk as float32 */
    int rows;
} operand;

TP_FN operand operand_of(const void *x, int64_t k, int64_t cap, int64_t k0, int64_t k1, int row, int rows, void *work) {
    (void)cap, (void)k1;
    return (operand){ (const float *)x + row * k + k0, k, work, rows };
}

/* sums[16] += scale of the record of element k0 * the sums of a chunk. */
TP_INLINE void add_chunk(float *sums, const vf sum[TP_UNITS], const uint8_t *tile, int64_t k0) {
    for (int u = 0; u < TP_UNITS; u++, sums += TP_WIDTH)
        vf_store(sums, vf_fma(sum[u], tile16_scale(tile, k0, u), vf_load(sums)));
}

/* `rows` rows of activations against a chunk of one tile: accumulators in registers. */
TP_INLINE void multiply_rows(const uint8_t *tile, int64_t k0, int64_t k, const operand *o, int t0, int rows,
                             float *sums) {
    enum { most = 12 };
    const float *w = o->weights, *x = o->x + t0 * o->k;
    const int64_t ldx = o->k;
    vf sum[most][TP_UNITS];
    for (int t = 0; t < rows; t++)
        for (int u = 0; u < TP_UNITS; u++) sum[t][u] = (vf){ 0 };
    for (int64_t i = 0; i < k; i++) {
        vf line[TP_UNITS];
        for (int u = 0; u < TP_UNITS; u++) line[u] = vf_load(w + i * TP_TILE + u * TP_WIDTH);
        for (int t = 0; t < rows; t++)
            for (int u = 0; u < TP_UNITS; u++) sum[t][u] = vf_fma(line[u], vf_all(x[t * ldx + i]), sum[t][u]);
    }
    for (int t = 0; t < rows; t++) add_chunk(sums + (t0 + t) * TP_TILE, sum[t], tile, k0);
}

/* One row of activations and `tiles` tiles, weights converted on the way: the decode step, bound by their reading. */
TP_INLINE void multiply_one(const uint8_t *const *w, int tiles, int64_t k0, int64_t k, const float *x, float *sums) {
    vf sum[2][TP_UNITS];
    const uint8_t *line[2];
    for (int n = 0; n < tiles; n++) {
        line[n] = tile16_line(w[n], k0);
        for (int u = 0; u < TP_UNITS; u++) sum[n][u] = (vf){ 0 };
    }
    for (int64_t i = 0; i < k; i++)
        for (int n = 0; n < tiles; n++) {
            __builtin_prefetch(line[n] + i * TP_LINE_BYTES + TP_AHEAD, 0, 3);
            for (int u = 0; u < TP_UNITS; u++) {
                vf value = tile16_float(line[n] + i * TP_LINE_BYTES + u * TP_WIDTH * TP_BITS / 8);
                sum[n][u] = vf_fma(value, vf_all(x[i]), sum[n][u]);
            }
        }
    for (int n = 0; n < tiles; n++) add_chunk(sums + n * TP_TILE, sum[n], w[n], k0);
}

/* Add the products of elements k0 .. k1 into sums[tile][rows][16] for `tiles` tiles. */
TP_FN void multiply(const uint8_t *const *w, int tiles, int64_t k0, int64_t k1, const operand *x, float *sums) {
    enum { block = TP_WIDTH == 16 ? 12 : 6 };
    int64_t k = k1 - k0;
    if (x->rows == 1) {
        int n = 0;
        for (; n + 2 <= tiles; n += 2) multiply_one(w + n, 2, k0, k, x->x, sums + n * TP_TILE);
        if (n < tiles) multiply_one(w + n, 1, k0, k, x->x, sums + n * TP_TILE);
        return;
    }
    for (int n = 0; n < tiles; n++, sums += x->rows * TP_TILE) {
        const uint8_t *source = tile16_line(w[n], k0);
        for (int64_t i = 0; i < k * TP_UNITS; i++)
            vf_store(x->weights + i * TP_WIDTH, tile16_float(source + i * TP_WIDTH * TP_BITS / 8));
        int t = 0;
        for (; t + block <= x->rows; t += block) multiply_rows(w[n], k0, k, x, t, block, sums);
        for (; t + 4 <= x->rows; t += 4) multiply_rows(w[n], k0, k, x, t, 4, sums);
        for (; t < x->rows; t++) multiply_rows(w[n], k0, k, x, t, 1, sums);
    }
}
#endif
