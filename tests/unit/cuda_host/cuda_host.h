/* CUDA C++ on a CPU, for tests: the built-in types, variables and functions that our kernels use, without libc headers.
 *
 * The threads of a block are fibers of one operating system thread (cuda_host.cpp). They switch at barriers, at
 * collectives of a warp, at waits and, when the order is random, at atomics. Clusters of blocks run one after the
 * other, so a kernel that waits for a block of another cluster does not end here: then all of a grid are to be one.
 * `tp_host_*` are the twins of what tapeout.cuh writes as PTX. */
#ifndef TP_CUDA_HOST_H
#define TP_CUDA_HOST_H
#ifndef TP_HOST
#define TP_HOST 1
#endif

typedef decltype(sizeof(0)) size_t;

#define __global__
#define __device__
#define __host__
#define __constant__ static const
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
#define __grid_constant__
#define __cluster_dims__(...) /* the host's run() is told */
/* Filled with 0xFF before every block. Dynamic shared memory: tp_host_dynamic_shared(). */
#define __shared__ static __attribute__((section("tp_shared"), used))

#define TP_VECTOR(name, type, bytes)                                                                                   \
    struct __align__(2 * bytes) name##2 {                                                                              \
        type x, y;                                                                                                     \
    };                                                                                                                 \
    struct name##3 {                                                                                                   \
        type x, y, z;                                                                                                  \
    };                                                                                                                 \
    struct __align__(4 * bytes > 16 ? 16 : 4 * bytes) name##4 {                                                        \
        type x, y, z, w;                                                                                               \
    };                                                                                                                 \
    static inline name##2 make_##name##2(type x, type y) { return {x, y}; }                                            \
    static inline name##3 make_##name##3(type x, type y, type z) { return {x, y, z}; }                                 \
    static inline name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }
TP_VECTOR(char, signed char, 1)
TP_VECTOR(uchar, unsigned char, 1)
TP_VECTOR(short, short, 2)
TP_VECTOR(ushort, unsigned short, 2)
TP_VECTOR(int, int, 4)
TP_VECTOR(uint, unsigned, 4)
TP_VECTOR(float, float, 4)
TP_VECTOR(double, double, 8)
TP_VECTOR(longlong, long long, 8)
TP_VECTOR(ulonglong, unsigned long long, 8)
#undef TP_VECTOR
typedef uint3 dim3;

extern "C" {
extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

void tp_host_block_barrier(void);
void tp_host_named_barrier(int id, int threads, int waits); /* bar.sync (waits = 1) or bar.arrive (0) */
int tp_host_vote(int predicate, int how);                   /* __syncthreads_count (0), _and (1), _or (2) */
enum { TP_WARP_SYNC, TP_WARP_SHUFFLE, TP_WARP_BALLOT, TP_WARP_ADD, TP_WARP_MIN, TP_WARP_MAX, TP_WARP_IMIN,
       TP_WARP_IMAX, TP_WARP_AND, TP_WARP_OR, TP_WARP_XOR, TP_WARP_MATCH };
unsigned long long tp_host_warp(int operation, unsigned mask, unsigned long long value, int source);
void tp_host_yield(void); /* lets another thread run, when the order is random */
void tp_host_poll(void);  /* lets all others run: what this thread waits for is not there yet */
void tp_host_fail(const char *why);

void tp_host_cluster_barrier(void);                        /* barrier.cluster.arrive and wait in one */
void *tp_host_peer(void *shared, int rank);                /* mapa: the same variable of another block */
void tp_host_grid_wait(void);                              /* griddepcontrol.wait */
void *tp_host_dynamic_shared(void);                        /* 128-byte aligned */
void tp_host_mbarrier_init(void *barrier, int arrivals);   /* 8 bytes of shared memory */
void tp_host_mbarrier_arrive(void *barrier, int expected); /* arrive, and expect so many bytes (0: none) */
void tp_host_mbarrier_expect(void *barrier, int bytes);    /* expect without arriving */
void tp_host_mbarrier_wait(void *barrier, int parity);     /* until the phase of this parity has completed */
int tp_host_mbarrier_test(void *barrier, int parity);
void tp_host_bulk_copy(void *to, const void *from, int bytes, void *barrier); /* done when somebody waits for it */
void tp_host_copy_async(void *to, const void *from, int bytes);               /* cp.async; done at the wait */
void tp_host_copy_commit(void);
void tp_host_copy_wait(int pending); /* cp.async.wait_group */

float expf(float), exp2f(float), logf(float), log2f(float), sinf(float), cosf(float), tanhf(float), powf(float, float),
    erff(float), expm1f(float), log1pf(float);
double exp(double), log(double), sin(double), cos(double), pow(double, double);
}

#define warpSize 32
#define tp_host_lane() ((int)(threadIdx.x & 31)) /* blocks are one-dimensional */
static inline void __syncthreads() { tp_host_block_barrier(); }
static inline int __syncthreads_count(int p) { return tp_host_vote(p, 0); }
static inline int __syncthreads_and(int p) { return tp_host_vote(p, 1); }
static inline int __syncthreads_or(int p) { return tp_host_vote(p, 2); }
static inline void __syncwarp(unsigned mask = 0xffffffffu) { tp_host_warp(TP_WARP_SYNC, mask, 0, 0); }
static inline void __threadfence() {}
static inline void __threadfence_block() {}
static inline void __threadfence_system() {}
static inline void __nanosleep(unsigned) { tp_host_yield(); }
static inline void __trap() { tp_host_fail("the kernel called __trap"); }

template <class T> static inline T tp_host_shuffle(unsigned mask, T value, int source) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "shuffles take 4 or 8 bytes");
    unsigned long long bits = 0;
    __builtin_memcpy(&bits, &value, sizeof value);
    bits = tp_host_warp(TP_WARP_SHUFFLE, mask, bits, source);
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
}
template <class T> static inline T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
    return tp_host_shuffle(mask, value, (tp_host_lane() & ~(width - 1)) | (source & (width - 1)));
}
template <class T> static inline T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32) {
    const int lane = tp_host_lane(), source = lane ^ bits;
    return tp_host_shuffle(mask, value, (source & ~(width - 1)) > lane ? lane : source);
}
template <class T> static inline T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32) {
    const int lane = tp_host_lane(), source = lane + (int)by;
    return tp_host_shuffle(mask, value, source > (lane | (width - 1)) ? lane : source);
}
template <class T> static inline T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32) {
    const int lane = tp_host_lane(), source = lane - (int)by;
    return tp_host_shuffle(mask, value, source < (lane & ~(width - 1)) ? lane : source);
}
static inline unsigned __ballot_sync(unsigned mask, int p) {
    return (unsigned)tp_host_warp(TP_WARP_BALLOT, mask, p != 0, 0);
}
static inline int __any_sync(unsigned mask, int p) { return __ballot_sync(mask, p) != 0; }
static inline int __all_sync(unsigned mask, int p) { return __ballot_sync(mask, p) == mask; }
static inline unsigned __match_any_sync(unsigned mask, unsigned v) {
    return (unsigned)tp_host_warp(TP_WARP_MATCH, mask, v, 0);
}
#define TP_REDUCE(name, unsigned_op, int_op)                                                                           \
    static inline unsigned name(unsigned mask, unsigned v) { return (unsigned)tp_host_warp(unsigned_op, mask, v, 0); } \
    static inline int name(unsigned mask, int v) { return (int)tp_host_warp(int_op, mask, (unsigned)v, 0); }
TP_REDUCE(__reduce_add_sync, TP_WARP_ADD, TP_WARP_ADD)
TP_REDUCE(__reduce_min_sync, TP_WARP_MIN, TP_WARP_IMIN)
TP_REDUCE(__reduce_max_sync, TP_WARP_MAX, TP_WARP_IMAX)
#undef TP_REDUCE
static inline unsigned __reduce_and_sync(unsigned mask, unsigned v) {
    return (unsigned)tp_host_warp(TP_WARP_AND, mask, v, 0);
}
static inline unsigned __reduce_or_sync(unsigned mask, unsigned v) {
    return (unsigned)tp_host_warp(TP_WARP_OR, mask, v, 0);
}
static inline unsigned __reduce_xor_sync(unsigned mask, unsigned v) {
    return (unsigned)tp_host_warp(TP_WARP_XOR, mask, v, 0);
}

/* Atomics: nothing runs between two yields, so they are plain. */
template <class T> struct tp_same { typedef T type; };
#define TP_ATOMIC(name, result)                                                                                        \
    template <class T> static inline T name(T *at, typename tp_same<T>::type value) {                                  \
        tp_host_yield();                                                                                               \
        const T old = *(volatile T *)at;                                                                               \
        *(volatile T *)at = result;                                                                                    \
        return old;                                                                                                    \
    }                                                                                                                  \
    template <class T> static inline T name##_block(T *at, typename tp_same<T>::type value) { return name(at, value); }
TP_ATOMIC(atomicAdd, old + value)
TP_ATOMIC(atomicSub, old - value)
TP_ATOMIC(atomicMin, old < value ? old : value)
TP_ATOMIC(atomicMax, old > value ? old : value)
TP_ATOMIC(atomicAnd, old & value)
TP_ATOMIC(atomicOr, old | value)
TP_ATOMIC(atomicXor, old ^ value)
TP_ATOMIC(atomicExch, value)
TP_ATOMIC(atomicInc, old >= value ? 0 : old + 1)
#undef TP_ATOMIC
template <class T>
static inline T atomicCAS(T *at, typename tp_same<T>::type expected, typename tp_same<T>::type value) {
    tp_host_yield();
    const T old = *(volatile T *)at;
    if (old == expected) *(volatile T *)at = value;
    return old;
}

/* Loads and stores with a cache hint. */
template <class T> static inline T __ldg(const T *at) { return *at; }
template <class T> static inline T __ldcg(const T *at) { return *at; }
template <class T> static inline T __ldcs(const T *at) { return *at; }
template <class T> static inline T __ldca(const T *at) { return *at; }
template <class T> static inline T __ldlu(const T *at) { return *at; }
template <class T> static inline T __ldcv(const T *at) { return *at; }
template <class T> static inline void __stcg(T *at, typename tp_same<T>::type value) { *at = value; }
template <class T> static inline void __stcs(T *at, typename tp_same<T>::type value) { *at = value; }
template <class T> static inline void __stwb(T *at, typename tp_same<T>::type value) { *at = value; }
template <class T> static inline void __stwt(T *at, typename tp_same<T>::type value) { *at = value; }

/* Bits. */
template <class To, class From> static inline To tp_host_bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "same size");
    return __builtin_bit_cast(To, from);
}
static inline unsigned __float_as_uint(float x) { return tp_host_bits<unsigned>(x); }
static inline int __float_as_int(float x) { return tp_host_bits<int>(x); }
static inline float __uint_as_float(unsigned x) { return tp_host_bits<float>(x); }
static inline float __int_as_float(int x) { return tp_host_bits<float>(x); }
static inline long long __double_as_longlong(double x) { return tp_host_bits<long long>(x); }
static inline double __longlong_as_double(long long x) { return tp_host_bits<double>(x); }
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
static inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
static inline int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline unsigned __brev(unsigned x) { return __builtin_bitreverse32(x); }
static inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((unsigned long long)a * b >> 32); }
static inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned by) {
    return (unsigned)((((unsigned long long)high << 32 | low) << (by & 31)) >> 32);
}
static inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) {
    return (unsigned)(((unsigned long long)high << 32 | low) >> (by & 31));
}
static inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    const unsigned long long bytes = (unsigned long long)b << 32 | a;
    unsigned out = 0;
    for (int i = 0; i < 4; i++) {
        const unsigned pick = selector >> (4 * i), byte = (unsigned)(bytes >> (8 * (pick & 7))) & 255;
        out |= (pick & 8 ? (byte & 128 ? 255u : 0u) : byte) << (8 * i);
    }
    return out;
}
static inline int __dp4a(int a, int b, int c) {
    for (int i = 0; i < 4; i++) c += (signed char)(a >> (8 * i)) * (signed char)(b >> (8 * i));
    return c;
}
static inline unsigned __dp4a(unsigned a, unsigned b, unsigned c) {
    for (int i = 0; i < 4; i++) c += ((a >> (8 * i)) & 255) * ((b >> (8 * i)) & 255);
    return c;
}
static inline unsigned __vadd4(unsigned a, unsigned b) {
    return ((a & 0x7f7f7f7fu) + (b & 0x7f7f7f7fu)) ^ ((a ^ b) & 0x80808080u);
}
static inline unsigned __vsub4(unsigned a, unsigned b) {
    return ((a | 0x80808080u) - (b & 0x7f7f7f7fu)) ^ ((a ^ ~b) & 0x80808080u);
}

#ifndef TP_HOST_SCHEDULER
/* Arithmetic. */
#define TP_MIN_MAX(type)                                                                                               \
    static inline type min(type a, type b) { return a < b ? a : b; }                                                   \
    static inline type max(type a, type b) { return a > b ? a : b; }
TP_MIN_MAX(int)
TP_MIN_MAX(unsigned)
TP_MIN_MAX(long long)
TP_MIN_MAX(unsigned long long)
#undef TP_MIN_MAX
#define fabsf __builtin_fabsf
#define fmaxf __builtin_fmaxf
#define fminf __builtin_fminf
#define fmax __builtin_fmax
#define fmin __builtin_fmin
#define fabs __builtin_fabs
#define fmaf __builtin_fmaf
#define fma __builtin_fma
#define sqrtf __builtin_sqrtf
#define sqrt __builtin_sqrt
#define floorf __builtin_floorf
#define ceilf __builtin_ceilf
#define rintf __builtin_rintf
#define rint __builtin_rint
#define copysignf __builtin_copysignf
#define isnan(x) __builtin_isnan(x)
#define isinf(x) __builtin_isinf(x)
#define isfinite(x) __builtin_isfinite(x)
static inline int abs(int x) { return x < 0 ? -x : x; }
static inline void sincosf(float x, float *s, float *c) { *s = sinf(x), *c = cosf(x); }
static inline void sincos(double x, double *s, double *c) { *s = sin(x), *c = cos(x); }
static inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
static inline float __frsqrt_rn(float x) { return (float)(1.0 / sqrt((double)x)); }
static inline float __expf(float x) { return expf(x); }
static inline float __logf(float x) { return logf(x); }
static inline float __log2f(float x) { return log2f(x); }
static inline float __sinf(float x) { return sinf(x); }
static inline float __cosf(float x) { return cosf(x); }
static inline float __fdividef(float a, float b) { return a / b; }
static inline float __frcp_rn(float x) { return 1.0f / x; }
static inline float __fsqrt_rn(float x) { return sqrtf(x); }
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }
static inline double __dadd_rn(double a, double b) { return a + b; }
static inline double __dsub_rn(double a, double b) { return a - b; }
static inline double __dmul_rn(double a, double b) { return a * b; }
static inline double __ddiv_rn(double a, double b) { return a / b; }
static inline int __float2int_rn(float x) { return (int)rintf(x); }
static inline int __float2int_rz(float x) { return (int)x; }
static inline int __float2int_rd(float x) { return (int)floorf(x); }
static inline unsigned __float2uint_rn(float x) { return (unsigned)rintf(x); }
static inline long long __double2ll_rn(double x) { return (long long)rint(x); }
static inline int __double2int_rn(double x) { return (int)rint(x); }
static inline float __int2float_rn(int x) { return (float)x; }
static inline float __uint2float_rn(unsigned x) { return (float)x; }
static inline double __uint2double_rn(unsigned x) { return (double)x; }

/* f16 and bf16 as their bits, for the conversions of tapeout.cuh. */
static inline unsigned short tp_host_f16(float x) { return tp_host_bits<unsigned short>((_Float16)x); }
static inline float tp_host_f16_to_float(unsigned short bits) { return (float)tp_host_bits<_Float16>(bits); }
static inline unsigned short tp_host_bf16(float x) {
    const unsigned bits = __float_as_uint(x);
    if (x != x) return 0x7fff;
    return (unsigned short)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* The entry that cuda_host.cpp calls: a kernel with its arguments, each in 8 bytes, and the kinds of its parameters. */
template <class T> struct tp_kind;
template <class T> struct tp_kind<T *> { static constexpr char kind = 'p'; };
template <> struct tp_kind<int> { static constexpr char kind = 'i'; };
template <> struct tp_kind<float> { static constexpr char kind = 'f'; };
template <class T, T... I> struct tp_indices {};
template <class... A, int... I>
static inline void tp_host_call(void (*kernel)(A...), void *const *arguments, tp_indices<int, I...>) {
    kernel(*(A *)&arguments[I]...);
}
template <class... A> static inline void tp_host_invoke(void (*kernel)(A...), void *const *arguments) {
    tp_host_call(kernel, arguments, __make_integer_seq<tp_indices, int, sizeof...(A)>());
}
template <class... A> static inline const char *tp_host_kinds(void (*)(A...)) {
    static const char kinds[] = {tp_kind<A>::kind..., 0};
    return kinds;
}
#define TP_HOST_ENTRY(kernel)                                                                                          \
    extern "C" void tp_host_main(void *const *arguments) { tp_host_invoke(kernel, arguments); }                        \
    extern "C" __attribute__((visibility("default"))) const char *tp_host_parameters() { return tp_host_kinds(kernel); }
#endif
#endif
