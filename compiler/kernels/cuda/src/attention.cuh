/* The parts of attention.cu at the ends of a block: the query and the current key on the way in, results put together
 * on the way out. */
#ifndef ATTENTION_CUH
#define ATTENTION_CUH
#include "rows.cuh"
#include "warp_mma.cuh"

#define GROUP (HEADS / KV_HEADS)
#define COLUMNS ((GROUP + 7) / 8)
#define K_PIECES ((HEAD_DIM + 31) / 32)
#define V_PIECES ((HEAD_DIM + 63) / 64)
#define HALF (HEAD_DIM / 2)
#define STEPS ((HALF + 63) / 64)
#define UNIT (TILES * 16)
#define PAGE ((i64)2 * KV_HEADS * PAGE_TOKENS * HEAD_DIM)
#define QUADS (GROUP * HEAD_DIM / 4) /* float4s of a result */
#define OUT_STRIDE (HEAD_DIM + 4)    /* floats; neighbouring heads lie in other banks */
#define Q_STRIDE (K_PIECES * 32 + (K_PIECES % 2 ? 0 : 32)) /* halves; likewise */
#define LOG2E 1.4426950408889634f
#define INFINITE __uint_as_float(0x7f800000u)
#if TP_ARCH >= 900
#define RANKS CLUSTER /* blocks that reach each other's shared memory */
#else
#define RANKS 1
#endif
#if RANKS > 1
#define TP_CLUSTER(n) __cluster_dims__(n, 1, 1)
#else
#define TP_CLUSTER(n)
#endif
#ifdef TP_HOST
#define TP_DEVICE_MEMBER inline
#else
#define TP_DEVICE_MEMBER __device__ __forceinline__
#endif
#define PART_STRIDE (GROUP * HEAD_DIM + RANKS * 32) /* floats of a cluster's part: results, then (maximum, sum) a head */

static_assert(PAGE_TOKENS % 16 == 0 && HEAD_DIM % 16 == 0 && GROUP <= 16, "tiles of 16");
static_assert(SPLITS % RANKS == 0, "whole clusters");

/* Shared memory, SHARED bytes: see attention.py. */
struct Shared {
    u16 *query;     /* [COLUMNS * 8][Q_STRIDE], zeros beyond GROUP and HEAD_DIM */
    u16 *key;       /* [HEAD_DIM], the current token's */
    float *value;   /* [HEAD_DIM], rounded to f16 */
    float *current; /* [16] scores of the current token */
    float2 *stat;   /* [WARPS][GROUP]: maximum (base 2), sum */
    float *out;     /* [WARPS][GROUP][OUT_STRIDE] */
    float4 *parts;  /* [RANKS][QUADS / RANKS]: from the blocks of the cluster, what this one puts together */
    float2 *part_stat; /* [RANKS][GROUP] */

    static TP_DEVICE_MEMBER Shared at(u8 *memory) {
        Shared s;
        s.query = (u16 *)memory, memory += COLUMNS * 8 * Q_STRIDE * 2;
        s.key = (u16 *)memory, memory += HEAD_DIM * 2;
        s.value = (float *)memory, memory += HEAD_DIM * 4;
        s.current = (float *)memory, memory += 64;
        s.out = (float *)memory, memory += WARPS * GROUP * OUT_STRIDE * 4;
        s.parts = (float4 *)memory, memory += (QUADS + RANKS) * 16;
        s.stat = (float2 *)memory, memory += WARPS * GROUP * 8;
        s.part_stat = (float2 *)memory;
        return s;
    }
};

/* Sine and cosine to float32 for 0 <= x < 2^24: pi/2 stands as three floats, the first step is exact. */
TP_DEVICE float2 turn(float x) {
    const float quarter = floorf(x * 0.6366197723675814f + 0.5f);
    float r = fmaf(quarter, -1.57079637050628662109375f, x);
    r = fmaf(quarter, 4.37113900018624283e-8f, r);
    r = fmaf(quarter, 1.71512451e-15f, r);
    const float z = r * r;
    float s = fmaf(z, 2.7557319e-6f, -1.9841270e-4f), c = fmaf(z, -2.7557319e-7f, 2.4801587e-5f);
    s = fmaf(z, s, 8.3333333e-3f), c = fmaf(z, c, -1.3888889e-3f);
    s = fmaf(z, s, -1.6666667e-1f), c = fmaf(z, c, 4.1666667e-2f);
    s = fmaf(z * r, s, r), c = fmaf(z, c, -0.5f);
    c = fmaf(z, c, 1.0f);
    const int n = (int)quarter;
    const float sine = n & 1 ? c : s, cosine = n & 1 ? s : c;
    return make_float2((n & 2 ? -sine : sine) * FACTOR, ((n + 1) & 2 ? -cosine : cosine) * FACTOR);
}

/* A lane's part of the rotation: dimensions 64 i + 2 lane and the next. */
struct Turns {
    float2 at[STEPS][2];

    static TP_DEVICE_MEMBER Turns of(int position, const float *inv_freq) {
        Turns out;
        const int lane = (int)threadIdx.x % 32;
        TP_UNROLL for (int i = 0; i < STEPS; i++)
            TP_UNROLL for (int j = 0; j < 2; j++) {
                const int at = i * 64 + lane * 2 + j;
                out.at[i][j] = make_float2(0, 1);
                if (ROPE && at < HALF) out.at[i][j] = turn(__fmul_rn((float)position, inv_freq[at]));
            }
        return out;
    }
};

TP_DEVICE float2 read2(const float *p) {
#ifdef TP_HOST
    return make_float2(p[0], p[1]);
#else
    float2 v;
    if constexpr (LDX % 2 == 0 && Q_COL % 2 == 0 && K_COL % 2 == 0 && V_COL % 2 == 0)
        asm volatile("ld.global.cg.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(p) : "memory");
    else v = make_float2(tp_load(p), tp_load(p + 1));
    return v;
#endif
}

/* One head by one warp: from floats to halves at `out` and, where given, `copy`. */
TP_DEVICE void turn_head(const float *head, const float *weight, const Turns &turns, u16 *out, u16 *copy) {
    const int lane = (int)threadIdx.x % 32;
    float2 a[STEPS], b[STEPS];
    float sum = 0;
    TP_UNROLL for (int i = 0; i < STEPS; i++) {
        const int at = i * 64 + lane * 2;
        a[i] = b[i] = make_float2(0, 0);
        if (at < HALF) a[i] = read2(head + at), b[i] = read2(head + HALF + at);
        sum += a[i].x * a[i].x + a[i].y * a[i].y + b[i].x * b[i].x + b[i].y * b[i].y;
    }
    const float inverse = QK_NORM ? 1.0f / sqrtf(tp_warp_sum(sum) / (float)HEAD_DIM + EPS) : 1.0f;
    TP_UNROLL for (int i = 0; i < STEPS; i++) {
        const int at = i * 64 + lane * 2;
        if (at >= HALF) continue;
        if (QK_NORM) {
            a[i].x *= inverse * __ldg(weight + at), a[i].y *= inverse * __ldg(weight + at + 1);
            b[i].x *= inverse * __ldg(weight + HALF + at), b[i].y *= inverse * __ldg(weight + HALF + at + 1);
        }
        const float2 x = turns.at[i][0], y = turns.at[i][1];
        const u32 low = tp_pack(a[i].x * x.y - b[i].x * x.x, a[i].y * y.y - b[i].y * y.x);
        const u32 high = tp_pack(b[i].x * x.y + a[i].x * x.x, b[i].y * y.y + a[i].y * y.x);
        *(u32 *)(out + at) = low, *(u32 *)(out + HALF + at) = high;
        if (copy) *(u32 *)(copy + at) = low, *(u32 *)(copy + HALF + at) = high;
    }
}

/* Queries to shared memory; in the first block also the current key and value, which go to the pool (`slot`) too. */
TP_DEVICE void enter(const Shared &shared, const Turns &turns, const float *line, int head, const float *q_norm,
                     const float *k_norm, bool first, u16 *slot) {
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    TP_UNROLL for (int i = warp; i < COLUMNS * 8; i += WARPS) {
        u16 *out = shared.query + i * Q_STRIDE;
        if (i < GROUP) turn_head(line + Q_COL + (head * GROUP + i) * HEAD_DIM, q_norm, turns, out, nullptr);
        const int from = i < GROUP ? HEAD_DIM : 0;
        for (int at = from + lane * 2; at < K_PIECES * 32; at += 64) *(u32 *)(out + at) = 0;
    }
    if (!first) return;
    if (warp == GROUP % WARPS) turn_head(line + K_COL + head * HEAD_DIM, k_norm, turns, shared.key, slot);
    if (warp != (GROUP + 1) % WARPS) return;
    for (int at = lane * 2; at < HEAD_DIM; at += 64) {
        const float2 v = read2(line + V_COL + head * HEAD_DIM + at);
        const u32 bits = tp_pack(v.x, v.y);
        *(u32 *)(slot + KV_HEADS * PAGE_TOKENS * HEAD_DIM + at) = bits;
        *(float2 *)(shared.value + at) = make_float2(tp_f16((u16)bits), tp_f16((u16)(bits >> 16)));
    }
}

/* Scores of the current token, one warp a head. */
TP_DEVICE void score_current(const Shared &shared) {
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    for (int g = warp; g < GROUP; g += WARPS) {
        float sum = 0;
        for (int at = lane; at < HEAD_DIM; at += 32)
            sum = fmaf(tp_f16(shared.query[g * Q_STRIDE + at]), tp_f16(shared.key[at]), sum);
        sum = tp_warp_sum(sum);
        if (lane == 0) shared.current[g] = sum * (SCALE * LOG2E);
    }
}

/* Sums of exponentials with the same reference. */
struct Sum {
    float top, total;
    float4 out;

    TP_DEVICE_MEMBER float weight(float other) const { return other == -INFINITE ? 0.0f : tp_exp2(other - top); }
    TP_DEVICE_MEMBER void add(float2 stat, const float4 &x) {
        const float w = weight(stat.x);
        total = fmaf(stat.y, w, total);
        out.x = fmaf(x.x, w, out.x), out.y = fmaf(x.y, w, out.y);
        out.z = fmaf(x.z, w, out.z), out.w = fmaf(x.w, w, out.w);
    }
};

/* Where results go. */
struct Target {
    tp_out<OUT>::type *out;
    float *parts;
    i32 *counter;
    int clusters;

    TP_DEVICE_MEMBER void write(int quad, const Sum &sum) const {
        const float scale = 1.0f / sum.total;
        const float4 y = make_float4(sum.out.x * scale, sum.out.y * scale, sum.out.z * scale, sum.out.w * scale);
        if constexpr (OUT == TP_F32) {
            *(float4 *)(out + quad * 4) = y;
        } else {
            const u32 low = (u32)tp_out<OUT>::from(y.x) | (u32)tp_out<OUT>::from(y.y) << 16;
            const u32 high = (u32)tp_out<OUT>::from(y.z) | (u32)tp_out<OUT>::from(y.w) << 16;
            *(uint2 *)(out + quad * 4) = make_uint2(low, high);
        }
    }
    /* A cluster's sum: the result, or a part of it. */
    TP_DEVICE_MEMBER void put(int quad, int rank, int cluster, const Sum &sum) const {
        if (clusters == 1) {
            write(quad, sum);
            return;
        }
        float *part = parts + cluster * PART_STRIDE;
        __stcg((float4 *)part + quad, sum.out);
        float2 *stat = (float2 *)(part + GROUP * HEAD_DIM) + rank * 16 + quad / (HEAD_DIM / 4);
        __stcg(stat, make_float2(sum.top, sum.total));
    }
};

/* The sum of this block's warps, and of the current token in the first block, for four dimensions of a head. */
TP_DEVICE Sum sum_warps(const Shared &shared, int quad, bool first) {
    const int head = quad / (HEAD_DIM / 4), at = quad % (HEAD_DIM / 4) * 4;
    Sum sum = {first ? shared.current[head] : -INFINITE, 0, {0, 0, 0, 0}};
    float2 stat[WARPS];
    TP_UNROLL for (int w = 0; w < WARPS; w++) {
        stat[w] = shared.stat[w * GROUP + head];
        sum.top = fmaxf(sum.top, stat[w].x);
    }
    if (first) sum.add(make_float2(shared.current[head], 1), *(const float4 *)(shared.value + at));
    TP_UNROLL for (int w = 0; w < WARPS; w++)
        sum.add(stat[w], *(const float4 *)(shared.out + (w * GROUP + head) * OUT_STRIDE + at));
    return sum;
}

#if RANKS > 1
/* Hands each block of the cluster its share of this block's sums. Quad q is put together by rank q % blocks. */
TP_DEVICE void exchange(const Shared &shared, int rank, int shift, bool first) {
    const int blocks = 1 << shift, each = (QUADS + blocks - 1) >> shift;
    tp_cluster_wait();
    for (int quad = (int)threadIdx.x; quad < QUADS; quad += WARPS * 32) {
        const Sum sum = sum_warps(shared, quad, first);
        tp_remote_store4(tp_remote(shared.parts + rank * each + (quad >> shift), quad & (blocks - 1)), sum.out);
        const int head = quad / (HEAD_DIM / 4), place = quad % (HEAD_DIM / 4);
        if (place < blocks || HEAD_DIM / 4 < blocks)
            for (int r = place; r < blocks; r += HEAD_DIM / 4)
                tp_remote_store2(tp_remote(shared.part_stat + rank * GROUP + head, r), make_float2(sum.top, sum.total));
    }
    tp_cluster_arrive();
    tp_cluster_wait();
}

TP_DEVICE Sum sum_blocks(const Shared &shared, int quad, int shift) {
    const int head = quad / (HEAD_DIM / 4), blocks = 1 << shift, each = (QUADS + blocks - 1) >> shift;
    Sum sum = {-INFINITE, 0, {0, 0, 0, 0}};
    TP_UNROLL for (int r = 0; r < RANKS; r++)
        if (r < blocks) sum.top = fmaxf(sum.top, shared.part_stat[r * GROUP + head].x);
    TP_UNROLL for (int r = 0; r < RANKS; r++)
        if (r < blocks) sum.add(shared.part_stat[r * GROUP + head], shared.parts[r * each + (quad >> shift)]);
    return sum;
}
#endif

/* The sum of all clusters for four dimensions of a head; loads of eight clusters are on their way at once. */
TP_DEVICE Sum sum_clusters(const Target &target, int quad, int rank) {
    const float *stats = target.parts + GROUP * HEAD_DIM + (rank * 16 + quad / (HEAD_DIM / 4)) * 2;
    Sum sum = {-INFINITE, 0, {0, 0, 0, 0}};
    for (int from = 0; from < target.clusters; from += 8) {
        float top[8], total[8];
        float4 x[8];
        TP_UNROLL for (int c = 0; c < 8; c++) {
            const int part = min(from + c, target.clusters - 1) * PART_STRIDE;
            top[c] = tp_load(stats + part), total[c] = tp_load(stats + part + 1);
            x[c] = tp_load4(target.parts + part + quad * 4);
            if (from + c >= target.clusters) top[c] = -INFINITE;
        }
        const float before = sum.top;
        TP_UNROLL for (int c = 0; c < 8; c++) sum.top = fmaxf(sum.top, top[c]);
        Sum next = {sum.top, 0, {0, 0, 0, 0}};
        next.add(make_float2(before, sum.total), sum.out);
        TP_UNROLL for (int c = 0; c < 8; c++) next.add(make_float2(top[c], total[c]), x[c]);
        sum = next;
    }
    return sum;
}

/* From the warps' results in shared memory to the output. */
TP_DEVICE void finish(const Shared &shared, const Target &target, int shift, bool first) {
    const int rank = (int)blockIdx.x % RANKS, cluster = (int)blockIdx.x / RANKS;
    const int begin = ((int)threadIdx.x << shift) + rank, step = (WARPS * 32) << shift;
#if RANKS > 1
    if (shift) {
        exchange(shared, rank, shift, first);
        for (int quad = begin; quad < QUADS; quad += step) target.put(quad, rank, cluster, sum_blocks(shared, quad, shift));
    } else
#endif
        for (int quad = begin; quad < QUADS; quad += step) target.put(quad, rank, cluster, sum_warps(shared, quad, first));
    if (target.clusters == 1) return;
    __threadfence();
    __syncthreads();
    i32 *last = (i32 *)shared.current;
    if (threadIdx.x == 0) {
        *last = atomicAdd(target.counter + rank, 1) == target.clusters - 1;
        __threadfence();
    }
    __syncthreads();
    if (!*last) return;
    if (threadIdx.x == 0) target.counter[rank] = 0;
    for (int quad = begin; quad < QUADS; quad += step) target.write(quad, sum_clusters(target, quad, rank));
}

#endif
