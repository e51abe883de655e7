/* Vectors of TP_WIDTH 32-bit lanes: 16 with AVX-512 VNNI, else 8 (AVX2). One lane is one weight row.
 * Compiler vector types instead of <immintrin.h>, which alone costs six times the compile time of a kernel. */
#ifndef TAPEOUT_SIMD_H
#define TAPEOUT_SIMD_H
#include <stdint.h>

#pragma STDC FP_CONTRACT OFF /* products and sums are fused only where the code says so: equal bytes on every target */

#ifdef __AVX512VNNI__
#define TP_WIDTH 16
/* x86-64-v4 otherwise prefers to split 512-bit vectors in two */
#define TP_WIDE __attribute__((min_vector_width(512)))
#else
#define TP_WIDTH 8
#define TP_WIDE
#endif
#define TP_FN static __attribute__((noinline)) TP_WIDE /* one loop nest a function: half the compile time */
#define TP_INLINE static inline __attribute__((always_inline)) TP_WIDE
#define TP_UNROLL _Pragma("clang loop unroll(full)") /* arrays of vectors are registers only without a loop */

typedef float vf __attribute__((vector_size(4 * TP_WIDTH)));
typedef int32_t vi __attribute__((vector_size(4 * TP_WIDTH)));
typedef int8_t vb __attribute__((vector_size(4 * TP_WIDTH)));
typedef uint8_t vub __attribute__((vector_size(4 * TP_WIDTH)));
typedef uint16_t vh __attribute__((vector_size(4 * TP_WIDTH)));
typedef vf vf_memory __attribute__((aligned(4), may_alias));
typedef vi vi_memory __attribute__((aligned(4), may_alias));
typedef vb vb_memory __attribute__((aligned(1), may_alias));
typedef _Float16 vf16_memory __attribute__((vector_size(2 * TP_WIDTH), aligned(2), may_alias));
typedef uint16_t vu16_memory __attribute__((vector_size(2 * TP_WIDTH), aligned(2), may_alias));
typedef int8_t vi8_memory __attribute__((vector_size(TP_WIDTH), aligned(1), may_alias));
typedef uint8_t vu8_memory __attribute__((vector_size(TP_WIDTH), aligned(1), may_alias));

TP_INLINE vf vf_all(float x) { return x - (vf){ 0 }; } /* - 0 is folded away, + 0 is not: it changes -0 */
TP_INLINE vi vi_all(int32_t x) { return (vi){ 0 } + x; }
TP_INLINE vf vf_load(const float *p) { return *(const vf_memory *)p; }
TP_INLINE void vf_store(float *p, vf x) { *(vf_memory *)p = x; }
TP_INLINE vb vb_load(const void *p) { return *(const vb_memory *)p; }
TP_INLINE vf vf_from_int(vi x) { return __builtin_convertvector(x, vf); }
TP_INLINE vf vf_from_f16(const void *p) { return __builtin_convertvector(*(const vf16_memory *)p, vf); }
TP_INLINE vf vf_from_bf16(const void *p) { return (vf)(__builtin_convertvector(*(const vu16_memory *)p, vi) << 16); }
TP_INLINE vf vf_from_i8(const void *p) { return __builtin_convertvector(*(const vi8_memory *)p, vf); }
TP_INLINE vf vf_from_u8(const void *p) { return __builtin_convertvector(*(const vu8_memory *)p, vf); }
TP_INLINE vf vf_fma(vf a, vf b, vf c) { return __builtin_elementwise_fma(a, b, c); }

/* Shift every byte left by n (right when negative); bits of a neighbour byte come in and must be masked away. */
TP_INLINE vb vb_shift(vb x, int n) { return n >= 0 ? (vb)((vh)x << n) : (vb)((vh)x >> -n); }

/* e^x within 2 ulp for |x| <= 87, saturating beyond: Cody-Waite reduction and the Taylor polynomial of degree 7. */
TP_INLINE vf vf_exp(vf x) {
    x = __builtin_elementwise_min(__builtin_elementwise_max(x, vf_all(-87.0f)), vf_all(87.0f));
    vf n = __builtin_elementwise_roundeven(x * 1.44269504f);
    vf r = vf_fma(n, vf_all(-0.693359375f), x);
    r = vf_fma(n, vf_all(2.12194440e-4f), r);
    vf p = vf_all(1.0f / 5040);
    p = vf_fma(p, r, vf_all(1.0f / 720));
    p = vf_fma(p, r, vf_all(1.0f / 120));
    p = vf_fma(p, r, vf_all(1.0f / 24));
    p = vf_fma(p, r, vf_all(1.0f / 6));
    p = vf_fma(p, r, vf_all(0.5f));
    p = vf_fma(p, r, vf_all(1.0f));
    p = vf_fma(p, r, vf_all(1.0f));
    return (vf)((vi)p + (__builtin_convertvector(n, vi) << 23));
}
#endif
