/* Decode: y[m][n] = epilogue(sum over k of x[m][k] w[n][k]), M = 1, 2 or 4 rows of activations, all shapes fixed.
 *
 * Every warp has a ring of its own in shared memory and works on items of ROWS output rows by itself: no warp waits for
 * another, and a fast one takes more items. The ring is full of the first weights before tp_wait(), so that memory is
 * busy while the kernel before ends; it is filled at a pace (PACE stages on their way), since that kernel's own reads
 * would stand behind ours. Then the block stages x (normalised; quantized to int8 for integer codes) in shared memory,
 * where it is read once for all rows of an item. A stage is STEPS units a lane of each row: planes first, then the
 * windows (whole 16 bytes) of the scale arrays. Sums are taken in a fixed order. */
#include "rows.cuh"

typedef tp_out<X>::type x_type;
static_assert(EPILOGUE != 1 || Y == TP_F32, "sums are added to floats");
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
#define SUMS_AT (X_AT + X_BYTES)           /* [M][WARPS] floats */
#define TAKEN_AT (SUMS_AT + 4 * M * WARPS) /* how many of the block's items are taken */
#define VALUES (M * ITEM_ROWS)
#define FIRST_ITEMS ((STAGES + CHUNKS - 1) / CHUNKS) /* of a warp, dealt out beforehand */
#define TAKES ((CHUNKS - STAGES % CHUNKS) % CHUNKS)  /* the chunk with which the ring has room for another item */

#if ELEMENT
#include "decode_float.cuh"
#else
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

#define SCALE_STEPS (SCALE_COUNT ? (ITEM_ROWS * (SCALE_SLOTS / 16) + 31) / 32 : 1) /* copies of a lane */

/* Whether every stage begins with whole 16 bytes of every array: then a lane's address moves by the same each time. */
constexpr bool even_scales() {
    for (int a = 0; a < SCALE_COUNT; a++)
        if (SCALE_AT[a] % 16 || SCALE_PIECE[a] % 16) return false;
    return K % STAGE_K == 0;
}

/* Of a plane, BYTES a row and stage: from the item's first row to what a lane copies first. */
template <int BYTES> TP_DEVICE i64 lane_offset(i64 row_bytes, int lane) {
    constexpr int pieces = BYTES / 16;
    if constexpr (pieces >= 32) return lane * 16;
    const int j = lane / pieces;
    return (ITEM_ROWS * pieces > 32 ? j : row_of(0, j)) * row_bytes + lane % pieces * 16;
}

/* `from` is the lane's own first piece. */
template <int BYTES> TP_DEVICE void copy_plane(u8 *to, const u8 *from, i64 row_bytes, int item, int chunk, int lane) {
    constexpr int pieces = BYTES / 16;
    TP_UNROLL for (int first = 0; first < ITEM_ROWS * pieces; first += 32) {
        const int i = first + lane;
        const bool live = (ITEM_ROWS * pieces % 32 == 0 || i < ITEM_ROWS * pieces)
                          && (K % STAGE_K == 0 || chunk * BYTES + i % pieces * 16 < row_bytes) && row_exists(item, i / pieces);
        tp_copy16(to + lane * 16 + first * 16, from + row_of(0, first / pieces) * row_bytes + first % pieces * 16, live);
    }
}

/* A warp's ring of stages. Items are the block's own, every GRID-th; a warp takes the next when it has copied the last. */
struct Ring {
    u8 *shared;
    const u8 *w;
    int warp, lane;
    int at;                     /* the oldest stage: next to read, and then to copy to */
    int items[FIRST_ITEMS + 1]; /* being read first, taken last */
    bool more;                  /* whether the item taken last exists */
    const u8 *plane0, *plane1, *scales[SCALE_STEPS]; /* what this lane copies next */

    TP_DEVICE_MEMBER Ring(u8 *memory, const u8 *weight)
        : shared(memory), w(weight), warp((int)threadIdx.x / 32), lane((int)threadIdx.x % 32), at(warp * STAGES * STAGE_BYTES) {}

    TP_DEVICE_MEMBER i32 *taken() const { return (i32 *)(shared + TAKEN_AT); }

    /* The block's item number `place` becomes the one to copy. */
    TP_DEVICE_MEMBER int begin(int place) {
        const int item = place * GRID + (int)blockIdx.x;
        more = item < ITEMS;
        plane0 = w + PLANE0 + (i64)item * (ROWS * (i64)PLANE0_ROW) + lane_offset<ROW_PLANE0>(PLANE0_ROW, lane);
#if PLANE1_UNIT
        plane1 = w + PLANE1 + (i64)item * (ROWS * (i64)PLANE1_ROW) + lane_offset<ROW_PLANE1>(PLANE1_ROW, lane);
#endif
        if constexpr (SCALE_COUNT > 0)
            TP_UNROLL for (int s = 0; s < SCALE_STEPS; s++) {
                const int i = s * 32 + lane, row = row_of(item, i / (SCALE_SLOTS / 16)) / SCALE_ROWS;
                scales[s] = w + SCALES + (i64)row * SCALE_ROW + (even_scales() ? scale_offset(i, 0) : 0);
            }
        return item;
    }

    /* Piece i of the stage's scales: where a chunk's stands in its row. */
    static TP_DEVICE_MEMBER int scale_offset(int i, int chunk) {
        constexpr int pieces = SCALE_COUNT ? SCALE_SLOTS / 16 : 1;
        const int p = i % pieces * 16;
        int offset = 0;
        TP_UNROLL for (int a = 0; a < SCALE_COUNT; a++)
            if (p >= scale_slot(a)) offset = ((SCALE_AT[a] + chunk * SCALE_PIECE[a]) & ~15) + p - scale_slot(a);
        return offset;
    }

    TP_DEVICE_MEMBER void copy_scales(u8 *to, int item, int chunk) {
        constexpr int pieces = SCALE_COUNT ? SCALE_SLOTS / 16 : 1;
        TP_UNROLL for (int s = 0; s < SCALE_STEPS; s++) {
            const int i = s * 32 + lane;
            const bool live = (ITEM_ROWS * pieces % 32 == 0 || i < ITEM_ROWS * pieces) && row_exists(item, i / pieces);
            if constexpr (even_scales()) {
                tp_copy16(to + i * 16, scales[s], live);
                scales[s] += scale_offset(i, 1) - scale_offset(i, 0);
            } else {
                const int offset = scale_offset(i, chunk);
                tp_copy16(to + i * 16, scales[s] + offset, live && offset < SCALE_ROW);
            }
        }
    }

    /* Starts the copies of a chunk of the item taken last, or of nothing. */
    TP_DEVICE_MEMBER void copy(int item, int chunk) {
        u8 *to = shared + at;
        if (more) {
            copy_plane<ROW_PLANE0>(to, plane0, PLANE0_ROW, item, chunk, lane);
            plane0 += ROW_PLANE0;
#if PLANE1_UNIT
            copy_plane<ROW_PLANE1>(to + STAGE_PLANE1, plane1, PLANE1_ROW, item, chunk, lane);
            plane1 += ROW_PLANE1;
#endif
            if constexpr (SCALE_COUNT > 0) copy_scales(to + STAGE_SCALES, item, chunk);
        }
        tp_copy_commit();
        const int next = at + STAGE_BYTES, first = warp * STAGES * STAGE_BYTES;
        at = next == first + STAGES * STAGE_BYTES ? first : next;
    }

    TP_DEVICE_MEMBER void fill() {
        if (threadIdx.x == 0) *taken() = WARPS * FIRST_ITEMS;
        TP_UNROLL for (int s = 0; s < STAGES; s++) {
            if (s % CHUNKS == 0) items[s / CHUNKS] = begin(s / CHUNKS * WARPS + warp);
            copy(items[s / CHUNKS], s % CHUNKS);
            if (s >= PACE) tp_copy_wait<PACE>();
        }
    }
    /* The oldest stage, when it has landed. */
    TP_DEVICE_MEMBER const u8 *wait() const {
        tp_copy_wait<STAGES - 1>();
        __syncwarp();
        return shared + at;
    }
    /* All lanes have read the oldest stage, a `chunk` of its item: what comes STAGES later goes there. */
    TP_DEVICE_MEMBER void refill(int chunk) {
        if (chunk == TAKES) {
            int place = 0;
            if (lane == 0) place = atomicAdd(taken(), 1);
            items[FIRST_ITEMS] = begin(__shfl_sync(TP_ALL, place, 0));
        }
        __syncwarp();
        const int item = items[chunk >= TAKES ? FIRST_ITEMS : FIRST_ITEMS - 1];
        copy(item, (chunk + STAGES) % CHUNKS);
    }
    TP_DEVICE_MEMBER void next() {
        TP_UNROLL for (int i = 0; i < FIRST_ITEMS; i++) items[i] = items[i + 1];
    }
};

/* ---- activations ---- */

#define X_ROW ((UNITS + 31) / 32 * 32 * UNIT * 4)   /* float weights: bytes of a row of x in shared memory */
#define PIECES ((K / 4 + THREADS - 1) / THREADS)    /* pieces of 4 elements a thread */
#define BATCH (PIECES < 4 ? PIECES : PIECES > 8 ? 2 : 4) /* of them, staged together so that their latencies overlap */
#define AT_ONCE (PIECES < 8 ? (PIECES + BATCH - 1) / BATCH * BATCH : 8) /* on their way from memory together */

#if !ELEMENT
#include "decode_int.cuh" /* stage_batch, add_stage */
#else
/* Where the four elements from 4 p on stand, in pieces of 4: a lane's unit is cut so that a warp reads 32 neighbours. */
TP_DEVICE int x_piece(int p) {
    const int unit = p / (UNIT / 4), inside = p % (UNIT / 4);
    return (unit / 32 * (UNIT / 4) + inside) * 32 + unit % 32;
}

TP_DEVICE void stage_batch(u8 *shared, int m, int first, const float4 (&v)[BATCH]) {
    TP_UNROLL for (int b = 0; b < BATCH; b++) {
        const int p = (int)threadIdx.x + (first + b) * THREADS;
        if (X_STAGED && first + b < PIECES && (K / 4 % THREADS == 0 || p < K / 4))
            ((float4 *)(shared + X_AT + m * X_ROW))[x_piece(p)] = v[b];
    }
}
#endif

/* Puts x into shared memory, times the norm's weight; the norm's factor is applied to the results. */
TP_DEVICE void stage_x(u8 *shared, const x_type *x, const float4 *norm_weight, float (&factor)[M]) {
    const int tid = threadIdx.x;
    TP_UNROLL for (int m = 0; m < M; m++) {
        float squares = 0.0f;
        TP_UNROLL for (int start = 0; start < PIECES; start += AT_ONCE) {
            decltype(tp_read4(x)) read[AT_ONCE];
            TP_UNROLL for (int i = 0; i < AT_ONCE; i++) {
                const int p = tid + (start + i) * THREADS;
                read[i] = {};
                if (start + i < PIECES && (K / 4 % THREADS == 0 || p < K / 4)) read[i] = tp_read4(x + m * LDX + 4 * p);
            }
            TP_UNROLL for (int first = 0; first < AT_ONCE; first += BATCH) {
                float4 v[BATCH];
                TP_UNROLL for (int b = 0; b < BATCH; b++) {
                    const int i = start + first + b;
                    v[b] = tp_floats<X>(read[first + b]);
                    if (!NORM || i >= PIECES) continue;
                    squares += v[b].x * v[b].x + v[b].y * v[b].y + v[b].z * v[b].z + v[b].w * v[b].w;
                    v[b].x *= norm_weight[i].x, v[b].y *= norm_weight[i].y;
                    v[b].z *= norm_weight[i].z, v[b].w *= norm_weight[i].w;
                }
                stage_batch(shared, m, start + first, v);
            }
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
TP_DEVICE float4 x_of(const u8 *shared, const x_type *x, const float *norm, int m, int unit, int i) {
    if (X_STAGED) return ((const float4 *)(shared + X_AT + m * X_ROW))[(unit / 32 * (UNIT / 4) + i) * 32 + unit % 32];
    float4 v = tp_floats<X>(tp_read4(x + m * LDX + unit * UNIT + 4 * i));
    if (NORM) {
        const float4 s = *(const float4 *)(norm + unit * UNIT + 4 * i);
        v.x *= s.x, v.y *= s.y, v.z *= s.z, v.w *= s.w;
    }
    return v;
}

TP_DEVICE void add_unit(float (&sum)[VALUES], const u8 *shared, const u8 *slot, const x_type *x, const float *norm,
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

TP_DEVICE void add_stage(float (&sum)[VALUES], const u8 *shared, const u8 *slot, const x_type *x, const float *norm,
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
    if (EPILOGUE == 2) return gate * tp_reciprocal(1.0f + expf(-gate));
    const float inner = 0.7978845608028654f * (gate + 0.044715f * gate * gate * gate);
    return 0.5f * gate * (1.0f + tanhf(inner));
}

/* Two kernels share a multiprocessor: the next fills its ring while this one runs. */
TP_ENTRY void TP_BOUNDS(THREADS, M > 1 || THREADS > 512 ? 1 : 2)
    TP_KERNEL(const x_type *x, const float *norm, const u8 *w, const float *bias, tp_out<Y>::type *y) {
    TP_SHARED(shared);
    TP_STAMP(TP_START);
    tp_launch_dependents();
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
    Ring ring(shared, w);
    ring.fill();

    TP_STAMP(TP_READY);
    tp_wait();
    TP_STAMP(TP_WAITED);
    float factor[M];
    stage_x(shared, x, norm_weight, factor);
    TP_STAMP(TP_STAGED);

    const int lane = tp_opaque(threadIdx.x % 32); /* what follows from it takes no registers while x is staged */
    const int value = lane / SPREAD, m = value / ITEM_ROWS, j = value % ITEM_ROWS;
    float scale = factor[0];
    TP_UNROLL for (int i = 1; i < M; i++) scale = m == i ? factor[i] : scale;
    scale *= weight_scale;
    for (int item = ring.items[0]; item < ITEMS; item = ring.items[0]) {
        const int n = item * ROWS + j % ROWS;
        const bool writes = lane % SPREAD == 0 && j < ROWS && n < N;
        float before = EPILOGUE == 1 && writes ? tp_load((const float *)y + m * LDY + n) : 0.0f;
        if (BIAS && n < N) before += bias[j < ROWS ? n : N + n];
        float sum[VALUES];
        TP_UNROLL for (int i = 0; i < VALUES; i++) sum[i] = 0.0f;
        for (int chunk = 0; chunk < CHUNKS; chunk++) {
            add_stage(sum, shared, ring.wait(), x, norm, chunk, lane);
            ring.refill(chunk);
        }
        float result = fmaf(transpose_sum(sum, lane), scale, before);
        if (EPILOGUE >= 2) {
            const float up = __shfl_xor_sync(TP_ALL, result, ROWS * SPREAD);
            result = activated(result) * up;
        }
        if (writes) y[m * LDY + n] = tp_out<Y>::from(result);
        ring.next();
    }
    TP_STAMP_WARPS(TP_ENDS);
}
