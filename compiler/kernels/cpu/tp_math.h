/* Vector and scalar mathematics of the kernels. No libm: results are the same on every machine. */
#ifndef TP_MATH_H
#define TP_MATH_H
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define TP_INLINE static inline __attribute__((always_inline))

static inline int tp_min(int a, int b) { return a < b ? a : b; }
static inline int tp_max(int a, int b) { return a > b ? a : b; }
static inline int tp_ceil_div(int a, int b) { return (a + b - 1) / b; }
static inline float tp_sqrt(float x) { return _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(x))); }

/* Sum of 8 lanes, always in the same order. */
TP_INLINE float tp_sum8(__m256 x) {
    __m128 a = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    a = _mm_add_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_add_ss(a, _mm_movehdup_ps(a)));
}

TP_INLINE float tp_max8(__m256 x) {
    __m128 a = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    a = _mm_max_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_max_ss(a, _mm_movehdup_ps(a)));
}

/* Mask of the first n lanes, 0 <= n <= 8. */
TP_INLINE __m256i tp_mask8(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

#define TP_EXP_LOW (-87.33654f) /* e^x is subnormal below; it is taken as 0 */
#define TP_EXP_HIGH 88.37626f

/* exp, relative error below 2e-7; 0 below TP_EXP_LOW, clamped at TP_EXP_HIGH, NaN stays NaN. 2^n times a polynomial
 * of degree 7 in r = x - n ln 2, |r| <= ln 2 / 2. */
TP_INLINE __m256 tp_exp8(__m256 x) {
    const __m256 low = _mm256_set1_ps(TP_EXP_LOW);
    const __m256 zero = _mm256_cmp_ps(x, low, _CMP_LT_OQ);
    const __m256 t = _mm256_max_ps(low, _mm256_min_ps(_mm256_set1_ps(TP_EXP_HIGH), x));
    const __m256 n = _mm256_round_ps(_mm256_mul_ps(t, _mm256_set1_ps(1.44269504f)), 8);
    __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693145752f), t);
    r = _mm256_fnmadd_ps(n, _mm256_set1_ps(1.42860682e-6f), r);
    __m256 p = _mm256_fmadd_ps(_mm256_set1_ps(1.0f / 5040), r, _mm256_set1_ps(1.0f / 720));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 120));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 24));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 6));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(0.5f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f));
    const __m256i power = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
    p = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), power));
    return _mm256_andnot_ps(zero, p);
}

/* 1 / (1 + e^-x). */
TP_INLINE __m256 tp_sigmoid8(__m256 x) {
    const __m256 one = _mm256_set1_ps(1.0f);
    return _mm256_div_ps(one, _mm256_add_ps(one, tp_exp8(_mm256_sub_ps(_mm256_setzero_ps(), x))));
}

TP_INLINE __m256 tp_silu8(__m256 x) { return _mm256_mul_ps(x, tp_sigmoid8(x)); }

/* x/2 (1 + tanh u) = x sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3). */
TP_INLINE __m256 tp_gelu_tanh8(__m256 x) {
    const __m256 square = _mm256_mul_ps(x, x);
    const __m256 inner = _mm256_fmadd_ps(square, _mm256_set1_ps(0.0713548162726f), _mm256_set1_ps(1.59576912161f));
    return _mm256_mul_ps(x, tp_sigmoid8(_mm256_mul_ps(x, inner)));
}

#ifdef __AVX512F__
/* The 16-lane twins compute the same operations, hence the same bits. */
TP_INLINE __m512 tp_exp16(__m512 x) {
    const __m512 low = _mm512_set1_ps(TP_EXP_LOW);
    const __mmask16 keep = _mm512_cmp_ps_mask(x, low, _CMP_NLT_UQ);
    const __m512 t = _mm512_max_ps(low, _mm512_min_ps(_mm512_set1_ps(TP_EXP_HIGH), x));
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(t, _mm512_set1_ps(1.44269504f)), 8);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693145752f), t);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(1.42860682e-6f), r);
    __m512 p = _mm512_fmadd_ps(_mm512_set1_ps(1.0f / 5040), r, _mm512_set1_ps(1.0f / 720));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 120));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 24));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 6));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.5f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    const __m512i power = _mm512_slli_epi32(_mm512_cvtps_epi32(n), 23);
    return _mm512_maskz_mov_ps(keep, _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(p), power)));
}

TP_INLINE __m512 tp_sigmoid16(__m512 x) {
    const __m512 one = _mm512_set1_ps(1.0f);
    return _mm512_div_ps(one, _mm512_add_ps(one, tp_exp16(_mm512_sub_ps(_mm512_setzero_ps(), x))));
}

TP_INLINE __m512 tp_silu16(__m512 x) { return _mm512_mul_ps(x, tp_sigmoid16(x)); }

TP_INLINE __m512 tp_gelu_tanh16(__m512 x) {
    const __m512 square = _mm512_mul_ps(x, x);
    const __m512 inner = _mm512_fmadd_ps(square, _mm512_set1_ps(0.0713548162726f), _mm512_set1_ps(1.59576912161f));
    return _mm512_mul_ps(x, tp_sigmoid16(_mm512_mul_ps(x, inner)));
}
#endif

/* tanh x = 2 sigmoid(2x) - 1; absolute error below 2e-7. */
TP_INLINE __m256 tp_tanh8(__m256 x) {
    const __m256 s = tp_sigmoid8(_mm256_add_ps(x, x));
    return _mm256_sub_ps(_mm256_add_ps(s, s), _mm256_set1_ps(1.0f));
}

static inline double tp_round(double x) { return _mm_cvtsd_f64(_mm_round_sd(_mm_set_sd(x), _mm_set_sd(x), 8)); }

/* sin and cos of x, |x| <= 2e6, to 1e-14: x - n pi/2 in two exact pieces of pi/2, then Taylor on |r| <= pi/4. */
static inline void tp_sincos(double x, double *sine, double *cosine) {
    const double n = tp_round(x * 0.63661977236758134308);
    const double r = (x - n * 0x1.921fb544p+0) - n * 0x1.0b4611a626331p-34;
    const double z = r * r;
    double s = -1.0 / 1307674368000.0;
    s = s * z + 1.0 / 6227020800.0;
    s = s * z - 1.0 / 39916800.0;
    s = s * z + 1.0 / 362880.0;
    s = s * z - 1.0 / 5040.0;
    s = s * z + 1.0 / 120.0;
    s = s * z - 1.0 / 6.0;
    s = r + r * z * s;
    double c = 1.0 / 20922789888000.0;
    c = c * z - 1.0 / 87178291200.0;
    c = c * z + 1.0 / 479001600.0;
    c = c * z - 1.0 / 3628800.0;
    c = c * z + 1.0 / 40320.0;
    c = c * z - 1.0 / 720.0;
    c = c * z + 1.0 / 24.0;
    c = 1.0 - (0.5 * z - z * z * c);
    switch ((int64_t)n & 3) {
    case 0: *sine = s, *cosine = c; break;
    case 1: *sine = c, *cosine = -s; break;
    case 2: *sine = -s, *cosine = -c; break;
    default: *sine = -c, *cosine = s; break;
    }
}

/* Natural logarithm of a normal positive x, to 1e-14: ln m = 2 artanh((m - 1) / (m + 1)). */
static inline double tp_log(double x) {
    int64_t bits;
    memcpy(&bits, &x, sizeof bits);
    int64_t exponent = ((bits >> 52) & 0x7ff) - 1023;
    bits = (bits & 0xfffffffffffff) | 0x3ff0000000000000;
    double m;
    memcpy(&m, &bits, sizeof m);
    if (m > 1.4142135623730951) m *= 0.5, exponent += 1;
    const double t = (m - 1) / (m + 1), z = t * t;
    double p = 1.0 / 19;
    for (int k = 17; k >= 1; k -= 2) p = p * z + 1.0 / k;
    return 2 * t * p + (double)exponent * 0.69314718055994530942;
}

#endif
