/* Hyper-connections: a residual of n streams [rows][n][k], and the weights that mix it into and out of every block
 * (arXiv 2512.24880). Of each row the weights are pre[n], post[n] and mix[n][n], or pre[n] alone at the end. */
#include "tapeout_cpu.h"
#include "tp_math.h"

#define ROWS 4
#define MAX_STREAMS 8

static int row_tasks(const tp_launch *l, const tp_step *s) {
    (void)l;
    return tp_ceil_div(s->rows, ROWS);
}

static float inverse_rms(const float *x, int k, float eps) {
    __m256 sum[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
    for (int i = 0; i < k; i += 8) {
        const __m256 v = _mm256_maskload_ps(x + i, tp_mask8(tp_min(8, k - i)));
        sum[i / 8 % 2] = _mm256_fmadd_ps(v, v, sum[i / 8 % 2]);
    }
    return 1.0f / tp_sqrt(tp_sum8(_mm256_add_ps(sum[0], sum[1])) / (float)k + eps);
}

static float sigmoid(float x) { return _mm256_cvtss_f32(tp_sigmoid8(_mm256_set1_ps(x))); }
static float exponential(float x) { return _mm256_cvtss_f32(tp_exp8(_mm256_set1_ps(x))); }

/* Divides the rows (`step` 1) or columns (`step` n) of m [n][n] by their sums plus eps. */
static void divide_by_sums(float *m, int n, int step, float eps) {
    const int line = step == 1 ? n : 1;
    for (int i = 0; i < n; i++) {
        float sum = 0;
        for (int j = 0; j < n; j++) sum += m[i * line + j * step];
        for (int j = 0; j < n; j++) m[i * line + j * step] /= sum + eps;
    }
}

/* m: a softmax of each row, then Sinkhorn-Knopp: columns first, then rows and columns in turn. */
static void doubly_stochastic(float *m, int n, int iterations, float eps) {
    for (int i = 0; i < n; i++) {
        float *row = m + i * n, top = row[0], sum = 0;
        for (int j = 1; j < n; j++) top = row[j] > top ? row[j] : top;
        for (int j = 0; j < n; j++) sum += row[j] = exponential(row[j] - top);
        for (int j = 0; j < n; j++) row[j] = row[j] / sum + eps;
    }
    divide_by_sums(m, n, n, eps);
    for (int i = 1; i < iterations; i++) {
        divide_by_sums(m, n, 1, eps);
        divide_by_sums(m, n, n, eps);
    }
}

/* hyper_weights: 0 x f32 [rows][k], 1 k (of all streams), 2 f f32, 3 ldf, 4 base, 5 scale, 6 y f32 [rows][width],
 * 7 n, 8 iterations (0: pre alone), 9 eps of the norm, 10 eps. f = x @ fn^T is divided by the rms of x here. */
static void hyper_weights(const tp_launch *l, const tp_step *s, int task, void *scratch) {
    (void)scratch;
    const int k = (int)l->arg[1], n = (int)l->arg[7], iterations = (int)l->arg[8];
    const int width = iterations ? n * (n + 2) : n;
    const float *base = TP_PTR(const float, l, 4), *scale = TP_PTR(const float, l, 5), eps = tp_float(l, 10);
    for (int row = task * ROWS; row < tp_min(s->rows, (task + 1) * ROWS); row++) {
        const float *f = TP_PTR(const float, l, 2) + row * l->arg[3];
        const float inverse = inverse_rms(TP_PTR(const float, l, 0) + (int64_t)row * k, k, tp_float(l, 9));
        float *y = TP_PTR(float, l, 6) + (int64_t)row * width;
        for (int i = 0; i < width; i++) y[i] = f[i] * inverse * scale[tp_min(i / n, 2)] + base[i];
        for (int i = 0; i < n; i++) y[i] = sigmoid(y[i]) + eps;
        for (int i = n; i < tp_min(width, 2 * n); i++) y[i] = 2 * sigmoid(y[i]);
        if (iterations) doubly_stochastic(y + 2 * n, n, iterations, eps);
    }
}

/* hyper_mix: 0 x f32 [rows][n][k], 1 weights f32, 2 ldw, 3 y f32 [rows][k], 4 k, 5 n. y = sum of pre[j] x[j]. */
static void hyper_mix(const tp_launch *l, const tp_step *s, int task, void *scratch) {
    (void)scratch;
    const int k = (int)l->arg[4], n = (int)l->arg[5];
    for (int row = task * ROWS; row < tp_min(s->rows, (task + 1) * ROWS); row++) {
        const float *x = TP_PTR(const float, l, 0) + (int64_t)row * n * k;
        const float *pre = TP_PTR(const float, l, 1) + row * l->arg[2];
        float *y = TP_PTR(float, l, 3) + (int64_t)row * k;
        for (int i = 0; i < k; i += 8) {
            const __m256i mask = tp_mask8(tp_min(8, k - i));
            __m256 sum = _mm256_setzero_ps();
            for (int j = 0; j < n; j++)
                sum = _mm256_fmadd_ps(_mm256_set1_ps(pre[j]), _mm256_maskload_ps(x + j * k + i, mask), sum);
            _mm256_maskstore_ps(y + i, mask, sum);
        }
    }
}

/* hyper_join: 0 x f32 [rows][n][k], 1 weights f32, 2 ldw, 3 y f32, 4 ldy, 5 k, 6 n.
 * In place: stream i becomes post[i] y + sum over j of mix[j][i] x[j]. */
static void hyper_join(const tp_launch *l, const tp_step *s, int task, void *scratch) {
    (void)scratch;
    const int k = (int)l->arg[5], n = (int)l->arg[6];
    for (int row = task * ROWS; row < tp_min(s->rows, (task + 1) * ROWS); row++) {
        float *x = TP_PTR(float, l, 0) + (int64_t)row * n * k;
        const float *post = TP_PTR(const float, l, 1) + row * l->arg[2] + n, *mix = post + n;
        const float *y = TP_PTR(const float, l, 3) + row * l->arg[4];
        for (int i = 0; i < k; i += 8) {
            const __m256i mask = tp_mask8(tp_min(8, k - i));
            const __m256 block = _mm256_maskload_ps(y + i, mask);
            __m256 old[MAX_STREAMS];
            for (int j = 0; j < n; j++) old[j] = _mm256_maskload_ps(x + j * k + i, mask);
            for (int to = 0; to < n; to++) {
                __m256 sum = _mm256_mul_ps(_mm256_set1_ps(post[to]), block);
                for (int j = 0; j < n; j++) sum = _mm256_fmadd_ps(_mm256_set1_ps(mix[j * n + to]), old[j], sum);
                _mm256_maskstore_ps(x + to * k + i, mask, sum);
            }
        }
    }
}

const tp_kernel tp_kernel_hyper_weights = {"hyper_weights", row_tasks, hyper_weights};
const tp_kernel tp_kernel_hyper_mix = {"hyper_mix", row_tasks, hyper_mix};
const tp_kernel tp_kernel_hyper_join = {"hyper_join", row_tasks, hyper_join};
