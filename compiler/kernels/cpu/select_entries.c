/* The entries of compressed.h that a row attends to: those of the highest scores, by a small attention of its own (the
 * lightning indexer of DeepSeek-V4). Cut into tasks as index.h says, entries in the place of positions. */
#include "compressed.h"
#include "index.h"

#define KEYS 32
#define MAX_HEADS 128
#define MAX_D 256

typedef struct room {
    float copies[KEYS * MAX_D], score[MAX_HEADS * KEYS];
    uint32_t best[2 * TP_INDEX_TOP_K];
    int32_t entry[2 * TP_INDEX_TOP_K];
} room;

_Static_assert(sizeof(room) <= TP_SCRATCH, "scores and candidates fit scratch");

static int most_splits(const tp_launch *l, const tp_step *s) {
    int most = 1, entries;
    for (int row = 0; row < s->rows; row++)
        most = tp_max(most, tp_index_splits(l, s, tp_index_last(l, s, row), &entries));
    return most;
}

static int tasks(const tp_launch *l, const tp_step *s) { return s->rows * most_splits(l, s); }

/* Offers entries [first, last) with the sum over heads of weights * relu(q . entry) * scale. */
static void search(const tp_launch *l, const tp_step *s, int row, int first, int last, tp_best *best, room *t) {
    const int heads = (int)l->arg[4], d = (int)l->arg[5], m = (int)l->arg[13];
    const tp_entries entries = {TP_PTR(entry_t, l, 3), s->segment[s->row_segment[row]].pages, d, m, (int)l->arg[8]};
    const float *q = TP_PTR(const float, l, 0) + row * l->arg[1], *weight = TP_PTR(const float, l, 6) + row * l->arg[7];
    for (; first < last; first += KEYS) {
        const float *key[KEYS];
        const int keys = tp_min(KEYS, last - first);
        for (int j = 0; j < keys; j++) key[j] = tp_read_entry(&entries, first + j, t->copies + j * d);
        tp_scores(q, heads, key, keys, d, t->score, KEYS);
        for (int j = 0; j < keys; j++) {
            float sum = 0;
            for (int h = 0; h < heads; h++)
                sum += weight[h] * (t->score[h * KEYS + j] < 0 ? 0 : t->score[h * KEYS + j]); /* a NaN stays one */
            tp_best_offer(best, tp_ordered(sum * tp_float(l, 10)), first + j);
        }
    }
}

/* select_entries_f16, _f32: the arguments of index.h, 3 entries, 5 a multiple of 16 and at most 256, and 13 m. */
static void run(const tp_launch *l, const tp_step *s, int task, void *scratch) {
    const int row = task % s->rows, split = task / s->rows, top_k = (int)l->arg[9], last = tp_index_last(l, s, row);
    float *y = TP_PTR(float, l, 2) + (int64_t)row * top_k;
    int entries;
    const int splits = tp_index_splits(l, s, last, &entries);
    if (split >= splits) return;
    if (last < top_k) { /* all of them */
        for (int i = 0; i < top_k; i++) y[i] = i <= last ? (float)i : -1.0f;
        return;
    }
    room *t = scratch;
    tp_best best = {.top_k = top_k, .score = t->best, .position = t->entry};
    search(l, s, row, split * entries, tp_min(last + 1, (split + 1) * entries), &best, t);
    if (splits == 1) tp_best_write(&best, y);
    else tp_best_leave(&best, tp_index_part_of(l, row, split));
}

#if TP_KV_F16
const tp_kernel tp_kernel_select_entries_f16 = {"select_entries_f16", tasks, run};
#else
const tp_kernel tp_kernel_select_entries_f32 = {"select_entries_f32", tasks, run};
#endif
