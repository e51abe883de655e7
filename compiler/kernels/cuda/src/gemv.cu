/* Decode: y[m][n] = epilogue(sum over k of x[m][k] w[n][k]), M = 1, 2 or 4 rows of activations, all shapes fixed.
 *
 * Every warp has a ring of its own in shared memory and works on items of ROWS output rows by itself: no warp waits for
 * another. The ring is full of the first weights before tp_wait(), so that memory is busy while the kernel before ends.
 * Then the block stages x (normalised; quantized to int8 for integer codes) in shared memory, where it is read once for
 * all rows of an item. A stage is STEPS units a lane of each row: planes first, then the windows (whole 16 bytes) of
 * the scale arrays. Sums are taken in a fixed order. */
#include "tapeout.cuh"

#define ITEM_ROWS ((EPILOGUE >= 2 ? 2 : 1) * ROWS) /* gated: gate rows, then up rows */
#define ITEMS ((N + ROWS - 1) / ROWS)
#define WARPS (THREADS / 32)
#define STAGE_K (UNIT * 32 * STEPS)
#define CHUNKS ((K + STAGE_K - 1) / STAGE_K)
#define UNITS (K / UNIT)
#define ROW_PLANE0 (PLANE0_UNIT * 32 * STEPS)
#define ROW_PLANE1 (PLANE1_UNIT * 32 * STEPS)
#define STAGE_PLANE1 (ITEM_ROWS * ROW_PLANE0)
#define STAGE_SCALES (STAGE_PLANE1 + ITEM_ROWS * ROW_PLANE1)
#define X_AT (WARPS * STAGES * STAGE_BYTES)
#define SUMS_AT (X_AT + X_BYTES)
#define VALUES (M * ITEM_ROWS)

#if ELEMENT
#include "decode_float.cuh"
#define COLUMNS M
#else
#define COLUMNS (M * TERMS)
#define ELEMENT_SCALE 1.0f
#endif

/* Scale arrays within a row of the scales plane, in order: d, dmin, sub, submin or zeros, as far as there are any. */
constexpr int SCALE_COUNT = SCALE_ARRAYS;
constexpr int SCALE_AT[] = { SCALE_OFFSETS };      /* first byte in the row */
constexpr int SCALE_PIECE[] = { SCALE_PIECES };    /* bytes a stage uses */
constexpr int SCALE_WINDOW[] = { SCALE_WINDOWS };  /* bytes a stage copies */
constexpr int scale_slot(int array) { return array ? scale_slot(array - 1) + SCALE_WINDOW[array - 1] : 0; }
constexpr int SCALE_SLOTS = scale_slot(SCALE_COUNT);
static_assert(STAGE_BYTES == STAGE_SCALES + ITEM_ROWS * SCALE_SLOTS, "the descriptor's stage");

/* ---- the ring ---- */

TP_DEVICE int row_of(int item, int j) { return item * ROWS + (j < ROWS ? j : N - ROWS + j); }
TP_DEVICE bool row_exists(int item, int j) { return N % ROWS == 0 || item * ROWS + j % ROWS < N; }

template <int BYTES> TP_DEVICE void copy_plane(u8 *slot, const u8 *plane, int row_bytes, int item, int chunk, int lane) {
    constexpr int pieces = BYTES / 16;
    TP_UNROLL for (int first = 0; first < ITEM_ROWS * pieces; first += 32) {
        const int i = first + lane, j = i / pieces, at = chunk * BYTES + i % pieces * 16;
        if ((ITEM_ROWS * pieces % 32 == 0 || i < ITEM_ROWS * pieces) && (K % STAGE_K == 0 || at < row_bytes)
            && row_exists(item, j))
            tp_copy16(slot + i * 16, plane + (i64)row_of(item, j) * row_bytes + at);
    }
}

TP_DEVICE void copy_scales(u8 *slot, const u8 *plane, int item, int chunk, int lane) {
    constexpr int pieces = SCALE_SLOTS / 16;
    TP_UNROLL for (int first = 0; first < ITEM_ROWS * pieces; first += 32) {
        const int i = first + lane, j = i / pieces, p = i % pieces * 16;
        int at = 0;
        TP_UNROLL for (int a = 0; a < SCALE_COUNT; a++)
            if (p >= scale_slot(a)) at = ((SCALE_AT[a] + chunk * SCALE_PIECE[a]) & ~15) + p - scale_slot(a);
        if (i < ITEM_ROWS * pieces && at < SCALE_ROW && row_exists(item, j))
            tp_copy16(slot + i * 16, plane + (i64)(row_of(item, j) / SCALE_ROWS) * SCALE_ROW + at);
    }
}

TP_DEVICE void copy_stage(u8 *slot, const u8 *w, int item, int chunk, int lane) {
    copy_plane<ROW_PLANE0>(slot, w + PLANE0, PLANE0_ROW, item, chunk, lane);
#if PLANE1_UNIT
    copy_plane<ROW_PLANE1>(slot + STAGE_PLANE1, w + PLANE1, PLANE1_ROW, item, chunk, lane);
#endif
    if (SCALE_COUNT) copy_scales(slot + STAGE_SCALES, w + SCALES, item, chunk, lane);
}

/* ---- activations ---- */

#define X_COLUMN ((UNITS + 31) / 32 * 32 * UNIT * (ELEMENT ? 4 : 1)) /* bytes of a column of x in shared memory */
#define X_SIDES (X_AT + COLUMNS * X_COLUMN)                          /* integer codes: scale and sum of each 32 */
#define PIECES ((K / 4 + THREADS - 1) / THREADS)                     /* pieces of 4 elements a thread */

#if !ELEMENT
#include "decode_int.cuh" /* stage_piece, add_stage */
#else
/* Where the four elements from 4 p on stand, in pieces of 4: a lane's unit is cut so that a warp reads 32 neighbours. */
TP_DEVICE int x_piece(int p) {
    const int unit = p / (UNIT / 4), inside = p % (UNIT / 4);
    return (unit / 32 * (UNIT / 4) + inside) * 32 + unit % 32;
}

TP_DEVICE void stage_piece(u8 *shared, int m, int p, bool live, float4 v) {
    if (live && X_STAGED) ((float4 *)(shared + X_AT + m * X_COLUMN))[x_piece(p)] = v;
}
#endif

/* Puts x into shared memory, times the norm's weight; the norm's factor is applied to the results. */
TP_DEVICE void stage_x(u8 *shared, const float *x, const float4 *norm_weight, float (&factor)[M]) {
    const int tid = threadIdx.x;
    TP_UNROLL for (int m = 0; m < M; m++) {
        float4 v[PIECES];
        float squares = 0.0f;
        TP_UNROLL for (int i = 0; i < PIECES; i++) {
            const int p = tid + i * THREADS;
            const bool live = K / 4 % THREADS == 0 || p < K / 4;
            v[i] = live ? tp_load4(x + m * LDX + 4 * p) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
        TP_UNROLL for (int i = 0; i < PIECES; i++) {
            const int p = tid + i * THREADS;
            if (NORM) {
                squares += v[i].x * v[i].x + v[i].y * v[i].y + v[i].z * v[i].z + v[i].w * v[i].w;
                v[i].x *= norm_weight[i].x, v[i].y *= norm_weight[i].y;
                v[i].z *= norm_weight[i].z, v[i].w *= norm_weight[i].w;
            }
            stage_piece(shared, m, p, K / 4 % THREADS == 0 || p < K / 4, v[i]);
        }
        if (NORM) {
            squares = tp_warp_sum(squares);
            if (tid % 32 == 0) ((float *)(shared + SUMS_AT))[m * WARPS + tid / 32] = squares;
        }
    }
    __syncthreads();
    TP_UNROLL for (int m = 0; m < M; m++) {
        float squares = 0.0f;
        if (NORM)
            for (int i = 0; i < WARPS; i++) squares += ((const float *)(shared + SUMS_AT))[m * WARPS + i];
        factor[m] = NORM ? 1.0f / sqrtf(squares / (float)K + EPS) : 1.0f;
    }
}

/* ---- products of one stage ---- */

#if ELEMENT
TP_DEVICE float4 x_of(const u8 *shared, const float *x, const float *norm, int m, int unit, int i) {
    if (X_STAGED) return ((const float4 *)(shared + X_AT + m * X_COLUMN))[(unit / 32 * (UNIT / 4) + i) * 32 + unit % 32];
    float4 v = *(const float4 *)(x + m * LDX + unit * UNIT + 4 * i);
    if (NORM) {
        const float4 s = *(const float4 *)(norm + unit * UNIT + 4 * i);
        v.x *= s.x, v.y *= s.y, v.z *= s.z, v.w *= s.w;
    }
    return v;
}

TP_DEVICE void add_unit(float (&sum)[VALUES], const u8 *shared, const u8 *slot, const float *x, const float *norm,
                        int chunk, int u, int lane) {
    const int local = u * 32 + lane, unit = chunk * 32 * STEPS + local;
    if (K % STAGE_K && unit >= UNITS) return;
    float4 in[M][UNIT / 4];
    TP_UNROLL for (int m = 0; m < M; m++)
        TP_UNROLL for (int i = 0; i < UNIT / 4; i++) in[m][i] = x_of(shared, x, norm, m, unit, i);
    TP_UNROLL for (int j = 0; j < ITEM_ROWS; j++) {
        float value[UNIT];
        tp_elements(value, slot + j * ROW_PLANE0 + local * 16);
        TP_UNROLL for (int m = 0; m < M; m++) {
            float part = SCALE_COUNT ? 0.0f : sum[m * ITEM_ROWS + j];
            TP_UNROLL for (int i = 0; i < UNIT / 4; i++) {
                part = fmaf(value[4 * i], in[m][i].x, part);
                part = fmaf(value[4 * i + 1], in[m][i].y, part);
                part = fmaf(value[4 * i + 2], in[m][i].z, part);
                part = fmaf(value[4 * i + 3], in[m][i].w, part);
            }
            if (SCALE_COUNT) {
                const u8 *scale = slot + STAGE_SCALES + j * SCALE_SLOTS + ((chunk * SCALE_PIECE[0]) & 15);
                sum[m * ITEM_ROWS + j] = fmaf(part, ((const float *)scale)[local / (128 / UNIT)], sum[m * ITEM_ROWS + j]);
            } else {
                sum[m * ITEM_ROWS + j] = part;
            }
        }
    }
}

TP_DEVICE void add_stage(float (&sum)[VALUES], const u8 *shared, const u8 *slot, const float *x, const float *norm,
                         int chunk, int lane) {
    TP_UNROLL for (int u = 0; u < STEPS; u++) add_unit(sum, shared, slot, x, norm, chunk, u, lane);
}
#endif

/* ---- results ---- */

#define SPREAD (32 / VALUES) /* lanes that hold the same result in the end */

/* Sums of every value over the warp: lane i gets value i / SPREAD. */
TP_DEVICE float transpose_sum(float (&value)[VALUES], int lane) {
    int bit = 16;
    TP_UNROLL for (int half = VALUES / 2; half; half /= 2) {
        const bool upper = lane & bit;
        TP_UNROLL for (int i = 0; i < half; i++) {
            const float send = upper ? value[i] : value[i + half], keep = upper ? value[i + half] : value[i];
            value[i] = keep + __shfl_xor_sync(TP_ALL, send, bit);
        }
        bit /= 2;
    }
    TP_UNROLL for (int lanes = SPREAD / 2; lanes; lanes /= 2) value[0] += __shfl_xor_sync(TP_ALL, value[0], lanes);
    return value[0];
}

TP_DEVICE float activated(float gate) {
    if (EPILOGUE == 2) return gate / (1.0f + expf(-gate));
    const float inner = 0.7978845608028654f * (gate + 0.044715f * gate * gate * gate);
    return 0.5f * gate * (1.0f + tanhf(inner));
}

/* Two kernels of 512 threads share a multiprocessor: the next fills its ring while this one runs. */
TP_ENTRY void TP_BOUNDS(THREADS, M > 1 || THREADS > 512 ? 1 : THREADS > 256 ? 2 : 3) TP_KERNEL(const float *x, const float *norm, const u8 *w, const float *bias, float *y) {
    TP_SHARED(shared);
    tp_launch_dependents();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int first = warp * GRID + blockIdx.x; /* neighbours in different blocks: the last round spreads over all */
    u8 *ring = shared + warp * STAGES * STAGE_BYTES;

    int copy_item = first, copy_chunk = 0;
    TP_UNROLL for (int s = 0; s < STAGES; s++) {
        if (copy_item < ITEMS) copy_stage(ring + s * STAGE_BYTES, w, copy_item, copy_chunk, lane);
        tp_copy_commit();
        if (++copy_chunk == CHUNKS) copy_chunk = 0, copy_item += GRID * WARPS;
    }
    float4 norm_weight[PIECES];
    if (NORM)
        TP_UNROLL for (int i = 0; i < PIECES; i++) {
            const int p = threadIdx.x + i * THREADS;
            if (K / 4 % THREADS == 0 || p < K / 4) norm_weight[i] = ((const float4 *)norm)[p];
        }
    float weight_scale = ELEMENT_SCALE;
#if TENSOR_SCALE
    weight_scale *= *(const float *)(w + SCALES);
#endif

    tp_wait();
    float factor[M];
    stage_x(shared, x, norm_weight, factor);

    const int value = lane / SPREAD, m = value / ITEM_ROWS, j = value % ITEM_ROWS;
    float scale = factor[0];
    TP_UNROLL for (int i = 1; i < M; i++) scale = m == i ? factor[i] : scale;
    scale *= weight_scale;
    u8 *slot = ring;
    for (int item = first; item < ITEMS; item += GRID * WARPS) {
        const int n = item * ROWS + j % ROWS;
        const bool writes = lane % SPREAD == 0 && j < ROWS && n < N;
        float before = EPILOGUE == 1 && writes ? tp_load(y + m * LDY + n) : 0.0f;
        if (BIAS && n < N) before += bias[j < ROWS ? n : N + n];
        float sum[VALUES];
        TP_UNROLL for (int i = 0; i < VALUES; i++) sum[i] = 0.0f;
        for (int chunk = 0; chunk < CHUNKS; chunk++) {
            tp_copy_wait<STAGES - 1>();
            __syncwarp();
            add_stage(sum, shared, slot, x, norm, chunk, lane);
            __syncwarp();
            if (copy_item < ITEMS) copy_stage(slot, w, copy_item, copy_chunk, lane);
            tp_copy_commit();
            if (++copy_chunk == CHUNKS) copy_chunk = 0, copy_item += GRID * WARPS;
            slot = slot == ring + (STAGES - 1) * STAGE_BYTES ? ring : slot + STAGE_BYTES;
        }
        float result = fmaf(transpose_sum(sum, lane), scale, before);
        if (EPILOGUE >= 2) {
            const float up = __shfl_xor_sync(TP_ALL, result, ROWS * SPREAD);
            result = activated(result) * up;
        }
        if (writes) y[m * LDY + n] = result;
    }
}
