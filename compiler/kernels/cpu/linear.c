/* linear_<format>: y = epilogue(x W^T + bias), compiled once for each weight format and target with -DTP_FORMAT=<format>.
 *
 * Arguments: 0 x (x8, or f32 [cap][k] for float formats), 1 w (tile16), 2 y f32 (first row, first column), 3 n, 4 k,
 * 5 cap (row capacity of x), 6 ldy (floats a row of y), 7 epilogue, 8 bias f32 (one a row of w) or 0.
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

static cut cut_of(const tp_launch *l, const tp_step *s) {
    cut c = { .gated = l->arg[7] >= gated_silu, .tiles = (int)((l->arg[3] + TP_TILE - 1) / TP_TILE) };
    c.blocks = (s->rows + block_rows - 1) / block_rows;
    if (!c.blocks) return c;
    c.rows_block = (s->rows + c.blocks - 1) / c.blocks;
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

/* y[rows][valid columns] from the sums of one tile (two, gate and up, when gated). */
TP_FN void finish(const tp_launch *l, int rows, const float *sums, int64_t column, float *y) {
    int64_t n = l->arg[3], ldy = l->arg[6], epilogue = l->arg[7];
    int64_t valid = n - column < TP_TILE ? n - column : TP_TILE;
    const float *bias = TP_PTR(const float, l, 8);
    float shift[2][TP_TILE] = { { 0 } };
    for (int r = 0; bias && r < valid; r++) {
        shift[0][r] = bias[column + r];
        if (epilogue >= gated_silu) shift[1][r] = bias[n + column + r];
    }
    for (int t = 0; t < rows; t++, sums += TP_TILE, y += ldy) {
        float out[TP_TILE];
        for (int u = 0; u < TP_TILE; u += TP_WIDTH) {
            vf value = vf_load(sums + u) + vf_load(shift[0] + u);
            if (epilogue >= gated_silu)
                value = activate(value, epilogue) * (vf_load(sums + rows * TP_TILE + u) + vf_load(shift[1] + u));
            vf_store(out + u, value);
        }
        if (valid == TP_TILE) {
            for (int u = 0; u < TP_TILE; u += TP_WIDTH)
                vf_store(y + u, epilogue == add ? vf_load(y + u) + vf_load(out + u) : vf_load(out + u));
        } else {
            for (int r = 0; r < valid; r++) y[r] = epilogue == add ? y[r] + out[r] : out[r];
        }
    }
}

TP_FN void linear_run(const tp_launch *l, const tp_step *s, int task, void *scratch) {
    cut c = cut_of(l, s);
    int64_t k = l->arg[4], cap = l->arg[5];
    int row = task % c.blocks * c.rows_block, first = task / c.blocks * c.tiles_task;
    int rows = s->rows - row < c.rows_block ? s->rows - row : c.rows_block;
    int tiles = c.tiles - first < c.tiles_task ? c.tiles - first : c.tiles_task;
    if (rows <= 0) return;

    const uint8_t *w[task_tiles];
    int streams = tiles << c.gated;
    for (int i = 0; i < streams; i++)
        w[i] = TP_PTR(const uint8_t, l, 1) + (c.gated ? i % 2 * (int64_t)c.tiles + first + i / 2 : first + i) * TP_TILE_BYTES(k);

    float *sums = scratch;
    for (int i = 0; i < streams * rows * TP_TILE; i += TP_TILE)
        for (int u = 0; u < TP_TILE; u += TP_WIDTH) vf_store(sums + i + u, (vf){ 0 });
    for (int64_t k0 = 0; k0 < k; k0 += TP_CHUNK) {
        int64_t k1 = k0 + TP_CHUNK < k ? k0 + TP_CHUNK : k;
        operand x = operand_of(TP_PTR(const void, l, 0), k, cap, k0, k1, row, rows, (char *)scratch + sums_bytes);
        multiply(w, streams, k0, k1, &x, sums);
    }
    for (int i = 0; i < tiles; i++) {
        int64_t column = (int64_t)(first + i) * TP_TILE;
        finish(l, rows, sums + ((int64_t)i << c.gated) * rows * TP_TILE, column, TP_PTR(float, l, 2) + row * l->arg[6] + column);
    }
}

const tp_kernel TP_PASTE(tp_kernel_linear_, TP_FORMAT) = { "linear_" TP_STRING(TP_FORMAT), linear_tasks, linear_run };
