"""Decode attention in CUDA C++, run by the host emulation and compared with float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from cuda_host import EARLY, run, supported
from test_triton_attention import Decode, error, make_shape
from triton_interpret import bf16_values

from tapeout.compiler.kernels.cuda import attention
from tapeout.compiler.kernels.cuda.attention import Attention, Blocks

Array = npt.NDArray[Any]
pytestmark = pytest.mark.skipif(not supported(), reason="the host emulation needs AVX2, FMA and F16C")

ONE = Blocks(warps=2, cluster=1, tiles=1, near=1, far=1)


def launch(case: Decode, blocks: Blocks, count: int, out: Any, seed: int, idle: int = 1) -> dict[str, Array]:
    """All arrays as the launch left them, with ``idle`` rows in the bucket beyond the live ones."""
    rows, shape = len(case.positions), case.shape
    bucket, group = rows + idle, shape.heads // shape.kv_heads
    kind, fill = {"f32": (np.float32, np.nan), "f16": (np.float16, np.nan), "bf16": (np.uint16, 0x7FC0)}[out]
    pad = np.zeros(idle, np.int32)
    arrays: dict[str, Array] = {
        "qkv": np.concatenate((case.qkv, np.full((idle, shape.row), np.nan, np.float32))),
        "positions": np.concatenate((case.positions, pad + 77)),
        "row_segment": np.concatenate((np.arange(rows, dtype=np.int32)[::-1], pad)),
        "page_table": case.pool.table.copy(),
        "inv_freq": case.inv_freq,
        "q_norm": case.norms[0],
        "k_norm": case.norms[1],
        "kv": case.pool.kv.copy(),
        "out": np.full((bucket, shape.heads * shape.head_dim), fill, kind),
        "partial": np.full(bucket * shape.kv_heads * count * (group * shape.head_dim + 32), np.nan, np.float32),
        "counters": np.zeros(attention.counter_bytes(shape, bucket) // 4, np.int32),
        "counts": np.array([rows, rows, rows, 0], np.int32),
    }
    kernel = attention.cuda_decode_kernel(shape, count, blocks, out)
    run(kernel, (count, shape.kv_heads, bucket), arrays, seed, early=EARLY | {"kv"})
    return arrays


def check(
    case: Decode, blocks: Blocks = ONE, count: int = 3, out: Any = "f32", seeds: tuple[int, ...] = (0, 1)
) -> None:
    want, kv = case.want()
    rows = len(case.positions)
    results: list[Array] = []
    for seed in seeds:
        got = launch(case, blocks, count, out, seed)
        values = bf16_values(got["out"]) if out == "bf16" else got["out"]
        assert error(values[:rows].reshape(want.shape), want) < (4e-3 if out == "bf16" else 1.5e-3)
        assert np.isnan(values[rows:]).all(), "rows beyond the live ones stay untouched"
        assert not got["counters"].any()
        written = (got["kv"].view(np.uint16) != case.pool.kv.view(np.uint16)).any(-1)
        assert written.sum() <= 2 * rows * case.shape.kv_heads
        np.testing.assert_allclose(got["kv"].astype(np.float64), kv, rtol=2e-3, atol=1e-3, equal_nan=True)
        results.append(got["out"])
    for other in results[1:]:
        np.testing.assert_array_equal(results[0], other)


@pytest.mark.parametrize("lengths", [[0], [1], [15], [16], [17], [31, 32, 33], [100, 0, 47]])
def test_page_edges(lengths: list[int]) -> None:
    check(Decode.make(make_shape(8, 2, 64), lengths))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"),
    [(2, 2, 64), (4, 2, 64), (9, 3, 64), (4, 1, 256), (7, 1, 64), (8, 1, 128), (16, 2, 64), (16, 1, 128), (11, 1, 64)],
)
def test_groups(heads: int, kv_heads: int, dim: int) -> None:
    check(Decode.make(make_shape(heads, kv_heads, dim), [70, 3]), seeds=(0,))


@pytest.mark.parametrize("dim", [16, 32, 48, 80, 96, 160])
def test_head_sizes(dim: int) -> None:
    check(Decode.make(make_shape(4, 2, dim), [70, 3]), seeds=(0,))


@pytest.mark.parametrize("window", [1, 2, 16, 33, 50])
def test_window(window: int) -> None:
    check(Decode.make(make_shape(4, 2, 64, window=window), [5, 16, 33, 90]))


@pytest.mark.parametrize("tokens", [16, 32, 64])
@pytest.mark.parametrize("tiles", [1, 2])
def test_page_sizes(tokens: int, tiles: int) -> None:
    check(Decode.make(make_shape(4, 2, 64, tokens), [tokens - 1, tokens, tokens + 1]), ONE._replace(tiles=tiles))


def test_norms_and_output_types() -> None:
    shape = make_shape(4, 2, 64, qk_norm=True, factor=1.25)
    check(Decode.make(shape, [40, 9]), out="bf16")
    check(Decode.make(replace(shape, rope=False), [40, 9]), out="f16")
    check(Decode.make(replace(shape, row=shape.row + 1, v_col=shape.v_col + 1), [40, 9]))


@pytest.mark.parametrize("count", [1, 2, 9, 16])
def test_any_number_of_blocks(count: int) -> None:
    check(Decode.make(make_shape(4, 1, 32), [250, 130]), count=count, seeds=(0, 1, 2))
    check(Decode.make(make_shape(4, 1, 32), [250]), ONE._replace(warps=8, far=2), count, seeds=(0,))


def test_result_does_not_depend_on_unused_blocks() -> None:
    case = Decode.make(make_shape(4, 2, 64), [60])
    few, many = (launch(case, ONE, count, "f32", 0)["out"] for count in (2, 7))
    np.testing.assert_array_equal(few, many)


def test_far_positions_rotate_exactly() -> None:
    far = 131072 - 16
    case = Decode.make(make_shape(2, 1, 64, window=3), [5])
    case.shape = replace(case.shape, max_pages=8192)
    case.pool.table = np.full((1, 8192), 2**30, np.int32)
    case.pool.table[0, far // 16] = np.flatnonzero(~np.isnan(case.pool.kv[:, 0, 0, 0, 0]))[0]
    older = np.zeros((far, 1, 64), np.float16)
    case.pool.keys, case.pool.values = (
        [np.concatenate((older, held[0]))] for held in (case.pool.keys, case.pool.values)
    )
    case.positions = case.positions + np.int32(far)
    check(case, count=1)


def test_scratch_covers_every_candidate() -> None:
    shapes: list[Attention] = [make_shape(32, 8, 128), make_shape(4, 1, 256, window=40), make_shape(9, 3, 64)]
    for shape in shapes:
        for sequences in (1, 4, 64):
            for candidate in attention.decode(shape, sequences, 132, 100, "f32"):
                floats = (shape.heads // shape.kv_heads) * shape.head_dim + 32
                blocks = candidate.grid[0] * candidate.grid[1] * candidate.grid[2]
                assert blocks * floats * 4 <= attention.partial_bytes(shape, sequences, 132)
