"""What a GPU kernel template makes: kernels ready to compile, and candidates with their launch shape and cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ParamType = Literal["ptr", "i32", "f32"]
Define = int | float | str | bool
Rate = Literal["f32", "bf16", "int8", "fp8"]

STORE, ADD, GATED_SILU, GATED_GELU = range(4)
"""What a product does with its sums: write them, add them into y, or write act(gate) * up."""
GATED = {"silu": GATED_SILU, "gelu_tanh": GATED_GELU}
FLOAT_BYTES = {"f32": 4, "bf16": 2, "f16": 2}
FLOAT_NAMES = {"f32": "TP_F32", "bf16": "TP_BF16", "f16": "TP_F16"}
"""Number types as the macros of tapeout.cuh name them."""


@dataclass(frozen=True)
class Param:
    """One kernel argument, in ABI order. Pointers are 16-byte aligned; ``dtype`` is what Triton types them with."""

    name: str
    type: ParamType = "ptr"
    dtype: str = "u8"


@dataclass(frozen=True)
class GpuKernel:
    """One kernel instance: a template with every shape and choice fixed at compile time.

    ``source`` is a file of ``compiler/kernels/cuda/src`` (language cuda; it defines ``extern "C" __global__ NAME`` by
    the macro TP_KERNEL) or ``module:function`` below ``tapeout.compiler.kernels.cuda`` (language triton). ``defines``
    are macros or constexpr arguments. ``shared`` is dynamic shared memory in bytes (Triton's is read off the compiled
    kernel). ``options`` are further Triton compile options (num_stages, …). ``pdl``: starts under programmatic
    dependent launch, where the architecture has it.
    """

    name: str
    template: str
    language: Literal["cuda", "triton"]
    source: str
    params: tuple[Param, ...]
    defines: tuple[tuple[str, Define], ...]
    threads: int
    shared: int = 0
    options: tuple[tuple[str, int], ...] = ()
    pdl: bool = True


@dataclass(frozen=True)
class Candidate:
    """A kernel that could serve a problem: its grid, the bytes one launch moves from device memory, its arithmetic."""

    kernel: GpuKernel
    grid: tuple[int, int, int]
    nbytes: int
    operations: int
    rate: Rate


@dataclass(frozen=True)
class Resources:
    """What the compiled kernel takes, read off its cubin.

    ``shared`` is static and dynamic shared memory together, ``dynamic_shared`` what a launch asks for.
    """

    symbol: str
    registers: int
    shared: int
    spill_bytes: int
    stack_bytes: int
    blocks_per_sm: int
    dynamic_shared: int = 0


@dataclass(frozen=True)
class Cubin:
    """A compiled kernel."""

    data: bytes
    resources: Resources
