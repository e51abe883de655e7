"""Paged attention in Triton: one query a sequence with split-K over the live keys, and chunks of a prompt.

Scores are f32 in base 2 (the scale carries log2 e), weights of the values f16, sums f32. Keys and values lie in f16
pages [K: kv_head][T][D] | [V: kv_head][T][D]. Query heads that share a key head are the rows of one tile.
"""

# pyright: basic
# ruff: noqa: PLR0915

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _sincos(x, INTERPRET: tl.constexpr):
    """Sine and cosine to float32 for 0 <= x < 2**24: Cody-Waite reduction by fused products, then Taylor series.

    pi/2 stands as three floats. The first step is exact: quarter * 1.5707964 and x are multiples of 2**-23 and their
    difference is below one. The interpreter has no fused product; numpy's own functions are its twin.
    """
    if INTERPRET:
        sine = tl.sin(x)
        cosine = tl.cos(x)
    else:
        quarter = tl.floor(x * 0.6366197723675814 + 0.5)
        r = tl.fma(quarter, -1.57079637050628662109375, x)
        r = tl.fma(quarter, 4.37113900018624283e-8, r)
        r = tl.fma(quarter, 1.71512451e-15, r)
        z = r * r
        s = tl.fma(z, 1 / 362880, -1 / 5040)
        s = tl.fma(z, s, 1 / 120)
        s = tl.fma(z, s, -1 / 6)
        s = tl.fma(z * r, s, r)
        c = tl.fma(z, -1 / 3628800, 1 / 40320)
        c = tl.fma(z, c, -1 / 720)
        c = tl.fma(z, c, 1 / 24)
        c = tl.fma(z, c, -0.5)
        c = tl.fma(z, c, 1.0)
        n = quarter.to(tl.int32)
        swap = (n & 1) != 0
        sine = tl.where(swap, c, s)
        cosine = tl.where(swap, s, c)
        sine = tl.where((n & 2) != 0, -sine, sine)
        cosine = tl.where(((n + 1) & 2) != 0, -cosine, cosine)
    return sine, cosine


@triton.jit
def _pages(table, start, end, T: tl.constexpr, BN: tl.constexpr):
    """Page ids of keys start..start+BN-1: one where a tile lies within a page, else one a key; 0 from ``end`` on."""
    if T >= BN:
        pages = tl.load(table + start // T, mask=start < end, other=0)
    else:
        keys = start + tl.arange(0, BN)
        pages = tl.load(table + keys // T, mask=keys < end, other=0)
    return pages


@triton.jit
def _rows(pages, keys, T: tl.constexpr, D: tl.constexpr, KV_HEADS: tl.constexpr):
    """Element offsets of the rows of keys in their pages, without head; values lie KV_HEADS*T*D further."""
    return pages.to(tl.int64) * (2 * KV_HEADS * T * D) + (keys & (T - 1)) * D


@triton.jit
def _accumulate(s, v, top, total, acc):
    """One tile's scores s [M, BN] (base 2; -inf hidden) and values v into the running maximum, sum and output."""
    peak = tl.maximum(top, tl.max(s, 1))
    p = tl.exp2(s - peak[:, None])
    decay = tl.exp2(top - peak)
    total = total * decay + tl.sum(p, 1)
    acc = tl.dot(p.to(tl.float16), v, acc * decay[:, None])
    return peak, total, acc


@triton.jit
def _head(lo, hi, norm_lo, norm_hi, cosine, sine, D: tl.constexpr, EPS: tl.constexpr, QK_NORM: tl.constexpr):
    """Rows of heads, as halves [M, D/2], normalised and rotated."""
    if QK_NORM:
        square = tl.sum(lo * lo, 1) + tl.sum(hi * hi, 1)
        inverse = 1.0 / tl.sqrt_rn(square / D + EPS)
        lo = lo * inverse[:, None] * norm_lo
        hi = hi * inverse[:, None] * norm_hi
    return lo * cosine - hi * sine, hi * cosine + lo * sine


@triton.jit
def _combine(part, out, used, G: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr):
    """Sums the partial results of ``used`` splits in their order and writes the heads of one key head to ``out``."""
    GP: tl.constexpr = triton.next_power_of_2(G)
    STRIDE: tl.constexpr = G * D + 32
    CHUNK: tl.constexpr = 8 // (1 + GP * D // 2048)
    g = tl.arange(0, GP)
    d = tl.arange(0, D)
    s = tl.arange(0, triton.next_power_of_2(SPLITS))
    live = (s < used)[:, None] & (g < G)[None, :]
    at = s[:, None] * STRIDE + G * D + g[None, :]
    tops = tl.load(part + at, mask=live, other=float("-inf"), cache_modifier=".cg")
    totals = tl.load(part + at + 16, mask=live, other=0.0, cache_modifier=".cg")
    peak = tl.where(g < G, tl.max(tops, 0), 0.0)
    total = tl.sum(totals * tl.exp2(tops - peak[None, :]), 0)
    acc = tl.zeros((GP, D), tl.float32)
    for first in range(0, used, CHUNK):
        c = first + tl.arange(0, CHUNK)
        row = (c < used)[:, None] & (g < G)[None, :]
        w = tl.load(
            part + c[:, None] * STRIDE + G * D + g[None, :], mask=row, other=float("-inf"), cache_modifier=".cg"
        )
        w = tl.exp2(w - peak[None, :])
        x = tl.load(
            part + c[:, None, None] * STRIDE + g[None, :, None] * D + d[None, None, :],
            mask=row[:, :, None],
            other=0.0,
            cache_modifier=".cg",
        )
        acc += tl.sum(x * w[:, :, None], 0)
    total = tl.where(g < G, total, 1.0)
    y = acc / total[:, None]
    tl.store(out + g[:, None] * D + d[None, :], y.to(out.dtype.element_ty), mask=(g < G)[:, None])


@triton.jit
def _turn(position, inv_freq, D: tl.constexpr, ROPE: tl.constexpr, FACTOR: tl.constexpr, INTERPRET: tl.constexpr):
    """Sines and cosines [1, D/2] of a position's rotation."""
    if ROPE:
        angle = position.to(tl.float32) * tl.load(inv_freq + tl.arange(0, D // 2))
        sine, cosine = _sincos(angle, INTERPRET)  # pyright: ignore
        sine = (sine * FACTOR)[None, :]
        cosine = (cosine * FACTOR)[None, :]
    else:
        sine = tl.zeros((1, D // 2), tl.float32)
        cosine = tl.full((1, D // 2), 1.0, tl.float32)
    return sine, cosine


@triton.jit
def _halves(norm, D: tl.constexpr, QK_NORM: tl.constexpr):
    """The halves [1, D/2] of a head's norm weights."""
    if QK_NORM:
        h = tl.arange(0, D // 2)
        lo = tl.load(norm + h)[None, :]
        hi = tl.load(norm + D // 2 + h)[None, :]
    else:
        lo = tl.full((1, D // 2), 1.0, tl.float32)
        hi = lo
    return lo, hi


@triton.jit
def _finish(top, total, acc, out, part, counter, split, used, G: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr):
    """One block's result to ``out``, or where several share the keys to its part; the last to arrive combines."""
    STRIDE: tl.constexpr = G * D + 32
    g = tl.arange(0, 16)
    at = g[:, None] * D + tl.arange(0, D)[None, :]
    if used == 1:
        tl.store(out + at, (acc / total[:, None]).to(out.dtype.element_ty), mask=(g < G)[:, None])
    else:
        mine = part + split * STRIDE
        tl.store(mine + at, acc, mask=(g < G)[:, None])
        tl.store(mine + G * D + g, top, mask=g < G)
        tl.store(mine + G * D + 16 + g, total, mask=g < G)
        tl.debug_barrier()
        arrived = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
        if arrived == used - 1:
            tl.debug_barrier()
            _combine(part, out, used, G, D, SPLITS)
            tl.store(counter, 0)


@triton.jit
def attention_decode(
    qkv,
    positions,
    row_segment,
    page_table,
    inv_freq,
    q_norm,
    k_norm,
    kv,
    out,
    partial,
    counters,
    counts,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    LD: tl.constexpr,
    Q_COL: tl.constexpr,
    K_COL: tl.constexpr,
    V_COL: tl.constexpr,
    T: tl.constexpr,
    MAX_PAGES: tl.constexpr,
    ROPE: tl.constexpr,
    FACTOR: tl.constexpr,
    EPS: tl.constexpr,
    QK_NORM: tl.constexpr,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLITS: tl.constexpr,
    ALONE: tl.constexpr,
    BN: tl.constexpr,
    PDL: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """One query row a sequence; grid (SPLITS, KV_HEADS, sequences). Writes the row's key and value to its page.

    Block ``split`` takes a run of tiles of the keys before the current one; the first also takes the current key and
    value, straight from ``qkv``, so that no block waits for another's write. Up to ALONE tiles stay in one block; else
    the last block to arrive combines. Everything that older steps wrote is read before the wait.
    """
    split = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.program_id(2)
    if PDL:
        gdc_launch_dependents()
    G: tl.constexpr = HEADS // KV_HEADS
    HALF: tl.constexpr = D // 2
    rows = tl.load(counts)
    position = tl.load(positions + row)
    table = page_table + tl.load(row_segment + row) * MAX_PAGES
    first = 0
    if WINDOW > 0:
        first = tl.maximum(position - WINDOW + 1, 0)
    base = first // BN * BN
    tiles = (position - base + BN - 1) // BN
    each = tl.where(tiles <= ALONE, tl.maximum(tiles, 1), (tiles + SPLITS - 1) // SPLITS)
    used = tl.maximum((tiles + each - 1) // each, 1)
    if (split >= used) | (row >= rows):
        if PDL:
            gdc_wait()
        return

    start = base + split * each * BN
    end = tl.minimum(position, start + each * BN)
    n = tl.arange(0, BN)
    d = tl.arange(0, D)
    h = tl.arange(0, HALF)
    g = tl.arange(0, 16)
    pool = kv + head * (T * D)
    pages = _pages(table, start, end, T, BN)
    following = _pages(table, start + BN, end, T, BN)
    at = _rows(pages, start + n, T, D, KV_HEADS)
    seen = (start + n < end) & (start + n >= first)
    k = tl.load(pool + at[:, None] + d[None, :], mask=seen[:, None], other=0.0)
    v = tl.load(pool + KV_HEADS * T * D + at[:, None] + d[None, :], mask=seen[:, None], other=0.0)
    sine, cosine = _turn(position, inv_freq, D, ROPE, FACTOR, INTERPRET)
    qn_lo, qn_hi = _halves(q_norm, D, QK_NORM)
    kn_lo, kn_hi = _halves(k_norm, D, QK_NORM)
    if PDL:
        gdc_wait()

    line = qkv + row.to(tl.int64) * LD
    q_at = line + Q_COL + (head * G + g)[:, None] * D + h[None, :]
    q_lo = tl.load(q_at, mask=(g < G)[:, None], other=0.0)
    q_hi = tl.load(q_at + HALF, mask=(g < G)[:, None], other=0.0)
    k_lo = tl.load(line + K_COL + head * D + h)[None, :]
    k_hi = tl.load(line + K_COL + head * D + HALF + h)[None, :]
    value = tl.load(line + V_COL + head * D + d).to(tl.float16)
    q_lo, q_hi = _head(q_lo, q_hi, qn_lo, qn_hi, cosine, sine, D, EPS, QK_NORM)
    k_lo, k_hi = _head(k_lo, k_hi, kn_lo, kn_hi, cosine, sine, D, EPS, QK_NORM)
    q_lo = q_lo.to(tl.float16)
    q_hi = q_hi.to(tl.float16)
    k_lo = k_lo.to(tl.float16)
    k_hi = k_hi.to(tl.float16)
    mine = split == 0
    if mine:
        slot = _rows(tl.load(table + position // T), position, T, D, KV_HEADS)
        tl.store(pool + slot + h, tl.reshape(k_lo, (HALF,)))
        tl.store(pool + slot + HALF + h, tl.reshape(k_hi, (HALF,)))
        tl.store(pool + slot + KV_HEADS * T * D + d, value)
    current = tl.sum(q_lo.to(tl.float32) * k_lo.to(tl.float32) + q_hi.to(tl.float32) * k_hi.to(tl.float32), 1)
    top = tl.where(mine, current * (SCALE * LOG2E), float("-inf"))
    total = tl.where(mine, 1.0, 0.0) + tl.zeros((16,), tl.float32)
    acc = tl.where(mine, value.to(tl.float32), 0.0)[None, :] + tl.zeros((16, D), tl.float32)
    q = tl.reshape(tl.permute(tl.join(q_lo, q_hi), (0, 2, 1)), (16, D))

    if start < end:
        s = tl.where(seen[None, :], tl.dot(q, tl.trans(k)) * (SCALE * LOG2E), float("-inf"))
        top, total, acc = _accumulate(s, v, top, total, acc)
    for at_key in range(start + BN, end, BN):
        at = _rows(following, at_key + n, T, D, KV_HEADS)
        seen = at_key + n < end
        k = tl.load(pool + at[:, None] + d[None, :], mask=seen[:, None], other=0.0)
        v = tl.load(pool + KV_HEADS * T * D + at[:, None] + d[None, :], mask=seen[:, None], other=0.0)
        following = _pages(table, at_key + BN, end, T, BN)
        s = tl.where(seen[None, :], tl.dot(q, tl.trans(k)) * (SCALE * LOG2E), float("-inf"))
        top, total, acc = _accumulate(s, v, top, total, acc)

    to_out = out + row.to(tl.int64) * (HEADS * D) + head * (G * D)
    pair = row * KV_HEADS + head
    part = partial + pair.to(tl.int64) * (SPLITS * (G * D + 32))
    _finish(top, total, acc, to_out, part, counters + pair, split, used, G, D, SPLITS)


@triton.jit
def _prefill_keys(
    q,
    pool,
    table,
    start,
    end,
    last,
    place,
    top,
    total,
    acc,
    D: tl.constexpr,
    T: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    BN: tl.constexpr,
    MASK: tl.constexpr,
):
    """Keys [start, end), start a multiple of BN; keys from ``last`` on are not read. ``place``: positions [BM]."""
    n = tl.arange(0, BN)
    d = tl.arange(0, D)
    following = _pages(table, start, last, T, BN)
    for at_key in range(start, end, BN):
        at = _rows(following, at_key + n, T, D, KV_HEADS)
        keys = at_key + n
        if MASK:
            seen = (keys < last)[:, None]
            k = tl.load(pool + at[:, None] + d[None, :], mask=seen, other=0.0)
            v = tl.load(pool + KV_HEADS * T * D + at[:, None] + d[None, :], mask=seen, other=0.0)
        else:
            k = tl.load(pool + at[:, None] + d[None, :])
            v = tl.load(pool + KV_HEADS * T * D + at[:, None] + d[None, :])
        following = _pages(table, at_key + BN, last, T, BN)
        s = tl.dot(q, tl.trans(k))
        if MASK:
            visible = keys[None, :] <= place[:, None]
            if WINDOW > 0:
                visible = visible & (place[:, None] - keys[None, :] < WINDOW)
            s = tl.where(visible, s, float("-inf"))
        peak = tl.maximum(top, tl.max(s, 1) * (SCALE * LOG2E))
        shift = tl.where(peak == float("-inf"), 0.0, peak) if WINDOW > 0 else peak
        p = tl.exp2(s * (SCALE * LOG2E) - shift[:, None])
        decay = tl.exp2(top - shift)
        total = total * decay + tl.sum(p, 1)
        acc = tl.dot(p.to(tl.float16), v, acc * decay[:, None])
        top = peak
    return top, total, acc


@triton.jit
def attention_prefill(
    q,
    positions,
    row_segment,
    page_table,
    kv,
    out,
    counts,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    T: tl.constexpr,
    MAX_PAGES: tl.constexpr,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    PDL: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Rows of one segment at consecutive positions against keys 0..position; grid (KV_HEADS, row blocks).

    A tile holds BM // G rows of the G query heads of one key head; the blocks with most keys start first.
    """
    if PDL:
        gdc_launch_dependents()
    G: tl.constexpr = HEADS // KV_HEADS
    BP: tl.constexpr = BM // G
    head = tl.program_id(0)
    first_row = (tl.num_programs(1) - 1 - tl.program_id(1)) * BP
    rows = tl.load(counts)
    position = tl.load(positions)
    table = page_table + tl.load(row_segment) * MAX_PAGES
    if PDL:
        gdc_wait()
    if first_row >= rows:
        return

    m = tl.arange(0, BM)
    d = tl.arange(0, D)
    row = first_row + m // G
    live = (m < BP * G) & (row < rows)
    at = row.to(tl.int64) * (HEADS * D) + (head * G + m % G) * D
    query = tl.load(q + at[:, None] + d[None, :], mask=live[:, None], other=0.0)
    place = position + row
    pool = kv + head * (T * D)
    begin = position + first_row
    last = tl.minimum(begin + BP, position + rows)
    top = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, D), tl.float32)
    if WINDOW > 0:
        start = tl.maximum(begin - WINDOW + 1, 0) // BN * BN
    else:
        start = (begin + 1) // BN * BN
        top, total, acc = _prefill_keys(
            query, pool, table, 0, start, last, place, top, total, acc, D, T, KV_HEADS, SCALE, WINDOW, BN, False
        )
    top, total, acc = _prefill_keys(
        query, pool, table, start, last, last, place, top, total, acc, D, T, KV_HEADS, SCALE, WINDOW, BN, True
    )
    y = acc / tl.where(live, total, 1.0)[:, None]
    tl.store(out + at[:, None] + d[None, :], y.to(out.dtype.element_ty), mask=live[:, None])
