/* What the ranks of one machine share, and the barrier between them.
 *
 * Every rank has a buffer for each of two turns in the shared segment. A collective puts its operand into its own
 * buffer of this turn, passes a barrier, and reads the buffers of all. The next collective uses the other turn, so that
 * no barrier is needed after the reading: a rank writes the buffers of this turn again in the collective after the next
 * one, which it reaches only through the next one's barrier, where every rank has come when it had read what it wanted.
 *
 * The same layout stands in runtime/ranks/segment.py. */
#ifndef TP_COMM_H
#define TP_COMM_H
#define _GNU_SOURCE
#include "engine.h"
#include "tp_math.h"

#include <errno.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { TP_RANK_ABSENT, TP_RANK_HERE, TP_RANK_IDLE, TP_RANK_LEFT };   /* tp_rank.state */
enum { TP_FAULT_LATE = 2, TP_FAULT_LEFT = 3, TP_FAULT_DIFFERS = 4 }; /* the others are the runtime's */
#define TP_FAULT(reason, rank) ((reason) << 16 | (rank)) /* tp_shared.fault, and the engine's code: above all others */

typedef struct tp_rank { /* 1,024 bytes; written by this rank alone, but for `sleepers` */
    _Alignas(64) _Atomic uint32_t arrived; /* futex: number of the last barrier that the rank has come to */
    _Atomic uint32_t sleepers;             /* ranks that may sleep on it */
    uint64_t brought[2];                   /* with which shape, by the barrier's parity */
    _Alignas(64) _Atomic uint32_t state;
    char runtime[956]; /* heartbeat, digest and message: not for kernels */
} tp_rank;

typedef struct tp_shared {
    uint32_t magic, version, ranks;
    _Atomic uint32_t fault; /* 0, or why the run is over */
    uint64_t buffer_bytes;  /* of one rank and turn; a multiple of 64 */
    uint64_t data;          /* where the buffers start: [2][ranks][buffer_bytes] */
    char runtime[992];
    tp_rank rank[];
} tp_shared;

/* Of one rank, in its own memory: what the argument `comm` points at. */
typedef struct tp_comm {
    tp_shared *shared;
    int32_t rank, ranks;
    uint32_t barriers; /* passed or waited at */
    uint32_t turn;     /* counts collectives */
    int32_t phase;     /* of the collective under way */
    int32_t patience;  /* in ticks: how long the others may wait for a rank that is not idle */
    int64_t spin;      /* nanoseconds of busy waiting */
} tp_comm;

#define TICK_NS 100000000 /* a sleeper looks around this often */
#define YIELD_NS 2000     /* of busy waiting before the core is offered with each look: a peer may need it */

/* Floats between the buffers of two ranks. */
static int64_t tp_stride(const tp_comm *c) { return (int64_t)(c->shared->buffer_bytes / sizeof(float)); }

/* What a rank brings to the collective under way. */
static float *tp_buffer(const tp_comm *c, int rank) {
    return (float *)((char *)c->shared + c->shared->data) + ((int64_t)(c->turn & 1) * c->ranks + rank) * tp_stride(c);
}

static int64_t tp_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static int tp_has_come(tp_rank *peer, uint32_t barrier) {
    return (int32_t)(atomic_load_explicit(&peer->arrived, memory_order_acquire) - barrier) >= 0;
}

/* The first fault stays. */
static int tp_fault(tp_comm *c, uint32_t fault) {
    uint32_t none = 0;
    return (int)(atomic_compare_exchange_strong(&c->shared->fault, &none, fault) ? fault : none);
}

static int tp_spin(tp_comm *c, tp_rank *peer, uint32_t barrier) {
    for (int64_t since = 0, waited = 0; waited <= c->spin; waited = tp_now() - since) {
        for (int i = 0; i < 32; i++) {
            if (tp_has_come(peer, barrier)) return 1;
            _mm_pause();
        }
        if (!since) since = tp_now();
        if (waited > YIELD_NS) sched_yield();
    }
    return 0;
}

/* Returns 0 when the rank has come to the barrier, or the fault that ends the run. A sleeper counts its own ticks
 * instead of reading clocks, so that a machine or a group of processes that was stopped as a whole blames nobody. */
static int tp_wait_for(tp_comm *c, int rank, uint32_t barrier) {
    tp_rank *peer = &c->shared->rank[rank];
    if (tp_spin(c, peer, barrier)) return 0;
    const struct timespec tick = {0, TICK_NS};
    for (int late = 0;;) {
        const uint32_t state = atomic_load(&peer->state); /* before `arrived`: who has left may have come first */
        const uint32_t arrived = atomic_load(&peer->arrived);
        if ((int32_t)(arrived - barrier) >= 0) return 0;
        const uint32_t fault = atomic_load(&c->shared->fault);
        if (fault) return (int)fault;
        if (state == TP_RANK_LEFT) return tp_fault(c, TP_FAULT(TP_FAULT_LEFT, (uint32_t)rank));
        if (late >= c->patience) return tp_fault(c, TP_FAULT(TP_FAULT_LATE, (uint32_t)rank));
        atomic_fetch_add(&peer->sleepers, 1);
        const int woken = !syscall(SYS_futex, &peer->arrived, FUTEX_WAIT, arrived, &tick, NULL, 0) || errno != ETIMEDOUT;
        atomic_fetch_sub(&peer->sleepers, 1);
        late = state == TP_RANK_IDLE ? 0 : late + !woken; /* a signal, or a rank that came, is no tick */
    }
}

/* Waits for all ranks, each with an operand of this shape; afterwards what they wrote before can be read. Returns 0, or
 * the fault that ended the run. A rank says that it has come before it waits, so only who is missing can be blamed. */
static int tp_barrier(tp_comm *c, uint64_t shape) {
    const uint32_t over = atomic_load_explicit(&c->shared->fault, memory_order_relaxed), barrier = ++c->barriers;
    if (over) return (int)over;
    tp_rank *own = &c->shared->rank[c->rank];
    own->brought[barrier & 1] = shape;    /* the other word may still be read by who is at the barrier before */
    atomic_store(&own->arrived, barrier); /* sequentially consistent: before the look at sleepers */
    if (atomic_load(&own->sleepers)) syscall(SYS_futex, &own->arrived, FUTEX_WAKE, c->ranks, NULL, NULL, 0);
    for (int i = 1; i < c->ranks; i++) {
        const int rank = (c->rank + i) % c->ranks;
        const int fault = tp_wait_for(c, rank, barrier);
        if (fault) return fault;
        if (c->shared->rank[rank].brought[barrier & 1] != shape)
            return tp_fault(c, TP_FAULT(TP_FAULT_DIFFERS, (uint32_t)tp_max(rank, c->rank)));
    }
    return 0;
}
#endif
