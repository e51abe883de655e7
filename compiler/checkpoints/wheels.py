"""Python packages as carriers of data files: installed ones, and wheels fetched by pip. Nothing of them is executed."""

from __future__ import annotations

import base64
import csv
import email
import importlib.metadata
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tapeout.runtime.errors import TapeoutError

BLOCK = 1 << 20
MAX_TEXT = 1 << 20
PIN = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)\s*\(?==\s*(?P<version>[A-Za-z0-9.+!_-]+)\)?")
OFFLINE = ("NewConnectionError", "Name or service not known", "Temporary failure in name resolution", "ConnectTimeout",
           "Network is unreachable", "ProxyError", "Connection refused")  # fmt: skip


def normalise(name: str) -> str:
    """The name of a package as registries compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


@dataclass(frozen=True)
class Piece:
    """One file of a package: installed (``path``) or inside a wheel. ``sha256`` is what RECORD states, in hex."""

    name: str
    size: int
    sha256: str | None
    path: Path | None = None
    wheel: Path | None = None

    def blocks(self) -> Iterator[bytes]:
        """The content, in blocks. Raises TapeoutError when the wheel is damaged."""
        if self.path is not None:
            with self.path.open("rb") as file:
                while block := file.read(BLOCK):
                    yield block
            return
        assert self.wheel is not None
        try:
            with zipfile.ZipFile(self.wheel) as archive, archive.open(self.name) as file:
                while block := file.read(BLOCK):
                    yield block
        except (zipfile.BadZipFile, EOFError, NotImplementedError) as error:
            raise TapeoutError(f"{self.wheel.name}: a damaged wheel ({error}); fetch it again") from error

    def text(self) -> str:
        """The content of a small text file; empty when it is too large to be one."""
        return b"".join(self.blocks()).decode(errors="replace") if self.size <= MAX_TEXT else ""


@dataclass(frozen=True)
class Package:
    """An installed package or a wheel: its files and what its metadata requires."""

    name: str
    version: str
    requires: tuple[str, ...]
    pieces: tuple[Piece, ...]

    def find(self, file: str) -> Piece | None:
        """The one file whose path ends in ``file``. Raises TapeoutError when several do."""
        found = [piece for piece in self.pieces if ("/" + piece.name).endswith("/" + file)]
        if len(found) > 1:
            listed = ", ".join(piece.name for piece in found)
            raise TapeoutError(f"package {self.name}: several files are called {file}: {listed}; give more of the path")
        return found[0] if found else None

    def stated_digest(self, name: str) -> str | None:
        """The SHA-256 that a SHA256SUMS file of the package gives for ``name``, in hex."""
        for piece in self.pieces:
            if piece.name.rpartition("/")[2] == "SHA256SUMS":
                for line in piece.text().splitlines():
                    digest, _, subject = line.strip().partition(" ")
                    if subject.lstrip(" *").rpartition("/")[2] == name:
                        return digest.lower()
        return None


def pinned_dependencies(package: Package) -> list[tuple[str, str]]:
    """The requirements of the form ``name==version`` without a condition, as (name, version)."""
    matches = (PIN.fullmatch(line.strip()) for line in package.requires)
    return [(match["name"], match["version"]) for match in matches if match]


def installed(name: str) -> Package | None:
    """The package of that name in this environment, or None."""
    try:
        found = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    pieces: list[Piece] = []
    for file in found.files or []:
        path = Path(str(file.locate()))
        with suppress(OSError):
            digest = _hex(f"{file.hash.mode}={file.hash.value}") if file.hash else None
            pieces.append(Piece(file.as_posix(), path.stat().st_size, digest, path=path))
    return Package(normalise(name), found.version, tuple(found.requires or ()), tuple(pieces))


def download(requirements: list[str], folder: Path, source: str) -> list[Package]:
    """Fetch wheels with this environment's pip, without dependencies and without running anything of them.

    Raises TapeoutError that tells no network from no such package.
    """
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check"]
    options = ["--no-deps", "--only-binary=:all:", "--retries=2", "--timeout=20", f"--dest={folder}", "--"]
    command = [*pip, *options, *requirements]
    result = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    if result.returncode:
        raise TapeoutError(f"source {source!r}: {_why(result.stderr, ' '.join(requirements))}")
    return [_open_wheel(path, source) for path in sorted(folder.glob("*.whl"))]


def _why(stderr: str, what: str) -> str:
    last = next((line for line in reversed(stderr.splitlines()) if line.strip()), "no message").strip()
    if "No module named pip" in stderr:
        return f"fetching {what} needs pip in this environment; install pip, or install {what} itself"
    if any(sign in stderr for sign in OFFLINE):
        return f"the package index cannot be reached, so {what} was not fetched; connect, or install it beforehand"
    if "No space left" in stderr:
        return f"no room to fetch {what}; make room, or set TAPEOUT_CACHE to another disk"
    return f"pip could not fetch {what} as a wheel: {last}"


def _open_wheel(path: Path, source: str) -> Package:
    try:
        with zipfile.ZipFile(path) as archive:
            infos = [info for info in archive.infolist() if not info.is_dir()]
            metadata = email.message_from_string(_member(archive, infos, "METADATA"))
            record = {
                row[0]: row[1] for row in csv.reader(_member(archive, infos, "RECORD").splitlines()) if len(row) == 3
            }
    except (OSError, zipfile.BadZipFile) as error:
        raise TapeoutError(f"source {source!r}: {path.name} is not a sound wheel ({error}); fetch it again") from error
    pieces = tuple(
        Piece(info.filename, info.file_size, _hex(record.get(info.filename, "")), wheel=path) for info in infos
    )
    requires = tuple(str(line) for line in metadata.get_all("Requires-Dist") or ())
    return Package(normalise(str(metadata["Name"])), str(metadata["Version"]), requires, pieces)


def _member(archive: zipfile.ZipFile, infos: list[zipfile.ZipInfo], name: str) -> str:
    found = [info for info in infos if info.filename.count("/") == 1 and info.filename.endswith(f".dist-info/{name}")]
    if len(found) != 1 or found[0].file_size > MAX_TEXT * 16:
        raise OSError(f"it must hold one {name} file")
    return archive.read(found[0]).decode()


def _hex(record: str) -> str | None:
    """RECORD writes ``sha256=`` and unpadded base64; digests here are hex."""
    mode, _, value = record.partition("=")
    if mode != "sha256":
        return None
    try:
        return base64.urlsafe_b64decode(value + "=" * (-len(value) % 4)).hex()
    except ValueError:
        return None
