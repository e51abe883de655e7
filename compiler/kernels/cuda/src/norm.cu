/* rmsnorm: y = x / rms(x) * weight. rmsnorm_add (ADD=1): y += that.
 *
 * One block a row; a thread keeps its part of the row in registers, so x is read once. Defines: K, LDX, EPS, OUT (of
 * rmsnorm: TP_F32, TP_BF16, TP_F16), ADD, COUNT (which of the counts is the number of rows), THREADS. */
#include "rows.cuh"

#define VEC (K % 4 == 0 && LDX % 4 == 0 ? 4 : 1)
#define ITEMS ((K + VEC * THREADS - 1) / (VEC * THREADS))

extern "C" __global__ void TP_BOUNDS(THREADS)
    TP_KERNEL(const float *__restrict__ x, const float *__restrict__ weight, tp_out<OUT>::type *__restrict__ y,
              const i32 *__restrict__ counts) {
    __shared__ float sums[32];
    tp_values<VEC> scale[ITEMS], value[ITEMS];
#if ADD
    tp_values<VEC> before[ITEMS];
#endif
    const i64 row = blockIdx.x;
    const int first = (int)threadIdx.x * VEC;
    tp_launch_dependents();
    TP_UNROLL for (int i = 0; i < ITEMS; i++) {
        const int k = first + i * VEC * THREADS;
        if (k < K) scale[i] = tp_read_constant<VEC>(weight + k);
    }
    const bool live = row < counts[COUNT];
    tp_wait();
    if (!live) return;
    float sum = 0;
    TP_UNROLL for (int i = 0; i < ITEMS; i++) {
        const int k = first + i * VEC * THREADS;
        if (k < K) {
            value[i] = tp_read<VEC>(x + row * LDX + k);
#if ADD
            before[i] = tp_read<VEC>(y + row * K + k);
#endif
        }
    }
    TP_UNROLL for (int i = 0; i < ITEMS; i++) {
        if (first + i * VEC * THREADS < K) {
            TP_UNROLL for (int j = 0; j < VEC; j++) sum += value[i].at[j] * value[i].at[j];
        }
    }
    const float inverse = 1.0f / sqrtf(tp_block_sum<THREADS>(sum, sums) / (float)K + EPS);
    TP_UNROLL for (int i = 0; i < ITEMS; i++) {
        const int k = first + i * VEC * THREADS;
        if (k >= K) continue;
        TP_UNROLL for (int j = 0; j < VEC; j++) {
            value[i].at[j] = value[i].at[j] * inverse * scale[i].at[j];
#if ADD
            value[i].at[j] += before[i].at[j];
#endif
        }
        tp_write<OUT, VEC>(y + row * K + k, value[i]);
    }
}
