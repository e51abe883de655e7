/* How attention is cut into tasks: shared by the attention kernels and by the kernel that combines their parts.
 *
 * attention_f16, attention_f32, attention_combine: 0 q f32, 1 ldq, 2 out f32 [rows][heads*head_dim], 3 kv, 4 heads,
 * 5 kv_heads, 6 head_dim (a multiple of 8, at most 512), 7 page_tokens (16, 32 or 64), 8 scale, 9 window (0: full),
 * 10 split buffer or 0, 11 its bytes, 12 sinks f32 [heads] (one more logit a head, without a value) or 0.
 * attention_combine takes the same launch but for the sinks, and follows directly.
 *
 * A block is up to `block_rows` consecutive rows of a segment, for the query heads of one group that share a KV head.
 * Blocks of a short segment with a long past are split over their keys, if the split buffer has room for all rows of
 * the step: each split leaves its maximum, sum and weighted values there. The cut depends on the step alone. */
#ifndef TP_ATTENTION_H
#define TP_ATTENTION_H
#include "tapeout_cpu.h"
#include "tp_math.h"

#define TP_SPLITS 16        /* at most, of one block */
#define TP_SPLIT_TOKENS 128 /* at least, in one split */
#define TP_BLOCK_VECTORS 48 /* query vectors (rows x heads) of one task */
#define TP_MAX_HEAD_DIM 512

/* Of each (row, head, split) in the split buffer: head_dim values, then maximum and sum, padded to 64 bytes. */
static inline int64_t tp_part_floats(int head_dim) { return head_dim + 16; }
static inline int64_t tp_split_row_floats(int heads, int head_dim) {
    return (int64_t)heads * TP_SPLITS * tp_part_floats(head_dim);
}

typedef struct tp_attention {
    int heads, kv_heads, d, page_tokens, window;
    int group;       /* query heads of one task; they share a KV head */
    int groups;      /* of all KV heads */
    int block_rows;  /* rows of one task */
    int may_split;
} tp_attention;

static inline tp_attention tp_attention_of(const tp_launch *l, const tp_step *s) {
    tp_attention a = {(int)l->arg[4], (int)l->arg[5], (int)l->arg[6], (int)l->arg[7], (int)l->arg[9], 0, 0, 0, 0};
    const int vectors = tp_min(TP_BLOCK_VECTORS, 1024 / a.d * 12), share = a.heads / a.kv_heads;
    int cuts = tp_ceil_div(share, vectors);
    while (share % cuts) cuts++;
    a.group = share / cuts;
    a.groups = a.kv_heads * cuts;
    a.block_rows = vectors / a.group;
    a.may_split = l->arg[10] && s->rows * tp_split_row_floats(a.heads, a.d) * 4 <= l->arg[11];
    return a;
}

/* First key that row `row` of the segment sees, at the start of a page. */
static inline int tp_first_key(const tp_attention *a, const tp_segment *g, int row) {
    const int position = g->position + row;
    return a->window > 0 && position >= a->window ? (position - a->window + 1) / a->page_tokens * a->page_tokens : 0;
}

/* Keys of each split (a multiple of 64) and how many splits, for a segment. */
static inline int tp_splits(const tp_attention *a, const tp_segment *g, int *tokens) {
    const int keys = g->position + g->rows - tp_first_key(a, g, 0);
    *tokens = keys;
    if (!a->may_split || g->rows > a->block_rows) return 1;
    *tokens = tp_max(TP_SPLIT_TOKENS, tp_ceil_div(tp_ceil_div(keys, TP_SPLITS), 64) * 64);
    return tp_ceil_div(keys, *tokens);
}

#endif
