"""A kernel builder that compiles nothing, for tests of passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tapeout.compiler.devices import CudaDevice
from tapeout.compiler.kernels.cuda.base import Cubin, GpuKernel, Resources
from tapeout.compiler.kernels.cuda.toolchain import Rejected
from tapeout.compiler.lowering.choice import KernelBuilder


class FakeBuilder(KernelBuilder):
    """Every kernel fits, but for those whose names hold one of the given words. ``asked``: kernel names by arch."""

    def __init__(self, *rejected: str) -> None:
        super().__init__(Path("unused"))
        self.rejected = rejected
        self.asked: dict[str, set[str]] = {}

    def build(self, kernels: Sequence[GpuKernel], device: CudaDevice) -> Mapping[str, Cubin | Rejected]:
        self.asked.setdefault(device.arch, set()).update(kernel.name for kernel in kernels)
        return {kernel.name: self._result(kernel) for kernel in kernels}

    def _result(self, kernel: GpuKernel) -> Cubin | Rejected:
        if any(word in kernel.name for word in self.rejected):
            return Rejected("spills 64 bytes a thread")
        return Cubin(b"", Resources(kernel.name, 32, kernel.shared, 0, 0, 4, kernel.shared))
