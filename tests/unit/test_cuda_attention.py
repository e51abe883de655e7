"""Decode attention in CUDA C++, run by the host emulation and compared with float64."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from cuda_host import EARLY, SOURCES, LaunchError, run, supported
from test_triton_attention import Pool, attend, error, make_shape
from triton_interpret import bf16_values

from tapeout.compiler.devices import CudaDevice, known_devices, load_device
from tapeout.compiler.kernels.cuda import attention
from tapeout.compiler.kernels.cuda.attention import Attention, Blocks

Array = npt.NDArray[Any]
pytestmark = pytest.mark.skipif(not supported(), reason="the host emulation needs AVX2, FMA and F16C")

ONE = Blocks(warps=2, depth=2, splits=3, collectors=2)


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


def launch(
    case: Decode, blocks: Blocks, out: Any, seed: int, idle: int = 1, sources: Path = SOURCES
) -> dict[str, Array]:
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
        "partial": np.zeros(bucket * shape.kv_heads * blocks.splits * group * shape.head_dim // 4 * 8, np.uint32),
        "counts": np.array([rows, rows, rows, 0], np.int32),
    }
    kernel = attention.decode_kernel(shape, bucket, blocks, out, 0)
    grid = blocks.splits * shape.kv_heads * bucket + 2
    run(kernel, (grid, 1, 1), arrays, seed, sources, EARLY | {"kv"}, cluster=grid)
    return arrays


def check(case: Decode, blocks: Blocks = ONE, out: Any = "f32", seeds: tuple[int, ...] = (0, 1)) -> None:
    want, kv = case.want()
    rows = len(case.positions)
    results: list[Array] = []
    for seed in seeds:
        got = launch(case, blocks, out, seed)
        values = bf16_values(got["out"]) if out == "bf16" else got["out"]
        assert error(values[:rows].reshape(want.shape), want) < (4e-3 if out == "bf16" else 1.5e-3)
        assert np.isnan(values[rows:]).all(), "rows beyond the live ones stay untouched"
        assert not got["partial"].any()
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
@pytest.mark.parametrize("depth", [2, 3, 5])
def test_page_sizes(tokens: int, depth: int) -> None:
    check(Decode.make(make_shape(4, 2, 64, tokens), [tokens - 1, tokens, tokens + 1]), ONE._replace(depth=depth))


def test_norms_and_output_types() -> None:
    shape = make_shape(4, 2, 64, qk_norm=True, factor=1.25)
    check(Decode.make(shape, [40, 9]), out="bf16")
    check(Decode.make(replace(shape, rope=False), [40, 9]), out="f16")
    check(Decode.make(replace(shape, row=shape.row + 1, v_col=shape.v_col + 1), [40, 9]))


@pytest.mark.parametrize(("splits", "collectors"), [(1, 1), (2, 1), (2, 2), (9, 8), (16, 1), (16, 4), (16, 16)])
def test_any_number_of_blocks(splits: int, collectors: int) -> None:
    blocks = ONE._replace(splits=splits, collectors=collectors)
    check(Decode.make(make_shape(4, 1, 32), [250, 130]), blocks, seeds=(0, 1, 2))
    check(Decode.make(make_shape(4, 1, 32), [250]), blocks._replace(warps=8, far=2), seeds=(0,))


def test_more_collectors_than_quads() -> None:
    check(Decode.make(make_shape(2, 2, 16), [250]), ONE._replace(splits=9, collectors=8))


def test_many_units_a_warp() -> None:
    shape = make_shape(2, 1, 16, max_pages=80)
    check(Decode.make(shape, [1200]), Blocks(warps=1, depth=3), seeds=(0,))
    check(Decode.make(shape, [1200]), Blocks(warps=1, depth=2, splits=2), seeds=(0,))


def test_result_does_not_depend_on_unused_blocks() -> None:
    case = Decode.make(make_shape(4, 2, 64), [60])
    few, many = (launch(case, ONE._replace(splits=splits), "f32", 0)["out"] for splits in (2, 7))
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
    check(case, ONE._replace(splits=1, collectors=1))


def edited(folder: Path, old: str, new: str) -> Path:
    """The sources with one change."""
    shutil.copytree(SOURCES, folder / "src")
    path = folder / "src" / "attention.cuh"
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))
    return folder / "src"


STORE = "Part::of(sum).store(target.part(team.block, quad))"


@pytest.mark.parametrize("late", [0, 1, 4])
def test_parts_may_arrive_late(tmp_path: Path, late: int) -> None:
    """One block, which collects or does not, stores its parts after all others have polled many times."""
    case, blocks = Decode.make(make_shape(4, 1, 32), [250]), ONE._replace(splits=7, collectors=4)
    wait = f"{{ if (team.block == {late}) for (int i = 0; i < 20; i++) tp_host_poll(); {STORE}; }}"
    got = launch(case, blocks, "f32", 0, sources=edited(tmp_path, STORE, wait))
    want = launch(case, blocks, "f32", 0)
    np.testing.assert_array_equal(got["out"], want["out"])
    assert not got["partial"].any()


def test_a_part_that_never_comes_is_noticed(tmp_path: Path) -> None:
    case, blocks = Decode.make(make_shape(4, 1, 32), [250]), ONE._replace(splits=7, collectors=4)
    with pytest.raises(LaunchError, match=r"deadlock.* poll"):
        launch(case, blocks, "f32", 0, sources=edited(tmp_path, STORE, f"if (team.block != 5) {STORE}"))


def test_numbers_that_are_none_arrive_too() -> None:
    """No block waits for a NaN, whatever its bits."""
    case = Decode.make(make_shape(4, 1, 32), [250])
    case.qkv.view(np.uint32)[:] = 0xFFFFFFFF
    got = launch(case, ONE._replace(splits=7, collectors=4), "f32", 0)
    assert np.isnan(got["out"]).all() and not got["partial"].any()


@pytest.mark.parametrize("name", [name for name in known_devices() if name != "cpu"])
def test_choices_fit_their_device(name: str) -> None:
    device = load_device(name)
    assert isinstance(device, CudaDevice)
    shapes = [make_shape(32, 8, 128), make_shape(4, 1, 256, window=40), make_shape(9, 3, 64), make_shape(96, 96, 128)]
    for shape in (replace(shape, max_pages=8192) for shape in shapes):
        for sequences in (1, 2, 3, 4, 8, 64):
            pairs = shape.kv_heads * sequences
            choices = attention.block_choices(shape, sequences, device)
            candidates = attention.decode(shape, sequences, device, 100, "f32")
            for blocks, candidate in zip(choices, candidates, strict=True):
                waiting = pairs * blocks.collectors if blocks.splits > 1 else 0
                assert waiting <= device.sm_count // 2, "blocks that wait leave room for those they wait for"
                assert candidate.grid == (max(device.sm_count, pairs * blocks.splits), 1, 1)
                assert candidate.kernel.shared == device.half_shared, "the next kernel's block fits beside it"
                nbytes = pairs * blocks.splits * shape.heads // shape.kv_heads * shape.head_dim // 4 * 32
                assert blocks.splits == 1 or nbytes <= attention.partial_bytes(shape, sequences, device)


def test_rings_hold_what_a_lone_block_serves() -> None:
    h200, rtx = load_device("h200"), load_device("rtx-5090")
    assert isinstance(h200, CudaDevice) and isinstance(rtx, CudaDevice)
    llama = replace(make_shape(32, 8, 128), max_pages=8192)
    assert attention.block_choices(llama, 1, h200)[0] == Blocks(6, 4, 2, 1, 16, 8)
    assert attention.block_choices(llama, 4, h200)[0] == Blocks(6, 4, 2, 1, 4, 2)
    assert attention.block_choices(llama, 64, h200)[0] == Blocks(6, 4, 2)
    assert attention.block_choices(llama, 1, rtx)[0] == Blocks(5, 2, 1, 1, 21, 8)
