"""A loaded artifact: its tokenizer, its logits, and generation token by token."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tapeout.runtime.backend import Backend, DeviceMemory, LaunchList, Opened, largest, smallest_fitting
from tapeout.runtime.errors import TapeoutError
from tapeout.runtime.generation import Generation, Step
from tapeout.runtime.host import RANK_VARIABLES, host_targets, thread_count
from tapeout.runtime.manifest import MANIFEST, is_gpu, open_manifest, parse_manifest
from tapeout.runtime.sequence import KvSequence, PagePool
from tapeout.runtime.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from tapeout.runtime.ranks import Member, Place

__all__ = ["Model", "Step", "load"]


@dataclass(frozen=True)
class Traced:
    """What one launch of a traced run wrote: float32 [rows, columns], and which logical ops its columns are."""

    graph: str
    index: int
    kernel: str
    op: str
    produces: tuple[tuple[str, int, int], ...]
    values: npt.NDArray[np.float32]


def load(
    path: str | os.PathLike[str],
    *,
    threads: int | None = None,
    target: str | None = None,
    device: int = 0,
    graphs: bool = True,
) -> Model:
    """Open an artifact: check its files, map or upload its weights, load its kernels. Raises TapeoutError.

    ``threads`` defaults to the CPUs this process may use; on a GPU they only load. ``target`` picks one of the
    artifact's kernel targets instead of the best that this machine runs. ``device`` is the GPU's number among those
    that the process sees. Without ``graphs`` a GPU runs launch by launch, waiting for each, so that errors name one.
    """
    started = time.perf_counter()
    folder = Path(path)
    architectures = parse_manifest(folder).architectures
    if is_gpu(architectures):
        from tapeout.runtime.cuda import open_cuda

        opened = open_cuda(folder, architectures, target, device=device, threads=thread_count(threads), graphs=graphs)
    else:
        opened = _open_cpu(folder, target, threads)
    try:
        model = Model(folder, opened.plan, opened.backend, opened.tokenizer)
        opened.finish()
    except BaseException as error:
        opened.backend.close(error)
        raise
    model.target, model.device, model.threads = opened.target, opened.device, opened.threads
    model.load_s = time.perf_counter() - started
    return model


def _open_cpu(folder: Path, target: str | None, threads: int | None) -> Opened:
    from tapeout.runtime.cpu import CpuBackend

    targets = host_targets()
    if target is not None:
        if target not in targets:
            raise TapeoutError(
                f"this CPU does not run target {target}; it runs {', '.join(targets) or 'none that is known'}"
            )
        targets = [target]
    manifest = open_manifest(folder, host_targets=targets)
    chosen = next((name for name in targets if name in manifest.architectures), None)
    if chosen is None:
        raise TapeoutError(f"{folder}: the artifact holds code for no architecture; compile it again")
    place = rank_place()
    weights = [name for name in manifest.files if name.startswith("weights/")]
    own = f"weights/rank{place.rank if place else 0}.safetensors"
    manifest.verify(name for name in manifest.files if name not in weights)
    verification = manifest.start(name for name in weights if name == own)
    member = None
    try:
        plan = json.loads((folder / "plan.json").read_bytes())
        tokenizer = load_tokenizer(folder)
        member = _join(folder, plan, place)
        count = thread_count(threads, member.count if member else 1)
        backend = CpuBackend(folder, plan, manifest.file(f"kernels/cpu-{chosen}.so"), count, member)
    except BaseException as error:
        if member:  # the first rank speaks for itself
            member.leave(error if member.rank else None)
        raise
    finally:
        verification.wait()

    def finish() -> None:
        verification.finish()
        if member:
            member.ready()

    return Opened(plan, tokenizer, backend, chosen, "CPU", count, finish)


def rank_place() -> Place | None:
    """Which rank this process is, if a launcher started several. Raises TapeoutError for contradictions."""
    if not any(name in os.environ for name in RANK_VARIABLES):
        return None
    from tapeout.runtime.ranks import read_place

    return read_place()


def _join(folder: Path, plan: Mapping[str, Any], place: Place | None) -> Member | None:
    """This process as one of the ranks that the plan is for; None where it is for one. Raises TapeoutError."""
    comm = plan["memory"].get("comm", {"ranks": 1, "buffer_bytes": 0})
    if place is None:
        if comm["ranks"] > 1:
            raise TapeoutError(
                f"{folder}: the artifact was planned for {comm['ranks']} ranks, and this process is none of them; "
                "`tapeout run` and `tapeout bench` start them, and so do torchrun, mpirun and srun"
            )
        return None
    from tapeout.runtime.ranks import join

    digest = hashlib.sha256((folder / MANIFEST).read_bytes()).digest()
    return join(place, digest, comm["ranks"], comm["buffer_bytes"])


class Model:
    """A loaded artifact. Use it as a context manager; generations of one model must not overlap in threads."""

    target: str
    device: str
    threads: int
    load_s: float = 0.0

    def __init__(self, folder: Path, plan: dict[str, Any], backend: Backend, tokenizer: Tokenizer) -> None:
        self.folder, self.plan, self.tokenizer = folder, plan, tokenizer
        self.backend = backend
        memory = plan["memory"]
        self.max_context: int = plan["model"]["max_context"]
        self.vocab_size: int = plan["model"]["vocab_size"]
        self.max_sequences: int = memory["max_sequences"]
        self.chunk = largest(backend.lists, "prefill")
        kv = memory["kv"]
        stateful = any(cache["sequence_bytes"] for cache in kv.get("caches", ()))
        slots = self.max_sequences if stateful else 0
        self.pool = PagePool(kv["pages"], kv["page_tokens"], self.max_context, slots)
        self.eos_ids = frozenset(plan["generation"]["eos_token_ids"])

    def __enter__(self) -> Model:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.backend.close(None if isinstance(error, TapeoutError) else error)  # every rank meets a bad prompt

    def close(self) -> None:
        """Release threads and memory; the model is unusable afterwards."""
        self.backend.close()

    def bucket(self, phase: str, rows: int) -> LaunchList:
        """The smallest launch list of a phase that holds ``rows`` rows. Raises TapeoutError when none does."""
        return smallest_fitting(self.backend.lists, phase, rows)

    def device_memory(self) -> DeviceMemory | None:
        """Device memory held, in bytes; None for an artifact that runs on the CPU."""
        return self.backend.device_memory()

    def check_prompt(self, ids: Sequence[int]) -> None:
        """Refuse prompts that cannot be run. Raises TapeoutError."""
        if len(ids) == 0:
            raise TapeoutError("the prompt has no tokens; it needs at least one")
        if len(ids) > self.max_context:
            raise TapeoutError(
                f"the prompt has {len(ids)} tokens, but the artifact was planned for a context of {self.max_context}; "
                "shorten it, or compile with a larger serving.max_context"
            )
        bad = next((token for token in ids if not 0 <= token < self.vocab_size), None)
        if bad is not None:
            raise TapeoutError(f"token id {bad} is outside the vocabulary of {self.vocab_size}")

    def prefill(self, sequence: KvSequence, ids: Sequence[int]) -> int:
        """Run a prompt in chunks and choose the token behind it, as ``sequence.sampling`` says."""
        ticket = 0
        for start in range(0, len(ids), self.chunk):
            piece = ids[start : start + self.chunk]
            ticket = self._append(sequence, piece, sample=start + len(piece) == len(ids))
        return self.backend.sampled(ticket)[0]

    def _append(self, sequence: KvSequence, ids: Sequence[int], *, sample: bool = False) -> int:
        """Append tokens to a sequence in one step."""
        self.pool.grow(sequence, sequence.length + len(ids))
        ticket = self.backend.prefill(sequence, ids, sample)
        sequence.length += len(ids)
        return ticket

    def decode(self, sequences: Sequence[KvSequence], tokens: Sequence[int]) -> list[int]:
        """Append one token to each sequence and choose the next of each."""
        for chosen in self.stream(sequences, tokens, 1):
            return chosen
        raise AssertionError("a stream of one step ends after it")

    def stream(
        self, sequences: Sequence[KvSequence], tokens: Sequence[int], steps: int
    ) -> Generator[list[int], None, None]:
        """``steps`` decode steps, each appending to every sequence the token that the step before chose for it.

        Where the backend can, one step runs ahead of the tokens handed out, and counts in ``sequence.length`` until
        the stream ends or is closed; its result is dropped then.
        """
        running: deque[int] = deque()
        left = steps
        try:
            while left or running:
                if left and not running:
                    running.append(self._decode(sequences, tokens))
                    left -= 1
                if left and self._may_run_ahead(sequences):
                    running.append(self._decode(sequences, None))
                    left -= 1
                tokens = self.backend.sampled(running[0])
                running.popleft()
                yield tokens
        finally:
            for ticket in running:
                self.backend.drop(ticket)
            for sequence in sequences:
                sequence.length -= len(running)

    def _decode(self, sequences: Sequence[KvSequence], tokens: Sequence[int] | None) -> int:
        for sequence in sequences:
            self.pool.grow(sequence, sequence.length + 1)
        ticket = self.backend.decode(sequences, tokens)
        for sequence in sequences:
            sequence.length += 1
        return ticket

    def _may_run_ahead(self, sequences: Sequence[KvSequence]) -> bool:
        """Whether a step is possible now; if pages are short, the step that needs them says so when it is due."""
        missing = sum(sequence.length + 1 > sequence.pages * self.pool.page_tokens for sequence in sequences)
        return (
            self.backend.continues(sequences)
            and missing <= self.pool.free
            and all(sequence.length < self.max_context for sequence in sequences)
        )

    def generate(
        self,
        ids: Sequence[int],
        *,
        max_tokens: int = 128,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        stop: Sequence[str] = (),
    ) -> Generation:
        """Generate from a prompt of token ids; iterate over the steps. Greedy unless ``temperature`` is positive.

        Ends at an end-of-sequence id, a ``stop`` string, ``max_tokens``, or when the context is full; the last step's
        ``finish_reason`` says which. Raises TapeoutError for a bad prompt or option before anything runs.
        """
        options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
        return Generation(self, [int(token) for token in ids], max_tokens, options, tuple(stop))

    def logits(self, ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """Logits after every position of ``ids``: float32 [len(ids), vocab]. Takes 4 * vocab bytes a position."""
        import numpy as np

        ids = [int(token) for token in ids]
        self.check_prompt(ids)
        result = np.empty((len(ids), self.vocab_size), np.float32)
        sequence = self.pool.open()
        try:
            for start in range(0, len(ids), self.chunk):
                piece = ids[start : start + self.chunk]
                self._append(sequence, piece)
                for first, count in self._head_chunks(len(piece)):
                    self.backend.logits(first, result[start + first : start + first + count])
        finally:
            self.pool.close(sequence)
        return result

    def _head_chunks(self, rows: int) -> Iterator[tuple[int, int]]:
        """Cut rows into what the largest head list holds: (first, count)."""
        most = largest(self.backend.lists, "head")
        return ((first, min(most, rows - first)) for first in range(0, rows, most))

    def trace(self, ids: Sequence[int], phase: str = "prefill") -> Iterator[Traced]:
        """Run ``ids`` launch by launch, outputs poisoned before each, and yield what every launch wrote.

        ``phase`` is ``prefill`` (chunks, and the head for all their rows) or ``decode`` (one token a step).
        """
        from tapeout.runtime.trace import trace_launches

        ids = [int(token) for token in ids]
        self.check_prompt(ids)
        chunk = self.chunk if phase == "prefill" else 1
        sequence, backend = self.pool.open(), self.backend
        try:
            for start in range(0, len(ids), chunk):
                piece = ids[start : start + chunk]
                self.pool.grow(sequence, sequence.length + len(piece))
                backend.stage(sequence, piece, phase)
                body = self.bucket(phase, len(piece))
                yield from trace_launches(backend, body, len(piece))
                for first, count in self._head_chunks(len(piece)) if not _has_head(body) else ():
                    backend.stage_head(first, count)
                    yield from trace_launches(backend, self.bucket("head", count), count)
                sequence.length += len(piece)
        finally:
            self.pool.close(sequence)


def _has_head(body: LaunchList) -> bool:
    """Whether a list goes on to the logits and the next token by itself, as decode lists of a GPU do."""
    return body.phase == "decode" and body.plan[-1]["op"] == "sample"
