"""The build cache: an index of the weights that artifacts on this machine already hold, by recipe and source files.

No weight is stored twice: an entry points into a weights file that exists. Entries whose file is gone, changed or
damaged are dropped in silence and the weight is built again. One small JSON a weights file, replaced atomically, so
that compilers may run side by side.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from tapeout.compiler.checkpoints.base import Checkpoint, FileIdentity
from tapeout.compiler.emit.evaluate import ConversionError
from tapeout.compiler.emit.workers import run_tasks
from tapeout.compiler.recipes import Recipe

INDEX_VERSION = 1


@dataclass(frozen=True)
class CachedWeight:
    """Packed bytes that exist: where they lie in a weights file, and the conversion error recorded with them."""

    file: Path
    offset: int
    nbytes: int
    error: ConversionError | None


@dataclass(frozen=True)
class _Index:
    """What is known of one weights file."""

    file: Path
    chunk_bytes: int
    sha256: tuple[str, ...]
    weights: Mapping[str, CachedWeight]

    def chunks(self, weight: CachedWeight) -> range:
        """The chunks of the file that hold a weight."""
        return range(weight.offset // self.chunk_bytes, -(-(weight.offset + weight.nbytes) // self.chunk_bytes))


def weight_key(recipe: Recipe, checkpoint: Checkpoint) -> str:
    """Digest of all that a weight's bytes follow from: the recipe, the places it reads, the code that emits them.

    Places too, since what says where a tensor lies may be another file than the one that holds it (ONNX).
    """
    infos = [checkpoint.tensors[each.tensor] for each in recipe.reads()]
    known = {identity.path: identity for identity in checkpoint.files}
    files = [_identity(known[path]) for path in sorted({info.file for info in infos})]
    offsets = [info.offset for info in infos]
    return hashlib.sha256(json.dumps([code_digest(), recipe.digest, files, offsets]).encode()).hexdigest()


@lru_cache(maxsize=1)
def code_digest() -> str:
    """Digest of the sources that decide about the bytes of a weight."""
    root = Path(__file__).parent
    digest = hashlib.sha256()
    places = [
        *root.glob("emit/*.py"),
        *root.glob("emit/*.[ch]"),
        *root.glob("formats/*.py"),
        root / "recipes.py",
        root / "layouts.py",
    ]
    for path in sorted(places):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


class WeightCache:
    """The index in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find(self, keys: Iterable[str], jobs: int) -> dict[str, CachedWeight]:
        """The weights among ``keys`` that exist, each verified against the digests of the chunks it lies in."""
        wanted, found = set(keys), dict[str, CachedWeight]()
        for index in self._indexes():
            held = {key: index.weights[key] for key in wanted & index.weights.keys()}
            bad = _bad_chunks(index, {number for weight in held.values() for number in index.chunks(weight)}, jobs)
            good = {key: weight for key, weight in held.items() if bad.isdisjoint(index.chunks(weight))}
            found |= good
            wanted -= good.keys()
        return found

    def record(self, file: Path, chunk_bytes: int, sha256: Sequence[str], weights: Mapping[str, CachedWeight]) -> None:
        """Remember a weights file that is in its final place. Replaces what was known of that path."""
        file = file.absolute()
        entries: dict[str, object] = {}
        for key, weight in weights.items():
            error = [weight.error.relative_rms, weight.error.max_abs] if weight.error else None
            entries[key] = [weight.offset, weight.nbytes, error]
        document = {
            "version": INDEX_VERSION,
            "file": _identity(FileIdentity.of(file)),
            "chunk_bytes": chunk_bytes,
            "sha256": list(sha256),
            "weights": entries,
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=self.folder, prefix="new-", delete=False) as out:
            json.dump(document, out)
        os.replace(out.name, self._place(file))

    def _place(self, file: Path) -> Path:
        return self.folder / f"{hashlib.sha256(os.fsencode(file)).hexdigest()[:32]}.json"

    def _indexes(self) -> Iterator[_Index]:
        """Every usable index, in a fixed order; those that describe a file no longer there are removed."""
        for place in sorted(self.folder.glob("*.json")):
            index = _load(place)
            if index is None:
                with contextlib.suppress(OSError):
                    place.unlink()
            else:
                yield index


def _identity(identity: FileIdentity) -> list[Any]:
    return [str(identity.path), identity.size, identity.mtime_ns, identity.inode]


def _load(place: Path) -> _Index | None:
    """The index in a file, or None when it cannot be read or no longer describes a file that exists."""
    try:
        document = json.loads(place.read_bytes())
        file = Path(document["file"][0])
        size = int(document["file"][1])
        if document["version"] != INDEX_VERSION or _identity(FileIdentity.of(file)) != document["file"]:
            return None
        weights: dict[str, CachedWeight] = {}
        for key, (offset, nbytes, error) in document["weights"].items():
            if not (int(offset) >= 0 and int(nbytes) > 0 and int(offset) + int(nbytes) <= size):
                return None
            weights[key] = CachedWeight(
                file, int(offset), int(nbytes), ConversionError(*map(float, error)) if error else None
            )
        index = _Index(file, int(document["chunk_bytes"]), tuple(document["sha256"]), weights)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError):
        return None
    return index if index.chunk_bytes > 0 and len(index.sha256) == -(-size // index.chunk_bytes) else None


def _bad_chunks(index: _Index, numbers: Iterable[int], jobs: int) -> set[int]:
    """Which of these chunks of a file are not what they were when the file was recorded."""
    bad: set[int] = set()

    def check(number: int) -> None:
        if not _chunk_is_good(index, number):
            bad.add(number)

    run_tasks(sorted(numbers), check, jobs)
    return bad


def _chunk_is_good(index: _Index, number: int) -> bool:
    try:
        fd = os.open(index.file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            data = os.pread(fd, index.chunk_bytes, number * index.chunk_bytes)
        finally:
            os.close(fd)
    except OSError:
        return False
    return hashlib.sha256(data).hexdigest() == index.sha256[number]
