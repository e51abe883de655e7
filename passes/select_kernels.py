"""select_kernels: the fused program becomes launches of the device's kernels."""

from __future__ import annotations

from tapeout.compiler.devices import CpuDevice, CudaDevice, Device, load_device
from tapeout.compiler.lowering.base import UnservedError
from tapeout.compiler.lowering.choice import KernelBuilder
from tapeout.compiler.lowering.cpu import lower_cpu
from tapeout.compiler.lowering.logical import lower_logical
from tapeout.compiler.spec import Serving, Topology
from tapeout.compiler.stages import FusedModel, Purpose, SelectedModel
from tapeout.runtime.errors import TapeoutError


def select_kernels(
    fused: FusedModel, device: Device, topology: Topology, serving: Serving, builder: KernelBuilder, purpose: Purpose
) -> SelectedModel:
    """Choose a kernel for every op on every bucket; layouts, buffers and launch lists follow from the choice.

    What no kernel serves can still be planned: then every op is a launch of its own. Raises UnservedError otherwise.
    """
    try:
        if isinstance(device, CudaDevice):
            from tapeout.compiler.lowering.cuda import lower_cuda  # noqa: PLC0415

            return lower_cuda(fused, (device, *further_devices(device, topology)), serving, builder)
        assert isinstance(device, CpuDevice)
        return lower_cpu(fused, device, serving)
    except UnservedError as missing:
        if not purpose.plan_only:
            raise
        return lower_logical(fused, device, serving, str(missing))


def further_devices(device: Device, topology: Topology) -> tuple[CudaDevice, ...]:
    """The other devices that ``topology.also`` names. Raises TapeoutError for a CPU."""
    found: list[CudaDevice] = []
    for name in topology.also:
        other = load_device(name)
        if not isinstance(device, CudaDevice) or not isinstance(other, CudaDevice):
            raise TapeoutError(
                f"topology.also names {name}, but only GPUs share an artifact, and topology.device is {device.name}"
            )
        found.append(other)
    return tuple(found)
