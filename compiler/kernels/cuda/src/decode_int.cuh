/* Integer codes of the "planes" layout: what a lane's unit of UNIT consecutive k looks like in registers.
 *
 * A unit is 32 k (16 with 8-bit codes). Quad q is the word whose byte j is the code of k = 4 q + j, so that one dp4a
 * takes four k. Planes: 4-bit word i holds quad i in its low and quad i + 4 in its high nibbles; 2-bit quad q stands in
 * word q % 2 at bits 2 (q / 2) of each byte; 1-bit quad q at bit q of each byte. */
#ifndef DECODE_INT_CUH
#define DECODE_INT_CUH
#include "tapeout.cuh"

#define QUADS (UNIT / 4)

/* The bits `mask` of each byte, moved from bit `from` to bit `to`. */
TP_DEVICE u32 tp_bits(u32 word, int from, int to, u32 mask) {
    return (from > to ? word >> (from - to) : word << (to - from)) & mask;
}

/* p0 and p1: this lane's bytes of the first and the second plane. */
TP_DEVICE void tp_quads(u32 (&quad)[QUADS], const u8 *p0, const u8 *p1) {
#if BITS == 8
    const uint4 w = *(const uint4 *)p0;
    quad[0] = w.x, quad[1] = w.y, quad[2] = w.z, quad[3] = w.w;
#elif BITS >= 4
    const uint4 w = *(const uint4 *)p0;
    const u32 words[4] = { w.x, w.y, w.z, w.w };
    TP_UNROLL for (int q = 0; q < 8; q++) quad[q] = tp_bits(words[q % 4], q / 4 * 4, 0, 0x0f0f0f0fu);
#if BITS == 6
    const uint2 high = *(const uint2 *)p1;
    TP_UNROLL for (int q = 0; q < 8; q++) quad[q] |= tp_bits(q % 2 ? high.y : high.x, q / 2 * 2, 4, 0x30303030u);
#elif BITS == 5
    const u32 high = *(const u32 *)p1;
    TP_UNROLL for (int q = 0; q < 8; q++) quad[q] |= tp_bits(high, q, 4, 0x10101010u);
#endif
#else
    const uint2 w = *(const uint2 *)p0;
    TP_UNROLL for (int q = 0; q < 8; q++) quad[q] = tp_bits(q % 2 ? w.y : w.x, q / 2 * 2, 0, 0x03030303u);
#if BITS == 3
    const u32 high = *(const u32 *)p1;
    TP_UNROLL for (int q = 0; q < 8; q++) quad[q] |= tp_bits(high, q, 2, 0x04040404u);
#endif
#endif
}

/* Quantizes the group of 32 that 8 neighbouring lanes hold: absmax / 127, to nearest even. A NaN or an infinity makes
 * the scale NaN. v becomes what is left over. */
TP_DEVICE void quantize(float4 &v, u32 &codes, float &scale, i32 &half_sum) {
    u32 top = 0;
    const float in[4] = { v.x, v.y, v.z, v.w };
    TP_UNROLL for (int i = 0; i < 4; i++) top = max(top, __float_as_uint(in[i]) & 0x7fffffffu);
    TP_UNROLL for (int lane = 1; lane < 8; lane *= 2) top = max(top, __shfl_xor_sync(TP_ALL, top, lane));
    const float most = __uint_as_float(top);
    const bool usable = most > 1e-35f && most <= 3.4028235e38f;
    const float inverse = usable ? 127.0f / most : 0.0f;
    scale = most - most == 0.0f ? most / 127.0f : most - most;
    codes = 0, half_sum = 0;
    float rest[4];
    TP_UNROLL for (int i = 0; i < 4; i++) {
        const i32 code = usable ? __float2int_rn(in[i] * inverse) : 0;
        codes |= (u32)(code & 255) << (8 * i);
        half_sum += code;
        rest[i] = in[i] - (float)code * scale;
    }
    v = make_float4(rest[0], rest[1], rest[2], rest[3]);
    half_sum += __shfl_xor_sync(TP_ALL, half_sum, 1);
    half_sum += __shfl_xor_sync(TP_ALL, half_sum, 2);
}

/* Where the four elements from 4 p on stand, in pieces of 4: a lane's unit is cut so that a warp reads 32 neighbours. */
TP_DEVICE int x_piece(int p) {
    const int unit = p / (UNIT / 4), inside = p % (UNIT / 4);
    return ((unit / 32 * (UNIT / 16) + inside / 4) * 32 + unit % 32) * 4 + inside % 4;
}

TP_DEVICE void stage_piece(u8 *shared, int m, int p, bool live, float4 v) {
    TP_UNROLL for (int t = 0; t < TERMS; t++) {
        u32 codes;
        float scale;
        i32 half_sum;
        quantize(v, codes, scale, half_sum);
        const i32 other = __shfl_xor_sync(TP_ALL, half_sum, 4);
        if (!live) continue;
        const int column = m * TERMS + t;
        ((u32 *)(shared + X_AT + column * X_COLUMN))[x_piece(p)] = codes;
        if (p % 8 == 0) {
            const i32 side = GROUP == 16 ? (half_sum & 0xffff) | other << 16 : half_sum + other;
            uint2 both;
            both.x = __float_as_uint(scale), both.y = (u32)side;
            ((uint2 *)(shared + X_SIDES))[column * (K / 32) + p / 8] = both;
        }
    }
}

/* Byte `index` bytes into what this stage uses of a scale array of row j. */
TP_DEVICE const u8 *scale_at(const u8 *slot, int j, int array, int chunk, int index) {
    return slot + STAGE_SCALES + j * SCALE_SLOTS + scale_slot(array) + ((SCALE_AT[array] + chunk * SCALE_PIECE[array]) & 15)
           + index;
}

TP_DEVICE float half_at(const u8 *p) { return SCALE_BF16 ? tp_bf16(*(const u16 *)p) : tp_f16(*(const u16 *)p); }

TP_DEVICE void add_unit(float (&sum)[VALUES], const u8 *shared, const u8 *slot, int chunk, int u, int lane) {
    const int local = u * 32 + lane, unit = chunk * 32 * STEPS + local;
    if (K % STAGE_K && unit >= UNITS) return;
    u32 in[COLUMNS][QUADS];
    float in_scale[COLUMNS];
    [[maybe_unused]] float in_sum[COLUMNS];
    i32 side[COLUMNS];
    TP_UNROLL for (int c = 0; c < COLUMNS; c++) {
        const uint4 *codes = (const uint4 *)(shared + X_AT + c * X_COLUMN) + unit / 32 * (UNIT / 16) * 32 + unit % 32;
        TP_UNROLL for (int h = 0; h < UNIT / 16; h++) {
            const uint4 v = codes[h * 32];
            in[c][4 * h] = v.x, in[c][4 * h + 1] = v.y, in[c][4 * h + 2] = v.z, in[c][4 * h + 3] = v.w;
        }
        const uint2 both = ((const uint2 *)(shared + X_SIDES))[c * (K / 32) + unit * UNIT / 32];
        in_scale[c] = __uint_as_float(both.x);
        side[c] = (i32)both.y;
        in_sum[c] = in_scale[c] * (float)side[c];
    }
    TP_UNROLL for (int j = 0; j < ITEM_ROWS; j++) {
        u32 quad[QUADS];
        tp_quads(quad, slot + j * ROW_PLANE0 + local * PLANE0_UNIT, slot + STAGE_PLANE1 + j * ROW_PLANE1 + local * PLANE1_UNIT);
        const float d = half_at(scale_at(slot, j, 0, chunk, local * UNIT / SUPER * 2));
#if HAS_MIN
        const float dmin = half_at(scale_at(slot, j, 1, chunk, local * UNIT / SUPER * 2));
#endif
#if HAS_SUB
        constexpr int sub_array = 1 + HAS_MIN;
#if GROUP == 16
        const u32 subs = *(const u16 *)scale_at(slot, j, sub_array, chunk, local * 2);
        const i32 sub0 = (i32)(i8)subs, sub1 = (i32)(i8)(subs >> 8);
#else
        const i32 sub0 = *scale_at(slot, j, sub_array, chunk, local * UNIT / GROUP);
#endif
#if HAS_MIN && GROUP == 16
        const u32 mins = *(const u16 *)scale_at(slot, j, sub_array + 1, chunk, local * 2);
        const i32 min0 = (i32)(mins & 255), min1 = (i32)(mins >> 8);
#elif HAS_MIN
        const float minimum = dmin * (float)*scale_at(slot, j, sub_array + 1, chunk, local * UNIT / GROUP);
#endif
#endif
#if HAS_ZEROS
        const i32 zero = *scale_at(slot, j, 1, chunk, local * UNIT / GROUP);
#else
        constexpr i32 zero = ZERO;
#endif
        TP_UNROLL for (int c = 0; c < COLUMNS; c++) {
            float &total = sum[c / TERMS * ITEM_ROWS + j];
#if GROUP == 16
            const i32 low = (i32)(i16)side[c], high = side[c] >> 16;
            i32 dot0 = -zero * low, dot1 = -zero * high;
            TP_UNROLL for (int q = 0; q < 4; q++) {
                dot0 = tp_dp4a(quad[q], in[c][q], dot0);
                dot1 = tp_dp4a(quad[q + 4], in[c][q + 4], dot1);
            }
            total = fmaf(d, in_scale[c] * (float)(dot0 * sub0 + dot1 * sub1), total);
#if HAS_MIN
            total = fmaf(MIN_SIGN * dmin, in_scale[c] * (float)(min0 * low + min1 * high), total);
#endif
#else
            i32 dot = -zero * side[c];
            TP_UNROLL for (int q = 0; q < QUADS; q++) dot = tp_dp4a(quad[q], in[c][q], dot);
#if HAS_SUB
            dot *= sub0;
#endif
            total = fmaf(d, in_scale[c] * (float)dot, total);
#if HAS_MIN && HAS_SUB
            total = fmaf(MIN_SIGN * minimum, in_sum[c], total);
#elif HAS_MIN
            total = fmaf(MIN_SIGN * dmin, in_sum[c], total);
#endif
#endif
        }
    }
}

TP_DEVICE void add_stage(float (&sum)[VALUES], const u8 *shared, const u8 *slot, const float *, const float *, int chunk,
                         int lane) {
    TP_UNROLL for (int u = 0; u < STEPS; u++) add_unit(sum, shared, slot, chunk, u, lane);
}

#endif
