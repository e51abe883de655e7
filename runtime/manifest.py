"""The manifest of an artifact: the files in it and their digests. Read and checked before anything else is opened."""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, cast

from tapeout.runtime.errors import TapeoutError

FORMAT_VERSION = 2
RUNTIME_VERSION = "0.1.0"
MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 64 << 20
MAX_CHUNK_BYTES = 64 << 20
READ_BYTES = 256 << 10  # stays in the second-level cache

_HEX = re.compile(r"[0-9a-f]{64}")
_REQUIREMENT = re.compile(r">=(\d+(?:\.\d+)*)")


@dataclass(frozen=True)
class ArtifactFile:
    """One file: its path inside the artifact, its size, and the SHA-256 of each ``chunk_bytes`` of it."""

    path: str
    bytes: int
    chunk_bytes: int
    sha256: tuple[str, ...]


@dataclass(frozen=True)
class Manifest:
    """A manifest whose files exist, lie inside the folder and have the sizes it states. Contents: see ``verify``.

    Files that the manifest does not list are never opened.
    """

    folder: Path
    tapeout_version: str
    architectures: tuple[str, ...]
    files: Mapping[str, ArtifactFile]

    def has(self, path: str) -> bool:
        """Whether the artifact holds a file."""
        return path in self.files

    def file(self, path: str) -> Path:
        """The place of a listed file. Raises TapeoutError when the manifest does not list it."""
        if path not in self.files:
            raise TapeoutError(f"{self.folder}: the artifact's manifest lists no {path}; compile it again")
        return self.folder / path

    def verify(self, paths: Iterable[str] | None = None, threads: int | None = None) -> None:
        """Check the digest of every chunk of these files (all, if None), in parallel.

        Raises TapeoutError naming the file and the byte range of the first damaged chunk. Native code must be verified
        before it is loaded.
        """
        self.start(sorted(self.files) if paths is None else paths, threads).finish()

    def start(self, paths: Iterable[str], threads: int | None = None) -> Verification:
        """Begin to verify files on threads of their own; ``finish`` of the result waits and raises like ``verify``."""
        files = [self.files[name] for name in paths if self.file(name)]
        return Verification(self.folder, files, threads or len(os.sched_getaffinity(0)))


def open_manifest(folder: Path, *, host_targets: Sequence[str]) -> Manifest:
    """Read and check the manifest of an artifact for a host that runs code for ``host_targets``.

    Raises TapeoutError, in one sentence, for a folder that is no artifact, a damaged manifest, another format version,
    a runtime that is too old, an architecture the host lacks, a path that leaves the folder, and a file that is missing
    or of the wrong size. An empty ``architectures`` list needs no particular host.
    """
    manifest = parse_manifest(folder)
    wanted = manifest.architectures
    if wanted and not set(wanted) & set(host_targets):
        raise TapeoutError(
            f"{folder}: the artifact holds code for {', '.join(wanted)}, but this machine runs "
            f"{', '.join(host_targets) or 'none of the known architectures'}; compile it for this machine"
        )
    for file in manifest.files.values():
        _check_file(folder, file)
    return manifest


def parse_manifest(folder: Path) -> Manifest:
    """Read a manifest and check all that needs neither the host nor other files. Raises like ``open_manifest``."""
    place = folder / MANIFEST
    document = _read(folder, place)
    _check_versions(folder, document)
    try:
        architectures = tuple(_text(item) for item in _list(document["architectures"]))
        files = [_file(item) for item in _list(document["files"])]
        version = _text(document["tapeout_version"])
    except (KeyError, TypeError, ValueError) as error:
        what = f"the key {error} is missing" if isinstance(error, KeyError) else str(error)
        raise TapeoutError(
            f"{place}: not a valid manifest ({what}); copy the artifact again or compile it again"
        ) from error
    by_path = {file.path: file for file in files}
    if len(by_path) < len(files):
        raise TapeoutError(f"{place}: lists a file twice; a manifest lists every file once")
    for file in files:
        _check_path(place, file.path)
    return Manifest(folder, version, architectures, by_path)


def _read(folder: Path, place: Path) -> dict[str, Any]:
    if folder.is_file():
        raise TapeoutError(
            f"{folder}: is a file; an artifact is a folder with a {MANIFEST}, and a plan alone cannot run"
        )
    if not folder.is_dir():
        raise TapeoutError(f"{folder}: no such folder; an artifact is a folder with a {MANIFEST}")
    try:
        with place.open("rb") as file:
            text = file.read(MAX_MANIFEST_BYTES + 1)
    except FileNotFoundError:
        if (folder / "plan.json").is_file() and not (folder / "weights").exists():
            raise TapeoutError(
                f"{folder}: a plan alone, which cannot run; `tapeout compile` without --plan-only makes an artifact"
            ) from None
        raise TapeoutError(f"{folder}: not an artifact, it has no {MANIFEST}; `tapeout compile` makes one") from None
    except OSError as error:
        raise TapeoutError(f"{place}: cannot be read ({error.strerror})") from error
    if len(text) > MAX_MANIFEST_BYTES:
        raise TapeoutError(f"{place}: larger than {MAX_MANIFEST_BYTES} bytes; no manifest is, so the file is damaged")
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TapeoutError(f"{place}: not valid JSON, so it is cut or damaged; copy the artifact again") from error
    if not isinstance(document, dict):
        raise TapeoutError(f"{place}: holds no JSON object, so it is not a manifest")
    return cast("dict[str, Any]", document)


def _check_versions(folder: Path, document: Mapping[str, Any]) -> None:
    version = document.get("format_version")
    if not isinstance(version, int) or isinstance(version, bool):
        raise TapeoutError(f"{folder / MANIFEST}: states no format_version, so it is not a manifest of Tapeout")
    if version > FORMAT_VERSION:
        raise TapeoutError(
            f"{folder}: the artifact has format version {version}, but this runtime ({RUNTIME_VERSION}) reads up to "
            f"{FORMAT_VERSION}; upgrade tapeout, or compile with this version"
        )
    if version < FORMAT_VERSION:
        raise TapeoutError(
            f"{folder}: the artifact has format version {version}, but this runtime ({RUNTIME_VERSION}) reads "
            f"{FORMAT_VERSION}; compile it again"
        )
    requirement = document.get("requires_runtime")
    match = _REQUIREMENT.fullmatch(requirement) if isinstance(requirement, str) else None
    if match is None:
        raise TapeoutError(f"{folder / MANIFEST}: requires_runtime is {requirement!r:.80}; it must read like '>=0.1'")
    if _numbers(RUNTIME_VERSION) < _numbers(match[1]):
        raise TapeoutError(
            f"{folder}: the artifact needs a runtime {requirement}, and this one is {RUNTIME_VERSION}; upgrade tapeout"
        )


def _numbers(version: str) -> tuple[int, ...]:
    """Numeric parts of a dotted version. Trailing zeros do not count, so 1.0 equals 1."""
    parts = [int(part[:9]) for part in version.split(".")]
    while parts and parts[-1] == 0:
        parts.pop()
    return tuple(parts)


def _file(item: object) -> ArtifactFile:
    if not isinstance(item, dict):
        raise ValueError("an entry of files is not an object")
    entry = cast("dict[str, Any]", item)
    path, size, chunk = (
        _text(entry["path"]),
        _whole(entry["bytes"], 0, 1 << 60),
        _whole(entry["chunk_bytes"], 1, MAX_CHUNK_BYTES),
    )
    digests = tuple(_text(digest) for digest in _list(entry["sha256"]))
    if len(digests) != -(-size // chunk):
        raise ValueError(f"{path!r:.80} has {len(digests)} digests for {size} bytes in chunks of {chunk}")
    if not all(_HEX.fullmatch(digest) for digest in digests):
        raise ValueError(f"{path!r:.80} has a digest that is not 64 hexadecimal digits")
    return ArtifactFile(path, size, chunk, digests)


def _whole(value: object, low: int, high: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"{value!r:.40} is not a whole number between {low} and {high}")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r:.40} is not a string")
    return value


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{value!r:.40} is not a list")
    return cast("list[Any]", value)


def _check_path(place: Path, path: str) -> None:
    parts = path.split("/")
    plain = all(part not in ("", ".", "..") for part in parts) and not any(sign in path for sign in ("\0", "\\", ":"))
    if not plain or PurePosixPath(path).is_absolute():
        raise TapeoutError(
            f"{place}: the path {path!r:.80} leaves the artifact's folder; paths must be relative and stay inside"
        )


def _check_file(folder: Path, file: ArtifactFile) -> None:
    path = folder / file.path
    try:
        inside = path.resolve(strict=True).is_relative_to(folder.resolve())
        status = path.stat()
    except FileNotFoundError:
        raise TapeoutError(
            f"{folder}: the file {file.path} is missing; copy the artifact again or compile it again"
        ) from None
    except (OSError, RuntimeError) as error:
        raise TapeoutError(f"{path}: cannot be opened ({error})") from error
    if not inside:
        raise TapeoutError(f"{folder}: {file.path} is a link that leaves the artifact's folder; copy the file into it")
    if not path.is_file():
        raise TapeoutError(f"{folder}: {file.path} is not a regular file; copy the artifact again")
    if status.st_size != file.bytes:
        raise TapeoutError(
            f"{folder}: {file.path} has {status.st_size} bytes and should have {file.bytes}; "
            f"copy the artifact again or compile it again"
        )


class Verification:
    """Chunk digests being checked on threads."""

    def __init__(self, folder: Path, files: Sequence[ArtifactFile], threads: int) -> None:
        self._folder = folder
        self._checks = enumerate((file, number) for file in files for number in range(len(file.sha256)))
        self._lock = threading.Lock()
        self._damaged: list[tuple[int, ArtifactFile, int]] = []
        count = min(threads, sum(len(file.sha256) for file in files))
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def _work(self) -> None:
        while not self._damaged:
            with self._lock:
                found = next(self._checks, None)
            if found is None:
                return
            index, (file, number) = found
            if not _chunk_matches(self._folder / file.path, file, number):
                self._damaged.append((index, file, number))

    def wait(self) -> None:
        """Wait for all threads, whatever they find."""
        for thread in self._threads:
            thread.join()

    def finish(self) -> None:
        """Wait for all threads. Raises TapeoutError naming file and byte range of the first chunk that differs."""
        self.wait()
        if not self._damaged:
            return
        _, file, number = min(self._damaged, key=lambda found: found[0])
        raise damage(self._folder, file, number)


def damage(folder: Path, file: ArtifactFile, number: int) -> TapeoutError:
    """The error for a chunk whose digest is wrong."""
    start = number * file.chunk_bytes
    stop = min(start + file.chunk_bytes, file.bytes)
    return TapeoutError(
        f"{folder / file.path}: bytes {start} to {stop} differ from what was compiled (digest mismatch); "
        f"the file is damaged, copy the artifact again or compile it again"
    )


def is_gpu(architectures: Iterable[str]) -> bool:
    """Whether an artifact's code is for NVIDIA GPUs, whose architectures are named sm_NN."""
    return any(name.startswith("sm_") for name in architectures)


def _chunk_matches(path: Path, file: ArtifactFile, number: int) -> bool:
    start = number * file.chunk_bytes
    size = min(file.chunk_bytes, file.bytes - start)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    buffer = memoryview(bytearray(min(size, READ_BYTES)))
    try:
        digest = hashlib.sha256()
        while size:
            got = os.preadv(fd, [buffer[:size]], start)
            if not got:
                return False
            digest.update(buffer[:got])
            start, size = start + got, size - got
    except OSError:
        return False
    finally:
        os.close(fd)
    return digest.hexdigest() == file.sha256[number]
