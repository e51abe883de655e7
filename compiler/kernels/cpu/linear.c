/* linear_<format>: y = epilogue(x W^T + bias), compiled once a weight format and target with -DTP_FORMAT=<format>.
 *
 * Arguments: 0 x (x8, or f32 [cap][k] for float formats), 1 w (tile16), 2 y f32 (first row, first column), 3 n, 4 k,
 * 5 cap (row capacity of x), 6 ldy (floats a row of y), 7 epilogue, 8 bias f32 (one a row of w) or 0, 9 terms: with 2,
 * rows 2t and 2t + 1 of x are the two terms of row t of y (tapeout_cpu.h); 0 and 1 are one term.
 * The gated epilogues read 2n rows of w, gate rows first, n a multiple of 16, and store act(gate) * up. */
#include "tile16.h"

#define TP_AHEAD 4096 /* bytes of weights prefetched ahead in decode */
#if TP_KIND
#include "linear_float.h"
#else
#include "linear_quantized.h"
#endif

enum { store, add, gated_silu, gated_gelu };
enum { block_rows = 64, task_tiles = 32, sums_bytes = 64 * 1024 };

/* How a launch is cut: task = (tiles chunk, row block), row blocks fastest. A tile here is 16 columns of y. */
typedef struct cut {
    int gated, tiles, tiles_task, blocks, rows_block;
} cut;

/* Rows of x for one row of y. */
TP_INLINE int terms_of(const tp_launch *l) { return l->arg[9] == 2 ? 2 : 1; }

static cut cut_of(const tp_launch *l, const tp_step *s) {
    const int rows = s->rows * terms_of(l);
    cut c = { .gated = l->arg[7] >= gated_silu, .tiles = (int)((l->arg[3] + TP_TILE - 1) / TP_TILE) };
    c.blocks = (rows + block_rows - 1) / block_rows;
    if (!c.blocks) return c;
    c.rows_block = ((rows + c.blocks - 1) / c.blocks + 15) & -16; /* whole steps of any kernel */
    if (c.rows_block > rows) c.rows_block = rows;
    /* cost in bytes read; ten products take about the time of a byte */
    int64_t k = l->arg[4];
    int64_t tile = (TP_TILE_BYTES(k) + k * TP_TILE * c.rows_block / 10) << c.gated;
    int64_t goal = tile * c.tiles * c.blocks / 64;
    goal = goal < (32 << 10) ? 32 << 10 : goal > (256 << 10) ? 256 << 10 : goal;
    int64_t most = sums_bytes / (c.rows_block * TP_TILE * 4) >> c.gated, tiles = (goal + tile / 2) / tile;
    most = most > (task_tiles >> c.gated) ? task_tiles >> c.gated : most;
    c.tiles_task = (int)(tiles < 1 ? 1 : tiles > most ? most : tiles);
    return c;
}

static int linear_tasks(const tp_launch *l, const tp_step *s) {
    cut c = cut_of(l, s);
    return c.blocks ? (c.tiles + c.tiles_task - 1) / c.tiles_task * c.blocks : 0;
}

/* x * sigmoid(x), and x * Phi(x) by tanh: tanh(u) = 2 sigmoid(2u) - 1. */
TP_INLINE vf activate(vf x, int64_t epilogue) {
    vf u = epilogue == gated_silu ? x : x * vf_fma(x * x, vf_all(0.0713548162726f), vf_all(1.59576912161f));
    return x / (vf_exp(-u) + 1.0f);
}

/* y[rows][columns of `tiles` tiles] from the sums of the tiles, by pairs of gate and up when gated. */
TP_FN void finish(const tp_launch *l, int rows, int tiles, const float *sums, int64_t column, float *y) {
    int64_t n = l->arg[3], epilogue = l->arg[7], stride = (int64_t)rows * TP_TILE;
    int gated = epilogue >= gated_silu;
    const float *bias = TP_PTR(const float, l, 8);
    float none[TP_TILE] = { 0 }, last[TP_TILE] = { 0 };
    for (int64_t c = n / TP_TILE * TP_TILE; bias && c < n; c++) last[c % TP_TILE] = bias[c];
    for (int t = 0; t < rows; t++, y += l->arg[6]) {
        for (int i = 0; i < tiles; i++) {
            const float *sum = sums + (i << gated) * stride + t * TP_TILE;
            int64_t at = column + i * TP_TILE;
            const float *shift = !bias ? none : at + TP_TILE <= n ? bias + at : last;
            const float *shift_up = bias && gated ? bias + n + at : none;
            float out[TP_TILE], *to = y + i * TP_TILE;
            TP_UNROLL for (int u = 0; u < TP_TILE; u += TP_WIDTH) {
                vf value = vf_load(sum + u) + vf_load(shift + u);
                if (gated) value = activate(value, epilogue) * (vf_load(sum + stride + u) + vf_load(shift_up + u));
                vf_store(out + u, value);
            }
            if (at + TP_TILE <= n) {
                TP_UNROLL for (int u = 0; u < TP_TILE; u += TP_WIDTH)
                    vf_store(to + u, epilogue == add ? vf_load(to + u) + vf_load(out + u) : vf_load(out + u));
            } else {
                for (int r = 0; r < n - at; r++) to[r] = epilogue == add ? to[r] + out[r] : out[r];
            }
        }
    }
}

/* sums[streams][rows / 2][16]: the sums of both terms of each row. */
TP_FN void join_terms(float *sums, int streams, int rows) {
    for (int64_t t = 0; t < (int64_t)streams * rows / 2; t++)
        for (int u = 0; u < TP_TILE; u += TP_WIDTH)
            vf_store(sums + t * TP_TILE + u, vf_load(sums + 2 * t * TP_TILE + u) + vf_load(sums + (2 * t + 1) * TP_TILE + u));
}

TP_FN void linear_run(const tp_launch *l, const tp_step *s, int task, void *scratch) {
    cut c = cut_of(l, s);
    int64_t k = l->arg[4], cap = l->arg[5];
    int row = task % c.blocks * c.rows_block, first = task / c.blocks * c.tiles_task;
    int terms = terms_of(l), left = s->rows * terms - row, rows = left < c.rows_block ? left : c.rows_block;
    int tiles = c.tiles - first < c.tiles_task ? c.tiles - first : c.tiles_task;
    if (rows <= 0) return;

    const uint8_t *w[task_tiles];
    int streams = tiles << c.gated;
    for (int i = 0; i < streams; i++) {
        int64_t tile = c.gated ? (i & 1) * (int64_t)c.tiles + first + i / 2 : first + i;
        w[i] = TP_PTR(const uint8_t, l, 1) + tile * TP_TILE_BYTES(k);
    }

    int64_t column = (int64_t)first * TP_TILE, ldy = l->arg[6];
    float *y = TP_PTR(float, l, 2) + row / terms * ldy + column, *sums = scratch;
    for (int t = 0; t < rows / terms; t++)
        for (int i = 0; i < tiles; i++) __builtin_prefetch(y + t * ldy + i * TP_TILE, 1, 2);
    for (int i = 0; i < streams * rows * TP_TILE; i += TP_TILE)
        for (int u = 0; u < TP_TILE; u += TP_WIDTH) vf_store(sums + i + u, (vf){ 0 });
    for (int64_t k0 = 0; k0 < k; k0 += TP_CHUNK) {
        int64_t k1 = k0 + TP_CHUNK < k ? k0 + TP_CHUNK : k;
        operand x = operand_of(TP_PTR(const void, l, 0), k, cap, k0, k1, row, rows, (char *)scratch + sums_bytes);
        multiply(w, streams, k0, k1, &x, sums);
    }
    if (terms == 2) join_terms(sums, streams, rows);
    finish(l, rows / terms, tiles, sums, column, y);
}

const tp_kernel TP_PASTE(tp_kernel_linear_, TP_FORMAT) = { "linear_" TP_STRING(TP_FORMAT), linear_tasks, linear_run };
