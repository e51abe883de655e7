/* attention_decode: one query row a sequence over its pages; normalises and rotates query and key on the way and writes
 * the row's key and value to their page.
 *
 * Grid (SPLITS, KV_HEADS, rows), clusters of CLUSTER blocks along x. The keys before the current one come in units of
 * UNIT, dealt out over the blocks in use and their warps; how many blocks are in use follows from the live length
 * (plan). A warp reads keys and values from the pool straight into the fragments of its products: scores = K q^T with
 * keys as rows, out^T = V^T p with dimensions as rows, so that up to 8 heads are one column tile. The dimensions of a
 * fragment are permuted so that a lane's 16 bytes lie together, the same way on both sides. The first unit is on its
 * way before the wait: only the row's own key and value are new in a step, and they come from qkv.
 * Warps, then blocks of a cluster (through shared memory of the cluster), then clusters (through `partial`; the last to
 * arrive) are put together, always in the same order.
 *
 * Defines: HEADS, KV_HEADS, HEAD_DIM, LDX (of qkv), Q_COL, K_COL, V_COL, PAGE_TOKENS, MAX_PAGES, ROPE, FACTOR, EPS,
 * QK_NORM, SCALE, WINDOW, OUT, SPLITS, CLUSTER, WARPS, TILES (of 16 keys a unit), NEAR and FAR (see plan), MIN_BLOCKS. */
#include "attention.cuh"

/* Keys and values of a unit, as fragments. */
struct Unit {
    uint4 k[TILES][K_PIECES][2];
    uint4 v[TILES][V_PIECES][4];
};

/* One lane's running maxima (base 2), sums and output of two heads a column tile. */
struct Running {
    float top[COLUMNS][2], total[COLUMNS][2], out[COLUMNS][V_PIECES * 4][4];
};

struct Range {
    int first, end; /* keys */
    TP_DEVICE_MEMBER bool holds(int key) const { return key < end && (WINDOW == 0 || key >= first); }
};

TP_DEVICE void load_pages(i32 (&pages)[TILES], const i32 *table, int start, Range range) {
    TP_UNROLL for (int i = 0; i < TILES; i++) {
        const int key = start + 16 * i;
        pages[i] = key < range.end ? table[key / PAGE_TOKENS] : 0;
    }
}

TP_DEVICE void load_keys(Unit &unit, const u16 *pool, const i32 (&pages)[TILES], int start, Range range) {
    const int lane = (int)threadIdx.x % 32, g = lane / 4, t = lane % 4;
    TP_UNROLL for (int i = 0; i < TILES; i++) {
        const int key = start + 16 * i + g;
        const u16 *row = pool + (i64)pages[i] * PAGE + (key % PAGE_TOKENS) * HEAD_DIM + t * 8;
        TP_UNROLL for (int j = 0; j < K_PIECES; j++)
            TP_UNROLL for (int h = 0; h < 2; h++)
                unit.k[i][j][h] = tp_stream16(row + h * 8 * HEAD_DIM + j * 32,
                                              range.holds(key + 8 * h) && (HEAD_DIM % 32 == 0 || j * 32 + t * 8 < HEAD_DIM));
    }
}

TP_DEVICE void load_values(Unit &unit, const u16 *pool, const i32 (&pages)[TILES], int start, Range range) {
    const int lane = (int)threadIdx.x % 32, g = lane / 4, t = lane % 4;
    TP_UNROLL for (int i = 0; i < TILES; i++) {
        const int key = start + 16 * i + 2 * t;
        const u16 *row = pool + (i64)pages[i] * PAGE + (KV_HEADS * PAGE_TOKENS + key % PAGE_TOKENS) * HEAD_DIM + g * 8;
        TP_UNROLL for (int j = 0; j < V_PIECES; j++)
            TP_UNROLL for (int h = 0; h < 4; h++) {
                const int ahead = h % 2 + h / 2 * 8;
                unit.v[i][j][h] = tp_stream16(row + ahead * HEAD_DIM + j * 64, range.holds(key + ahead) &&
                                              (HEAD_DIM % 64 == 0 || j * 64 + g * 8 < HEAD_DIM));
            }
    }
}

/* Scores of a unit: [0], [1] of key g, [2], [3] of key g+8, for heads 2t and 2t+1 of each column tile. */
TP_DEVICE void score(float (&s)[TILES][COLUMNS][4], const Unit &unit, const u16 *query) {
    const int lane = (int)threadIdx.x % 32, g = lane / 4, t = lane % 4;
    TP_UNROLL for (int i = 0; i < TILES; i++)
        TP_UNROLL for (int c = 0; c < COLUMNS; c++) s[i][c][0] = s[i][c][1] = s[i][c][2] = s[i][c][3] = 0;
    TP_UNROLL for (int j = 0; j < K_PIECES; j++)
        TP_UNROLL for (int c = 0; c < COLUMNS; c++) {
            const uint4 q = *(const uint4 *)(query + (c * 8 + g) * Q_STRIDE + j * 32 + t * 8);
            TP_UNROLL for (int i = 0; i < TILES; i++) {
                const uint4 a = unit.k[i][j][0], b = unit.k[i][j][1];
                tp_mma(s[i][c], a.x, b.x, a.y, b.y, q.x, q.y);
                tp_mma(s[i][c], a.z, b.z, a.w, b.w, q.z, q.w);
            }
        }
}

/* Scores to weights p (f16, as fragments with keys along k); maxima and sums move on, the output so far shrinks. */
TP_DEVICE void weigh(u32 (&p)[TILES][COLUMNS][2], Running &now, float (&s)[TILES][COLUMNS][4], int start, Range range) {
    const int g = (int)threadIdx.x % 32 / 4;
    TP_UNROLL for (int c = 0; c < COLUMNS; c++) {
        TP_UNROLL for (int h = 0; h < 2; h++) {
            float most = -INFINITE;
            TP_UNROLL for (int i = 0; i < TILES; i++)
                TP_UNROLL for (int k = 0; k < 2; k++) {
                    float &x = s[i][c][2 * k + h];
                    x = range.holds(start + 16 * i + 8 * k + g) ? x * (SCALE * LOG2E) : -INFINITE;
                    most = fmaxf(most, x);
                }
            TP_UNROLL for (int lane = 4; lane < 32; lane *= 2) most = fmaxf(most, __shfl_xor_sync(TP_ALL, most, lane));
            most = fmaxf(most, now.top[c][h]);
            const float decay = tp_exp2(now.top[c][h] - most);
            float sum = now.total[c][h] * decay;
            TP_UNROLL for (int i = 0; i < TILES; i++)
                TP_UNROLL for (int k = 0; k < 2; k++) {
                    float &x = s[i][c][2 * k + h];
                    x = tp_exp2(x - most);
                    sum += x;
                }
            now.top[c][h] = most, now.total[c][h] = sum;
            TP_UNROLL for (int m = 0; m < V_PIECES * 4; m++) now.out[c][m][h] *= decay, now.out[c][m][2 + h] *= decay;
        }
        TP_UNROLL for (int i = 0; i < TILES; i++)
            TP_UNROLL for (int k = 0; k < 2; k++)
                p[i][c][k] = tp_transpose(tp_pack(s[i][c][2 * k], s[i][c][2 * k + 1]));
    }
}

TP_DEVICE u32 word(const uint4 &v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

/* out[m]: rows g and g+8 are dimensions 64 (m/4) + 8g + 2 (m%4) and the next. */
TP_DEVICE void add_values(Running &now, const Unit &unit, const u32 (&p)[TILES][COLUMNS][2]) {
    TP_UNROLL for (int i = 0; i < TILES; i++)
        TP_UNROLL for (int m = 0; m < V_PIECES * 4; m++) {
            u32 rows[4];
            TP_UNROLL for (int h = 0; h < 4; h++) {
                const int pair = h / 2 * 2; /* keys 2t, 2t+1, then 2t+8, 2t+9 */
                rows[h] = __byte_perm(word(unit.v[i][m / 4][pair], m % 4), word(unit.v[i][m / 4][pair + 1], m % 4),
                                      h % 2 ? 0x7632 : 0x5410);
            }
            TP_UNROLL for (int c = 0; c < COLUMNS; c++)
                tp_mma(now.out[c][m], rows[0], rows[1], rows[2], rows[3], p[i][c][0], p[i][c][1]);
        }
}

/* A warp's result to shared memory. */
TP_DEVICE void leave(const Shared &shared, Running &now) {
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, g = lane / 4, t = lane % 4;
    TP_UNROLL for (int c = 0; c < COLUMNS; c++)
        TP_UNROLL for (int h = 0; h < 2; h++) {
            const int head = c * 8 + 2 * t + h;
            float sum = now.total[c][h];
            TP_UNROLL for (int other = 4; other < 32; other *= 2) sum += __shfl_xor_sync(TP_ALL, sum, other);
            if (head >= GROUP) continue;
            if (g == 0) shared.stat[warp * GROUP + head] = make_float2(now.top[c][h], sum);
            float *out = shared.out + (warp * GROUP + head) * OUT_STRIDE + g * 8;
            TP_UNROLL for (int j = 0; j < V_PIECES; j++) {
                const float(*x)[4] = &now.out[c][j * 4];
                if (HEAD_DIM % 64 && j * 64 + g * 8 >= HEAD_DIM) continue;
                *(float4 *)(out + j * 64) = make_float4(x[0][h], x[0][2 + h], x[1][h], x[1][2 + h]);
                *(float4 *)(out + j * 64 + 4) = make_float4(x[2][h], x[2][2 + h], x[3][h], x[3][2 + h]);
            }
        }
}

/* How the units are dealt out. Blocks of a cluster are added while a warp would have more than NEAR units, clusters
 * while it would have more than FAR. */
struct Plan {
    int shift, clusters, block; /* 1 << shift blocks of a cluster are in use; this block's number, or -1 */
};

TP_DEVICE Plan plan(int units) {
    Plan out = {0, 1, -1};
    while ((1 << out.shift) < RANKS && units > (WARPS * NEAR) << out.shift) out.shift++;
    if (1 << out.shift == RANKS) {
        const int wanted = (units + WARPS * RANKS * FAR - 1) / (WARPS * RANKS * FAR);
        out.clusters = max(1, min(SPLITS / RANKS, wanted));
    }
    const int rank = (int)blockIdx.x % RANKS, cluster = (int)blockIdx.x / RANKS;
    if (rank >> out.shift == 0 && cluster < out.clusters) out.block = (cluster << out.shift) + rank;
    return out;
}

extern "C" __global__ void TP_CLUSTER(RANKS) TP_BOUNDS(WARPS * 32, MIN_BLOCKS)
    TP_KERNEL(const float *qkv, const i32 *positions, const i32 *row_segment, const i32 *page_table,
              const float *inv_freq, const float *q_norm, const float *k_norm, u16 *kv, tp_out<OUT>::type *out,
              float *partial, i32 *counters, const i32 *counts) {
    TP_SHARED(memory);
    const Shared shared = Shared::at(memory);
    const int warp = (int)threadIdx.x / 32, head = (int)blockIdx.y;
    const i64 row = blockIdx.z;
    tp_launch_dependents();
    const int rows = counts[0], position = positions[row];
    const i32 *table = page_table + (i64)row_segment[row] * MAX_PAGES;
    const Range range = {WINDOW ? max(position - WINDOW + 1, 0) : 0, position};
    const int base = range.first < position ? range.first / UNIT * UNIT : position; /* every unit has a key in sight */
    const int units = (position - base + UNIT - 1) / UNIT;
    const Plan share = plan(units);
    if (row >= rows || share.block < 0) {
        tp_wait();
        return;
    }
#if RANKS > 1
    if (share.shift) tp_cluster_arrive(); /* this block runs */
#endif
    const int step = (share.clusters << share.shift) * UNIT;
    int start = base + share.block * UNIT + warp * step;
    u16 *pool = kv + head * (PAGE_TOKENS * HEAD_DIM);
    i32 pages[TILES];
    Unit unit;
    load_pages(pages, table, start, range);
    load_keys(unit, pool, pages, start, range);
    load_values(unit, pool, pages, start, range);
    load_pages(pages, table, start + step * WARPS, range);
    const Turns turns = Turns::of(position, inv_freq);
    tp_wait();

    const bool first = share.block == 0;
    const i64 slot = (i64)table[position / PAGE_TOKENS] * PAGE + position % PAGE_TOKENS * HEAD_DIM;
    enter(shared, turns, qkv + row * LDX, head, q_norm, k_norm, first, pool + slot);
    __syncthreads();
    if (first) score_current(shared);

    Running now;
    TP_UNROLL for (int c = 0; c < COLUMNS; c++) {
        now.top[c][0] = now.top[c][1] = -INFINITE, now.total[c][0] = now.total[c][1] = 0;
        TP_UNROLL for (int m = 0; m < V_PIECES * 4; m++)
            now.out[c][m][0] = now.out[c][m][1] = now.out[c][m][2] = now.out[c][m][3] = 0;
    }
    _Pragma("unroll 1") for (; start < position; start += step * WARPS) {
        const int following = start + step * WARPS;
        float s[TILES][COLUMNS][4];
        u32 p[TILES][COLUMNS][2];
        score(s, unit, shared.query);
        load_keys(unit, pool, pages, following, range);
        weigh(p, now, s, start, range);
        add_values(now, unit, p);
        load_values(unit, pool, pages, following, range);
        load_pages(pages, table, following + step * WARPS, range);
    }
    leave(shared, now);
    __syncthreads();
    const i64 pair = row * KV_HEADS + head;
    const Target target = {out + pair * (GROUP * HEAD_DIM), partial + pair * (SPLITS / RANKS) * PART_STRIDE,
                           counters + pair * CLUSTER, share.clusters};
    finish(shared, target, share.shift, first);
}
