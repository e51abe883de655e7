/* Integer codes of the "planes" layout times activations quantized to int8: what is staged, and the products of a stage.
 *
 * A group is 32 consecutive k. Quad q of a group is the word whose byte j belongs to k = 4 q + j, so that one dp4a takes
 * four k. Planes: 4-bit word i holds quad i in its low and quad i + 4 in its high nibbles; 2-bit quad q stands in word
 * q % 2 at bits 2 (q / 2) of each byte; 1-bit quad q at bit q of each byte.
 *
 * A lane has STEPS neighbouring groups of every row of a stage, so that it loads scales several at a time. It takes them
 * in an order of its own, turned by turn(lane), in which 32 lanes meet no bank of shared memory twice. */
#ifndef DECODE_INT_CUH
#define DECODE_INT_CUH
#include "tapeout.cuh"

#define LINE0 PLANE0_UNIT /* bytes of a group in each plane */
#define LINE1 PLANE1_UNIT
#define HALVES (GROUP == 16 ? 2 : 1)                       /* scaled parts of a group of 32 */
#define SPAN (SUPER / 32 < STEPS ? SUPER / 32 : STEPS)     /* groups of a lane that share d */
#define SPANS (STEPS / SPAN)
#define SUMS ((HAS_MIN || HAS_ZEROS) ? HALVES : 0)         /* floats of a group: scale times sum of activations */
#define STARTS (ZERO != 0 ? HALVES : 0)                    /* 16-bit integers of a group: sums of activations */
#define SIDES (1 + SUMS)
#define SIDES_AT (X_AT + M * CHUNKS * STEPS * 1024)
#define STARTS_AT (SIDES_AT + M * SIDES * CHUNKS * STEPS * 128)
#define MIN_UNIT 64.0f /* what byte_float's fraction counts in */

/* Results up to 2^22 become floats by their place in the mantissa of 1.5 * 2^23. */
#define MOST_CODE (BITS == 8 ? 128 : ZERO ? ZERO : (1 << BITS) - 1)
#define MOST_SUB (!HAS_SUB ? 1 : HAS_MIN ? (BITS == 2 ? 15 : 63) : BITS == 3 ? 32 : 128)
#define MOST ((i64)32 * 127 * MOST_CODE * MOST_SUB)
#define BY_MANTISSA (MOST < (1 << 22))
#define BASE (BY_MANTISSA ? 0x4b400000 : 0)
#define SUM_HALVES (MOST < ((i64)1 << 31)) /* both halves of a group fit one integer */
static_assert(MOST / HALVES < ((i64)1 << 31) && (GROUP >= 32 || GROUP == 16) && (GROUP == 32 || !HAS_MIN || HALVES == 2),
              "integer sums");

TP_DEVICE int turn(int lane) {
    const int folded = lane ^ lane >> 2; /* bits 1 and 2: those of the lane, each with the one two above */
    return STEPS == 1 ? 0 : STEPS == 2 ? (lane >> 2 ^ lane >> 3 ^ lane >> 4) & 1 : (folded >> 2 & 1) | (folded & 2);
}

/* 8-bit codes: whether the lane takes the second 16 bytes of a group before the first. */
TP_DEVICE int half_turn(int lane) { return BITS == 8 ? lane >> (STEPS == 4 ? 0 : STEPS == 2 ? 1 : 2) & 1 : 0; }

/* ---- activations ---- */

/* Index of position i, of a lane's STEPS, among the 16-byte pieces of a row, among the words of a side and the starts. */
TP_DEVICE int piece_index(int m, int chunk, int half, int i, int lane) {
    return (((m * CHUNKS + chunk) * 2 + half) * STEPS + i) * 32 + lane;
}
TP_DEVICE int side_index(int m, int side, int chunk, int i, int lane) {
    return (((m * SIDES + side) * CHUNKS + chunk) * 32 + lane) * STEPS + i;
}
TP_DEVICE int start_index(int m, int half, int chunk, int i, int lane) {
    return (((m * HALVES + half) * CHUNKS + chunk) * 32 + lane) * STEPS + i;
}

/* Codes of the four elements from 4 p on of row m, and with the first of a group what stands beside it: its scale, and
 * for each half what its sum of codes is needed for. */
TP_DEVICE void store_piece(u8 *shared, int m, int p, u32 codes, float scale, const i32 (&halves)[2]) {
    const int group = p / 8, word = p % 8, chunk = group / (32 * STEPS), lane = group / STEPS % 32;
    const int i = group % STEPS ^ turn(lane), half = word / 4 ^ half_turn(lane);
    ((u32 *)(shared + X_AT))[piece_index(m, chunk, half, i, lane) * 4 + word % 4] = codes;
    if (word) return;
    u32 *side = (u32 *)(shared + SIDES_AT);
    side[side_index(m, 0, chunk, i, lane)] = __float_as_uint(scale);
    constexpr float unit = !HAS_MIN ? 1.0f : HAS_SUB ? MIN_SIGN * MIN_UNIT : MIN_SIGN;
    TP_UNROLL for (int h = 0; h < HALVES; h++) {
        const i32 sum = HALVES == 1 ? halves[0] + halves[1] : halves[h];
        if (SUMS) side[side_index(m, 1 + h, chunk, i, lane)] = __float_as_uint(unit * scale * (float)sum);
        if (STARTS) ((i16 *)(shared + STARTS_AT))[start_index(m, h, chunk, i, lane)] = (i16)sum; /* at most 32 * 128 */
    }
}

TP_DEVICE u32 magnitude(float value) { return __float_as_uint(value) & 0x7fffffffu; }

/* Quantizes and stores pieces of row m, each the four elements from 4 (tid + i THREADS) on, i from `first`. Groups of 32
 * lie in 8 neighbouring lanes: absmax / 127, to nearest even. A NaN or an infinity makes the scale NaN. */
TP_DEVICE void stage_batch(u8 *shared, int m, int first, const float4 (&v)[BATCH]) {
    u32 top[BATCH], codes[BATCH];
    i32 sum[BATCH];
    float scale[BATCH];
    TP_UNROLL for (int b = 0; b < BATCH; b++) /* as integers, of which that of a NaN is the largest */
        top[b] = max(max(magnitude(v[b].x), magnitude(v[b].y)), max(magnitude(v[b].z), magnitude(v[b].w)));
    TP_UNROLL for (int lane = 1; lane < 8; lane *= 2)
        TP_UNROLL for (int b = 0; b < BATCH; b++)
            if (first + b < PIECES) top[b] = max(top[b], __shfl_xor_sync(TP_ALL, top[b], lane));
    TP_UNROLL for (int b = 0; b < BATCH; b++) {
        const float most = __uint_as_float(top[b]);
        const bool usable = most > 1e-35f && most <= 3.4028235e38f;
        const float inverse = usable ? 127.0f * tp_reciprocal(most) : 0.0f;
        scale[b] = most - most == 0.0f ? most * (1.0f / 127.0f) : most - most;
        codes[b] = tp_pack4(__float2int_rn(v[b].x * inverse), __float2int_rn(v[b].y * inverse),
                            __float2int_rn(v[b].z * inverse), __float2int_rn(v[b].w * inverse));
        sum[b] = tp_dp4a(codes[b], 0x01010101u, 0);
    }
    if (SUMS || STARTS)
        TP_UNROLL for (int lane = 1; lane < 4; lane *= 2)
            TP_UNROLL for (int b = 0; b < BATCH; b++)
                if (first + b < PIECES) sum[b] += __shfl_xor_sync(TP_ALL, sum[b], lane);
    TP_UNROLL for (int b = 0; b < BATCH; b++) {
        const int p = (int)threadIdx.x + (first + b) * THREADS;
        if (first + b >= PIECES) continue;
        const i32 halves[2] = { sum[b], SUMS || STARTS ? __shfl_xor_sync(TP_ALL, sum[b], 4) : 0 };
        if (K / 4 % THREADS == 0 || p < K / 4) store_piece(shared, m, p, codes[b], scale[b], halves);
    }
}

/* ---- scales ---- */

/* BYTES (1, 2 or 4) bytes at p, which is a multiple of ALIGN. */
template <int BYTES, int ALIGN> TP_DEVICE u32 load_bytes(const u8 *p) {
    if constexpr (BYTES == 1) return *p;
    else if constexpr (BYTES == 2 && ALIGN >= 2) return *(const u16 *)p;
    else if constexpr (BYTES == 4 && ALIGN >= 4) return *(const u32 *)p;
    else return load_bytes<BYTES / 2, ALIGN>(p) | load_bytes<BYTES / 2, ALIGN>(p + BYTES / 2) << (4 * BYTES);
}

/* A lane's ENTRIES of an array of scales, each of BYTES, in its order: entry i of `words` is number i ^ turned. */
template <int ARRAY, int ENTRIES, int BYTES>
TP_DEVICE void load_scales(u32 (&words)[(ENTRIES * BYTES + 3) / 4], const u8 *slot, int j, int chunk, int entry, int turned) {
    constexpr int places = SCALE_AT[ARRAY] | SCALE_PIECE[ARRAY] | 16, align = places & -places, bytes = ENTRIES * BYTES;
    const u8 *p = slot + STAGE_SCALES + j * SCALE_SLOTS + scale_slot(ARRAY)
                  + ((SCALE_AT[ARRAY] + chunk * SCALE_PIECE[ARRAY]) & 15) + entry * BYTES;
    if constexpr (bytes == 8) {
        words[0] = load_bytes<4, align>(p + (turned & 2) * 2);
        words[1] = load_bytes<4, align>(p + (~turned & 2) * 2);
    } else {
        words[0] = load_bytes<bytes, align>(p);
    }
    if (ENTRIES > 1) {
        const u32 order = 0x3210 ^ (BYTES == 1 ? turned * 0x1111 : (turned & 1) * 0x2222);
        TP_UNROLL for (int i = 0; i < (bytes + 3) / 4; i++) words[i] = __byte_perm(words[i], 0, order);
    }
}

TP_DEVICE float half_of(const u32 *words, int i) {
    const u32 word = words[i / 2];
    if (SCALE_BF16) return __uint_as_float(i % 2 ? word & 0xffff0000u : word << 16);
    return tp_f16((u16)(i % 2 ? word >> 16 : word));
}

/* The signed byte i: in one instruction, which the compiler does not find. */
TP_DEVICE i32 byte_of(const u32 *words, int i) {
#ifdef TP_HOST
    return (i8)(words[i / 4] >> (8 * (i % 4)));
#else
    i32 value;
    asm("prmt.b32 %0, %1, 0, %2;" : "=r"(value) : "r"(words[i / 4]), "r"(0x8880 + 0x1111 * (i % 4)));
    return value;
#endif
}

/* 2 + byte / 64 for a byte up to 127: no conversion, and the 2 is taken off for all rows at once. */
TP_DEVICE float byte_float(const u32 *words, int i) {
    return __uint_as_float(__byte_perm(words[i / 4], 0x40000000u, 0x7044 | (i % 4) << 8));
}

struct RowScales {
    u32 d[(SPANS * 2 + 3) / 4];
#if HAS_MIN
    u32 dmin[(SPANS * 2 + 3) / 4];
#endif
#if HAS_SUB
    u32 sub[(STEPS * HALVES + 3) / 4];
#endif
#if HAS_MIN && HAS_SUB
    u32 min[(STEPS * HALVES + 3) / 4];
#endif
#if HAS_ZEROS
    u32 zero[(SPANS + 3) / 4];
#endif
};

TP_DEVICE void load_row_scales(RowScales &row, const u8 *slot, int j, int chunk, int lane, int turned) {
    const int first = lane * STEPS; /* the lane's groups of 32 in the stage */
    load_scales<0, SPANS, 2>(row.d, slot, j, chunk, first * 32 / SUPER, turned / SPAN);
#if HAS_MIN
    load_scales<1, SPANS, 2>(row.dmin, slot, j, chunk, first * 32 / SUPER, turned / SPAN);
#endif
#if HAS_SUB
    load_scales<1 + HAS_MIN, STEPS, HALVES>(row.sub, slot, j, chunk, first, turned);
#endif
#if HAS_MIN && HAS_SUB
    load_scales<2 + HAS_MIN, STEPS, HALVES>(row.min, slot, j, chunk, first, turned);
#endif
#if HAS_ZEROS
    load_scales<1, SPANS, 1>(row.zero, slot, j, chunk, first * 32 / SUPER, turned / SPAN);
#endif
}

/* ---- products ---- */

/* The bits `mask` of each byte, moved from bit `from` to bit `to`. */
TP_DEVICE u32 tp_bits(u32 word, int from, int to, u32 mask) {
    return (from > to ? word >> (from - to) : word << (to - from)) & mask;
}

/* The word as it is; the compiler must not take it apart again. */
TP_DEVICE u32 keep(u32 word) {
#ifndef TP_HOST
    asm("" : "+r"(word));
#endif
    return word;
}

/* Low half of every byte from `low`, the other from `high`: one instruction, which the compiler would make two. */
TP_DEVICE u32 low_nibbles(u32 low, u32 high) {
#ifdef TP_HOST
    return (low & 0x0f0f0f0fu) | (high & 0xf0f0f0f0u);
#else
    u32 both;
    asm("lop3.b32 %0, %1, %2, %3, 0xca;" : "=r"(both) : "r"(0x0f0f0f0fu), "r"(low), "r"(high));
    return both;
#endif
}

/* The codes of a group, as bytes. Bits of a second plane are masked for quads q and q ^ 4 at once. To spare shifts some stay where they are: with 4 bits quads 4 to 7 are 16 times the
 * codes; with 2 and 3 bits quads 2, 3, 6 and 7 are 4 times the codes. p0 and p1: its lines in the two planes. */
TP_DEVICE void load_quads(u32 (&quad)[8], const u8 *p0, const u8 *p1, int halves_turned) {
#if BITS == 8
    const uint4 v = *(const uint4 *)(p0 + 16 * halves_turned), w = *(const uint4 *)(p0 + 16 * (1 - halves_turned));
    quad[0] = v.x, quad[1] = v.y, quad[2] = v.z, quad[3] = v.w;
    quad[4] = w.x, quad[5] = w.y, quad[6] = w.z, quad[7] = w.w;
#elif BITS >= 4
    const uint4 w = *(const uint4 *)p0;
    const u32 words[4] = { w.x, w.y, w.z, w.w };
#if BITS == 4
    TP_UNROLL for (int q = 0; q < 8; q++) quad[q] = words[q % 4] & (q < 4 ? 0x0f0f0f0fu : 0xf0f0f0f0u);
#endif
#if BITS == 6
    const uint2 high = *(const uint2 *)p1;
    const u32 pairs[4] = { keep(high.x & 0x33333333u), keep(high.y & 0x33333333u), keep(high.x & 0xccccccccu),
                           keep(high.y & 0xccccccccu) };
    TP_UNROLL for (int q = 0; q < 8; q++)
        quad[q] = low_nibbles(words[q % 4] >> q / 4 * 4, tp_bits(pairs[q % 4], q / 2 * 2, 4, ~0u));
#elif BITS == 5
    const u32 high = *(const u32 *)p1;
    const u32 pairs[4] = { keep(high & 0x11111111u), keep(high & 0x22222222u), keep(high & 0x44444444u),
                           keep(high & 0x88888888u) };
    TP_UNROLL for (int q = 0; q < 8; q++)
        quad[q] = low_nibbles(words[q % 4] >> q / 4 * 4, tp_bits(pairs[q % 4], q, 4, ~0u));
#endif
#else
    const uint2 w = *(const uint2 *)p0;
    TP_UNROLL for (int q = 0; q < 8; q++)
        quad[q] = tp_bits(q % 2 ? w.y : w.x, q / 4 * 4, 0, q / 2 % 2 ? 0x0c0c0c0cu : 0x03030303u);
#if BITS == 3
    const u32 high = *(const u32 *)p1;
    TP_UNROLL for (int q = 0; q < 8; q++) {
        const int to = q / 2 % 2 ? 4 : 2;
        quad[q] |= tp_bits(high, q, to, 0x01010101u << to);
    }
#endif
#endif
}

/* start + sums of codes times activations, of the whole group or of its halves. */
TP_DEVICE void dots(i32 (&sum)[HALVES], const u32 (&quad)[8], const u32 (&in)[8]) {
#if BITS == 4
    i32 high = 0;
    TP_UNROLL for (int q = 0; q < 4; q++) {
        sum[0] = tp_dp4a(quad[q], in[q], sum[0]);
        high = tp_dp4a_unsigned(quad[q + 4], in[q + 4], high);
    }
    sum[0] += high >> 4;
#elif BITS <= 3
    TP_UNROLL for (int h = 0; h < 2; h++) {
        i32 fourfold = 0;
        TP_UNROLL for (int q = 4 * h; q < 4 * h + 2; q++) {
            sum[h % HALVES] = tp_dp4a(quad[q], in[q], sum[h % HALVES]);
            fourfold = tp_dp4a(quad[q + 2], in[q + 2], fourfold);
        }
        sum[h % HALVES] += fourfold >> 2;
    }
#else
    TP_UNROLL for (int q = 0; q < 8; q++) sum[q * HALVES / 8] = tp_dp4a(quad[q], in[q], sum[q * HALVES / 8]);
#endif
}

/* sum over the group of sub * (code - zero) * activation, in units of its scale, as a float. */
TP_DEVICE float group_product(const u32 (&quad)[8], const u32 (&in)[8], const i32 *start, const RowScales &row, int i) {
    i32 sum[HALVES];
    TP_UNROLL for (int h = 0; h < HALVES; h++) sum[h] = start[h];
    dots(sum, quad, in);
    i32 whole = sum[0];
#if HAS_SUB && HALVES == 2
    if (!SUM_HALVES)
        return (float)(sum[0] * byte_of(row.sub, 2 * i)) + (float)(sum[1] * byte_of(row.sub, 2 * i + 1));
    whole = sum[0] * byte_of(row.sub, 2 * i) + (sum[1] * byte_of(row.sub, 2 * i + 1) + BASE);
#elif HAS_SUB
    whole = sum[0] * byte_of(row.sub, i) + BASE;
#endif
    return BY_MANTISSA ? __uint_as_float((u32)whole) - 12582912.0f : (float)whole;
}

/* A side of the lane's groups. */
TP_DEVICE void load_side(u32 (&side)[STEPS], const u8 *shared, int m, int which, int chunk, int lane) {
    const u32 *p = (const u32 *)(shared + SIDES_AT) + side_index(m, which, chunk, 0, lane);
#if STEPS == 4
    const uint4 v = *(const uint4 *)p;
    side[0] = v.x, side[1] = v.y, side[2] = v.z, side[3] = v.w;
#elif STEPS == 2
    const uint2 v = *(const uint2 *)p;
    side[0] = v.x, side[1] = v.y;
#else
    side[0] = *p;
#endif
}

/* What the integer sum of half h of the lane's group i begins with: -zero times the sum of activations. */
TP_DEVICE i32 load_start(const u8 *shared, int m, int h, int chunk, int i, int lane) {
    constexpr i32 base = HAS_SUB ? 0 : BASE;
    return STARTS ? base - ZERO * ((const i16 *)(shared + STARTS_AT))[start_index(m, h, chunk, i, lane)] : base;
}

TP_DEVICE void add_stage(float (&total)[VALUES], const u8 *shared, const u8 *slot, const x_type *, const float *, int chunk,
                         int lane) {
    const int turned = turn(lane), halves_turned = half_turn(lane);
    if (K % STAGE_K && (chunk * 32 + lane) * STEPS >= K / 32) return;
    u32 side[M][SIDES][STEPS];
    TP_UNROLL for (int m = 0; m < M; m++)
        TP_UNROLL for (int s = 0; s < SIDES; s++) load_side(side[m][s], shared, m, s, chunk, lane);
    RowScales row[ITEM_ROWS];
    TP_UNROLL for (int j = 0; j < ITEM_ROWS; j++) load_row_scales(row[j], slot, j, chunk, lane, turned);
    float part[VALUES];
    [[maybe_unused]] float min_part[VALUES];
#if HAS_MIN && HAS_SUB
    TP_UNROLL for (int m = 0; m < M; m++) {
        float all = 0.0f;
        TP_UNROLL for (int i = 0; i < SUMS * STEPS; i++) all += __uint_as_float(side[m][1 + i / STEPS][i % STEPS]);
        TP_UNROLL for (int j = 0; j < ITEM_ROWS; j++) min_part[m * ITEM_ROWS + j] = -2.0f * all;
    }
#endif
    TP_UNROLL for (int i = 0; i < STEPS; i++) {
        const int group = lane * STEPS + (i ^ turned);
        if (K / 32 % STEPS && chunk * 32 * STEPS + group >= K / 32) continue;
        i32 starts[M][HALVES];
        TP_UNROLL for (int m = 0; m < M; m++)
            TP_UNROLL for (int h = 0; h < HALVES; h++) starts[m][h] = load_start(shared, m, h, chunk, i, lane);
        u32 in[M][8];
        TP_UNROLL for (int c = 0; c < M * 2; c++) {
            const uint4 v = ((const uint4 *)(shared + X_AT))[piece_index(c / 2, chunk, c % 2, i, lane)];
            u32 *to = in[c / 2] + c % 2 * 4;
            to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
        }
        TP_UNROLL for (int j = 0; j < ITEM_ROWS; j++) {
            u32 quad[8];
            load_quads(quad, slot + j * ROW_PLANE0 + group * LINE0, slot + STAGE_PLANE1 + j * ROW_PLANE1 + group * LINE1,
                       halves_turned);
            TP_UNROLL for (int m = 0; m < M; m++) {
                const int v = m * ITEM_ROWS + j;
                const float product = group_product(quad, in[m], starts[m], row[j], i), scale = __uint_as_float(side[m][0][i]);
                part[v] = i % SPAN ? fmaf(scale, product, part[v]) : scale * product;
#if HAS_MIN && HAS_SUB
                TP_UNROLL for (int h = 0; h < HALVES; h++)
                    min_part[v] = fmaf(__uint_as_float(side[m][1 + h][i]), byte_float(row[j].min, HALVES * i + h), min_part[v]);
#elif HAS_MIN
                total[v] = fmaf(half_of(row[j].dmin, i), __uint_as_float(side[m][1][i]), total[v]);
#elif HAS_ZEROS
                part[v] = fmaf(-(float)byte_of(row[j].zero, i / SPAN), __uint_as_float(side[m][1][i]), part[v]);
#endif
                if (i % SPAN == SPAN - 1) total[v] = fmaf(half_of(row[j].d, i / SPAN), part[v], total[v]);
            }
        }
    }
#if HAS_MIN && HAS_SUB
    TP_UNROLL for (int v = 0; v < VALUES; v++) total[v] = fmaf(half_of(row[v % ITEM_ROWS].dmin, 0), min_part[v], total[v]);
#endif
}

#endif
