/* One group of 32 activations to int8 ("x8", see tapeout_cpu.h). */
#ifndef TP_QUANTIZE_H
#define TP_QUANTIZE_H
#include "tapeout_cpu.h"
#include "tp_math.h"

TP_INLINE int32_t tp_sum_epi32(__m256i x) {
    __m128i a = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    a = _mm_add_epi32(a, _mm_shuffle_epi32(a, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(a, _mm_shuffle_epi32(a, 0xb1)));
}

/* scale = max|x| / 127, code = x * (127 / max) rounded to nearest, ties to even. A NaN or an infinity makes the scale
 * NaN, and so all that the group contributes to. The maximum is taken over bit patterns, where NaN is largest. */
TP_INLINE void tp_quantize32(const __m256 x[4], int8_t *codes, float *scale, int32_t *sums) {
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
    __m256i m = _mm256_and_si256(_mm256_castps_si256(x[0]), magnitude);
    for (int j = 1; j < 4; j++) m = _mm256_max_epi32(m, _mm256_and_si256(_mm256_castps_si256(x[j]), magnitude));
    __m128i a = _mm_max_epi32(_mm256_castsi256_si128(m), _mm256_extracti128_si256(m, 1));
    a = _mm_max_epi32(a, _mm_shuffle_epi32(a, 0x4e));
    a = _mm_max_epi32(a, _mm_shuffle_epi32(a, 0xb1));
    const float max = _mm_cvtss_f32(_mm_castsi128_ps(a));
    const int usable = max > 1e-35f && max <= 3.4028235e38f; /* 127 / max and x * that are finite */
    *scale = max - max == 0 ? max / 127.0f : max - max;
    const __m256 inverse = _mm256_set1_ps(usable ? 127.0f / max : 0.0f);
    __m256i q[4];
    for (int j = 0; j < 4; j++) q[j] = _mm256_cvtps_epi32(_mm256_mul_ps(x[j], inverse));
    if (!usable)
        for (int j = 0; j < 4; j++) q[j] = _mm256_setzero_si256();
    sums[0] = tp_sum_epi32(_mm256_add_epi32(q[0], q[1]));
    sums[1] = tp_sum_epi32(_mm256_add_epi32(q[2], q[3]));
    const __m256i packed = _mm256_packs_epi16(_mm256_packs_epi32(q[0], q[1]), _mm256_packs_epi32(q[2], q[3]));
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    _mm256_storeu_si256((__m256i *)codes, _mm256_permutevar8x32_epi32(packed, order));
}

/* Group g of row t of an x8 buffer of `cap` rows; with two terms, what the first leaves over goes to the row behind. */
TP_INLINE void tp_store_x8(void *y, int64_t groups, int64_t cap, int64_t g, int64_t t, int64_t terms, __m256 x[4]) {
    char *base = y;
    for (int64_t row = g * cap + t * terms, end = row + terms; row < end; row++) {
        int8_t *codes = (int8_t *)base + row * 32;
        float *scale = (float *)(base + groups * cap * 32) + row;
        tp_quantize32(x, codes, scale, (int32_t *)(base + groups * cap * 36) + row * 2);
        for (int j = 0; j < 4 && row + 1 < end; j++) {
            const __m256 code = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(codes + 8 * j))));
            x[j] = _mm256_fnmadd_ps(code, _mm256_set1_ps(*scale), x[j]);
        }
    }
}

/* A row of k values as row t of an x8 buffer; what is missing of the last group is 0. */
TP_INLINE void tp_quantize_row(const float *x, int k, void *y, int64_t cap, int64_t t, int64_t terms) {
    const int groups = tp_ceil_div(k, 32);
    for (int g = 0; g < groups; g++) {
        __m256 v[4];
        for (int j = 0; j < 4; j++) {
            const int i = g * 32 + 8 * j;
            v[j] = i + 8 <= k ? _mm256_loadu_ps(x + i) : _mm256_maskload_ps(x + i, tp_mask8(tp_max(0, k - i)));
        }
        tp_store_x8(y, groups, cap, g, t, terms, v);
    }
}

#endif
