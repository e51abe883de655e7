"""Paged attention in Triton: chunks of a prompt.

Scores are f32 in base 2 (the scale carries log2 e), weights of the values f16, sums f32. Keys and values lie in f16
pages [K: kv_head][T][D] | [V: kv_head][T][D]. Query heads that share a key head are the rows of one tile.
"""

# pyright: basic

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LOG2E = tl.constexpr(1.4426950408889634)


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
