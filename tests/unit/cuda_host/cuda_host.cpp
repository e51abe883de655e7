/* The scheduler of the host emulation: fibers, barriers, collectives, delayed copies. One kernel a library. */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define TP_HOST_SCHEDULER
#include "cuda_host.h"

#define API extern "C" __attribute__((visibility("default")))
#define MAX_THREADS 1024
#define MAX_CLUSTER 64 /* blocks that run together */
#define MAX_IDLE_ROUNDS 1000 /* in which all that runs polls in vain */
#define MAX_FIBERS (MAX_CLUSTER * MAX_THREADS)
#define STACK (128 << 10)
#define SHARED_MAX (228 << 10)
#define GUARD 4096

extern "C" {
extern char __start_tp_shared[] __attribute__((weak, visibility("hidden")));
extern char __stop_tp_shared[] __attribute__((weak, visibility("hidden")));
void tp_host_main(void *const *arguments);
void tp_host_switch(void **save, void *load);
}

/* Callee-saved registers go to the stack that is left and come from the one that is entered. */
__asm__(".text\n.globl tp_host_switch\n.hidden tp_host_switch\n.type tp_host_switch,@function\ntp_host_switch:\n"
        "push %rbp\npush %rbx\npush %r12\npush %r13\npush %r14\npush %r15\n"
        "mov %rsp, (%rdi)\nmov %rsi, %rsp\n"
        "pop %r15\npop %r14\npop %r13\npop %r12\npop %rbx\npop %rbp\nret\n"
        ".size tp_host_switch, .-tp_host_switch\n");

enum state { READY, AT_BLOCK, AT_NAMED, AT_WARP, AT_MBARRIER, AT_GRID, AT_CLUSTER, AT_POLL, DONE };

struct copy {
    void *to;
    const void *from;
    int bytes, group; /* group: of cp.async */
    void *barrier;    /* of a bulk copy */
    int thread;
};

struct fiber {
    void *stack_pointer;
    int state, waits_named, named, parity;
    unsigned mask;
    int operation, source, groups, waited;
    unsigned long long value;
    void *barrier;
};

struct mbarrier {
    unsigned expected : 12, pending : 12, phase : 8;
    int bytes;
};

extern "C" {
uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;
}

/* The state of a block's barriers. The blocks of a cluster, or all that wait for one another, run together. */
struct block {
    int live, at_barrier, votes, vote_kind, vote_result;
    int named_arrived[16], named_wanted[16];
};

static char *dynamic_shared; /* SHARED_MAX + GUARD bytes a block */
static fiber fibers[MAX_FIBERS];
static block blocks[MAX_CLUSTER];
static char *stacks;
static int stack_count, ready[MAX_FIBERS], ready_count, current, threads, cluster, all_threads, live, at_cluster;
static void *scheduler;
static void *const *arguments;
static unsigned long long random_state;
static int is_random, dependent, moved; /* moved: some thread did more than poll since the last round of polls */
static copy *copies;
static int copy_count, copy_room;
static char message[512];
static sigjmp_buf failed;
static const unsigned long long *late; /* triples to, from, bytes, ended by 0: filled in at the first grid wait */

static int below(int n) {
    random_state = random_state * 6364136223846793005ull + 1442695040888963407ull;
    return (int)((random_state >> 33) % (unsigned long long)n);
}

static void fail(const char *format, ...) {
    char text[400];
    va_list list;
    va_start(list, format);
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    const uint3 b = blockIdx;
    snprintf(message, sizeof message, "block (%u, %u, %u), thread %d: %s", b.x, b.y, b.z, current % threads, text);
    siglongjmp(failed, 1);
}

extern "C" void tp_host_fail(const char *why) { fail("%s", why); }

static void on_signal(int signal) {
    fail(signal == SIGALRM ? "the kernel did not end in time" : "the kernel made a bad access (signal %d)", signal);
}

static void leave(void) { tp_host_switch(&fibers[current].stack_pointer, scheduler); }

static void wake(int i) {
    fibers[i].state = READY;
    ready[ready_count++] = i;
}

extern "C" void tp_host_yield(void) {
    if (!is_random) return;
    wake(current);
    leave();
}

/* Until others had their turn. */
extern "C" void tp_host_poll(void) {
    if (is_random && below(2)) return tp_host_yield();
    fibers[current].state = AT_POLL;
    leave();
}

static void start(void) {
    tp_host_main(arguments);
    fibers[current].state = DONE;
    if (dependent && !fibers[current].waited) fail("ended without tp_wait()");
    leave();
    __builtin_unreachable();
}

/* Barriers of the block. Threads that have ended do not count, as on the device. */
static void release_block(int rank) {
    block *b = &blocks[rank];
    if (!b->at_barrier || b->at_barrier < b->live) return;
    b->vote_result = b->vote_kind == 0 ? b->votes : b->vote_kind == 1 ? b->votes == b->at_barrier : b->votes != 0;
    b->at_barrier = 0;
    for (int i = rank * threads; i < (rank + 1) * threads; i++)
        if (fibers[i].state == AT_BLOCK) wake(i);
}

extern "C" void tp_host_block_barrier(void) { tp_host_vote(0, 0); }

extern "C" int tp_host_vote(int predicate, int how) {
    const int rank = current / threads;
    block *b = &blocks[rank];
    if (b->at_barrier == 0) b->votes = 0;
    if (b->at_barrier && b->vote_kind != how) fail("the threads of the block are at different kinds of barrier");
    b->vote_kind = how;
    b->votes += predicate != 0;
    b->at_barrier++;
    fibers[current].state = AT_BLOCK;
    release_block(rank);
    leave();
    return b->vote_result;
}

extern "C" void tp_host_named_barrier(int id, int count, int waits) {
    const int rank = current / threads;
    block *b = &blocks[rank];
    if (id < 0 || id > 15 || count % 32) fail("bad named barrier %d of %d threads", id, count);
    if (b->named_arrived[id] && b->named_wanted[id] != count)
        fail("named barrier %d is used with %d and %d threads", id, b->named_wanted[id], count);
    b->named_wanted[id] = count;
    b->named_arrived[id]++;
    if (waits) fibers[current].state = AT_NAMED, fibers[current].named = id;
    if (b->named_arrived[id] == count) {
        b->named_arrived[id] = 0;
        for (int i = rank * threads; i < (rank + 1) * threads; i++)
            if (fibers[i].state == AT_NAMED && fibers[i].named == id) wake(i);
    }
    if (waits) leave();
}

/* The barrier of the cluster. */
static void release_cluster(void) {
    if (!at_cluster || at_cluster < live) return;
    at_cluster = 0;
    for (int i = 0; i < all_threads; i++)
        if (fibers[i].state == AT_CLUSTER) wake(i);
}

extern "C" void tp_host_cluster_barrier(void) {
    at_cluster++;
    fibers[current].state = AT_CLUSTER;
    release_cluster();
    leave();
}

static char *shared_of(int rank) { return dynamic_shared + (size_t)rank * (SHARED_MAX + GUARD); }

extern "C" void *tp_host_peer(void *shared, int rank) {
    const long long offset = (char *)shared - shared_of(current / threads);
    if (offset < 0 || offset >= SHARED_MAX) fail("only dynamic shared memory can be reached from another block");
    if (rank < 0 || rank >= cluster) fail("block %d of a cluster of %d", rank, cluster);
    return shared_of(rank) + offset;
}

/* Collectives of a warp: the last of the lanes to arrive computes the results of all. */
static unsigned long long combine(int operation, unsigned mask, const fiber *lanes) {
    unsigned long long out = 0;
    int first = 1;
    for (int i = 0; i < 32; i++) {
        if (!(mask >> i & 1)) continue;
        const unsigned v = (unsigned)lanes[i].value, a = (unsigned)out;
        if (operation == TP_WARP_BALLOT) out |= (unsigned long long)(v != 0) << i;
        else if (first) out = v;
        else if (operation == TP_WARP_ADD) out = a + v;
        else if (operation == TP_WARP_MIN) out = a < v ? a : v;
        else if (operation == TP_WARP_MAX) out = a > v ? a : v;
        else if (operation == TP_WARP_IMIN) out = (int)a < (int)v ? a : v;
        else if (operation == TP_WARP_IMAX) out = (int)a > (int)v ? a : v;
        else if (operation == TP_WARP_AND) out = a & v;
        else if (operation == TP_WARP_OR) out = a | v;
        else if (operation == TP_WARP_XOR) out = a ^ v;
        first = 0;
    }
    return out;
}

static unsigned long long result_of(int operation, unsigned mask, const fiber *lanes, int lane,
                                    unsigned long long all) {
    if (operation == TP_WARP_SHUFFLE) {
        const int source = lanes[lane].source;
        return source >= 0 && source < 32 && (mask >> source & 1) ? lanes[source].value : 0xfefefefefefefefeull;
    }
    if (operation != TP_WARP_MATCH) return all;
    unsigned out = 0;
    for (int i = 0; i < 32; i++) out |= (unsigned)(mask >> i & 1 && lanes[i].value == lanes[lane].value) << i;
    return out;
}

extern "C" unsigned long long tp_host_warp(int operation, unsigned mask, unsigned long long value, int source) {
    fiber *self = &fibers[current], *lanes = &fibers[current & ~31];
    if (!(mask >> (current & 31) & 1)) fail("is not in the mask %08x of its warp's collective", mask);
    if (threads - (current % threads & ~31) < 32) mask &= (1u << (threads & 31)) - 1;
    self->state = AT_WARP, self->mask = mask, self->operation = operation, self->value = value, self->source = source;
    for (int i = 0; i < 32; i++) {
        if (!(mask >> i & 1)) continue;
        if (lanes[i].state == DONE) fail("waits in a collective of its warp for lane %d, which has ended", i);
        if (lanes[i].state != AT_WARP || lanes[i].mask != mask) goto wait;
        if (lanes[i].operation != operation) fail("meets lane %d of its warp at another collective", i);
    }
    {
        unsigned long long all = combine(operation, mask, lanes), out[32];
        for (int i = 0; i < 32; i++)
            if (mask >> i & 1) out[i] = result_of(operation, mask, lanes, i, all);
        for (int i = 0; i < 32; i++)
            if (mask >> i & 1) lanes[i].value = out[i], wake((current & ~31) + i);
    }
wait:
    leave();
    return self->value;
}

/* mbarrier and the copies that complete on it. */
static void complete_phase(mbarrier *b, void *at) {
    if (b->pending || b->bytes) return;
    b->pending = b->expected;
    b->phase ^= 1;
    for (int i = 0; i < all_threads; i++)
        if (fibers[i].state == AT_MBARRIER && fibers[i].barrier == at && fibers[i].parity != (int)b->phase) wake(i);
}

extern "C" void tp_host_mbarrier_init(void *at, int arrivals) {
    mbarrier *b = (mbarrier *)at;
    if ((size_t)at % 8) fail("an mbarrier is not on 8 bytes");
    b->expected = b->pending = (unsigned)arrivals, b->phase = 0, b->bytes = 0;
}

extern "C" void tp_host_mbarrier_expect(void *at, int bytes) { ((mbarrier *)at)->bytes += bytes; }

extern "C" void tp_host_mbarrier_arrive(void *at, int expected) {
    mbarrier *b = (mbarrier *)at;
    if (!b->pending || b->expected > 1024) fail("an arrival too many, or an mbarrier that nobody set up");
    b->bytes += expected;
    b->pending--;
    complete_phase(b, at);
}

static void flush(void *barrier) {
    for (int i = 0; i < copy_count; i++) {
        if (copies[i].barrier != barrier) continue;
        const copy c = copies[i];
        copies[i--] = copies[--copy_count];
        memcpy(c.to, c.from, (size_t)c.bytes);
        mbarrier *b = (mbarrier *)barrier;
        b->bytes -= c.bytes;
        complete_phase(b, barrier);
    }
}

extern "C" int tp_host_mbarrier_test(void *at, int parity) {
    mbarrier *b = (mbarrier *)at;
    if (b->expected == 0 || b->expected > 1024) fail("waits at an mbarrier that nobody set up");
    if ((int)b->phase == parity) flush(at);
    return (int)b->phase != parity;
}

extern "C" void tp_host_mbarrier_wait(void *at, int parity) {
    if (tp_host_mbarrier_test(at, parity)) return;
    fibers[current].state = AT_MBARRIER, fibers[current].barrier = at, fibers[current].parity = parity;
    leave();
}

static void queue(copy c) {
    if (copy_count == copy_room) {
        copy_room = copy_room ? 2 * copy_room : 1024;
        copies = (copy *)realloc(copies, (size_t)copy_room * sizeof *copies);
    }
    copies[copy_count++] = c;
}

extern "C" void tp_host_bulk_copy(void *to, const void *from, int bytes, void *barrier) {
    if ((size_t)to % 16 || (size_t)from % 16 || bytes % 16 || bytes <= 0)
        fail("a bulk copy of %d bytes is not on 16 bytes", bytes);
    queue({to, from, bytes, 0, barrier, current});
    for (int i = 0; i < all_threads; i++) /* somebody waits already */
        if (fibers[i].state == AT_MBARRIER && fibers[i].barrier == barrier) return flush(barrier);
}

extern "C" void tp_host_copy_async(void *to, const void *from, int bytes) {
    if ((size_t)to % (size_t)bytes || (size_t)from % (size_t)bytes)
        fail("an async copy of %d bytes is not aligned", bytes);
    queue({to, from, bytes, fibers[current].groups, 0, current});
}

extern "C" void tp_host_copy_commit(void) { fibers[current].groups++; }

extern "C" void tp_host_copy_wait(int pending) {
    const int done = fibers[current].groups - pending;
    for (int i = 0; i < copy_count; i++) {
        const copy c = copies[i];
        if (c.barrier || c.thread != current || c.group >= done) continue;
        copies[i--] = copies[--copy_count];
        memcpy(c.to, c.from, (size_t)c.bytes);
    }
}

extern "C" void *tp_host_dynamic_shared(void) { return shared_of(current / threads); }

/* As late as can be: only when no other thread of the cluster can go on. */
extern "C" void tp_host_grid_wait(void) {
    if (!dependent) return;
    fibers[current].waited = 1;
    fibers[current].state = AT_GRID;
    leave();
}

static int release_grid(void) {
    int any = 0;
    for (int i = all_threads; i-- > 0;)
        if (fibers[i].state == AT_GRID) wake(i), any = 1;
    if (any && late) {
        for (; *late; late += 3) memcpy((void *)late[0], (const void *)late[1], late[2]);
        late = 0;
    }
    return any;
}

static int release_polls(void) {
    static int rounds;
    int any = 0;
    rounds = moved ? 0 : rounds + 1, moved = 0;
    for (int i = all_threads; i-- > 0 && rounds < MAX_IDLE_ROUNDS;)
        if (fibers[i].state == AT_POLL) wake(i), any = 1;
    return any;
}

static void deadlock(void) {
    int counts[DONE + 1] = {0};
    for (int i = 0; i < all_threads; i++) counts[fibers[i].state]++;
    for (current = 0; current < all_threads && fibers[current].state == DONE;) current++;
    fail("deadlock: %d threads wait at __syncthreads, %d at a named barrier, %d at a collective of their warp, "
         "%d at an mbarrier, %d at the barrier of the cluster, %d poll; %d have ended",
         counts[AT_BLOCK], counts[AT_NAMED], counts[AT_WARP], counts[AT_MBARRIER], counts[AT_CLUSTER], counts[AT_POLL],
         counts[DONE]);
}

/* Runs the blocks of a cluster, which lie along x from blockIdx on. */
static void run_cluster(int shared) {
    const unsigned first = blockIdx.x;
    for (int rank = 0; rank < cluster; rank++) memset(shared_of(rank), 0xff, (size_t)shared + GUARD);
    if (__start_tp_shared) {
        if (cluster > 1) fail("the shared memory of a cluster must be dynamic");
        memset(__start_tp_shared, 0xff, (size_t)(__stop_tp_shared - __start_tp_shared));
    }
    memset(blocks, 0, sizeof blocks);
    for (int rank = 0; rank < cluster; rank++) blocks[rank].live = threads;
    ready_count = at_cluster = 0;
    live = all_threads;
    for (int i = all_threads; i-- > 0;) {
        void **top = (void **)(stacks + (size_t)(i + 1) * STACK - 64);
        memset(&fibers[i], 0, sizeof fibers[i]);
        top[0] = (void *)start; /* entered by ret, with the stack as after a call */
        fibers[i].stack_pointer = top - 6;
        wake(i);
    }
    while (live) {
        if (!ready_count && !release_grid() && !release_polls()) deadlock();
        const int at = is_random ? below(ready_count) : ready_count - 1;
        current = ready[at];
        ready[at] = ready[--ready_count];
        const int rank = current / threads;
        threadIdx.x = (unsigned)(current % threads), blockIdx.x = first + (unsigned)rank;
        tp_host_switch(&scheduler, fibers[current].stack_pointer);
        moved |= fibers[current].state != AT_POLL;
        if (fibers[current].state == DONE) live--, blocks[rank].live--, release_block(rank), release_cluster();
    }
    for (int i = 0; i < copy_count; i++) fail("a copy of %d bytes was never waited for", copies[i].bytes);
    for (int rank = 0; rank < cluster; rank++)
        for (int i = 0; i < GUARD; i++)
            if (shared_of(rank)[shared + i] != (char)0xff)
                fail("wrote past its %d bytes of dynamic shared memory", shared);
}

static void run_grid(int shared) {
    const unsigned columns = gridDim.x / (unsigned)cluster, count = columns * gridDim.y * gridDim.z;
    unsigned *order = (unsigned *)malloc(count * sizeof *order);
    for (unsigned i = 0; i < count; i++) {
        const unsigned j = is_random ? (unsigned)below((int)i + 1) : i;
        order[i] = order[j], order[j] = i;
    }
    for (unsigned i = 0; i < count; i++) {
        const unsigned at = order[i];
        blockIdx = {at % columns * (unsigned)cluster, at / columns % gridDim.y, at / columns / gridDim.y};
        run_cluster(shared);
    }
    free(order);
}

/* Runs a whole grid. Returns NULL, or what went wrong. */
API const char *tp_host_run(const unsigned *grid, int block, int shared, void *const *given,
                            const unsigned long long *fill, unsigned long long seed, int seconds, int pdl,
                            int blocks_together) {
    static const int caught[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGALRM};
    struct sigaction before[5], now;
    if (block < 1 || block > MAX_THREADS || shared < 0 || shared > SHARED_MAX)
        return "bad number of threads or shared bytes";
    if (blocks_together < 1 || blocks_together > MAX_CLUSTER || grid[0] % (unsigned)blocks_together)
        return "bad number of blocks in a cluster";
    threads = block, cluster = blocks_together, all_threads = block * blocks_together;
    if (all_threads > stack_count) {
        if (stack_count) munmap(stacks, (size_t)stack_count * STACK);
        else dynamic_shared = (char *)mmap(0, (size_t)MAX_CLUSTER * (SHARED_MAX + GUARD), PROT_READ | PROT_WRITE,
                                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        stack_count = all_threads;
        stacks = (char *)mmap(0, (size_t)all_threads * STACK, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    }
    gridDim = {grid[0], grid[1], grid[2]}, blockDim = {(unsigned)block, 1, 1};
    dependent = pdl, arguments = given, late = fill, copy_count = 0, current = 0;
    random_state = seed * 0x9e3779b97f4a7c15ull + 1, is_random = seed != 0;
    memset(&now, 0, sizeof now);
    now.sa_handler = on_signal;
    now.sa_flags = SA_NODEFER;
    for (int i = 0; i < 5; i++) sigaction(caught[i], &now, &before[i]);
    message[0] = 0;
    if (!pdl)
        for (; late && *late; late += 3) memcpy((void *)late[0], (const void *)late[1], late[2]);
    if (!sigsetjmp(failed, 1)) {
        alarm((unsigned)seconds);
        run_grid(shared);
    }
    alarm(0);
    for (int i = 0; i < 5; i++) sigaction(caught[i], &before[i], 0);
    return message[0] ? message : 0;
}
