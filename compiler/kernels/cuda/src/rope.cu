/* rope_kv: norms (QK_NORM) and rotates (ROPE) queries and keys, hands queries on as f16, writes keys and values to
 * their page of the pool as f16.
 *
 * One block a row, one warp a head, two neighbouring elements of both halves a lane. Defines: HEADS, KV_HEADS,
 * HEAD_DIM, LDX (of qkv), Q_COL, K_COL, V_COL, PAGE_TOKENS, MAX_PAGES, FACTOR, EPS, QK_NORM, ROPE, THREADS. */
#include "rotate.cuh"

#define HALF (HEAD_DIM / 2)
#define STEPS ((HALF + 63) / 64)
#define PAGE ((i64)2 * KV_HEADS * PAGE_TOKENS * HEAD_DIM)

TP_DEVICE void write2(u16 *p, float a, float b) { *(u32 *)p = (u32)tp_to_f16(a) | (u32)tp_to_f16(b) << 16; }

/* One head by one warp: from floats to halves. */
TP_DEVICE void turn_head(const float *head, const float *weight, const float2 *turns, u16 *out) {
    const int lane = (int)threadIdx.x % 32;
    float2 a[STEPS], b[STEPS];
    float sum = 0;
    TP_UNROLL for (int i = 0; i < STEPS; i++) {
        const int at = i * 64 + lane * 2;
        if (at >= HALF) continue;
        a[i] = read2(head + at), b[i] = read2(head + HALF + at);
        sum += a[i].x * a[i].x + a[i].y * a[i].y + b[i].x * b[i].x + b[i].y * b[i].y;
    }
#if QK_NORM
    const float inverse = 1.0f / sqrtf(tp_warp_sum(sum) / (float)HEAD_DIM + EPS);
    TP_UNROLL for (int i = 0; i < STEPS; i++) {
        const int at = i * 64 + lane * 2;
        if (at >= HALF) continue;
        a[i].x *= inverse * __ldg(weight + at), a[i].y *= inverse * __ldg(weight + at + 1);
        b[i].x *= inverse * __ldg(weight + HALF + at), b[i].y *= inverse * __ldg(weight + HALF + at + 1);
    }
#endif
    TP_UNROLL for (int i = 0; i < STEPS; i++) {
        const int at = i * 64 + lane * 2;
        if (at >= HALF) continue;
#if ROPE
        const float2 t0 = turns[at], t1 = turns[at + 1];
        write2(out + at, a[i].x * t0.y - b[i].x * t0.x, a[i].y * t1.y - b[i].y * t1.x);
        write2(out + HALF + at, b[i].x * t0.y + a[i].x * t0.x, b[i].y * t1.y + a[i].y * t1.x);
#else
        write2(out + at, a[i].x, a[i].y);
        write2(out + HALF + at, b[i].x, b[i].y);
#endif
    }
}

extern "C" __global__ void TP_BOUNDS(THREADS)
    TP_KERNEL(const float *__restrict__ qkv, const i32 *__restrict__ positions, const i32 *__restrict__ row_segment,
              const i32 *__restrict__ page_table, const float *__restrict__ inv_freq, const float *__restrict__ q_norm,
              const float *__restrict__ k_norm, u16 *__restrict__ kv, u16 *__restrict__ q_out,
              const i32 *__restrict__ counts) {
    __shared__ float2 turns[HALF]; /* sine, cosine */
    const i64 row = blockIdx.x;
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    tp_launch_dependents();
    const bool live = row < counts[0];
    int position = 0;
    i64 page = 0;
    if (live) {
        position = positions[row];
        page = page_table[(i64)row_segment[row] * MAX_PAGES + position / PAGE_TOKENS];
#if ROPE
        for (int i = (int)threadIdx.x; i < HALF; i += THREADS) turns[i] = turn_of(position, inv_freq[i]);
#endif
    }
    tp_wait();
    if (!live) return;
    __syncthreads();
    const float *in = qkv + row * LDX;
    for (int head = warp; head < HEADS + 2 * KV_HEADS; head += THREADS / 32) {
        const int key = head - HEADS, value = key - KV_HEADS;
        if (key < 0) {
            turn_head(in + Q_COL + head * HEAD_DIM, q_norm, turns, q_out + (row * HEADS + head) * HEAD_DIM);
        } else if (value < 0) {
            u16 *out = kv + page * PAGE + ((i64)key * PAGE_TOKENS + position % PAGE_TOKENS) * HEAD_DIM;
            turn_head(in + K_COL + key * HEAD_DIM, k_norm, turns, out);
        } else {
            u16 *out = kv + page * PAGE + ((i64)(KV_HEADS + value) * PAGE_TOKENS + position % PAGE_TOKENS) * HEAD_DIM;
            for (int at = lane * 2; at < HEAD_DIM; at += 64) {
                const float2 v = read2(in + V_COL + value * HEAD_DIM + at);
                write2(out + at, v.x, v.y);
            }
        }
    }
}
