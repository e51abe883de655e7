/* The functions a CPU artifact exports. Called through ctypes by the runtime; every other symbol is hidden. */
#ifndef TP_ENGINE_H
#define TP_ENGINE_H
#include "tapeout_cpu.h"

#define TP_API __attribute__((visibility("default")))

/* How to choose one token, and what was chosen. One for each wanted row of a step. */
typedef struct tp_sampling {
    float temperature;    /* 0: the first largest logit, nothing else matters */
    float top_p;          /* keep the fewest tokens that hold this share of the mass; >= 1: all */
    int32_t top_k;        /* keep the k likeliest tokens; 0: all */
    int32_t want_logprob; /* fill logprob: one more pass over the logits */
    uint64_t seed;
    uint64_t position; /* counter of the random stream: the same (seed, position, logits) give the same token */
    int32_t token;     /* out */
    float logprob;     /* out: natural log of the token's probability in the model's distribution (temperature 1) */
} tp_sampling;

typedef struct tp_engine tp_engine;

enum {
    TP_OK = 0,
    TP_BAD_LOGITS = 1, /* the largest logit is NaN or infinite */
    TP_BAD_LAUNCH = 2, /* a launch names a kernel that the library does not hold, or more than a buffer holds */
    /* from 1 << 16 on: another rank ended the run, and why (TP_FAULT of comm.h) */
};

TP_API int tp_abi(void);                    /* TP_ABI of the headers the library was built with */
TP_API const char *tp_kernel_name(int i);   /* name of kernel i of the plan's table; NULL past the end */
TP_API tp_engine *tp_open(int threads);     /* starts threads - 1 workers; NULL if that fails */
TP_API void tp_close(tp_engine *engine);    /* ends the workers and frees all; not while a run is under way */
TP_API int tp_threads(const tp_engine *engine);

/* One step: the launches of `body`; if step->out_rows > 0 those of `head`, with step->rows = step->out_rows; then, if
 * `sampling` is not NULL, one token for each of the out_rows rows of `logits` [out_rows][vocab]. Allocates nothing.
 * Runs of one engine must not overlap. Returns TP_OK or another code above. */
TP_API int tp_run(tp_engine *engine, const tp_launch *body, int n_body, const tp_launch *head, int n_head,
                  const tp_step *step, const float *logits, int vocab, tp_sampling *sampling);

/* One launch, for tracing and for tests. */
TP_API int tp_run_one(tp_engine *engine, const tp_launch *launch, const tp_step *step);

/* Sampling alone. */
TP_API int tp_sample(const float *logits, int vocab, tp_sampling *sampling);

#endif
