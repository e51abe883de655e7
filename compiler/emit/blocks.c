/* The parts of every quantized block, checks for NaN and infinity, error sums.
 *
 * No state and no allocation: threads may work on disjoint rows.
 */
#include "blocks.h"

/* quantize.c: `rows` rows of `k` elements as float32. */
int tp_decode(int format, const uint8_t *src, float *dst, int64_t rows, int64_t k);

static uint16_t u16(const uint8_t *p) { uint16_t v; memcpy(&v, p, 2); return v; }
static uint32_t u32(const uint8_t *p) { uint32_t v; memcpy(&v, p, 4); return v; }

/* Blocks of 32: low nibbles are elements 0..15, high nibbles 16..31. */
static void nibbles(const uint8_t *restrict qs, uint8_t *restrict codes) {
    for (int i = 0; i < 16; i++) codes[i] = qs[i] & 15, codes[i + 16] = qs[i] >> 4;
}
static void fifth_bits(const uint8_t *restrict qh, uint8_t *restrict codes) {
    uint32_t bits = u32(qh);
    for (int i = 0; i < 32; i++) codes[i] |= (uint8_t)(((bits >> i) & 1) << 4);
}
#define TAKE(name) static void take_##name(const uint8_t *restrict b, parts *restrict to)
TAKE(q4_0) { nibbles(b + 2, to->codes); }
TAKE(q4_1) { nibbles(b + 4, to->codes); }
TAKE(q5_0) { nibbles(b + 6, to->codes), fifth_bits(b + 2, to->codes); }
TAKE(q5_1) { nibbles(b + 8, to->codes), fifth_bits(b + 4, to->codes); }
TAKE(iq4_nl) { nibbles(b + 2, to->codes); }
TAKE(q8_0) {
    for (int i = 0; i < 32; i++) to->codes[i] = b[2 + i] ^ 0x80;
}

/* Element 128 n + 32 k + l sits at bits 2 k of byte 32 n + l. */
static void two_bits(const uint8_t *restrict qs, uint8_t *restrict codes, int at) {
    for (int n = 0; n < 2; n++)
        for (int k = 0; k < 4; k++)
            for (int l = 0; l < 32; l++)
                codes[128 * n + 32 * k + l] |= (uint8_t)(((qs[32 * n + l] >> (2 * k)) & 3) << at);
}
TAKE(q2_k) {
    for (int g = 0; g < 16; g++) to->sub[g] = b[g] & 15, to->submin[g] = b[g] >> 4;
    memset(to->codes, 0, SUPER);
    two_bits(b + 16, to->codes, 0);
}
TAKE(q3_k) {
    const uint8_t *scales = b + 96;
    for (int g = 0; g < 16; g++) {
        int low = (scales[g % 8] >> (4 * (g / 8))) & 15, high = (scales[8 + g % 4] >> (2 * (g / 4))) & 3;
        to->sub[g] = (int8_t)((low | high << 4) - 32);
    }
    for (int s = 0; s < 8; s++)
        for (int l = 0; l < 32; l++) to->codes[32 * s + l] = (uint8_t)(((b[l] >> s) & 1) << 2);
    two_bits(b + 32, to->codes, 0);
}
static void six_bit_pairs(const uint8_t *restrict b, parts *restrict to) {
    for (int j = 0; j < 4; j++) {
        to->sub[j] = b[j] & 63, to->submin[j] = b[4 + j] & 63;
        to->sub[4 + j] = (int8_t)((b[8 + j] & 15) | (b[j] >> 6) << 4);
        to->submin[4 + j] = (uint8_t)(b[8 + j] >> 4 | (b[4 + j] >> 6) << 4);
    }
}
static void nibbles_64(const uint8_t *restrict qs, uint8_t *restrict codes) {
    for (int c = 0; c < 4; c++)
        for (int l = 0; l < 32; l++) {
            codes[64 * c + l] = qs[32 * c + l] & 15;
            codes[64 * c + 32 + l] = qs[32 * c + l] >> 4;
        }
}
TAKE(q4_k) { six_bit_pairs(b + 4, to), nibbles_64(b + 16, to->codes); }
TAKE(q5_k) {
    six_bit_pairs(b + 4, to), nibbles_64(b + 48, to->codes);
    for (int s = 0; s < 8; s++)
        for (int l = 0; l < 32; l++) to->codes[32 * s + l] |= (uint8_t)(((b[16 + l] >> s) & 1) << 4);
}
TAKE(q6_k) {
    for (int n = 0; n < 2; n++)
        for (int l = 0; l < 64; l++) {
            to->codes[128 * n + l] = b[64 * n + l] & 15;
            to->codes[128 * n + 64 + l] = b[64 * n + l] >> 4;
        }
    two_bits(b + 128, to->codes, 4);
    memcpy(to->sub, b + 192, 16);
}

/* d, two high bits of eight scales, their four low bits, qs[128] */
TAKE(iq4_xs) {
    for (int g = 0; g < 8; g++) {
        int low = b[4 + g / 2] >> (4 * (g % 2)) & 15, high = u16(b + 2) >> (2 * g) & 3;
        to->sub[g] = (int8_t)((low | high << 4) - 32);
        nibbles(b + 8 + 16 * g, to->codes + 32 * g);
    }
}

/* E2M1 is doubled in its table, so d is half of the scale: of 2^(e - 127), or of a float32. */
TAKE(mxfp4) {
    uint32_t e = b[0];
    to->wide = e == 255 ? 0x7fc00000u : e < 2 ? 0x00200000u << e : (e - 1) << 23;
    nibbles(b + 1, to->codes);
}
TAKE(nvfp4) {
    float scale;
    memcpy(&scale, b, 4);
    scale *= 0.5f;
    memcpy(&to->wide, &scale, 4), memcpy(to->sub, b + 4, 2);
    nibbles(b + 6, to->codes);
}

/* int4: [d][zero, where blocks have one][nibbles]; each 32 elements as in Q4_0. */
static void four_bits(const uint8_t *restrict qs, uint8_t *restrict codes, int n) {
    for (int k = 0; k < n; k += 32, qs += 16) nibbles(qs, codes + k);
}
TAKE(int4_g32) { four_bits(b + 2, to->codes, 32); }
TAKE(int4_g64) { four_bits(b + 2, to->codes, 64); }
TAKE(int4_g128) { four_bits(b + 2, to->codes, 128); }
TAKE(int4_g32_zp) { to->zero = b[2], four_bits(b + 3, to->codes, 32); }
TAKE(int4_g64_zp) { to->zero = b[2], four_bits(b + 3, to->codes, 64); }
TAKE(int4_g128_zp) { to->zero = b[2], four_bits(b + 3, to->codes, 128); }

/* int8: [d][codes]; a code is a signed byte. */
static void eight_bits(const uint8_t *restrict b, uint8_t *restrict codes, int n) {
    for (int i = 0; i < n; i++) codes[i] = b[2 + i] ^ 0x80;
}
TAKE(int8_g32) { eight_bits(b, to->codes, 32); }
TAKE(int8_g128) { eight_bits(b, to->codes, 128); }

static const format formats[] = {
    [2] = {18, 32, 32, 4, 0, 0, 0, 0, take_q4_0, .lines_at = 2},
    [3] = {20, 32, 32, 4, 1, 0, 0, 2, take_q4_1, .lines_at = 4},
    [6] = {22, 32, 32, 5, 0, 0, 0, 0, take_q5_0, .lines_at = 0},
    [7] = {24, 32, 32, 5, 1, 0, 0, 2, take_q5_1, .lines_at = 0},
    [8] = {34, 32, 32, 8, 0, 0, 0, 0, take_q8_0, .lines_at = 2},
    [10] = {84, 256, 16, 2, 1, 1, 80, 82, take_q2_k, .lines_at = 0},
    [11] = {110, 256, 16, 3, 0, 1, 108, 0, take_q3_k, .lines_at = 0},
    [12] = {144, 256, 32, 4, 1, 1, 0, 2, take_q4_k, .lines_at = 0},
    [13] = {176, 256, 32, 5, 1, 1, 0, 2, take_q5_k, .lines_at = 0},
    [14] = {210, 256, 16, 6, 0, 1, 208, 0, take_q6_k, .lines_at = 0},
    [20] = {18, 32, 32, 4, 0, 0, 0, 0, take_iq4_nl, .lines_at = 2, .table = IQ4_TABLE},
    [23] = {136, 256, 32, 4, 0, 1, 0, 0, take_iq4_xs, .lines_at = 0, .table = IQ4_TABLE},
    [MXFP4] = {MXFP4_BYTES, 32, 32, 4, 0, 0, 0, 0, take_mxfp4, .lines_at = 1, .table = E2M1_TABLE, .wide = 1},
    [NVFP4] = {NVFP4_BYTES, 32, 16, 4, 0, 1, 0, 0, take_nvfp4, .lines_at = 6, .table = E2M1_TABLE, .wide = 1, .e4m3_sub = 1},
    [201] = {18, 32, 32, 4, 0, 0, 0, 0, take_int4_g32, .lines_at = 2, .bf16 = 1},
    [202] = {34, 64, 64, 4, 0, 0, 0, 0, take_int4_g64, .lines_at = 2, .bf16 = 1},
    [203] = {66, 128, 128, 4, 0, 0, 0, 0, take_int4_g128, .lines_at = 2, .bf16 = 1},
    [204] = {67, 128, 128, 4, 0, 0, 0, 0, take_int4_g128_zp, .lines_at = 3, .has_zero = 1, .zero_at = 2, .bf16 = 1},
    [207] = {19, 32, 32, 4, 0, 0, 0, 0, take_int4_g32_zp, .lines_at = 3, .has_zero = 1, .zero_at = 2, .bf16 = 1},
    [208] = {35, 64, 64, 4, 0, 0, 0, 0, take_int4_g64_zp, .lines_at = 3, .has_zero = 1, .zero_at = 2, .bf16 = 1},
    [209] = {19, 32, 32, 4, 0, 0, 0, 0, take_int4_g32_zp, .lines_at = 3, .has_zero = 1, .zero_at = 2},
    [210] = {67, 128, 128, 4, 0, 0, 0, 0, take_int4_g128_zp, .lines_at = 3, .has_zero = 1, .zero_at = 2},
    [213] = {34, 32, 32, 8, 0, 0, 0, 0, take_int8_g32, .lines_at = 2, .bf16 = 1},
    [214] = {130, 128, 128, 8, 0, 0, 0, 0, take_int8_g128, .lines_at = 2, .bf16 = 1},
};

const format *tp_format(int id) {
    return id >= 0 && id < (int)(sizeof formats / sizeof *formats) && formats[id].take ? &formats[id] : 0;
}

/* ---- checks ---- */

static int floats_not_finite(int id, const uint8_t *data, int64_t n) {
    uint32_t bad = 0;
    if (id == F32)
        for (int64_t i = 0; i < n; i++) bad |= (u32(data + 4 * i) & 0x7f800000u) == 0x7f800000u;
    else {
        uint16_t exponent = id == F16 ? 0x7c00 : 0x7f80, found = 0;
        for (int64_t i = 0; i < n; i++) found |= (u16(data + 2 * i) & exponent) == exponent;
        bad = found;
    }
    return bad != 0;
}

static int not_finite(uint16_t bits, int bf16) {
    uint16_t exponent = bf16 ? 0x7f80 : 0x7c00;
    return (bits & exponent) == exponent;
}

static int blocks_not_finite(const format *f, const uint8_t *row, int64_t row_bytes) {
    int bad = 0;
    for (int64_t at = 0; at < row_bytes; at += f->block_bytes) {
        bad |= not_finite(u16(row + at + f->d_at), f->bf16);
        if (f->has_min) bad |= not_finite(u16(row + at + f->dmin_at), 0);
    }
    return bad;
}

/* Products of a power of two or of a float32 may overflow, so it is values that are looked at. */
static int values_not_finite(int id, const format *f, const uint8_t *row, int64_t row_bytes) {
    float values[SUPER];
    int bad = 0;
    for (int64_t at = 0; at < row_bytes; at += f->block_bytes) {
        tp_decode(id, row + at, values, 1, f->super);
        bad |= floats_not_finite(F32, (const uint8_t *)values, f->super);
    }
    return bad;
}

static int e4m3_not_finite(const uint8_t *row, int64_t row_bytes) {
    int bad = 0;
    for (int64_t at = 0; at < row_bytes; at += E4M3_BLOCK_BYTES) {
        bad |= (u32(row + at) & 0x7f800000u) == 0x7f800000u;
        for (int i = 4; i < E4M3_BLOCK_BYTES; i++) bad |= (row[at + i] & 0x7f) == 0x7f;
    }
    return bad;
}

/* The first row that holds a NaN or an infinity (or a scale that is one), or -1. */
int64_t tp_first_not_finite(int id, const uint8_t *data, int64_t row_bytes, int64_t rows) {
    const format *f = tp_format(id);
    for (int64_t row = 0; row < rows; row++, data += row_bytes) {
        int bad = is_float(id) ? floats_not_finite(id, data, row_bytes / float_bytes(id))
            : !f ? e4m3_not_finite(data, row_bytes)
            : f->wide ? values_not_finite(id, f, data, row_bytes) : blocks_not_finite(f, data, row_bytes);
        if (bad) return row;
    }
    return -1;
}

/* ---- error sums ---- */

enum { LANES = 8 };
typedef float floats __attribute__((vector_size(LANES * 4)));
typedef double doubles __attribute__((vector_size(LANES * 8)));

/* `n` is at most SUPER; both arrays have room for a whole number of LANES. */
static void add_error(const float *x, const float *y, int n, double *sums) {
    doubles squares = {0}, errors = {0};
    floats largest = {0};
    for (int i = 0; i < n; i += LANES) {
        floats a, b;
        memcpy(&a, x + i, sizeof a), memcpy(&b, y + i, sizeof b);
        floats e = a - b;
        doubles e2 = __builtin_convertvector(e, doubles), a2 = __builtin_convertvector(a, doubles);
        squares += a2 * a2, errors += e2 * e2;
        largest = __builtin_elementwise_max(largest, __builtin_elementwise_abs(e));
    }
    for (int l = 0; l < LANES; l++) {
        sums[0] += errors[l], sums[1] += squares[l];
        if (largest[l] > sums[2]) sums[2] = largest[l];
    }
}

/* Adds to sums the error of `data` against the `n` values x it was made from: sum (x - x')^2 and sum x^2; sums[2]
 * becomes the largest |x - x'|. */
void tp_error(int id, const float *x, const uint8_t *data, int64_t n, double *sums) {
    float values[SUPER] = {0}, decoded[SUPER] = {0};
    const format *f = tp_format(id);
    int block = is_float(id) ? 1 : f ? f->super : E4M3_BLOCK;
    int block_bytes = is_float(id) ? float_bytes(id) : f ? f->block_bytes : E4M3_BLOCK_BYTES;
    for (int64_t i = 0; i < n; i += SUPER) {
        int live = n - i < SUPER ? (int)(n - i) : SUPER;
        tp_decode(id, data + i / block * block_bytes, decoded, 1, live);
        if (live < SUPER) {
            memset(values, 0, sizeof values), memset(decoded + live, 0, sizeof decoded - 4 * live);
            memcpy(values, x + i, 4 * live);
        }
        add_error(live < SUPER ? values : x + i, decoded, live, sums);
    }
}
