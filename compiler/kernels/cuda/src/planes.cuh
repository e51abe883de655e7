/* Values of a matrix in layout planes, four at a time, bit for bit as the format defines them.
 *
 * Defines, all from plane_geometry: K, BITS, and for plane 0 and 1 PLANEi_AT and PLANEi_ROW (bytes); E4M3 (codes are
 * e4m3 numbers under f32 scales); GROUP, SUPER, ZERO, SIGN (of the minimum); SCALES_AT, SCALES_ROW, SCALES_TILE (rows
 * that share one); D_BF16; D_AT, DMIN_AT, SUB_AT, SUBMIN_AT, ZEROS_AT (bytes in a row of scales, -1: not there). */
#ifndef PLANES_CUH
#define PLANES_CUH
#include "tapeout.cuh"

/* An e4m3 number: 1 sign, 4 exponent (bias 7), 3 fraction; 0x7f is NaN. The bits, moved to a half, are 2^-8 of it. */
TP_DEVICE float tp_e4m3(u32 code) {
    const float value = tp_f16((u16)((code & 0x80u) << 8 | (code & 0x7fu) << 7)) * 256.0f;
    return (code & 0x7fu) == 0x7fu ? __uint_as_float(0x7fc00000u) : value;
}

/* The codes of k .. k + 3 (k a multiple of 4), one a byte, less the planes' own packing. */
TP_DEVICE u32 tp_plane_codes4(const u8 *w, i64 row, int k) {
    const int line = k / 32, quad = k % 32 / 4;
    const u8 *first = w + PLANE0_AT + row * PLANE0_ROW;
#if BITS == 8
    return *(const u32 *)(first + line * 32 + quad * 4);
#elif BITS >= 4
    u32 codes = *(const u32 *)(first + line * 16 + quad % 4 * 4) >> (quad / 4 * 4) & 0x0f0f0f0fu;
#else
    u32 codes = *(const u32 *)(first + line * 8 + quad % 2 * 4) >> (quad / 2 * 2) & 0x03030303u;
#endif
#if BITS == 6
    const u8 *second = w + PLANE1_AT + row * PLANE1_ROW;
    codes |= (*(const u32 *)(second + line * 8 + quad % 2 * 4) >> (quad / 2 * 2) & 0x03030303u) << 4;
#elif BITS == 5 || BITS == 3
    const u8 *second = w + PLANE1_AT + row * PLANE1_ROW;
    codes |= (*(const u32 *)(second + line * 4) >> quad & 0x01010101u) << (BITS - 1);
#endif
#if BITS < 8
    return codes;
#endif
}

TP_DEVICE void tp_plane_decode4(const u8 *w, i64 row, int k, float *out) {
    const u32 codes = tp_plane_codes4(w, row, k);
    const u8 *scales = w + SCALES_AT + row / SCALES_TILE * SCALES_ROW;
#if E4M3
    const float scale = *(const float *)(scales + k / GROUP * 4);
    TP_UNROLL for (int j = 0; j < 4; j++) out[j] = __fmul_rn(tp_e4m3(codes >> (8 * j) & 0xffu), scale);
#else
    const u16 bits = *(const u16 *)(scales + D_AT + k / SUPER * 2);
    float scale = D_BF16 ? tp_bf16(bits) : tp_f16(bits), minimum = 0;
    int zero = ZERO;
    if (SUB_AT >= 0) scale = __fmul_rn(scale, (float)*(const i8 *)(scales + SUB_AT + k / GROUP));
    if (DMIN_AT >= 0) minimum = SIGN * tp_f16(*(const u16 *)(scales + DMIN_AT + k / SUPER * 2));
    if (SUBMIN_AT >= 0) minimum = __fmul_rn(minimum, (float)scales[SUBMIN_AT + k / GROUP]);
    if (ZEROS_AT >= 0) zero = scales[ZEROS_AT + k / GROUP];
    TP_UNROLL for (int j = 0; j < 4; j++) {
        const int code = BITS == 8 ? (int)(i8)(codes >> (8 * j)) : (int)(codes >> (8 * j) & 0xffu);
        out[j] = __fmul_rn(scale, (float)(code - zero));
        if (DMIN_AT >= 0) out[j] = __fadd_rn(out[j], minimum);
    }
#endif
}
#endif
