/* Stands for decode attention over a short context: waits for q, k, v and writes the input of the output projection. */
extern "C" __global__ void TP_KERNEL(const float *qkv, unsigned short *out) {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    float v;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(qkv + i) : "memory");
    out[i] = __float_as_uint(v) >> 16; /* as bf16 */
}
