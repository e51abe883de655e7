"""Writes an artifact folder so that it appears whole or not at all, and never harms a folder that is not an artifact.

Everything is written into ``.NAME.tmp-PID`` beside the target and synced; one ``renameat2`` then puts it in place. An
old artifact is exchanged for the new one in the same call, so a kill at any time leaves one of the two. Where the file
system has no exchange, the old one steps aside as ``.NAME.old-PID`` first; a kill right there leaves no NAME until the
next compile to it, which puts the old one back before it starts.

What a killed or interrupted compile leaves is removed by the next one to NAME, unless its journal says that it is the
beginning of the same weights: then that one takes the folder over. A compile that is interrupted, or fails for want of
disk or workers, leaves its folder for that once a job of its emission is finished; other failures remove it.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from tapeout.compiler.emit.digests import CHUNK_BYTES, digest_chunks
from tapeout.compiler.emit.executors import WorkersLost
from tapeout.compiler.emit.jobs import JOURNAL, held_bytes, journal_state
from tapeout.compiler.emit.weights import EmissionReport
from tapeout.runtime.errors import TapeoutError
from tapeout.runtime.manifest import FORMAT_VERSION, MANIFEST, RUNTIME_VERSION, Manifest, parse_manifest

REQUIRES_RUNTIME = ">=0.1"
WEIGHTS = "weights"

_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_RENAME_EXCHANGE = 2
_NO_SUCH_RENAME = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP)
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_PASSING = (KeyboardInterrupt, SystemExit, OSError, WorkersLost)  # Ray makes an exit of SIGTERM
"""After these the same compile may succeed, without a change of what it reads."""


def canonical_json(document: Any) -> bytes:
    """JSON with sorted keys and one final newline: equal documents have equal bytes."""
    return json.dumps(document, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False).encode() + b"\n"


class ArtifactWriter:
    """A new artifact under way; a context manager. Leaving it without ``seal`` removes what was written, or leaves it.

    ``emission`` is the key of the weights to come: what was left of the same ones is taken over.
    Raises TapeoutError if ``out`` exists (unless ``force`` and it holds an artifact and nothing else), if less than
    ``needed_bytes`` are free, and, on leaving, if the disk became full or could not be written.
    """

    def __init__(self, out: Path, *, force: bool = False, needed_bytes: int = 0, emission: str = "") -> None:
        self.out = out.resolve() if out.is_symlink() else out.absolute()
        self.force = force
        self.needed_bytes = needed_bytes
        self.emission = emission
        self._digests: dict[str, tuple[int, tuple[str, ...]]] = {}
        self._folder = self.out
        self._lock = -1

    def __enter__(self) -> ArtifactWriter:
        check_target(self.out, self.force)
        try:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            taken = _sweep(self.out, self.emission)
            try:
                check_target(self.out, self.force)
                _check_space(self.out.parent, self.needed_bytes - (held_bytes(taken[0]) if taken else 0))
                self._folder, self._lock = taken or _make_folder(self.out)
            except TapeoutError:
                if taken:
                    os.close(taken[1])
                raise
        except OSError as error:
            blocked = isinstance(error, FileExistsError | NotADirectoryError)
            reason = "a part of the path is a file" if blocked else error.strerror
            raise TapeoutError(f"{self.out}: cannot be written ({reason}); choose another folder") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        left = ""
        if self._folder != self.out:
            finished = journal_state(self._folder)[1] if isinstance(error, _PASSING) else 0
            if finished:
                jobs = "job is" if finished == 1 else "jobs are"
                left = f"{finished} {jobs} finished: the same command continues there, or remove {self._folder}"
            else:
                shutil.rmtree(self._folder, ignore_errors=True)
        os.close(self._lock)
        if isinstance(error, OSError):
            raise self._explain(error, left) from error
        if left and error is not None:
            error.add_note(left)

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
        (self._folder / JOURNAL).unlink(missing_ok=True)  # only now: bringing all to the disk may take minutes
        _sync_one(self._folder)
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

    def _explain(self, error: OSError, left: str) -> TapeoutError:
        more = f"; {left}" if left else ""
        if error.errno in _DISK_FULL:
            free = shutil.disk_usage(self.out.parent).free
            return TapeoutError(
                f"{self.out}: the disk became full during the compilation (it needs {_size(self.needed_bytes)}, "
                f"{_size(free)} are free there now); free some space or choose another folder{more}"
            )
        where = error.filename or self.out
        return TapeoutError(f"{where}: cannot be read or written ({error.strerror or error}){more}")


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


def _sweep(out: Path, emission: str) -> tuple[Path, int] | None:
    """Remove what dead compilations to ``out`` left behind, and put back an artifact that had stepped aside.

    Returns the folder that holds most of the emission of this key, taken over and locked, if there is one.
    """
    for folder, lock in _dead(out, "old"):
        if out.exists():
            shutil.rmtree(folder, ignore_errors=True)
        else:
            os.rename(folder, out)
        os.close(lock)
    best, most = None, 0
    for folder, lock in _dead(out, "tmp"):
        key, finished = journal_state(folder)
        if key == emission and finished > most:
            if best:
                _drop(*best)
            best, most = (folder, lock), finished
        else:
            _drop(folder, lock)
    if best:
        _only_weights(best[0])
    return best


def _drop(folder: Path, lock: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)


def _only_weights(folder: Path) -> None:
    """Keep of a folder that was taken over what belongs to its emission; kernels, say, may be others now."""
    for each in folder.iterdir():
        if each.name not in (JOURNAL, WEIGHTS):
            shutil.rmtree(each) if each.is_dir() else each.unlink()


def _literal(text: str) -> str:
    """A pattern that matches ``text`` alone."""
    return "".join(f"[{sign}]" if sign in "*?[" else sign for sign in text)


def _dead(out: Path, kind: str) -> Iterator[tuple[Path, int]]:
    """Temporary folders whose process has ended, each with the lock that this process now has on it."""
    prefix = f".{out.name}.{kind}-"
    for folder in sorted(out.parent.glob(f"{_literal(prefix)}*")):
        lock = _lock_dead(folder, folder.name.removeprefix(prefix))
        if lock is not None:
            yield folder, lock


def _lock_dead(folder: Path, owner: str) -> int | None:
    """The lock of a folder that nobody holds.

    Unless a journal shows that somebody did, its process must be gone too: a folder just made is not locked yet.
    """
    pid = owner.split("-", maxsplit=1)[0]
    if not pid.isascii() or not pid.isdigit() or folder.is_symlink() or not folder.is_dir():
        return None
    if Path(f"/proc/{pid}").exists() and not (folder / JOURNAL).exists():
        return None
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:  # another compilation has just removed it, or taken it over
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(lock), folder.stat()):
            return lock
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(lock)
    return None


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
