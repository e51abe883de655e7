/* The weight layout "tile16": tiles of 16 rows, one 32-bit lane a row. What a record of TP_FORMAT holds, and how to
 * decode it. Codes stand in 64-byte lines: byte 4 * row + j of the line of step s is element k = 4 * s + j of the row. */
#ifndef TAPEOUT_TILE16_H
#define TAPEOUT_TILE16_H
#include "simd.h"
#include "tapeout_cpu.h"

/* (kind, bits, super-block, group, sub-scales, minimum, zero)
 * kind: 0 quantized, 1 f32, 2 f16, 3 bf16; minimum: 1 stored as +m, 2 dmin * submin, subtracted. */
#define TP_TILE16_f32 (1, 32, 1, 1, 0, 0, 0)
#define TP_TILE16_f16 (2, 16, 1, 1, 0, 0, 0)
#define TP_TILE16_bf16 (3, 16, 1, 1, 0, 0, 0)
#define TP_TILE16_q4_0 (0, 4, 32, 32, 0, 0, 8)
#define TP_TILE16_q4_1 (0, 4, 32, 32, 0, 1, 0)
#define TP_TILE16_q5_0 (0, 5, 32, 32, 0, 0, 16)
#define TP_TILE16_q5_1 (0, 5, 32, 32, 0, 1, 0)
#define TP_TILE16_q8_0 (0, 8, 32, 32, 0, 0, 128)
#define TP_TILE16_q2_k (0, 2, 256, 16, 1, 2, 0)
#define TP_TILE16_q3_k (0, 3, 256, 16, 1, 0, 4)
#define TP_TILE16_q4_k (0, 4, 256, 32, 1, 2, 0)
#define TP_TILE16_q5_k (0, 5, 256, 32, 1, 2, 0)
#define TP_TILE16_q6_k (0, 6, 256, 16, 1, 0, 32)

#define TP_PASTE_(a, b) a##b
#define TP_PASTE(a, b) TP_PASTE_(a, b)
#define TP_STRING_(a) #a
#define TP_STRING(a) TP_STRING_(a)
#define TP_APPLY(f, list) f list
#define TP_FIELD_KIND(kind, bits, super, group, sub, min, zero) kind
#define TP_FIELD_BITS(kind, bits, super, group, sub, min, zero) bits
#define TP_FIELD_SUPER(kind, bits, super, group, sub, min, zero) super
#define TP_FIELD_GROUP(kind, bits, super, group, sub, min, zero) group
#define TP_FIELD_SUB(kind, bits, super, group, sub, min, zero) sub
#define TP_FIELD_MIN(kind, bits, super, group, sub, min, zero) min
#define TP_FIELD_ZERO(kind, bits, super, group, sub, min, zero) zero
#define TP_THIS TP_PASTE(TP_TILE16_, TP_FORMAT)
#define TP_KIND TP_APPLY(TP_FIELD_KIND, TP_THIS)
#define TP_BITS TP_APPLY(TP_FIELD_BITS, TP_THIS)
#define TP_SUPER TP_APPLY(TP_FIELD_SUPER, TP_THIS)
#define TP_GROUP TP_APPLY(TP_FIELD_GROUP, TP_THIS)
#define TP_SUB TP_APPLY(TP_FIELD_SUB, TP_THIS)
#define TP_MIN TP_APPLY(TP_FIELD_MIN, TP_THIS)
#define TP_ZERO TP_APPLY(TP_FIELD_ZERO, TP_THIS)

#define TP_UNITS (TP_TILE / TP_WIDTH) /* vectors that make up the rows of a tile */

#if TP_KIND
#define TP_TILE_BYTES(k) ((k) * TP_TILE * TP_BITS / 8)

/* Sixteen rows (or the eight of a unit) of one k, as float. */
TP_INLINE vf tile16_float(const uint8_t *p) {
#if TP_KIND == 1
    return vf_load((const float *)p);
#elif TP_KIND == 2
    return vf_from_f16(p);
#else
    return vf_from_bf16(p);
#endif
}

#else
#define TP_HALVES (32 / TP_GROUP) /* groups in 32 elements */
#define TP_GROUPS (TP_SUPER / TP_GROUP)
#define TP_SUB_BYTES (TP_SUB ? (TP_MIN ? 32 : 16) : 0) /* a group */
#define TP_HEAD_BYTES ((TP_MIN ? 64 : 32) + TP_GROUPS * TP_SUB_BYTES)
#define TP_CODE_BYTES (64 * TP_BITS) /* 32 elements of 16 rows */
#define TP_RECORD_BYTES (TP_HEAD_BYTES + TP_SUPER / 32 * TP_CODE_BYTES)
#define TP_TILE_BYTES(k) ((k) / TP_SUPER * TP_RECORD_BYTES)

/* 32 elements of the rows of one unit. value = scale * (code - TP_ZERO) + min, by half where groups are of 16. */
typedef struct tile16_group {
    vb codes[8]; /* by step */
    vf scale[TP_HALVES];
#if TP_MIN
    vf min[TP_HALVES];
#endif
} tile16_group;

/* Codes of one unit: `p` is the first line, at the unit's first row. */
TP_INLINE void tile16_codes(const uint8_t *p, vb codes[8]) {
#if TP_BITS == 8
    for (int s = 0; s < 8; s++) codes[s] = vb_load(p + 64 * s);
#else
    for (int s = 0; s < 8; s++) codes[s] = (vb){ 0 };
#if TP_BITS >= 4
    for (int s = 0; s < 4; s++) {
        vb line = vb_load(p + 64 * s);
        codes[s] = line & 0x0f;
        codes[s + 4] = vb_shift(line, -4) & 0x0f;
    }
    p += 256;
#endif
#if TP_BITS == 2 || TP_BITS == 3 || TP_BITS == 6
    enum { low = TP_BITS == 6 ? 4 : 0 };
    for (int s = 0; s < 8; s++) codes[s] |= vb_shift(vb_load(p + 64 * (s & 1)), low - 2 * (s >> 1)) & (3 << low);
    p += 128;
#endif
#if TP_BITS == 3 || TP_BITS == 5
    vb line = vb_load(p);
    for (int s = 0; s < 8; s++) codes[s] |= vb_shift(line, TP_BITS - 1 - s) & (1 << (TP_BITS - 1));
#endif
#endif
}

/* Decode elements 32 * i .. 32 * i + 31 of a record, rows TP_WIDTH * unit on. */
TP_INLINE void tile16_decode(const uint8_t *record, int i, int unit, tile16_group *out) {
    vf d = vf_from_f16(record + 2 * TP_WIDTH * unit);
#if TP_MIN
    vf dmin = vf_from_f16(record + 32 + 2 * TP_WIDTH * unit);
#endif
    for (int h = 0; h < TP_HALVES; h++) {
#if TP_SUB
        const uint8_t *sub = record + (TP_MIN ? 64 : 32) + (i * TP_HALVES + h) * TP_SUB_BYTES + TP_WIDTH * unit;
        out->scale[h] = d * vf_from_i8(sub);
#if TP_MIN == 2
        out->min[h] = -(dmin * vf_from_u8(sub + 16));
#endif
#else
        out->scale[h] = d;
#if TP_MIN == 1
        out->min[h] = dmin;
#endif
#endif
    }
    tile16_codes(record + TP_HEAD_BYTES + i * TP_CODE_BYTES + 4 * TP_WIDTH * unit, out->codes);
}
#endif
#endif
