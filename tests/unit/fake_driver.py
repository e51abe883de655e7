"""A CUDA driver without a GPU: it stands in for the module cuda.bindings.driver and checks what is asked of it.

Device memory lies at made-up addresses and starts as garbage. Work given to a stream is done as late as the driver
may: when the host waits for it. Kernels are Python functions, and a "cubin" is JSON that names their parameters, so
that a launch is decoded by what was compiled and not by what the plan says.
"""

from __future__ import annotations

import ctypes as C
import json
import struct
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

GAP = 1 << 20
GARBAGE = 0xA5
OUT_OF_MEMORY, NO_DEVICE, NOT_FOUND, ILLEGAL_ADDRESS, CAPTURE = 2, 100, 500, 700, 900
ERRORS = {
    1: ("CUDA_ERROR_INVALID_VALUE", "invalid argument"),
    OUT_OF_MEMORY: ("CUDA_ERROR_OUT_OF_MEMORY", "out of memory"),
    NO_DEVICE: ("CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"),
    NOT_FOUND: ("CUDA_ERROR_NOT_FOUND", "named symbol not found"),
    ILLEGAL_ADDRESS: ("CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"),
    CAPTURE: ("CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing"),
}
UNPACK = {"ptr": "<Q", "i32": "<i", "f32": "<f"}


class Handle:
    """What the driver hands out: an object with a number."""

    def __init__(self, number: int, **held: Any) -> None:
        self.number = number
        self.__dict__.update(held)

    def __int__(self) -> int:
        return self.number


class Config:
    """CUlaunchConfig, CUlaunchAttribute and its value: plain records."""

    def __init__(self) -> None:
        self.attrs: list[Any] = []
        self.numAttrs = 0


@dataclass
class Launched:
    """One launch as the device would see it."""

    symbol: str
    args: dict[str, int | float]
    grid: tuple[int, int, int]
    pdl: bool


Kernel = Callable[["FakeCuda", Mapping[str, Any]], None]


@dataclass
class FakeCuda:
    """The calls of cuda.bindings.driver that the runtime makes; each returns (code, values…) as there."""

    kernels: dict[str, Kernel] = field(default_factory=dict)
    capability: tuple[int, int] = (9, 0)
    devices: int = 1
    multiprocessors: int = 132
    memory: int = 1 << 30
    context_bytes: int = 300 << 20
    fail: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By call: how many succeed before one fails, and its code."""

    def __post_init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.copies: list[tuple[str, int, int]] = []
        self.graphs: list[list[Launched]] = []
        self.contexts = 0
        self._lock = threading.RLock()
        self._device: dict[int, C.Array[C.c_char]] = {}
        self._host: dict[int, C.Array[C.c_char]] = {}
        self._live: dict[int, str] = {}
        self._next, self._top = 0x1000, 0x7F0000000000
        self._current = threading.local()
        self._capturing: tuple[Handle, int] | None = None
        self.CUdevice_attribute = SimpleNamespace(
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR=0,
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR=1,
            CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT=2,
        )
        self.CUfunction_attribute = SimpleNamespace(
            CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8, CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT=9
        )
        self.CUlaunchAttributeID = SimpleNamespace(CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION=6)
        self.CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL=1)
        self.CUlaunchConfig = self.CUlaunchAttribute = self.CUlaunchAttributeValue = Config

    def __getattribute__(self, name: str) -> Any:
        found = object.__getattribute__(self, name)
        if not name.startswith("cu") or not callable(found):
            return found

        def call(*args: Any) -> tuple[Any, ...]:
            with self._lock:
                self.calls[name] += 1
                after, code = self.fail.get(name, (1 << 60, 0))
                if self.calls[name] > after:
                    return (code, None)
                return found(*args)

        return call

    def held(self) -> list[str]:
        """What has not been given back."""
        return sorted([*self._live.values(), *(["context"] * self.contexts)])

    # -- device memory, for kernels and tests

    def place(self, address: int, nbytes: int = 1) -> tuple[C.Array[C.c_char], int]:
        """The allocation that holds an address, and where in it; asserts that all bytes lie inside."""
        for start, block in self._device.items():
            if start <= address < start + len(block):
                assert address + nbytes <= start + len(block), f"{nbytes} bytes at {address:#x} run past an allocation"
                return block, address - start
        raise AssertionError(f"{address:#x} lies in no live allocation")

    def read(self, address: int, nbytes: int) -> bytes:
        """Bytes of device memory."""
        block, at = self.place(address, nbytes)
        return C.string_at(C.addressof(block) + at, nbytes)

    def write(self, address: int, data: bytes) -> None:
        """Set bytes of device memory."""
        block, at = self.place(address, len(data))
        C.memmove(C.addressof(block) + at, data, len(data))

    def get(self, kind: str, address: int, index: int = 0) -> Any:
        """One number of an array, by its struct letter."""
        size = struct.calcsize(kind)
        return struct.unpack("<" + kind, self.read(address + size * index, size))[0]

    def put(self, kind: str, address: int, index: int, value: float) -> None:
        """Set one number of an array."""
        self.write(address + struct.calcsize(kind) * index, struct.pack("<" + kind, value))

    # -- device, context, memory

    def _make(self, kind: str, **held: Any) -> Handle:
        self._next += 16
        self._live[self._next] = kind
        return Handle(self._next, **held)

    def _drop(self, handle: Any, kind: str) -> tuple[int]:
        assert self._live.pop(int(handle)) == kind, f"{kind} given back twice or by the wrong call"
        return (0,)

    def _need_context(self) -> None:
        assert getattr(self._current, "context", None) is not None, "no context is current in this thread"

    def _not_capturing(self) -> bool:
        return self._capturing is None or self._capturing[1] != threading.get_ident()

    def cuInit(self, flags: int) -> tuple[int]:
        return (0 if self.devices else NO_DEVICE,)

    def cuDeviceGetCount(self) -> tuple[int, int]:
        return 0, self.devices

    def cuDeviceGet(self, ordinal: int) -> tuple[int, int]:
        return 0, ordinal

    def cuDeviceGetName(self, length: int, device: int) -> tuple[int, bytes]:
        return 0, b"Fake GPU".ljust(length, b"\0")

    def cuDeviceGetAttribute(self, which: int, device: int) -> tuple[int, int]:
        return 0, (*self.capability, self.multiprocessors)[which]

    def cuGetErrorName(self, code: int) -> tuple[int, bytes]:
        return 0, ERRORS[code][0].encode()

    def cuGetErrorString(self, code: int) -> tuple[int, bytes]:
        return 0, ERRORS[code][1].encode()

    def cuCtxGetCurrent(self) -> tuple[int, Any]:
        return 0, getattr(self._current, "context", None)

    def cuCtxSetCurrent(self, context: Any) -> tuple[int]:
        self._current.context = context
        return (0,)

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[int, Handle]:
        self.contexts += 1
        return 0, Handle(1)

    def cuDevicePrimaryCtxRelease(self, device: int) -> tuple[int]:
        self.contexts -= 1
        return (0,)

    def cuCtxSynchronize(self) -> tuple[int]:
        return (0,)

    def cuMemGetInfo(self) -> tuple[int, int, int]:
        self._need_context()
        return 0, self.memory - self.context_bytes - sum(len(block) for block in self._device.values()), self.memory

    def cuMemAlloc(self, nbytes: int) -> tuple[int, int | None]:
        self._need_context()
        if not self._not_capturing():
            return CAPTURE, None
        if nbytes > self.cuMemGetInfo()[1]:
            return OUT_OF_MEMORY, None
        address, block = self._top, (C.c_char * nbytes)()
        C.memset(block, GARBAGE, nbytes)
        self._top += (nbytes + GAP) // GAP * GAP + GAP
        self._device[address] = block
        self._live[address] = "device memory"
        return 0, address

    def cuMemFree(self, address: int) -> tuple[int]:
        del self._device[address]
        return self._drop(address, "device memory")

    def cuMemHostAlloc(self, nbytes: int, flags: int) -> tuple[int, int | None]:
        if not self._not_capturing():
            return CAPTURE, None
        block = (C.c_char * nbytes)()
        C.memset(block, GARBAGE, nbytes)
        self._host[C.addressof(block)] = block
        self._live[C.addressof(block)] = "pinned memory"
        return 0, C.addressof(block)

    def cuMemFreeHost(self, address: int) -> tuple[int]:
        del self._host[address]
        return self._drop(address, "pinned memory")

    def _pinned(self, address: int, nbytes: int) -> None:
        inside = any(start <= address and address + nbytes <= start + len(b) for start, b in self._host.items())
        assert inside, f"{nbytes} bytes at {address:#x} are not pinned"

    # -- streams and events: work waits in a queue until the host waits for it

    def cuStreamCreate(self, flags: int) -> tuple[int, Handle]:
        return 0, self._make("stream", queue=[])

    def cuStreamDestroy(self, stream: Handle) -> tuple[int]:
        return self._drop(stream, "stream")

    def cuEventCreate(self, flags: int) -> tuple[int, Handle]:
        return 0, self._make("event", mark=None)

    def cuEventDestroy(self, event: Handle) -> tuple[int]:
        return self._drop(event, "event")

    def _enqueue(self, stream: Any, work: Callable[[], None]) -> tuple[int]:
        self._need_context()
        if self._capturing is not None and self._capturing[0] is stream:
            return (CAPTURE,)  # a copy would be legal, but a list holds launches only
        stream.queue.append(work)
        return (0,)

    def cuEventRecord(self, event: Any, stream: Any) -> tuple[int]:
        event.mark = (stream, object())
        mark = event.mark
        return self._enqueue(stream, lambda: setattr(event, "mark", None) if event.mark is mark else None)

    def cuEventSynchronize(self, event: Any) -> tuple[int]:
        if not self._not_capturing():
            return (CAPTURE,)
        while event.mark is not None:
            event.mark[0].queue.pop(0)()
        return (0,)

    def cuStreamSynchronize(self, stream: Any) -> tuple[int]:
        if not self._not_capturing():
            return (CAPTURE,)
        while stream.queue:
            stream.queue.pop(0)()
        return (0,)

    def cuMemcpyHtoDAsync(self, target: int, source: int, nbytes: int, stream: Any) -> tuple[int]:
        self._pinned(source, nbytes)
        self.place(target, nbytes)
        self.copies.append(("up", target, nbytes))
        return self._enqueue(stream, lambda: self.write(target, C.string_at(source, nbytes)))

    def cuMemcpyDtoHAsync(self, target: int, source: int, nbytes: int, stream: Any) -> tuple[int]:
        self._pinned(target, nbytes)
        self.place(source, nbytes)
        self.copies.append(("down", source, nbytes))
        return self._enqueue(stream, lambda: C.memmove(target, self.read(source, nbytes), nbytes) and None)

    def cuMemsetD8Async(self, address: int, value: int, nbytes: int, stream: Any) -> tuple[int]:
        self.place(address, nbytes)
        return self._enqueue(stream, lambda: self.write(address, bytes([value]) * nbytes))

    def cuMemsetD2D8Async(self, address: int, pitch: int, value: int, width: int, rows: int, stream: Any) -> tuple[int]:
        def work() -> None:
            for row in range(rows):
                self.write(address + row * pitch, bytes([value]) * width)

        return self._enqueue(stream, work)

    # -- modules and launches

    def cuModuleLoadData(self, image: bytes) -> tuple[int, Handle]:
        return 0, self._make("module", functions=json.loads(image))

    def cuModuleUnload(self, module: Handle) -> tuple[int]:
        return self._drop(module, "module")

    def cuModuleGetFunction(self, module: Any, symbol: bytes) -> tuple[int, Handle | None]:
        if symbol.decode() not in module.functions:
            return NOT_FOUND, None
        params = module.functions[symbol.decode()]
        return 0, Handle(0, symbol=symbol.decode(), params=params, dynamic=48 << 10)

    def cuFuncSetAttribute(self, function: Any, attribute: int, value: int) -> tuple[int]:
        if attribute == self.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
            function.dynamic = value
        return (0,)

    def cuFuncLoad(self, function: Any) -> tuple[int]:
        return (0,)

    def cuLaunchKernelEx(self, config: Any, function: Any, pointers: int, extra: int) -> tuple[int]:
        assert config.sharedMemBytes <= function.dynamic, "more dynamic shared memory than the kernel was allowed"
        assert min(config.gridDimX, config.gridDimY, config.gridDimZ, config.blockDimX) >= 1
        pdl = any(a.value.programmaticStreamSerializationAllowed for a in config.attrs[: config.numAttrs])
        assert not pdl or self.capability >= (9, 0), "this GPU has no programmatic dependent launch"
        args: dict[str, int | float] = {}
        addresses = (C.c_void_p * len(function.params)).from_address(pointers)
        for (name, kind), address in zip(function.params, addresses, strict=True):
            form = UNPACK[kind]
            (args[name],) = struct.unpack(form, C.string_at(address, struct.calcsize(form)))
            if kind == "ptr" and args[name]:
                self.place(int(args[name]))
        grid = (config.gridDimX, config.gridDimY, config.gridDimZ)
        launched = Launched(function.symbol, args, grid, pdl)
        if self._capturing is not None and self._capturing[0] is config.hStream:
            config.hStream.captured.append(launched)
            return (0,)
        return self._enqueue(config.hStream, lambda: self._execute(launched))

    def _execute(self, launched: Launched) -> None:
        self.kernels[launched.symbol](self, launched.args)

    def cuStreamBeginCapture(self, stream: Any, mode: int) -> tuple[int]:
        assert self._capturing is None
        self._capturing, stream.captured = (stream, threading.get_ident()), []
        return (0,)

    def cuStreamEndCapture(self, stream: Any) -> tuple[int, Handle]:
        assert self._capturing is not None and self._capturing[0] is stream
        self._capturing = None
        return 0, self._make("graph", launches=stream.captured)

    def cuGraphDestroy(self, graph: Any) -> tuple[int]:
        return self._drop(graph, "graph")

    def cuGraphInstantiate(self, graph: Any, flags: int) -> tuple[int, Handle]:
        self.graphs.append(list(graph.launches))
        return 0, self._make("executable graph", launches=list(graph.launches))

    def cuGraphExecDestroy(self, graph: Any) -> tuple[int]:
        return self._drop(graph, "executable graph")

    def cuGraphUpload(self, graph: Any, stream: Any) -> tuple[int]:
        return (0,)

    def cuGraphLaunch(self, graph: Any, stream: Any) -> tuple[int]:
        for launched in graph.launches:
            self._enqueue(stream, lambda launched=launched: self._execute(launched))
        return (0,)


def check_lifetimes(launches: list[Launched], graph: Mapping[str, Any], memory: Mapping[str, Any], arena: int) -> None:
    """Assert that every pointer into the arena lies in a buffer that the plan keeps at that launch of that list."""
    assert len(launches) == len(graph["launches"])
    for index, (launched, planned) in enumerate(zip(launches, graph["launches"], strict=True)):
        alive = [
            buffer
            for buffer in memory["buffers"]
            if buffer["graph"] == graph["name"] and buffer["first"] <= index <= buffer["last"]
        ]
        for name, value in launched.args.items():
            if name in planned["args"] and arena <= value < arena + memory["arena"]:
                at = value - arena
                inside = any(buffer["offset"] <= at < buffer["offset"] + buffer["bytes"] for buffer in alive)
                assert inside, f"launch {index} of {graph['name']}: {name} is in no buffer that is alive then"
