/* Drawing a token from one row of logits, which is spread over the blocks of a cluster.
 *
 * Each block keeps a slice of the row in shared memory and does the same steps; what a step finds goes to all blocks
 * through the cluster's shared memory, behind one barrier of the cluster. Weights are those of the CPU sampler bit for
 * bit. Thresholds are found with counts and with fixed-point masses in integers, and tokens are located with double
 * sums in a fixed order, so a result never depends on timing; where a running sum comes within about 2^-37 (top-p) or
 * 2^-50 (the draw) of its target, it may differ from the CPU's.
 * Defines: VOCAB, CLUSTER, THREADS, HELD, WORKSPACE (see small.py), MASS_BITS. */
#ifndef SAMPLE_ROW_CUH
#define SAMPLE_ROW_CUH
#include "sample_slice.cuh"

/* ---- sums by bin ---- */

TP_DEVICE void clear_bins(workspace &w) {
    __syncthreads();
    for (int i = (int)threadIdx.x; i < BINS; i += THREADS) w.low[i] = w.high[i] = 0;
    __syncthreads();
}

/* Adds to a bin of 64 bits; integers, so the order does not matter. */
TP_DEVICE void add_to_bin(workspace &w, int bin, u64 value) {
    const u32 low = (u32)value, old = atomicAdd(&w.low[bin], low);
    const u32 high = (u32)(value >> 32) + (old + low < old);
    if (high) atomicAdd(&w.high[bin], high);
}

/* The same for four tokens of each lane, by a whole warp; 0 adds nothing. Tokens of one bin would wait for each other,
 * so where all are of one, they are added up first. */
TP_DEVICE void add_to_bins(workspace &w, const int (&bin)[4], const u64 (&value)[4]) {
    const int some = __shfl_sync(TP_ALL, bin[0], 0);
    if (__all_sync(TP_ALL, bin[0] == some && bin[1] == some && bin[2] == some && bin[3] == some)) {
        const u64 sum = warp_sum(value[0] + value[1] + value[2] + value[3]);
        if (threadIdx.x % 32 == 0 && sum) add_to_bin(w, some, sum);
        return;
    }
    TP_UNROLL for (int i = 0; i < 4; i++)
        if (value[i]) add_to_bin(w, bin[i], value[i]);
}

/* Adds every token of the slice to bin_of(logit), as value_of(logit, index). */
template <class B, class V> TP_DEVICE void add_all(workspace &w, const slice &s, B bin_of, V value_of) {
    for_held(s, [&](const float4 &x, int index) {
        const int bin[4] = {bin_of(x.x), bin_of(x.y), bin_of(x.z), bin_of(x.w)};
        const u64 value[4] = {value_of(x.x, index), value_of(x.y, index + 1), value_of(x.z, index + 2),
                              value_of(x.w, index + 3)};
        add_to_bins(w, bin, value);
    });
}

/* This block's bins, or those of all blocks together, as `sums`. */
TP_DEVICE void sum_bins(workspace &w, bool of_cluster) {
    if (!of_cluster) {
        __syncthreads();
        for (int i = (int)threadIdx.x; i < BINS; i += THREADS) w.sums[i] = (u64)w.high[i] << 32 | w.low[i];
        __syncthreads();
        return;
    }
    sync_cluster();
    for (int i = (int)threadIdx.x; i < BINS / RANKS; i += THREADS) {
        const int bin = block_rank() * (BINS / RANKS) + i;
        u64 sum = 0;
        TP_UNROLL for (int r = 0; r < RANKS; r++)
            sum += (u64)peer(w.high, r)[bin] << 32 | peer(w.low, r)[bin];
        TP_UNROLL for (int r = 0; r < RANKS; r++) peer(w.sums, r)[bin] = sum;
    }
    sync_cluster();
}

/* Finds the first bin up to which the sum reaches `wanted`, a share of the total if `share` is not negative. */
TP_DEVICE u64 find_bin(workspace &w, u64 wanted, double share) {
    u64 own[BINS_A_THREAD], sum = 0;
    TP_UNROLL for (int i = 0; i < BINS_A_THREAD; i++) {
        own[i] = w.sums[(int)threadIdx.x * BINS_A_THREAD + i];
        sum += own[i];
    }
    const u64 upto = block_scan(w.scan, sum);
    if (share >= 0) {
        if (threadIdx.x == THREADS - 1) w.total = upto;
        __syncthreads();
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

/* ---- the keys of one bin, which every block lists ---- */

/* Lists the keys of the tokens that `wanted` wants in all blocks. Returns false if they are too many. */
template <class F> TP_DEVICE bool list_keys(workspace &w, const slice &s, F wanted) {
    for_all(s, [&](float x, int index) {
        if (!wanted(x, index)) return;
        const int place = atomicAdd(&w.own_listed, 1);
        if (place >= LISTED) return;
        TP_ROLLED for (int r = 0; r < RANKS; r++) peer(&w.list[block_rank()][place], r)[0] = key_of(x);
    });
    __syncthreads();
    tell_all(&w.listed[block_rank()], w.own_listed);
    sync_cluster();
    bool fits = true;
    TP_UNROLL for (int r = 0; r < RANKS; r++) fits = fits && w.listed[r] <= LISTED;
    return fits;
}

/* Calls f(key) for every listed key. */
template <class F> TP_DEVICE void for_listed(const workspace &w, F f) {
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, rank = warp % RANKS, count = w.listed[rank];
    TP_ROLLED for (int i = warp / RANKS * 32 + lane; i < count; i += WARPS / RANKS * 32) f(w.list[rank][i]);
}

/* The bits in which listed keys differ from `some`. w.differing is 0 before. */
TP_DEVICE u32 differing_bits(workspace &w, u32 some) {
    u32 differing = 0;
    for_listed(w, [&](u32 key) { differing |= key ^ some; });
    differing = __reduce_or_sync(TP_ALL, differing);
    if (threadIdx.x % 32 == 0 && differing) atomicOr(&w.differing, differing);
    __syncthreads();
    return w.differing;
}

/* ---- searches ---- */

/* One of several sums, and what the sums before it add up to. */
struct choice {
    int at;
    double before, target;
};

/* The first of `count` sums at which the running sum passes `target`, a share of the total if `is_share`; else the last
 * that is not 0. */
TP_DEVICE choice find_sum(const double *sums, int count, double target, bool is_share) {
    const int lane = (int)threadIdx.x % 32;
    const double own = lane < count ? sums[lane] : 0.0, upto = warp_scan(own);
    if (is_share) target *= __shfl_sync(TP_ALL, upto, 31);
    const u32 some = __ballot_sync(TP_ALL, own > 0), past = __ballot_sync(TP_ALL, own > 0 && upto > target);
    const int at = past ? __ffs((int)past) - 1 : some ? 31 - __clz((int)some) : 0;
    const double before = __shfl_sync(TP_ALL, upto, (at + 31) % 32);
    return {at, at ? before : 0.0, target};
}

/* The first index at which the running sum of f over all tokens passes `target`, a share of the total if `is_share`;
 * else the last index where f > 0. f(logit, index) >= 0. Returns it in the block that has the token, elsewhere -1.
 * Warps sum their stretches, then a block is chosen, then a stretch of it, which the block searches. */
template <class F> TP_DEVICE int locate(workspace &w, const slice &s, double target, bool is_share, F f) {
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    double sum = 0;
    for_all(s, [&](float x, int index) { sum += f(x, index); });
    TP_UNROLL for (int by = 16; by; by >>= 1) sum += __shfl_xor_sync(TP_ALL, sum, by);
    if (lane == 0) w.stretches[warp] = sum;
    if (threadIdx.x == 0) w.first = VOCAB, w.last = -1;
    __syncthreads();
    sum = 0;
    TP_UNROLL for (int i = 0; i < WARPS; i++) sum += w.stretches[i];
    tell_all(&w.masses[block_rank()], sum);
    sync_cluster();
    const choice block = find_sum(w.masses, RANKS, target, is_share);
    if (block.at != block_rank()) return -1;
    target = block.target - block.before;
    const choice stretch = find_sum(w.stretches, WARPS, target, false);
    const int start = stretch.at * STRETCH + (int)threadIdx.x * STRETCH_ITEMS;
    const int end = min(min(start + STRETCH_ITEMS, (stretch.at + 1) * STRETCH), s.count);
    double own = 0;
    TP_ROLLED for (int i = start; i < end; i++) own += f(logit_at(s, i), s.first + i);
    double running = stretch.before + (block_scan((double *)w.scan, own) - own);
    int last = -1;
    TP_ROLLED for (int i = start; i < end && running <= target; i++) {
        const double value = f(logit_at(s, i), s.first + i);
        running += value;
        if (value > 0) last = s.first + i;
    }
    if (last >= 0) {
        atomicMax(&w.last, last);
        if (running > target) atomicMin(&w.first, last);
    }
    __syncthreads();
    return w.first < VOCAB ? w.first : w.last;
}

/* The fewest tokens of `within`, largest first, whose count reaches `wanted` or whose mass reaches a share of all.
 *
 * A first cut spreads the logits evenly over bins, the largest in bin 0. The keys of the bin that matters are few, as a
 * rule; every block lists them and searches the rest of their bits by itself. Where they are many, all blocks search
 * the row together. */
template <bool BY_MASS>
TP_DEVICE kept select_top(workspace &w, const slice &s, const distribution &d, kept within, u64 wanted, double share) {
    /* 32 logits, or at low temperatures what weighs as much; the last bin has the rest */
    const float scale = (BY_MASS ? fmaxf(d.inverse_temperature, 1.0f) : 1.0f) * (BINS / 32.0f);
    auto bin_of = [&](float x) { return (int)fminf((d.max - x) * scale, (float)(BINS - 1)); };
    clear_bins(w);
    if (threadIdx.x == 0) w.own_listed = 0, w.differing = 0;
    add_all(w, s, bin_of, [&](float x, int index) {
        return is_kept(within, key_of(x), index) ? worth<BY_MASS>(d, x) : (u64)0;
    });
    sum_bins(w, true);
    wanted = find_bin(w, wanted, share) - w.before;
    const int bin = w.bin;
    auto is_in_bin = [&](float x, int index) { return bin_of(x) == bin && is_kept(within, key_of(x), index); };
    const bool is_listed = list_keys(w, s, is_in_bin);

    /* of complements of keys, so that larger logits are in lower bins: the bits still open, and those that are known */
    int open = 32;
    u32 known = 0;
    if (is_listed) {
        int rank = 0;
        while (w.listed[rank] == 0) rank++;
        const u32 some = w.list[rank][0];
        open = 32 - __clz((int)differing_bits(w, some));
        known = open < 32 ? ~some >> open << open : 0u;
    }
    TP_ROLLED while (open > 0) {
        const int shift = max(open - BIN_BITS, 0);
        auto digit = [&](u32 key) { return (int)(~key >> shift & (BINS - 1)); };
        auto is_open = [&](u32 key) { return open == 32 || ~key >> open == known >> open; };
        clear_bins(w);
        if (is_listed) {
            for_listed(w, [&](u32 key) {
                const u64 value = is_open(key) ? worth<BY_MASS>(d, logit_of(key)) : (u64)0;
                if (value) add_to_bin(w, digit(key), value);
            });
        } else {
            add_all(w, s, [&](float x) { return digit(key_of(x)); }, [&](float x, int index) {
                return is_in_bin(x, index) && is_open(key_of(x)) ? worth<BY_MASS>(d, x) : (u64)0;
            });
        }
        sum_bins(w, !is_listed);
        wanted = find_bin(w, wanted, -1.0) - w.before;
        known |= (u32)w.bin << shift;
        open = shift;
    }
    kept set = {~known, within.key == ~known ? within.last : VOCAB - 1};
    const u64 each = worth<BY_MASS>(d, logit_of(set.key));
    if (wanted + each <= w.inside) { /* not all of those with this key */
        const u64 ties = (wanted + each - 1) / each;
        const int last = locate(w, s, (double)ties - 0.5, false, [&](float x, int index) {
            return key_of(x) == set.key && is_kept(within, set.key, index) ? 1.0 : 0.0;
        });
        if (last >= 0) tell_all(&w.found, last);
        sync_cluster();
        set.last = w.found;
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
