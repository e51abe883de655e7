/* The ABI between the runtime, the step engine and the kernels of a CPU artifact. */
#ifndef TAPEOUT_CPU_H
#define TAPEOUT_CPU_H
#include <stdint.h>
#include <stddef.h>

#define TP_ABI 1
#define TP_ARGS 15
#define TP_TILE 16 /* weight rows a tile */

/* One launch: a kernel and its arguments. Pointers are absolute addresses resolved at load; integers are themselves;
 * floats are the bits of a double. The meaning of each argument stands beside the kernel. */
typedef struct tp_launch {
    int32_t kernel;
    int32_t reserved;
    int64_t arg[TP_ARGS];
} tp_launch;

/* A run of consecutive rows of a step that belong to one sequence. */
typedef struct tp_segment {
    int32_t row;          /* first row of the step */
    int32_t rows;         /* how many rows */
    int32_t position;     /* position of the first row in its sequence */
    int32_t slot;         /* of the sequence, 0 .. max_sequences - 1: whose state it has in caches that hold some */
    const int32_t *pages; /* page table of the sequence: page of position p is pages[p / page_tokens] */
} tp_segment;

/* Everything that varies from step to step. */
typedef struct tp_step {
    int32_t rows;             /* live rows; launch lists are planned for at least as many */
    int32_t segments;
    int32_t out_rows;         /* rows whose logits are wanted */
    int32_t reserved;
    const int32_t *tokens;    /* [rows] token ids */
    const int32_t *positions; /* [rows] position of each row in its sequence */
    const int32_t *row_segment; /* [rows] segment of each row */
    const tp_segment *segment;  /* [segments] */
    const int32_t *out_row;     /* [out_rows] row indices, ascending */
} tp_step;

/* A kernel is split into tasks that any thread may run in any order; tasks write disjoint bytes, so results do not
 * depend on the number of threads. `scratch` is thread-private, TP_SCRATCH bytes, 64-byte aligned.
 *
 * A kernel may have phases: while tasks() adds TP_MORE to its count it is called again, by one thread, when those tasks
 * are done. From its second call on it may wait for other processes, which a task never does. A negative count, minus
 * a code of the engine, ends the step. */
#define TP_MORE (1 << 30)
typedef struct tp_kernel {
    const char *name;
    int (*tasks)(const tp_launch *, const tp_step *);
    void (*run)(const tp_launch *, const tp_step *, int task, void *scratch);
} tp_kernel;

#define TP_SCRATCH (256 * 1024)
#define TP_FEW_PAIRS 64 /* pairs of row and expert whose results are summed up in a launch of their own */

/* Quantized activations ("x8"): K values of up to `cap` rows in groups of 32, G = ceil(K / 32). For group g, row t:
 *   codes  int8  [G][cap][32]   round(x / scale), |code| <= 127
 *   scale  float [G][cap]       max|x| / 127
 *   sums   int32 [G][cap][2]    sums of codes 0..15 and 16..31
 * one array behind the other; codes start 64-byte aligned.
 *
 * With two terms, rows 2t and 2t + 1 hold row t: the second is what the first leaves over, quantized in the same way, so
 * that their sum has about 15 bits. `cap` then counts both. */
static inline const int8_t *tp_x8_codes(const void *x, int64_t g, int64_t cap) { return (const int8_t *)x + g * cap * 32; }
static inline const float *tp_x8_scale(const void *x, int64_t groups, int64_t g, int64_t cap) {
    return (const float *)((const char *)x + groups * cap * 32) + g * cap;
}
static inline const int32_t *tp_x8_sums(const void *x, int64_t groups, int64_t g, int64_t cap) {
    return (const int32_t *)((const char *)x + groups * cap * 36) + g * cap * 2;
}
#define TP_X8_BYTES(groups, cap) ((int64_t)(groups) * (cap) * 44)

#define TP_PTR(type, l, i) ((type *)(intptr_t)(l)->arg[i])
static inline float tp_float(const tp_launch *l, int i) { union { int64_t i; double d; } u = { l->arg[i] }; return (float)u.d; }

#endif
