/* linear_<format>: y = epilogue(x W^T + bias), compiled once a weight format and target with -DTP_FORMAT=<format>.
 *
 * Arguments: 0 x (x8, or f32 [cap][k] if elements are floats), 1 w (tile16), 2 y f32 (first row, first column), 3 n,
 * 4 k, 5 cap (row capacity of x), 6 ldy (floats a row of y), 7 epilogue, 8 bias f32 (one a row of w) or 0, 9 terms: with 2,
 * rows 2t and 2t + 1 of x are the two terms of row t of y (tapeout_cpu.h); 0 and 1 are one term.
 * The gated epilogues read 2n rows of w, gate rows first, n a multiple of 16, and store act(gate) * up. */
#include "linear_finish.h"

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
        int64_t tile = first + (i < tiles ? i : c.tiles + i - tiles);
        w[i] = TP_PTR(const uint8_t, l, 1) + tile * TP_TILE_BYTES(k);
    }

    int64_t column = (int64_t)first * TP_TILE, ldy = l->arg[6];
    float *y = TP_PTR(float, l, 2) + row / terms * ldy;
    for (int t = 0; t < rows / terms; t++)
        for (int i = 0; i < tiles; i++) __builtin_prefetch(y + t * ldy + column + i * TP_TILE, 1, 2);
    activations a = { TP_PTR(const void, l, 0), k, 0, k, cap, terms };
    target to = { .y = y, .n = l->arg[3], .ldy = ldy, .epilogue = l->arg[7], .bias = TP_PTR(const float, l, 8) };
    finish(&to, rows / terms, tiles, sums_of(w, streams, &a, row, rows, scratch), column);
}

const tp_kernel TP_PASTE(tp_kernel_linear_, TP_FORMAT) = { "linear_" TP_STRING(TP_FORMAT), linear_tasks, linear_run };
