"""The linear layer on tensor cores, in Triton: y = x W^T for eight rows and more, over every weight format.

Float weights go to shared memory as they are. Quantized weights are turned into bf16 in registers: codes of a part of
each 32-value line (all of it for 8-bit planes, a half for 4-bit, a quarter for 2-bit) make one product with the same
columns of x, so nothing is permuted. With SWAP the product is (W x^T)^T: weights are the operand that may stay in
registers, and a tile of few rows of x is the narrow side.
"""

# pyright: basic
# ruff: noqa: C901, PLR0912, PLR0915, SIM108, SIM300

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

ADD = tl.constexpr(1)
SILU = tl.constexpr(2)


@triton.jit
def _tile(pid, tiles_m, TILES_N: tl.constexpr, GROUP_M: tl.constexpr):
    """Tile of a program. Neighbours share GROUP_M tiles of x and walk along N together, so both stay in L2."""
    width = GROUP_M * TILES_N
    first = pid // width * GROUP_M
    height = tl.minimum(tiles_m - first, GROUP_M)
    return first + pid % width % height, pid % width // height


@triton.jit
def _weight_rows(start, N: tl.constexpr, BN: tl.constexpr, GATED: tl.constexpr, SWAP: tl.constexpr):
    """Rows of the weight in one tile. A gate and its up row lie where one thread holds the sums of both."""
    r = tl.arange(0, BN)
    if not GATED:
        rows = start + r
        if N % BN:
            rows = tl.minimum(rows, N - 1)
    else:
        if SWAP:
            out = start + r // 16 * 8 + r % 8
            up = r // 8 % 2
        else:
            out = start + r // 2
            up = r % 2
        if N % (BN // 2):
            out = tl.minimum(out, N - 1)
        rows = out + up * N
    return rows


@triton.jit
def _prefetch(pointer, ROWS: tl.constexpr, BYTES: tl.constexpr):
    """Bring the first BYTES of rows of weights to L2: constants, so it may run before the previous kernel ended."""
    at = pointer.to(tl.int64)[:, None] + tl.arange(0, BYTES // 128)[None, :] * 128
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _load(pointer, mask, MASKED: tl.constexpr):
    if MASKED:
        return tl.load(pointer, mask=mask, other=0)
    else:
        return tl.load(pointer)


@triton.jit
def _dot(a, b, sums, INTERPRET: tl.constexpr):
    """sums + a b^T. The interpreter multiplies the bits of bf16, so its twin widens them first."""
    if INTERPRET:
        return sums + tl.dot(a.to(tl.float32), tl.trans(b.to(tl.float32)), input_precision="ieee")
    else:
        return tl.dot(a, tl.trans(b), sums, input_precision="ieee")


@triton.jit
def _narrow(value, TYPE: tl.constexpr, INTERPRET: tl.constexpr):
    """float32 to TYPE, to nearest even. The interpreter cuts bf16 off, so its twin rounds by hand."""
    if INTERPRET and TYPE == tl.bfloat16:
        bits = value.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return value.to(TYPE)


@triton.jit
def _float_sums(
    x_rows,
    w_rows,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SWAP: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Sums of a tile with float weights. ``x_rows`` and ``w_rows`` point at the first value of each row."""
    k = tl.arange(0, BK)
    x_at = x_rows[:, None] + k[None, :]
    w_at = w_rows[:, None] + k[None, :]
    if SWAP:
        sums = tl.zeros((BN, BM), tl.float32)
    else:
        sums = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        inside = (k < K - start)[None, :]
        xs = _load(x_at, inside, K % BK != 0)
        ws = _load(w_at, inside, K % BK != 0)
        if SWAP:
            sums = _dot(ws, xs, sums, INTERPRET)
        else:
            sums = _dot(xs, ws, sums, INTERPRET)
        x_at += BK
        w_at += BK
    return sums


@triton.jit
def _field(at, start, part, EVERY: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, PART: tl.constexpr):
    """A field of the scales that stands for EVERY values: [rows, lines] of a tile, or [rows, 1] where all share it."""
    if EVERY % BK == 0:
        return tl.load(at + start // EVERY)[:, None]
    else:
        line = start // 32 + tl.arange(0, BK // 32)
        if EVERY == 16:
            index = line * 2 + part * PART // 16
        else:
            index = line // (EVERY // 32)
        return _load(at[:, None] + index[None, :], (line < K // 32)[None, :], K % BK != 0)


@triton.jit
def _spread(value, ROWS: tl.constexpr, BK: tl.constexpr, PART: tl.constexpr):
    """[rows, lines] or [rows, 1] to one value for each code of a part."""
    if value.shape[1] == 1:
        return value
    else:
        wide = tl.broadcast_to(value[:, :, None], (ROWS, BK // 32, PART))
        return tl.reshape(wide, (ROWS, BK // 32 * PART))


@triton.jit
def _e4m3(codes):
    """e4m3 bytes to float32 by moving the bits: the exponents differ by 120, subnormal numbers come out right too."""
    codes = codes.to(tl.int32)
    bits = ((codes & 0x80) << 24) | ((codes & 0x7F) << 20)
    return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36


@triton.jit
def _codes(
    main,
    high,
    column,
    part: tl.constexpr,
    BITS: tl.constexpr,
    HIGH: tl.constexpr,
    LOW: tl.constexpr,
    ZERO: tl.constexpr,
):
    """Codes of one part as float32, their zero taken off. An integer below 2**23 is the mantissa of 2**23 + itself."""
    codes = main.to(tl.int32)
    if BITS == 8:
        return ((codes ^ 0x80) | 0x4B000000).to(tl.float32, bitcast=True) - 8388736.0
    else:
        codes = (codes >> (BITS * part)) & ((1 << BITS) - 1)  # pyright: ignore
        if HIGH:
            shift = (BITS * part + column // 4) // HIGH * HIGH
            codes |= ((high.to(tl.int32) >> shift) & ((1 << HIGH) - 1)) << LOW  # pyright: ignore
        return (codes | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + ZERO)


@triton.jit
def linear(
    x,
    w,
    bias,
    y,
    counts,
    ELEMENT: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    LDX: tl.constexpr,
    LDY: tl.constexpr,
    EPILOGUE: tl.constexpr,
    BIAS: tl.constexpr,
    COUNT_INDEX: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP_M: tl.constexpr,
    SWAP: tl.constexpr,
    AHEAD: tl.constexpr,
    BITS: tl.constexpr,
    HIGH: tl.constexpr,
    LOW: tl.constexpr,
    ZERO: tl.constexpr,
    MIN_SIGN: tl.constexpr,
    GROUP: tl.constexpr,
    SUPER: tl.constexpr,
    MAIN_ROW: tl.constexpr,
    HIGH_PLANE: tl.constexpr,
    HIGH_ROW: tl.constexpr,
    SCALES: tl.constexpr,
    SCALES_ROW: tl.constexpr,
    SCALES_TILE: tl.constexpr,
    D_BF16: tl.constexpr,
    DMIN: tl.constexpr,
    SUB: tl.constexpr,
    SUBMIN: tl.constexpr,
    ZEROS: tl.constexpr,
    PDL: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """x: [rows][LDX] of bf16, f16 or f32; w: N rows (2 N when gated, the gates first); y: [rows][LDY].

    y is float32, or x's type when gated. EPILOGUE: 0 store, 1 add into y, 2 silu(gate) * up, 3 gelu_tanh(gate) * up.
    Rows are read from counts[COUNT_INDEX]; tiles beyond them do nothing. ELEMENT: "float", "int" or "e4m3".
    SCALES_TILE rows of the weight share a row of scales. With e4m3, GROUP == K says that a row of the weight has one
    scale, not that all rows have the same.
    """
    GATED: tl.constexpr = EPILOGUE >= 2
    OUT: tl.constexpr = BN // 2 if GATED else BN
    TILES_N: tl.constexpr = (N + OUT - 1) // OUT
    if PDL:
        gdc_launch_dependents()
    rows = tl.load(counts + COUNT_INDEX)
    tiles_m = (rows + BM - 1) // BM
    pid = tl.program_id(0)
    tile_m, tile_n = _tile(pid, tiles_m, TILES_N, GROUP_M)  # pyright: ignore
    w_row = _weight_rows(tile_n * OUT, N, BN, GATED, SWAP)
    ROW_BYTES: tl.constexpr = K * w.dtype.element_ty.primitive_bitwidth // 8 if ELEMENT == "float" else MAIN_ROW
    if AHEAD and PDL and not INTERPRET:
        _prefetch(w.to(tl.pointer_type(tl.uint8)) + w_row.to(tl.int64) * ROW_BYTES, BN, AHEAD)
    if PDL:
        gdc_wait()
    if pid >= tiles_m * TILES_N:
        return
    m = tile_m * BM + tl.arange(0, BM)
    x_rows = x + tl.minimum(m, rows - 1).to(tl.int64) * LDX
    if ELEMENT == "float":
        sums = _float_sums(x_rows, w + w_row.to(tl.int64) * K, K, BM, BN, BK, SWAP, INTERPRET)
    else:
        PARTS: tl.constexpr = 8 // BITS
        PART: tl.constexpr = 32 // PARTS
        LINES: tl.constexpr = BK // 32
        column = tl.arange(0, LINES * PART)
        line = column // PART
        inner = column % PART
        x_at = x_rows[:, None] + (line * 32 + inner)[None, :]
        main_at = w + w_row.to(tl.int64)[:, None] * MAIN_ROW + column[None, :]
        if HIGH:
            HIGH_LINE: tl.constexpr = 4 * HIGH
            high_row = w + HIGH_PLANE + w_row.to(tl.int64) * HIGH_ROW
            high_at = high_row[:, None] + (line * HIGH_LINE + inner % HIGH_LINE)[None, :]
        D_TYPE: tl.constexpr = tl.float32 if ELEMENT == "e4m3" else tl.bfloat16 if D_BF16 else tl.float16
        scale_row = w + SCALES + (w_row // SCALES_TILE).to(tl.int64) * SCALES_ROW
        d_at = scale_row.to(tl.pointer_type(D_TYPE))
        sums = tl.zeros((BN, BM), tl.float32)
        for start in range(0, K, BK):
            inside = (line * 32 < K - start)[None, :]
            codes = _load(main_at, inside, K % BK != 0)
            if HIGH:
                high = _load(high_at, inside, K % BK != 0)
            else:
                high = codes
            if ELEMENT == "e4m3":
                xs = _load(x_at, inside, K % BK != 0)
                if GROUP == K:
                    sums = _dot(_narrow(_e4m3(codes), x.dtype.element_ty, INTERPRET), xs, sums, INTERPRET)
                else:
                    values = _narrow(_e4m3(codes), x.dtype.element_ty, INTERPRET)
                    block = _dot(values, xs, tl.zeros((BN, BM), tl.float32), INTERPRET)
                    sums += block * tl.load(d_at + start // GROUP)[:, None]
            else:
                d = _field(d_at, start, 0, SUPER, K, BK, PART).to(tl.float32)
                if DMIN >= 0:
                    dmin_at = (scale_row + DMIN).to(tl.pointer_type(tl.float16))
                    dmin = _field(dmin_at, start, 0, SUPER, K, BK, PART).to(tl.float32) * MIN_SIGN
                for part in tl.static_range(PARTS):
                    scale = d
                    if SUB >= 0:
                        sub_at = (scale_row + SUB).to(tl.pointer_type(tl.int8))
                        scale = d * _field(sub_at, start, part, GROUP, K, BK, PART).to(tl.float32)
                    values = _codes(codes, high, inner[None, :], part, BITS, HIGH, LOW, ZERO)
                    if ZEROS >= 0:
                        zeros = _field(scale_row + ZEROS, start, part, GROUP, K, BK, PART).to(tl.float32)
                        values -= _spread(zeros, BN, BK, PART)
                    values = values * _spread(scale, BN, BK, PART)
                    if DMIN >= 0:
                        least = dmin
                        if SUBMIN >= 0:
                            least = dmin * _field(scale_row + SUBMIN, start, part, GROUP, K, BK, PART).to(tl.float32)
                        values += _spread(least, BN, BK, PART)
                    xs = _load(x_at + part * PART, inside, K % BK != 0)
                    sums = _dot(_narrow(values, x.dtype.element_ty, INTERPRET), xs, sums, INTERPRET)
            x_at += BK
            main_at += LINES * PART
            if HIGH:
                high_at += LINES * HIGH_LINE
        if ELEMENT == "e4m3" and GROUP == K:
            sums *= tl.load(d_at)[:, None]
    _finish(sums, bias, y, w_row, m, rows, tile_n * OUT, N, LDY, EPILOGUE, BIAS, BM, BN, OUT, SWAP, INTERPRET)


@triton.jit
def _finish(
    sums,
    bias,
    y,
    w_row,
    m,
    rows,
    start,
    N: tl.constexpr,
    LDY: tl.constexpr,
    EPILOGUE: tl.constexpr,
    BIAS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    OUT: tl.constexpr,
    SWAP: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Bias, gate or addition, and the store of what is inside y."""
    if BIAS:
        added = tl.load(bias + w_row)
        if SWAP:
            sums += added[:, None]
        else:
            sums += added[None, :]
    if EPILOGUE >= SILU:
        if SWAP:
            pairs = tl.permute(tl.reshape(sums, (BN // 16, 2, 8, BM)), (0, 2, 3, 1))
            gate, up = tl.split(pairs)
            gate = tl.reshape(gate, (OUT, BM))
            up = tl.reshape(up, (OUT, BM))
        else:
            gate, up = tl.split(tl.reshape(sums, (BM, OUT, 2)))
        if EPILOGUE == SILU:
            sums = gate / (1.0 + tl.exp(-gate)) * up
        else:
            inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
            sums = gate / (1.0 + tl.exp(-2.0 * inner)) * up
    n = start + tl.arange(0, OUT)
    if SWAP:
        at = y + m.to(tl.int64)[None, :] * LDY + n[:, None]
        inside = (m < rows)[None, :] & (n < N)[:, None]
    else:
        at = y + m.to(tl.int64)[:, None] * LDY + n[None, :]
        inside = (m < rows)[:, None] & (n < N)[None, :]
    if EPILOGUE == ADD:
        sums += tl.load(at, mask=inside, other=0.0)
    tl.store(at, _narrow(sums, y.dtype.element_ty, INTERPRET), mask=inside)
