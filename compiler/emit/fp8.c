/* e4m3fn numbers under float32 scales, bit for bit as compiler/formats/fp8.py.
 *
 * A row is blocks of 32: the scale, then the numbers. No state and no allocation.
 */
#include "blocks.h"

#pragma STDC FP_CONTRACT OFF

enum { OK = 0, NOT_FINITE = 3, TILE = 128 };
#define LARGEST 448.0f
#define SMALLEST_SCALE 0x1p-126f

static uint32_t bits_of(float value) { uint32_t bits; memcpy(&bits, &value, 4); return bits; }

/* The code nearest to a value, ties to even; what lies beyond 448 becomes 448. */
uint8_t tp_to_e4m3(float value) {
    float magnitude = value < 0.0f ? -value : value;
    magnitude = magnitude < LARGEST ? magnitude : LARGEST;
    uint32_t bits = bits_of(magnitude) & 0x7fffffff;
    uint32_t normal = ((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - (120 << 3);
    uint32_t small = bits_of(magnitude + 0x1p14f) - 0x46800000u;
    return (uint8_t)((magnitude < 0x1p-6f ? small : normal) | (bits_of(value) >> 24 & 0x80));
}

float tp_of_e4m3(uint8_t code) {
    uint32_t exponent = code >> 3 & 15, mantissa = code & 7;
    uint32_t bits = (exponent + 120) << 23 | mantissa << 20;
    float normal, small = (float)mantissa * 0x1p-9f;
    memcpy(&normal, &bits, 4);
    float magnitude = exponent ? normal : small;
    if ((code & 127) == 127) magnitude = __builtin_nanf("");
    return code & 128 ? -magnitude : magnitude;
}

/* The largest magnitude of `n` values, `stride` apart in rows of `width`; NaN and infinities come out as infinity. */
float tp_largest(const float *src, int64_t stride, int64_t rows, int64_t width) {
    uint32_t largest = 0;
    for (int64_t row = 0; row < rows; row++, src += stride)
        for (int64_t i = 0; i < width; i++) {
            uint32_t bits = bits_of(src[i]) & 0x7fffffff;
            largest = bits > largest ? bits : largest;
        }
    float value;
    largest = largest > 0x7f800000u ? 0x7f800000u : largest;
    memcpy(&value, &largest, 4);
    return value;
}

static float scale_of(float largest) {
    float scale = largest / LARGEST;
    return scale > SMALLEST_SCALE ? scale : SMALLEST_SCALE;
}

static void encode_block(const float *src, float scale, uint8_t *dst) {
    memcpy(dst, &scale, 4);
    for (int i = 0; i < E4M3_BLOCK; i++) dst[4 + i] = tp_to_e4m3(src[i] / scale);
}

static int encode_tile(const float *src, int64_t k, int64_t rows, int64_t width, float scale, uint8_t *dst) {
    for (int64_t row = 0; row < rows; row++)
        for (int64_t at = 0; at < width; at += E4M3_BLOCK)
            encode_block(src + row * k + at, scale, dst + (row * k + at) / E4M3_BLOCK * E4M3_BLOCK_BYTES);
    return OK;
}

/* Rows of `k` values, a multiple of 32, under one scale: `largest` becomes 448. */
int tp_encode_fp8(const float *src, uint8_t *dst, int64_t rows, int64_t k, float largest) {
    if (!(tp_largest(src, k, rows, k) <= 3.4028235e38f)) return NOT_FINITE;
    return encode_tile(src, k, rows, k, scale_of(largest), dst);
}

/* Rows of `k` values, a multiple of 32, each under a scale of its own. */
int tp_encode_fp8_rows(const float *src, uint8_t *dst, int64_t rows, int64_t k) {
    for (int64_t row = 0; row < rows; row++) {
        int64_t at = row * k;
        int status = tp_encode_fp8(src + at, dst + at / E4M3_BLOCK * E4M3_BLOCK_BYTES, 1, k, tp_largest(src + at, k, 1, k));
        if (status) return status;
    }
    return OK;
}

/* Whole tiles of 128 rows (the last may be cut) in blocks of 128 by 128, each under a scale of its own. */
int tp_encode_fp8_blocks(const float *src, uint8_t *dst, int64_t rows, int64_t k) {
    for (int64_t row = 0; row < rows; row += TILE)
        for (int64_t at = 0; at < k; at += TILE) {
            int64_t height = rows - row < TILE ? rows - row : TILE, width = k - at < TILE ? k - at : TILE;
            const float *tile = src + row * k + at;
            float largest = tp_largest(tile, k, height, width);
            if (!(largest <= 3.4028235e38f)) return NOT_FINITE;
            encode_tile(tile, k, height, width, scale_of(largest), dst + (row * k + at) / E4M3_BLOCK * E4M3_BLOCK_BYTES);
        }
    return OK;
}

void tp_decode_fp8(const uint8_t *src, float *dst, int64_t n) {
    for (int64_t at = 0; at < n; at += E4M3_BLOCK, src += E4M3_BLOCK_BYTES) {
        float scale;
        memcpy(&scale, src, 4);
        for (int i = 0; i < E4M3_BLOCK; i++) dst[at + i] = tp_of_e4m3(src[4 + i]) * scale;
    }
}
