"""Writes the weights files of an artifact, one a rank, in one pass over the source: bounded memory, on all cores."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tapeout.compiler.cache import CachedWeight, WeightCache, code_digest, weight_key
from tapeout.compiler.checkpoints.base import Checkpoint
from tapeout.compiler.emit.digests import CHUNK_BYTES, digest_range
from tapeout.compiler.emit.evaluate import ConversionError, Sums, combine_errors
from tapeout.compiler.emit.executors import Executor, Threads
from tapeout.compiler.emit.jobs import Job, JobResult, Journal, cut_jobs
from tapeout.compiler.emit.native import Native
from tapeout.compiler.emit.pieces import Emission, WeightEntry
from tapeout.compiler.emit.workers import default_jobs, run_tasks
from tapeout.compiler.layouts import PAGE

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class EmissionReport:
    """What emission wrote to a file: size and chunk digests, and per weight its cache key and conversion error.

    ``continued`` are the bytes of it that an earlier emission had left.
    """

    nbytes: int
    data_start: int
    chunk_bytes: int
    sha256: tuple[str, ...]
    errors: Mapping[str, ConversionError]
    spans: Mapping[str, CachedWeight]
    built: int
    reused: int
    continued: int


def weights_header(entries: Sequence[WeightEntry]) -> bytes:
    """The safetensors header: one U8 tensor a weight, filled up with spaces so that the data starts on a page."""
    end = 0
    tensors: dict[str, object] = {}
    for entry in entries:
        assert entry.offset == end and entry.nbytes >= entry.packed_bytes, entry.name
        assert entry.name not in tensors, f"two weights are called {entry.name}"
        end = entry.offset + entry.nbytes
        tensors[entry.name] = {"dtype": "U8", "shape": [entry.nbytes], "data_offsets": [entry.offset, end]}
    text = json.dumps(tensors, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % PAGE)
    return len(text).to_bytes(8, "little") + text


def plan_emission(entries: Sequence[WeightEntry], checkpoint: Checkpoint) -> Emission:
    """What is to be written, without places."""
    keys = tuple(tuple(weight_key(variant.recipe, checkpoint) for variant in entry.variants) for entry in entries)
    data_start = len(weights_header(entries))
    nbytes = data_start + sum(entry.offset + entry.nbytes for entry in entries[-1:])
    return Emission(tuple(entries), checkpoint, data_start, nbytes, keys)


def emission_key(emission: Emission) -> str:
    """Digest of all that the bytes of all files, and their division into jobs, follow from; for one machine."""
    variants = [[variant.ranks for variant in entry.variants] for entry in emission.entries]
    jobs = [(len(job.pieces), job.nbytes) for job in cut_jobs(emission)]
    text = json.dumps([code_digest(), weights_header(emission.entries).hex(), emission.keys, variants, jobs])
    return hashlib.sha256(text.encode()).hexdigest()


def emit_weights(
    emission: Emission,
    paths: Sequence[Path],
    native: Native,
    journal: Journal,
    *,
    executor: Executor | None = None,
    cache: WeightCache | None = None,
    progress: Progress | None = None,
) -> list[EmissionReport]:
    """Write the weights of each rank to its path and return what was written, reading every byte of a source once.

    Once a weight that uses it, that is; read again are scales a tensor has few of, tensors under a conversion that
    looks for the largest number first (once more), and matrices that are transposed in groups (once a thread).
    The bytes are the same for any executor, cache state and journal. ``progress`` is called with (bytes done, bytes in
    all), never from two threads at once. Raises TapeoutError for weights that are not finite or do not fit their
    format, and OSError when the disk does.
    """
    executor = executor or Threads()
    emission = replace(emission, paths=tuple(paths))
    _open_files(emission)
    jobs, counter = list(cut_jobs(emission)), _Counter(emission.nbytes * len(paths), progress)
    counter.advance(emission.data_start * len(paths))
    results = _finished(emission, jobs, journal, counter)
    continued = sum(jobs[number].nbytes for number in results)
    left = [job for job in jobs if job.number not in results]
    if cache is not None and executor.uses_cache and left:
        emission = replace(emission, reused=_reused(emission, left, cache))
        journal.reuse({key: weight.error for key, weight in (emission.reused or {}).items()})

    def done(job: Job, result: JobResult) -> None:
        journal.append(result)
        results[job.number] = result

    executor.run(emission, left, native, counter.advance, done)
    sums = _sums(jobs, results)
    sha256 = _chunk_digests(emission, jobs, results)
    return [
        _report(emission, rank, sha256[rank], sums, journal.known, continued) for rank in range(len(emission.paths))
    ]


class _Counter:
    """Adds up bytes from many threads."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._total = total
        self._progress = progress
        self._done = 0
        self._lock = threading.Lock()

    def advance(self, amount: int) -> None:
        """So many more."""
        with self._lock:
            self._done += amount
            if self._progress is not None:
                self._progress(self._done, self._total)


def _open_files(emission: Emission) -> None:
    """Bring every file to its size, and write its header."""
    header = weights_header(emission.entries)
    for path in emission.paths:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.truncate(fd, emission.nbytes)
            written = 0
            while written < len(header):
                written += os.pwrite(fd, header[written:], written)
        finally:
            os.close(fd)


def _finished(emission: Emission, jobs: list[Job], journal: Journal, counter: _Counter) -> dict[int, JobResult]:
    """The results in the journal of jobs whose bytes are still there."""
    found: dict[int, JobResult] = {}

    def check(result: JobResult) -> None:
        job = jobs[result.number]
        if result.is_on_disk(emission, job):
            found[result.number] = result
            counter.advance(job.nbytes * len(emission.paths))

    run_tasks([journal.results[number] for number in sorted(journal.results)], check, default_jobs())
    return found


def _reused(emission: Emission, jobs: list[Job], cache: WeightCache) -> dict[str, CachedWeight]:
    """The weights of these jobs that the cache knows of, by key."""
    sizes = {
        key: emission.entries[number].packed_bytes
        for number in {piece.entry for job in jobs for piece in job.pieces}
        for key in emission.keys[number]
    }
    found = cache.find(sizes, default_jobs())
    return {key: weight for key, weight in found.items() if weight.nbytes == sizes[key]}


def _sums(jobs: list[Job], results: dict[int, JobResult]) -> dict[int, list[tuple[Sums | None, ...]]]:
    """The conversion errors of the pieces of each entry, in order."""
    sums: dict[int, list[tuple[Sums | None, ...]]] = {}
    for job in jobs:
        for piece, errors in zip(job.pieces, results[job.number].errors, strict=True):
            sums.setdefault(piece.entry, []).append(errors)
    return sums


def _chunk_digests(emission: Emission, jobs: list[Job], results: dict[int, JobResult]) -> list[tuple[str, ...]]:
    """The digests of every chunk of every file: those of whole segments, others read again from the file."""
    ranks, digests = range(len(emission.paths)), dict[tuple[int, int], str]()
    chunks = [(at, min(at + CHUNK_BYTES, emission.nbytes)) for at in range(0, emission.nbytes, CHUNK_BYTES)]
    whole = set(chunks)
    for job in jobs:
        for at, segment in enumerate(job.segments):
            if segment in whole:
                digests |= {(rank, segment[0]): results[job.number].sha256[rank][at] for rank in ranks}

    def read(place: tuple[int, tuple[int, int]]) -> None:
        rank, chunk = place
        digests[rank, chunk[0]] = digest_range(emission.paths[rank], *chunk)

    run_tasks([(r, chunk) for r in ranks for chunk in chunks if (r, chunk[0]) not in digests], read, default_jobs())
    return [tuple(digests[rank, start] for start, _ in chunks) for rank in ranks]


def _report(
    emission: Emission,
    rank: int,
    sha256: tuple[str, ...],
    sums: dict[int, list[tuple[Sums | None, ...]]],
    known: Mapping[str, ConversionError | None],
    continued: int,
) -> EmissionReport:
    errors: dict[str, ConversionError] = {}
    spans: dict[str, CachedWeight] = {}
    start, reused = emission.data_start, 0
    for number, entry in enumerate(emission.entries):
        variant = next(at for at, each in enumerate(entry.variants) if rank in each.ranks)
        key = emission.keys[number][variant]
        reused += emission.cached(number, variant) is not None
        error = known[key] if key in known else combine_errors([piece[variant] for piece in sums[number]])
        if error is not None:
            errors[entry.name] = error
        spans[key] = CachedWeight(emission.paths[rank], start + entry.offset, entry.packed_bytes, error)
    built = len(emission.entries) - reused
    return EmissionReport(emission.nbytes, start, CHUNK_BYTES, sha256, errors, spans, built, reused, continued)
