/* embed_<format>: y[t] = scale * (row tokens[t] of W), compiled once for each weight format with -DTP_FORMAT=<format>.
 *
 * Arguments: 0 w (tile16 [vocab][k]), 1 y f32 [rows][k], 2 k, 3 scale. The value of an element is computed as the format
 * defines it, bit for bit, then multiplied. */
#include "tile16.h"

enum { rows_task = 16 };

static int embed_tasks(const tp_launch *l, const tp_step *s) {
    (void)l;
    return (s->rows + rows_task - 1) / rows_task;
}

#if TP_KIND != TP_CODES
TP_FN void embed_row(const uint8_t *tile, int row, int64_t k, float scale, float *y) {
    const int unit = row / TP_WIDTH, lane = row % TP_WIDTH;
    for (int64_t i = 0; i < k; i++) {
        const uint8_t *rows = tile16_line(tile, i) + unit * TP_WIDTH * TP_BITS / 8;
        y[i] = (tile16_float(rows) * tile16_scale(tile, i, unit))[lane] * scale;
    }
}
#else
TP_FN void embed_row(const uint8_t *tile, int row, int64_t k, float scale, float *y) {
    for (int64_t i = 0; i < k; i += 32) {
        tile16_group group;
        const uint8_t *record = tile + TP_TILE_BYTES(i);
        tile16_decode(tile, record, (int)(i % TP_SUPER / 32), row / TP_WIDTH, &group);
        const tile16_code *codes = (const tile16_code *)group.codes + row % TP_WIDTH * 4;
#if TP_ZERO == TP_OWN
        const float zero = group.zero[row % TP_WIDTH];
#else
        const float zero = TP_CODE_ZERO;
#endif
        for (int j = 0; j < 32; j++) {
            float code = codes[j / 4 * sizeof(vb) + j % 4] - zero;
            float value = group.scale[j / TP_GROUP][row % TP_WIDTH] * code;
#if TP_MIN
            value += group.min[j / TP_GROUP][row % TP_WIDTH];
#endif
            y[i + j] = value * scale;
        }
    }
}
#endif

TP_FN void embed_run(const tp_launch *l, const tp_step *s, int task, void *scratch) {
    (void)scratch;
    int64_t k = l->arg[2];
    int last = (task + 1) * rows_task < s->rows ? (task + 1) * rows_task : s->rows;
    for (int t = task * rows_task; t < last; t++) {
        int64_t token = s->tokens[t];
        const uint8_t *tile = TP_PTR(const uint8_t, l, 0) + token / TP_TILE * TP_TILE_BYTES(k);
        embed_row(tile, (int)(token % TP_TILE), k, tp_float(l, 3), TP_PTR(float, l, 1) + t * k);
    }
}

const tp_kernel TP_PASTE(tp_kernel_embed_, TP_FORMAT) = { "embed_" TP_STRING(TP_FORMAT), embed_tasks, embed_run };
