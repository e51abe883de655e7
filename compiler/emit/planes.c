/* Layout "planes" (compiler/layouts.py): rows of codes, split in planes by bits, and rows of scales.
 *
 * No state and no allocation: threads may work on disjoint rows.
 */
#include "blocks.h"

enum { LINE = 32, PLANES = 2, TILE = 128 };

/* A row of every code plane and of the scales. */
typedef struct {
    uint8_t *codes[PLANES];
    uint8_t *scales;
} target;

static uint64_t u64(const uint8_t *p) { uint64_t v; memcpy(&v, p, 8); return v; }
static uint32_t u32(const uint8_t *p) { uint32_t v; memcpy(&v, p, 4); return v; }

/* 32 codes of which the bits from `low` up become one line of a plane of `width` bits. */
static void put_line(const uint8_t *codes, int width, int low, uint8_t *out) {
    if (width == 4) {
        const uint64_t mask = 0x0f0f0f0f0f0f0f0full;
        for (int half = 0; half < 16; half += 8) {
            uint64_t bits = (u64(codes + half) >> low & mask) | (u64(codes + 16 + half) >> low & mask) << 4;
            memcpy(out + half, &bits, 8);
        }
    } else if (width == 2) {
        uint64_t bits = 0;
        for (int turn = 0; turn < 4; turn++)
            bits |= (u64(codes + 8 * turn) >> low & 0x0303030303030303ull) << (2 * turn);
        memcpy(out, &bits, 8);
    } else {
        uint32_t bits = 0;
        for (int turn = 0; turn < 8; turn++) bits |= (u32(codes + 4 * turn) >> low & 0x01010101u) << turn;
        memcpy(out, &bits, 4);
    }
}

static int first_width(int bits) { return bits >= 4 ? 4 : 2; }

/* `n` codes of a block; the rows of the planes move on. */
static void put_codes(const uint8_t *codes, int n, int bits, target *to) {
    int first = first_width(bits), second = bits - first;
    for (int k = 0; k < n; k += LINE) {
        put_line(codes + k, first, 0, to->codes[0]);
        to->codes[0] += LINE * first / 8;
        if (!second) continue;
        put_line(codes + k, second, first, to->codes[1]);
        to->codes[1] += LINE * second / 8;
    }
}

/* The fields of block `b` in a row of scales for `k` elements. */
static void put_scales(const format *f, const parts *p, int64_t b, int64_t k, uint8_t *row) {
    int64_t supers = k / f->super, per = f->super / f->group, groups = supers * per;
    memcpy(row + 2 * b, &p->d, 2);
    row += 2 * supers;
    if (f->has_min) {
        memcpy(row + 2 * b, &p->dmin, 2);
        row += 2 * supers;
    }
    if (f->has_sub) {
        memcpy(row + per * b, p->sub, (size_t)per);
        row += groups;
        if (f->has_min) memcpy(row + per * b, p->submin, (size_t)per);
    }
    if (f->has_zero) row[b] = p->zero;
}

/* A block whose bytes already are lines of its one plane. */
static void copy_block(const format *f, const uint8_t *block, int64_t b, int64_t k, target *to) {
    parts p;
    int nbytes = f->super * f->bits / 8;
    p.zero = 0;
    memcpy(&p.d, block + f->d_at, 2);
    if (f->has_min) memcpy(&p.dmin, block + f->dmin_at, 2);
    if (f->has_zero) p.zero = block[f->zero_at];
    put_scales(f, &p, b, k, to->scales);
    memcpy(to->codes[0], block + f->lines_at, (size_t)nbytes);
    to->codes[0] += nbytes;
}

static void put_row(const format *f, const uint8_t *row, int64_t k, target to) {
    parts p;
    for (int64_t b = 0; b < k / f->super; b++, row += f->block_bytes) {
        if (f->lines_at) {
            copy_block(f, row, b, k, &to);
            continue;
        }
        tp_take(f, row, &p);
        put_codes(p.codes, f->super, f->bits, &to);
        put_scales(f, &p, b, k, to.scales);
    }
}

/* The e4m3 numbers of a row, and from the first row of a tile its float32 scales. */
static void put_e4m3(const uint8_t *row, int64_t k, int64_t tile_k, target to) {
    for (int64_t at = 0; at < k; at += E4M3_BLOCK, row += E4M3_BLOCK_BYTES) {
        memcpy(to.codes[0] + at, row + 4, E4M3_BLOCK);
        if (to.scales && at % tile_k == 0) memcpy(to.scales + at / tile_k * 4, row, 4);
    }
}

static int64_t scales_bytes(const format *f, int64_t k) {
    int64_t supers = k / f->super, groups = k / f->group, kinds = 1 + f->has_min;
    return supers * 2 * kinds + (f->has_sub ? groups * kinds : 0) + (f->has_zero ? groups : 0);
}

static void pad(uint8_t *row, int64_t used, int64_t length) {
    if (used < length) memset(row + used, 0, (size_t)(length - used));
}

static void pack_blocks(const format *f, const uint8_t *row, int64_t k, target to, const int64_t *row_bytes) {
    int first = f->bits == 8 ? 8 : first_width(f->bits);
    pad(to.codes[0], k * first / 8, row_bytes[0]);
    if (to.codes[1]) pad(to.codes[1], k * (f->bits - first) / 8, row_bytes[1]);
    pad(to.scales, scales_bytes(f, k), row_bytes[to.codes[1] ? 2 : 1]);
    put_row(f, row, k, to);
}

/* `rows` rows of `k` elements, `stride` bytes apart. `planes` are where the first row goes in the code planes (`count`
 * less one of them) and then in the scales; `row_bytes` are the lengths of their rows, filled up with zeros. Of e4m3
 * numbers the first row starts a tile, and the place of the scales is NULL where no tile of the weight begins. */
void tp_pack_planes(int id, const uint8_t *data, int64_t stride, int64_t rows, int64_t k, uint8_t *const *planes,
                    const int64_t *row_bytes, int count) {
    const format *f = tp_format(id);
    int64_t tile = id == FP8_BLOCK128 ? TILE : id == FP8_ROW ? 1 : rows, tile_k = id == FP8_BLOCK128 ? TILE : k;
    int64_t length = row_bytes[count - 1];
    uint8_t *scales = planes[count - 1];
    for (int64_t row = 0; row < rows; row++, data += stride) {
        target to = {{planes[0] + row * row_bytes[0], count > 2 ? planes[1] + row * row_bytes[1] : 0}, 0};
        if (f) {
            to.scales = scales + row * length;
            pack_blocks(f, data, k, to, row_bytes);
            continue;
        }
        if (scales && row % tile == 0) to.scales = scales + row / tile * length;
        pad(to.codes[0], k, row_bytes[0]);
        if (to.scales) pad(to.scales, (k + tile_k - 1) / tile_k * 4, length);
        put_e4m3(data, k, tile_k, to);
    }
}
