"""One matrix-vector product with random data and its result in float64, for the host emulation and for a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from random_planes import random_planes

from tapeout.compiler.formats import FORMATS

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Case:
    """Shapes and choices of one product; the fields are those of ``gemv.candidates``."""

    format: str
    n: int
    k: int
    m: int = 1
    epilogue: int = 0
    norm: bool = False
    bias: bool = False
    pad: int = 0
    """Elements between rows of x and of y, apart from the rows themselves."""
    tile: tuple[int, int, int] | None = None
    x: str = "f32"
    y: str = "f32"

    @property
    def is_codes(self) -> bool:
        """Whether the weight holds integer codes, which are multiplied with int8 activations."""
        return not FORMATS[self.format].is_float and not self.format.startswith("fp8")

    @property
    def tolerance(self) -> float:
        """Of ||y - reference|| / ||reference||. Of 10,000 activations a few lie so near a tie that they may round the
        other way, which is 1/127 of their group's largest each."""
        if self.y == "bf16" or self.x == "bf16":  # which has many exact ties
            return 4e-3 if self.y == "bf16" else 1e-3
        return 3e-4 if self.is_codes else 3e-6


EPS = 1e-5
NUMBERS = {"f32": np.float32, "f16": np.float16}


def arrays_of(case: Case, seed: int = 0) -> dict[str, Array]:
    """The kernel's arguments by name, and ``reference`` float64 [m, n]."""
    rng = np.random.default_rng(seed)
    rows = case.n * (2 if case.epilogue >= 2 else 1)
    w, values = _weight(case.format, rows, case.k, rng)
    x = np.full((case.m, case.k + case.pad), np.nan, np.float32)
    x[:, : case.k] = rng.standard_normal((case.m, case.k)) / np.sqrt(case.k)
    norm = (rng.uniform(0.5, 1.5, case.k) / np.sqrt(case.k)).astype(np.float32)
    bias = rng.standard_normal(rows).astype(np.float32)
    y = rng.standard_normal((case.m, case.n + case.pad)).astype(np.float32)
    if case.epilogue != 1:
        y[:] = np.nan
    x = narrow(x, case.x)
    y = narrow(y, case.y)
    inputs = wide(x, case.x)[:, : case.k].astype(np.float64)
    factor = 1 / np.sqrt((inputs**2).mean(1, keepdims=True) + EPS) if case.norm else 1.0
    if case.norm:
        inputs = (inputs * norm).astype(np.float32).astype(np.float64)
    if case.is_codes:
        inputs = _int8_activations(inputs)
    product = inputs @ values.T * factor
    if case.bias:
        product = product + bias
    reference = _epilogue(case, product, y[:, : case.n].astype(np.float64))
    return {"x": x, "norm": norm, "w": w, "bias": bias, "y": y, "reference": reference}


def _int8_activations(x: Array) -> Array:
    """What is left of x when each group of 32 is int8 with the scale absmax / 127, as docs/plan.md says."""
    groups = x.reshape(len(x), -1, 32)
    scale = np.abs(groups).max(2, keepdims=True) / 127
    return (np.rint(groups / scale) * scale).reshape(x.shape)


def narrow(values: Array, kind: str) -> Array:
    """float32 as f32, f16 or the bits of bf16 (towards zero)."""
    return (values.view(np.uint32) >> 16).astype(np.uint16) if kind == "bf16" else values.astype(NUMBERS[kind])


def wide(values: Array, kind: str) -> Array:
    """What ``narrow`` made, as float32."""
    return (values.astype(np.uint32) << 16).view(np.float32) if kind == "bf16" else values.astype(np.float32)


def error(case: Case, y: Array, reference: Array) -> float:
    """||y - reference|| / ||reference||; NaN where a column was not written."""
    got = wide(y, case.y)[:, : case.n].astype(np.float64)
    return float(np.linalg.norm(got - reference) / np.linalg.norm(reference))


def _weight(format: str, rows: int, k: int, rng: np.random.Generator) -> tuple[Array, Array]:
    if not FORMATS[format].is_float:
        return random_planes(rows, k, format, rng)
    values = rng.standard_normal((rows, k)).astype(np.float32)
    if format == "bf16":
        bits = (values.view(np.uint32) >> 16).astype(np.uint16)
        return bits.view(np.uint8), (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    stored = values.astype({"f16": np.float16, "f32": np.float32}[format])
    return stored.view(np.uint8), stored.astype(np.float64)


def _epilogue(case: Case, product: Array, before: Array) -> Array:
    if case.epilogue == 0:
        return product
    if case.epilogue == 1:
        return before + product
    gate, up = product[:, : case.n], product[:, case.n :]
    if case.epilogue == 2:
        return gate / (1 + np.exp(-gate)) * up
    return 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up
