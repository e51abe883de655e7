/* Rows of float32 in, rows of float32, bfloat16 or float16 out: loads and stores of VEC elements, sums over a block. */
#ifndef ROWS_CUH
#define ROWS_CUH
#include "tapeout.cuh"

template <int VEC> struct tp_values {
    float at[VEC];
};

template <int VEC> TP_DEVICE tp_values<VEC> tp_read(const float *p) {
    tp_values<VEC> out;
    if constexpr (VEC == 4) {
        const float4 v = tp_load4(p);
        out.at[0] = v.x, out.at[1] = v.y, out.at[2] = v.z, out.at[3] = v.w;
    } else {
        TP_UNROLL for (int j = 0; j < VEC; j++) out.at[j] = tp_load(p + j);
    }
    return out;
}

/* The same for constants, which may stay in any cache. */
template <int VEC> TP_DEVICE tp_values<VEC> tp_read_constant(const float *p) {
    tp_values<VEC> out;
    if constexpr (VEC == 4) {
        const float4 v = __ldg((const float4 *)p);
        out.at[0] = v.x, out.at[1] = v.y, out.at[2] = v.z, out.at[3] = v.w;
    } else {
        TP_UNROLL for (int j = 0; j < VEC; j++) out.at[j] = __ldg(p + j);
    }
    return out;
}

/* Number types by their names in defines, which the preprocessor tells apart too. */
template <int TYPE> struct tp_out {
    typedef u16 type;
    TP_DEVICE u16 from(float x) { return TYPE == TP_BF16 ? tp_to_bf16(x) : tp_to_f16(x); }
};
template <> struct tp_out<TP_F32> {
    typedef float type;
    TP_DEVICE float from(float x) { return x; }
};

/* Four neighbours that an earlier kernel of the graph wrote, as they are, and as floats. */
TP_DEVICE float4 tp_read4(const float *p) { return tp_load4(p); }
TP_DEVICE uint2 tp_read4(const u16 *p) { return tp_load_pair(p); }

template <int TYPE> TP_DEVICE float4 tp_floats(float4 v) { return v; }
template <int TYPE> TP_DEVICE float4 tp_floats(uint2 v) {
    const u16 at[4] = { (u16)v.x, (u16)(v.x >> 16), (u16)v.y, (u16)(v.y >> 16) };
    if (TYPE == TP_BF16) return make_float4(tp_bf16(at[0]), tp_bf16(at[1]), tp_bf16(at[2]), tp_bf16(at[3]));
    return make_float4(tp_f16(at[0]), tp_f16(at[1]), tp_f16(at[2]), tp_f16(at[3]));
}

template <int TYPE, int VEC> TP_DEVICE void tp_write(typename tp_out<TYPE>::type *p, const tp_values<VEC> &v) {
    typedef typename tp_out<TYPE>::type out;
    if constexpr (VEC == 4 && TYPE == TP_F32) {
        *(float4 *)p = make_float4(v.at[0], v.at[1], v.at[2], v.at[3]);
    } else if constexpr (VEC == 4) {
        const u32 low = (u32)tp_out<TYPE>::from(v.at[0]) | (u32)tp_out<TYPE>::from(v.at[1]) << 16;
        const u32 high = (u32)tp_out<TYPE>::from(v.at[2]) | (u32)tp_out<TYPE>::from(v.at[3]) << 16;
        *(uint2 *)p = make_uint2(low, high);
    } else {
        TP_UNROLL for (int j = 0; j < VEC; j++) p[j] = (out)tp_out<TYPE>::from(v.at[j]);
    }
}

/* Sum over a block of COUNTED threads, the same in each. `shared` holds a float for each warp. One call a kernel. */
template <int COUNTED> TP_DEVICE float tp_block_sum(float value, float *shared) {
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    value = tp_warp_sum(value);
    if constexpr (COUNTED == 32) return value;
    if (lane == 0) shared[warp] = value;
    __syncthreads();
    return tp_warp_sum(lane < COUNTED / 32 ? shared[lane] : 0.0f);
}
#endif
