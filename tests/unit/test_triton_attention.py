"""The Triton attention kernel, interpreted, against float64: page edges, windows, groups, garbage in pages."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from triton_interpret import Interpreter, interpreter

from tapeout.compiler.kernels.cuda import attention
from tapeout.compiler.kernels.cuda.attention import Attention, PrefillTile

__all__ = ["interpreter"]
Array = npt.NDArray[Any]
GARBAGE_PAGE = 2**30


def make_shape(heads: int, kv_heads: int, head_dim: int, tokens: int = 16, **changes: Any) -> Attention:
    q, kv = heads * head_dim, kv_heads * head_dim
    shape = Attention(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_tokens=tokens,
        max_pages=16,
        scale=head_dim**-0.5,
        row=q + 2 * kv + 8,
        q_col=4,
        k_col=q + 4,
        v_col=q + kv + 4,
    )
    return replace(shape, **changes)


@dataclass
class Pool:
    """Keys and values of several sequences [length][kv_head][D], in permuted pages among NaN."""

    kv: npt.NDArray[np.float16]
    table: npt.NDArray[np.int32]
    keys: list[Array]
    values: list[Array]

    @staticmethod
    def make(rng: np.random.Generator, shape: Attention, lengths: list[int], room: int = 1) -> Pool:
        """Pools with ``room`` more slots a sequence than keys."""
        tokens, dims = shape.page_tokens, (shape.kv_heads, shape.page_tokens, shape.head_dim)
        pages = [-(-(length + room) // tokens) for length in lengths]
        order = rng.permutation(sum(pages) + 3)
        kv = np.full((len(order), 2, *dims), np.nan, np.float16)
        table = np.full((len(lengths), shape.max_pages), GARBAGE_PAGE, np.int32)
        keys, values = [], []
        for segment, length in enumerate(lengths):
            mine = order[sum(pages[:segment]) :][: pages[segment]]
            table[segment, : len(mine)] = mine
            for kind, held in enumerate((keys, values)):
                x = rng.standard_normal((length, shape.kv_heads, shape.head_dim)).astype(np.float16)
                held.append(x)
                for p in range(length):
                    kv[mine[p // tokens], kind, :, p % tokens] = x[p]
        return Pool(kv, table, keys, values)


def attend(shape: Attention, q: Array, keys: Array, values: Array, position: int) -> Array:
    """One row of queries [heads][D] over keys 0..position, in float64."""
    first = max(0, position - shape.window + 1) if shape.window else 0
    group = shape.heads // shape.kv_heads
    k = np.repeat(keys[first : position + 1].astype(np.float64), group, 1)
    v = np.repeat(values[first : position + 1].astype(np.float64), group, 1)
    scores = np.einsum("hd,jhd->hj", q, k) * shape.scale
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hj,jhd->hd", weights / weights.sum(-1, keepdims=True), v)


def error(got: Array, want: Array) -> float:
    return float(np.linalg.norm(got.astype(np.float64) - want) / np.linalg.norm(want))


def check_prefill(
    interpreter: Interpreter,
    shape: Attention,
    position: int,
    rows: int,
    height: int = 16,
    tile: int = 16,
    seed: int = 0,
) -> None:
    rng = np.random.default_rng(seed)
    pool = Pool.make(rng, shape, [3, position + rows], room=0)
    bucket = rows + 5
    q = rng.standard_normal((bucket, shape.heads, shape.head_dim)).astype(np.float16)
    q[rows:] = np.nan
    kernel = attention.prefill_kernel(shape, PrefillTile(height, tile, 4, 2), "f16")
    blocks = -(-bucket // (height // (shape.heads // shape.kv_heads)))
    got = interpreter.launch(
        kernel,
        (shape.kv_heads, blocks, 1),
        q=q,
        positions=np.arange(position, position + bucket, dtype=np.int32),
        row_segment=np.ones(bucket, np.int32),
        page_table=pool.table,
        kv=pool.kv,
        out=np.full((bucket, shape.heads * shape.head_dim), np.nan, np.float16),
        counts=np.array([rows, 1, 1, 0], np.int32),
    )["out"]
    want = np.stack([attend(shape, q[r], pool.keys[1], pool.values[1], position + r) for r in range(rows)])
    assert error(got[:rows].reshape(want.shape), want) < 1.5e-3
    assert np.isnan(got[rows:]).all()


@pytest.mark.parametrize("position", [0, 1, 15, 16, 17, 40])
@pytest.mark.parametrize("rows", [1, 17])
def test_prefill_at_page_edges(interpreter: Interpreter, position: int, rows: int) -> None:
    check_prefill(interpreter, make_shape(4, 2, 64), position, rows)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(2, 2, 64), (9, 3, 64), (4, 1, 256), (7, 1, 64), (8, 1, 128), (16, 1, 64)]
)
def test_prefill_groups(interpreter: Interpreter, heads: int, kv_heads: int, dim: int) -> None:
    check_prefill(interpreter, make_shape(heads, kv_heads, dim), 21, 24)


@pytest.mark.parametrize("window", [1, 5, 16, 40])
def test_prefill_window(interpreter: Interpreter, window: int) -> None:
    check_prefill(interpreter, make_shape(4, 2, 64, window=window), 37, 30, height=32)


@pytest.mark.parametrize("tokens", [32, 64])
def test_prefill_page_sizes(interpreter: Interpreter, tokens: int) -> None:
    check_prefill(interpreter, make_shape(4, 2, 64, tokens), tokens - 1, 40, height=32, tile=32)
