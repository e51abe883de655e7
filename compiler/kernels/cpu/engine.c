/* The step engine: runs launch lists on its own threads.
 *
 * A launch is cut into tasks. One 64-bit word holds the launch's sequence number, how many tasks it has and the next
 * free one, so a thread claims a task with one fetch_add and can never take one of another launch by mistake. Whoever
 * finishes the last task of a launch advances the list: it runs the following launches that have a single task itself
 * and publishes the next one that has more. So nobody waits at a barrier for a thread that holds no task, and a worker
 * that the system has descheduled delays nothing unless it holds a task.
 *
 * If it does, the calling thread goes to sleep, which gives its core to that worker, and the next steps run on the
 * calling thread alone; how long, doubles while stalls come back. */
#define _GNU_SOURCE
#include "engine.h"

#include <immintrin.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define HIDDEN extern __attribute__((visibility("hidden")))
HIDDEN const tp_kernel *const tp_kernels[];
HIDDEN const int tp_kernel_count;

#define TASK_BITS 20
#define NEXT_BITS 22 /* room for every thread to overshoot */
#define TASK_LIMIT ((1 << TASK_BITS) - 1)
#define MAX_THREADS 1024

#define MICROSECOND INT64_C(1000) /* times are in nanoseconds */
#define SPIN_TIME (30 * MICROSECOND)          /* busy waiting before a worker offers its core with each look */
#define WORKER_PATIENCE (1000 * MICROSECOND)  /* then it sleeps; consecutive decode steps come sooner */
#define CALLER_PATIENCE (120 * MICROSECOND)   /* the caller sleeps sooner: a descheduled worker needs its core */
#define STALL_TIME (300 * MICROSECOND)        /* waiting longer than this for a held task counts as a stall */
#define STALL_ROWS 32                         /* steps of more rows have tasks this long of their own */
#define SOLO_FIRST (12000 * MICROSECOND)      /* how long to go alone after a first stall */
#define SOLO_AGAIN (40000 * MICROSECOND)      /* twice as long if the next stall comes so soon after it */
#define SOLO_LAST (1600000 * MICROSECOND)     /* and at most */

typedef struct worker {
    tp_engine *engine;
    void *scratch;
    pthread_t thread;
} worker;

struct tp_engine {
    _Alignas(64) _Atomic uint64_t claim;
    _Alignas(64) _Atomic int32_t finished; /* tasks of the published launch that are done */
    _Alignas(64) _Atomic int32_t sleepers;
    _Atomic uint32_t epoch; /* futex: moves when sleepers should look again */
    _Atomic int32_t quit;
    _Atomic int32_t running; /* a run is under way */
    /* Written by whoever advances the list, read by holders of a task. */
    _Alignas(64) const tp_launch *launch;
    const tp_step *step;
    uint32_t sequence;
    int next; /* launch that the list continues with */
    int again; /* that launch goes on: its tasks() may wait for other processes */
    int code;  /* what ended the list early */
    int64_t waited; /* for other processes */
    /* The list of this run. */
    const tp_launch *body, *head;
    int n_body, n_head;
    const tp_step *body_step;
    tp_step head_step;
    /* Belongs to the caller. */
    int threads;
    int pid;
    int64_t solo_until, solo_time;
    worker workers[];
};

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static uint64_t packed(uint32_t sequence, int tasks) {
    return (uint64_t)sequence << (TASK_BITS + NEXT_BITS) | (uint64_t)tasks << NEXT_BITS;
}

static int task_count(uint64_t claim) { return (int)(claim >> NEXT_BITS) & TASK_LIMIT; }
static int next_task(uint64_t claim) { return (int)(claim & ((1u << NEXT_BITS) - 1)); }
static int has_work(uint64_t claim) { return next_task(claim) < task_count(claim); }

static void wake_sleepers(tp_engine *e) {
    if (atomic_load(&e->sleepers) == 0) return;
    atomic_fetch_add(&e->epoch, 1);
    syscall(SYS_futex, &e->epoch, FUTEX_WAKE_PRIVATE, MAX_THREADS, NULL, NULL, 0);
}

static void run_alone(const tp_kernel *kernel, const tp_launch *launch, const tp_step *step, int tasks, void *scratch) {
    for (int task = 0; task < tasks; task++) kernel->run(launch, step, task, scratch);
}

/* Tasks of the next phase of a launch; e->again says whether another follows. */
static int begin(tp_engine *e, const tp_kernel *kernel, const tp_launch *launch, const tp_step *step) {
    const int64_t since = e->again ? now() : 0;
    const int tasks = kernel->tasks(launch, step);
    if (e->again) e->waited += now() - since;
    e->again = tasks > 0 && (tasks & TP_MORE);
    return tasks > 0 ? tasks & ~TP_MORE : tasks;
}

/* Goes on with the list until a launch is worth sharing or the list ends. Called by one thread at a time. */
static void advance(tp_engine *e, void *scratch, int solo) {
    const int count = e->n_body + e->n_head;
    for (int i = e->next; i < count; i += !e->again) {
        const int in_body = i < e->n_body;
        const tp_launch *launch = in_body ? &e->body[i] : &e->head[i - e->n_body];
        const tp_step *step = in_body ? e->body_step : &e->head_step;
        const tp_kernel *kernel = tp_kernels[launch->kernel];
        const int tasks = begin(e, kernel, launch, step);
        if (tasks < 0) {
            e->code = -tasks;
            break;
        }
        if (solo || tasks == 1 || tasks > TASK_LIMIT) {
            run_alone(kernel, launch, step, tasks, scratch);
        } else if (tasks > 1) {
            e->launch = launch;
            e->step = step;
            e->next = i + !e->again;
            e->sequence += 1;
            atomic_store_explicit(&e->finished, 0, memory_order_relaxed);
            atomic_store(&e->claim, packed(e->sequence, tasks));
            wake_sleepers(e);
            return;
        }
    }
    e->next = count;
    atomic_store(&e->running, 0);
    wake_sleepers(e);
}

/* Takes part in the published launch until it has no free task; then, if the last finished, advances. */
static void take_part(tp_engine *e, void *scratch) {
    uint64_t claim = atomic_load_explicit(&e->claim, memory_order_relaxed);
    int mine = 0, tasks = 0;
    while (has_work(claim)) {
        claim = atomic_fetch_add_explicit(&e->claim, 1, memory_order_acq_rel);
        if (!has_work(claim)) break;
        tasks = task_count(claim);
        const tp_launch *launch = e->launch;
        tp_kernels[launch->kernel]->run(launch, e->step, next_task(claim), scratch);
        mine += 1;
        claim += 1;
    }
    if (!mine) return;
    if (atomic_fetch_add_explicit(&e->finished, mine, memory_order_acq_rel) + mine == tasks) advance(e, scratch, 0);
}

/* Sleeps until something is published, unless that has happened since `epoch` was read. */
static void sleep_until_published(tp_engine *e, int caller) {
    const uint32_t epoch = atomic_load(&e->epoch);
    atomic_fetch_add(&e->sleepers, 1);
    const int wanted = has_work(atomic_load(&e->claim)) || (caller ? !atomic_load(&e->running) : atomic_load(&e->quit));
    if (!wanted) syscall(SYS_futex, &e->epoch, FUTEX_WAIT_PRIVATE, epoch, NULL, NULL, 0);
    atomic_fetch_sub(&e->sleepers, 1);
}

/* Looks for work (the caller also for the end) a few times, closely: launches come within microseconds. */
static int spin(tp_engine *e, int caller) {
    for (int i = 0; i < 16; i++) {
        if (has_work(atomic_load_explicit(&e->claim, memory_order_relaxed))) return 1;
        if (caller && !atomic_load_explicit(&e->running, memory_order_relaxed)) return 1;
        _mm_pause();
    }
    return 0;
}

static void *worker_main(void *argument) {
    worker *w = argument;
    tp_engine *e = w->engine;
    int64_t idle_since = now();
    while (!atomic_load_explicit(&e->quit, memory_order_relaxed)) {
        if (has_work(atomic_load_explicit(&e->claim, memory_order_relaxed))) {
            take_part(e, w->scratch);
            idle_since = now();
            continue;
        }
        if (spin(e, 0)) continue;
        const int64_t idle = now() - idle_since;
        if (idle > WORKER_PATIENCE) {
            sleep_until_published(e, 0);
            idle_since = now();
        } else if (idle > SPIN_TIME) {
            sched_yield();
        }
    }
    return NULL;
}

/* The caller's part of a run. Returns the longest time it waited for others. */
static int64_t help_until_done(tp_engine *e) {
    int64_t longest = 0, waiting_since = 0;
    while (atomic_load_explicit(&e->running, memory_order_acquire)) {
        if (has_work(atomic_load_explicit(&e->claim, memory_order_relaxed))) {
            take_part(e, e->workers[0].scratch);
            waiting_since = 0;
            continue;
        }
        if (spin(e, 1)) continue;
        const int64_t time = now();
        if (!waiting_since) waiting_since = time;
        if (time - waiting_since > CALLER_PATIENCE) sleep_until_published(e, 1);
        if (time - waiting_since > longest) longest = time - waiting_since;
    }
    return longest;
}

/* After a stall the caller goes alone for a while: twice as long if the last such while has just ended. */
static void note_stall(tp_engine *e, int64_t waited, int rows) {
    if (waited < STALL_TIME || rows > STALL_ROWS) return;
    const int64_t time = now();
    const int again = e->solo_time && time - e->solo_until < SOLO_AGAIN;
    e->solo_time = again ? 2 * e->solo_time : SOLO_FIRST;
    if (e->solo_time > SOLO_LAST) e->solo_time = SOLO_LAST;
    e->solo_until = time + e->solo_time;
}

static int run_lists(tp_engine *e, const tp_launch *body, int n_body, const tp_launch *head, int n_head,
                     const tp_step *step) {
    for (int i = 0; i < n_body; i++)
        if ((uint32_t)body[i].kernel >= (uint32_t)tp_kernel_count) return TP_BAD_LAUNCH;
    for (int i = 0; i < n_head; i++)
        if ((uint32_t)head[i].kernel >= (uint32_t)tp_kernel_count) return TP_BAD_LAUNCH;
    e->body = body, e->head = head;
    e->n_body = n_body, e->n_head = step->out_rows > 0 ? n_head : 0;
    e->body_step = step;
    e->head_step = *step;
    e->head_step.rows = step->out_rows;
    e->next = e->again = 0;
    e->code = TP_OK;
    e->waited = 0;
    const int solo = e->threads == 1 || now() < e->solo_until;
    atomic_store(&e->running, 1);
    advance(e, e->workers[0].scratch, solo);
    const int64_t waited = help_until_done(e);
    if (!solo) note_stall(e, waited - e->waited, step->rows);
    return e->code;
}

int tp_run(tp_engine *e, const tp_launch *body, int n_body, const tp_launch *head, int n_head, const tp_step *step,
           const float *logits, int vocab, tp_sampling *sampling) {
    int code = run_lists(e, body, n_body, head, n_head, step);
    for (int i = 0; sampling && code == TP_OK && i < step->out_rows; i++)
        code = tp_sample(logits + (int64_t)i * vocab, vocab, &sampling[i]);
    return code;
}

int tp_run_one(tp_engine *e, const tp_launch *launch, const tp_step *step) {
    return run_lists(e, launch, 1, NULL, 0, step);
}

int tp_abi(void) { return TP_ABI; }
int tp_threads(const tp_engine *e) { return e->threads; }
const char *tp_kernel_name(int i) { return i >= 0 && i < tp_kernel_count ? tp_kernels[i]->name : NULL; }

/* Ends the first `started` workers and frees the rest. In a forked child there are no workers to end. */
static void dismantle(tp_engine *e, int started) {
    atomic_store(&e->quit, 1);
    atomic_fetch_add(&e->epoch, 1);
    syscall(SYS_futex, &e->epoch, FUTEX_WAKE_PRIVATE, MAX_THREADS, NULL, NULL, 0);
    for (int i = 1; i < started && e->pid == getpid(); i++) pthread_join(e->workers[i].thread, NULL);
    for (int i = 0; i < e->threads; i++) free(e->workers[i].scratch);
    free(e);
}

tp_engine *tp_open(int threads) {
    if (threads < 1 || threads > MAX_THREADS) return NULL;
    const size_t bytes = sizeof(tp_engine) + (size_t)threads * sizeof(worker);
    void *memory = NULL;
    if (posix_memalign(&memory, 64, bytes)) return NULL;
    memset(memory, 0, bytes);
    tp_engine *e = memory;
    e->threads = threads;
    e->pid = getpid();
    int ok = 1;
    for (int i = 0; i < threads; i++) {
        e->workers[i].engine = e;
        void *scratch = NULL;
        ok = posix_memalign(&scratch, 64, TP_SCRATCH) == 0 && ok;
        e->workers[i].scratch = scratch;
    }
    sigset_t every, before;
    sigfillset(&every); /* signals are for the threads of the program that loads us */
    pthread_sigmask(SIG_SETMASK, &every, &before);
    int started = 1;
    for (; ok && started < threads; started++)
        if (pthread_create(&e->workers[started].thread, NULL, worker_main, &e->workers[started])) break;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (ok && started == threads) return e;
    dismantle(e, started);
    return NULL;
}

void tp_close(tp_engine *e) {
    if (e) dismantle(e, e->threads);
}
