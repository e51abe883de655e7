/* sample: one token a row of logits. Greedy, or softmax restricted by top-k and top-p, with the CPU sampler's meaning.
 *
 * The blocks of a cluster share a row (sample_row.cuh). Each finds its largest logit, the first index that has it and
 * the sum of exponentials beside it; together these give the greedy token and the log probability's denominator. Where
 * the temperature is not 0 they go on to draw. A row without a finite maximum, or with a NaN, gives -1. With ADVANCE
 * the step's inputs become those of the next step. Grid: (CLUSTER, rows). Defines: ADVANCE, and sample_row.cuh's. */
#include "sample_row.cuh"

#if RANKS > 1
#define TP_CLUSTER(n) __cluster_dims__(n, 1, 1)
#else
#define TP_CLUSTER(n)
#endif

TP_DEVICE bool is_finite(u32 key) { return key > NOTHING_KEY && key < INFINITE_KEY; }

/* The slice from device memory to shared memory, its largest logit, and the sum of exponentials beside it. */
TP_DEVICE part load_slice(workspace &w, const slice &s) {
    float top = -INFINITE;
    int index = VOCAB;
    bool has_nan = false;
    auto take = [&](float x, int at) {
        has_nan |= x != x;
        if (x > top) top = x, index = at;
    };
    for_quads<LOADS>(
        s, [&](int at) { return load_quad(s.row, s.first + at); },
        [&](const float4 &x, int at, bool valid) {
            if (valid && (HELD >= SLICE || at < HELD)) *(float4 *)(s.held + at) = x;
            const int first = s.first + at;
            take(x.x, first), take(x.y, first + 1), take(x.z, first + 2), take(x.w, first + 3);
        });
    part out = block_largest(w, has_nan ? 0xffffffffu : key_of(top + 0.0f), (u32)index);
    if (!is_finite(out.key)) return out;
    top = logit_of(out.key);
    float sum = 0;
    for_all(s, [&](float x, int) { sum += tp_exp2((x - top) * LOG2E); });
    out.sum = block_sum(w, sum);
    return out;
}

/* The parts of all blocks in one. */
TP_DEVICE part combine(const workspace &w) {
    part out = w.parts[0];
    TP_UNROLL for (int r = 1; r < RANKS; r++)
        if (w.parts[r].key > out.key) out = w.parts[r];
    if (!is_finite(out.key)) return out;
    const float top = logit_of(out.key);
    out.sum = 0;
    TP_UNROLL for (int r = 0; r < RANKS; r++) {
        const part own = w.parts[r];
        if (own.key > NOTHING_KEY) out.sum += own.sum * tp_exp2((logit_of(own.key) - top) * LOG2E);
    }
    return out;
}

/* A token drawn from a row whose largest logit is `max`, in the block that holds it; elsewhere -1. */
TP_DEVICE int draw(workspace &w, const slice &s, float max, float temperature, float top_p, int top_k, double chance) {
    /* never 0, so that tokens of -infinity weigh nothing at any temperature */
    const float inverse = temperature > 1e-30f ? fmaxf(__fdiv_rn(1.0f, temperature), 1e-38f) : 1e30f;
    const distribution d = {max, inverse};
    kept set = {NOTHING_KEY, VOCAB - 1};
    if (top_k > 0 && top_k < VOCAB) set = select_top<false>(w, s, d, set, (u64)top_k, -1.0);
    if (top_p < 1) set = select_top<true>(w, s, d, set, 0, fmax((double)top_p, 0.0));
    return locate(w, s, chance, true, [&](float x, int index) {
        return is_kept(set, key_of(x), index) ? (double)weight_of(d, x) : 0.0;
    });
}

extern "C" __global__ void TP_CLUSTER(RANKS) __launch_bounds__(THREADS, 2)
    TP_KERNEL(const float *__restrict__ logits, const float *__restrict__ temperature, const float *__restrict__ top_p,
              const i32 *__restrict__ top_k, const u64 *__restrict__ seed, u64 *sample_position,
              const i32 *__restrict__ counts, i32 *__restrict__ sampled, float *__restrict__ logprob,
              i32 *__restrict__ tokens, i32 *__restrict__ positions) {
    TP_SHARED(memory);
    workspace &w = *(workspace *)memory;
    const int row = (int)blockIdx.y;
    tp_launch_dependents();
    if (row >= counts[2] || (int)blockIdx.x >= RANKS) {
        tp_wait();
        return;
    }
    cluster_enter();
    const float warmth = temperature[row], p = top_p[row];
    const int k = top_k[row];
    const u64 stream = seed[row];
    tp_wait();
    const u64 position = __ldcg(sample_position + row);
    const slice s = slice_of(logits + (i64)row * VOCAB, (float *)(memory + WORKSPACE));
    const part own = load_slice(w, s);
    cluster_wait();
    tell_all(&w.parts[block_rank()], own);
    sync_cluster();

    const part all = combine(w);
    const float max = logit_of(all.key);
    const bool good = is_finite(all.key);
    int token = good ? (int)all.index : -1;
    float logit = max;
    bool writes = block_rank() == 0;
    if (good && warmth > 0) {
        token = draw(w, s, max, warmth, p, k, uniform(stream, position));
        writes = token >= 0;
        if (writes) logit = logit_at(s, token - s.first);
    }
    if (!writes || threadIdx.x != 0) return;
    sampled[row] = token;
    logprob[row] = good ? (float)((double)logit - (double)max - (double)logf(all.sum)) : 0.0f;
#if ADVANCE
    tokens[row] = token;
    positions[row] += 1;
    sample_position[row] = position + 1;
#endif
}
