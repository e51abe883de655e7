/* The matrix product of attention: c[rows][width] (+)= a[rows][n] b[n][width], b float32 or float16.
 *
 * `a` gives scalars, `b` vectors. Element (r, i) of `a` is a[r * row_step + i * step] within a band of TP_BAND rows,
 * and a band lies `band_step` behind the one before; steps are constants where they matter, so that the inner loop is
 * loads, broadcasts and fused multiply-adds only. Every element of c is one chain of additions in the order of i, so
 * results do not depend on the width of the machine's vectors. */
#ifndef TP_ATTENTION_TILE_H
#define TP_ATTENTION_TILE_H
#include "tp_math.h"

#ifdef __AVX512F__
#define TP_BAND 12
#else
#define TP_BAND 6
#endif

TP_INLINE __m256 tp_load8_f32(const float *x) { return _mm256_loadu_ps(x); }
TP_INLINE __m256 tp_load8_f16(const uint16_t *x) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)x)); }
#ifdef __AVX512F__
TP_INLINE __m512 tp_load16_f32(const float *x) { return _mm512_loadu_ps(x); }
TP_INLINE __m512 tp_load16_f16(const uint16_t *x) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)x)); }
#endif

#define TP_UNROLL _Pragma("clang loop unroll(full)")

/* One block of registers: `count` vectors by a constant number of rows. */
#define TP_DEFINE_TILE(NAME, B, VECTOR, LANES, LOAD, PREFIX)                                                           \
    TP_INLINE void NAME(int rows, int count, const float *a, int64_t row_step, int64_t step, const B *b, int64_t ldb,  \
                        int n, float *c, int64_t ldc, int add) {                                                       \
        VECTOR sum[TP_BAND][2];                                                                                        \
        TP_UNROLL for (int r = 0; r < rows; r++) TP_UNROLL for (int j = 0; j < count; j++)                             \
            sum[r][j] = add ? PREFIX##_loadu_ps(c + r * ldc + j * LANES) : PREFIX##_setzero_ps();                      \
        for (int i = 0; i < n; i++) {                                                                                  \
            VECTOR v[2];                                                                                               \
            TP_UNROLL for (int j = 0; j < count; j++) v[j] = LOAD(b + i * ldb + j * LANES);                            \
            TP_UNROLL for (int r = 0; r < rows; r++) {                                                                 \
                const VECTOR x = PREFIX##_set1_ps(a[i * step + r * row_step]);                                         \
                TP_UNROLL for (int j = 0; j < count; j++) sum[r][j] = PREFIX##_fmadd_ps(x, v[j], sum[r][j]);           \
            }                                                                                                          \
        }                                                                                                              \
        TP_UNROLL for (int r = 0; r < rows; r++) TP_UNROLL for (int j = 0; j < count; j++)                             \
            PREFIX##_storeu_ps(c + r * ldc + j * LANES, sum[r][j]);                                                    \
    }

TP_DEFINE_TILE(tp_tile8_f32, float, __m256, 8, tp_load8_f32, _mm256)
TP_DEFINE_TILE(tp_tile8_f16, uint16_t, __m256, 8, tp_load8_f16, _mm256)
#ifdef __AVX512F__
TP_DEFINE_TILE(tp_tile16_f32, float, __m512, 16, tp_load16_f32, _mm512)
TP_DEFINE_TILE(tp_tile16_f16, uint16_t, __m512, 16, tp_load16_f16, _mm512)
#endif

/* All rows of one strip of columns. The last rows are few; `exact` spends code on doing up to 4 of them at once. */
#define TP_ROWS(TILE, COUNT, R) TILE(R, COUNT, a, row_step, step, b + j, ldb, n, y, ldc, add)
#define TP_WHILE_ROWS(TILE, COUNT, R)                                                                                  \
    for (; left >= (R); left -= (R), a += (R)*row_step, y += (R)*ldc) TP_ROWS(TILE, COUNT, R)
#define TP_STRIP(TILE, COUNT)                                                                                          \
    {                                                                                                                  \
        const float *a = first;                                                                                        \
        float *y = c + j;                                                                                              \
        int left = rows;                                                                                               \
        if (!exact || TP_BAND == 6)                                                                                    \
            for (; left >= TP_BAND; left -= TP_BAND, a += band_step, y += TP_BAND * ldc) TP_ROWS(TILE, COUNT, TP_BAND);\
        if (TP_BAND > 6) TP_WHILE_ROWS(TILE, COUNT, 6);                                                                \
        if (exact && left == 4) {                                                                                      \
            TP_ROWS(TILE, COUNT, 4);                                                                                   \
        } else {                                                                                                       \
            TP_WHILE_ROWS(TILE, COUNT, 3);                                                                             \
            if (exact && left == 2) TP_ROWS(TILE, COUNT, 2);                                                           \
            else TP_WHILE_ROWS(TILE, COUNT, 1);                                                                        \
        }                                                                                                              \
    }

/* The product, for widths that are multiples of `grain` (8 or 16, constant). */
#ifdef __AVX512F__
#define TP_STRIPS(TILE8, TILE16)                                                                                       \
    for (; j + 32 <= width; j += 32) TP_STRIP(TILE16, 2);                                                              \
    for (; j < width; j += 8) TP_STRIP(TILE8, 1);
#else
#define TP_STRIPS(TILE8, TILE16)                                                                                       \
    for (; j + 16 <= width; j += 16) TP_STRIP(TILE8, 2);                                                               \
    for (; grain < 16 && j < width; j += 8) TP_STRIP(TILE8, 1);
#endif
#define TP_DEFINE_PRODUCT(NAME, B, TILE8, TILE16)                                                                      \
    TP_INLINE void NAME(int rows, int width, int grain, int exact, const float *first, int64_t band_step,              \
                        int64_t row_step, int64_t step, const B *b, int64_t ldb, int n, float *c, int64_t ldc,         \
                        int add) {                                                                                     \
        int j = 0;                                                                                                     \
        (void)grain;                                                                                                   \
        TP_STRIPS(TILE8, TILE16)                                                                                       \
    }
TP_DEFINE_PRODUCT(tp_product_f32, float, tp_tile8_f32, tp_tile16_f32)
TP_DEFINE_PRODUCT(tp_product_f16, uint16_t, tp_tile8_f16, tp_tile16_f16)

/* 16 lanes, whatever the machine's vectors are. */
#ifdef __AVX512F__
typedef __m512 tp_wide;
TP_INLINE tp_wide tp_wide_load(const float *x) { return _mm512_loadu_ps(x); }
TP_INLINE void tp_wide_store(float *x, tp_wide v) { _mm512_storeu_ps(x, v); }
TP_INLINE tp_wide tp_wide_all(float x) { return _mm512_set1_ps(x); }
TP_INLINE tp_wide tp_wide_add(tp_wide a, tp_wide b) { return _mm512_add_ps(a, b); }
TP_INLINE tp_wide tp_wide_max(tp_wide a, tp_wide b) { return _mm512_max_ps(a, b); }
TP_INLINE tp_wide tp_wide_exp_of_difference(tp_wide a, tp_wide b) { return tp_exp16(_mm512_sub_ps(a, b)); }
TP_INLINE __m256 tp_wide_low(tp_wide a) { return _mm512_castps512_ps256(a); }
TP_INLINE __m256 tp_wide_high(tp_wide a) { return _mm512_extractf32x8_ps(a, 1); }
#else
typedef struct tp_wide {
    __m256 low, high;
} tp_wide;
TP_INLINE tp_wide tp_wide_load(const float *x) { return (tp_wide){_mm256_loadu_ps(x), _mm256_loadu_ps(x + 8)}; }
TP_INLINE void tp_wide_store(float *x, tp_wide v) {
    _mm256_storeu_ps(x, v.low);
    _mm256_storeu_ps(x + 8, v.high);
}
TP_INLINE tp_wide tp_wide_all(float x) { return (tp_wide){_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
TP_INLINE tp_wide tp_wide_add(tp_wide a, tp_wide b) {
    return (tp_wide){_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)};
}
TP_INLINE tp_wide tp_wide_max(tp_wide a, tp_wide b) {
    return (tp_wide){_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)};
}
TP_INLINE tp_wide tp_wide_exp_of_difference(tp_wide a, tp_wide b) {
    return (tp_wide){tp_exp8(_mm256_sub_ps(a.low, b.low)), tp_exp8(_mm256_sub_ps(a.high, b.high))};
}
TP_INLINE __m256 tp_wide_low(tp_wide a) { return a.low; }
TP_INLINE __m256 tp_wide_high(tp_wide a) { return a.high; }
#endif
TP_INLINE float tp_wide_sum(tp_wide a) { return tp_sum8(_mm256_add_ps(tp_wide_low(a), tp_wide_high(a))); }
TP_INLINE float tp_wide_top(tp_wide a) { return tp_max8(_mm256_max_ps(tp_wide_low(a), tp_wide_high(a))); }

#endif
