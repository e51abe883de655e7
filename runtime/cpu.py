"""The CPU backend: maps weights, allocates the arena and the KV pool once, and runs launch lists in native code."""

from __future__ import annotations

import _ctypes
import ctypes as C
import mmap
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from tapeout.runtime.backend import Rectangle, largest, smallest_fitting
from tapeout.runtime.errors import TapeoutError
from tapeout.runtime.sequence import KvSequence

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from tapeout.runtime.ranks import Member, SharedMemory

ABI = 1
_ARGS = 15
_ERRORS = {1: "the logits hold NaN or infinite values", 2: "a launch names a kernel that the library does not hold"}


class Launch(C.Structure):
    """tp_launch of tapeout_cpu.h."""

    _fields_ = (("kernel", C.c_int32), ("reserved", C.c_int32), ("arg", C.c_int64 * _ARGS))


class Segment(C.Structure):
    """tp_segment: consecutive rows of one sequence."""

    _fields_ = (
        ("row", C.c_int32),
        ("rows", C.c_int32),
        ("position", C.c_int32),
        ("slot", C.c_int32),
        ("pages", C.POINTER(C.c_int32)),
    )


class StepStruct(C.Structure):
    """tp_step: everything that varies from step to step."""

    _fields_ = (
        ("rows", C.c_int32),
        ("segments", C.c_int32),
        ("out_rows", C.c_int32),
        ("reserved", C.c_int32),
        ("tokens", C.POINTER(C.c_int32)),
        ("positions", C.POINTER(C.c_int32)),
        ("row_segment", C.POINTER(C.c_int32)),
        ("segment", C.POINTER(Segment)),
        ("out_row", C.POINTER(C.c_int32)),
    )


class Sampling(C.Structure):
    """tp_sampling: how to choose a token, and the token chosen."""

    _fields_ = (
        ("temperature", C.c_float),
        ("top_p", C.c_float),
        ("top_k", C.c_int32),
        ("want_logprob", C.c_int32),
        ("seed", C.c_uint64),
        ("position", C.c_uint64),
        ("token", C.c_int32),
        ("logprob", C.c_float),
    )


class Mapped:
    """A piece of memory with a fixed address for the life of the process."""

    def __init__(self, memory: mmap.mmap, *, writable: bool) -> None:
        self.memory, self.nbytes, self._writable = memory, len(memory), writable
        kind = C.c_char * self.nbytes
        if writable:
            self._view: Any = kind.from_buffer(memory)
            self.address = C.addressof(self._view)
        else:
            self._view = memoryview(memory)
            self.address = _address_of(self._view)

    def close(self) -> None:
        """Unmap; addresses become invalid."""
        if not self._writable:
            self._view.release()
        self._view = None
        self.memory.close()


def _address_of(view: memoryview) -> int:
    """Address of a read-only buffer, which ctypes' from_buffer refuses."""

    class Buffer(C.Structure):
        _fields_ = (
            ("buf", C.c_void_p), ("obj", C.py_object), ("len", C.c_ssize_t), ("itemsize", C.c_ssize_t),
            ("readonly", C.c_int),
            ("ndim", C.c_int), ("format", C.c_char_p), ("shape", C.c_void_p), ("strides", C.c_void_p),
            ("suboffsets", C.c_void_p), ("internal", C.c_void_p),
        )  # fmt: skip

    buffer = Buffer()
    C.pythonapi.PyObject_GetBuffer(C.py_object(view), C.byref(buffer), 0)
    address = int(buffer.buf or 0)
    C.pythonapi.PyBuffer_Release(C.byref(buffer))
    return address


@dataclass
class StepInput:
    """The native step and the arrays it points to, allocated once for the most rows and sequences of the plan."""

    rows: int
    sequences: int
    tokens: C.Array[C.c_int32] = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = (C.c_int32 * self.rows)()
        self.positions = (C.c_int32 * self.rows)()
        self.row_segment = (C.c_int32 * self.rows)()
        self.segment = (Segment * self.sequences)()
        self.out_row = (C.c_int32 * self.rows)()
        self.struct = StepStruct(
            tokens=self.tokens,
            positions=self.positions,
            row_segment=self.row_segment,
            segment=self.segment,
            out_row=self.out_row,
        )

    def one_sequence(self, sequence: KvSequence, tokens: Sequence[int], out_rows: Sequence[int]) -> StepStruct:
        """Consecutive tokens of one sequence, which already holds ``sequence.length`` tokens."""
        count, start = len(tokens), sequence.length
        self.tokens[:count] = tokens
        self.positions[:count] = range(start, start + count)
        self.row_segment[:count] = [0] * count
        self.segment[0] = _segment(sequence, 0, count)
        self._finish(count, 1, out_rows)
        return self.struct

    def one_token_each(self, sequences: Sequence[KvSequence], tokens: Sequence[int]) -> StepStruct:
        """The next token of several sequences; every row gets logits."""
        count = len(sequences)
        self.tokens[:count] = tokens
        self.row_segment[:count] = range(count)
        for row, sequence in enumerate(sequences):
            self.positions[row] = sequence.length
            self.segment[row] = _segment(sequence, row, 1)
        self._finish(count, count, range(count))
        return self.struct

    def want(self, out_rows: Sequence[int]) -> None:
        """Ask for the logits of these rows."""
        self.out_row[: len(out_rows)] = out_rows
        self.struct.out_rows = len(out_rows)

    def _finish(self, rows: int, segments: int, out_rows: Sequence[int]) -> None:
        self.struct.rows, self.struct.segments = rows, segments
        self.want(out_rows)


def _segment(sequence: KvSequence, row: int, rows: int) -> Segment:
    """The next ``rows`` tokens of a sequence as rows of a step from ``row`` on."""
    return Segment(row, rows, sequence.length, sequence.slot or 0, C.cast(sequence.table, C.POINTER(C.c_int32)))


class LaunchList:
    """The native form of one launch list, with its plan entry kept for tracing."""

    def __init__(self, entry: Mapping[str, Any], launches: C.Array[Launch]) -> None:
        self.name: str = entry["name"]
        self.phase: str = entry["phase"]
        self.rows: int = entry["rows"]
        self.plan: Sequence[Mapping[str, Any]] = entry["launches"]
        self.launches = launches


class CpuBackend:
    """Owns all memory and the engine of one artifact."""

    def __init__(
        self, folder: Path, plan: Mapping[str, Any], library: Path, threads: int, member: Member | None = None
    ) -> None:
        memory = plan["memory"]
        self._library = _load_library(library, plan)
        self._member, self.rank = member, member.rank if member else 0
        self._comm = self._communicator(member, threads) if member else None
        self.weights, self._weight_offset = _map_weights(folder / "weights" / f"rank{self.rank}.safetensors")
        self.arena = Mapped(mmap.mmap(-1, max(memory["arena"], 4096)), writable=True)
        self.kv = Mapped(mmap.mmap(-1, max(memory["kv_pool"], 4096)), writable=True)
        self._pieces = {"arena": self.arena, "kv": self.kv}
        self._weights = {weight["name"]: self._weight_address(weight) for weight in plan["weights"]}
        table = plan["kernels"]["table"]
        self._kernels = {kernel["name"]: (index, kernel["params"]) for index, kernel in enumerate(table)}
        self.lists = [LaunchList(entry, self._bind(entry["launches"])) for entry in plan["graphs"]]
        self.vocab: int = plan["model"]["vocab_size"]
        engine = self._library.tp_open(threads)
        if not engine:
            raise TapeoutError(f"the engine could not start {threads} threads; ask for fewer")
        self._engine: int | None = engine
        rows = max(largest(self.lists, "prefill"), memory["max_sequences"])
        self.step = StepInput(rows, memory["max_sequences"])
        self.sampling = (Sampling * max(largest(self.lists, "head"), 1))()
        self._one = StepStruct()
        self._results: dict[int, list[int]] = {}
        self._tickets = 0

    def _communicator(self, member: Member, threads: int) -> SharedMemory:
        from tapeout.runtime.ranks import SharedMemory

        return SharedMemory(member, self._run_kernel, threads)

    def prefill(self, sequence: KvSequence, tokens: Sequence[int], sample: bool) -> int:
        """See Backend."""
        step = self.step.one_sequence(sequence, tokens, [len(tokens) - 1] if sample else [])
        body = smallest_fitting(self.lists, "prefill", len(tokens))
        if not sample:
            self.run(body, None, step, None)
            return self._ticket(0)
        self._choose([sequence], len(tokens))
        self.run(body, smallest_fitting(self.lists, "head", 1), step, self.sampling)
        return self._ticket(1)

    def decode(self, sequences: Sequence[KvSequence], tokens: Sequence[int] | None) -> int:
        """See Backend."""
        assert tokens is not None, "the CPU runs no step ahead of its tokens"
        body, head = (smallest_fitting(self.lists, phase, len(tokens)) for phase in ("decode", "head"))
        step = self.step.one_token_each(sequences, tokens)
        self._choose(sequences, 1)
        self.run(body, head, step, self.sampling)
        return self._ticket(len(tokens))

    def _choose(self, sequences: Iterable[KvSequence], rows: int) -> None:
        for native, sequence in zip(self.sampling, sequences, strict=False):
            options = sequence.sampling
            native.temperature, native.top_p, native.top_k = options.temperature, options.top_p, options.top_k
            native.seed, native.position = options.seed, sequence.length + rows

    def _ticket(self, rows: int) -> int:
        self._tickets += 1
        self._results[self._tickets] = [int(self.sampling[row].token) for row in range(rows)]
        return self._tickets

    def sampled(self, ticket: int) -> list[int]:
        """See Backend."""
        return self._results.pop(ticket)

    def drop(self, ticket: int) -> None:
        """See Backend."""
        self._results.pop(ticket, None)

    def continues(self, sequences: Sequence[KvSequence]) -> bool:
        """See Backend: a step is done when its call returns, so there is nothing to run ahead of."""
        return False

    def stage(self, sequence: KvSequence, tokens: Sequence[int], phase: str = "prefill") -> None:
        """See Backend."""
        self._one = self.step.one_sequence(sequence, tokens, [])

    def stage_head(self, first: int, count: int) -> None:
        """See Backend."""
        self.step.want(range(first, first + count))
        self._one = StepStruct.from_buffer_copy(self.step.struct)
        self._one.rows = count

    def logits(self, first: int, out: npt.NDArray[np.float32]) -> None:
        """See Backend."""
        head: LaunchList = smallest_fitting(self.lists, "head", len(out))
        self.step.want(range(first, first + len(out)))
        self.run(None, head, self.step.struct, None)
        C.memmove(out.ctypes.data, self.logits_address(head), len(out) * self.vocab * 4)

    def poison(self, arg: Any, part: Rectangle) -> None:
        """See Backend."""
        address = self._resolve(arg)
        for row in range(part.rows):
            C.memset(address + row * part.pitch, 0xFF, part.width)

    def read(self, arg: Any, part: Rectangle) -> npt.NDArray[np.uint8]:
        """See Backend."""
        import numpy as np

        return np.frombuffer(C.string_at(self._resolve(arg), part.span), np.uint8)

    def device_memory(self) -> None:
        """See Backend."""
        return None

    def _bind(self, launches: Sequence[Mapping[str, Any]]) -> C.Array[Launch]:
        """Resolve symbolic arguments to addresses."""
        bound = (Launch * len(launches))()
        for native, launch in zip(bound, launches, strict=True):
            native.kernel, params = self._kernels[launch["kernel"]]
            args = launch["args"]
            for index, name in enumerate(params):
                native.arg[index] = self._resolve(args[name])
        return bound

    def _resolve(self, arg: Any) -> int:
        if isinstance(arg, list):
            base, where = cast(tuple[str, Any], arg)
            if base == "weight":
                return self._weights[where]
            if base == "comm":
                assert self._comm is not None, "an artifact for one rank has collectives"
                return self._comm.address
            if base == "rank":
                ranks, times = where
                return self.rank // ranks * times
            piece = self._pieces[base]
            if not 0 <= where < piece.nbytes:
                raise TapeoutError(
                    f"plan.json places an argument at byte {where} of the {base}, which has {piece.nbytes}"
                )
            return piece.address + where
        return struct.unpack("<q", struct.pack("<d", arg))[0] if isinstance(arg, float) else arg

    def _weight_address(self, weight: Mapping[str, Any]) -> int:
        start, stop = self._weight_offset + weight["offset"], self._weight_offset + weight["offset"] + weight["bytes"]
        if not self._weight_offset <= start <= stop <= self.weights.nbytes:
            raise TapeoutError(
                f"plan.json places {weight['name']} outside the weights file; compile the artifact again"
            )
        return self.weights.address + start

    def run(
        self, body: LaunchList | None, head: LaunchList | None, step: StepStruct, sampling: C.Array[Sampling] | None
    ) -> None:
        """One native call: body, head for the wanted rows, sampling. Raises TapeoutError when the numbers broke."""
        if self._member:
            self._member.busy()
        code = self._library.tp_run(
            self._engine,
            body.launches if body else None,
            len(body.launches) if body else 0,
            head.launches if head else None,
            len(head.launches) if head else 0,
            C.byref(step),
            C.c_void_p(self.logits_address(head)) if head else None,
            self.vocab,
            sampling,
        )
        self._check(code, "the step")

    def logits_address(self, head: LaunchList) -> int:
        """Where the head list leaves its rows of logits."""
        return self._resolve(head.plan[-1]["args"]["y"])

    def run_one(self, launches: Any, index: int) -> None:
        """See Backend."""
        code = self._library.tp_run_one(self._engine, C.byref(launches.launches[index]), C.byref(self._one))
        self._check(code, f"launch {index} of {launches.name}")

    def _check(self, code: int, what: str) -> None:
        """Raise for an engine's code, and let the other ranks know that this one has done its part."""
        if self._comm:
            self._comm.raise_for(code)
        if code:
            raise TapeoutError(f"{what} failed: {_ERRORS.get(code, f'engine error {code}')}")
        if self._member:
            self._member.idle()

    def _run_kernel(self, name: str, rows: int, args: Mapping[str, int]) -> int:
        """One launch of a kernel on its own; returns the engine's code."""
        (launch,) = self._bind([{"kernel": name, "args": args}])
        return self._library.tp_run_one(self._engine, C.byref(launch), C.byref(StepStruct(rows=rows)))

    def close(self, error: BaseException | None = None) -> None:
        """See Backend. What is wrong with an artifact the first rank says itself."""
        if self._engine:
            self._library.tp_close(self._engine)
            self._engine = None
            for piece in (self.weights, self.arena, self.kv):
                piece.close()
            # the linker knows libraries by their path, and another artifact may lie there by the next load
            _ctypes.dlclose(self._library._handle)  # pyright: ignore[reportPrivateUsage]
            if self._member:
                self._member.leave(error if self.rank or not isinstance(error, TapeoutError) else None)


def _load_library(path: Path, plan: Mapping[str, Any]) -> C.CDLL:
    library = C.CDLL(str(path))
    pointer, integer = C.c_void_p, C.c_int
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "tp_abi": (integer, []),
        "tp_kernel_name": (C.c_char_p, [integer]),
        "tp_open": (pointer, [integer]),
        "tp_close": (None, [pointer]),
        "tp_run": (integer, [pointer, pointer, integer, pointer, integer, pointer, pointer, integer, pointer]),
        "tp_run_one": (integer, [pointer, pointer, pointer]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    if library.tp_abi() != ABI:
        raise TapeoutError(
            f"{path.name} speaks kernel ABI {library.tp_abi()}, this runtime speaks {ABI}; compile the artifact again"
        )
    planned = [kernel["name"] for kernel in plan["kernels"]["table"]]
    held = [library.tp_kernel_name(index) for index in range(len(planned))]
    if planned != [name.decode() if name else None for name in held]:
        raise TapeoutError(f"{path.name} does not hold the kernels that plan.json names; compile the artifact again")
    return library


def _map_weights(path: Path) -> tuple[Mapped, int]:
    """Map a safetensors file read-only; returns the mapping and where its data section starts."""
    with open(path, "rb") as file:
        mapped = Mapped(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), writable=False)
    (header,) = struct.unpack_from("<Q", mapped.memory, 0)
    if 8 + header > mapped.nbytes:
        raise TapeoutError(f"{path}: the header claims {header} bytes, but the file has {mapped.nbytes}")
    return mapped, 8 + header
