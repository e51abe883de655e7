"""The tensor-core linear layer against float64: every format and epilogue, on sizes that are not whole tiles."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from random_planes import random_planes
from triton_interpret import Interpreter, bf16_bits, bf16_values, interpreter

from tapeout.compiler.devices import CudaDevice, load_device
from tapeout.compiler.formats import FORMATS
from tapeout.compiler.kernels.cuda.base import Candidate, GpuKernel
from tapeout.compiler.kernels.cuda.linear import (
    ADD,
    GATED_GELU,
    GATED_SILU,
    MEASURED,
    STORE,
    Problem,
    Tile,
    candidates,
    examples,
    grid_of,
    kernel_of,
)
from tapeout.compiler.kernels.cuda.toolchain import Rejected, build
from tapeout.compiler.layouts import planes_hold

__all__ = ["interpreter"]
Array = npt.NDArray[Any]
QUANTIZED = [name for name in FORMATS if planes_hold(name)]
SERVED = [*(name for name, known in FORMATS.items() if known.is_float), *QUANTIZED]
NARROW = Tile(16, 32, 64, 4, 3, swap=True, group_m=2)
PLAIN = Tile(16, 32, 64, 4, 3, swap=False, group_m=2)
BUCKETS = (16, 64, 128, 512, 2048)
TOLERANCE = {"bf16": 4e-3, "f16": 1e-3, "f32": 2e-6}


def silu(value: Array) -> Array:
    return value / (1 + np.exp(-value))


def gelu_tanh(value: Array) -> Array:
    return 0.5 * value * (1 + np.tanh(np.sqrt(2 / np.pi) * (value + 0.044715 * value**3)))


def weights(problem: Problem, rng: np.random.Generator) -> tuple[Array, Array]:
    """What the kernel reads, and the values in float64."""
    shape = (problem.weight_rows, problem.k)
    if not problem.is_float:
        return random_planes(*shape, problem.format, rng)
    return activations(rng.normal(size=shape), problem.format)


def activations(values: Array, kind: str) -> tuple[Array, Array]:
    """The numbers in a float type, as the kernel reads them and in float64."""
    if kind == "bf16":
        bits = bf16_bits(values)
        return bits, bf16_values(bits).astype(np.float64)
    stored = values.astype(np.float16 if kind == "f16" else np.float32)
    return stored, stored.astype(np.float64)


def check(interpreter: Interpreter, problem: Problem, tile: Tile, live: int, bucket: int) -> None:
    rng = np.random.default_rng([problem.n, problem.k, live, problem.epilogue])
    w, w_values = weights(problem, rng)
    x, x_values = activations(rng.normal(size=(bucket, problem.ldx)) / np.sqrt(problem.k), problem.x)
    bias = rng.normal(size=problem.weight_rows).astype(np.float32)
    before = rng.normal(size=(bucket, problem.ldy)).astype(np.float32)
    kind = problem.y
    y = before if problem.epilogue == ADD else activations(np.full_like(before, np.nan), "f32")[0]
    if kind != "f32":
        y = np.full(before.shape, 0x7FC0, np.uint16) if kind == "bf16" else y.astype(np.float16)
    counts = np.full(4, 1 << 20, np.int32)
    counts[problem.count_index] = live
    out = interpreter.launch(
        kernel_of(problem, tile), (grid_of(problem, tile, bucket), 1, 1), x=x, w=w, bias=bias, y=y, counts=counts
    )["y"]
    sums = x_values[:live, : problem.k] @ w_values.T + (bias if problem.bias else 0)
    gate, up = sums[:, : problem.n], sums[:, problem.n :]
    expected = {
        STORE: lambda: sums,
        ADD: lambda: before[:live, : problem.n] + sums,
        GATED_SILU: lambda: silu(gate) * up,
        GATED_GELU: lambda: gelu_tanh(gate) * up,
    }[problem.epilogue]()
    values = (bf16_values(out) if out.dtype == np.uint16 else out).astype(np.float64)
    error = np.linalg.norm(values[:live, : problem.n] - expected) / np.linalg.norm(expected)
    assert error < TOLERANCE[problem.x], error
    assert np.array_equal(out[live:].view(np.uint8), y[live:].view(np.uint8)), "rows beyond the live ones were written"
    tail = out[:, problem.n :], y[:, problem.n :]
    assert np.array_equal(*(np.ascontiguousarray(part).view(np.uint8) for part in tail)), "columns beyond N written"


@pytest.mark.parametrize("format", QUANTIZED)
def test_quantized_weights_of_every_format(interpreter: Interpreter, format: str) -> None:
    k = 256 if "k" in format.partition("_")[2][:1] else 160 if FORMATS[format].block == 32 else 384
    epilogue = QUANTIZED.index(format) % 4
    problem = Problem(format, 41, k, k, 41, epilogue, True, "bf16", 0, "bf16" if epilogue >= GATED_SILU else "f32")
    check(interpreter, problem, NARROW, live=9, bucket=16)


@pytest.mark.parametrize("epilogue", [STORE, ADD, GATED_SILU, GATED_GELU])
@pytest.mark.parametrize("format", ["bf16", "f16", "f32", "q4_0", "q6_k"])
def test_epilogues(interpreter: Interpreter, format: str, epilogue: int) -> None:
    act = format if FORMATS[format].is_float else "bf16"
    problem = Problem(
        format, 35, 256, 264, 40, epilogue, epilogue != ADD, act, 2, act if epilogue >= GATED_SILU else "f32"
    )
    tile = PLAIN if FORMATS[format].is_float else NARROW
    check(interpreter, problem, tile, live=17, bucket=32)


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("epilogue", [ADD, GATED_SILU])
def test_tails_of_k_and_both_orders(interpreter: Interpreter, swap: bool, epilogue: int) -> None:
    tile = Tile(16, 32, 64, 4, 3, swap=swap, group_m=1)
    check(interpreter, Problem("bf16", 70, 100, 100, 70, epilogue, False, "bf16", 0), tile, live=33, bucket=48)


@pytest.mark.parametrize("format", ["q4_0", "q5_1", "q8_0", "fp8"])
def test_a_step_that_does_not_divide_k(interpreter: Interpreter, format: str) -> None:
    tile = Tile(16, 32, 128, 4, 3, swap=True)
    check(interpreter, Problem(format, 40, 160, 160, 40, STORE, False, "bf16", 0), tile, live=8, bucket=16)


@pytest.mark.parametrize("format", ["q4_k", "q6_k", "int4_g128", "int4_g128_zp", "q2_k"])
def test_a_step_wider_than_a_group(interpreter: Interpreter, format: str) -> None:
    tile = Tile(16, 32, 256, 4, 3, swap=True)
    check(interpreter, Problem(format, 32, 512, 512, 32, STORE, False, "bf16", 0), tile, live=16, bucket=16)


def test_blocks_of_128_by_128_on_both_sides_of_an_edge(interpreter: Interpreter) -> None:
    tile = Tile(16, 64, 128, 4, 3, swap=True)
    check(interpreter, Problem("fp8_block128", 150, 288, 288, 150, GATED_SILU, False, "bf16", 0), tile, 10, 16)


@pytest.mark.parametrize(("n", "epilogue"), [(100, STORE), (256, ADD), (150, GATED_SILU)])
@pytest.mark.parametrize("format", ["fp8", "fp8_block128"])
def test_one_scale_a_row_is_not_one_scale_for_all(interpreter: Interpreter, format: str, n: int, epilogue: int) -> None:
    """With a k of 128, rows of fp8_block128 have one scale as those of fp8 do, but only 128 of them the same one."""
    tile = Tile(16, 64, 64, 4, 3, swap=True)
    check(interpreter, Problem(format, n, 128, 128, n, epilogue, True, "bf16", 0), tile, 10, 16)


class _Gpu:
    sm_count = 132
    shared_per_block = 232448
    bandwidth_gb_s = 4490.0
    capability = 90


class _Small(_Gpu):
    sm_count = 188
    shared_per_block = 101376
    capability = 120


def size_of(candidate: Candidate) -> int:
    """Of a tile: the smaller, the surer it fits."""
    return math.prod(tile_of(candidate.kernel)[:3])


@pytest.mark.parametrize("device", [_Gpu(), _Small()])
@pytest.mark.parametrize("rows", [8, 16, 64, 128, 512, 8192])
@pytest.mark.parametrize("format", SERVED)
def test_candidates(format: str, rows: int, device: _Gpu) -> None:
    act = format if FORMATS[format].is_float else "bf16"
    for n, k in ((4096, 14336), (576, 512), (128256, 2048)):
        for epilogue in (STORE, GATED_SILU):
            found = candidates(
                format,
                n,
                k,
                rows,
                ldx=k,
                ldy=n,
                epilogue=epilogue,
                bias=False,
                x=act,
                y="f32",
                count_index=0,
                device=device,
            )
            assert 1 <= len(found) <= 4
            assert len({tile_of(candidate.kernel)[:-1] for candidate in found}) == len(found)
            for candidate in found:
                defines = dict(candidate.kernel.defines)
                out = int(defines["BN"]) // (2 if epilogue == GATED_SILU else 1)
                assert candidate.grid[0] == -(-rows // int(defines["BM"])) * -(-n // out)
                assert candidate.nbytes > n * k * FORMATS[format].bits_per_weight / 9.1


def offered(
    format: str, weight_rows: int, rows: int, device: Any, epilogue: int = STORE, k: int = 4096
) -> list[Candidate]:
    """Candidates for a weight of so many rows, whatever the epilogue."""
    n = weight_rows // 2 if epilogue >= GATED_SILU else weight_rows
    act = format if FORMATS[format].is_float else "bf16"
    return candidates(
        format, n, k, rows, ldx=k, ldy=n, epilogue=epilogue, bias=False, x=act, y="f32", count_index=0, device=device
    )


def tile_of(kernel: GpuKernel) -> tuple[Any, ...]:
    known = dict(kernel.defines)
    stages = dict(kernel.options)["num_stages"]
    return known["BM"], known["BN"], known["BK"], kernel.threads // 32, stages, known["SWAP"], known["AHEAD"]


# What was measured: format, rows of the weight, rows of x: bm, bn, bk, warps, stages, swap, ahead
FIRST = [
    ("bf16", 28672, 8, (16, 64, 128, 4, 5, False, 512)),
    ("f16", 4096, 16, (16, 64, 128, 4, 5, False, 512)),
    ("bf16", 16896, 17, (64, 64, 64, 4, 6, False, 512)),
    ("bf16", 16895, 64, (64, 64, 128, 4, 5, False, 512)),
    ("bf16", 4096, 64, (64, 32, 128, 4, 6, False, 512)),
    ("bf16", 28672, 65, (128, 128, 64, 8, 4, False, 256)),
    ("bf16", 4097, 128, (128, 64, 64, 4, 5, False, 256)),
    ("bf16", 4096, 128, (128, 32, 64, 4, 6, False, 256)),
    ("bf16", 28672, 129, (128, 128, 64, 4, 4, False, 0)),
    ("bf16", 4096, 512, (128, 128, 64, 4, 4, False, 0)),
    ("bf16", 4096, 513, (128, 256, 64, 8, 4, False, 0)),
    ("q4_0", 28672, 16, (16, 128, 128, 8, 4, True, 256)),
    ("q4_k", 6144, 8, (16, 64, 256, 4, 4, True, 256)),
    ("q4_0", 28672, 64, (64, 128, 128, 4, 4, True, 256)),
    ("int4_g128", 4096, 32, (64, 64, 256, 4, 4, True, 256)),
    ("q4_0", 28672, 128, (128, 128, 128, 8, 3, True, 256)),
    ("q4_0", 6144, 128, (128, 64, 128, 4, 4, True, 256)),
    ("q4_0", 4096, 512, (128, 128, 128, 8, 3, True, 0)),
    ("q4_0", 6144, 512, (256, 128, 64, 8, 3, True, 0)),
    ("q4_k", 28672, 129, (256, 128, 64, 8, 3, True, 0)),
    ("q4_0", 4096, 2048, (256, 128, 64, 8, 3, True, 0)),
    ("fp8", 28672, 16, (16, 64, 256, 4, 4, True, 256)),
    ("fp8", 6144, 16, (16, 32, 128, 2, 4, True, 256)),
    ("fp8", 28672, 64, (64, 128, 128, 4, 4, True, 256)),
    ("fp8", 4096, 64, (64, 64, 128, 4, 4, True, 256)),
    ("fp8", 28672, 128, (128, 128, 128, 8, 3, True, 256)),
    ("fp8", 4096, 128, (128, 64, 128, 4, 4, True, 256)),
    ("fp8", 4096, 512, (128, 128, 128, 8, 3, True, 0)),
    ("fp8", 4096, 2048, (256, 128, 64, 8, 4, True, 0)),
    ("fp8", 6144, 512, (256, 128, 64, 8, 4, True, 0)),
]


@pytest.mark.parametrize(("format", "weight_rows", "rows", "tile"), FIRST)
def test_the_measured_tile_comes_first(format: str, weight_rows: int, rows: int, tile: tuple[Any, ...]) -> None:
    assert tile_of(offered(format, weight_rows, rows, _Gpu())[0].kernel) == tile


def test_every_measured_tile_is_one_of_these() -> None:
    tiles = {line.tile for line in MEASURED}
    assert {(t.bm, t.bn, t.bk, t.warps, t.stages, t.swap, t.ahead) for t in tiles} == {tile for *_, tile in FIRST}


@pytest.mark.parametrize("rows", BUCKETS)
@pytest.mark.parametrize("weight_rows", [4096, 6144, 28672])
def test_a_step_stays_inside_a_block_of_128(weight_rows: int, rows: int) -> None:
    for device in (_Gpu(), _Small()):
        for candidate in offered("fp8_block128", weight_rows, rows, device):
            assert dict(candidate.kernel.defines)["BK"] in (64, 128)


@pytest.mark.parametrize("rows", BUCKETS)
@pytest.mark.parametrize("format", [name for name in SERVED if name != "f32"])
def test_little_shared_memory_still_leaves_three_stages(format: str, rows: int) -> None:
    for weight_rows in (4096, 28672):
        stages = [tile_of(candidate.kernel)[4] for candidate in offered(format, weight_rows, rows, _Small())]
        assert stages[0] >= 3
        assert [count for count in stages if count == 2] == stages[len([c for c in stages if c > 2]) :]


def test_one_kernel_serves_all_buckets_with_its_tile() -> None:
    def names(rows: int) -> set[tuple[str, tuple[tuple[str, Any], ...]]]:
        found = offered("q4_0", 4096, rows, _Gpu(), ADD)
        return {(candidate.kernel.name, candidate.kernel.defines) for candidate in found}

    assert names(1024) == names(2048)
    assert names(8) == names(16)


@pytest.mark.parametrize("name", ["h200", "rtx-pro-6000"])
def test_every_format_has_a_tile_that_compiles_and_fits(name: str, tmp_path: Path) -> None:
    device = load_device(name)
    assert isinstance(device, CudaDevice)
    smallest = [
        min(offered(format, 4096, BUCKETS[index % 3], device, index % 4, k=1024), key=size_of).kernel
        for index, format in enumerate(SERVED)
    ]
    built = build(smallest, device, tmp_path)
    assert {key: result.reason for key, result in built.items() if isinstance(result, Rejected)} == {}
    assert len(built) == len(SERVED)


def test_names_tell_kernels_apart() -> None:
    kernels = examples()
    assert len({kernel.name for kernel in kernels}) == len(kernels)
