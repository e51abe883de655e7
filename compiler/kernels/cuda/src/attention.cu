/* attention_decode: one query row a sequence over its pages; normalises and rotates query and key on the way and writes
 * the row's key and value to their page.
 *
 * One block a multiprocessor or more. Block b serves key head b % KV_HEADS of row b / KV_HEADS % ROWS; SPLITS blocks
 * serve the same, and what is beyond them only holds its place. The keys up to the current one come in units of UNIT,
 * dealt out over the blocks in use and their warps, the current one's to the first; how many blocks are in use follows
 * from the live length (blocks_in_use). Every warp has a ring in shared memory, which is full of keys and values before
 * the wait: only the row's own are new in a step, and the first block takes them from qkv. So that row is all that is
 * read after the wait where the rings hold all keys. Products: scores = K q^T with keys as rows, out^T = V^T p with
 * dimensions as rows, so that up to 8 heads are one column tile. Warps, then blocks (through `partial`) are put
 * together, always in the same order.
 *
 * Defines: HEADS, KV_HEADS, HEAD_DIM, LDX (of qkv), Q_COL, K_COL, V_COL, PAGE_TOKENS, MAX_PAGES, ROPE, FACTOR, EPS,
 * QK_NORM, SCALE, WINDOW, OUT, ROWS, SPLITS, COLLECTORS (blocks that put together), WARPS, DEPTH (slots of a ring),
 * NEAR and FAR (see blocks_in_use). */
#include "attention.cuh"

/* One lane's running maxima (base 2), sums and output of two heads a column tile. */
struct Running {
    float top[COLUMNS][2], total[COLUMNS][2], out[COLUMNS][TILES][4];
};

struct Range {
    int first, last; /* keys; the last is the current one */
    TP_DEVICE_MEMBER bool holds(int key) const { return key <= last && (WINDOW == 0 || key >= first); }
};

/* A warp's way from the pool to its ring in shared memory: the keys of a unit fill one slot, its values the next. Later
 * units come first. */
struct Reader {
    const u16 *pool;  /* of the key head */
    const i32 *table; /* of the sequence */
    Range range;
    u8 *ring;
    int key, step;    /* first key of the unit to copy next, keys from one unit of the warp to the next */
    int count;        /* units copied */
    int pages, next;  /* lane i: where unit i of the 32 that `count` is among, and of the 32 behind them, lies */
    int slot;         /* the oldest: next to read, then to copy to */
    bool values;      /* whether the unit's keys were copied already */

    /* Whether a unit from this key on has keys in range. */
    TP_DEVICE_MEMBER bool exists(int from) const { return from > (WINDOW ? range.first - UNIT : -1); }

    /* The page of this lane's unit of the 32 from the unit of a key on. */
    TP_DEVICE_MEMBER int find(int from) const {
        const int at = from - lane_of() * step;
        return exists(at) ? table[at / PAGE_TOKENS] : 0;
    }

    /* Starts one group of copies, which is empty beyond the last unit. The current key and value come otherwise. A lane
     * copies the same piece of every ROWS_AT_ONCE-th row. */
    TP_DEVICE_MEMBER void copy() {
        const int lane = lane_of(), first = lane / LANES, page = __shfl_sync(TP_ALL, pages, count % 32);
        const int part = (values ? KV_HEADS * HEAD_ELEMENTS : 0) + (key % PAGE_TOKENS + first) * HEAD_DIM;
        if (exists(key))
            TP_UNROLL for (int piece = lane % LANES; piece < PIECES; piece += LANES) {
                const u16 *from = pool + (i64)page * PAGE + (part + piece * 8);
                const int to = slot * SLOT_BYTES + place(first, piece), left = range.last - key - first;
                TP_UNROLL for (int row = 0; row < UNIT; row += ROWS_AT_ONCE) {
                    const bool old = row < left && (WINDOW == 0 || key + first + row >= range.first);
                    u8 *there = ring + (to ^ row % 8 * 16) + row * ROW_BYTES;
                    copy16(there, from + row * HEAD_DIM, row == left ? SKIP : old ? COPY : CLEAR);
                }
            }
        tp_copy_commit();
        slot = slot == DEPTH - 1 ? 0 : slot + 1;
        values = !values;
        if (values) return;
        key -= step;
        if (++count % 32 == 0) pages = next, next = find(key - 32 * step);
    }

    TP_DEVICE_MEMBER const u8 *take() const {
        tp_copy_wait<DEPTH - 1>();
        __syncwarp();
        return ring + slot * SLOT_BYTES;
    }

    TP_DEVICE_MEMBER void give() {
        __syncwarp();
        copy();
    }
};

/* Scores of a unit: [0], [1] of key g, [2], [3] of key g+8, for heads 2t and 2t+1 of each column tile. */
TP_DEVICE void score(float (&s)[COLUMNS][4], const u8 *keys, const u8 *query) {
    const int lane = lane_of();
    TP_UNROLL for (int c = 0; c < COLUMNS; c++) s[c][0] = s[c][1] = s[c][2] = s[c][3] = 0;
    TP_UNROLL for (int m = 0; m < TILES; m += 2) {
        u32 k[2][4], q[4];
        TP_UNROLL for (int i = 0; i < 2 && m + i < TILES; i++)
            load_matrices<false>(k[i], keys + place(lane % 16, (m + i) * 2 + lane / 16));
        TP_UNROLL for (int c = 0; c < COLUMNS; c++) {
            load_matrices<false>(q, query + (c * 8 + lane % 8) * (Q_STRIDE * 2) + (m * 2 + lane / 8) * 16);
            TP_UNROLL for (int i = 0; i < 2 && m + i < TILES; i++)
                tp_mma(s[c], k[i][0], k[i][1], k[i][2], k[i][3], q[2 * i], q[2 * i + 1]);
        }
    }
}

/* Scores to weights p (f16, as fragments with keys along k); maxima and sums move on, the output so far shrinks. */
TP_DEVICE void weigh(u32 (&p)[COLUMNS][2], Running &now, float (&s)[COLUMNS][4], int start, Range range) {
    const int g = lane_of() / 4;
    TP_UNROLL for (int c = 0; c < COLUMNS; c++) {
        TP_UNROLL for (int h = 0; h < 2; h++) {
            float most = now.top[c][h];
            TP_UNROLL for (int k = 0; k < 2; k++) {
                float &x = s[c][2 * k + h];
                x = range.holds(start + 8 * k + g) ? x * (SCALE * LOG2E) : -INFINITE;
                most = fmaxf(most, x);
            }
            TP_UNROLL for (int lane = 4; lane < 32; lane *= 2) most = fmaxf(most, __shfl_xor_sync(TP_ALL, most, lane));
            const float decay = tp_exp2(now.top[c][h] - most);
            float sum = now.total[c][h] * decay;
            TP_UNROLL for (int k = 0; k < 2; k++) {
                float &x = s[c][2 * k + h];
                x = tp_exp2(x - most);
                sum += x;
            }
            now.top[c][h] = most, now.total[c][h] = sum;
            TP_UNROLL for (int m = 0; m < TILES; m++) now.out[c][m][h] *= decay, now.out[c][m][2 + h] *= decay;
        }
        TP_UNROLL for (int k = 0; k < 2; k++) p[c][k] = tp_transpose(tp_pack(s[c][2 * k], s[c][2 * k + 1]));
    }
}

/* out[m]: rows g and g+8 are dimensions 16 m + g and 8 further. */
TP_DEVICE void add_values(Running &now, const u8 *values, const u32 (&p)[COLUMNS][2]) {
    const int lane = lane_of();
    TP_UNROLL for (int m = 0; m < TILES; m++) {
        u32 v[4];
        load_matrices<true>(v, values + place(lane % 8 + lane / 16 * 8, m * 2 + lane / 8 % 2));
        TP_UNROLL for (int c = 0; c < COLUMNS; c++) tp_mma(now.out[c][m], v[0], v[1], v[2], v[3], p[c][0], p[c][1]);
    }
}

/* A warp's result to shared memory. */
TP_DEVICE void leave(const Shared &shared, Running &now) {
    const int warp = warp_of(), lane = lane_of(), g = lane / 4, t = lane % 4;
    TP_UNROLL for (int c = 0; c < COLUMNS; c++)
        TP_UNROLL for (int h = 0; h < 2; h++) {
            const int head = c * 8 + 2 * t + h;
            float sum = now.total[c][h];
            TP_UNROLL for (int other = 4; other < 32; other *= 2) sum += __shfl_xor_sync(TP_ALL, sum, other);
            if (head >= GROUP) continue;
            if (g == 0) shared.stat[warp * GROUP + head] = make_float2(now.top[c][h], sum);
            float *out = shared.out(warp) + head * OUT_STRIDE + g;
            TP_UNROLL for (int m = 0; m < TILES; m++)
                out[m * 16] = now.out[c][m][h], out[m * 16 + 8] = now.out[c][m][2 + h];
        }
}

/* Blocks that share a row's key head: one while no warp has more than NEAR units, then enough for FAR units a warp. */
TP_DEVICE int blocks_in_use(int units) {
    if (units <= WARPS * NEAR) return 1;
    return min(SPLITS, (units + WARPS * FAR - 1) / (WARPS * FAR));
}

extern "C" __global__ void TP_BOUNDS(THREADS, 2)
    TP_KERNEL(const float *qkv, const i32 *positions, const i32 *row_segment, const i32 *page_table,
              const float *inv_freq, const float *q_norm, const float *k_norm, u16 *kv, tp_out<OUT>::type *out,
              u8 *partial, const i32 *counts) {
    TP_SHARED(memory);
    const Shared shared = Shared::at(memory);
    const int pair = (int)blockIdx.x % (KV_HEADS * ROWS), block = SPLITS - 1 - (int)blockIdx.x / (KV_HEADS * ROWS);
    const int warp = warp_of(), head = pair % KV_HEADS, row = pair / KV_HEADS;
    TP_STAMP(TP_START);
    tp_launch_dependents();
    const int rows = counts[0], position = positions[row], segment = row_segment[row];
    const Range range = {WINDOW ? max(position - WINDOW + 1, 0) : 0, position};
    const int base = range.first / UNIT * UNIT, units = position / UNIT - base / UNIT + 1;
    const int blocks = blocks_in_use(units), step = blocks * UNIT;
    if (block < 0 || block >= blocks || row >= rows) {
        tp_wait();
        return;
    }
    const i32 *table = page_table + (i64)segment * MAX_PAGES;
    u16 *pool = kv + head * HEAD_ELEMENTS;
    int start = position / UNIT * UNIT - block * UNIT - warp * step;
    Reader reader = {pool, table, range, shared.ring(warp), start, step * WARPS, 0, 0, 0, 0, false};
    reader.pages = reader.find(start), reader.next = reader.find(start - 32 * reader.step);
    TP_UNROLL for (int i = 0; i < DEPTH; i++) reader.copy();
    u16 *own = pool + (i64)table[position / PAGE_TOKENS] * PAGE + position % PAGE_TOKENS * HEAD_DIM;
    prepare(shared, position, inv_freq, q_norm, k_norm);
    __syncthreads();
    TP_STAMP(TP_READY);
    tp_wait();
    TP_STAMP(TP_WAITED);

    enter(shared, qkv + (i64)row * LDX, head, position, block == 0, own);
    __syncthreads();
    TP_STAMP(TP_STAGED);
    Running now;
    TP_UNROLL for (int c = 0; c < COLUMNS; c++) {
        now.top[c][0] = now.top[c][1] = -INFINITE, now.total[c][0] = now.total[c][1] = 0;
        TP_UNROLL for (int m = 0; m < TILES; m++)
            now.out[c][m][0] = now.out[c][m][1] = now.out[c][m][2] = now.out[c][m][3] = 0;
    }
    _Pragma("unroll 1") for (; reader.exists(start); start -= reader.step) {
        float s[COLUMNS][4];
        u32 p[COLUMNS][2];
        score(s, reader.take(), shared.query);
        reader.give();
        weigh(p, now, s, start, range);
        add_values(now, reader.take(), p);
        reader.give();
    }
    tp_copy_wait<0>();
    __syncwarp(); /* the ring holds the result from here on */
    leave(shared, now);
    __syncthreads();
    const Team team = Team::of(blocks, block);
    finish(shared, {out + (i64)pair * (GROUP * HEAD_DIM), partial + (i64)pair * (SPLITS * QUADS * PART_BYTES)}, team);
    TP_STAMP_WARPS(TP_ENDS);
}
