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

#endif
