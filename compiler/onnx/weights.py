"""Weights as float32 initializers, in the model file or in one file beside it, evaluated a strip of rows at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx

from tapeout.compiler.emit.evaluate import STRIP_VALUES, ErrorSums, Evaluator
from tapeout.compiler.recipes import Convert, Recipe

DATA = "model.onnx.data"
PAGE = 4096  # external data that starts on a page can be mapped
Floats = npt.NDArray[np.float32]


def float_bytes(recipe: Recipe) -> int:
    """Bytes of a weight as float32."""
    return 4 * math.prod(recipe.shape)


def float_rows(evaluator: Evaluator, recipe: Recipe) -> Iterator[Floats]:
    """A weight as float32, some rows at a time."""
    values = Convert(recipe, "f32")
    rows, step = recipe.shape[0], max(1, STRIP_VALUES // math.prod(recipe.shape[1:]))
    for start in range(0, rows, step):
        yield evaluator.rows(values, start, min(start + step, rows), ErrorSums()).view("<f4")


def float_weight(evaluator: Evaluator, recipe: Recipe) -> Floats:
    """A whole weight as float32."""
    return np.concatenate(list(float_rows(evaluator, recipe))).reshape(recipe.shape)


def inline_initializers(
    evaluator: Evaluator, weights: Mapping[str, Recipe], advance: Callable[[int], None]
) -> Iterator[onnx.TensorProto]:
    """Initializers that hold their data."""
    for name, recipe in weights.items():
        data = bytearray()
        for rows in float_rows(evaluator, recipe):
            data += rows.tobytes()
            advance(rows.nbytes)
        tensor = _tensor(name, recipe)
        tensor.raw_data = bytes(data)
        yield tensor


def external_initializers(
    evaluator: Evaluator, weights: Mapping[str, Recipe], path: Path, advance: Callable[[int], None]
) -> Iterator[onnx.TensorProto]:
    """Initializers that say where in ``path`` their data lies, which is written here."""
    with path.open("xb") as file:
        for name, recipe in weights.items():
            file.write(bytes(-file.tell() % PAGE))
            tensor, start = _tensor(name, recipe), file.tell()
            for rows in float_rows(evaluator, recipe):
                file.write(rows.tobytes())
                advance(rows.nbytes)
            tensor.data_location = onnx.TensorProto.EXTERNAL
            for key, value in (("location", path.name), ("offset", start), ("length", file.tell() - start)):
                tensor.external_data.add(key=key, value=str(value))
            yield tensor


def _tensor(name: str, recipe: Recipe) -> onnx.TensorProto:
    return onnx.TensorProto(name=name, data_type=onnx.TensorProto.FLOAT, dims=recipe.shape)
