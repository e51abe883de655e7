/* Choosing a token from logits: greedy, or softmax restricted by top-k and top-p.
 *
 * Nothing is sorted and nothing is allocated. The set of kept tokens is "every logit above a threshold, and the first
 * few equal to it"; the threshold is found by a radix search over the order-preserving integer image of the logits,
 * counting tokens for top-k and adding up probability for top-p. */
#include "engine.h"
#include "tp_math.h"

#define RADIX_BITS 11
#define BINS (1 << RADIX_BITS)

/* The tokens that are kept: logits whose key is above `key`, and the first `ties` of those equal to it. */
typedef struct kept {
    uint32_t key;
    int64_t ties;
} kept;

typedef struct distribution {
    const float *logits;
    int vocab;
    float max, inverse_temperature;
} distribution;

/* Tokens of [i, i + 8) that `set` may keep and whose key agrees with `prefix` in the bits of `fixed`, as a bit mask.
 * Keys are unsigned images of the logits: larger floats have larger keys. */
TP_INLINE unsigned candidates8(const distribution *d, int i, const kept *set, uint32_t prefix, uint32_t fixed,
                               uint32_t *keys) {
    const int live = tp_min(8, d->vocab - i);
    const __m256i sign = _mm256_set1_epi32(INT32_MIN);
    const __m256i bits = _mm256_maskload_epi32((const int *)d->logits + i, tp_mask8(live));
    const __m256i key = _mm256_xor_si256(bits, _mm256_or_si256(_mm256_srai_epi32(bits, 31), sign));
    const __m256i least = _mm256_set1_epi32((int32_t)(set->key ^ 0x80000000u));
    const __m256i below = _mm256_cmpgt_epi32(least, _mm256_xor_si256(key, sign));
    const __m256i differs = _mm256_and_si256(_mm256_xor_si256(key, _mm256_set1_epi32((int32_t)prefix)),
                                             _mm256_set1_epi32((int32_t)fixed));
    const __m256i agrees = _mm256_cmpeq_epi32(differs, _mm256_setzero_si256());
    _mm256_storeu_si256((__m256i *)keys, key);
    return (unsigned)_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_andnot_si256(below, agrees))) & ((1u << live) - 1);
}

/* Unnormalized probabilities of tokens [i, i + 8), some of them past the end. */
TP_INLINE void weights8(const distribution *d, int i, float *weight) {
    const __m256 x = _mm256_maskload_ps(d->logits + i, tp_mask8(tp_min(8, d->vocab - i)));
    const __m256 below = _mm256_sub_ps(x, _mm256_set1_ps(d->max));
    _mm256_storeu_ps(weight, tp_exp8(_mm256_mul_ps(below, _mm256_set1_ps(d->inverse_temperature))));
}

TP_INLINE int is_kept(kept *set, uint32_t key) { return key > set->key || set->ties-- > 0; }

/* Largest logit and its first index; -1 if the logits hold a NaN, or the largest is infinite. */
static int argmax(const float *x, int n, float *largest) {
    __m256 best[4], bad = _mm256_setzero_ps();
    for (int j = 0; j < 4; j++) best[j] = _mm256_set1_ps(-__builtin_inff());
    int i = 0;
    for (; i + 32 <= n; i += 32) {
        for (int j = 0; j < 4; j++) {
            const __m256 v = _mm256_loadu_ps(x + i + 8 * j);
            best[j] = _mm256_max_ps(best[j], v);
            bad = _mm256_or_ps(bad, _mm256_cmp_ps(v, v, _CMP_UNORD_Q));
        }
    }
    float top = tp_max8(_mm256_max_ps(_mm256_max_ps(best[0], best[1]), _mm256_max_ps(best[2], best[3])));
    int nan = _mm256_movemask_ps(bad) != 0;
    for (; i < n; i++) {
        nan |= x[i] != x[i];
        top = x[i] > top ? x[i] : top;
    }
    if (nan || top - top != 0) return -1;
    *largest = top;
    for (i = 0; i + 8 <= n; i += 8) {
        const int hit = _mm256_movemask_ps(_mm256_cmp_ps(_mm256_loadu_ps(x + i), _mm256_set1_ps(top), _CMP_EQ_OQ));
        if (hit) return i + __builtin_ctz((unsigned)hit);
    }
    while (x[i] != top) i++;
    return i;
}

/* Mass of all tokens. */
static double mass_of_all(const distribution *d) {
    __m256d sum[2] = {_mm256_setzero_pd(), _mm256_setzero_pd()};
    float weight[8];
    for (int i = 0; i < d->vocab; i += 8) {
        weights8(d, i, weight);
        for (int j = d->vocab - i; j < 8; j++) weight[j] = 0;
        for (int j = 0; j < 2; j++) sum[j] = _mm256_add_pd(sum[j], _mm256_cvtps_pd(_mm_loadu_ps(weight + 4 * j)));
    }
    double lanes[4];
    _mm256_storeu_pd(lanes, _mm256_add_pd(sum[0], sum[1]));
    return (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
}

/* Mass of the kept tokens. */
static double mass_of(const distribution *d, kept set) {
    if (set.key == 0) return mass_of_all(d);
    double sum = 0;
    uint32_t keys[8];
    float weight[8];
    for (int i = 0; i < d->vocab; i += 8) {
        unsigned lanes = candidates8(d, i, &set, 0, 0, keys);
        if (lanes) weights8(d, i, weight);
        for (; lanes; lanes &= lanes - 1) {
            const int j = __builtin_ctz(lanes);
            if (is_kept(&set, keys[j])) sum += weight[j];
        }
    }
    return sum;
}

/* One level of the radix search: what each bin of the digit at `shift` holds (tokens, or their mass), among the tokens
 * of `within` whose `fixed` bits equal those of `prefix`. */
static void histogram(const distribution *d, kept within, uint32_t prefix, uint32_t fixed, int shift, int by_mass,
                      double *bins) {
    uint32_t keys[8];
    float weight[8] = {1, 1, 1, 1, 1, 1, 1, 1};
    memset(bins, 0, BINS * sizeof *bins);
    for (int i = 0; i < d->vocab; i += 8) {
        unsigned lanes = candidates8(d, i, &within, prefix, fixed, keys);
        if (lanes && by_mass) weights8(d, i, weight);
        for (; lanes; lanes &= lanes - 1) {
            const int j = __builtin_ctz(lanes);
            if (is_kept(&within, keys[j])) bins[(keys[j] >> shift) & (BINS - 1)] += weight[j];
        }
    }
}

/* The fewest tokens of `within`, largest first, whose count or mass reaches `wanted`. */
static kept select_top(const distribution *d, kept within, int by_mass, double wanted) {
    double bins[BINS];
    uint32_t prefix = 0, fixed = 0;
    double above = 0;
    for (int shift = 32 - RADIX_BITS;; shift = shift > RADIX_BITS ? shift - RADIX_BITS : 0) {
        histogram(d, within, prefix, fixed, shift, by_mass, bins);
        int bin = BINS - 1, last = -1;
        for (; bin >= 0; bin--) {
            if (bins[bin] > 0) last = bin;
            if (above + bins[bin] >= wanted && bins[bin] > 0) break;
            above += bins[bin];
        }
        if (bin < 0) { /* rounding left the sum short of `wanted`: all of them */
            bin = last < 0 ? 0 : last;
            above -= bins[bin];
        }
        prefix = (prefix & fixed) | (uint32_t)bin << shift;
        fixed |= (uint32_t)(BINS - 1) << shift;
        if (shift == 0) {
            float logit;
            const uint32_t bits = prefix & 0x80000000u ? prefix & 0x7fffffffu : ~prefix;
            memcpy(&logit, &bits, sizeof logit);
            kept set = {prefix, 0};
            const __m256 w = tp_exp8(_mm256_set1_ps((logit - d->max) * d->inverse_temperature));
            const double each = by_mass ? (double)_mm256_cvtss_f32(w) : 1.0;
            while (above < wanted && set.ties < d->vocab) above += each, set.ties++;
            if (set.ties == 0) set.ties = 1;
            return set;
        }
    }
}

/* Uniform in [0, 1): a counter-based generator, two rounds of the splitmix64 finalizer over (seed, position). */
static double uniform(uint64_t seed, uint64_t position) {
    uint64_t z = position * UINT64_C(0x9e3779b97f4a7c15) + UINT64_C(0x632be59bd9b4e019);
    for (int round = 0; round < 2; round++) {
        z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
        z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
        z ^= z >> 31;
        z += round ? 0 : seed * UINT64_C(0xd1342543de82ef95) + UINT64_C(0x9e3779b97f4a7c15);
    }
    return (double)(z >> 11) * 0x1p-53;
}

/* The first kept token at which the running sum of weights passes `target`. */
static int draw(const distribution *d, kept set, double target) {
    double sum = 0;
    uint32_t keys[8];
    float weight[8];
    int last = 0;
    for (int i = 0; i < d->vocab; i += 8) {
        unsigned lanes = candidates8(d, i, &set, 0, 0, keys);
        if (lanes) weights8(d, i, weight);
        for (; lanes; lanes &= lanes - 1) {
            const int j = __builtin_ctz(lanes);
            if (!is_kept(&set, keys[j]) || weight[j] == 0) continue;
            last = i + j;
            sum += weight[j];
            if (sum > target) return last;
        }
    }
    return last;
}

int tp_sample(const float *logits, int vocab, tp_sampling *s) {
    const kept all = {0, 0};
    float max = 0;
    const int best = argmax(logits, vocab, &max);
    if (best < 0) return TP_BAD_LOGITS;
    s->token = best;
    s->logprob = 0;
    if (s->temperature > 0) {
        const distribution d = {logits, vocab, max, s->temperature > 1e-30f ? 1.0f / s->temperature : 1e30f};
        kept set = all;
        if (s->top_k > 0 && s->top_k < vocab) set = select_top(&d, set, 0, s->top_k);
        double mass = mass_of(&d, set);
        if (s->top_p < 1) {
            set = select_top(&d, set, 1, mass * (double)s->top_p);
            mass = mass_of(&d, set);
        }
        s->token = draw(&d, set, uniform(s->seed, s->position) * mass);
    }
    if (s->want_logprob) {
        const distribution d = {logits, vocab, max, 1.0f};
        s->logprob = (float)((double)logits[s->token] - (double)max - tp_log(mass_of_all(&d)));
    }
    return TP_OK;
}
