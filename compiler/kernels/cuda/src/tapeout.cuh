/* What every CUDA kernel of ours needs and a bare NVRTC lacks: number types, conversions, waits between kernels.
 *
 * Each piece of inline PTX has a plain twin for TP_HOST, where a kernel is compiled as C++ and its threads are fibers.
 * There tests/unit/cuda_host/cuda_host.h, included before all else, supplies CUDA's own names and tp_host_*. */
#ifndef TAPEOUT_CUH
#define TAPEOUT_CUH

typedef signed char i8;
typedef unsigned char u8;
typedef short i16;
typedef unsigned short u16;
typedef int i32;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

#ifdef TP_HOST
#define TP_DEVICE static inline
#define TP_DEVICE_MEMBER inline
#define TP_ENTRY static
#define TP_SHARED(name) u8 *name = (u8 *)tp_host_dynamic_shared()
#define TP_BOUNDS(...)
#define TP_ARCH 0
#else
#define TP_DEVICE static __device__ __forceinline__
#define TP_DEVICE_MEMBER __device__ __forceinline__
#define TP_ENTRY extern "C" __global__ /* TP_ENTRY void TP_BOUNDS(threads) TP_KERNEL(...) */
#define TP_SHARED(name) extern __shared__ __align__(128) u8 name[]
#define TP_BOUNDS(...) __launch_bounds__(__VA_ARGS__)
#define TP_ARCH __CUDA_ARCH__
#endif

#define TP_ALL 0xffffffffu
#define TP_UNROLL _Pragma("unroll")
#define TP_F16 1 /* names of number types in defines */
#define TP_BF16 2
#define TP_F32 3
#define TP_F8 4 /* e4m3 */

/* ---- programmatic dependent launch: weights may be read before tp_wait, nothing else, and nothing written ---- */

/* Lets the next kernel of the stream start; it waits for this one in its own tp_wait. */
TP_DEVICE void tp_launch_dependents() {
#if TP_ARCH >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/* Every block calls it: returns when the kernels before have ended and what they wrote is visible. */
TP_DEVICE void tp_wait() {
#ifdef TP_HOST
    tp_host_grid_wait();
#elif TP_ARCH >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/* ---- time stamps for tests/benchmarks/gpu_stamps.py: nothing unless TP_STAMPS is defined ---- */

#if defined(TP_STAMPS) && !defined(TP_HOST)
/* Of a block, in order: nanoseconds of the GPU's clock, but for the number of its multiprocessor. */
enum tp_slot {
    TP_START,           /* first instruction */
    TP_SM,              /* multiprocessor; written with TP_START */
    TP_READY,           /* all that goes before the wait is done or on its way */
    TP_WAITED,          /* tp_wait has returned */
    TP_STAGED,          /* what the kernel before wrote is in shared memory */
    TP_ENDS,            /* of each warp, from here on */
    TP_SLOTS = TP_ENDS + 32
};
#define TP_STAMPED 1024 /* blocks; those beyond leave none */
extern "C" { __device__ u64 tp_stamps[TP_STAMPED][TP_SLOTS]; } /* of the latest launch; the one before has ended */

TP_DEVICE void tp_stamp(bool writes, int slot) {
    u64 now;
    u32 sm;
    if (!writes || blockIdx.x >= TP_STAMPED) return;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now) :: "memory");
    tp_stamps[blockIdx.x][slot] = now;
    if (slot != TP_START) return;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
    tp_stamps[blockIdx.x][TP_SM] = sm;
}
#define TP_STAMP(slot) tp_stamp(threadIdx.x == 0, slot)
#define TP_STAMP_WARPS(slot) tp_stamp(threadIdx.x % 32 == 0, (slot) + (int)threadIdx.x / 32)
#else
#define TP_STAMP(slot)
#define TP_STAMP_WARPS(slot)
#endif

/* ---- bits and floats ---- */

TP_DEVICE float tp_f16(u16 bits) {
#ifdef TP_HOST
    return tp_host_f16_to_float(bits);
#else
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
#endif
}

TP_DEVICE float tp_bf16(u16 bits) { return __uint_as_float((u32)bits << 16); }

/* f32 to f16 and bf16, to nearest even. */
TP_DEVICE u16 tp_to_f16(float value) {
#ifdef TP_HOST
    return tp_host_f16(value);
#else
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
#endif
}

TP_DEVICE u16 tp_to_bf16(float value) {
#ifdef TP_HOST
    return tp_host_bf16(value);
#else
    const u32 bits = __float_as_uint(value);
    return (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fff : (u16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
#endif
}

/* The value, of which the compiler knows nothing: what is computed from it stays behind this place. */
TP_DEVICE int tp_opaque(int value) {
#ifndef TP_HOST
    asm volatile("" : "+r"(value));
#endif
    return value;
}

/* Four products of signed bytes, added to c. */
TP_DEVICE i32 tp_dp4a(u32 a, u32 b, i32 c) { return __dp4a((i32)a, (i32)b, c); }

/* The same with the bytes of a unsigned. */
TP_DEVICE i32 tp_dp4a_unsigned(u32 a, u32 b, i32 c) {
#ifdef TP_HOST
    for (int i = 0; i < 32; i += 8) c += (i32)(a >> i & 255) * (i8)(b >> i);
    return c;
#else
    i32 sum;
    asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
    return sum;
#endif
}

/* ---- global memory that an earlier kernel of the graph wrote: read past the L1 ---- */

TP_DEVICE float4 tp_load4(const float *p) {
#ifdef TP_HOST
    return *(const float4 *)p;
#else
    float4 v;
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(p) : "memory");
    return v;
#endif
}

/* 8 bytes. */
TP_DEVICE uint2 tp_load_pair(const void *p) {
#ifdef TP_HOST
    return *(const uint2 *)p;
#else
    uint2 v;
    asm volatile("ld.global.cg.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p) : "memory");
    return v;
#endif
}

TP_DEVICE float tp_load(const float *p) {
#ifdef TP_HOST
    return *p;
#else
    float v;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(p) : "memory");
    return v;
#endif
}

/* ---- asynchronous copies of 16 bytes to shared memory ---- */

/* Where `on`, and without a branch. Both addresses are multiples of 16. Weights: read once, so they bypass the L1. */
TP_DEVICE void tp_copy16(void *shared, const void *global, bool on) {
#ifdef TP_HOST
    if (on) tp_host_copy_async(shared, global, 16);
#else
    asm volatile("{\n .reg .pred on;\n setp.ne.u32 on, %2, 0;\n @on cp.async.cg.shared.global.L2::128B [%0], [%1], 16;\n}"
                 :: "r"((u32)__cvta_generic_to_shared(shared)), "l"(global), "r"((u32)on) : "memory");
#endif
}

/* 1 / value to 1 ulp, for a normal number. */
TP_DEVICE float tp_reciprocal(float value) {
#ifdef TP_HOST
    return 1.0f / value;
#else
    float out;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(value));
    return out;
#endif
}

/* Four integers as signed bytes, the first lowest. */
TP_DEVICE u32 tp_pack4(i32 a, i32 b, i32 c, i32 d) {
#ifdef TP_HOST
    return (u32)(a & 255) | (u32)(b & 255) << 8 | (u32)(c & 255) << 16 | (u32)d << 24;
#else
    u32 out;
    asm("{\n .reg .b32 high;\n cvt.pack.sat.s8.s32.b32 high, %4, %3, 0;\n"
        " cvt.pack.sat.s8.s32.b32 %0, %2, %1, high;\n}" : "=r"(out) : "r"(a), "r"(b), "r"(c), "r"(d));
    return out;
#endif
}

/* Closes the group of this thread's copies since the last commit. */
TP_DEVICE void tp_copy_commit() {
#ifdef TP_HOST
    tp_host_copy_commit();
#else
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

/* Waits until at most PENDING of this thread's latest groups are on their way. */
template <int PENDING> TP_DEVICE void tp_copy_wait() {
#ifdef TP_HOST
    tp_host_copy_wait(PENDING);
#else
    asm volatile("cp.async.wait_group %0;" :: "n"(PENDING) : "memory");
#endif
}

/* ---- reductions in a fixed order; every lane of the warp takes part and gets the result ---- */

TP_DEVICE float tp_warp_sum(float value) {
    TP_UNROLL for (int lane = 16; lane; lane >>= 1) value += __shfl_xor_sync(TP_ALL, value, lane);
    return value;
}

TP_DEVICE float tp_warp_max(float value) {
    TP_UNROLL for (int lane = 16; lane; lane >>= 1) {
        float other = __shfl_xor_sync(TP_ALL, value, lane);
        value = other > value ? other : value;
    }
    return value;
}

#endif
