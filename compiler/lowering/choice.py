"""Which kernel serves a launch: candidates are compiled, what exceeds the device is rejected, the best rest wins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tapeout.compiler.devices import CudaDevice
from tapeout.compiler.kernels.cuda import toolchain
from tapeout.compiler.kernels.cuda.base import Candidate, Cubin, GpuKernel, Rate
from tapeout.compiler.kernels.cuda.toolchain import Rejected
from tapeout.compiler.progress import Progress, SilentProgress, steps_of
from tapeout.compiler.stages import Arg, BuiltKernel, Decision, Launch, Produced
from tapeout.runtime.errors import TapeoutError


class KernelBuilder:
    """Compiles GPU kernels and keeps what this process has compiled; the cache on disk outlives it.

    What it returns depends on the kernels and the device alone, so it counts as nothing among a pass's inputs.
    """

    def __init__(self, cache: Path, progress: Progress | None = None) -> None:
        self.cache, self.progress = cache, progress or SilentProgress()
        self.built: dict[tuple[str, str], Cubin | Rejected] = {}

    def __repr__(self) -> str:
        return type(self).__name__

    def build(self, kernels: Sequence[GpuKernel], device: CudaDevice) -> Mapping[str, Cubin | Rejected]:
        """Every kernel by name: its cubin, or why the device cannot run it."""
        missing = [kernel for kernel in kernels if (device.name, kernel.name) not in self.built]
        if missing:
            with self.progress.task(f"kernels for {device.arch}", len(missing)) as task:
                found = toolchain.build(missing, device, self.cache, steps_of(task))
            self.built |= {(device.name, name): result for name, result in found.items()}
        return {kernel.name: self.built[device.name, kernel.name] for kernel in kernels}


@dataclass(frozen=True)
class Pending:
    """A launch whose kernel is not chosen yet; ``bucket`` is the list it stands in."""

    op: str
    bucket: str
    candidates: tuple[Candidate, ...]
    args: Mapping[str, Arg]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    produces: tuple[Produced, ...]
    output: str


Built = Mapping[str, Mapping[str, Cubin | Rejected]]
"""By device name, then by kernel name."""


class Choices:
    """The kernels chosen for a set of launches, fit for every device of an artifact; the first ranks them."""

    def __init__(
        self, pending: Sequence[Pending], devices: Sequence[CudaDevice], kernels: Mapping[str, GpuKernel], built: Built
    ) -> None:
        self._devices, self._built = devices, built
        used = sorted({self._choose(launch).kernel.name for launch in pending})
        self.kernels = tuple(
            BuiltKernel(kernels[name], tuple((d.arch, self._cubin(d, name).resources) for d in devices))
            for name in used
        )
        self.decisions = [self._decide(launch) for launch in pending]

    @staticmethod
    def make(pending: Sequence[Pending], devices: Sequence[CudaDevice], builder: KernelBuilder) -> Choices:
        """Compile all candidates at once and choose for each launch. Raises TapeoutError when nothing is left."""
        kernels: dict[str, GpuKernel] = {}
        for candidate in (c for launch in pending for c in launch.candidates):
            known = kernels.setdefault(candidate.kernel.name, candidate.kernel)
            assert known == candidate.kernel, f"two kernels are called {known.name}"
        built = {device.name: builder.build(list(kernels.values()), device) for device in devices}
        return Choices(pending, devices, kernels, built)

    def _cubin(self, device: CudaDevice, name: str) -> Cubin:
        cubin = self._built[device.name][name]
        assert isinstance(cubin, Cubin)
        return cubin

    def _rejection(self, name: str) -> str:
        """Why a kernel does not fit, or nothing."""
        results = (self._built[device.name][name] for device in self._devices)
        return next((result.reason for result in results if isinstance(result, Rejected)), "")

    def _choose(self, pending: Pending) -> Candidate:
        """The first candidate that fits: templates list them by what they predict, best first."""
        fitting = [c for c in pending.candidates if not self._rejection(c.kernel.name)]
        if not fitting:
            names = ", ".join(device.name for device in self._devices)
            reasons = "; ".join(f"{c.kernel.name} {self._rejection(c.kernel.name)}" for c in pending.candidates)
            raise TapeoutError(f"{pending.op}: no kernel for {pending.bucket} fits {names}: {reasons}")
        return fitting[0]

    def _decide(self, pending: Pending) -> Decision:
        chosen, device = self._choose(pending), self._devices[0]
        taken = self._cubin(device, chosen.kernel.name).resources
        others = tuple(
            (c.kernel.name, self._rejection(c.kernel.name) or f"{_predicted(c, device)} us predicted, ranked below")
            for c in pending.candidates
            if c is not chosen
        )
        evidence = (
            ("predicted_us", _predicted(chosen, device)),
            ("bytes", chosen.nbytes),
            ("registers", taken.registers),
            ("shared", taken.shared),
            ("blocks_per_sm", taken.blocks_per_sm),
        )
        reason = "the best ranked that fits without spills" if others else "the one kernel that serves it"
        subject = f"{pending.op} ({pending.bucket})"
        return Decision("select_kernels", subject, chosen.kernel.name, reason, others, evidence)

    def launch(self, pending: Pending) -> Launch:
        """The launch, with its kernel, grid and arguments in ABI order."""
        candidate = self._choose(pending)
        names = [param.name for param in candidate.kernel.params]
        missing = [name for name in names if name not in pending.args]
        assert not missing and len(names) == len(pending.args), (pending.op, candidate.kernel.name, missing)
        args = tuple((name, pending.args[name]) for name in names)
        return Launch(candidate.kernel.name, pending.op, args, pending.reads, pending.writes, pending.produces,
                      pending.output, candidate.grid)  # fmt: skip


def _predicted(candidate: Candidate, device: CudaDevice) -> float:
    """Predicted us: the slower of bytes over bandwidth and operations over the rate of the unit that does them."""
    arithmetic = candidate.operations / operations_per_s(device, candidate.rate)
    return round(max(candidate.nbytes / (device.bandwidth_gb_s * 1e9), arithmetic) * 1e6, 2)


def operations_per_s(device: CudaDevice, rate: Rate) -> float:
    """Peak rate of a unit. ``int8`` is the four-way dot product outside the matrix units: twice float32's rate."""
    if rate == "bf16":
        return device.matrix_tflops.bf16 * 1e12
    if rate == "fp8":
        return (device.matrix_tflops.fp8 or device.matrix_tflops.bf16) * 1e12
    return device.f32_tflops * 1e12 * (2 if rate == "int8" else 1)
