/* Puts together the parts of attention blocks that were split over their keys; see attention.h. */
#include "attention.h"

#define ROWS 4

static int tasks(const tp_launch *l, const tp_step *s) {
    const tp_attention a = tp_attention_of(l, s);
    int tokens;
    for (int i = 0; i < s->segments; i++)
        if (tp_splits(&a, &s->segment[i], &tokens) > 1) return tp_ceil_div(s->rows, ROWS);
    return 0;
}

static void combine(const float *part, int splits, int d, float *out) {
    const int64_t stride = tp_part_floats(d);
    float max = -__builtin_inff();
    for (int i = 0; i < splits; i++) max = part[i * stride + d] > max ? part[i * stride + d] : max;
    float decay[TP_SPLITS], sum = 0;
    for (int i = 0; i < splits; i++) {
        decay[i] = _mm256_cvtss_f32(tp_exp8(_mm256_set1_ps(part[i * stride + d] - max)));
        sum += decay[i] * part[i * stride + d + 1];
    }
    for (int j = 0; j < d; j += 8) {
        __m256 total = _mm256_setzero_ps();
        for (int i = 0; i < splits; i++)
            total = _mm256_fmadd_ps(_mm256_set1_ps(decay[i]), _mm256_loadu_ps(part + i * stride + j), total);
        _mm256_storeu_ps(out + j, _mm256_div_ps(total, _mm256_set1_ps(sum)));
    }
}

static void run(const tp_launch *l, const tp_step *s, int task, void *scratch) {
    (void)scratch;
    const tp_attention a = tp_attention_of(l, s);
    for (int row = task * ROWS; row < tp_min(s->rows, (task + 1) * ROWS); row++) {
        int tokens;
        const int splits = tp_splits(&a, &s->segment[s->row_segment[row]], &tokens);
        for (int h = 0; splits > 1 && h < a.heads; h++) {
            const int64_t at = (int64_t)row * a.heads + h;
            const float *part = TP_PTR(const float, l, 10) + at * TP_SPLITS * tp_part_floats(a.d);
            combine(part, splits, a.d, TP_PTR(float, l, 2) + at * a.d);
        }
    }
}

const tp_kernel tp_kernel_attention_combine = {"attention_combine", tasks, run};
