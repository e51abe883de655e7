"""One artifact on one GPU: three allocations, its kernels, its graphs, and the steps that run on them."""

from __future__ import annotations

import ctypes as C
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tapeout.runtime.backend import DeviceMemory, Rectangle, largest, output_part, smallest_fitting
from tapeout.runtime.cuda.driver import Driver
from tapeout.runtime.cuda.launches import Addresses, CudaList, Launcher, Region, load_kernels
from tapeout.runtime.cuda.results import Results
from tapeout.runtime.cuda.step import StepState
from tapeout.runtime.cuda.upload import Upload
from tapeout.runtime.errors import TapeoutError
from tapeout.runtime.manifest import Manifest
from tapeout.runtime.sequence import KvSequence

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

WEIGHTS = "weights/rank0.safetensors"
PARTS = (("weights", "weights"), ("KV pool", "kv_pool"), ("arena", "arena"))
RESERVE = 64 << 20  # bytes that code and graphs may take beside what is planned


class CudaBackend:
    """See Backend. The driver must be open; it is closed with the backend."""

    def __init__(
        self, driver: Driver, manifest: Manifest, plan: Mapping[str, Any], architecture: str, threads: int, graphs: bool
    ) -> None:
        self.driver, self._thread = driver, threading.get_ident()
        memory = plan["memory"]
        self.vocab: int = plan["model"]["vocab_size"]
        self._free_before = driver.memory()[0]
        self._planned = sum(memory[name] for name in ("weights", "kv_pool", "arena"))
        check_room(driver, memory)
        self._chain: list[tuple[KvSequence, int]] = []
        self._chain_ticket = 0

        regions = {
            name: Region(driver.alloc(max(memory[key], 1), name), memory[key])
            for name, key in (("weights", "weights"), ("kv", "kv_pool"), ("arena", "arena"))
        }
        self.arena, self.kv = regions["arena"], regions["kv"]
        self._upload = _start_upload(driver, manifest, regions.pop("weights"), threads)
        try:
            self._stream = driver.stream()
            driver.fill(self.arena.address, 0, self.arena.nbytes, self._stream)
            step = memory["step"]
            self._step = StepState(driver, self._stream, step, self.arena.address + step.get("offset", 0))
            self._results = Results(driver, self._stream, self._step.address("sampled"), step["out_rows"])
            self._kernels = load_kernels(driver, plan["kernels"]["table"], architecture, _reader(manifest))
            weights = {weight["name"]: self._upload.address + weight["offset"] for weight in plan["weights"]}
            self._addresses = Addresses(regions, weights, self._step.address)
            self._launcher = Launcher(driver, self._stream, self._kernels, self._addresses, graphs=graphs)
            self.lists = [CudaList(entry) for entry in plan["graphs"]]
            self._prepare_first()
        except BaseException:
            self._upload.stop()
            raise

    def _prepare_first(self) -> None:
        """Capture what the first tokens need; other sizes are captured when they are first used."""
        for phase in ("prefill", "head", "sample", "decode"):
            if largest(self.lists, phase):
                self._launcher.prepare(smallest_fitting(self.lists, phase, 1))

    def finish(self) -> None:
        """Wait for the weights. Raises TapeoutError for a damaged file."""
        self._upload.finish()
        self.driver.synchronize(self._stream)

    @property
    def upload_s(self) -> float:
        """Seconds from the first byte read to the last weight on the device."""
        return self._upload.seconds

    # -- steps

    def prefill(self, sequence: KvSequence, tokens: Sequence[int], sample: bool) -> int:
        """See Backend."""
        self._enter()
        body = self._fitting("prefill", len(tokens))
        tail = [self._fitting(phase, 1) for phase in ("head", "sample")] if sample else []
        self._step.chunk(sequence, tokens, [len(tokens) - 1] if sample else [], sample)
        self._chain = []
        for launches in (body, *tail):
            self._launcher.run(launches)
        return self._results.fetch(1, f"a step of {body.name}") if tail else 0

    def decode(self, sequences: Sequence[KvSequence], tokens: Sequence[int] | None) -> int:
        """See Backend."""
        assert tokens is not None or self.continues(sequences), "the device does not hold the tokens of these sequences"
        self._enter()
        launches = self._fitting("decode", len(sequences))
        self._step.rows(sequences, tokens)
        self._launcher.run(launches)
        self._step.advanced(sequences)
        self._chain = [(sequence, sequence.length + 1) for sequence in sequences]
        self._chain_ticket = self._results.fetch(len(sequences), f"a step of {launches.name}")
        return self._chain_ticket

    def sampled(self, ticket: int) -> list[int]:
        """See Backend."""
        self._enter()
        tokens = self._results.take(ticket)
        if ticket == self._chain_ticket and self._chain:
            self._step.learned(tokens)
        return tokens

    def drop(self, ticket: int) -> None:
        """See Backend."""
        self._results.drop(ticket)

    def continues(self, sequences: Sequence[KvSequence]) -> bool:
        """See Backend."""
        return len(self._chain) == len(sequences) and all(
            held is sequence and length == sequence.length
            for (held, length), sequence in zip(self._chain, sequences, strict=True)
        )

    def _fitting(self, phase: str, rows: int) -> CudaList:
        return smallest_fitting(self.lists, phase, rows)

    def _enter(self) -> None:
        """Make the context current where the caller is another thread than the last."""
        if threading.get_ident() != self._thread:
            self.driver.activate()
            self._thread = threading.get_ident()

    # -- reading and tracing

    def logits(self, first: int, out: npt.NDArray[np.float32]) -> None:
        """See Backend."""
        self.stage_head(first, len(out))
        head = self._fitting("head", len(out))
        self._launcher.run(head)
        last = head.plan[-1]
        output = last.get("output", {"arg": "y", "stride": self.vocab})
        part = Rectangle(len(out), 4 * self.vocab, 4 * output["stride"])
        rows = self.read(last["args"][output["arg"]], part)
        for row in range(len(out)):
            out[row] = rows[row * part.pitch : row * part.pitch + part.width].view("<f4")

    def stage(self, sequence: KvSequence, tokens: Sequence[int], phase: str = "prefill") -> None:
        """See Backend."""
        self._enter()
        self._chain = []
        if phase == "decode":
            self._step.rows([sequence], tokens)
            self._step.forget()
        else:
            self._step.chunk(sequence, tokens, [], sample=False)

    def stage_head(self, first: int, count: int) -> None:
        """See Backend."""
        self._enter()
        self._step.want(range(first, first + count))

    def run_one(self, launches: Any, index: int) -> None:
        """See Backend."""
        self._enter()
        self._launcher.run_one(launches, index)

    def poison(self, arg: Any, part: Rectangle) -> None:
        """See Backend."""
        self._enter()
        self.driver.fill_rows(self._addresses(arg), part.pitch, 0xFF, part.width, part.rows, self._stream)

    def poison_outputs(self) -> None:
        """Poison what every launch of every list writes anew, so that a replay that leaves something out shows."""
        for launches in self.lists:
            for launch in launches.plan:
                output = launch.get("output")
                if output is not None and not output["in_place"]:
                    self.poison(launch["args"][output["arg"]], output_part(launch, launches.rows))

    def read(self, arg: Any, part: Rectangle) -> npt.NDArray[np.uint8]:
        """See Backend."""
        import numpy as np

        self._enter()
        pinned = self.driver.host_alloc(part.span)
        try:
            self.driver.download(pinned, self._addresses(arg), part.span, self._stream)
            self.driver.synchronize(self._stream)
            return np.frombuffer(C.string_at(pinned, part.span), np.uint8)
        finally:
            self.driver.host_free(pinned)

    def device_memory(self) -> DeviceMemory:
        """See Backend."""
        self._enter()
        free, total = self.driver.memory()
        return DeviceMemory(self._planned, self._free_before - free, total - self._free_before, total)

    def close(self, error: BaseException | None = None) -> None:
        """See Backend."""
        self._upload.stop()
        self.driver.close()


def check_room(driver: Driver, memory: Mapping[str, Any]) -> None:
    """Refuse an artifact that does not fit what is free. Raises TapeoutError."""
    needed = sum(memory[name] for name in ("weights", "kv_pool", "arena"))
    free, total = driver.memory()
    if needed + RESERVE > free:
        gib = float(2**30)
        parts = ", ".join(f"{name} {memory[key] / gib:.2f}" for name, key in PARTS)
        raise TapeoutError(
            f"the artifact needs {(needed + RESERVE) / gib:.2f} GiB of GPU memory ({parts}), but GPU {driver.ordinal} "
            f"({driver.name}) has {free / gib:.2f} GiB free of {total / gib:.2f}; free some, or compile with a smaller "
            "serving.max_context or serving.max_sequences"
        )


def _reader(manifest: Manifest) -> Callable[[str], bytes]:
    return lambda path: manifest.file(path).read_bytes()


def _start_upload(driver: Driver, manifest: Manifest, region: Region, threads: int) -> Upload:
    """Send the data section of the weights file to its region."""
    path = manifest.file(WEIGHTS)
    with open(path, "rb") as file:
        skip = 8 + int.from_bytes(file.read(8), "little")
    listed = manifest.files[WEIGHTS]
    if listed.bytes - skip != region.nbytes:
        raise TapeoutError(
            f"{path}: holds {listed.bytes - skip} bytes of weights, and plan.json has {region.nbytes}; "
            "copy the artifact again or compile it again"
        )
    return Upload(driver, Path(manifest.folder), listed, skip, region.address, threads)
