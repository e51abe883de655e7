// Encoders and decoders of the number formats, bit for bit those of compiler/formats (tests compare the two).
//
//   int tp_encode(int format, const float *src, uint8_t *dst, int64_t rows, int64_t k);
//   int tp_decode(int format, const uint8_t *src, float *dst, int64_t rows, int64_t k);
//
// `format` is the GGUF type id, or the number of a format that GGUF does not have (blocks.h). Rows lie one after
// another without padding; both return 0, or:
//   1  the format is unknown, or is one that cannot be written
//   2  k is not a whole number of blocks
//   3  the input holds a NaN or an infinity
//   4  a value is too large for the format
// No state and no allocation: threads may work on disjoint rows.
//
// K-quants are encoded with one vector lane a sub-block, so that sums run along a lane and their order is the same
// here and in numpy. Contraction to fused multiply-add would break that equality and is switched off.

#include "blocks.h"

#pragma STDC FP_CONTRACT OFF

enum { OK = 0, UNSUPPORTED = 1, NOT_BLOCKS = 2, NOT_FINITE = 3, TOO_LARGE = 4 };
enum {
    Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q2_K = 10, Q3_K = 11, Q4_K = 12, Q5_K = 13, Q6_K = 14
};

int tp_encode_int4(const format *f, const float *src, uint8_t *dst);
void tp_decode_int4(const format *f, const uint8_t *src, float *dst);
int tp_encode_mxfp4(const float *src, uint8_t *dst, int64_t n);
int tp_encode_nvfp4(const float *src, uint8_t *dst, int64_t n, float largest);
void tp_decode_table(const format *f, const uint8_t *src, float *dst);
int tp_encode_fp8(const float *src, uint8_t *dst, int64_t rows, int64_t k, float largest);
int tp_encode_fp8_rows(const float *src, uint8_t *dst, int64_t rows, int64_t k);
int tp_encode_fp8_blocks(const float *src, uint8_t *dst, int64_t rows, int64_t k);
float tp_largest(const float *src, int64_t stride, int64_t rows, int64_t width);
void tp_decode_fp8(const uint8_t *src, float *dst, int64_t n);

// The largest magnitude a K-quant takes: 65504 (float16) times 63 (a 6-bit scale).
#define K_LIMIT 4126752.0f

static float load_half(const uint8_t *src) {
    _Float16 value;
    memcpy(&value, src, 2);
    return (float)value;
}

// Stores `value` as float16; true when it leaves the range.
static int store_half(uint8_t *dst, float value) {
    _Float16 rounded = (_Float16)value;
    uint16_t bits;
    memcpy(&bits, &rounded, 2);
    memcpy(dst, &bits, 2);
    return (bits & 0x7fff) == 0x7c00;
}

static float round_half(float value) { return (float)(_Float16)value; }

// ---- input checks ----------------------------------------------------------------------------------------------

// The bit pattern of the largest magnitude; any NaN or infinity is at least 0x7f800000.
static uint32_t largest_bits(const float *src, int64_t n) {
    uint32_t largest = 0;
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, src + i, 4);
        bits &= 0x7fffffff;
        largest = bits > largest ? bits : largest;
    }
    return largest;
}

static int check_finite(const float *src, int64_t n) {
    return largest_bits(src, n) >= 0x7f800000 ? NOT_FINITE : OK;
}

static int check_k_block(const float *src) {
    uint32_t bits = largest_bits(src, 256);
    float largest;
    memcpy(&largest, &bits, 4);
    if (bits >= 0x7f800000) return NOT_FINITE;
    return largest > K_LIMIT ? TOO_LARGE : OK;
}

// ---- plain floats -----------------------------------------------------------------------------------------------

static int encode_f16(const float *src, uint8_t *dst, int64_t n) {
    if (check_finite(src, n)) return NOT_FINITE;
    uint32_t largest = 0;
    for (int64_t i = 0; i < n; i++) {
        _Float16 rounded = (_Float16)src[i];
        uint16_t bits;
        memcpy(&bits, &rounded, 2);
        memcpy(dst + 2 * i, &bits, 2);
        uint32_t magnitude = bits & 0x7fff;
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest >= 0x7c00 ? TOO_LARGE : OK;
}

static int encode_bf16(const float *src, uint8_t *dst, int64_t n) {
    if (check_finite(src, n)) return NOT_FINITE;
    uint32_t largest = 0;
    for (int64_t i = 0; i < n; i++) {
        uint32_t word;
        memcpy(&word, src + i, 4);
        word = (word + 0x7fff + ((word >> 16) & 1)) >> 16;
        uint16_t bits = (uint16_t)word;
        memcpy(dst + 2 * i, &bits, 2);
        uint32_t magnitude = bits & 0x7fff;
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest >= 0x7f80 ? TOO_LARGE : OK;
}

static void decode_f16(const uint8_t *src, float *dst, int64_t n) {
    for (int64_t i = 0; i < n; i++) dst[i] = load_half(src + 2 * i);
}

static void decode_bf16(const uint8_t *src, float *dst, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        uint16_t half;
        memcpy(&half, src + 2 * i, 2);
        uint32_t word = (uint32_t)half << 16;
        memcpy(dst + i, &word, 4);
    }
}

// ---- blocks of 32 -----------------------------------------------------------------------------------------------

// 1 / scale, or 0 where that is not finite: such a scale is zero in float16.
static float inverse(float scale) {
    float result = 1.0f / scale;
    return result - result == 0.0f ? result : 0.0f;
}

static void pack_nibbles(const uint8_t *codes, uint8_t *dst) {
    for (int i = 0; i < 16; i++) dst[i] = (uint8_t)((codes[i] & 15) | (codes[i + 16] << 4));
}

static void pack_fifth_bits(const uint8_t *codes, uint8_t *dst) {
    uint32_t bits = 0;
    for (int i = 0; i < 32; i++) bits |= (uint32_t)(codes[i] >> 4) << i;
    memcpy(dst, &bits, 4);
}

// Codes of 32 values: (value - low) * factor + shift, truncated, at most `top`.
static void affine_codes(const float *x, float low, float factor, float shift, int top, uint8_t *codes) {
    for (int i = 0; i < 32; i++) {
        int code = (int)((x[i] - low) * factor + shift);
        codes[i] = (uint8_t)(code < top ? code : top);
    }
}

// Q4_0 (bits 4) and Q5_0 (bits 5): the element of largest magnitude, the first of equals, takes code 0.
static int encode_symmetric(const float *x, uint8_t *dst, int bits) {
    uint8_t codes[32];
    int zero = 1 << (bits - 1);
    uint32_t largest = largest_bits(x, 32);
    if (largest >= 0x7f800000) return NOT_FINITE;
    float signed_largest = 0.0f;
    for (int i = 31; i >= 0; i--) {
        uint32_t word;
        memcpy(&word, x + i, 4);
        signed_largest = (word & 0x7fffffff) == largest ? x[i] : signed_largest;
    }
    float scale = signed_largest / (float)-zero;
    int overflow = store_half(dst, scale);
    affine_codes(x, 0.0f, inverse(scale), (float)zero + 0.5f, 2 * zero - 1, codes);
    if (bits == 5) pack_fifth_bits(codes, dst + 2);
    pack_nibbles(codes, dst + (bits == 5 ? 6 : 2));
    return overflow ? TOO_LARGE : OK;
}

// Q4_1 (bits 4) and Q5_1 (bits 5).
static int encode_affine(const float *x, uint8_t *dst, int bits) {
    uint8_t codes[32];
    int top = (1 << bits) - 1;
    if (check_finite(x, 32)) return NOT_FINITE;
    float low = x[0], high = x[0];
    for (int i = 1; i < 32; i++) {
        low = x[i] < low ? x[i] : low;
        high = x[i] > high ? x[i] : high;
    }
    low += 0.0f;  // -0 and 0 are equal to a minimum and a maximum: keep one of them
    high += 0.0f;
    float scale = (high - low) / (float)top;
    int overflow = store_half(dst, scale) | store_half(dst + 2, low);
    if (overflow) return TOO_LARGE;
    affine_codes(x, low, inverse(scale), 0.5f, top, codes);
    if (bits == 5) pack_fifth_bits(codes, dst + 4);
    pack_nibbles(codes, dst + (bits == 5 ? 8 : 4));
    return OK;
}

static int encode_q8_0(const float *x, uint8_t *dst) {
    uint32_t bits = largest_bits(x, 32);
    if (bits >= 0x7f800000) return NOT_FINITE;
    float largest;
    memcpy(&largest, &bits, 4);
    float scale = largest / 127.0f;
    if (store_half(dst, scale)) return TOO_LARGE;
    float factor = inverse(scale);
    for (int i = 0; i < 32; i++) {
        float scaled = x[i] * factor;
        float magnitude = scaled < 0.0f ? -scaled : scaled;
        int whole = (int)magnitude;
        whole += magnitude - (float)whole >= 0.5f;
        dst[2 + i] = (uint8_t)(scaled < 0.0f ? -whole : whole);
    }
    return OK;
}

static void decode_nibbles(const uint8_t *nibbles, uint32_t high, float zero, float scale, float low, float *dst) {
    for (int i = 0; i < 16; i++) {
        uint32_t first = (nibbles[i] & 15) | ((high >> i & 1) << 4);
        uint32_t second = (nibbles[i] >> 4) | ((high >> (i + 16) & 1) << 4);
        dst[i] = ((float)(int)first - zero) * scale + low;
        dst[i + 16] = ((float)(int)second - zero) * scale + low;
    }
}

static void decode_legacy(int format, const uint8_t *src, float *dst) {
    uint32_t high = 0;
    float scale = load_half(src);
    switch (format) {
    case Q4_0:
        decode_nibbles(src + 2, 0, 8.0f, scale, -0.0f, dst);
        break;
    case Q4_1:
        decode_nibbles(src + 4, 0, 0.0f, scale, load_half(src + 2), dst);
        break;
    case Q5_0:
        memcpy(&high, src + 2, 4);
        decode_nibbles(src + 6, high, 16.0f, scale, -0.0f, dst);
        break;
    case Q5_1:
        memcpy(&high, src + 4, 4);
        decode_nibbles(src + 8, high, 0.0f, scale, load_half(src + 2), dst);
        break;
    default:
        for (int i = 0; i < 32; i++) dst[i] = (float)(int8_t)src[2 + i] * scale;
    }
}

// ---- super-blocks: decoding -------------------------------------------------------------------------------------

// Scales and minima of Q4_K and Q5_K: eight of each, 6 bits, in 12 bytes.
static void unpack_pairs(const uint8_t *packed, uint8_t *sub, uint8_t *submin) {
    for (int j = 0; j < 4; j++) {
        sub[j] = packed[j] & 63;
        submin[j] = packed[4 + j] & 63;
        sub[4 + j] = (uint8_t)((packed[8 + j] & 15) | (packed[j] >> 6 << 4));
        submin[4 + j] = (uint8_t)((packed[8 + j] >> 4) | (packed[4 + j] >> 6 << 4));
    }
}

static void pack_pairs(const uint8_t *sub, const uint8_t *submin, uint8_t *packed) {
    for (int j = 0; j < 4; j++) {
        packed[j] = (uint8_t)(sub[j] | (sub[4 + j] >> 4 << 6));
        packed[4 + j] = (uint8_t)(submin[j] | (submin[4 + j] >> 4 << 6));
        packed[8 + j] = (uint8_t)((sub[4 + j] & 15) | (submin[4 + j] & 15) << 4);
    }
}

// scales[16], qs[64], d, dmin
static void decode_q2_k(const uint8_t *src, float *dst) {
    float d = load_half(src + 80), dmin = load_half(src + 82);
    for (int s = 0; s < 16; s++) {
        float scale = d * (float)(src[s] & 15), minimum = dmin * (float)(src[s] >> 4);
        const uint8_t *packed = src + 16 + s / 8 * 32 + s % 2 * 16;
        int shift = s % 8 / 2 * 2;
        for (int i = 0; i < 16; i++) dst[16 * s + i] = scale * (float)(packed[i] >> shift & 3) - minimum;
    }
}

// hmask[32], qs[64], scales[12], d
static void decode_q3_k(const uint8_t *src, float *dst) {
    float d = load_half(src + 108);
    const uint8_t *scales = src + 96;
    for (int s = 0; s < 16; s++) {
        int sub = (scales[s % 8] >> (s / 8 * 4) & 15) | (scales[8 + s % 4] >> (s / 4 * 2) & 3) << 4;
        float scale = d * (float)(sub - 32);
        const uint8_t *packed = src + 32 + s / 8 * 32 + s % 2 * 16;
        const uint8_t *high = src + s % 2 * 16;
        int shift = s % 8 / 2 * 2, bit = s / 2;
        for (int i = 0; i < 16; i++) {
            int code = (packed[i] >> shift & 3) | (high[i] >> bit & 1) << 2;
            dst[16 * s + i] = scale * (float)(code - 4);
        }
    }
}

// d, dmin, scales[12], for Q5_K qh[32], qs[128]
static void decode_q45_k(const uint8_t *src, float *dst, int bits) {
    static const uint8_t none[32];
    uint8_t sub[8], submin[8];
    float d = load_half(src), dmin = load_half(src + 2);
    const uint8_t *high = bits == 5 ? src + 16 : none;
    const uint8_t *packed = bits == 5 ? src + 48 : src + 16;
    unpack_pairs(src + 4, sub, submin);
    for (int s = 0; s < 8; s++) {
        float scale = d * (float)sub[s], minimum = dmin * (float)submin[s];
        const uint8_t *nibbles = packed + s / 2 * 32;
        int shift = s % 2 * 4;
        for (int i = 0; i < 32; i++) {
            int code = (nibbles[i] >> shift & 15) | (high[i] >> s & 1) << 4;
            dst[32 * s + i] = scale * (float)code - minimum;
        }
    }
}

// ql[128], qh[64], int8 scales[16], d
static void decode_q6_k(const uint8_t *src, float *dst) {
    float d = load_half(src + 208);
    for (int s = 0; s < 16; s++) {
        float scale = d * (float)(int8_t)src[192 + s];
        int half = s / 8, quarter = s % 8 / 2, lane = s % 2 * 16;
        const uint8_t *low = src + 64 * half + quarter % 2 * 32 + lane;
        const uint8_t *high = src + 128 + 32 * half + lane;
        int low_shift = quarter / 2 * 4, high_shift = quarter * 2;
        for (int i = 0; i < 16; i++) {
            int code = (low[i] >> low_shift & 15) | (high[i] >> high_shift & 3) << 4;
            dst[16 * s + i] = scale * (float)(code - 32);
        }
    }
}

// ---- super-blocks: encoding -------------------------------------------------------------------------------------

// Eight sub-blocks side by side: element i of sub-block j is lane j of vector i.
typedef float lanes __attribute__((vector_size(32)));
typedef int32_t flags __attribute__((vector_size(32)));

static inline lanes all(float value) { return (lanes){value, value, value, value, value, value, value, value}; }

static inline lanes pick(flags mask, lanes yes, lanes no) {
    return (lanes)((mask & (flags)yes) | (~mask & (flags)no));
}

static inline lanes least(lanes a, lanes b) { return pick(a < b, a, b); }
static inline lanes most(lanes a, lanes b) { return pick(a > b, a, b); }

// The nearest integer, ties to even, of values far below 2^22.
static inline lanes nearest(lanes value) { return (value + all(12582912.0f)) - all(12582912.0f); }

// numerator / denominator, or 0 where the denominator's magnitude is below 1e-30.
static inline lanes ratio(lanes numerator, lanes denominator) {
    flags good = (denominator > all(1e-30f)) | (denominator < all(-1e-30f));
    return pick(good, numerator / pick(good, denominator, all(1.0f)), all(0.0f));
}

static inline double across(lanes value) {
    double sum = 0.0;
    for (int j = 0; j < 8; j++) sum += (double)value[j];
    return sum;
}

static inline lanes code_of(lanes shifted, lanes factor, lanes bottom, lanes top) {
    return nearest(most(least(shifted * factor, top), bottom));
}

// What least squares needs of the codes q of x: sums of q, q*q and q*x.
typedef struct { lanes q, qq, qx; } Sums;

static inline Sums sums_of(const lanes *x, int n, lanes minimum, lanes factor, lanes bottom, lanes top) {
    lanes zero = all(0.0f);
    Sums even = {zero, zero, zero}, odd = {zero, zero, zero};
    for (int i = 0; i < n; i += 2) {
        lanes a = code_of(x[i] + minimum, factor, bottom, top);
        lanes b = code_of(x[i + 1] + minimum, factor, bottom, top);
        even.q += a;
        odd.q += b;
        even.qq += a * a;
        odd.qq += b * b;
        even.qx += a * x[i];
        odd.qx += b * x[i + 1];
    }
    return (Sums){even.q + odd.q, even.qq + odd.qq, even.qx + odd.qx};
}

// Squared error of x against scale * q - minimum, and the sum of q.
static inline lanes error_of(const lanes *x, int n, lanes scale, lanes minimum, lanes bottom, lanes top, lanes *q) {
    lanes factor = ratio(all(1.0f), scale);
    lanes even = all(0.0f), odd = all(0.0f), even_q = all(0.0f), odd_q = all(0.0f);
    for (int i = 0; i < n; i += 2) {
        lanes a = x[i] + minimum, b = x[i + 1] + minimum;
        lanes code_a = code_of(a, factor, bottom, top), code_b = code_of(b, factor, bottom, top);
        a -= scale * code_a;
        b -= scale * code_b;
        even += a * a;
        odd += b * b;
        even_q += code_a;
        odd_q += code_b;
    }
    *q = even_q + odd_q;
    return even + odd;
}

static void spread(const float *src, lanes *x, int n) {
    for (int i = 0; i < n; i++)
        for (int j = 0; j < 8; j++) x[i][j] = src[n * j + i];
}

static float clamp_half(float value) {
    value = value < 65504.0f ? value : 65504.0f;
    return round_half(value > -65504.0f ? value : -65504.0f);
}

// One super-block of Q4_K or Q5_K: value = d * sub * code - dmin * submin, eight sub-blocks of 32.
typedef struct {
    lanes x[32];
    lanes sum;               // of x
    lanes top;               // the highest code
    lanes scale, minimum;    // the best real-valued fit of every sub-block
} Affine;

typedef struct {
    float d, dmin;
    lanes sub, submin;
    double error;
} AffineChoice;

// Least squares for scale >= 0 and minimum >= 0 under the codes that (minimum, factor) give. Keeps what is better
// than `best`, the squared error less the sum of x*x.
static inline void improve_affine(Affine *a, lanes minimum, lanes factor, lanes *best) {
    lanes n = all(32.0f), zero = all(0.0f);
    Sums s = sums_of(a->x, 32, minimum, factor, zero, a->top);
    lanes slope = ratio(n * s.qx - s.q * a->sum, n * s.qq - s.q * s.q);
    lanes offset = (slope * s.q - a->sum) * all(1.0f / 32.0f);
    lanes scale = most(pick(offset < zero, ratio(s.qx, s.qq), slope), zero);
    offset = most(offset, zero);
    lanes error = scale * (scale * s.qq - all(2.0f) * (offset * s.q + s.qx));
    error += offset * (n * offset + all(2.0f) * a->sum);
    flags better = error < *best;
    *best = pick(better, error, *best);
    a->scale = pick(better, scale, a->scale);
    a->minimum = pick(better, offset, a->minimum);
}

// A grid of ranges (the upper end stretched by up to two steps, the lower raised by 0 or 0.4), then two refinements.
static void fit_affine(Affine *a) {
    lanes zero = all(0.0f), low = zero, high = a->x[0], even = zero, odd = zero, best = all(1e30f);
    for (int i = 0; i < 32; i += 2) {
        low = least(low, least(a->x[i], a->x[i + 1]));
        high = most(high, most(a->x[i], a->x[i + 1]));
        even += a->x[i];
        odd += a->x[i + 1];
    }
    a->sum = even + odd;
    a->scale = a->minimum = zero;
    lanes range = high - low;
    range = pick(range > all(1e-15f), range, zero);
    lanes raised = zero - low - range / a->top * all(0.4f);
    for (int c = 0; c < 11; c++) {
        lanes factor = ratio(a->top + all(-2.0f + 0.25f * (float)c), range);
        improve_affine(a, zero - low, factor, &best);
        improve_affine(a, raised, factor, &best);
    }
    for (int c = 0; c < 2; c++) improve_affine(a, a->minimum, ratio(all(1.0f), a->scale), &best);
}

// The best 6-bit scales and minima under d and dmin: three scales round the real-valued fit, each with the fit's
// minimum and then with the one its own codes ask for.
static void choose_affine(const Affine *a, AffineChoice *choice) {
    lanes zero = all(0.0f), limit = all(63.0f), d = all(choice->d), dmin = all(choice->dmin), best = all(1e30f);
    lanes unit = ratio(all(1.0f), dmin);
    lanes centre = nearest(least(a->scale * ratio(all(1.0f), d), limit));
    lanes start = nearest(least(a->minimum * unit, limit));
    choice->sub = choice->submin = zero;
    for (int step = -1; step <= 1; step++) {
        lanes sub = most(least(centre + all((float)step), limit), zero), submin = start, q;
        for (int pass = 0; pass < 2; pass++) {
            lanes error = error_of(a->x, 32, d * sub, dmin * submin, zero, a->top, &q);
            flags better = error < best;
            best = pick(better, error, best);
            choice->sub = pick(better, sub, choice->sub);
            choice->submin = pick(better, submin, choice->submin);
            lanes wanted = (d * sub * q - a->sum) * all(1.0f / 32.0f) * unit;
            submin = nearest(most(least(wanted, limit), zero));
        }
    }
    choice->error = across(best);
}

// d and dmin by least squares over the whole super-block, all codes held.
static void solve_affine(const Affine *a, const AffineChoice *from, AffineChoice *to) {
    lanes factor = ratio(all(1.0f), all(from->d) * from->sub);
    Sums s = sums_of(a->x, 32, all(from->dmin) * from->submin, factor, all(0.0f), a->top);
    double dd = across(from->sub * from->sub * s.qq), dm = across(from->sub * from->submin * s.q);
    double mm = across(from->submin * from->submin * all(32.0f));
    double dx = across(from->sub * s.qx), mx = across(from->submin * a->sum);
    double determinant = dd * mm - dm * dm;
    if (determinant > 0.0) {
        to->d = clamp_half((float)((dx * mm - dm * mx) / determinant));
        to->dmin = clamp_half((float)((dx * dm - mx * dd) / determinant));
    } else {
        to->d = dd > 0.0 ? clamp_half((float)(dx / dd)) : from->d;
        to->dmin = from->dmin;
    }
    if (!(to->d > 0.0f)) to->d = 0.0f;
    if (!(to->dmin > 0.0f)) to->dmin = 0.0f;
}

static float highest(lanes value) {
    float result = value[0];
    for (int j = 1; j < 8; j++) result = value[j] > result ? value[j] : result;
    return result;
}

static void pack_q45_k(const Affine *a, const AffineChoice *choice, uint8_t *dst, int bits) {
    uint8_t sub[8], submin[8], codes[256];
    lanes factor = ratio(all(1.0f), all(choice->d) * choice->sub), minimum = all(choice->dmin) * choice->submin;
    for (int i = 0; i < 32; i++) {
        lanes code = code_of(a->x[i] + minimum, factor, all(0.0f), a->top);
        for (int j = 0; j < 8; j++) codes[32 * j + i] = (uint8_t)code[j];
    }
    for (int j = 0; j < 8; j++) {
        sub[j] = (uint8_t)choice->sub[j];
        submin[j] = (uint8_t)choice->submin[j];
    }
    store_half(dst, choice->d);
    store_half(dst + 2, choice->dmin);
    pack_pairs(sub, submin, dst + 4);
    uint8_t *nibbles = bits == 5 ? dst + 48 : dst + 16;
    for (int c = 0; c < 4; c++)
        for (int i = 0; i < 32; i++)
            nibbles[32 * c + i] = (uint8_t)((codes[64 * c + i] & 15) | (codes[64 * c + 32 + i] & 15) << 4);
    if (bits == 4) return;
    for (int i = 0; i < 32; i++) {
        int high = 0;
        for (int s = 0; s < 8; s++) high |= (codes[32 * s + i] >> 4) << s;
        dst[16 + i] = (uint8_t)high;
    }
}

static int encode_q45_k(const float *src, uint8_t *dst, int bits) {
    Affine a;
    AffineChoice best, next;
    int status = check_k_block(src);
    if (status) return status;
    a.top = all(bits == 5 ? 31.0f : 15.0f);
    spread(src, a.x, 32);
    fit_affine(&a);
    best.d = clamp_half(highest(a.scale) / 63.0f);
    best.dmin = clamp_half(highest(a.minimum) / 63.0f);
    choose_affine(&a, &best);
    for (int round = 0; round < 3; round++) {
        solve_affine(&a, &best, &next);
        choose_affine(&a, &next);
        if (!(next.error < best.error)) break;
        best = next;
    }
    pack_q45_k(&a, &best, dst, bits);
    return OK;
}

// One super-block of Q6_K: value = d * sub * (code - 32), two groups of eight sub-blocks of 16.
typedef struct {
    lanes x[2][16];
    lanes scale[2];          // the best real-valued fit of every sub-block
} Symmetric;

typedef struct {
    float d;
    lanes sub[2];
    double error;
} SymmetricChoice;

// Least squares for the scale under the codes that `factor` gives; keeps it when it explains more than `best`.
static inline void improve_symmetric(const lanes *x, lanes factor, lanes *scale, lanes *best) {
    Sums s = sums_of(x, 16, all(0.0f), factor, all(-32.0f), all(31.0f));
    lanes slope = ratio(s.qx, s.qq), explained = slope * s.qx;
    flags better = explained > *best;
    *best = pick(better, explained, *best);
    *scale = pick(better, slope, *scale);
}

// A grid of ranges that put the largest magnitude near either end of the codes, then one refinement.
static void fit_symmetric(const lanes *x, lanes *scale) {
    lanes peak = all(0.0f), best = all(0.0f);
    for (int i = 0; i < 16; i++) peak = pick(most(x[i], all(0.0f) - x[i]) > most(peak, all(0.0f) - peak), x[i], peak);
    peak = pick(most(peak, all(0.0f) - peak) > all(1e-15f), peak, all(0.0f));
    *scale = all(0.0f);
    for (int c = 0; c < 9; c++) {
        float stretch = -1.25f + 0.25f * (float)c;
        improve_symmetric(x, ratio(all(-32.0f + stretch), peak), scale, &best);
        improve_symmetric(x, ratio(all(31.0f - stretch), peak), scale, &best);
    }
    improve_symmetric(x, ratio(all(1.0f), *scale), scale, &best);
}

// The best 8-bit scales under d: two to each side of the real-valued fit.
static void choose_symmetric(const Symmetric *s, SymmetricChoice *choice) {
    lanes unit = ratio(all(1.0f), all(choice->d)), bottom = all(-128.0f), top = all(127.0f), q;
    choice->error = 0.0;
    for (int g = 0; g < 2; g++) {
        lanes centre = nearest(most(least(s->scale[g] * unit, top), bottom)), best = all(1e30f);
        choice->sub[g] = all(0.0f);
        for (int step = -2; step <= 2; step++) {
            lanes sub = most(least(centre + all((float)step), top), bottom);
            lanes error = error_of(s->x[g], 16, all(choice->d) * sub, all(0.0f), all(-32.0f), all(31.0f), &q);
            flags better = error < best;
            best = pick(better, error, best);
            choice->sub[g] = pick(better, sub, choice->sub[g]);
        }
        choice->error += across(best);
    }
}

// d by least squares over the whole super-block, all codes held.
static float solve_symmetric(const Symmetric *s, const SymmetricChoice *from) {
    double dd = 0.0, dx = 0.0;
    for (int g = 0; g < 2; g++) {
        lanes factor = ratio(all(1.0f), all(from->d) * from->sub[g]);
        Sums sums = sums_of(s->x[g], 16, all(0.0f), factor, all(-32.0f), all(31.0f));
        dd += across(from->sub[g] * from->sub[g] * sums.qq);
        dx += across(from->sub[g] * sums.qx);
    }
    return dd > 0.0 ? clamp_half((float)(dx / dd)) : from->d;
}

static void pack_q6_k(const Symmetric *s, const SymmetricChoice *choice, uint8_t *dst) {
    uint8_t codes[256];
    for (int g = 0; g < 2; g++) {
        lanes factor = ratio(all(1.0f), all(choice->d) * choice->sub[g]);
        for (int i = 0; i < 16; i++) {
            lanes code = code_of(s->x[g][i], factor, all(-32.0f), all(31.0f)) + all(32.0f);
            for (int j = 0; j < 8; j++) codes[128 * g + 16 * j + i] = (uint8_t)code[j];
        }
        for (int j = 0; j < 8; j++) dst[192 + 8 * g + j] = (uint8_t)(int8_t)choice->sub[g][j];
    }
    for (int h = 0; h < 2; h++) {
        const uint8_t *q = codes + 128 * h;
        for (int i = 0; i < 64; i++) dst[64 * h + i] = (uint8_t)((q[i] & 15) | (q[64 + i] & 15) << 4);
        for (int i = 0; i < 32; i++) {
            int high = q[i] >> 4 | q[32 + i] >> 4 << 2 | q[64 + i] >> 4 << 4 | q[96 + i] >> 4 << 6;
            dst[128 + 32 * h + i] = (uint8_t)high;
        }
    }
    store_half(dst + 208, choice->d);
}

static int encode_q6_k(const float *src, uint8_t *dst) {
    Symmetric s;
    SymmetricChoice best, next;
    float peak = 0.0f;
    int status = check_k_block(src);
    if (status) return status;
    for (int g = 0; g < 2; g++) {
        spread(src + 128 * g, s.x[g], 16);
        fit_symmetric(s.x[g], &s.scale[g]);
        for (int j = 0; j < 8; j++) {
            float scale = s.scale[g][j];
            if ((scale < 0.0f ? -scale : scale) > (peak < 0.0f ? -peak : peak)) peak = scale;
        }
    }
    best.d = clamp_half(peak / -128.0f);
    choose_symmetric(&s, &best);
    for (int round = 0; round < 3; round++) {
        next.d = solve_symmetric(&s, &best);
        choose_symmetric(&s, &next);
        if (!(next.error < best.error)) break;
        best = next;
    }
    pack_q6_k(&s, &best, dst);
    return OK;
}

// ---- entry points -----------------------------------------------------------------------------------------------

// Elements and bytes of a block; 0 for a format that is not known.
static int block_of(int id) {
    const format *f = tp_format(id);
    return f ? f->super : is_float(id) ? 1 : is_e4m3(id) ? E4M3_BLOCK : 0;
}

static int block_bytes(int id) {
    const format *f = tp_format(id);
    return f ? f->block_bytes : is_float(id) ? float_bytes(id) : E4M3_BLOCK_BYTES;
}

static int is_int4(int id) { return tp_format(id)->bf16 && tp_format(id)->bits == 4; }

static int encode_block(int format, const float *x, uint8_t *dst) {
    switch (format) {
    case Q4_0: return encode_symmetric(x, dst, 4);
    case Q4_1: return encode_affine(x, dst, 4);
    case Q5_0: return encode_symmetric(x, dst, 5);
    case Q5_1: return encode_affine(x, dst, 5);
    case Q8_0: return encode_q8_0(x, dst);
    case Q4_K: return encode_q45_k(x, dst, 4);
    case Q5_K: return encode_q45_k(x, dst, 5);
    case Q6_K: return encode_q6_k(x, dst);
    default: return is_int4(format) ? tp_encode_int4(tp_format(format), x, dst) : UNSUPPORTED;
    }
}

// Some rows of a tensor in a format whose one scale follows from the largest magnitude of all of it.
int tp_encode_under(int format, const float *src, uint8_t *dst, int64_t rows, int64_t k, float largest) {
    if (k % block_of(format)) return NOT_BLOCKS;
    if (format == NVFP4) return tp_encode_nvfp4(src, dst, rows * k, largest);
    return format == FP8 ? tp_encode_fp8(src, dst, rows, k, largest) : UNSUPPORTED;
}

int tp_encode(int format, const float *src, uint8_t *dst, int64_t rows, int64_t k) {
    int64_t n = rows * k;
    int block = block_of(format), bytes = block_bytes(format);
    if (!block) return UNSUPPORTED;
    if (k % block) return NOT_BLOCKS;
    if (format == F32) {
        memcpy(dst, src, (size_t)n * 4);
        return OK;
    }
    if (format == F16) return encode_f16(src, dst, n);
    if (format == BF16) return encode_bf16(src, dst, n);
    if (format == FP8 || format == NVFP4) return tp_encode_under(format, src, dst, rows, k, tp_largest(src, k, rows, k));
    if (format == MXFP4) return tp_encode_mxfp4(src, dst, n);
    if (format == FP8_ROW) return tp_encode_fp8_rows(src, dst, rows, k);
    if (format == FP8_BLOCK128) return tp_encode_fp8_blocks(src, dst, rows, k);
    for (int64_t b = 0; b < n / block; b++) {
        int status = encode_block(format, src + b * block, dst + b * bytes);
        if (status) return status;
    }
    return OK;
}

static void decode_block(int format, const uint8_t *src, float *dst) {
    switch (format) {
    case Q2_K: decode_q2_k(src, dst); break;
    case Q3_K: decode_q3_k(src, dst); break;
    case Q4_K: decode_q45_k(src, dst, 4); break;
    case Q5_K: decode_q45_k(src, dst, 5); break;
    case Q6_K: decode_q6_k(src, dst); break;
    default:
        if (tp_format(format)->table) tp_decode_table(tp_format(format), src, dst);
        else if (tp_format(format)->bf16 || tp_format(format)->has_zero) tp_decode_int4(tp_format(format), src, dst);
        else decode_legacy(format, src, dst);
    }
}

int tp_decode(int format, const uint8_t *src, float *dst, int64_t rows, int64_t k) {
    int64_t n = rows * k;
    int block = block_of(format), bytes = block_bytes(format);
    if (!block) return UNSUPPORTED;
    if (k % block) return NOT_BLOCKS;
    if (format == F32) {
        memcpy(dst, src, (size_t)n * 4);
    } else if (format == F16) {
        decode_f16(src, dst, n);
    } else if (format == BF16) {
        decode_bf16(src, dst, n);
    } else if (is_e4m3(format)) {
        tp_decode_fp8(src, dst, n);
    } else {
        for (int64_t b = 0; b < n / block; b++) decode_block(format, src + b * bytes, dst + b * block);
    }
    return OK;
}
