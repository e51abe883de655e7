"""Device profiles: what the compiler knows about the hardware that an artifact is for."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from tapeout.compiler.spec.document import read_document
from tapeout.compiler.spec.fields import Section, Size
from tapeout.compiler.spec.violations import validate
from tapeout.runtime.errors import TapeoutError

Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
Arch = Literal["sm_80", "sm_89", "sm_90", "sm_100", "sm_120"]
BLOCK_COST = 1024
"""Bytes of shared memory that each resident block costs beside its own."""
Feature = Literal["bulk_copy", "cluster", "fp4", "fp8", "mma_block_scale", "pdl", "tcgen05", "wgmma"]


class Device(Section):
    """What every profile has. ``CpuDevice`` and ``CudaDevice`` say the rest."""

    name: str
    """Name of the profile, the one that topology.device gives."""
    memory: Size
    """Bytes that an artifact may plan with."""
    bandwidth_gb_s: Positive
    """Bytes read from memory by the whole device, 10^9 a second."""
    source: str
    """Where the figures come from."""


class CpuDevice(Device):
    """A CPU. Rates are ceilings that were measured with the instructions that the kernels use."""

    kind: Literal["cpu"]
    """Which backend runs it."""
    targets: Annotated[tuple[Literal["x86_64_v3", "x86_64_v4"], ...], Field(min_length=1)]
    """Instruction sets that kernels are built for, from the most to the least widely available."""
    threads: Count
    """Threads that the rates below were measured with, and that plans are costed for."""
    bandwidth_one_thread_gb_s: Positive
    """Bytes read from memory by one thread, 10^9 a second."""
    int8_gops_per_core: Positive
    """int8 dot products accumulated in 32 bits, 10^9 operations a second (a multiply and an add are two)."""
    int8_pairs_gops_per_core: Positive
    """The same with 16-bit accumulation of pairs, where the codes are small enough for it."""
    f32_gflops_per_core: Positive
    """float32 fused multiply-add, 10^9 operations a second."""


class MatrixRates(Section):
    """Dense matrix products, 10^12 operations a second by operand type; null where the hardware has none."""

    bf16: Positive
    f16: Positive
    fp8: Positive | None
    """e4m3 and e5m2, accumulated in float32."""
    int8: Positive | None
    """Accumulated in int32."""
    fp4: Positive | None
    """e2m1 with block scales."""


class CudaDevice(Device):
    """An NVIDIA GPU. Rates are the vendor's peaks, except those that ``measured`` names."""

    kind: Literal["cuda"]
    """Which backend runs it."""
    arch: Arch
    """The architecture that kernels are compiled for."""
    sm_count: Count
    """Multiprocessors."""
    clock_mhz: Positive
    """Boost clock."""
    registers_per_sm: Count
    """32-bit registers of a multiprocessor."""
    shared_per_sm: Count
    """Bytes of shared memory of a multiprocessor, the 1,024 that each resident block costs included."""
    shared_per_block: Count
    """Bytes of shared memory that one block may use, static and dynamic together."""
    threads_per_sm: Count
    """Threads that a multiprocessor holds."""
    blocks_per_sm: Count
    """Blocks that a multiprocessor holds."""
    l2_bytes: Size
    """Size of the L2 cache."""
    context: Size
    """Bytes of its memory that the driver takes for a process: context, code and captured graphs."""
    peak_bandwidth_gb_s: Positive
    """Memory bandwidth by the data sheet, 10^9 bytes a second."""
    matrix_tflops: MatrixRates
    """Rates of the matrix units."""
    f32_tflops: Positive
    """float32 fused multiply-add outside the matrix units, 10^12 operations a second."""
    pcie_gb_s: Positive
    """The bus to the host, raw, one direction."""
    nvlink_gb_s: Positive | None
    """Links to other GPUs, one direction; null where there are none."""
    features: tuple[Feature, ...]
    """Instructions and launch modes that kernels may ask for."""
    measured: tuple[Literal["bandwidth_gb_s", "context", "l2_bytes", "memory", "sm_count"], ...] = ()
    """Which figures were measured on such a card; all others are the vendor's."""

    @property
    def half_shared(self) -> int:
        """Bytes of shared memory with which two blocks, and no third, find room on a multiprocessor."""
        return min(self.shared_per_block, self.shared_per_sm // 2 - BLOCK_COST)

    @property
    def capability(self) -> int:
        """Compute capability as two digits or three: 90 for sm_90."""
        return int(self.arch.removeprefix("sm_"))


def one_an_architecture(devices: Sequence[CudaDevice]) -> list[CudaDevice]:
    """The first device of each architecture: those that code is compiled for."""
    found: dict[str, CudaDevice] = {}
    for each in devices:
        found.setdefault(each.arch, each)
    return list(found.values())


def least(devices: Sequence[CudaDevice]) -> CudaDevice:
    """The first device with no more multiprocessors and shared memory than any of them has: what fits it fits all."""
    fields = ("sm_count", "shared_per_sm", "shared_per_block")
    return devices[0].model_copy(update={name: min(getattr(each, name) for each in devices) for name in fields})


def profile_folder() -> Path:
    """The folder of the profiles that ship with the compiler."""
    return Path(str(files("tapeout.specs"))) / "devices"


def known_devices() -> list[str]:
    """Names of all profiles."""
    return sorted(path.stem for path in profile_folder().glob("*.yaml"))


def load_device(name: str) -> Device:
    """The profile called ``name``. Raises TapeoutError listing the known ones."""
    known = known_devices()
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise TapeoutError(f"topology.device: no profile is called {name!r}; {hint}known: {', '.join(known)}")
    document = read_document(profile_folder() / f"{name}.yaml")
    kind = CudaDevice if document.data.get("kind") == "cuda" else CpuDevice
    device = validate(kind, document)
    if device.name != name:
        raise TapeoutError(f"{profile_folder() / name}.yaml: name is {device.name!r}, but the file is called {name}")
    return device
