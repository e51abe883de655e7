"""Runs launches one by one and reads what each wrote, for verification."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tapeout.runtime.backend import FLOAT_BYTES, Backend, LaunchList, output_part, output_width
from tapeout.runtime.model import Traced


def trace_launches(backend: Backend, launches: LaunchList, rows: int) -> Iterator[Traced]:
    """Run every launch of a list; outputs that are not updated in place are filled with NaN first."""
    for index, launch in enumerate(launches.plan):
        output = launch.get("output")
        if output is None:
            backend.run_one(launches, index)
            continue
        arg = launch["args"][output["arg"]]
        part = output_part(launch, rows)
        if not output["in_place"]:
            backend.poison(arg, part)
        backend.run_one(launches, index)
        values = _values(backend.read(arg, part), output, rows, output_width(launch))
        produces = tuple((made["op"], *made["columns"]) for made in launch["produces"])
        yield Traced(launches.name, index, launch["kernel"], launch["op"], produces, values)


def _values(raw: npt.NDArray[np.uint8], output: Mapping[str, Any], rows: int, width: int) -> npt.NDArray[np.float32]:
    """The output as float32 [rows, width]."""
    kind, stride = output["kind"], output.get("stride", width)
    if kind == "x8":
        return _x8(raw, output, rows, width)
    size = FLOAT_BYTES[kind]
    flat = raw.view({"f32": np.float32, "f16": np.float16, "bf16": np.uint16}[kind])
    matrix = np.lib.stride_tricks.as_strided(flat, (rows, width), (size * stride, size))
    if kind == "bf16":
        return (matrix.astype(np.uint32) << 16).view(np.float32)
    return matrix.astype(np.float32)


def _x8(raw: npt.NDArray[np.uint8], output: Mapping[str, Any], rows: int, width: int) -> npt.NDArray[np.float32]:
    """Quantized activations (tapeout_cpu.h) multiplied out."""
    groups, terms = -(-width // 32), output["terms"]
    count = groups * output["cap"] * terms
    codes = raw[: count * 32].view(np.int8).reshape(groups, -1, terms, 32)[:, :rows]
    scales = raw[count * 32 : count * 36].view(np.float32).reshape(groups, -1, terms)[:, :rows]
    values = (codes.astype(np.float32) * scales[..., None]).sum(axis=2)
    return np.ascontiguousarray(values.transpose(1, 0, 2).reshape(rows, groups * 32)[:, :width])
