"""Runs launches one by one and reads what each wrote, for verification."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tapeout.runtime.cpu import CpuBackend, LaunchList, StepStruct
from tapeout.runtime.model import Traced


def trace_launches(backend: CpuBackend, launches: LaunchList, step: StepStruct, rows: int) -> Iterator[Traced]:
    """Run every launch of a list; outputs that are not updated in place are filled with NaN first."""
    for index, launch in enumerate(launches.plan):
        output = launch.get("output")
        if output is None:
            backend.run_one(launches, index, step)
            continue
        address = backend.address(launch["args"][output["arg"]])
        width = max(made["columns"][1] for made in launch["produces"])
        if not output["in_place"]:
            _poison(address, output, rows, width)
        backend.run_one(launches, index, step)
        values = _read(address, output, rows, width)
        produces = tuple((made["op"], *made["columns"]) for made in launch["produces"])
        yield Traced(launches.name, index, launch["kernel"], launch["op"], produces, values)


def _bytes(address: int, nbytes: int) -> npt.NDArray[np.uint8]:
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


def _matrix(address: int, output: Mapping[str, Any], rows: int, width: int) -> npt.NDArray[np.float32]:
    stride = output["stride"]
    flat = _bytes(address, 4 * ((rows - 1) * stride + width)).view(np.float32)
    return np.lib.stride_tricks.as_strided(flat, (rows, width), (4 * stride, 4))


def _poison(address: int, output: Mapping[str, Any], rows: int, width: int) -> None:
    if output["kind"] == "f32":
        _matrix(address, output, rows, width)[:] = np.nan
    else:
        _bytes(address, -(-width // 32) * output["cap"] * output["terms"] * 44)[:] = 0xFF


def _read(address: int, output: Mapping[str, Any], rows: int, width: int) -> npt.NDArray[np.float32]:
    """The output as float32 [rows, width]; x8 activations (tapeout_cpu.h) are multiplied out."""
    if output["kind"] == "f32":
        return _matrix(address, output, rows, width).copy()
    groups, terms = -(-width // 32), output["terms"]
    count = groups * output["cap"] * terms
    raw = _bytes(address, count * 36)
    codes = raw[: count * 32].view(np.int8).reshape(groups, -1, terms, 32)[:, :rows]
    scales = raw[count * 32 :].view(np.float32).reshape(groups, -1, terms)[:, :rows]
    values = (codes.astype(np.float32) * scales[..., None]).sum(axis=2)
    return np.ascontiguousarray(values.transpose(1, 0, 2).reshape(rows, groups * 32)[:, :width])
