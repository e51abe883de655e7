/* embed_<format>: y[t] = SCALE * (row tokens[t] of w), bit for bit the value that the format defines, then multiplied.
 *
 * One block a row, four elements a thread and step. A token outside of the vocabulary gives a row of NaN: it shows in
 * the logits. Defines: K, VOCAB, SCALE, THREADS, and of raw floats RAW (TP_F32, TP_BF16, TP_F16), of planes those of
 * planes.cuh. */
#include "rows.cuh"
#if RAW
#if RAW == TP_F32
typedef float element;
TP_DEVICE float widen(element x) { return x; }
#elif RAW == TP_F16
typedef u16 element;
TP_DEVICE float widen(element x) { return tp_f16(x); }
#else
typedef u16 element;
TP_DEVICE float widen(element x) { return tp_bf16(x); }
#endif

TP_DEVICE void decode4(const u8 *w, i64 row, int k, float *out) {
    const element *at = (const element *)w + row * K + k;
    if constexpr (K % 4 == 0) {
        struct __align__(4 * sizeof(element)) four {
            element at[4];
        };
        const four v = *(const four *)at;
        TP_UNROLL for (int j = 0; j < 4; j++) out[j] = widen(v.at[j]);
    } else {
        TP_UNROLL for (int j = 0; j < 4; j++) out[j] = k + j < K ? widen(at[j]) : 0.0f;
    }
}
#else
#include "planes.cuh"
TP_DEVICE void decode4(const u8 *w, i64 row, int k, float *out) { tp_plane_decode4(w, row, k, out); }
#endif

#define STEPS ((K + 4 * THREADS - 1) / (4 * THREADS))

extern "C" __global__ void TP_BOUNDS(THREADS)
    TP_KERNEL(const i32 *__restrict__ tokens, const u8 *__restrict__ w, float *__restrict__ y,
              const i32 *__restrict__ counts) {
    const i64 row = blockIdx.x;
    float value[STEPS][4];
    tp_launch_dependents();
    const bool live = row < counts[0];
    if (live) {
        const i64 token = tokens[row];
        const bool known = token >= 0 && token < VOCAB;
        TP_UNROLL for (int i = 0; i < STEPS; i++) {
            const int k = ((int)threadIdx.x + i * THREADS) * 4;
            if (k >= K) continue;
            if (known) decode4(w, token, k, value[i]);
            TP_UNROLL for (int j = 0; j < 4; j++)
                value[i][j] = known ? __fmul_rn(value[i][j], SCALE) : __uint_as_float(0x7fc00000u);
        }
    }
    tp_wait();
    if (!live) return;
    TP_UNROLL for (int i = 0; i < STEPS; i++) {
        const int k = ((int)threadIdx.x + i * THREADS) * 4;
        float *out = y + row * K + k;
        if (K % 4 == 0 && k < K) *(float4 *)out = make_float4(value[i][0], value[i][1], value[i][2], value[i][3]);
        else
            for (int j = 0; j < 4 && k + j < K; j++) out[j] = value[i][j];
    }
}
