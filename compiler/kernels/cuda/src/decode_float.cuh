/* Float codes: the UNIT elements in a lane's 16 bytes, as float. */
#ifndef DECODE_FLOAT_CUH
#define DECODE_FLOAT_CUH
#include "tapeout.cuh"

#if ELEMENT == TP_F8
#define ELEMENT_SCALE 256.0f
#else
#define ELEMENT_SCALE 1.0f
#endif

/* Elements / ELEMENT_SCALE. The exponent of an e4m3 is put into that of an f16, which is off by 2^8 and exact for
 * subnormals too; its NaN (0x7f) reads as 480, and checkpoints hold none. */
TP_DEVICE void tp_elements(float (&value)[UNIT], const u8 *p) {
    const uint4 w = *(const uint4 *)p;
    const u32 words[4] = { w.x, w.y, w.z, w.w };
    TP_UNROLL for (int i = 0; i < 4; i++) {
#if ELEMENT == TP_F32
        value[i] = __uint_as_float(words[i]);
#elif ELEMENT == TP_BF16
        value[2 * i] = __uint_as_float(words[i] << 16);
        value[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
#elif ELEMENT == TP_F16
        value[2 * i] = tp_f16((u16)words[i]);
        value[2 * i + 1] = tp_f16((u16)(words[i] >> 16));
#else
        const u32 even = words[i] << 8, odd = words[i];
        const u32 even16 = (even >> 1 & 0x3f803f80u) | (even & 0x80008000u);
        const u32 odd16 = (odd >> 1 & 0x3f803f80u) | (odd & 0x80008000u);
        value[4 * i] = tp_f16((u16)even16);
        value[4 * i + 1] = tp_f16((u16)odd16);
        value[4 * i + 2] = tp_f16((u16)(even16 >> 16));
        value[4 * i + 3] = tp_f16((u16)(odd16 >> 16));
#endif
    }
}

#endif
