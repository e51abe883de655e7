/* What rotates queries and keys: angles, and how qkv is read. FACTOR, LDX, Q_COL, K_COL and V_COL are the kernel's. */
#ifndef ROTATE_CUH
#define ROTATE_CUH
#include "rows.cuh"

/* Sine and cosine of an angle of up to 2^30, to 1 ulp: the turn is taken off in double, the rest are short series. */
TP_DEVICE float2 sine_cosine(float angle) {
    const double turns = rint((double)angle * 0.63661977236758134308);
    const float r = (float)fma(-turns, 6.123233995736766e-17, fma(-turns, 1.5707963267948966, (double)angle));
    const float z = r * r;
    float s = fmaf(z, 2.7557319e-6f, -1.9841270e-4f), c = fmaf(z, -2.7557319e-7f, 2.4801587e-5f);
    s = fmaf(s, z, 8.3333333e-3f), c = fmaf(c, z, -1.3888889e-3f);
    s = fmaf(s, z, -1.6666667e-1f), c = fmaf(c, z, 4.1666667e-2f);
    s = fmaf(s * z, r, r), c = fmaf(c, z, -0.5f);
    c = fmaf(c, z, 1.0f);
    const int quarter = (int)(i64)turns & 3;
    const float sine = quarter & 1 ? c : s, cosine = quarter & 1 ? s : c;
    return make_float2(quarter & 2 ? -sine : sine, (quarter + 1) & 2 ? -cosine : cosine);
}

/* What a pair is rotated by at a position: sine and cosine, times FACTOR. */
TP_DEVICE float2 turn_of(int position, float inv_freq) {
    const float2 turn = sine_cosine(__fmul_rn((float)position, inv_freq));
    return make_float2(turn.x * FACTOR, turn.y * FACTOR);
}

/* Two neighbours of a row of qkv. */
TP_DEVICE float2 read2(const float *p) {
#ifdef TP_HOST
    return make_float2(p[0], p[1]);
#else
    float2 v;
    if constexpr (LDX % 2 == 0 && Q_COL % 2 == 0 && K_COL % 2 == 0 && V_COL % 2 == 0)
        asm volatile("ld.global.cg.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(p) : "memory");
    else v = make_float2(tp_load(p), tp_load(p + 1));
    return v;
#endif
}

#endif
