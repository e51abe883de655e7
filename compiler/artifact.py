"""Writes an artifact folder so that it appears whole or not at all, and never harms a folder that is not an artifact.

Everything is written into ``.NAME.tmp-PID`` beside the target and synced; one ``renameat2`` then puts it in place. An
old artifact is exchanged for the new one in the same call, so a kill at any time leaves one of the two. Where the file
system has no exchange, the old one steps aside as ``.NAME.old-PID`` first; a kill right there leaves no NAME until the
next compile to it, which puts the old one back before it starts.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from tapeout.compiler.emit.digests import CHUNK_BYTES, digest_chunks
from tapeout.compiler.emit.weights import EmissionReport
from tapeout.runtime.errors import TapeoutError
from tapeout.runtime.manifest import FORMAT_VERSION, MANIFEST, RUNTIME_VERSION, Manifest, parse_manifest

REQUIRES_RUNTIME = ">=0.1"

_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_RENAME_EXCHANGE = 2
_NO_SUCH_RENAME = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP)
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


def canonical_json(document: Any) -> bytes:
    """JSON with sorted keys and one final newline: equal documents have equal bytes."""
    return json.dumps(document, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False).encode() + b"\n"


class ArtifactWriter:
    """A new artifact under way; a context manager. Leaving it without ``seal`` removes what was written.

    Raises TapeoutError if ``out`` exists (unless ``force`` and it holds an artifact and nothing else), if less than
    ``needed_bytes`` are free, and, on leaving, if the disk became full or could not be written.
    """

    def __init__(self, out: Path, *, force: bool = False, needed_bytes: int = 0) -> None:
        self.out = out.resolve() if out.is_symlink() else out.absolute()
        self.force = force
        self.needed_bytes = needed_bytes
        self._digests: dict[str, tuple[int, tuple[str, ...]]] = {}
        self._folder = self.out
        self._lock = -1

    def __enter__(self) -> ArtifactWriter:
        check_target(self.out, self.force)
        try:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            _sweep(self.out)
            check_target(self.out, self.force)
            _check_space(self.out.parent, self.needed_bytes)
            self._folder, self._lock = _make_folder(self.out)
        except OSError as error:
            blocked = isinstance(error, FileExistsError | NotADirectoryError)
            reason = "a part of the path is a file" if blocked else error.strerror
            raise TapeoutError(f"{self.out}: cannot be written ({reason}); choose another folder") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._folder != self.out:
            shutil.rmtree(self._folder, ignore_errors=True)
        os.close(self._lock)
        if isinstance(error, OSError):
            raise self._explain(error) from error

    def path(self, name: str) -> Path:
        """Where to write the file ``name``; its folder exists."""
        place = self._folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        return place

    def add(self, name: str, data: bytes) -> None:
        """Write a whole file."""
        self.path(name).write_bytes(data)
        self._digests[name] = (len(data), digest_chunks(memoryview(data)))

    def add_weights(self, name: str, report: EmissionReport) -> None:
        """List the weights file that emission wrote to ``path(name)``."""
        assert report.chunk_bytes == CHUNK_BYTES
        self._digests[name] = (report.nbytes, report.sha256)

    def seal(self, architectures: Sequence[str]) -> Path:
        """Write the manifest, sync, and put the artifact in place. ``architectures``: of which the host needs one."""
        files = [
            {"path": name, "bytes": size, "chunk_bytes": CHUNK_BYTES, "sha256": list(digests)}
            for name, (size, digests) in sorted(self._digests.items())
        ]
        manifest = {
            "format_version": FORMAT_VERSION,
            "tapeout_version": RUNTIME_VERSION,
            "requires_runtime": REQUIRES_RUNTIME,
            "architectures": list(architectures),
            "files": files,
        }
        self.path(MANIFEST).write_bytes(canonical_json(manifest))
        _sync(self._folder)
        check_target(self.out, self.force)
        self._place()
        _sync_one(self.out.parent)
        return self.out

    def _place(self) -> None:
        """Rename into place; ``_folder`` then holds the old artifact, or is gone."""
        if not self.out.exists():
            if not _rename(self._folder, self.out, _RENAME_NOREPLACE):
                os.rename(self._folder, self.out)
            self._folder = self.out
        elif not _rename(self._folder, self.out, _RENAME_EXCHANGE):
            aside = _beside(self.out, "old")
            os.rename(self.out, aside)
            os.rename(self._folder, self.out)
            self._folder = aside

    def _explain(self, error: OSError) -> TapeoutError:
        if error.errno in _DISK_FULL:
            free = shutil.disk_usage(self.out.parent).free
            return TapeoutError(
                f"{self.out}: the disk became full during the compilation (it needs {_size(self.needed_bytes)}, "
                f"{_size(free)} are free there now); free some space or choose another folder"
            )
        return TapeoutError(f"{error.filename or self.out}: cannot be read or written ({error.strerror or error})")


def check_target(out: Path, force: bool) -> None:
    """Refuse a place that exists, or with ``force`` one that holds anything but an artifact. Raises TapeoutError."""
    if not out.exists():
        return
    if not force:
        raise TapeoutError(f"{out}: the output folder exists; choose another, or replace its artifact with --force")
    try:
        manifest = parse_manifest(out)
    except TapeoutError as error:
        raise TapeoutError(
            f"{out}: exists and is not an artifact of this version, so it is not replaced; choose another folder"
        ) from error
    foreign = _foreign(out, manifest)
    if foreign is not None:
        raise TapeoutError(
            f"{out}: holds {foreign}, which is not part of its artifact, so it is not replaced; "
            f"move that file or choose another folder"
        )


def _foreign(folder: Path, manifest: Manifest) -> str | None:
    """The first file in an artifact's folder that its manifest does not list."""
    known = {MANIFEST, *manifest.files}
    found = (
        path.relative_to(folder).as_posix()
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or not path.is_dir()
    )
    return next((name for name in found if name not in known), None)


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise TapeoutError(
            f"{folder}: the artifact needs {_size(needed)} and {_size(free)} are free there; "
            f"free some space or choose another folder"
        )


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e6:.0f} MB" if nbytes < 1e9 else f"{nbytes / 1e9:.1f} GB"


def _beside(out: Path, kind: str) -> Path:
    return out.with_name(f".{out.name}.{kind}-{os.getpid()}")


def _make_folder(out: Path) -> tuple[Path, int]:
    """A fresh temporary folder, locked for as long as this process lives and keeps the descriptor."""
    first = _beside(out, "tmp")
    for number in range(1000):
        folder = first if number == 0 else first.with_name(f"{first.name}-{number}")
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(lock, fcntl.LOCK_EX)
        return folder, lock
    raise TapeoutError(f"{first}: a thousand compilations to {out} are under way")


def _sweep(out: Path) -> None:
    """Remove what killed compilations to ``out`` left behind, and put back an artifact that had stepped aside."""
    for kind in ("old", "tmp"):
        prefix = f".{out.name}.{kind}-"
        for folder in sorted(out.parent.glob(f"{_literal(prefix)}*")):
            if not _is_dead(folder, folder.name.removeprefix(prefix)):
                continue
            if kind == "old" and not out.exists():
                os.rename(folder, out)
            else:
                shutil.rmtree(folder, ignore_errors=True)


def _literal(text: str) -> str:
    """A pattern that matches ``text`` alone."""
    return "".join(f"[{sign}]" if sign in "*?[" else sign for sign in text)


def _is_dead(folder: Path, owner: str) -> bool:
    """Whether the process that made a temporary folder has ended: its number is free and its lock is gone."""
    pid = owner.split("-", maxsplit=1)[0]
    if not pid.isascii() or not pid.isdigit() or folder.is_symlink() or not folder.is_dir():
        return False
    if Path(f"/proc/{pid}").exists():
        return False
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True


def _sync(folder: Path) -> None:
    """Bring every file and folder below to the disk."""
    for root, _, names in os.walk(folder, topdown=False):
        for name in names:
            _sync_one(Path(root, name))
        _sync_one(Path(root))


def _sync_one(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _rename(source: Path, target: Path, flags: int) -> bool:
    """``renameat2``; False where the C library or the file system does not have these flags."""
    library = ctypes.CDLL(None, use_errno=True)
    function = getattr(library, "renameat2", None)
    if function is None:
        return False
    if function(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), ctypes.c_uint(flags)) == 0:
        return True
    code = ctypes.get_errno()
    if code in _NO_SUCH_RENAME:
        return False
    if code == errno.EEXIST:
        raise TapeoutError(f"{target}: another compilation has put an artifact there meanwhile; choose another folder")
    raise OSError(code, os.strerror(code), str(target))
