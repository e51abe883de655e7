/* Small kernels over rows: gathering, gated activations, addition, soft-capping. One task is a few rows. */
#include "tapeout_cpu.h"
#include "tp_math.h"

#define ROWS 8

static int row_tasks(const tp_launch *l, const tp_step *s) {
    (void)l;
    return tp_ceil_div(s->rows, ROWS);
}

static int out_row_tasks(const tp_launch *l, const tp_step *s) {
    (void)l;
    return tp_ceil_div(s->out_rows, ROWS);
}

/* gather_f32: 0 x f32 [rows][k], 1 y f32 [out_rows][k], 2 k. y[i] = x[out_row[i]]. */
static void gather_f32(const tp_launch *l, const tp_step *s, int task, void *scratch) {
    (void)scratch;
    const int64_t k = l->arg[2];
    for (int i = task * ROWS; i < tp_min(s->out_rows, (task + 1) * ROWS); i++)
        memcpy(TP_PTR(float, l, 1) + i * k, TP_PTR(const float, l, 0) + s->out_row[i] * k, (size_t)k * sizeof(float));
}

/* gated_silu, gated_gelu, gated_swiglu_oai: 0 x f32 [rows * pairs][ldx], 1 ldx, 2 y f32 [rows * pairs][k], 3 k, 4 limit
 * (0: none), 5 pairs (1, or the experts of a row). y = act(x[:k]) * x[k:2k], the first at most limit and the second
 * within +-limit before it. swiglu_oai is gate sigmoid(1.702 gate) (up + 1). */
enum { silu, gelu, swiglu_oai };

TP_INLINE __m256 gated8(__m256 gate, __m256 up, int act, float limit) {
    if (limit > 0) { /* with the operands of min and max in this order a NaN stays one */
        const __m256 most = _mm256_set1_ps(limit);
        gate = _mm256_min_ps(most, gate);
        up = _mm256_max_ps(_mm256_set1_ps(-limit), _mm256_min_ps(most, up));
    }
    if (act == silu) return _mm256_mul_ps(tp_silu8(gate), up);
    if (act == gelu) return _mm256_mul_ps(tp_gelu_tanh8(gate), up);
    const __m256 sigmoid = tp_sigmoid8(_mm256_mul_ps(gate, _mm256_set1_ps(1.702f)));
    return _mm256_mul_ps(_mm256_mul_ps(gate, sigmoid), _mm256_add_ps(up, _mm256_set1_ps(1.0f)));
}

static int gated_tasks(const tp_launch *l, const tp_step *s) { return tp_ceil_div(s->rows * (int)l->arg[5], ROWS); }

TP_INLINE void gated(const tp_launch *l, const tp_step *s, int task, int act) {
    const int k = (int)l->arg[3], rows = s->rows * (int)l->arg[5];
    for (int row = task * ROWS; row < tp_min(rows, (task + 1) * ROWS); row++) {
        const float *gate = TP_PTR(const float, l, 0) + row * l->arg[1], *up = gate + k;
        float *y = TP_PTR(float, l, 2) + (int64_t)row * k;
        for (int i = 0; i < k; i += 8) {
            const __m256i mask = tp_mask8(tp_min(8, k - i));
            const __m256 g = _mm256_maskload_ps(gate + i, mask), u = _mm256_maskload_ps(up + i, mask);
            _mm256_maskstore_ps(y + i, mask, gated8(g, u, act, tp_float(l, 4)));
        }
    }
}

static void gated_silu(const tp_launch *l, const tp_step *s, int task, void *scratch) {
    (void)scratch;
    gated(l, s, task, silu);
}

static void gated_gelu(const tp_launch *l, const tp_step *s, int task, void *scratch) {
    (void)scratch;
    gated(l, s, task, gelu);
}

static void gated_swiglu_oai(const tp_launch *l, const tp_step *s, int task, void *scratch) {
    (void)scratch;
    gated(l, s, task, swiglu_oai);
}

/* add_f32: 0 x f32 [rows][k], 1 y f32 [rows][k], 2 k. y += x. */
static void add_f32(const tp_launch *l, const tp_step *s, int task, void *scratch) {
    (void)scratch;
    const int64_t k = l->arg[2], last = tp_min(s->rows, (task + 1) * ROWS) * k;
    const float *x = TP_PTR(const float, l, 0);
    float *y = TP_PTR(float, l, 1);
    for (int64_t i = task * ROWS * k; i < last; i++) y[i] += x[i];
}

/* softcap_f32: 0 x f32 [rows][k], 1 k, 2 cap. x = cap tanh(x / cap), in place. */
static void softcap_f32(const tp_launch *l, const tp_step *s, int task, void *scratch) {
    (void)scratch;
    const int64_t k = l->arg[1], last = tp_min(s->rows, (task + 1) * ROWS) * k;
    const __m256 cap = _mm256_set1_ps(tp_float(l, 2));
    float *x = TP_PTR(float, l, 0);
    for (int64_t i = task * ROWS * k; i < last; i += 8) {
        const __m256i mask = tp_mask8(last - i < 8 ? (int)(last - i) : 8);
        const __m256 v = _mm256_div_ps(_mm256_maskload_ps(x + i, mask), cap);
        _mm256_maskstore_ps(x + i, mask, _mm256_mul_ps(cap, tp_tanh8(v)));
    }
}

const tp_kernel tp_kernel_gather_f32 = {"gather_f32", out_row_tasks, gather_f32};
const tp_kernel tp_kernel_gated_silu = {"gated_silu", gated_tasks, gated_silu};
const tp_kernel tp_kernel_gated_gelu = {"gated_gelu", gated_tasks, gated_gelu};
const tp_kernel tp_kernel_gated_swiglu_oai = {"gated_swiglu_oai", gated_tasks, gated_swiglu_oai};
const tp_kernel tp_kernel_add_f32 = {"add_f32", row_tasks, add_f32};
const tp_kernel tp_kernel_softcap_f32 = {"softcap_f32", row_tasks, softcap_f32};
