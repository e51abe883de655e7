/* A small program on libllama: llama.cpp's own loader without the sampling and chat code of its tools. Backends are
 * looked for in the folder that LLAMA_BACKENDS names.
 *   llama_probe run    MODEL THREADS CONTEXT COUNT ID...    load, run the ids, print COUNT greedy tokens, one a line
 *   llama_probe logits MODEL THREADS IDS_FILE LOGITS_FILE   int32 ids in, float32 [ids][vocab] out, F16 cache */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ggml-backend.h"
#include "llama.h"

static void quiet(enum ggml_log_level level, const char *text, void *data) {
    (void)data;
    if (level == GGML_LOG_LEVEL_ERROR) fputs(text, stderr);
}

static struct llama_context *open_model(const char *path, int threads, int context, int batch) {
    llama_log_set(quiet, NULL);
    const char *folder = getenv("LLAMA_BACKENDS");
    if (folder) ggml_backend_load_all_from_path(folder);
    else ggml_backend_load_all();
    llama_backend_init();
    struct llama_model *model = llama_model_load_from_file(path, llama_model_default_params());
    if (!model) exit(1);
    struct llama_context_params params = llama_context_default_params();
    params.n_ctx = context;
    params.n_batch = params.n_ubatch = batch;
    params.n_threads = params.n_threads_batch = threads;
    struct llama_context *ctx = llama_init_from_model(model, params);
    if (!ctx) exit(1);
    return ctx;
}

static float *run(struct llama_context *ctx, const int32_t *ids, int count, int position, int all) {
    struct llama_batch batch = llama_batch_init(count, 0, 1);
    batch.n_tokens = count;
    for (int i = 0; i < count; i++) {
        batch.token[i] = ids[i];
        batch.pos[i] = position + i;
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = 0;
        batch.logits[i] = all || i == count - 1;
    }
    if (llama_decode(ctx, batch)) exit(1);
    float *logits = llama_get_logits(ctx);
    llama_batch_free(batch);
    return logits;
}

static int vocab_size(struct llama_context *ctx) {
    return llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(ctx)));
}

static int generate(int argc, char **argv) {
    int count = argc - 6, most = atoi(argv[5]);
    int32_t *ids = malloc(sizeof *ids * count);
    for (int i = 0; i < count; i++) ids[i] = atoi(argv[6 + i]);
    struct llama_context *ctx = open_model(argv[2], atoi(argv[3]), atoi(argv[4]), 512);
    int vocab = vocab_size(ctx);
    for (int done = 0; done < most; done++) {
        float *logits = done ? run(ctx, ids, 1, count + done - 1, 0) : run(ctx, ids, count, 0, 0);
        int best = 0;
        for (int i = 1; i < vocab; i++)
            if (logits[i] > logits[best]) best = i;
        printf("%d\n", best);
        fflush(stdout);
        ids[0] = best;
    }
    return 0;
}

static int all_logits(char **argv) {
    FILE *in = fopen(argv[4], "rb");
    static int32_t ids[8192];
    int count = in ? (int)fread(ids, sizeof *ids, 8192, in) : 0;
    if (!count) return 1;
    struct llama_context *ctx = open_model(argv[2], atoi(argv[3]), count, count);
    float *logits = run(ctx, ids, count, 0, 1);
    FILE *out = fopen(argv[5], "wb");
    if (!out) return 1;
    fwrite(logits, sizeof *logits, (size_t)count * vocab_size(ctx), out);
    return fclose(out);
}

int main(int argc, char **argv) {
    if (argc >= 7 && !strcmp(argv[1], "run")) return generate(argc, argv);
    if (argc == 6 && !strcmp(argv[1], "logits")) return all_logits(argv);
    fputs("usage: llama_probe run MODEL THREADS CONTEXT COUNT ID... | logits MODEL THREADS IDS LOGITS\n", stderr);
    return 2;
}
