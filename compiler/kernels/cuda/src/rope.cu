/* rope_kv: norms (QK_NORM) and rotates (ROPE) queries and keys, hands queries on as f16, writes keys and values to
 * their page of the pool as f16.
 *
 * One block a row, one warp a head, two neighbouring elements of both halves a lane. Defines: HEADS, KV_HEADS,
 * HEAD_DIM, LDX (of qkv), Q_COL, K_COL, V_COL, PAGE_TOKENS, MAX_PAGES, FACTOR, EPS, QK_NORM, ROPE, THREADS. */
#include "rows.cuh"

#define HALF (HEAD_DIM / 2)
#define STEPS ((HALF + 63) / 64)
#define PAGE ((i64)2 * KV_HEADS * PAGE_TOKENS * HEAD_DIM)

/* Sine and cosine of an angle of up to 2^30, to 1 ulp: the turn is taken off in double, the rest are short series. */
TP_DEVICE float2 sine_cosine(float angle) {
    const double turns = rint((double)angle * 0.63661977236758134308);
    const float r = (float)fma(-turns, 6.123233995736766e-17, fma(-turns, 1.5707963267948966, (double)angle));
    const float z = r * r;
    float s = fmaf(z, 2.7557319e-6f, -1.9841270e-4f), c = fmaf(z, -2.7557319e-7f, 2.4801587e-5f);
    s = fmaf(s, z, 8.3333333e-3f), c = fmaf(c, z, -1.3888889e-3f);
    s = fmaf(s, z, -1.6666667e-1f), c = fmaf(c, z, 4.1666667e-2f);
    s = fmaf(s * z, r, r), c = fmaf(c, z, -0.5f);
    c = fmaf(c, z, 1.0f);
    const int quarter = (int)(i64)turns & 3;
    const float sine = quarter & 1 ? c : s, cosine = quarter & 1 ? s : c;
    return make_float2(quarter & 2 ? -sine : sine, (quarter + 1) & 2 ? -cosine : cosine);
}

TP_DEVICE float2 read2(const float *p) {
    float2 v;
    if constexpr (LDX % 2 == 0 && Q_COL % 2 == 0 && K_COL % 2 == 0 && V_COL % 2 == 0) v = __ldcg((const float2 *)p);
    else v = make_float2(__ldcg(p), __ldcg(p + 1));
    return v;
}

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
        for (int i = (int)threadIdx.x; i < HALF; i += THREADS) {
            const float2 turn = sine_cosine(__fmul_rn((float)position, inv_freq[i]));
            turns[i] = make_float2(turn.x * FACTOR, turn.y * FACTOR);
        }
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
