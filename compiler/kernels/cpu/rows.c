/* Small kernels over rows: copies side by side, heads over their rms, and the rings of compressed.h. */
#include "tapeout_cpu.h"
#include "tp_math.h"

#define ROWS 4

static int row_tasks(const tp_launch *l, const tp_step *s) {
    (void)l;
    return tp_ceil_div(s->rows, ROWS);
}

/* repeat_f32: 0 x f32 [rows][k], 1 y f32 [rows][n][k], 2 k, 3 n. */
static void repeat_f32(const tp_launch *l, const tp_step *s, int task, void *scratch) {
    (void)scratch;
    const int64_t k = l->arg[2], n = l->arg[3];
    for (int64_t row = task * ROWS; row < tp_min(s->rows, (task + 1) * ROWS); row++)
        for (int64_t j = 0; j < n; j++)
            memcpy(TP_PTR(float, l, 1) + (row * n + j) * k, TP_PTR(const float, l, 0) + row * k, k * sizeof(float));
}

/* unit_norm: 0 x f32, 1 ldx, 2 columns, 3 group (a multiple of 8), 4 eps. In place: every group over its rms. */
static void unit_norm(const tp_launch *l, const tp_step *s, int task, void *scratch) {
    (void)scratch;
    const int group = (int)l->arg[3];
    for (int row = task * ROWS; row < tp_min(s->rows, (task + 1) * ROWS); row++) {
        float *x = TP_PTR(float, l, 0) + row * l->arg[1];
        for (const float *end = x + l->arg[2]; x < end; x += group) {
            __m256 square = _mm256_setzero_ps();
            for (int i = 0; i < group; i += 8) {
                const __m256 v = _mm256_loadu_ps(x + i);
                square = _mm256_fmadd_ps(v, v, square);
            }
            const float inverse = 1.0f / tp_sqrt(tp_sum8(square) / (float)group + tp_float(l, 4));
            for (int i = 0; i < group; i++) x[i] *= inverse;
        }
    }
}

/* keep_rows: 0 x f32, 1 ldx, 2 width, 3 ring, 4 size. The last `size` rows of every segment go to its sequence's ring. */
static void keep_rows(const tp_launch *l, const tp_step *s, int task, void *scratch) {
    (void)scratch;
    const int64_t width = l->arg[2], size = l->arg[4];
    for (int row = task * ROWS; row < tp_min(s->rows, (task + 1) * ROWS); row++) {
        const tp_segment *g = &s->segment[s->row_segment[row]];
        if (g->row + g->rows - row > size) continue;
        memcpy(TP_PTR(float, l, 3) + (g->slot * size + s->positions[row] % size) * width,
               TP_PTR(const float, l, 0) + row * l->arg[1], (size_t)width * sizeof(float));
    }
}

const tp_kernel tp_kernel_repeat_f32 = {"repeat_f32", row_tasks, repeat_f32};
const tp_kernel tp_kernel_unit_norm = {"unit_norm", row_tasks, unit_norm};
const tp_kernel tp_kernel_keep_rows = {"keep_rows", row_tasks, keep_rows};
