/* The tile16 layout (compiler/layouts.py). No state and no allocation: threads may work on disjoint rows. */
#include "blocks.h"

enum { TILE = 16, E4M3_RECORD = 128 };

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

/* Bytes of d in a record: a power of two is its exponent, a float32 stands once before the records of the tile. */
static int scale_bytes(const format *f) { return f->e4m3_sub ? 0 : f->wide ? 1 : 2; }

static uint8_t *record(const format *f, const parts *row, uint8_t *out) {
    int d_bytes = scale_bytes(f);
    for (int r = 0; r < TILE; r++, out += d_bytes) memcpy(out, &row[r].d, d_bytes);
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
    if (f->has_zero) {
        for (int r = 0; r < TILE; r++) out[r] = row[r].zero;
        out += TILE;
    }
    for (int k = 0; k < f->super; k += 32) out = planes(row, k, f->bits, out);
    return out;
}

static uint8_t *tile_blocks(const format *f, const uint8_t *rows, int64_t stride, int live, int64_t k, uint8_t *out) {
    static const uint8_t zeros[256];
    parts row[TILE];
    for (int64_t block = 0; block < k / f->super; block++) {
        for (int r = 0; r < TILE; r++) tp_take(f, r < live ? rows + r * stride + block * f->block_bytes : zeros, &row[r]);
        for (int r = 0; r < TILE && block == 0 && !scale_bytes(f); r++, out += 4) memcpy(out, &row[r].wide, 4);
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

typedef uint8_t sixteen __attribute__((vector_size(16)));

/* 16 rows of 16 bytes, transposed. */
INLINE void transpose_16x16(const uint8_t *const *from, uint8_t *to) {
    sixteen a[16], b[16];
    for (int r = 0; r < 16; r++) memcpy(&a[r], from[r], 16);
    for (int round = 0; round < 4; round++) {
        for (int i = 0; i < 8; i++) {
            sixteen x = a[i], y = a[i + 8];
            b[2 * i] = __builtin_shufflevector(x, y, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
            b[2 * i + 1] = __builtin_shufflevector(x, y, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
        }
        memcpy(a, b, sizeof a);
    }
    memcpy(to, a, sizeof a);
}

/* e4m3 numbers: every E4M3_RECORD of them stand behind the float32 scales of the 16 rows. */
static uint8_t *tile_e4m3(const uint8_t *rows, int64_t stride, int live, int64_t k, uint8_t *out) {
    static const uint8_t zeros[E4M3_BLOCK_BYTES];
    for (int64_t at = 0; at < k; at += E4M3_BLOCK, rows += E4M3_BLOCK_BYTES) {
        const uint8_t *block[TILE];
        for (int r = 0; r < TILE; r++) block[r] = r < live ? rows + r * stride : zeros;
        if (at % E4M3_RECORD == 0)
            for (int r = 0; r < TILE; r++, out += 4) memcpy(out, block[r], 4);
        for (int c = 4; c < E4M3_BLOCK_BYTES; c += 16, out += 16 * TILE) {
            const uint8_t *numbers[TILE];
            for (int r = 0; r < TILE; r++) numbers[r] = block[r] + c;
            transpose_16x16(numbers, out);
        }
    }
    return out;
}

/* `rows` rows of `k` elements, `stride` bytes apart, as tiles; the last tile is filled up with zero rows. */
void tp_pack_tile16(int id, const uint8_t *data, int64_t stride, int64_t rows, int64_t k, uint8_t *out) {
    for (int64_t row = 0; row < rows; row += TILE) {
        int live = rows - row < TILE ? (int)(rows - row) : TILE;
        const uint8_t *tile = data + row * stride;
        if (id == F32) out = tile_singles(tile, stride, live, k, out);
        else if (is_e4m3(id)) out = tile_e4m3(tile, stride, live, k, out);
        else if (is_float(id)) out = tile_halves(tile, stride, live, k, out);
        else out = tile_blocks(tp_format(id), tile, stride, live, k, out);
    }
}
