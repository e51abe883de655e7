/* Codes that stand for the numbers of a table: mxfp4, nvfp4, IQ4; bit for bit as compiler/formats/fp4.py and iq4.py.
 *
 * No state and no allocation.
 */
#include "blocks.h"

#pragma STDC FP_CONTRACT OFF

enum { OK = 0, NOT_FINITE = 3, BLOCK = 32, GROUP = 16 };
#define SMALLEST_SCALE 0x1p-126f

static const int8_t tables[][16] = {
    [E2M1_TABLE] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12},
    [IQ4_TABLE] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113},
};

float tp_largest(const float *src, int64_t stride, int64_t rows, int64_t width);

static float of_bits(uint32_t bits) { float value; memcpy(&value, &bits, 4); return value; }

void tp_decode_table(const format *f, const uint8_t *src, float *dst) {
    parts p;
    tp_take(f, src, &p);
    _Float16 half;
    memcpy(&half, &p.d, 2);
    float d = f->wide ? of_bits(p.wide) : (float)half;
    const int8_t *table = tables[f->table];
    for (int g = 0; g < f->super / f->group; g++) {
        float sub = f->e4m3_sub ? tp_of_e4m3((uint8_t)p.sub[g]) : (float)p.sub[g];
        float scale = f->has_sub ? d * sub : d;
        for (int i = f->group * g; i < f->group * (g + 1); i++) dst[i] = scale * (float)table[p.codes[i]];
    }
}

/* The code nearest to a value, ties to even; what lies beyond 6 becomes 6. */
static inline uint8_t to_e2m1(float value) {
    float m = value < 0.0f ? -value : value;
    uint32_t bits;
    memcpy(&bits, &value, 4);
    int code = (m > 0.25f) + (m >= 0.75f) + (m > 1.25f) + (m >= 1.75f) + (m > 2.5f) + (m >= 3.5f) + (m > 5.0f);
    return (uint8_t)(code | (int)(bits >> 31 << 3));
}

static void pack_halves(const uint8_t *codes, uint8_t *dst) {
    for (int i = 0; i < BLOCK / 2; i++) dst[i] = (uint8_t)(codes[i] | codes[i + BLOCK / 2] << 4);
}

static void encode_mxfp4_block(const float *src, float largest, uint8_t *dst) {
    uint8_t codes[BLOCK];
    uint32_t bits;
    memcpy(&bits, &largest, 4);
    uint32_t exponent = bits >> 23 > 2 ? (bits >> 23) - 2 : 0;
    float factor = of_bits((254 - exponent) << 23);
    for (int i = 0; i < BLOCK; i++) codes[i] = to_e2m1(src[i] * factor);
    dst[0] = (uint8_t)exponent;
    pack_halves(codes, dst + 1);
}

int tp_encode_mxfp4(const float *src, uint8_t *dst, int64_t n) {
    for (int64_t at = 0; at < n; at += BLOCK, dst += MXFP4_BYTES) {
        float largest = tp_largest(src + at, BLOCK, 1, BLOCK);
        if (!(largest <= 3.4028235e38f)) return NOT_FINITE;
        encode_mxfp4_block(src + at, largest, dst);
    }
    return OK;
}

static void encode_nvfp4_block(const float *src, float scale, uint8_t *dst) {
    uint8_t codes[BLOCK];
    memcpy(dst, &scale, 4);
    for (int g = 0; g < BLOCK / GROUP; g++) {
        const float *x = src + GROUP * g;
        uint8_t sub = tp_to_e4m3(tp_largest(x, GROUP, 1, GROUP) / 6.0f / scale);
        float step = tp_of_e4m3(sub) * scale;
        for (int i = 0; i < GROUP; i++) codes[GROUP * g + i] = to_e2m1(step > 0.0f ? x[i] / step : 0.0f);
        dst[4 + g] = sub;
    }
    pack_halves(codes, dst + 4 + BLOCK / GROUP);
}

/* `n` values of a tensor of this largest magnitude, which becomes 448 times 6. */
int tp_encode_nvfp4(const float *src, uint8_t *dst, int64_t n, float largest) {
    float scale = largest / (448.0f * 6.0f);
    scale = scale > SMALLEST_SCALE ? scale : SMALLEST_SCALE;
    if (!(tp_largest(src, n, 1, n) <= 3.4028235e38f)) return NOT_FINITE;
    for (int64_t at = 0; at < n; at += BLOCK, dst += NVFP4_BYTES) encode_nvfp4_block(src + at, scale, dst);
    return OK;
}
