"""A loaded artifact: its tokenizer, its logits, and generation token by token."""

from __future__ import annotations

import ctypes
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tapeout.runtime.cpu import CpuBackend, LaunchList, Sampling, StepStruct
from tapeout.runtime.errors import TapeoutError
from tapeout.runtime.generation import Generation, Step
from tapeout.runtime.host import host_targets, thread_count
from tapeout.runtime.manifest import open_manifest
from tapeout.runtime.sequence import KvSequence, PagePool, StepInput, largest
from tapeout.runtime.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

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


def load(path: str | os.PathLike[str], *, threads: int | None = None, target: str | None = None) -> Model:
    """Open an artifact: check its files, map its weights, load its kernels. Raises TapeoutError in one sentence.

    ``threads`` defaults to the CPUs this process may use; ``target`` picks one of the artifact's kernel targets
    instead of the best that this CPU runs.
    """
    started = time.perf_counter()
    folder = Path(path)
    targets = host_targets()
    if target is not None:
        if target not in targets:
            raise TapeoutError(
                f"this CPU does not run target {target}; it runs {', '.join(targets) or 'none that is known'}"
            )
        targets = [target]
    count = thread_count(threads)
    manifest = open_manifest(folder, host_targets=targets)
    chosen = next((name for name in targets if name in manifest.architectures), None)
    if chosen is None:
        raise TapeoutError(f"{folder}: the artifact holds code for no architecture; compile it again")
    weights = [name for name in manifest.files if name.startswith("weights/")]
    manifest.verify(name for name in manifest.files if name not in weights)
    verification = manifest.start(weights)
    try:
        plan = json.loads((folder / "plan.json").read_bytes())
        tokenizer = load_tokenizer(folder)
        backend = CpuBackend(folder, plan, manifest.file(f"kernels/cpu-{chosen}.so"), count)
    finally:
        verification.wait()
    model = Model(folder, plan, backend, tokenizer)
    try:
        verification.finish()
    except TapeoutError:
        model.close()
        raise
    model.target, model.threads = chosen, count
    model.load_s = time.perf_counter() - started
    return model


class Model:
    """A loaded artifact. Use it as a context manager; generations of one model must not overlap in threads."""

    target: str
    threads: int
    load_s: float = 0.0

    def __init__(self, folder: Path, plan: dict[str, Any], backend: CpuBackend, tokenizer: Tokenizer) -> None:
        self.folder, self.plan, self.tokenizer = folder, plan, tokenizer
        self.backend = backend
        memory = plan["memory"]
        self.max_context: int = plan["model"]["max_context"]
        self.vocab_size: int = plan["model"]["vocab_size"]
        self.max_sequences: int = memory["max_sequences"]
        self.chunk = largest(backend.lists, "prefill")
        self.pool = PagePool(memory["kv"]["pages"], memory["kv"]["page_tokens"], self.max_context)
        self.step = StepInput(max(self.chunk, self.max_sequences), self.max_sequences)
        self.sampling = (Sampling * max(largest(backend.lists, "head"), 1))()
        self.eos_ids = frozenset(plan["generation"]["eos_token_ids"])

    def __enter__(self) -> Model:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Release threads and memory; the model is unusable afterwards."""
        self.backend.close()

    def bucket(self, phase: str, rows: int) -> LaunchList:
        """The smallest launch list of a phase that holds ``rows`` rows. Raises TapeoutError when none does."""
        fitting = [entry for entry in self.backend.lists if entry.phase == phase and entry.rows >= rows]
        if not fitting:
            most = largest(self.backend.lists, phase)
            raise TapeoutError(
                f"{rows} rows in one {phase} step are more than the {most} that the artifact was planned for"
            )
        return min(fitting, key=lambda entry: entry.rows)

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
        """Run a prompt in chunks and sample the token behind it, as ``self.sampling[0]`` says."""
        head = self.bucket("head", 1)
        for start in range(0, len(ids), self.chunk):
            piece = ids[start : start + self.chunk]
            last = start + len(piece) == len(ids)
            self.run_chunk(sequence, piece, [len(piece) - 1] if last else [], head if last else None)
        return int(self.sampling[0].token)

    def run_chunk(
        self, sequence: KvSequence, ids: Sequence[int], out_rows: Sequence[int], head: LaunchList | None
    ) -> None:
        """Append tokens to a sequence in one step."""
        self.pool.grow(sequence, sequence.length + len(ids))
        step = self.step.one_sequence(sequence, ids, out_rows)
        self.backend.run(self.bucket("prefill", len(ids)), head, step, self.sampling if head else None)
        sequence.length += len(ids)

    def decode(self, sequences: Sequence[KvSequence], tokens: Sequence[int]) -> list[int]:
        """Append one token to each sequence and sample the next of each."""
        for sequence in sequences:
            self.pool.grow(sequence, sequence.length + 1)
        step = self.step.one_token_each(sequences, tokens)
        rows = len(tokens)
        self.backend.run(self.bucket("decode", rows), self.bucket("head", rows), step, self.sampling)
        for sequence in sequences:
            sequence.length += 1
        return [int(self.sampling[row].token) for row in range(rows)]

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
                self.run_chunk(sequence, piece, [], None)
                self._head_rows(len(piece), result[start : start + len(piece)])
        finally:
            self.pool.close(sequence)
        return result

    def _head_rows(self, rows: int, out: npt.NDArray[np.float32]) -> None:
        """Run the head over all rows of the step that just ran, as many at a time as its largest list holds."""
        for start, count, head in self._head_chunks(rows):
            self.backend.run(None, head, self.step.struct, None)
            ctypes.memmove(out[start:].ctypes.data, self.backend.logits_address(head), count * self.vocab_size * 4)

    def _head_chunks(self, rows: int) -> Iterator[tuple[int, int, LaunchList]]:
        """Cut rows into what the largest head list holds; the step wants the rows of each chunk as it is handed out."""
        most = largest(self.backend.lists, "head")
        for start in range(0, rows, most):
            count = min(most, rows - start)
            self.step.out_row[:count] = range(start, start + count)
            self.step.struct.out_rows = count
            yield start, count, self.bucket("head", count)

    def trace(self, ids: Sequence[int]) -> Iterator[Traced]:
        """Run ``ids`` launch by launch, outputs poisoned before each, and yield what every launch wrote."""
        ids = [int(token) for token in ids]
        self.check_prompt(ids)
        sequence = self.pool.open()
        try:
            for start in range(0, len(ids), self.chunk):
                piece = ids[start : start + self.chunk]
                self.pool.grow(sequence, sequence.length + len(piece))
                step = self.step.one_sequence(sequence, piece, [])
                yield from self._trace_step(step, len(piece))
                sequence.length += len(piece)
        finally:
            self.pool.close(sequence)

    def _trace_step(self, step: StepStruct, rows: int) -> Iterator[Traced]:
        from tapeout.runtime.trace import trace_launches

        yield from trace_launches(self.backend, self.bucket("prefill", rows), step, rows)
        for _, count, head in self._head_chunks(rows):
            head_step = StepStruct.from_buffer_copy(step)
            head_step.rows = count
            yield from trace_launches(self.backend, head, head_step, count)
