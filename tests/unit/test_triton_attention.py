"""The Triton attention kernels, interpreted, against float64: page edges, windows, groups, garbage in pages."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from triton_interpret import Interpreter, bf16_values, interpreter

from tapeout.compiler.kernels.cuda import attention
from tapeout.compiler.kernels.cuda.attention import Attention, DecodeTile, PrefillTile

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


def rotate(shape: Attention, x: Array, position: int, inv_freq: Array, norm: Array | None) -> Array:
    """Heads [h][D] in float64, normalised where there is a weight and rotated; the angle is a float32."""
    x = x.astype(np.float64)
    if norm is not None:
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + shape.eps) * norm
    if not shape.rope:
        return x
    angle = (np.float32(position) * inv_freq).astype(np.float64)
    c, s = np.cos(angle) * shape.factor, np.sin(angle) * shape.factor
    a, b = np.split(x, 2, -1)
    return np.concatenate((a * c - b * s, b * c + a * s), -1)


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


@dataclass
class Decode:
    """Inputs of a decode launch: one row a sequence, in another order than the segments."""

    shape: Attention
    pool: Pool
    positions: Array
    qkv: Array
    inv_freq: Array
    norms: tuple[Array, Array]

    @staticmethod
    def make(shape: Attention, lengths: list[int], seed: int = 0) -> Decode:
        rng = np.random.default_rng(seed)
        half = shape.head_dim // 2
        return Decode(
            shape,
            Pool.make(rng, shape, lengths),
            np.array(lengths[::-1], np.int32),
            rng.standard_normal((len(lengths), shape.row)).astype(np.float32),
            (10000.0 ** (-np.arange(half) / half)).astype(np.float32),
            (
                rng.uniform(0.5, 2, shape.head_dim).astype(np.float32),
                rng.uniform(0.5, 2, shape.head_dim).astype(np.float32),
            ),
        )

    def launch(self, interpreter: Interpreter, splits: int, tile: int, out: Any, idle: int = 1) -> dict[str, Array]:
        rows, shape = len(self.positions), self.shape
        bucket = rows + idle
        kernel = attention.decode_kernel(shape, splits, DecodeTile(tile), out)
        pad = np.zeros(idle, np.int32)
        group = shape.heads // shape.kv_heads
        part = np.full(bucket * shape.kv_heads * splits * (group * shape.head_dim + 32), np.nan, np.float32)
        kind = {"f32": (np.float32, np.nan), "f16": (np.float16, np.nan), "bf16": (np.uint16, 0x7FC0)}[out]
        return interpreter.launch(
            kernel,
            (splits, shape.kv_heads, bucket),
            qkv=np.concatenate((self.qkv, np.full((idle, shape.row), np.nan, np.float32))),
            positions=np.concatenate((self.positions, pad + 77)),
            row_segment=np.concatenate((np.arange(rows, dtype=np.int32)[::-1], pad)),
            page_table=self.pool.table,
            inv_freq=self.inv_freq,
            q_norm=self.norms[0],
            k_norm=self.norms[1],
            kv=self.pool.kv,
            out=np.full((bucket, shape.heads * shape.head_dim), kind[1], kind[0]),
            partial=part,
            counters=np.zeros(bucket * shape.kv_heads, np.int32),
            counts=np.array([rows, rows, rows, 0], np.int32),
        )

    def want(self) -> tuple[Array, Array]:
        """Outputs [rows][heads][D] and the pool after the write, in float64."""
        shape, out, kv = self.shape, [], self.pool.kv.astype(np.float64)
        norms = self.norms if shape.qk_norm else (None, None)
        for row, position in enumerate(self.positions):
            segment = len(self.positions) - 1 - row
            q, k, v = (
                self.qkv[row, column : column + heads * shape.head_dim].reshape(heads, shape.head_dim)
                for column, heads in (
                    (shape.q_col, shape.heads),
                    (shape.k_col, shape.kv_heads),
                    (shape.v_col, shape.kv_heads),
                )
            )
            q = rotate(shape, q, int(position), self.inv_freq, norms[0])
            k = rotate(shape, k, int(position), self.inv_freq, norms[1])
            page = self.pool.table[segment, position // shape.page_tokens]
            kv[page, 0, :, position % shape.page_tokens] = k
            kv[page, 1, :, position % shape.page_tokens] = v
            keys = np.concatenate((self.pool.keys[segment], k[None]))
            values = np.concatenate((self.pool.values[segment], v[None]))
            out.append(attend(shape, q, keys, values, int(position)))
        return np.stack(out), kv

    def check(self, interpreter: Interpreter, splits: int, tile: int, out: Any = "f32") -> None:
        got = self.launch(interpreter, splits, tile, out)
        want, kv = self.want()
        rows = len(self.positions)
        values = bf16_values(got["out"]) if out == "bf16" else got["out"]
        assert error(values[:rows].reshape(want.shape), want) < (4e-3 if out == "bf16" else 1.5e-3)
        assert np.isnan(values[rows:]).all(), "rows beyond the live ones stay untouched"
        assert not got["counters"].any()
        written = got["kv"].view(np.uint16) != self.pool.kv.view(np.uint16)
        slots = written.any(-1)
        assert slots.sum() <= 2 * rows * self.shape.kv_heads
        np.testing.assert_allclose(got["kv"].astype(np.float64), kv, rtol=2e-3, atol=1e-3, equal_nan=True)


@pytest.mark.parametrize("lengths", [[0], [1], [15], [16], [17], [31, 32, 33], [100, 0, 47]])
def test_decode_at_page_edges(interpreter: Interpreter, lengths: list[int]) -> None:
    Decode.make(make_shape(8, 2, 64), lengths).check(interpreter, splits=3, tile=32)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"),
    [(2, 2, 64), (4, 2, 64), (9, 3, 64), (4, 1, 256), (7, 1, 64), (16, 2, 64), (16, 1, 128)],
)
def test_decode_groups(interpreter: Interpreter, heads: int, kv_heads: int, dim: int) -> None:
    Decode.make(make_shape(heads, kv_heads, dim), [70, 3]).check(interpreter, splits=4, tile=16)


@pytest.mark.parametrize("window", [1, 2, 16, 33, 50])
def test_decode_window(interpreter: Interpreter, window: int) -> None:
    Decode.make(make_shape(4, 2, 64, window=window), [5, 16, 33, 90]).check(interpreter, splits=2, tile=16)


@pytest.mark.parametrize("tokens", [16, 32, 64])
def test_decode_page_sizes(interpreter: Interpreter, tokens: int) -> None:
    Decode.make(make_shape(4, 2, 64, tokens), [tokens - 1, tokens, tokens + 1]).check(interpreter, splits=2, tile=32)


def test_decode_norms_and_output_types(interpreter: Interpreter) -> None:
    shape = make_shape(4, 2, 64, qk_norm=True, factor=1.25)
    Decode.make(shape, [40, 9]).check(interpreter, splits=2, tile=32, out="bf16")
    Decode.make(replace(shape, rope=False), [40, 9]).check(interpreter, splits=2, tile=32, out="f16")


def test_decode_result_does_not_depend_on_unused_splits(interpreter: Interpreter) -> None:
    case = Decode.make(make_shape(4, 2, 64), [60])
    few, many = (case.launch(interpreter, splits, 32, "f32")["out"] for splits in (2, 7))
    np.testing.assert_array_equal(few, many)


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


def test_scratch_covers_every_candidate() -> None:
    for shape in (make_shape(32, 8, 128), make_shape(4, 1, 256, window=40)):
        for sequences in (1, 4, 64):
            for candidate in attention.decode(shape, sequences, 132, 100, "f32"):
                floats = (shape.heads // shape.kv_heads) * shape.head_dim + 32
                blocks = candidate.grid[0] * candidate.grid[1] * candidate.grid[2]
                assert blocks * floats * 4 <= attention.partial_bytes(shape, sequences, 132)
