"""What a CPU kernel template declares: its C file, the kernels it makes, and what running one costs."""

from __future__ import annotations

from dataclasses import dataclass

from tapeout.compiler.devices import CpuDevice


@dataclass(frozen=True)
class Cost:
    """Bytes moved from memory and arithmetic done; ``integer`` says whether it is int8 or float32."""

    nbytes: int
    operations: int
    integer: bool

    def seconds(self, device: CpuDevice) -> float:
        """Predicted time on all threads of a device: the slower of memory and arithmetic."""
        rate = device.int8_gops_per_core if self.integer else device.f32_gflops_per_core
        return max(self.nbytes / (device.bandwidth_gb_s * 1e9), self.operations / (rate * 1e9 * device.threads))


def x8_bytes(k: int) -> int:
    """Bytes a row of k activations takes in groups of 32: codes, scale and two sums (tapeout_cpu.h)."""
    return -(-k // 32) * 44
