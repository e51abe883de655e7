"""linear_<format> and embed_<format> of both CPU targets against float64 on independently dequantized weights."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import cpu_kernels as ck
import gguf
import numpy as np
import numpy.typing as npt
import pytest
import tile16_reference as tr

FORMATS = (*tr.FLOATS, *tr.E4M3, *tr.QUANTIZED)
# Those left out differ from one that is in by a number of their geometry alone.
FEW = [name for name in FORMATS if name not in ("fp8", "fp8_row", "int4_g32", "int4_g64", "int4_g64_zp", "int8_g32")]
STORE, ADD, SILU, GELU = range(4)
F64 = npt.NDArray[np.float64]
Libraries = dict[str, Path]


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Libraries:
    """Every kernel compiled for every target, runnable here or not."""
    sources = [(template, name) for name in FORMATS for template in ("linear", "embed")]
    built = {target: ck.build(sources, target, tmp_path_factory.mktemp(target)) for target in ck.TARGETS}
    return {target: library for target, library in built.items() if ck.supported(target)}


@dataclass
class Operands:
    """The two operands of a product as the kernels read them, and the values they stand for."""

    w: npt.NDArray[np.uint8]
    x: npt.NDArray[np.uint8]
    w_exact: F64
    x_exact: F64
    cap: int


@lru_cache(8)
def weights(name: str, n: int, k: int, codes: str) -> tuple[npt.NDArray[np.uint8], F64]:
    raw = tr.random_rows(name, n, k, np.random.default_rng([n, k]), codes)
    return ck.aligned(tr.pack(name, raw)), tr.dequantize(name, raw).astype(np.float64)


def operands(name: str, rows: int, n: int, k: int, codes: str = "random", extreme: bool = False) -> Operands:
    rng = np.random.default_rng([rows, n, k])
    (w, w_exact), cap = weights(name, n, k, codes), rows + 3
    x = rng.standard_normal((rows, k)).astype(np.float32) * np.float32(3)
    if extreme:
        x = np.where(rng.random((rows, 1)) < 0.5, np.float32(-127), np.float32(127)) * np.ones((rows, k), np.float32)
    x[-1, : k // 2] = 0  # groups with scale 0
    if name not in tr.QUANTIZED:
        junk = np.full((cap - rows, k), np.nan, np.float32)
        return Operands(w, ck.aligned(np.vstack([x, junk])), w_exact, x.astype(np.float64), cap)
    buffer, exact = tr.quantize_x8(x, cap)
    return Operands(w, ck.aligned(buffer), w_exact, exact, cap)


def call(
    library: Path,
    name: str,
    o: Operands,
    n: int,
    epilogue: int,
    y: npt.NDArray,
    bias: npt.NDArray | None = None,
    shuffled: bool = False,
) -> None:
    rows, k = o.x_exact.shape
    arguments = ck.launch(o.x, o.w, y, n, k, o.cap, y.shape[1], epilogue, bias)
    ck.run(ck.load(library, f"linear_{name}"), arguments, ck.Step(rows=rows), shuffled)


def bound(o: Operands) -> F64:
    """What float32 accumulation over k may lose of a product: a few roundings a group, and their random walk."""
    return 1e-30 + (np.abs(o.x_exact) @ np.abs(o.w_exact).T) * np.finfo(np.float32).eps * (
        8 + np.sqrt(o.w_exact.shape[1])
    )


def sizes(name: str) -> list[tuple[int, int]]:
    """(columns, k): odd columns, one block and several, and more than one chunk of k."""
    block = max(tr.block_size(name)[0], 32)
    out = [(1, block), (17, 5 * block), (35, 2048 + 2 * block)]
    return [*out, (5, 7)] if name in tr.FLOATS else out


@pytest.mark.parametrize("name", FORMATS)
def test_store_is_the_product(libraries: Libraries, name: str) -> None:
    for (n, k), rows in itertools.product(sizes(name), (1, 2, 3, 16, 17, 65)):
        o = operands(name, rows, n, k)
        for target, library in libraries.items():
            y = np.full((rows, n + 3), np.nan, np.float32)
            call(library, name, o, n, STORE, y)
            assert np.all(np.abs(y[:, :n] - o.x_exact @ o.w_exact.T) <= bound(o)), (target, n, k, rows)
            assert np.isnan(y[:, n:]).all(), "columns beyond n were written"


def silu(x: F64) -> F64:
    return x / (1 + np.exp(-x.clip(-700)))


def gelu_tanh(x: F64) -> F64:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


@pytest.mark.parametrize("name", FEW)
def test_add_with_bias(libraries: Libraries, name: str) -> None:
    n, k = 37, max(tr.block_size(name)[0], 64)
    rng = np.random.default_rng(2)
    for rows in (1, 33):
        o = operands(name, rows, n, k)
        bias, before = rng.standard_normal(n).astype(np.float32), rng.standard_normal((rows, n)).astype(np.float32)
        for library in libraries.values():
            y = before.copy()
            call(library, name, o, n, ADD, y, bias)
            assert np.all(np.abs(y - (o.x_exact @ o.w_exact.T + bias + before)) <= bound(o) + 1e-6 * (1 + np.abs(y)))


@pytest.mark.parametrize(("epilogue", "activation"), [(SILU, silu), (GELU, gelu_tanh)])
@pytest.mark.parametrize("name", FEW)
def test_gated(libraries: Libraries, name: str, epilogue: int, activation: Callable[[F64], F64]) -> None:
    n, k = 48, max(tr.block_size(name)[0], 64)
    bias = np.linspace(-20, 20, 2 * n, dtype=np.float32)
    for rows in (1, 70):
        o = operands(name, rows, 2 * n, k)
        gate, up = np.hsplit(o.x_exact @ o.w_exact.T + bias, 2)
        gate_bound, up_bound = np.hsplit(bound(o) + 2e-6 * (1 + np.abs(bias)), 2)
        expected = activation(gate) * up
        # |act'| <= 1.13
        limit = 1.2 * gate_bound * np.abs(up) + np.abs(activation(gate)) * up_bound + 1e-6 * np.abs(expected) + 1e-6
        for library in libraries.values():
            y = np.full((rows, n), np.nan, np.float32)
            call(library, name, o, n, epilogue, y, bias)
            assert np.all(np.abs(y - expected) <= limit)


@pytest.mark.parametrize("codes", ["zeros", "ones", "sevens"])
@pytest.mark.parametrize("name", tr.QUANTIZED)
def test_extreme_codes_do_not_overflow(libraries: Libraries, name: str, codes: str) -> None:
    n, k = 16, 2 * max(tr.block_size(name)[0], 64)
    for rows in (1, 9):
        o = operands(name, rows, n, k, codes, extreme=True)
        for library in libraries.values():
            y = np.full((rows, n), np.nan, np.float32)
            call(library, name, o, n, STORE, y)
            assert np.all(np.abs(y - o.x_exact @ o.w_exact.T) <= bound(o))


@pytest.mark.parametrize("name", FORMATS)
def test_bytes_do_not_depend_on_order_block_or_target(libraries: Libraries, name: str) -> None:
    """A row's result is the same alone and among others, in any order of the tasks, on every target."""
    n, k, rows = 100, 1280, 67
    o = operands(name, rows, n, k)
    results = []
    for library in libraries.values():
        for shuffled in (False, True):
            y = np.full((rows, n), np.nan, np.float32)
            call(library, name, o, n, STORE, y, shuffled=shuffled)
            results.append(y)
        alone = Operands(o.w, o.x, o.w_exact, o.x_exact[:1], o.cap)
        y = np.full((1, n), np.nan, np.float32)
        call(library, name, alone, n, STORE, y)
        assert np.array_equal(y[0], results[0][0])
    assert all(np.array_equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("name", FORMATS)
def test_embedding_is_exact(libraries: Libraries, name: str) -> None:
    n, k = 37, 2 * max(tr.block_size(name)[0], 40 if name in tr.FLOATS else 32)
    raw = tr.random_rows(name, n, k, np.random.default_rng(5))
    w = ck.aligned(tr.pack(name, raw))
    tokens = np.random.default_rng(6).integers(0, n, 21, dtype=np.int32)
    scale = np.float32(25.25)
    for library in libraries.values():
        y = np.full((len(tokens), k), np.nan, np.float32)
        step = ck.Step(rows=len(tokens), tokens=tokens.ctypes.data)
        ck.run(ck.load(library, f"embed_{name}"), ck.launch(w, y, k, float(scale)), step)
        assert np.array_equal(y, tr.dequantize(name, raw)[tokens] * scale)


@pytest.mark.parametrize("name", [name for name in tr.GGUF if name != "mxfp4"])
def test_reference_fields_mean_what_gguf_says(name: str) -> None:
    """The witness of the layout itself: fields taken apart give gguf-py's values."""
    raw = tr.random_rows(name, 3, 512, np.random.default_rng(7))
    f = tr.take_apart(name, raw)
    assert f.d is not None
    zero = {"q4_0": 8, "q5_0": 16, "q8_0": 128, "q3_k": 4, "q6_k": 32}.get(name, 0)
    table = gguf.quants.IQ4_NL.kvalues if name.startswith("iq4") else np.arange(256)
    scale = np.repeat(f.d.astype(np.float32), f.super, 1)
    low = np.zeros_like(scale) if f.dmin is None else np.repeat(f.dmin.astype(np.float32), f.super, 1)
    if f.sub is not None:
        scale *= np.repeat(f.sub.astype(np.float32), f.group, 1)
    if f.submin is not None:
        low *= -np.repeat(f.submin.astype(np.float32), f.group, 1)
    stands_for = np.asarray(table, np.float32)[f.codes]
    assert np.array_equal(scale * (stands_for - zero) + low, tr.dequantize(name, raw))
