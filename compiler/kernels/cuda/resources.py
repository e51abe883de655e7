"""What a compiled kernel takes, read off its cubin and ptxas' report, and how much of it a multiprocessor holds."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tapeout.compiler.devices import CudaDevice
from tapeout.compiler.kernels.cuda.base import Cubin, GpuKernel, Param, Resources
from tapeout.runtime.errors import TapeoutError

THREADS_PER_BLOCK = 1024
REGISTERS_PER_BLOCK = 65536
_WARP = 32
_WARP_REGISTERS = 256  # registers are given to a warp in multiples of this
_WARP_PARTITIONS = 4  # a warp lives in one of four register files
_RESERVED_SHARED = 1024  # what the system takes of each block's shared memory, sm_80 and later
_SHARED_STEP = 128

# Attributes of .nv.info and their two shapes, as nvdisasm names them: EIFMT_SVAL holds a size and a value.
_REGCOUNT, _FRAME_SIZE, _KPARAM_INFO = 0x2F, 0x11, 0x17
_SIZED = 4
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_PARAM_BYTES = {"ptr": 8, "i32": 4, "f32": 4}


@dataclass(frozen=True)
class Elf:
    """The facts of a cubin with one kernel. ``static_shared`` leaves out what the system reserves."""

    symbol: str
    registers: int
    stack_bytes: int
    static_shared: int
    parameters: tuple[int, ...]


def read_elf(data: bytes) -> Elf:
    """Read a cubin. Raises ValueError when it is not one of exactly one kernel."""
    sections = dict(_sections(data))
    kernels = [name.removeprefix(".text.") for name in sections if name.startswith(".text.")]
    if len(kernels) != 1:
        raise ValueError(f"a cubin of one kernel is wanted; this one has {', '.join(kernels) or 'none'}")
    (symbol,) = kernels
    common = list(_attributes(sections[".nv.info"].data))
    own = list(_attributes(sections[f".nv.info.{symbol}"].data))
    parameters = sorted(struct.unpack_from("<IHHI", value) for kind, value in own if kind == _KPARAM_INFO)
    shared = sections[f".nv.shared.{symbol}"].size if f".nv.shared.{symbol}" in sections else 0
    reserved = _RESERVED_SHARED if ".nv.shared.reserved.0" in sections and shared >= _RESERVED_SHARED else 0
    return Elf(
        symbol,
        registers=_largest(common, _REGCOUNT),
        stack_bytes=_largest(common, _FRAME_SIZE),
        static_shared=shared - reserved,
        parameters=tuple(flags >> 18 for _, _, _, flags in sorted(parameters, key=lambda each: each[1])),
    )


def finish_cubin(kernel: GpuKernel, data: bytes, log: str, params: Sequence[Param], dynamic_shared: int) -> Cubin:
    """The compiled kernel with its resources. ``log`` is ptxas' report.

    ``blocks_per_sm`` is left 0 until a device is known. Raises TapeoutError when the compiled parameter list is not
    ``params``, which is what a launch passes.
    """
    elf = read_elf(data)
    wanted = tuple(_PARAM_BYTES[param.type] for param in params)
    if elf.parameters != wanted:
        names = ", ".join(f"{param.name}:{param.type}" for param in params)
        raise TapeoutError(
            f"kernel {kernel.name}: {kernel.source} takes parameters of {list(elf.parameters)} bytes, "
            f"but its template declares {list(wanted)} ({names})"
        )
    spilled = [max(int(stores), int(loads)) for _, stores, loads in _SPILLS.findall(log)]
    if not spilled:
        raise TapeoutError(f"kernel {kernel.name}: the assembler's report says nothing of spills")
    resources = Resources(
        symbol=elf.symbol,
        registers=elf.registers,
        shared=elf.static_shared + dynamic_shared,
        spill_bytes=max(spilled),
        stack_bytes=elf.stack_bytes,
        blocks_per_sm=0,
        dynamic_shared=dynamic_shared,
    )
    return Cubin(data, resources)


def blocks_per_sm(device: CudaDevice, threads: int, registers: int, shared: int) -> int:
    """How many blocks a multiprocessor holds at once: the occupancy calculation of NVIDIA's programming guide.

    ``registers`` a thread; ``shared`` bytes a block, without what the system reserves. 0 when not even one fits.
    """
    warps = -(-threads // _WARP)
    if threads > THREADS_PER_BLOCK or shared > device.shared_per_block:
        return 0
    limits = [device.blocks_per_sm, device.threads_per_sm // (warps * _WARP)]
    if registers:
        a_warp = _round_up(registers * _WARP, _WARP_REGISTERS)
        a_partition = device.registers_per_sm // _WARP_PARTITIONS // a_warp
        limits.append(a_partition * _WARP_PARTITIONS // warps)
    limits.append(device.shared_per_sm // _round_up(shared + _RESERVED_SHARED, _SHARED_STEP))
    return min(limits)


@dataclass(frozen=True)
class _Section:
    data: bytes
    size: int


_NOBITS = 8


def _sections(data: bytes) -> Iterator[tuple[str, _Section]]:
    """Names and contents of the sections of a little-endian 64-bit ELF file."""
    if data[:5] != b"\x7fELF\x02":
        raise ValueError("not a 64-bit ELF file")
    (table,) = struct.unpack_from("<Q", data, 40)
    size, count, names_at = struct.unpack_from("<HHH", data, 58)
    headers = [struct.unpack_from("<IIQQQQIIQQ", data, table + index * size) for index in range(count)]
    names = data[headers[names_at][4] :]
    for name, kind, _, _, offset, length, *_ in headers:
        content = b"" if kind == _NOBITS else data[offset : offset + length]
        yield names[name : names.index(b"\0", name)].decode(), _Section(content, length)


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Kinds and values of an .nv.info section."""
    at = 0
    while at < len(data):
        form, kind, size = struct.unpack_from("<BBH", data, at)
        at += 4
        if form == _SIZED:
            yield kind, data[at : at + size]
            at += size


def _largest(attributes: Sequence[tuple[int, bytes]], kind: int) -> int:
    return max((struct.unpack_from("<II", value)[1] for found, value in attributes if found == kind), default=0)


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
