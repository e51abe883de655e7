/* Drawing a token from one row of logits by one block: the row as a distribution, sums and searches over it.
 *
 * Weights are those of the CPU sampler bit for bit. Thresholds are found with counts and with fixed-point masses in
 * integers, and tokens are located with double sums in a fixed order, so a result never depends on timing; where a
 * running sum comes within about 2^-37 (top-p) or 2^-50 (the draw) of its target, it may differ from the CPU's.
 * Defines: VOCAB, THREADS. */
#ifndef SAMPLE_ROW_CUH
#define SAMPLE_ROW_CUH
#include "tapeout.cuh"

#define WARPS (THREADS / 32)
#define BINS 2048
#define TP_ROLLED _Pragma("unroll 1")
#ifdef TP_HOST
#define TP_SEPARATE static __attribute__((noinline))
#else
#define TP_SEPARATE static __device__ __noinline__
#endif
#define BINS_A_THREAD (BINS / THREADS)
#define LISTED 4096
#define BATCH 4 /* logits a thread loads before it uses the first */

/* The tokens that are kept: those with a larger key, and those of this key up to an index. */
struct kept {
    u32 key;
    int last;
};

struct distribution {
    const float *logits;
    float max, inverse_temperature, bins_a_logit, mass_scale;
};

/* Shared memory of a row's block. */
struct workspace {
    u32 low[BINS], high[BINS]; /* halves of 64-bit sums */
    u32 list[LISTED];          /* keys */
    double sums[WARPS];
    u64 scan[WARPS];
    u64 before, inside, total; /* of the bin that was found */
    int bin, listed, first, last;
};

/* Larger logits have larger keys. */
TP_DEVICE u32 key_of(float x) {
    const u32 bits = __float_as_uint(x);
    return bits ^ ((u32)((i32)bits >> 31) | 0x80000000u);
}

TP_DEVICE float logit_of(u32 key) { return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key); }

/* exp of tp_math.h, operation for operation; x <= 0. */
TP_DEVICE float exp_as_cpu(float x) {
    if (x < -87.33654f) return 0.0f;
    const float n = rintf(__fmul_rn(x, 1.44269504f));
    float r = __fmaf_rn(-n, 0.693145752f, x);
    r = __fmaf_rn(-n, 1.42860682e-6f, r);
    float p = __fmaf_rn(1.0f / 5040, r, 1.0f / 720);
    p = __fmaf_rn(p, r, 1.0f / 120);
    p = __fmaf_rn(p, r, 1.0f / 24);
    p = __fmaf_rn(p, r, 1.0f / 6);
    p = __fmaf_rn(p, r, 0.5f);
    p = __fmaf_rn(p, r, 1.0f);
    p = __fmaf_rn(p, r, 1.0f);
    return __uint_as_float(__float_as_uint(p) + ((u32)(i32)n << 23));
}

TP_DEVICE float weight_of(const distribution &d, float x) {
    return exp_as_cpu(__fmul_rn(__fsub_rn(x, d.max), d.inverse_temperature));
}

/* A first cut that spreads logits over the bins, the largest in bin 0: monotone, and no more than that. */
TP_DEVICE int bin_of(const distribution &d, float x) {
    return (int)fminf((d.max - x) * d.bins_a_logit, (float)(BINS - 1));
}

TP_DEVICE bool is_kept(const kept &set, u32 key, int index) {
    return key > set.key || (key == set.key && index <= set.last);
}

/* Calls f(valid, logit, index) for every token, for whole warps at a time. */
template <class F> TP_DEVICE void for_all(const distribution &d, F f) {
    TP_ROLLED for (int start = 0; start < VOCAB; start += BATCH * THREADS) {
        float x[BATCH];
        TP_UNROLL for (int i = 0; i < BATCH; i++) {
            const int index = start + i * THREADS + (int)threadIdx.x;
            x[i] = index < VOCAB ? __ldcg(d.logits + index) : 0.0f;
        }
        TP_UNROLL for (int i = 0; i < BATCH; i++) {
            const int index = start + i * THREADS + (int)threadIdx.x;
            f(index < VOCAB, x[i], index);
        }
    }
}

/* Adds to a bin of 64 bits; integers, so the order does not matter. */
TP_DEVICE void add_to_bin(workspace &w, int bin, u64 value) {
    const u32 low = (u32)value, old = atomicAdd(&w.low[bin], low);
    const u32 high = (u32)(value >> 32) + (old + low < old);
    if (high) atomicAdd(&w.high[bin], high);
}

TP_DEVICE u64 warp_sum(u64 value) {
    TP_UNROLL for (int lane = 16; lane; lane >>= 1) value += __shfl_xor_sync(TP_ALL, value, lane);
    return value;
}

/* The same for a whole warp, where value 0 adds nothing. Lanes of one bin would wait for each other. */
TP_DEVICE void warp_add_to_bin(workspace &w, int bin, u64 value) {
    const u32 busy = __ballot_sync(TP_ALL, value != 0);
    if (!busy) return;
    const int first = __shfl_sync(TP_ALL, bin, __ffs((int)busy) - 1);
    if (__all_sync(TP_ALL, value == 0 || bin == first)) {
        value = warp_sum(value);
        if (threadIdx.x % 32 == 0) add_to_bin(w, first, value);
    } else if (value) {
        add_to_bin(w, bin, value);
    }
}

TP_DEVICE void clear_bins(workspace &w) {
    __syncthreads();
    for (int i = (int)threadIdx.x; i < BINS; i += THREADS) w.low[i] = w.high[i] = 0;
    __syncthreads();
}

/* Inclusive sum over the threads of a block. */
TP_DEVICE u64 block_scan(workspace &w, u64 value) {
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    TP_UNROLL for (int by = 1; by < 32; by <<= 1) {
        const u64 other = __shfl_up_sync(TP_ALL, value, by);
        if (lane >= by) value += other;
    }
    __syncthreads();
    if (lane == 31) w.scan[warp] = value;
    __syncthreads();
    u64 before = warp_sum(lane < warp ? w.scan[lane] : (u64)0);
    return before + value;
}

/* Finds the first bin up to which the sum reaches `wanted`, a share of the total if `share` is not negative. */
TP_DEVICE u64 find_bin(workspace &w, u64 wanted, double share) {
    u64 own[BINS_A_THREAD], sum = 0;
    __syncthreads();
    TP_UNROLL for (int i = 0; i < BINS_A_THREAD; i++) {
        const int bin = (int)threadIdx.x * BINS_A_THREAD + i;
        own[i] = (u64)w.high[bin] << 32 | w.low[bin];
        sum += own[i];
    }
    const u64 upto = block_scan(w, sum);
    if (threadIdx.x == THREADS - 1) w.total = upto;
    __syncthreads();
    if (share >= 0) {
        const double product = (double)w.total * share;
        wanted = (u64)product + ((double)(u64)product < product);
    }
    wanted = wanted ? wanted : 1;
    u64 before = upto - sum;
    TP_UNROLL for (int i = 0; i < BINS_A_THREAD; i++) {
        if (before < wanted && wanted <= before + own[i])
            w.bin = (int)threadIdx.x * BINS_A_THREAD + i, w.before = before, w.inside = own[i];
        before += own[i];
    }
    __syncthreads();
    return wanted;
}

/* The first index at which the running sum of f over all tokens passes `target`, a share of the total if `is_share`;
 * else the last index where f > 0. f(logit, index) >= 0. A warp sums a stretch of tokens, then the block searches one
 * stretch. */
#define STRETCH ((VOCAB + WARPS - 1) / WARPS)
#define STRETCH_ITEMS ((STRETCH + THREADS - 1) / THREADS)
template <class F> TP_DEVICE int locate(const distribution &d, workspace &w, double target, bool is_share, F f) {
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    double sum = 0;
    TP_ROLLED for (int i = lane; i < STRETCH; i += 32 * BATCH) {
        float x[BATCH];
        TP_UNROLL for (int j = 0; j < BATCH; j++) {
            const int at = i + 32 * j, index = warp * STRETCH + at;
            x[j] = at < STRETCH && index < VOCAB ? __ldcg(d.logits + index) : 0.0f;
        }
        TP_UNROLL for (int j = 0; j < BATCH; j++) {
            const int at = i + 32 * j, index = warp * STRETCH + at;
            if (at < STRETCH && index < VOCAB) sum += f(x[j], index);
        }
    }
    TP_UNROLL for (int by = 16; by; by >>= 1) sum += __shfl_xor_sync(TP_ALL, sum, by);
    __syncthreads();
    if (lane == 0) w.sums[warp] = sum;
    if (threadIdx.x == 0) w.first = VOCAB, w.last = -1;
    __syncthreads();
    double running = 0, before = 0;
    int stretch = -1;
    TP_ROLLED for (int i = 0; i < WARPS; i++) running += w.sums[i];
    target = is_share ? target * running : target;
    running = 0;
    TP_ROLLED for (int i = 0; i < WARPS; i++) {
        if (w.sums[i] > 0) {
            stretch = i, before = running;
            if (running + w.sums[i] > target) break;
        }
        running += w.sums[i];
    }
    if (stretch < 0) return 0;
    const int start = stretch * STRETCH + (int)threadIdx.x * STRETCH_ITEMS;
    const int end = min(min(start + STRETCH_ITEMS, (stretch + 1) * STRETCH), VOCAB);
    double own = 0;
    TP_ROLLED for (int i = start; i < end; i++) own += f(__ldcg(d.logits + i), i);
    double upto = own;
    TP_UNROLL for (int by = 1; by < 32; by <<= 1) {
        const double other = __shfl_up_sync(TP_ALL, upto, by);
        if (lane >= by) upto += other;
    }
    __syncthreads();
    if (lane == 31) w.sums[warp] = upto;
    __syncthreads();
    TP_ROLLED for (int i = 0; i < warp; i++) before += w.sums[i];
    running = before + (upto - own);
    int last = -1;
    TP_ROLLED for (int i = start; i < end && running <= target; i++) {
        const double value = f(__ldcg(d.logits + i), i);
        running += value;
        if (value > 0) last = i;
    }
    if (last >= 0) {
        atomicMax(&w.last, last);
        if (running > target) atomicMin(&w.first, last);
    }
    __syncthreads();
    return w.first < VOCAB ? w.first : w.last;
}

/* What a token counts in a search: 1, or its weight in fixed point. */
TP_DEVICE u64 worth(const distribution &d, bool by_mass, float x) {
    return by_mass ? (u64)(weight_of(d, x) * d.mass_scale) : (u64)1;
}

/* The fewest tokens of `within`, largest first, whose count reaches `wanted` or whose mass reaches a share of all. */
TP_SEPARATE kept select_top(const distribution d, workspace &w, kept within, bool by_mass, u64 wanted, double share) {
    clear_bins(w);
    for_all(d, [&](bool valid, float x, int index) {
        valid = valid && is_kept(within, key_of(x), index);
        const u64 value = valid ? worth(d, by_mass, x) : (u64)0;
        warp_add_to_bin(w, valid ? bin_of(d, x) : 0, value);
    });
    wanted = find_bin(w, wanted, by_mass ? share : -1.0) - w.before;
    const int bin = w.bin;
    if (threadIdx.x == 0) w.listed = 0;
    __syncthreads();
    auto is_in_bin = [&](bool valid, float x, int index) {
        return valid && bin_of(d, x) == bin && is_kept(within, key_of(x), index);
    };
    for_all(d, [&](bool valid, float x, int index) {
        if (!is_in_bin(valid, x, index)) return;
        const int place = atomicAdd(&w.listed, 1);
        if (place < LISTED) w.list[place] = key_of(x);
    });
    __syncthreads();
    const int listed = w.listed;
    u32 prefix = 0, fixed = 0; /* of the complement of the key, so that larger logits are in lower bins */
    for (int shift = 21; ;) {
        const u32 mask = shift ? BINS - 1 : 1023;
        clear_bins(w);
        auto add = [&](bool valid, u32 key) {
            valid = valid && ((~key ^ prefix) & fixed) == 0;
            const u64 value = valid ? worth(d, by_mass, logit_of(key)) : (u64)0;
            warp_add_to_bin(w, (int)(~key >> shift & mask), value);
        };
        if (listed <= LISTED) {
            TP_ROLLED for (int start = 0; start < listed; start += THREADS) {
                const int i = start + (int)threadIdx.x;
                add(i < listed, i < listed ? w.list[i] : 0u);
            }
        } else {
            for_all(d, [&](bool valid, float x, int index) { add(is_in_bin(valid, x, index), key_of(x)); });
        }
        find_bin(w, wanted, -1.0);
        wanted -= w.before;
        prefix |= (u32)w.bin << shift;
        fixed |= mask << shift;
        if (shift == 0) break;
        shift = shift == 21 ? 10 : 0;
    }
    kept set = {~prefix, 0x7fffffff};
    const u64 each = worth(d, by_mass, logit_of(set.key)), ties = (wanted + each - 1) / each;
    if (ties * each < w.inside) {
        const u32 key = set.key;
        set.last = locate(d, w, (double)ties - 0.5, false, [&](float x, int index) {
            return key_of(x) == key && is_kept(within, key, index) ? 1.0 : 0.0;
        });
    } else if (set.key == within.key) {
        set.last = within.last;
    }
    return set;
}

/* Uniform in [0, 1), as on the CPU: two rounds of the splitmix64 finalizer over (seed, position). */
TP_DEVICE double uniform(u64 seed, u64 position) {
    u64 z = position * 0x9e3779b97f4a7c15ull + 0x632be59bd9b4e019ull;
    for (int round = 0; round < 2; round++) {
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
        z ^= z >> 31;
        z += round ? 0 : seed * 0xd1342543de82ef95ull + 0x9e3779b97f4a7c15ull;
    }
    return (double)(z >> 11) * 1.1102230246251565e-16;
}
#endif
