"""The tensor-core linear layer against float64: every format and epilogue, on sizes that are not whole tiles."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from random_planes import random_planes
from triton_interpret import Interpreter, bf16_bits, bf16_values, interpreter

from tapeout.compiler.formats import FORMATS
from tapeout.compiler.kernels.cuda.linear import (
    ADD,
    GATED_GELU,
    GATED_SILU,
    STORE,
    Problem,
    Tile,
    candidates,
    examples,
    grid_of,
    kernel_of,
)

__all__ = ["interpreter"]
Array = npt.NDArray[Any]
QUANTIZED = [name for name, known in FORMATS.items() if not known.is_float]
NARROW = Tile(16, 32, 64, 4, 3, swap=True, group_m=2)
PLAIN = Tile(16, 32, 64, 4, 3, swap=False, group_m=2)
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
    x, x_values = activations(rng.normal(size=(bucket, problem.ldx)) / np.sqrt(problem.k), problem.act)
    bias = rng.normal(size=problem.weight_rows).astype(np.float32)
    before = rng.normal(size=(bucket, problem.ldy)).astype(np.float32)
    kind = problem.act if problem.gated else "f32"
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
    assert error < TOLERANCE[problem.act], error
    assert np.array_equal(out[live:].view(np.uint8), y[live:].view(np.uint8)), "rows beyond the live ones were written"
    tail = out[:, problem.n :], y[:, problem.n :]
    assert np.array_equal(*(np.ascontiguousarray(part).view(np.uint8) for part in tail)), "columns beyond N written"


@pytest.mark.parametrize("format", QUANTIZED)
def test_quantized_weights_of_every_format(interpreter: Interpreter, format: str) -> None:
    k = 256 if "k" in format.partition("_")[2][:1] else 160 if FORMATS[format].block == 32 else 384
    epilogue = QUANTIZED.index(format) % 4
    problem = Problem(format, 41, k, k, 41, epilogue, True, "bf16", 0)
    check(interpreter, problem, NARROW, live=9, bucket=16)


@pytest.mark.parametrize("epilogue", [STORE, ADD, GATED_SILU, GATED_GELU])
@pytest.mark.parametrize("format", ["bf16", "f16", "f32", "q4_0", "q6_k"])
def test_epilogues(interpreter: Interpreter, format: str, epilogue: int) -> None:
    act = format if FORMATS[format].is_float else "bf16"
    problem = Problem(format, 35, 256, 264, 40, epilogue, epilogue != ADD, act, 2)
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


class _Gpu:
    sm_count = 132
    shared_per_block = 232448
    bandwidth_gb_s = 4490.0
    capability = 90


class _Small(_Gpu):
    sm_count = 188
    shared_per_block = 101376
    capability = 120


@pytest.mark.parametrize("device", [_Gpu(), _Small()])
@pytest.mark.parametrize("rows", [8, 16, 64, 128, 512, 8192])
@pytest.mark.parametrize("format", list(FORMATS))
def test_candidates(format: str, rows: int, device: _Gpu) -> None:
    act = format if FORMATS[format].is_float else "bf16"
    for n, k in ((4096, 14336), (576, 512), (128256, 2048)):
        for epilogue in (STORE, GATED_SILU):
            found = candidates(
                format, n, k, rows, ldx=k, ldy=n, epilogue=epilogue, bias=False, act=act, count_index=0, device=device
            )
            assert 1 <= len(found) <= 4
            assert len({candidate.kernel.name for candidate in found}) == len(found)
            for candidate in found:
                defines = dict(candidate.kernel.defines)
                out = int(defines["BN"]) // (2 if epilogue == GATED_SILU else 1)
                assert candidate.grid[0] == -(-rows // int(defines["BM"])) * -(-n // out)
                assert candidate.nbytes > n * k * FORMATS[format].bits_per_weight / 9.1


def test_one_kernel_serves_all_buckets_with_its_tile() -> None:
    def names(rows: int) -> set[tuple[str, tuple[tuple[str, Any], ...]]]:
        found = candidates(
            "q4_0", 4096, 4096, rows, ldx=4096, ldy=4096, epilogue=ADD, bias=False, act="bf16", count_index=0,
            device=_Gpu(),
        )  # fmt: skip
        return {(candidate.kernel.name, candidate.kernel.defines) for candidate in found}

    assert names(512) == names(2048)


def test_names_tell_kernels_apart() -> None:
    kernels = examples()
    assert len({kernel.name for kernel in kernels}) == len(kernels)
