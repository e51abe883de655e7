/* Puts together the best keys of rows that were split over them; see index.h. */
#include "index.h"

static int tasks(const tp_launch *l, const tp_step *s) {
    int tokens;
    for (int row = 0; row < s->rows; row++)
        if (tp_index_splits(l, s, tp_index_last(l, s, row), &tokens) > 1) return s->rows;
    return 0;
}

static void run(const tp_launch *l, const tp_step *s, int row, void *scratch) {
    const int top_k = (int)l->arg[9];
    int tokens;
    const int splits = tp_index_splits(l, s, tp_index_last(l, s, row), &tokens);
    if (splits == 1) return;
    tp_best best = {.top_k = top_k, .score = scratch};
    best.position = (int32_t *)best.score + tp_best_room(top_k);
    for (int split = 0; split < splits; split++) {
        const uint32_t *part = tp_index_part_of(l, row, split);
        for (int i = 0; i < (int)part[2 * top_k]; i++) tp_best_offer(&best, part[i], (int)part[top_k + i]);
    }
    tp_best_write(&best, TP_PTR(float, l, 2) + (int64_t)row * top_k);
}

const tp_kernel tp_kernel_index_merge = {"index_merge", tasks, run};
