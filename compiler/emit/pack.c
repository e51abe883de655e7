/* Weights from checkpoint bytes: the tile16 layout (compiler/layouts.py), checks for NaN and infinity, error sums.
 *
 * Every quantized format is read by one function that takes a block apart into exact parts. Formats are numbered by
 * their GGUF type. No state and no allocation: threads may work on disjoint rows.
 */
#include <stdint.h>
#include <string.h>

enum { TILE = 16, SUPER = 256, GROUPS = 16 };
enum { F32 = 0, F16 = 1, BF16 = 30 };

/* quantize.c: `rows` rows of `k` elements as float32. */
int tp_decode(int format, const uint8_t *src, float *dst, int64_t rows, int64_t k);

typedef struct {
    uint16_t d, dmin;        /* float16 bits */
    int8_t sub[GROUPS];      /* scale of each group, times d */
    uint8_t submin[GROUPS];  /* minimum of each group, times dmin */
    uint8_t codes[SUPER];
} parts;

typedef struct {
    int block_bytes, super, group, bits, has_min, has_sub;
    int d_at, dmin_at; /* byte offsets of the float16 scales */
    void (*take)(const uint8_t *block, parts *to);
} format;

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

static const format formats[] = {
    [2] = {18, 32, 32, 4, 0, 0, 0, 0, take_q4_0},
    [3] = {20, 32, 32, 4, 1, 0, 0, 2, take_q4_1},
    [6] = {22, 32, 32, 5, 0, 0, 0, 0, take_q5_0},
    [7] = {24, 32, 32, 5, 1, 0, 0, 2, take_q5_1},
    [8] = {34, 32, 32, 8, 0, 0, 0, 0, take_q8_0},
    [10] = {84, 256, 16, 2, 1, 1, 80, 82, take_q2_k},
    [11] = {110, 256, 16, 3, 0, 1, 108, 0, take_q3_k},
    [12] = {144, 256, 32, 4, 1, 1, 0, 2, take_q4_k},
    [13] = {176, 256, 32, 5, 1, 1, 0, 2, take_q5_k},
    [14] = {210, 256, 16, 6, 0, 1, 208, 0, take_q6_k},
};

static int is_float(int id) { return id == F32 || id == F16 || id == BF16; }
static int float_bytes(int id) { return id == F32 ? 4 : 2; }

static void take(const format *f, const uint8_t *block, parts *to) {
    to->d = u16(block + f->d_at);
    to->dmin = f->has_min ? u16(block + f->dmin_at) : 0;
    f->take(block, to);
}

/* ---- packing ---- */

#define INLINE static inline __attribute__((always_inline))
typedef uint32_t words __attribute__((vector_size(TILE * 4)));
typedef uint32_t four __attribute__((vector_size(16)));
enum { STEPS = 8 };

/* 4 rows by 4 words, transposed. */
INLINE void transpose_4x4(const uint8_t *from, int64_t stride, uint8_t *to, int64_t to_stride) {
    four a, b, c, d;
    memcpy(&a, from, 16), memcpy(&b, from + stride, 16);
    memcpy(&c, from + 2 * stride, 16), memcpy(&d, from + 3 * stride, 16);
    four ac_low = __builtin_shufflevector(a, c, 0, 4, 1, 5), ac_high = __builtin_shufflevector(a, c, 2, 6, 3, 7);
    four bd_low = __builtin_shufflevector(b, d, 0, 4, 1, 5), bd_high = __builtin_shufflevector(b, d, 2, 6, 3, 7);
    a = __builtin_shufflevector(ac_low, bd_low, 0, 4, 1, 5), b = __builtin_shufflevector(ac_low, bd_low, 2, 6, 3, 7);
    c = __builtin_shufflevector(ac_high, bd_high, 0, 4, 1, 5);
    d = __builtin_shufflevector(ac_high, bd_high, 2, 6, 3, 7);
    memcpy(to, &a, 16), memcpy(to + to_stride, &b, 16);
    memcpy(to + 2 * to_stride, &c, 16), memcpy(to + 3 * to_stride, &d, 16);
}

/* One plane of 32 values of k: `width` bits from bit `at` of every code, in `width` lines. */
INLINE uint8_t *plane(const uint32_t step[STEPS][TILE], int width, int at, uint8_t *out) {
    uint32_t mask = ((1u << width) - 1) * 0x01010101u;
    for (int line = 0; line < width; line++, out += sizeof(words)) {
        words bits = {0}, codes;
        for (int t = 0; t < 8 / width; t++) {
            memcpy(&codes, step[line + t * width], sizeof codes);
            bits |= ((codes >> at) & mask) << (t * width);
        }
        memcpy(out, &bits, sizeof bits);
    }
    return out;
}

/* Codes of 16 rows, 32 values of k from `k`, as planes. */
static uint8_t *planes(const parts *row, int k, int bits, uint8_t *out) {
    uint32_t step[STEPS][TILE];
    for (int r = 0; r < TILE; r += 4)
        for (int s = 0; s < STEPS; s += 4)
            transpose_4x4(row[r].codes + k + 4 * s, sizeof(parts), (uint8_t *)&step[s][r], sizeof step[0]);
    switch (bits) {
    case 8: memcpy(out, step, sizeof step); return out + sizeof step;
    case 6: return plane(step, 2, 4, plane(step, 4, 0, out));
    case 5: return plane(step, 1, 4, plane(step, 4, 0, out));
    case 4: return plane(step, 4, 0, out);
    case 3: return plane(step, 1, 2, plane(step, 2, 0, out));
    default: return plane(step, 2, 0, out);
    }
}

static uint8_t *record(const format *f, const parts *row, uint8_t *out) {
    for (int r = 0; r < TILE; r++) memcpy(out + 2 * r, &row[r].d, 2);
    out += 2 * TILE;
    if (f->has_min) {
        for (int r = 0; r < TILE; r++) memcpy(out + 2 * r, &row[r].dmin, 2);
        out += 2 * TILE;
    }
    for (int g = 0; f->has_sub && g < f->super / f->group; g++) {
        for (int r = 0; r < TILE; r++) out[r] = (uint8_t)row[r].sub[g];
        out += TILE;
        for (int r = 0; f->has_min && r < TILE; r++) out[r] = row[r].submin[g];
        out += f->has_min ? TILE : 0;
    }
    for (int k = 0; k < f->super; k += 32) out = planes(row, k, f->bits, out);
    return out;
}

static uint8_t *tile_blocks(const format *f, const uint8_t *rows, int64_t stride, int live, int64_t k, uint8_t *out) {
    static const uint8_t zeros[256];
    parts row[TILE];
    for (int64_t block = 0; block < k / f->super; block++) {
        for (int r = 0; r < TILE; r++) take(f, r < live ? rows + r * stride + block * f->block_bytes : zeros, &row[r]);
        out = record(f, row, out);
    }
    return out;
}

typedef uint16_t eight __attribute__((vector_size(16)));
#define LOW(a, b) __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11)
#define HIGH(a, b) __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15)

/* 8 rows by 8 columns of 16-bit elements, transposed. */
INLINE void transpose_8x8(const uint8_t *from, int64_t stride, uint8_t *to, int64_t to_stride) {
    eight a[8], b[8];
    for (int r = 0; r < 8; r++) memcpy(&a[r], from + r * stride, 16);
    for (int i = 0; i < 4; i++) b[2 * i] = LOW(a[i], a[i + 4]), b[2 * i + 1] = HIGH(a[i], a[i + 4]);
    for (int i = 0; i < 4; i++) a[2 * i] = LOW(b[i], b[i + 4]), a[2 * i + 1] = HIGH(b[i], b[i + 4]);
    for (int i = 0; i < 4; i++) b[2 * i] = LOW(a[i], a[i + 4]), b[2 * i + 1] = HIGH(a[i], a[i + 4]);
    for (int c = 0; c < 8; c++) memcpy(to + c * to_stride, &b[c], 16);
}

/* One element at a time: what is left at the end of the rows, and tiles that are not full. */
INLINE void scatter(int size, const uint8_t *rows, int64_t stride, int live, int64_t from, int64_t k, uint8_t *out) {
    memset(out + from * TILE * size, 0, (k - from) * TILE * size);
    for (int r = 0; r < live; r++)
        for (int64_t c = from; c < k; c++) memcpy(out + (c * TILE + r) * size, rows + r * stride + c * size, size);
}

static uint8_t *tile_halves(const uint8_t *rows, int64_t stride, int live, int64_t k, uint8_t *out) {
    int64_t whole = live == TILE ? k & ~(int64_t)7 : 0;
    for (int64_t c = 0; c < whole; c += 8)
        for (int r = 0; r < TILE; r += 8)
            transpose_8x8(rows + r * stride + 2 * c, stride, out + 2 * (c * TILE + r), 2 * TILE);
    scatter(2, rows, stride, live, whole, k, out);
    return out + k * TILE * 2;
}

static uint8_t *tile_singles(const uint8_t *rows, int64_t stride, int live, int64_t k, uint8_t *out) {
    int64_t whole = live == TILE ? k & ~(int64_t)3 : 0;
    for (int64_t c = 0; c < whole; c += 4)
        for (int r = 0; r < TILE; r += 4)
            transpose_4x4(rows + r * stride + 4 * c, stride, out + 4 * (c * TILE + r), 4 * TILE);
    scatter(4, rows, stride, live, whole, k, out);
    return out + k * TILE * 4;
}

/* `rows` rows of `k` elements, `stride` bytes apart, as tiles; the last tile is filled up with zero rows. */
void tp_pack_tile16(int id, const uint8_t *data, int64_t stride, int64_t rows, int64_t k, uint8_t *out) {
    for (int64_t row = 0; row < rows; row += TILE) {
        int live = rows - row < TILE ? (int)(rows - row) : TILE;
        const uint8_t *tile = data + row * stride;
        if (id == F32) out = tile_singles(tile, stride, live, k, out);
        else if (is_float(id)) out = tile_halves(tile, stride, live, k, out);
        else out = tile_blocks(&formats[id], tile, stride, live, k, out);
    }
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

static int not_finite(uint16_t bits) { return (bits & 0x7c00) == 0x7c00; }

/* The first row that holds a NaN or an infinity (or a scale that is one), or -1. */
int64_t tp_first_not_finite(int id, const uint8_t *data, int64_t row_bytes, int64_t rows) {
    for (int64_t row = 0; row < rows; row++, data += row_bytes) {
        if (is_float(id)) {
            if (floats_not_finite(id, data, row_bytes / float_bytes(id))) return row;
            continue;
        }
        const format *f = &formats[id];
        int bad = 0;
        for (int64_t at = 0; at < row_bytes; at += f->block_bytes) {
            bad |= not_finite(u16(data + at + f->d_at));
            if (f->has_min) bad |= not_finite(u16(data + at + f->dmin_at));
        }
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
    int block = is_float(id) ? 1 : formats[id].super;
    int block_bytes = is_float(id) ? float_bytes(id) : formats[id].block_bytes;
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
