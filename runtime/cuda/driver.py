"""A thin wrapper over the CUDA driver API: every call is checked, and everything made is given back by ``close``."""

from __future__ import annotations

import ctypes as C
import importlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tapeout.runtime.errors import TapeoutError

NO_DEVICE = 100
NON_BLOCKING = 1  # a stream that does not wait for the legacy default stream
NO_TIMING = 2  # an event that only orders
_PACK = {"ptr": "<Q", "i32": "<i", "f32": "<f"}
# Plain code for these also runs on later GPUs of the same major version. Code for 9.0 and 10.x is made with the
# instructions of that one chip.
_FORWARD = ((8, 0), (8, 6), (12, 0))


@dataclass(frozen=True)
class Where:
    """The launch of the plan that a driver call serves."""

    graph: str
    index: int
    op: str
    kernel: str

    def __str__(self) -> str:
        return f"launch {self.index} of {self.graph} (op {self.op}, kernel {self.kernel})"


@dataclass(frozen=True)
class Bound:
    """A launch with its arguments packed. ``slots`` and ``pointers`` must outlive every use of ``config``."""

    where: Where
    function: Any
    config: Any
    slots: C.Array[C.c_uint64]
    pointers: C.Array[C.c_void_p]


def bindings() -> Any:
    """The module cuda.bindings.driver. Raises TapeoutError when it is not installed."""
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError:
        raise TapeoutError(
            "this artifact runs on an NVIDIA GPU, which needs the package cuda-bindings; "
            "install it with `pip install 'tapeout[cuda]'`"
        ) from None


class Driver:
    """One GPU. Methods raise TapeoutError naming the failing call, and the launch it served if there is one.

    Calls of one thread work on the context that ``open`` or ``activate`` made current in that thread.
    """

    def __init__(self, ordinal: int) -> None:
        self._cu = cu = bindings()
        self._live: dict[tuple[str, int], Any] = {}
        self._context: Any = None
        self._before: Any = None
        self._start(ordinal)
        self.ordinal = ordinal
        self._device = self._call("cuDeviceGet", ordinal)
        self.name = bytes(self._call("cuDeviceGetName", 128, self._device)).split(b"\0")[0].decode()
        attribute = cu.CUdevice_attribute
        self.capability = (
            self._attribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
            self._attribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR),
        )
        self.multiprocessors = self._attribute(attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)

    def _start(self, ordinal: int) -> None:
        try:
            code = self._cu.cuInit(0)[0]
        except RuntimeError as error:
            raise TapeoutError(
                f"this artifact runs on an NVIDIA GPU, but no driver was found ({error}); "
                "install the NVIDIA driver, or compile for a device of this machine"
            ) from error
        count = 0
        if code != NO_DEVICE:
            self._check("cuInit", (code,))
            count = self._call("cuDeviceGetCount")
        if not 0 <= ordinal < count:
            seen = f"the process sees {count}, numbered from 0" if count else "the driver sees none"
            raise TapeoutError(f"there is no GPU {ordinal}: {seen}; CUDA_VISIBLE_DEVICES decides which are seen")

    def _attribute(self, which: Any) -> int:
        return int(self._call("cuDeviceGetAttribute", which, self._device))

    @property
    def targets(self) -> list[str]:
        """Kernel architectures that this GPU runs, best first."""
        major, minor = self.capability
        older = [known for known in _FORWARD if known[0] == major and known[1] < minor]
        return [f"sm_{major}{minor}", *(f"sm_{a}{b}" for a, b in reversed(older))]

    def _call(self, name: str, *args: Any, where: object = None) -> Any:
        """Call, check, and return the one value or the tuple of values."""
        return self._check(name, getattr(self._cu, name)(*args), where)

    def _check(self, name: str, result: tuple[Any, ...], where: object = None) -> Any:
        code = result[0]
        if code != 0:
            serving = f" for {where}" if where is not None else ""
            label, text = (self._text(call, code) for call in ("cuGetErrorName", "cuGetErrorString"))
            raise TapeoutError(f"{name} failed{serving} on GPU {self._label()}: {label} ({text})")
        return result[1] if len(result) == 2 else result[1:]

    def _text(self, call: str, code: Any) -> str:
        found = getattr(self._cu, call)(code)
        return found[1].decode() if found[0] == 0 and found[1] else f"error {int(code)}"

    def _label(self) -> str:
        return f"{getattr(self, 'ordinal', '?')} ({getattr(self, 'name', 'not opened yet')})"

    # -- the context

    def retain(self) -> None:
        """Make the device's context; this is what takes time, and any thread may do it."""
        self._context = self._call("cuDevicePrimaryCtxRetain", self._device)

    def open(self) -> None:
        """Make the context current in this thread until ``close``."""
        if self._context is None:
            self.retain()
        self._before = self._call("cuCtxGetCurrent")
        self.activate()

    def activate(self) -> None:
        """Make the context current in this thread."""
        self._call("cuCtxSetCurrent", self._context)

    def close(self) -> None:
        """Give back all that is still held, the context last. Never raises: the context may be broken by then."""
        if self._context is None:
            return
        self._cu.cuCtxSetCurrent(self._context)
        self._cu.cuCtxSynchronize()
        for (destroy, _), handle in reversed(list(self._live.items())):
            getattr(self._cu, destroy)(handle)
        self._live.clear()
        self._cu.cuCtxSetCurrent(self._before)
        self._cu.cuDevicePrimaryCtxRelease(self._device)
        self._context = None

    def memory(self) -> tuple[int, int]:
        """Bytes of device memory: (free, total)."""
        free, total = self._call("cuMemGetInfo")
        return int(free), int(total)

    # -- what is made is kept until destroyed or closed

    def _keep(self, destroy: str, handle: Any) -> Any:
        self._live[destroy, int(handle)] = handle
        return handle

    def _destroy(self, destroy: str, handle: Any) -> None:
        self._call(destroy, self._live.pop((destroy, int(handle))))

    def alloc(self, nbytes: int, what: str) -> int:
        """Device memory, aligned to 256 bytes."""
        return int(self._keep("cuMemFree", self._call("cuMemAlloc", nbytes, where=f"{what} of {nbytes} bytes")))

    def host_alloc(self, nbytes: int) -> int:
        """Address of pinned host memory."""
        return int(self._keep("cuMemFreeHost", self._call("cuMemHostAlloc", nbytes, 0, where=f"{nbytes} bytes")))

    def host_free(self, address: int) -> None:
        """Give pinned memory back."""
        self._destroy("cuMemFreeHost", address)

    def stream(self) -> Any:
        """A new stream."""
        return self._keep("cuStreamDestroy", self._call("cuStreamCreate", NON_BLOCKING))

    def stream_free(self, stream: Any) -> None:
        """Give a stream back."""
        self._destroy("cuStreamDestroy", stream)

    def event(self) -> Any:
        """A new event, in the state of one that has happened."""
        return self._keep("cuEventDestroy", self._call("cuEventCreate", NO_TIMING))

    def event_free(self, event: Any) -> None:
        """Give an event back."""
        self._destroy("cuEventDestroy", event)

    def module(self, image: bytes, name: str) -> Any:
        """Load a cubin."""
        return self._keep("cuModuleUnload", self._call("cuModuleLoadData", image, where=f"kernel {name}"))

    def function(self, module: Any, symbol: str, dynamic_shared: int, name: str) -> Any:
        """A kernel of a module, loaded now and allowed the dynamic shared memory it takes.

        All kernels ask for the largest shared memory: kernels that want another division of the L1 cannot share a
        multiprocessor, and the next one is to fetch its weights while this one runs.
        """
        function = self._call("cuModuleGetFunction", module, symbol.encode(), where=f"kernel {name}")
        attributes = self._cu.CUfunction_attribute
        settings = [(attributes.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100)]
        if dynamic_shared:
            settings.append((attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, dynamic_shared))
        for attribute, value in settings:
            self._call("cuFuncSetAttribute", function, attribute, value, where=f"kernel {name}")
        if hasattr(self._cu, "cuFuncLoad"):
            self._call("cuFuncLoad", function, where=f"kernel {name}")
        return function

    # -- work on a stream

    def upload(self, address: int, source: int, nbytes: int, stream: Any) -> None:
        """Copy pinned host memory to the device."""
        self._call("cuMemcpyHtoDAsync", address, source, nbytes, stream)

    def download(self, target: int, address: int, nbytes: int, stream: Any) -> None:
        """Copy device memory to pinned host memory."""
        self._call("cuMemcpyDtoHAsync", target, address, nbytes, stream)

    def fill(self, address: int, value: int, nbytes: int, stream: Any) -> None:
        """Set bytes."""
        self._call("cuMemsetD8Async", address, value, nbytes, stream)

    def fill_rows(self, address: int, pitch: int, value: int, width: int, rows: int, stream: Any) -> None:
        """Set ``width`` bytes of each of ``rows`` rows, ``pitch`` bytes apart."""
        self._call("cuMemsetD2D8Async", address, pitch, value, width, rows, stream)

    def record(self, event: Any, stream: Any) -> None:
        """The event happens when all work given to the stream before is done."""
        self._call("cuEventRecord", event, stream)

    def wait(self, event: Any, where: object = None) -> None:
        """Wait on the host for an event."""
        self._call("cuEventSynchronize", event, where=where)

    def synchronize(self, stream: Any, where: object = None) -> None:
        """Wait on the host for all work of a stream."""
        self._call("cuStreamSynchronize", stream, where=where)

    # -- launches and graphs

    def bind(
        self,
        function: Any,
        grid: Sequence[int],
        threads: int,
        shared: int,
        pdl: bool,
        values: Sequence[tuple[str, int | float]],
        stream: Any,
        where: Where,
    ) -> Bound:
        """Pack a launch: ``values`` are (type, value) in ABI order, types ptr, i32 and f32."""
        cu = self._cu
        slots = (C.c_uint64 * max(len(values), 1))()
        for index, (kind, value) in enumerate(values):
            struct.pack_into(_PACK[kind], slots, 8 * index, value)
        start = C.addressof(slots)
        pointers = (C.c_void_p * len(slots))(*(start + 8 * index for index in range(len(slots))))
        config = cu.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes, config.hStream = shared, stream
        if pdl:
            attribute, value = cu.CUlaunchAttribute(), cu.CUlaunchAttributeValue()
            attribute.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            value.programmaticStreamSerializationAllowed = 1
            attribute.value = value
            config.attrs = [attribute]
            config.numAttrs = 1
        return Bound(where, function, config, slots, pointers)

    def launch(self, bound: Bound) -> None:
        """Put one launch on its stream."""
        result = self._cu.cuLaunchKernelEx(bound.config, bound.function, C.addressof(bound.pointers), 0)
        self._check("cuLaunchKernelEx", result, bound.where)

    def capture(self, bounds: Sequence[Bound], stream: Any, name: str) -> Any:
        """A graph of these launches, ready to be replayed."""
        mode = self._cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self._call("cuStreamBeginCapture", stream, mode, where=name)
        try:
            for bound in bounds:
                self.launch(bound)
        except TapeoutError:
            self._abandon(stream)
            raise
        graph = self._call("cuStreamEndCapture", stream, where=name)
        try:
            replay = self._keep("cuGraphExecDestroy", self._call("cuGraphInstantiate", graph, 0, where=name))
            self._call("cuGraphUpload", replay, stream, where=name)
            return replay
        finally:
            self._cu.cuGraphDestroy(graph)

    def _abandon(self, stream: Any) -> None:
        """End a capture that failed; the failure's own error is the one to tell."""
        code, graph = self._cu.cuStreamEndCapture(stream)
        if code == 0:
            self._cu.cuGraphDestroy(graph)

    def replay(self, graph: Any, stream: Any, name: str) -> None:
        """Put a graph on a stream."""
        self._call("cuGraphLaunch", graph, stream, where=name)
