"""Emission as an ordered list of independent jobs, and the journal that lets a later compile go on with it.

Jobs follow from the plan alone: neighbouring weights of about JOB_BYTES over all ranks. Each writes its own bytes of
every rank's file. A journal lies beside the files while they are written. Its lines, each under a checksum: the key, a
digest of all that the bytes follow from; the errors of weights that came from the cache; and a job's result, appended
when its bytes are written. Nothing is synced: what a crash of the machine loses has not the digests that the journal
states, and is written again.
"""

from __future__ import annotations

import json
import os
import threading
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from tapeout.compiler.emit.digests import Range, SegmentDigests, digest_range, segments_of
from tapeout.compiler.emit.evaluate import ConversionError, Sums
from tapeout.compiler.emit.pieces import Emission, Piece, PieceWriter, cut_pieces

JOB_BYTES = 1 << 30
JOURNAL = "emission.journal"

Advance = Callable[[int], None]
Known = Mapping[str, ConversionError | None]


@dataclass(frozen=True)
class Job:
    """Neighbouring pieces. ``segments`` are the bytes of every rank's file that they take, cut where chunks end."""

    number: int
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of one rank."""
        return sum(piece.nbytes for piece in self.pieces)

    @cached_property
    def segments(self) -> tuple[Range, ...]:
        """(start, stop) in the file, rising."""
        spans = (span for piece in self.pieces for span in piece.spans if span.stop > span.offset)
        return tuple(segments_of(sorted((span.offset, span.stop) for span in spans)))


def cut_jobs(emission: Emission) -> Iterator[Job]:
    """The jobs of an emission, in order. A weight is cut only if it is more than two of them."""
    held: list[Piece] = []
    number = size = 0
    for piece in cut_pieces(emission.entries, emission.data_start):
        if size >= JOB_BYTES and (piece.start == 0 or size >= 2 * JOB_BYTES):
            yield Job(number, tuple(held))
            number, size, held = number + 1, 0, []
        held.append(piece)
        size += emission.ranks * piece.nbytes
    if held:
        yield Job(number, tuple(held))


def alone(emission: Emission, job: Job) -> tuple[Emission, Job]:
    """The job, and as much of its emission as it needs: small, however large the plan and the checkpoint are."""
    numbers = sorted({piece.entry for piece in job.pieces})
    place = {number: at for at, number in enumerate(numbers)}
    entries = tuple(emission.entries[number] for number in numbers)
    names = {read.tensor for entry in entries for variant in entry.variants for read in variant.recipe.reads()}
    keys = tuple(emission.keys[number] for number in numbers)
    part = replace(emission, entries=entries, checkpoint=emission.checkpoint.only(names), keys=keys)
    return part, Job(job.number, tuple(replace(piece, entry=place[piece.entry]) for piece in job.pieces))


@dataclass(frozen=True)
class JobResult:
    """What a job wrote: the digest of each segment by rank, and the conversion errors of each piece by variant."""

    number: int
    sha256: tuple[tuple[str, ...], ...]
    errors: tuple[tuple[Sums | None, ...], ...]

    def to_json(self) -> Any:
        """As the journal has it; floats survive exactly."""
        return [self.number, self.sha256, self.errors]

    @classmethod
    def from_json(cls, value: Any) -> JobResult:
        """The inverse."""
        number, sha256, errors = value
        pieces = tuple(tuple(None if each is None else (*each,) for each in piece) for piece in errors)
        return cls(number, tuple(map(tuple, sha256)), pieces)

    def is_on_disk(self, emission: Emission, job: Job) -> bool:
        """Whether the files still hold what the job wrote."""
        return all(
            digest_range(path, *segment) == expected
            for path, digests in zip(emission.paths, self.sha256, strict=True)
            for segment, expected in zip(job.segments, digests, strict=True)
        )


class JobWork:
    """A job under way. ``piece`` may be called from many threads, once for each of the job's pieces."""

    def __init__(self, emission: Emission, job: Job, advance: Advance) -> None:
        self.job = job
        self._advance = advance
        self._leaders = _leaders(emission, job)
        self._digests = [
            SegmentDigests(job.segments, {at for at, leaders in enumerate(self._leaders) if leaders[rank] != rank})
            for rank in range(emission.ranks)
        ]
        self._errors: dict[int, tuple[Sums | None, ...]] = {}
        self._lock = threading.Lock()

    def piece(self, writer: PieceWriter, number: int) -> JobResult | None:
        """Write a piece; the job's result after the last. Raises like ``PieceWriter.write``."""
        errors = tuple(writer.write(self.job.pieces[number], self._hash))
        with self._lock:
            self._errors[number] = errors
            if len(self._errors) < len(self.job.pieces):
                return None
        sha256 = tuple(
            tuple(self._digests[leaders[rank]].hexdigest(at) for at, leaders in enumerate(self._leaders))
            for rank in range(len(self._digests))
        )
        return JobResult(self.job.number, sha256, tuple(self._errors[at] for at in range(len(self.job.pieces))))

    def _hash(self, rank: int, offset: int, data: memoryview) -> None:
        self._digests[rank].add(offset, data)
        self._advance(len(data))


def _leaders(emission: Emission, job: Job) -> list[list[int]]:
    """For each segment and rank the first rank whose file has the same bytes there, which is the one that is hashed."""
    starts = [start for start, _ in job.segments]
    entries: list[set[int]] = [set() for _ in starts]
    for piece in job.pieces:
        for span in (each for each in piece.spans if each.stop > each.offset):
            for at in range(bisect_right(starts, span.offset) - 1, bisect_right(starts, span.stop - 1)):
                entries[at].add(piece.entry)
    return [_first_alike(emission, found) for found in entries]


def _first_alike(emission: Emission, entries: Iterable[int]) -> list[int]:
    """For each rank the first that has the same recipes of these entries."""
    held: list[tuple[str, ...]] = [
        tuple(recipe.digest for recipe in ranks)
        for ranks in zip(*(emission.entries[entry].recipes for entry in sorted(entries)), strict=True)
    ]
    return [held.index(recipes) for recipes in held]


class Journal:
    """The journal of one emission. ``append`` may be called from many threads."""

    def __init__(self, path: Path, key: str) -> None:
        self.known: dict[str, ConversionError | None] = {}
        self.results: dict[int, JobResult] = {}
        self._path = path
        self._lock = threading.Lock()
        end, lines = _read(path)
        if lines[:1] != [{"key": key}]:
            end, lines = 0, []
        with path.open("ab") as file:
            file.truncate(end)
        if not lines:
            self._append({"key": key})
        for line in lines[1:]:
            for name, error in line.get("known", {}).items():
                self.known[name] = None if error is None else ConversionError(*error)
            if "job" in line:
                result = JobResult.from_json(line["job"])
                self.results[result.number] = result

    def reuse(self, known: Known) -> None:
        """Weights that come from the cache, by key, with the errors recorded there."""
        self.known.update(known)
        values = {key: [error.relative_rms, error.max_abs] if error else None for key, error in known.items()}
        self._append({"known": values})

    def append(self, result: JobResult) -> None:
        """A finished job."""
        self._append({"job": result.to_json()})

    def _append(self, line: dict[str, Any]) -> None:
        text = json.dumps(line, separators=(",", ":")).encode()
        with self._lock, self._path.open("ab", buffering=0) as file:
            file.write(b"%08x %s\n" % (zlib.crc32(text), text))


def journal_state(folder: Path) -> tuple[str, int]:
    """The key of the emission that a folder holds the beginning of, and how many jobs are finished; ("", 0) if none."""
    _, lines = _read(folder / JOURNAL)
    return (lines[0].get("key", ""), len({line["job"][0] for line in lines if "job" in line})) if lines else ("", 0)


def _read(path: Path) -> tuple[int, list[dict[str, Any]]]:
    """The lines up to the first that is not whole, and where they end."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return 0, []
    end, lines = 0, list[dict[str, Any]]()
    for line in data.splitlines(keepends=True):
        checksum, _, text = line.partition(b" ")
        if not text.endswith(b"\n") or checksum != b"%08x" % zlib.crc32(text[:-1]):
            break
        lines.append(json.loads(text))
        end += len(line)
    return end, lines


def held_bytes(folder: Path) -> int:
    """Bytes of the disk that the files below a folder take."""
    return sum(os.stat(Path(root, name)).st_blocks * 512 for root, _, names in os.walk(folder) for name in names)
