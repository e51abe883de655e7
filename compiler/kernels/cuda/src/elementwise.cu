/* Kernels without arithmetic across elements; y is [rows][K]. OP:
 *   GATHER  y[i] = x[out_row[i]], x f32 [..][K]
 *   GATED   y = act(x[:K]) * x[K:2K], x f32 [rows][LDX], ACT 2 silu, 3 gelu_tanh
 *   ADD     y += x, x f32 [rows][K]
 *   CAST    y = x[:K], x f32 [rows][LDX]
 * Grid: (rows, chunks of a row). Defines: OP, K, LDX, OUT, ACT, COUNT (which of the counts is the number of rows),
 * THREADS, ITEMS (vectors a thread moves). */
#include "rows.cuh"

#define GATHER 1
#define GATED 2
#define ADD 3
#define CAST 4

#define VEC (K % 4 == 0 && LDX % 4 == 0 ? 4 : 1)

#if OP == GATED
TP_DEVICE float activate(float x) {
    /* gelu_tanh: x/2 (1 + tanh u) = x sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3) */
    const float u = ACT == 2 ? x : x * (x * x * 0.0713548162726f + 1.59576912161f);
    return x / (1.0f + expf(-u));
}
#endif

extern "C" __global__ void TP_BOUNDS(THREADS)
    TP_KERNEL(const float *__restrict__ x,
#if OP == GATHER
              const i32 *__restrict__ out_row,
#endif
              tp_out<OUT>::type *__restrict__ y, const i32 *__restrict__ counts) {
    const i64 row = blockIdx.x;
    const int first = ((int)blockIdx.y * ITEMS * THREADS + (int)threadIdx.x) * VEC;
    tp_values<VEC> value[ITEMS];
#if OP == GATED || OP == ADD
    tp_values<VEC> other[ITEMS];
#endif
    tp_launch_dependents();
    const bool live = row < counts[COUNT];
#if OP == GATHER
    const i64 from = live ? out_row[row] : 0;
#else
    const i64 from = row;
#endif
    tp_wait();
    if (!live) return;
    TP_UNROLL for (int i = 0; i < ITEMS; i++) {
        const int k = first + i * VEC * THREADS;
        if (k >= K) continue;
        value[i] = tp_read<VEC>(x + from * LDX + k);
#if OP == GATED
        other[i] = tp_read<VEC>(x + from * LDX + K + k);
#elif OP == ADD
        other[i] = tp_read<VEC>(y + row * K + k);
#endif
    }
    TP_UNROLL for (int i = 0; i < ITEMS; i++) {
        const int k = first + i * VEC * THREADS;
        if (k >= K) continue;
#if OP == GATED
        TP_UNROLL for (int j = 0; j < VEC; j++) value[i].at[j] = activate(value[i].at[j]) * other[i].at[j];
#elif OP == ADD
        TP_UNROLL for (int j = 0; j < VEC; j++) value[i].at[j] += other[i].at[j];
#endif
        tp_write<OUT, VEC>(y + row * K + k, value[i]);
    }
}
