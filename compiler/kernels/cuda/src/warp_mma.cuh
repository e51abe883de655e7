/* Tensor core products of a warp: inline PTX with plain twins made of shuffles for TP_HOST. */
#ifndef WARP_MMA_CUH
#define WARP_MMA_CUH
#include "tapeout.cuh"

/* c += A B, A 16x16 and B 16x8 of f16, c f32. Lane 4g+t holds, as pairs along k: of A rows g (a0, a2) and g+8 (a1, a3)
 * at k 2t (a0, a1) and 2t+8 (a2, a3); of B column g at k 2t (b0) and 2t+8 (b1); of c row g (0, 1) and g+8 (2, 3) at
 * columns 2t and 2t+1. */
TP_DEVICE void tp_mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#ifdef TP_HOST
    const u32 a[4] = {a0, a1, a2, a3}, b[2] = {b0, b1};
    const int lane = (int)threadIdx.x % 32, g = lane / 4, t = lane % 4;
    for (int part = 0; part < 2; part++)
        for (int pair = 0; pair < 4; pair++) {
            u32 rows[2], columns[2];
            for (int i = 0; i < 2; i++) {
                rows[i] = __shfl_sync(TP_ALL, a[2 * part + i], g * 4 + pair);
                columns[i] = __shfl_sync(TP_ALL, b[part], (2 * t + i) * 4 + pair);
            }
            for (int i = 0; i < 4; i++)
                for (int shift = 0; shift < 32; shift += 16)
                    c[i] += tp_f16((u16)(rows[i / 2] >> shift)) * tp_f16((u16)(columns[i % 2] >> shift));
        }
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#endif
}

/* Transposes an 8x8 matrix of f16: lane 4g+t holds row g at columns 2t and 2t+1. */
TP_DEVICE u32 tp_transpose(u32 pair) {
#ifdef TP_HOST
    const int lane = (int)threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const u32 low = __shfl_sync(TP_ALL, pair, 2 * t * 4 + g / 2), high = __shfl_sync(TP_ALL, pair, (2 * t + 1) * 4 + g / 2);
    const int shift = g % 2 * 16;
    return (low >> shift & 0xffffu) | (high >> shift & 0xffffu) << 16;
#else
    u32 out;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(pair));
    return out;
#endif
}

/* Two floats as f16, the first in the low half. */
TP_DEVICE u32 tp_pack(float low, float high) {
#ifdef TP_HOST
    return (u32)tp_to_f16(low) | (u32)tp_to_f16(high) << 16;
#else
    u32 out;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
    return out;
#endif
}

/* 2^x to 2 ulp; 0 for minus infinity. */
TP_DEVICE float tp_exp2(float x) {
#ifdef TP_HOST
    return exp2f(x);
#else
    float out;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
    return out;
#endif
}

#endif
