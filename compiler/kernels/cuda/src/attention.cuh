/* The parts of attention.cu at the ends of a block: the query and the current key on the way in, results put together
 * on the way out. */
#ifndef ATTENTION_CUH
#define ATTENTION_CUH
#include "rotate.cuh"
#include "warp_mma.cuh"

#define GROUP (HEADS / KV_HEADS)
#define COLUMNS ((GROUP + 7) / 8)
#define TILES (HEAD_DIM / 16)
#define HALF (HEAD_DIM / 2)
#define STEPS ((HALF + 63) / 64)
#define UNIT 16 /* keys */
#define PIECES (HEAD_DIM / 8) /* of 16 bytes, of a key or a value */
#define LANES (PIECES > 16 ? 32 : PIECES > 8 ? 16 : PIECES > 4 ? 8 : PIECES > 2 ? 4 : 2) /* that copy a row */
#define ROWS_AT_ONCE (32 / LANES)
#define ROW_BYTES ((PIECES + 7) / 8 * 128) /* of one in shared memory */
#define SLOT_BYTES (UNIT * ROW_BYTES)
#define OUT_BYTES (GROUP * OUT_STRIDE * 4) /* of a warp's result */
#define RING_BYTES (DEPTH * SLOT_BYTES > OUT_BYTES ? DEPTH * SLOT_BYTES : OUT_BYTES)
#define HEAD_ELEMENTS (PAGE_TOKENS * HEAD_DIM) /* a page's keys, or values, of a head */
#define PAGE ((i64)2 * KV_HEADS * HEAD_ELEMENTS)
#define THREADS (WARPS * 32)
#define QUADS (GROUP * HEAD_DIM / 4) /* float4s of a result */
#define OUT_STRIDE (HEAD_DIM + 4)    /* floats; neighbouring heads lie in other banks */
#define Q_STRIDE ((HEAD_DIM + 31) / 32 * 32 + 8) /* halves; likewise */
#define QUERY_BYTES (COLUMNS * 8 * Q_STRIDE * 2)
#define LOG2E 1.4426950408889634f
#define INFINITE __uint_as_float(0x7f800000u)

static_assert(PAGE_TOKENS % 16 == 0 && HEAD_DIM % 16 == 0 && GROUP <= 16, "tiles of 16");
static_assert((COLLECTORS & (COLLECTORS - 1)) == 0 && COLLECTORS <= 32 && COLLECTORS <= SPLITS, "lanes of a warp");

/* Of this thread; known not to be negative. */
TP_DEVICE int lane_of() { return (int)(threadIdx.x % 32); }
TP_DEVICE int warp_of() { return (int)(threadIdx.x / 32); }

/* Shared memory, as much as attention.py says. */
struct Shared {
    u8 *rings;     /* [WARPS][RING_BYTES]: slots; in the end each warp's result [GROUP][OUT_STRIDE] */
    u8 *query;     /* halves [COLUMNS * 8][Q_STRIDE], zeros beyond GROUP and HEAD_DIM */
    float2 *turns; /* [HALF]: sine and cosine of a pair's rotation */
    float *norms;  /* [2][HEAD_DIM]: weights for queries and keys */
    float2 *stat;  /* [WARPS][GROUP]: maximum (base 2), sum */

    static TP_DEVICE_MEMBER Shared at(u8 *memory) {
        Shared s;
        s.rings = memory, memory += WARPS * RING_BYTES;
        s.query = memory, memory += QUERY_BYTES;
        s.turns = (float2 *)memory, memory += HALF * 8;
        s.norms = (float *)memory, memory += QK_NORM ? HEAD_DIM * 8 : 0;
        s.stat = (float2 *)memory;
        return s;
    }
    TP_DEVICE_MEMBER u8 *ring(int warp) const { return rings + warp * RING_BYTES; }
    TP_DEVICE_MEMBER float *out(int warp) const { return (float *)ring(warp); }
};

/* Byte of a piece in a row of a slot: pieces are turned so that 8 lanes, one a row or a piece, meet no bank twice. */
TP_DEVICE int place(int row, int piece) { return row * ROW_BYTES + (piece ^ row % 8) * 16; }

/* Four 8x8 matrices of halves: lane i says where row i % 8 of matrix i / 8 lies; lane 4g+t gets row g at columns 2t and
 * 2t+1 of each, or TRANSPOSED column g at rows 2t and 2t+1. */
template <bool TRANSPOSED> TP_DEVICE void load_matrices(u32 (&out)[4], const u8 *row) {
#ifdef TP_HOST
    const int lane = lane_of(), g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; i++) {
        u32 pair = 0;
        for (int j = 0; j < 2; j++) {
            const u16 *from = (const u16 *)__shfl_sync(TP_ALL, (u64)row, i * 8 + (TRANSPOSED ? 2 * t + j : g));
            pair |= (u32)from[TRANSPOSED ? g : 2 * t + j] << (16 * j);
        }
        out[i] = pair;
    }
#else
    const u32 from = (u32)__cvta_generic_to_shared(row);
    if constexpr (TRANSPOSED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3]) : "r"(from) : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3]) : "r"(from) : "memory");
#endif
}

/* 16 bytes to shared memory, or zeros instead, which read nothing and arrive no sooner; or neither. */
enum Copy { SKIP, CLEAR, COPY };
TP_DEVICE void copy16(void *shared, const void *global, Copy what) {
#ifdef TP_HOST
    static const u32 zeros[4] = {0, 0, 0, 0};
    if (what != SKIP) tp_host_copy_async(shared, what == COPY ? global : zeros, 16);
#else
    asm volatile("{\n .reg .pred p;\n setp.ne.u32 p, %3, 0;\n"
                 " @p cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n}"
                 :: "r"((u32)__cvta_generic_to_shared(shared)), "l"(global), "r"(what == COPY ? 16 : 0),
                    "r"((u32)(what != SKIP)) : "memory");
#endif
}

/* What heads are turned by, to shared memory. */
TP_DEVICE void prepare(const Shared &shared, int position, const float *inv_freq, const float *q_norm,
                       const float *k_norm) {
    const int thread = (int)threadIdx.x;
    for (int i = thread; i < QUERY_BYTES / 16; i += THREADS) ((uint4 *)shared.query)[i] = make_uint4(0, 0, 0, 0);
    for (int i = thread; i < HALF; i += THREADS)
        shared.turns[i] = ROPE ? turn_of(position, inv_freq[i]) : make_float2(0, 1);
    if (!QK_NORM) return;
    for (int i = thread; i < HEAD_DIM; i += THREADS)
        shared.norms[i] = __ldg(q_norm + i), shared.norms[HEAD_DIM + i] = __ldg(k_norm + i);
}

/* A lane's part of a head of qkv: its lower and its upper half. */
struct Head {
    float2 low[STEPS], high[STEPS];

    TP_DEVICE_MEMBER void read(const float *from) {
        TP_UNROLL for (int i = 0; i < STEPS; i++) {
            const int at = i * 64 + lane_of() * 2;
            low[i] = high[i] = make_float2(0, 0);
            if (at < HALF) low[i] = read2(from + at), high[i] = read2(from + HALF + at);
        }
    }

    TP_DEVICE_MEMBER void normalise(const float *weight) {
        float sum = 0;
        TP_UNROLL for (int i = 0; i < STEPS; i++)
            sum += low[i].x * low[i].x + low[i].y * low[i].y + high[i].x * high[i].x + high[i].y * high[i].y;
        const float inverse = 1.0f / sqrtf(tp_warp_sum(sum) / (float)HEAD_DIM + EPS);
        TP_UNROLL for (int i = 0; i < STEPS; i++) {
            const int at = i * 64 + lane_of() * 2;
            if (at >= HALF) continue;
            const float2 a = *(const float2 *)(weight + at), b = *(const float2 *)(weight + HALF + at);
            low[i].x *= inverse * a.x, low[i].y *= inverse * a.y;
            high[i].x *= inverse * b.x, high[i].y *= inverse * b.y;
        }
    }

    /* To halves at `row`, whose pieces are turned by so much, and where given to `copy`. */
    TP_DEVICE_MEMBER void write(const float2 *turns, u8 *row, int by, u16 *copy) const {
        TP_UNROLL for (int i = 0; i < STEPS; i++) {
            const int at = i * 64 + lane_of() * 2, piece = at / 8;
            if (at >= HALF) continue;
            const float4 t = turns ? *(const float4 *)(turns + at) : make_float4(0, 1, 0, 1);
            const u32 a = tp_pack(low[i].x * t.y - high[i].x * t.x, low[i].y * t.w - high[i].y * t.z);
            const u32 b = tp_pack(high[i].x * t.y + low[i].x * t.x, high[i].y * t.w + low[i].y * t.z);
            *(u32 *)(row + (piece ^ by) * 16 + at % 8 * 2) = a;
            *(u32 *)(row + ((piece + HALF / 8) ^ by) * 16 + at % 8 * 2) = b;
            if (copy) *(u32 *)(copy + at) = a, *(u32 *)(copy + HALF + at) = b;
        }
    }
};

/* Heads of qkv, dealt out over the warps: the queries, and in the first block the current key and value, which go to
 * the first two slots of the first ring and to the pool (`own`). All are on their way before the first is needed. */
TP_DEVICE void enter(const Shared &shared, const float *line, int head, int position, bool first, u16 *own) {
    const int warp = warp_of(), heads = first ? GROUP + 2 : GROUP;
    Head found[(GROUP + 1) / WARPS + 1];
    TP_UNROLL for (int k = 0; k <= (GROUP + 1) / WARPS; k++) {
        const int i = warp + k * WARPS, part = i < GROUP ? Q_COL : i == GROUP ? K_COL : V_COL;
        if (i < heads) found[k].read(line + part + (i < GROUP ? head * GROUP + i : head) * HEAD_DIM);
    }
    TP_UNROLL for (int k = 0; k <= (GROUP + 1) / WARPS; k++) {
        const int i = warp + k * WARPS, row = position % UNIT;
        if (i >= heads) continue;
        if (QK_NORM && i <= GROUP) found[k].normalise(shared.norms + (i < GROUP ? 0 : HEAD_DIM));
        const bool query = i < GROUP;
        u8 *slot = shared.ring(0) + (i - GROUP) * SLOT_BYTES + row * ROW_BYTES;
        u16 *copy = own + (i - GROUP) * (KV_HEADS * HEAD_ELEMENTS);
        found[k].write(i <= GROUP ? shared.turns : nullptr, query ? shared.query + i * (Q_STRIDE * 2) : slot,
                       query ? 0 : row % 8, query ? nullptr : copy);
    }
}

/* Sums of exponentials with the same reference. */
struct Sum {
    float top, total;
    float4 out;

    TP_DEVICE_MEMBER float weight(float other) const { return other == -INFINITE ? 0.0f : tp_exp2(other - top); }
    TP_DEVICE_MEMBER void add(float2 stat, const float4 &x) {
        const float w = weight(stat.x);
        total = fmaf(stat.y, w, total);
        out.x = fmaf(x.x, w, out.x), out.y = fmaf(x.y, w, out.y);
        out.z = fmaf(x.z, w, out.z), out.w = fmaf(x.w, w, out.w);
    }
};

/* A block's sum for four dimensions of a head on its way to another block, through memory that is zero between
 * launches. Each word says by itself whether it is there: it is the complement of a float's bits, of which a zero would
 * be one NaN, for which another stands. So neither side needs a fence. */
struct Part {
    uint4 out;
    uint2 stat; /* maximum, sum */

    static TP_DEVICE_MEMBER u32 word(float x) { return max(~__float_as_uint(x), 1u); }
    static TP_DEVICE_MEMBER float value(u32 word) { return __uint_as_float(~word); }
    static TP_DEVICE_MEMBER Part of(const Sum &sum) {
        const float4 &x = sum.out;
        return {make_uint4(word(x.x), word(x.y), word(x.z), word(x.w)), make_uint2(word(sum.top), word(sum.total))};
    }
    static TP_DEVICE_MEMBER Part none() { return {make_uint4(0, 0, 0, 0), make_uint2(0, 0)}; }
    TP_DEVICE_MEMBER bool there() const {
        return min(min(min(out.x, out.y), min(out.z, out.w)), min(stat.x, stat.y)) != 0;
    }
    TP_DEVICE_MEMBER float2 stats() const { return make_float2(value(stat.x), value(stat.y)); }
    TP_DEVICE_MEMBER float4 values() const {
        return make_float4(value(out.x), value(out.y), value(out.z), value(out.w));
    }
#ifdef TP_HOST
    TP_DEVICE_MEMBER void store(u8 *to) const { *(uint4 *)to = out, *(uint2 *)(to + 16) = stat; }
    TP_DEVICE_MEMBER void load(const u8 *from) { out = *(const uint4 *)from, stat = *(const uint2 *)(from + 16); }
#else
    TP_DEVICE_MEMBER void store(u8 *to) const {
        asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};\n"
                     " st.relaxed.gpu.global.v2.u32 [%0 + 16], {%5, %6};"
                     :: "l"(to), "r"(out.x), "r"(out.y), "r"(out.z), "r"(out.w), "r"(stat.x), "r"(stat.y) : "memory");
    }
    TP_DEVICE_MEMBER void load(const u8 *from) {
        asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%6];\n"
                     " ld.relaxed.gpu.global.v2.u32 {%4, %5}, [%6 + 16];"
                     : "=&r"(out.x), "=&r"(out.y), "=&r"(out.z), "=&r"(out.w), "=&r"(stat.x), "=&r"(stat.y)
                     : "l"(from) : "memory");
    }
#endif
};
#define PART_BYTES 32

/* How the blocks of a row's key head put their sums together: the first few, a power of two, collect. Each takes a
 * slice of the quads, with as many lanes a quad as there are collectors; lane i takes the parts of blocks i, i + lanes,
 * ... */
struct Team {
    int blocks, block, shift, slice; /* shift: log2 of the collectors; slice: quads of a collector */

    static TP_DEVICE_MEMBER Team of(int blocks, int block) {
        const int shift = 31 - __clz(min(blocks, COLLECTORS));
        return {blocks, block, shift, (QUADS + (1 << shift) - 1) >> shift};
    }
};
#define ROUNDS ((QUADS + COLLECTORS - 1 + THREADS - 1) / THREADS) /* of the threads, for a collector's slice */
#define SHARES (SPLITS <= 2 * COLLECTORS ? 2 : (SPLITS + COLLECTORS - 1) / COLLECTORS) /* parts of a lane */

/* Where results go. */
struct Target {
    tp_out<OUT>::type *out; /* of the row's key head */
    u8 *parts;              /* [SPLITS][QUADS][PART_BYTES] of the row's key head */

    TP_DEVICE_MEMBER u8 *part(int block, int quad) const { return parts + (block * QUADS + quad) * PART_BYTES; }
    TP_DEVICE_MEMBER void write(int quad, const Sum &sum) const {
        const float scale = 1.0f / sum.total;
        tp_values<4> y = {{sum.out.x * scale, sum.out.y * scale, sum.out.z * scale, sum.out.w * scale}};
        tp_write<OUT, 4>(out + quad * 4, y);
    }
};

/* The sum of this block's warps for four dimensions of a head. */
TP_DEVICE Sum sum_warps(const Shared &shared, int quad) {
    const int head = quad / (HEAD_DIM / 4), at = quad % (HEAD_DIM / 4) * 4;
    Sum sum = {-INFINITE, 0, {0, 0, 0, 0}};
    float2 stat[WARPS];
    TP_UNROLL for (int w = 0; w < WARPS; w++) {
        stat[w] = shared.stat[w * GROUP + head];
        sum.top = fmaxf(sum.top, stat[w].x);
    }
    TP_UNROLL for (int w = 0; w < WARPS; w++)
        sum.add(stat[w], *(const float4 *)(shared.out(w) + head * OUT_STRIDE + at));
    return sum;
}

/* The parts of all lanes of a group: lane by lane, in pairs of growing distance. */
TP_DEVICE Sum sum_lanes(const Part (&parts)[SHARES], int lanes) {
    float top = -INFINITE;
    TP_UNROLL for (int i = 0; i < SHARES; i++) top = fmaxf(top, parts[i].stats().x);
    for (int by = 1; by < lanes; by *= 2) top = fmaxf(top, __shfl_xor_sync(TP_ALL, top, by));
    Sum sum = {top, 0, {0, 0, 0, 0}};
    TP_UNROLL for (int i = 0; i < SHARES; i++) sum.add(parts[i].stats(), parts[i].values());
    for (int by = 1; by < lanes; by *= 2) {
        sum.total += __shfl_xor_sync(TP_ALL, sum.total, by);
        sum.out.x += __shfl_xor_sync(TP_ALL, sum.out.x, by), sum.out.y += __shfl_xor_sync(TP_ALL, sum.out.y, by);
        sum.out.z += __shfl_xor_sync(TP_ALL, sum.out.z, by), sum.out.w += __shfl_xor_sync(TP_ALL, sum.out.w, by);
    }
    return sum;
}

/* Whether this thread takes a part in a round, and which. */
struct Share {
    int quad, from;
    bool wanted;

    static TP_DEVICE_MEMBER Share of(const Team &team, int round, int i) {
        const int lanes = 1 << team.shift, first = team.block * team.slice;
        Share s;
        s.quad = first + (((int)threadIdx.x + round * THREADS) >> team.shift);
        s.from = (int)(threadIdx.x & (u32)(lanes - 1)) + i * lanes;
        s.wanted = s.quad < min(first + team.slice, QUADS) && s.from < team.blocks;
        return s;
    }
};

/* A collector's slice of the output, from all blocks' parts, which it takes out of memory: zeros stay.
 * It waits for blocks that wait for nothing but the kernels before, or collect as well. Collectors are at most half
 * of the multiprocessors (attention.py), and each multiprocessor holds a block, so the others always find room. */
TP_DEVICE void collect(const Target &target, const Team &team) {
    Part parts[ROUNDS][SHARES];
    TP_UNROLL for (int r = 0; r < ROUNDS; r++)
        TP_UNROLL for (int i = 0; i < SHARES; i++)
            parts[r][i] = Share::of(team, r, i).wanted ? Part::none() : Part::of({-INFINITE, 0, {0, 0, 0, 0}});
    for (bool missing = true; missing;) {
        missing = false;
        TP_UNROLL for (int r = 0; r < ROUNDS; r++)
            TP_UNROLL for (int i = 0; i < SHARES; i++) {
                const Share share = Share::of(team, r, i);
                if (!parts[r][i].there()) parts[r][i].load(target.part(share.from, share.quad));
            }
        TP_UNROLL for (int r = 0; r < ROUNDS; r++)
            TP_UNROLL for (int i = 0; i < SHARES; i++) missing |= !parts[r][i].there();
#ifdef TP_HOST
        if (missing) tp_host_poll();
#endif
    }
    TP_UNROLL for (int r = 0; r < ROUNDS; r++) {
        const Sum sum = sum_lanes(parts[r], 1 << team.shift);
        TP_UNROLL for (int i = 0; i < SHARES; i++) {
            const Share share = Share::of(team, r, i);
            if (share.wanted) Part::none().store(target.part(share.from, share.quad));
            if (i == 0 && share.wanted && share.from == 0) target.write(share.quad, sum);
        }
    }
}

/* From the warps' results in shared memory to the output, or to the blocks that collect. */
TP_DEVICE void finish(const Shared &shared, const Target &target, const Team &team) {
    for (int quad = (int)threadIdx.x; quad < QUADS; quad += THREADS) {
        const Sum sum = sum_warps(shared, quad);
        if (team.blocks == 1) target.write(quad, sum);
        else Part::of(sum).store(target.part(team.block, quad));
    }
    if (SPLITS > 1 && team.blocks > 1 && team.block < 1 << team.shift) collect(target, team);
}

#endif
