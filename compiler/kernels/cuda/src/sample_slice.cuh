/* What a block of the sampler has: its slice of a row of logits in shared memory, ways to the other blocks of its
 * cluster, weights, and sums over its threads. Defines: see sample_row.cuh. */
#ifndef SAMPLE_SLICE_CUH
#define SAMPLE_SLICE_CUH
#include "warp_mma.cuh"

#define TP_ROLLED _Pragma("unroll 1")
#define WARPS (THREADS / 32)
#define BIN_BITS 10
#define BINS (1 << BIN_BITS)
#define BINS_A_THREAD (BINS / THREADS)
#define LISTED (4096 / RANKS)         /* keys of a block that are listed */
#define BATCH (HELD >= SLICE ? 1 : 2) /* quads of logits that a thread loads before it uses the first */
#define LOADS (VOCAB % 4 ? 2 : 8)     /* the same on the first way through */
#define INFINITE_KEY 0xff800000u      /* of +infinity; NaN is taken as larger */
#define NOTHING_KEY 0x007fffffu       /* of -infinity */
#define INFINITE __uint_as_float(0x7f800000u)
#define LOG2E 1.4426950408889634f

/* Blocks that share a row, tokens of a block and of a warp. Where there are no clusters, one block has the row. */
#if TP_ARCH >= 900 || defined(TP_HOST)
#define RANKS CLUSTER
#else
#define RANKS 1
#endif
#define SLICE (((VOCAB + RANKS - 1) / RANKS + 3) / 4 * 4)
#define STRETCH ((SLICE + WARPS * 128 - 1) / (WARPS * 128) * 128)
#define STRETCH_ITEMS ((STRETCH + THREADS - 1) / THREADS)

static_assert(BINS % THREADS == 0 && BINS % RANKS == 0 && WARPS % RANKS == 0 && WARPS <= 32, "equal shares");

/* What a block knows of a row. */
struct part {
    u32 key;   /* of the largest logit, without a sign of zero */
    u32 index; /* the first that has it */
    float sum; /* of exp(logit - largest) */
    u32 unused;
};

/* Shared memory of a block, WORKSPACE bytes; behind it lie HELD logits. `peers write` marks what blocks fill in for
 * all others. */
struct workspace {
    u64 sums[BINS];            /* of the cluster; peers write */
    u32 low[BINS], high[BINS]; /* halves of this block's sums; peers read */
    u32 list[RANKS][LISTED];   /* keys in a bin, by block; peers write */
    part parts[RANKS];         /* by block; peers write */
    double masses[RANKS];      /* by block; peers write */
    double stretches[WARPS];
    u64 scan[WARPS], before, inside, total; /* of the bin that was found */
    u32 keys[WARPS], indices[WARPS];
    int listed[RANKS]; /* by block; peers write */
    int found;         /* peers write */
    int bin, own_listed, first, last;
    u32 differing;
};
static_assert(sizeof(workspace) <= WORKSPACE && WORKSPACE % 16 == 0, "the descriptor's shared memory");

/* A block's part of a row. */
struct slice {
    const float *row;
    float *held;      /* the first HELD logits, in shared memory */
    int first, count; /* tokens; a multiple of 4, so the last ones may lie past the row */
};

struct distribution {
    float max, inverse_temperature;
};

/* The tokens that are kept: those with a larger key, and those of this key up to an index. */
struct kept {
    u32 key;
    int last;
};

/* ---- clusters ---- */

TP_DEVICE int block_rank() { return RANKS > 1 ? (int)blockIdx.x : 0; }

/* Counts this thread in: it runs, so that others may write to its block behind cluster_wait(). */
TP_DEVICE void cluster_enter() {
#if RANKS > 1 && !defined(TP_HOST)
    asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
#endif
}

/* Counts this thread in; what it wrote before is visible to all behind cluster_wait(). */
TP_DEVICE void cluster_arrive() {
#if RANKS > 1 && !defined(TP_HOST)
    asm volatile("barrier.cluster.arrive.release;" ::: "memory");
#endif
}

/* Until every thread of the cluster has arrived. */
TP_DEVICE void cluster_wait() {
#if RANKS == 1
    __syncthreads();
#elif defined(TP_HOST)
    tp_host_cluster_barrier();
#else
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#endif
}

TP_DEVICE void sync_cluster() {
    cluster_arrive();
    cluster_wait();
}

/* A shared variable of ours in another block of the cluster. */
template <class T> TP_DEVICE T *peer(T *shared, int rank) {
#if RANKS == 1
    return shared;
#elif defined(TP_HOST)
    return (T *)tp_host_peer(shared, rank);
#else
    T *out;
    asm("mapa.u64 %0, %1, %2;" : "=l"(out) : "l"(shared), "r"(rank));
    return out;
#endif
}

/* Writes to a variable of all blocks, by the first threads of this one; seen behind sync_cluster(). */
template <class T> TP_DEVICE void tell_all(T *shared, T value) {
    if (threadIdx.x < RANKS) *peer(shared, (int)threadIdx.x) = value;
}

/* ---- logits ---- */

/* Larger logits have larger keys. */
TP_DEVICE u32 key_of(float x) {
    const u32 bits = __float_as_uint(x);
    return bits ^ ((u32)((i32)bits >> 31) | 0x80000000u);
}

TP_DEVICE float logit_of(u32 key) { return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key); }

/* exp of tp_math.h, operation for operation; x <= 0. Adding 1.5 * 2^23 rounds to an integer, in the low bits. */
TP_DEVICE float exp_as_cpu(float x) {
    const float shifted = __fadd_rn(__fmul_rn(x, 1.44269504f), 12582912.0f);
    const float n = __fsub_rn(shifted, 12582912.0f);
    float r = __fmaf_rn(-n, 0.693145752f, x);
    r = __fmaf_rn(-n, 1.42860682e-6f, r);
    float p = __fmaf_rn(1.0f / 5040, r, 1.0f / 720);
    p = __fmaf_rn(p, r, 1.0f / 120);
    p = __fmaf_rn(p, r, 1.0f / 24);
    p = __fmaf_rn(p, r, 1.0f / 6);
    p = __fmaf_rn(p, r, 0.5f);
    p = __fmaf_rn(p, r, 1.0f);
    p = __fmaf_rn(p, r, 1.0f);
    return x < -87.33654f ? 0.0f : __uint_as_float(__float_as_uint(p) + (__float_as_uint(shifted) << 23));
}

TP_DEVICE float weight_of(const distribution &d, float x) {
    return exp_as_cpu(__fmul_rn(__fsub_rn(x, d.max), d.inverse_temperature));
}

/* What a token counts in a search: 1, or its weight in fixed point. */
template <bool BY_MASS> TP_DEVICE u64 worth(const distribution &d, float x) {
    return BY_MASS ? (u64)(weight_of(d, x) * (float)(1ull << MASS_BITS)) : (u64)1;
}

/* Logits past the row's end are -infinity and have indices from VOCAB on, so that no set keeps them. */
TP_DEVICE bool is_kept(const kept &set, u32 key, int index) {
    return key > set.key || (key == set.key && index <= set.last);
}

/* ---- a slice ---- */

TP_DEVICE float4 load_quad(const float *row, int index) {
    if constexpr (VOCAB % 4 == 0) return tp_load4(row + index);
    float x[4];
    TP_UNROLL for (int i = 0; i < 4; i++) x[i] = index + i < VOCAB ? tp_load(row + index + i) : -INFINITE;
    return make_float4(x[0], x[1], x[2], x[3]);
}

TP_DEVICE slice slice_of(const float *row, float *held) {
    const int first = block_rank() * SLICE, rest = VOCAB % 4 ? (VOCAB + 3) / 4 * 4 - first : VOCAB - first;
    return {row, held, first, max(0, min(SLICE, rest))};
}

TP_DEVICE float4 quad_at(const slice &s, int at) {
    return HELD >= SLICE || at < HELD ? *(const float4 *)(s.held + at) : load_quad(s.row, s.first + at);
}

TP_DEVICE float logit_at(const slice &s, int at) {
    if (HELD >= SLICE || at < HELD) return s.held[at];
    return s.first + at < VOCAB ? tp_load(s.row + s.first + at) : -INFINITE;
}

/* Calls f(quad, place in the slice, whether it is part of it) for the STRETCH of each warp, N quads a thread at a time;
 * `load` gets them. Whole warps take part in each call. */
template <int N, class L, class F> TP_DEVICE void for_quads(const slice &s, L load, F f) {
    const int begin = (int)threadIdx.x / 32 * STRETCH, end = min(begin + STRETCH, s.count);
    TP_ROLLED for (int start = begin; start < end; start += N * 128) {
        float4 x[N];
        TP_UNROLL for (int i = 0; i < N; i++) {
            const int at = start + i * 128 + (int)threadIdx.x % 32 * 4;
            x[i] = at < end ? load(at) : make_float4(-INFINITE, -INFINITE, -INFINITE, -INFINITE);
        }
        TP_UNROLL for (int i = 0; i < N; i++) {
            const int at = start + i * 128 + (int)threadIdx.x % 32 * 4;
            f(x[i], at, at < end);
        }
    }
}

/* Calls f(quad, index of its first token) for the slice. */
template <class F> TP_DEVICE void for_held(const slice &s, F f) {
    for_quads<BATCH>(
        s, [&](int at) { return quad_at(s, at); },
        [&](const float4 &x, int at, bool valid) { f(x, valid ? s.first + at : VOCAB); });
}

/* Calls f(logit, index) for every token of the slice. */
template <class F> TP_DEVICE void for_all(const slice &s, F f) {
    for_held(s, [&](const float4 &x, int index) {
        f(x.x, index), f(x.y, index + 1), f(x.z, index + 2), f(x.w, index + 3);
    });
}

/* ---- sums over a block, in a fixed order; every thread gets them ---- */

TP_DEVICE u64 warp_sum(u64 value) {
    TP_UNROLL for (int lane = 16; lane; lane >>= 1) value += __shfl_xor_sync(TP_ALL, value, lane);
    return value;
}

template <class T> TP_DEVICE T warp_scan(T value) {
    TP_UNROLL for (int by = 1; by < 32; by <<= 1) {
        const T other = __shfl_up_sync(TP_ALL, value, by);
        if ((int)threadIdx.x % 32 >= by) value += other;
    }
    return value;
}

/* Inclusive sum over the threads of a block; `warps` holds a value a warp. */
template <class T> TP_DEVICE T block_scan(T *warps, T value) {
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    value = warp_scan(value);
    __syncthreads();
    if (lane == 31) warps[warp] = value;
    __syncthreads();
    const T upto = warp_scan(lane < WARPS ? warps[lane] : (T)0);
    const T before = __shfl_sync(TP_ALL, upto, (warp + 31) % 32);
    return warp ? before + value : value;
}

/* The largest key of a block and the lowest index that has it. */
TP_DEVICE part block_largest(workspace &w, u32 key, u32 index) {
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    u32 most = __reduce_max_sync(TP_ALL, key);
    index = __reduce_min_sync(TP_ALL, key == most ? index : 0xffffffffu);
    if (lane == 0) w.keys[warp] = most, w.indices[warp] = index;
    __syncthreads();
    key = lane < WARPS ? w.keys[lane] : 0u;
    most = __reduce_max_sync(TP_ALL, key);
    index = __reduce_min_sync(TP_ALL, lane < WARPS && key == most ? w.indices[lane] : 0xffffffffu);
    return {most, index, 0.0f, 0u};
}

TP_DEVICE float block_sum(workspace &w, float value) {
    const int lane = (int)threadIdx.x % 32;
    float *sums = (float *)w.scan;
    value = tp_warp_sum(value);
    if (lane == 0) sums[threadIdx.x / 32] = value;
    __syncthreads();
    return tp_warp_sum(lane < WARPS ? sums[lane] : 0.0f);
}
#endif
