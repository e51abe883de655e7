/* The weight layout "tile16": tiles of 16 rows, one 32-bit lane a row. What a record of TP_FORMAT holds, and how to
 * decode it. Codes stand in 64-byte lines: byte 4 * row + j of the line of step s is element k = 4 * s + j of the row. */
#ifndef TAPEOUT_TILE16_H
#define TAPEOUT_TILE16_H
#include "simd.h"
#include "tapeout_cpu.h"

#define TP_CODES 0
#define TP_F32 1
#define TP_F16 2
#define TP_BF16 3
#define TP_E4M3 4
#define TP_E8M0 5
#define TP_OWN -1
#define TP_E2M1 1
#define TP_IQ4 2

/* (kind, bits, super-block, group, scale, sub-scales, minimum, zero, table)
 * kind: integer codes, or the type of an element; scale: the type of d, 0 without one (float32 scales of codes are one
 * a row of the weight); sub-scales: 1 int8, or their type; minimum: 1 stored as +m, 2 dmin * submin, subtracted;
 * zero: TP_OWN where every group stores its own (no format has sub-scales as well); table: what codes stand for. */
#define TP_TILE16_f32 (TP_F32, 32, 1, 1, 0, 0, 0, 0, 0)
#define TP_TILE16_f16 (TP_F16, 16, 1, 1, 0, 0, 0, 0, 0)
#define TP_TILE16_bf16 (TP_BF16, 16, 1, 1, 0, 0, 0, 0, 0)
#define TP_TILE16_fp8 (TP_E4M3, 8, 128, 128, TP_F32, 0, 0, 0, 0)
#define TP_TILE16_fp8_row (TP_E4M3, 8, 128, 128, TP_F32, 0, 0, 0, 0)
#define TP_TILE16_fp8_block128 (TP_E4M3, 8, 128, 128, TP_F32, 0, 0, 0, 0)
#define TP_TILE16_q4_0 (TP_CODES, 4, 32, 32, TP_F16, 0, 0, 8, 0)
#define TP_TILE16_q4_1 (TP_CODES, 4, 32, 32, TP_F16, 0, 1, 0, 0)
#define TP_TILE16_q5_0 (TP_CODES, 5, 32, 32, TP_F16, 0, 0, 16, 0)
#define TP_TILE16_q5_1 (TP_CODES, 5, 32, 32, TP_F16, 0, 1, 0, 0)
#define TP_TILE16_q8_0 (TP_CODES, 8, 32, 32, TP_F16, 0, 0, 128, 0)
#define TP_TILE16_q2_k (TP_CODES, 2, 256, 16, TP_F16, 1, 2, 0, 0)
#define TP_TILE16_q3_k (TP_CODES, 3, 256, 16, TP_F16, 1, 0, 4, 0)
#define TP_TILE16_q4_k (TP_CODES, 4, 256, 32, TP_F16, 1, 2, 0, 0)
#define TP_TILE16_q5_k (TP_CODES, 5, 256, 32, TP_F16, 1, 2, 0, 0)
#define TP_TILE16_q6_k (TP_CODES, 6, 256, 16, TP_F16, 1, 0, 32, 0)
#define TP_TILE16_iq4_nl (TP_CODES, 4, 32, 32, TP_F16, 0, 0, 128, TP_IQ4)
#define TP_TILE16_iq4_xs (TP_CODES, 4, 256, 32, TP_F16, 1, 0, 128, TP_IQ4)
#define TP_TILE16_mxfp4 (TP_CODES, 4, 32, 32, TP_E8M0, 0, 0, 12, TP_E2M1)
#define TP_TILE16_nvfp4 (TP_CODES, 4, 32, 16, TP_F32, TP_E4M3, 0, 12, TP_E2M1)
#define TP_TILE16_int4_g32 (TP_CODES, 4, 32, 32, TP_BF16, 0, 0, 8, 0)
#define TP_TILE16_int4_g64 (TP_CODES, 4, 64, 64, TP_BF16, 0, 0, 8, 0)
#define TP_TILE16_int4_g128 (TP_CODES, 4, 128, 128, TP_BF16, 0, 0, 8, 0)
#define TP_TILE16_int4_g32_zp (TP_CODES, 4, 32, 32, TP_BF16, 0, 0, TP_OWN, 0)
#define TP_TILE16_int4_g64_zp (TP_CODES, 4, 64, 64, TP_BF16, 0, 0, TP_OWN, 0)
#define TP_TILE16_int4_g128_zp (TP_CODES, 4, 128, 128, TP_BF16, 0, 0, TP_OWN, 0)
#define TP_TILE16_int4_g32_zp_f16 (TP_CODES, 4, 32, 32, TP_F16, 0, 0, TP_OWN, 0)
#define TP_TILE16_int4_g128_zp_f16 (TP_CODES, 4, 128, 128, TP_F16, 0, 0, TP_OWN, 0)
#define TP_TILE16_int8_g32 (TP_CODES, 8, 32, 32, TP_BF16, 0, 0, 128, 0)
#define TP_TILE16_int8_g128 (TP_CODES, 8, 128, 128, TP_BF16, 0, 0, 128, 0)

#define TP_PASTE_(a, b) a##b
#define TP_PASTE(a, b) TP_PASTE_(a, b)
#define TP_STRING_(a) #a
#define TP_STRING(a) TP_STRING_(a)
#define TP_APPLY(f, list) f list
#define TP_FIELD_KIND(kind, bits, super, group, scale, sub, min, zero, table) kind
#define TP_FIELD_BITS(kind, bits, super, group, scale, sub, min, zero, table) bits
#define TP_FIELD_SUPER(kind, bits, super, group, scale, sub, min, zero, table) super
#define TP_FIELD_GROUP(kind, bits, super, group, scale, sub, min, zero, table) group
#define TP_FIELD_SCALE(kind, bits, super, group, scale, sub, min, zero, table) scale
#define TP_FIELD_SUB(kind, bits, super, group, scale, sub, min, zero, table) sub
#define TP_FIELD_MIN(kind, bits, super, group, scale, sub, min, zero, table) min
#define TP_FIELD_ZERO(kind, bits, super, group, scale, sub, min, zero, table) zero
#define TP_FIELD_TABLE(kind, bits, super, group, scale, sub, min, zero, table) table
#define TP_THIS TP_PASTE(TP_TILE16_, TP_FORMAT)
#define TP_KIND TP_APPLY(TP_FIELD_KIND, TP_THIS)
#define TP_BITS TP_APPLY(TP_FIELD_BITS, TP_THIS)
#define TP_SUPER TP_APPLY(TP_FIELD_SUPER, TP_THIS)
#define TP_GROUP TP_APPLY(TP_FIELD_GROUP, TP_THIS)
#define TP_SCALE TP_APPLY(TP_FIELD_SCALE, TP_THIS)
#define TP_SUB TP_APPLY(TP_FIELD_SUB, TP_THIS)
#define TP_MIN TP_APPLY(TP_FIELD_MIN, TP_THIS)
#define TP_ZERO TP_APPLY(TP_FIELD_ZERO, TP_THIS)
#define TP_TABLE TP_APPLY(TP_FIELD_TABLE, TP_THIS)

#define TP_UNITS (TP_TILE / TP_WIDTH) /* vectors that make up the rows of a tile */

/* e4m3 numbers / 256: as float16, whose bias is 8 more, exponent and mantissa move up and the sign fills both bits
 * above them. */
TP_INLINE vf tile16_e4m3(const uint8_t *p) {
    vu16_memory bits = (__builtin_convertvector(*(const vi8_memory *)p, vu16_memory) << 7) & 0xbfff;
    return __builtin_convertvector((vf16_memory)bits, vf);
}

#if TP_KIND != TP_CODES
#define TP_HEAD_BYTES (TP_SCALE ? 4 * TP_TILE : 0) /* a record: float32 scales, where the format has them */
#define TP_LINE_BYTES (TP_TILE * TP_BITS / 8)
#define TP_TILE_BYTES(k) (((k) + TP_SUPER - 1) / TP_SUPER * TP_HEAD_BYTES + (k) * TP_LINE_BYTES)

/* Where the 16 rows of element k of a tile stand. */
TP_INLINE const uint8_t *tile16_line(const uint8_t *tile, int64_t k) {
    return tile + (k / TP_SUPER + 1) * TP_HEAD_BYTES + k * TP_LINE_BYTES;
}

/* Sixteen rows (or the eight of a unit) of one k, as float, to be multiplied by tile16_scale. */
TP_INLINE vf tile16_float(const uint8_t *p) {
#if TP_KIND == TP_F32
    return vf_load((const float *)p);
#elif TP_KIND == TP_F16
    return vf_from_f16(p);
#elif TP_KIND == TP_BF16
    return vf_from_bf16(p);
#else
    return tile16_e4m3(p);
#endif
}

/* The factor of a unit's rows around element k of a tile; with the 256 that is missing from e4m3. */
TP_INLINE vf tile16_scale(const uint8_t *tile, int64_t k, int unit) {
#if TP_SCALE
    const uint8_t *head = tile16_line(tile, k / TP_SUPER * TP_SUPER) - TP_HEAD_BYTES;
    return vf_load((const float *)head + unit * TP_WIDTH) * 256.0f;
#else
    (void)tile, (void)k, (void)unit;
    return vf_all(1.0f);
#endif
}

#else
#define TP_HALVES (TP_GROUP < 32 ? 32 / TP_GROUP : 1) /* groups in 32 elements, at least one */
#define TP_GROUPS (TP_SUPER / TP_GROUP)
#define TP_SCALE_BYTES (TP_SCALE == TP_F32 ? 0 : TP_SCALE == TP_E8M0 ? 16 : 32) /* a record */
#define TP_SUB_BYTES (TP_SUB ? (TP_MIN ? 32 : 16) : 0) /* a group */
#define TP_ZERO_BYTES (TP_ZERO == TP_OWN ? 16 : 0) /* a group */
#define TP_SUBS_AT (TP_SCALE_BYTES + (TP_MIN ? 32 : 0))
#define TP_HEAD_BYTES (TP_SUBS_AT + TP_GROUPS * (TP_SUB_BYTES + TP_ZERO_BYTES))
#define TP_CODE_BYTES (64 * TP_BITS) /* 32 elements of 16 rows */
#define TP_RECORD_BYTES (TP_HEAD_BYTES + TP_SUPER / 32 * TP_CODE_BYTES)
#define TP_TILE_HEAD (TP_SCALE == TP_F32 ? 64 : 0) /* scales of whole rows, before the records */
#define TP_TILE_BYTES(k) (TP_TILE_HEAD + (k) / TP_SUPER * TP_RECORD_BYTES) /* or where the record of element k starts */
#define TP_CODE_BITS (TP_TABLE == TP_IQ4 ? 8 : TP_TABLE == TP_E2M1 ? 5 : TP_BITS) /* of what stored codes stand for */

/* AVX2 multiplies magnitudes of 8 bits alone, so there such codes are signed bytes. */
#define TP_SIGNED (TP_WIDTH == 8 && TP_CODE_BITS == 8)
#define TP_CODE_ZERO (TP_SIGNED ? 0 : TP_ZERO)
#if TP_SIGNED
typedef int8_t tile16_code;
#else
typedef uint8_t tile16_code;
#endif

/* 32 elements of the rows of one unit. value = scale * (code - zero) + min, by half where groups are of 16; zero is
 * TP_CODE_ZERO, or the group's own. */
typedef struct tile16_group {
    vb codes[8]; /* by step */
    vf scale[TP_HALVES];
#if TP_ZERO == TP_OWN
    vf zero;
#endif
#if TP_MIN
    vf min[TP_HALVES];
#endif
} tile16_group;

#if TP_TABLE
#define TP_V(x) (uint8_t)((x) + TP_CODE_ZERO)
#if TP_TABLE == TP_E2M1 /* doubled */
#define TP_STANDS_FOR \
    TP_V(0), TP_V(1), TP_V(2), TP_V(3), TP_V(4), TP_V(6), TP_V(8), TP_V(12), \
    TP_V(0), TP_V(-1), TP_V(-2), TP_V(-3), TP_V(-4), TP_V(-6), TP_V(-8), TP_V(-12)
#else /* GGUF's IQ4_NL */
#define TP_STANDS_FOR \
    TP_V(-127), TP_V(-104), TP_V(-83), TP_V(-65), TP_V(-49), TP_V(-35), TP_V(-22), TP_V(-10), \
    TP_V(1), TP_V(13), TP_V(25), TP_V(38), TP_V(53), TP_V(69), TP_V(89), TP_V(113)
#endif
/* Looked up in each 16 bytes of a vector on their own. */
static const uint8_t tile16_table[64] = { TP_STANDS_FOR, TP_STANDS_FOR, TP_STANDS_FOR, TP_STANDS_FOR };

TP_INLINE vb tile16_look_up(vb codes) {
#if TP_WIDTH == 16
    return (vb)__builtin_ia32_pshufb512(vb_load(tile16_table), codes);
#else
    return (vb)__builtin_ia32_pshufb256(vb_load(tile16_table), codes);
#endif
}
#endif

/* Codes of one unit: `p` is the first line, at the unit's first row. */
TP_INLINE void tile16_codes(const uint8_t *p, vb codes[8]) {
#if TP_BITS == 8
    for (int s = 0; s < 8; s++) codes[s] = vb_load(p + 64 * s) ^ (TP_SIGNED ? (int8_t)0x80 : 0);
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
#if TP_TABLE
    for (int s = 0; s < 8; s++) codes[s] = tile16_look_up(codes[s]);
#endif
#endif
}

/* The scale d of a unit's rows; with e4m3 sub-scales, times the 256 that is missing from those. */
TP_INLINE vf tile16_d(const uint8_t *tile, const uint8_t *record, int unit) {
    (void)tile, (void)record;
#if TP_SCALE == TP_F32
    return vf_load((const float *)tile + TP_WIDTH * unit) * (TP_SUB == TP_E4M3 ? 256.0f : 1.0f);
#elif TP_SCALE == TP_E8M0
    /* half of 2^(byte - 127), as codes stand for doubled numbers: of bytes 0 and 1, which are subnormal, the second */
    vi byte = __builtin_convertvector(*(const vu8_memory *)(record + TP_WIDTH * unit), vi);
    return (vf)__builtin_elementwise_max((byte - 1) << 23, (byte + 1) << 21);
#elif TP_SCALE == TP_BF16
    return vf_from_bf16(record + 2 * TP_WIDTH * unit);
#else
    return vf_from_f16(record + 2 * TP_WIDTH * unit);
#endif
}

/* Decode elements 32 * i .. 32 * i + 31 of a record of a tile, rows TP_WIDTH * unit on. */
TP_INLINE void tile16_decode(const uint8_t *tile, const uint8_t *record, int i, int unit, tile16_group *out) {
    vf d = tile16_d(tile, record, unit);
#if TP_ZERO == TP_OWN
    out->zero = vf_from_u8(record + TP_SUBS_AT + TP_WIDTH * unit);
#endif
#if TP_MIN
    vf dmin = vf_from_f16(record + TP_SCALE_BYTES + 2 * TP_WIDTH * unit);
#endif
    for (int h = 0; h < TP_HALVES; h++) {
#if TP_SUB
        const uint8_t *sub = record + TP_SUBS_AT + (i * TP_HALVES + h) * TP_SUB_BYTES + TP_WIDTH * unit;
        out->scale[h] = d * (TP_SUB == TP_E4M3 ? tile16_e4m3(sub) : vf_from_i8(sub));
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
