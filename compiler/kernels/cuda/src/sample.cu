/* sample: one token a row of logits. Greedy, or softmax restricted by top-k and top-p, with the CPU sampler's meaning.
 *
 * SPLITS blocks a row reduce CHUNK logits each: largest, its first index, sum of exponentials. The last of a row's
 * blocks to end combines them; where the temperature is not 0 it goes on to draw. A row without a finite maximum, or
 * with a NaN, gives -1. With ADVANCE the step's inputs become those of the next step. Grid: (SPLITS, rows).
 * scratch: 16 bytes a block; counters: i32 a row, zero before and after. Defines: VOCAB, SPLITS, THREADS, ADVANCE,
 * MASS_BITS (fixed-point bits of a weight: VOCAB of them fit 63). */
#include "sample_row.cuh"

#define CHUNK (4 * THREADS)
#define INFINITE_KEY 0xff800000u /* of +infinity; NaN is taken as larger */
#define NOTHING_KEY 0x007fffffu  /* of -infinity */

struct part {
    u32 key; /* of the largest logit, without a sign of zero */
    u32 index;
    float sum; /* of exp(logit - largest) */
    u32 unused;
};

TP_DEVICE u32 order_of(float x) { return x != x ? 0xffffffffu : key_of(x + 0.0f); }

/* The largest key of a block and the lowest index that has it. */
TP_DEVICE part block_largest(workspace &w, u32 key, u32 index) {
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    u32 *keys = w.low, *indices = w.high;
    u32 most = __reduce_max_sync(TP_ALL, key);
    index = __reduce_min_sync(TP_ALL, key == most ? index : 0xffffffffu);
    if (lane == 0) keys[warp] = most, indices[warp] = index;
    __syncthreads();
    key = lane < WARPS ? keys[lane] : 0u;
    most = __reduce_max_sync(TP_ALL, key);
    index = __reduce_min_sync(TP_ALL, lane < WARPS && key == most ? indices[lane] : 0xffffffffu);
    return {most, index, 0.0f, 0u};
}

TP_DEVICE float block_sum(workspace &w, float value) {
    const int lane = (int)threadIdx.x % 32;
    float *sums = (float *)w.list;
    value = tp_warp_sum(value);
    if (lane == 0) sums[threadIdx.x / 32] = value;
    __syncthreads();
    return tp_warp_sum(lane < WARPS ? sums[lane] : 0.0f);
}

/* The largest of a block's chunk of a row, and the sum of exponentials beside it. */
TP_DEVICE part reduce_chunk(workspace &w, const float *logits) {
    float x[4];
    u32 key = 0, index = 0xffffffffu;
    const int start = (int)blockIdx.x * CHUNK;
    TP_UNROLL for (int i = 0; i < 4; i++) {
        const int at = start + i * THREADS + (int)threadIdx.x;
        x[i] = at < VOCAB ? __ldcg(logits + at) : -__uint_as_float(0x7f800000u);
    }
    TP_UNROLL for (int i = 0; i < 4; i++) {
        const int at = start + i * THREADS + (int)threadIdx.x;
        const u32 own = order_of(x[i]);
        if (at < VOCAB && own > key) key = own, index = (u32)at;
    }
    part out = block_largest(w, key, index);
    if (out.key <= NOTHING_KEY || out.key >= INFINITE_KEY) return out;
    const float most = logit_of(out.key);
    float sum = 0;
    TP_UNROLL for (int i = 0; i < 4; i++) sum += exp_as_cpu(x[i] - most);
    out.sum = block_sum(w, sum);
    return out;
}

/* The parts of a row in one, in every thread. */
TP_DEVICE part combine(workspace &w, const part *parts) {
    part own = {0u, 0xffffffffu, 0.0f, 0u};
    if ((int)threadIdx.x < SPLITS) {
        const uint4 bits = __ldcg((const uint4 *)(parts + threadIdx.x));
        own = {bits.x, bits.y, __uint_as_float(bits.z), 0u};
    }
    part out = block_largest(w, own.key, own.index);
    const bool counts = own.sum > 0 && out.key < INFINITE_KEY;
    out.sum = block_sum(w, counts ? own.sum * exp_as_cpu(logit_of(own.key) - logit_of(out.key)) : 0.0f);
    return out;
}

/* A token drawn from a row whose largest finite logit is `max`. */
TP_DEVICE int draw(workspace &w, const float *logits, float max, float temperature, float top_p, int top_k,
                   double chance) {
    const float inverse = temperature > 1e-30f ? __fdiv_rn(1.0f, temperature) : 1e30f;
    const distribution d = {logits, max, inverse, fmaxf(inverse, 1.0f) * (BINS / 88.0f), (float)(1ull << MASS_BITS)};
    kept set = {0u, -1};
    if (top_k > 0 && top_k < VOCAB) set = select_top(d, w, set, false, (u64)top_k, 0.0);
    if (top_p < 1) set = select_top(d, w, set, true, 0, fmax((double)top_p, 0.0));
    return locate(d, w, chance, true, [&](float x, int index) {
        return is_kept(set, key_of(x), index) ? (double)weight_of(d, x) : 0.0;
    });
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    TP_KERNEL(const float *__restrict__ logits, const float *__restrict__ temperature, const float *__restrict__ top_p,
              const i32 *__restrict__ top_k, const u64 *__restrict__ seed, u64 *sample_position,
              const i32 *__restrict__ counts, i32 *__restrict__ sampled, float *__restrict__ logprob,
              i32 *__restrict__ tokens, i32 *__restrict__ positions, part *scratch, i32 *counters) {
    __shared__ workspace w;
    __shared__ int is_last;
    const int row = (int)blockIdx.y;
    tp_launch_dependents();
    const bool live = row < counts[2];
    tp_wait();
    if (!live) return;
    logits += (i64)row * VOCAB;
    part *parts = scratch + (i64)row * SPLITS;
    const part own = reduce_chunk(w, logits);
    if (threadIdx.x == 0) {
        *(uint4 *)(parts + blockIdx.x) = make_uint4(own.key, own.index, __float_as_uint(own.sum), 0u);
        __threadfence();
        is_last = atomicAdd(&counters[row], 1) == SPLITS - 1;
        __threadfence();
    }
    __syncthreads();
    if (!is_last) return;
    const part all = combine(w, parts);
    int token = (int)all.index;
    const float max = logit_of(all.key);
    const bool good = all.key > NOTHING_KEY && all.key < INFINITE_KEY;
    if (!good) {
        token = -1;
    } else if (temperature[row] > 0) {
        const double chance = uniform(seed[row], sample_position[row]);
        token = draw(w, logits, max, temperature[row], top_p[row], top_k[row], chance);
    }
    if (threadIdx.x != 0) return;
    counters[row] = 0;
    sampled[row] = token;
    logprob[row] = good ? (float)((double)__ldcg(logits + token) - (double)max - (double)logf(all.sum)) : 0.0f;
#if ADVANCE
    tokens[row] = token;
    positions[row] += 1;
    sample_position[row] += 1;
#endif
}
