/* Collectives over float32 rows of a step, between the ranks of one machine (comm.h).
 *
 * Results are the same bits on every rank and in every run: an element is always summed in the order of the ranks. With
 * one shot every rank sums all of it; with two shots every rank sums a share, and the others copy it.
 *
 * A collective has phases. tasks() starts the next one and is where a rank waits for the others: it is called by the
 * one thread that advances the launch list, when all tasks of the phase before are done. Tasks never wait, so however
 * few threads a rank has, at most one of them is blocked and every task finds a thread. */
#include "comm.h"

#define PIECE 4096 /* floats a task */
#define LINE 16    /* floats of a cache line; shares are whole lines */

enum { ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL };
enum { READ, PUT, SUM_SHARE, COLLECT }; /* tp_comm.phase: what the tasks do that tasks() counted last */

/* Every collective: 0 x f32 [rows][ldx], 1 ldx, 2 y f32 [rows][ldy], 3 ldy, 4 k, 5 comm; all_reduce also 6 add (y += the
 * sum instead of y = it) and 7 two_shot. Columns of x and y with N ranks, on rank r:
 *   all_reduce      k    k    y = x_0 + x_1 + … in this order, x_s being the operand of rank s
 *   all_gather      k    N k  y = x_0, x_1, … side by side; the first `columns` of them if 6 columns is not 0
 *   reduce_scatter  N k  k    y = columns r k … of the sum
 *   all_to_all      N k  N k  columns s k … of y = columns r k … of x_s */
typedef struct shape {
    const tp_comm *c;
    int64_t rows, k, width, first; /* a buffer holds x as [rows][width]; this rank wants k columns from `first` on */
    int64_t outputs;               /* columns of y */
} shape;

TP_INLINE shape shape_of(const tp_launch *l, const tp_step *s, int kind) {
    const tp_comm *c = TP_PTR(const tp_comm, l, 5);
    const int scattered = kind == REDUCE_SCATTER || kind == ALL_TO_ALL, gathered = kind == ALL_GATHER || kind == ALL_TO_ALL;
    const int64_t k = l->arg[4], outputs = kind == ALL_GATHER && l->arg[6] ? l->arg[6] : gathered ? k * c->ranks : k;
    return (shape){c, s->rows, k, scattered ? k * c->ranks : k, scattered ? k * c->rank : 0, outputs};
}

TP_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int pieces(int64_t floats) { return (int)((floats + PIECE - 1) / PIECE); }

/* First float of what a rank sums in two shots. */
static int64_t share(const shape *p, int rank) {
    const int64_t floats = p->rows * p->width;
    return least((floats + LINE - 1) / LINE * rank / p->c->ranks * LINE, floats);
}

/* Begins the next phase: its tasks, with TP_MORE if another follows; or minus the fault that ended the run. */
TP_INLINE int begin(const tp_launch *l, const tp_step *s, int kind) {
    const shape p = shape_of(l, s, kind);
    tp_comm *c = TP_PTR(tp_comm, l, 5);
    if (c->phase == READ || c->phase == COLLECT) { /* of the collective before */
        if (p.rows * p.width * (int64_t)sizeof(float) > (int64_t)c->shared->buffer_bytes) return -TP_BAD_LAUNCH;
        c->turn += 1;
        c->phase = PUT;
        return pieces(p.rows * p.width) | TP_MORE;
    }
    const int fault = tp_barrier(c, (uint64_t)p.rows << 34 | (uint64_t)p.width << 2 | (uint64_t)kind);
    if (fault) return -fault;
    if (kind == ALL_REDUCE && l->arg[7] && c->phase == PUT) {
        c->phase = SUM_SHARE;
        return pieces(share(&p, c->rank + 1) - share(&p, c->rank)) | TP_MORE;
    }
    c->phase = c->phase == SUM_SHARE ? COLLECT : READ;
    return pieces(p.rows * p.outputs);
}

/* y = the sum over ranks of in, in + stride, …; with add, y += it. */
static void sum(const float *in, int64_t stride, int ranks, float *y, int64_t n, int add) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) { /* a masked store of all would be many times slower on AMD */
        __m256 total = _mm256_loadu_ps(in + i);
        for (int r = 1; r < ranks; r++) total = _mm256_add_ps(total, _mm256_loadu_ps(in + i + r * stride));
        _mm256_storeu_ps(y + i, add ? _mm256_add_ps(_mm256_loadu_ps(y + i), total) : total);
    }
    for (; i < n; i++) {
        float total = in[i];
        for (int r = 1; r < ranks; r++) total += in[i + r * stride];
        y[i] = add ? y[i] + total : total;
    }
}

static void copy(const float *in, float *y, int64_t n, int add) {
    if (add) sum(in, 0, 1, y, n, 1);
    else memcpy(y, in, (size_t)n * sizeof(float));
}

static void put(const tp_launch *l, const shape *p, int task) {
    const float *x = TP_PTR(const float, l, 0);
    float *own = tp_buffer(p->c, p->c->rank);
    const int64_t last = least(p->rows * p->width, (int64_t)(task + 1) * PIECE);
    for (int64_t i = (int64_t)task * PIECE, n; i < last; i += n) { /* the part of one row */
        n = least(p->width - i % p->width, last - i);
        copy(x + i / p->width * l->arg[1] + i % p->width, own + i, n, 0);
    }
}

static void sum_share(const shape *p, int task) {
    const int64_t last = share(p, p->c->rank + 1), at = share(p, p->c->rank) + (int64_t)task * PIECE;
    /* in place: nobody else reads this share of this rank's buffer before the next barrier */
    sum(tp_buffer(p->c, 0) + at, tp_stride(p->c), p->c->ranks, tp_buffer(p->c, p->c->rank) + at, least(PIECE, last - at), 0);
}

/* y from the shares of all ranks. */
static void collect(const tp_launch *l, const shape *p, int task) {
    const int64_t last = least(p->rows * p->k, (int64_t)(task + 1) * PIECE);
    int owner = 0;
    for (int64_t i = (int64_t)task * PIECE, n; i < last; i += n) {
        while (share(p, owner + 1) <= i) owner++;
        n = least(least(p->k - i % p->k, last - i), share(p, owner + 1) - i);
        float *y = TP_PTR(float, l, 2) + i / p->k * l->arg[3] + i % p->k;
        copy(tp_buffer(p->c, owner) + i, y, n, (int)l->arg[6]);
    }
}

/* y from the buffers of all ranks: sums, or columns side by side. */
TP_INLINE void read_all(const tp_launch *l, const shape *p, int task, int kind) {
    const int64_t last = least(p->rows * p->outputs, (int64_t)(task + 1) * PIECE);
    for (int64_t i = (int64_t)task * PIECE, n; i < last; i += n) { /* the part of k columns of one row */
        const int64_t row = i / p->outputs, column = i % p->outputs, at = row * p->width + p->first + column % p->k;
        n = least(least(p->k - column % p->k, p->outputs - column), last - i);
        float *y = TP_PTR(float, l, 2) + row * l->arg[3] + column;
        if (kind == ALL_REDUCE || kind == REDUCE_SCATTER)
            sum(tp_buffer(p->c, 0) + at, tp_stride(p->c), p->c->ranks, y, n, kind == ALL_REDUCE && l->arg[6]);
        else
            copy(tp_buffer(p->c, (int)(column / p->k)) + at, y, n, 0);
    }
}

TP_INLINE void run(const tp_launch *l, const tp_step *s, int task, int kind) {
    const shape p = shape_of(l, s, kind);
    switch (p.c->phase) {
    case PUT: put(l, &p, task); break;
    case SUM_SHARE: sum_share(&p, task); break;
    case COLLECT: collect(l, &p, task); break;
    default: read_all(l, &p, task, kind);
    }
}

#define COLLECTIVE(NAME, KIND) \
    static int NAME##_tasks(const tp_launch *l, const tp_step *s) { return begin(l, s, KIND); } \
    static void NAME(const tp_launch *l, const tp_step *s, int task, void *scratch) { \
        (void)scratch; \
        run(l, s, task, KIND); \
    } \
    const tp_kernel tp_kernel_##NAME = {#NAME, NAME##_tasks, NAME};
COLLECTIVE(all_reduce, ALL_REDUCE)
COLLECTIVE(all_gather, ALL_GATHER)
COLLECTIVE(reduce_scatter, REDUCE_SCATTER)
COLLECTIVE(all_to_all, ALL_TO_ALL)
