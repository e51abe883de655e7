/* grouped_<format>: products of groups of rows of x with a matrix of their own each, compiled once a weight format and
 * target with -DTP_FORMAT=<format>. w holds the matrices one below the other, n rows each (2n, gate first, when gated).
 *
 * Arguments: 0 x (x8, or f32 where elements are floats), 1 w (tile16), 2 y f32, 3 n (a multiple of 16), 4 k, 5 cap (row
 * capacity of x), 6 ldy, 7 epilogue, 8 bias f32 (one a row of w) or 0, 9 starts or 0, 10 row_of or 0, 11 scale or 0,
 * 12 groups, 13 limit of the gated epilogues, or parts of `add` with starts, or 0, 14 terms (linear.c).
 *
 * With starts (experts), x has k columns and its rows come sorted by group: group g has rows starts[g] .. starts[g + 1].
 * Behind starts[groups + 1] stand how many groups have rows, and which, ascending (experts.c). Row r of x belongs to row
 * row_of[r] of y (r without it), times scale[r]; `add` sums up groups in ascending order. Of few rows the summands go to
 * parts f32 [TP_FEW_PAIRS][n] instead, since a group is read faster in one run, and add_pairs (experts.c) sums them up.
 * Without starts (heads), every group has all rows: group g multiplies columns g k on of x into columns g n on of y. */
#include "linear_finish.h"

typedef struct groups {
    const int32_t *starts, *chosen; /* 0 without starts */
    int active, rows;               /* groups with rows, rows a group without starts */
} groups;

/* How a launch is cut. A tile here is 16 columns of y. Tasks are (group, tiles chunk, row block), row blocks fastest;
 * where groups add to the same rows of y (together), a task is a tiles chunk of all groups. */
typedef struct cut {
    int gated, apart, together, tiles, tiles_task, chunks;
} cut;

TP_INLINE int terms_of(const tp_launch *l) { return l->arg[14] == 2 ? 2 : 1; }

static groups groups_of(const tp_launch *l, const tp_step *s) {
    const int32_t *starts = TP_PTR(const int32_t, l, 9);
    int count = (int)l->arg[12];
    if (!starts) return (groups){ .active = s->rows ? count : 0, .rows = s->rows };
    return (groups){ starts, starts + count + 2, starts[count + 1], 0 };
}

TP_INLINE int group_at(const groups *g, int i) { return g->chosen ? g->chosen[i] : i; }

TP_INLINE int rows_at(const groups *g, int i) {
    return g->chosen ? g->starts[g->chosen[i] + 1] - g->starts[g->chosen[i]] : g->rows;
}

TP_INLINE int blocks_of(int rows) { return (rows + block_rows - 1) / block_rows; }

static cut cut_of(const tp_launch *l, const groups *g) {
    int64_t rows = 0, k = l->arg[4];
    int largest = 1, terms = terms_of(l);
    for (int i = 0; i < g->active; i++) {
        int of = rows_at(g, i) * terms;
        rows += of, largest = of > largest ? of : largest;
    }
    cut c = { .gated = l->arg[7] >= gated_silu, .tiles = (int)(l->arg[3] / TP_TILE) };
    c.apart = l->arg[7] == add && g->starts && l->arg[13] && g->starts[l->arg[12]] <= TP_FEW_PAIRS;
    c.together = l->arg[7] == add && g->starts && !c.apart;
    /* Cost in bytes read; ten products take about the time of a byte. Tasks are larger than those of linear.c: every run
     * of weights that does not go on where another ended is slow to start (half a microsecond, 10 KB). */
    int64_t column = (g->active * TP_TILE_BYTES(k) + k * TP_TILE * rows / 10) << c.gated;
    int64_t goal = column * c.tiles / (c.together ? 8 : 16), tile = c.together || !g->active ? column : column / g->active;
    goal = goal < (32 << 10) ? 32 << 10 : goal > (512 << 10) ? 512 << 10 : goal;
    largest = largest < block_rows ? largest : block_rows;
    int64_t most = sums_bytes / (largest * TP_TILE * 4) >> c.gated, tiles = tile ? (goal + tile / 2) / tile : 1;
    most = most > (task_tiles >> c.gated) ? task_tiles >> c.gated : most;
    c.tiles_task = (int)(tiles < 1 ? 1 : tiles > most ? most : tiles);
    c.chunks = (c.tiles + c.tiles_task - 1) / c.tiles_task;
    return c;
}

static int grouped_tasks(const tp_launch *l, const tp_step *s) {
    groups g = groups_of(l, s);
    cut c = cut_of(l, &g);
    if (c.together) return g.active ? c.chunks : 0;
    int blocks = 0;
    for (int i = 0; i < g.active; i++) blocks += blocks_of(rows_at(&g, i) * terms_of(l));
    return blocks * c.chunks;
}

/* Rows row .. row + rows of group i (terms counted) with tiles first .. first + tiles of its matrix. */
TP_FN void multiply_block(const tp_launch *l, const groups *g, const cut *c, int i, int first, int tiles, int row,
                          int rows, void *scratch) {
    int group = group_at(g, i), terms = terms_of(l), count = (int)l->arg[12];
    int64_t n = l->arg[3], k = l->arg[4], matrix = (int64_t)group * (c->tiles << c->gated);
    const uint8_t *w[task_tiles];
    int streams = tiles << c->gated;
    for (int t = 0; t < streams; t++) {
        int64_t tile = matrix + first + (t < tiles ? t : c->tiles + t - tiles);
        w[t] = TP_PTR(const uint8_t, l, 1) + tile * TP_TILE_BYTES(k);
    }
    int begin = g->starts ? g->starts[group] : 0, at = begin + row / terms; /* rows of x in pairs of terms */
    activations a = { TP_PTR(const void, l, 0), g->starts ? k : count * k, g->starts ? 0 : group * k, k, l->arg[5], terms };
    const float *bias = TP_PTR(const float, l, 8), *scale = TP_PTR(const float, l, 11);
    const int32_t *row_of = TP_PTR(const int32_t, l, 10);
    target to = { .n = n, .ldy = l->arg[6], .epilogue = l->arg[7], .limit = c->gated ? tp_float(l, 13) : 0 };
    to.y = TP_PTR(float, l, 2) + (row_of ? 0 : at * to.ldy) + (g->starts ? 0 : group * n);
    to.bias = bias ? bias + group * (n << c->gated) : 0;
    to.row_of = row_of ? row_of + at : 0;
    to.scale = scale ? scale + at : 0;
    if (c->apart) {
        to.y = TP_PTR(float, l, 13) + at * n;
        to.ldy = n, to.epilogue = store, to.row_of = 0;
    }
    float *sums = sums_of(w, streams, &a, at * terms, rows, scratch);
    finish(&to, rows / terms, tiles, sums, (int64_t)first * TP_TILE);
}

/* Block `block` of the rows of group i; blocks are whole steps of any kernel. */
TP_FN void multiply_rows_of(const tp_launch *l, const groups *g, const cut *c, int i, int chunk, int block, void *scratch) {
    int rows = rows_at(g, i) * terms_of(l), blocks = blocks_of(rows), most = ((rows + blocks - 1) / blocks + 15) & -16;
    int row = block * most, left = rows - row, first = chunk * c->tiles_task, tiles = c->tiles - first;
    if (left <= 0) return;
    multiply_block(l, g, c, i, first, tiles < c->tiles_task ? tiles : c->tiles_task, row, left < most ? left : most, scratch);
}

static void grouped_run(const tp_launch *l, const tp_step *s, int task, void *scratch) {
    groups g = groups_of(l, s);
    cut c = cut_of(l, &g);
    for (int i = 0; i < g.active; i++) {
        int blocks = blocks_of(rows_at(&g, i) * terms_of(l));
        if (c.together) {
            for (int b = 0; b < blocks; b++) multiply_rows_of(l, &g, &c, i, task, b, scratch);
        } else if (task < blocks * c.chunks) {
            multiply_rows_of(l, &g, &c, i, task / blocks, task % blocks, scratch);
            return;
        } else {
            task -= blocks * c.chunks;
        }
    }
}

const tp_kernel TP_PASTE(tp_kernel_grouped_, TP_FORMAT) = { "grouped_" TP_STRING(TP_FORMAT), grouped_tasks, grouped_run };
