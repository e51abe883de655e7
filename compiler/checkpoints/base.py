"""What a checkpoint is, whatever file holds it: named tensors with places in files, a config, tokenizer files.

Opening reads headers only; ``Checkpoint.read_rows`` fetches bytes, a bounded number at a time.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, NoReturn, cast

import numpy as np

from tapeout.compiler.formats import row_bytes
from tapeout.compiler.formats.base import Bytes
from tapeout.runtime.errors import TapeoutError

_PLACE = attrgetter("file", "offset")
AHEAD_BYTES = 4 << 20  # that the system is asked to fetch behind what is read, when a multiple of it is crossed
MAX_NAME = 1024  # bytes or characters of a tensor's or key's name: far above any real one, and it fits in a message


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor: ``shape`` in numpy order ([out, in]), ``offset`` from the file's start.

    ``format`` is of FORMATS, or where the tensor is a part of a packed weight of CARRIERS. A ``transposed`` matrix is
    stored [in, out], which is also its ``shape``.
    """

    name: str
    shape: tuple[int, ...]
    format: str
    file: Path
    offset: int
    nbytes: int
    transposed: bool = False

    @property
    def rows(self) -> int:
        """Number of rows: the product of all axes but the last; 1 for a vector."""
        return math.prod(self.shape[:-1])

    @property
    def row_bytes(self) -> int:
        """Bytes of one row along the last axis."""
        return row_bytes(self.format, self.shape[-1] if self.shape else 1)


@dataclass(frozen=True)
class FileIdentity:
    """What tells a file from a changed one without reading it; for caches on one machine, never for artifacts."""

    path: Path
    size: int
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, path: Path, stat: os.stat_result | None = None) -> FileIdentity:
        """The identity of ``path`` now, or as ``stat`` describes it. Raises TapeoutError when there is no such file."""
        try:
            stat = stat or path.stat()
        except OSError as error:
            raise TapeoutError(f"{path}: cannot be read ({error.strerror})") from error
        return cls(path, stat.st_size, stat.st_mtime_ns, stat.st_ino)


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint, headers only.

    - ``container``: "gguf", "safetensors" or "onnx";
    - ``tensors``: by name, sorted, so that the order in the file cannot be seen;
    - ``config``: config.json of a folder; the metadata keys of a GGUF, arrays as ``LazyArray``;
    - ``generation_config``: generation_config.json, or empty;
    - ``quantization``: hf_quant_config.json as a quantization_config, or empty;
    - ``tokenizer_files``: file name -> path, empty for a GGUF (its tokenizer is in ``config``);
    - ``unlisted``: names of tensors that shards hold and their index does not list, or that are constants of an ONNX
      graph; they are not in ``tensors``;
    - ``files``: every file that was read, as it was then.
    """

    container: str
    path: Path
    tensors: Mapping[str, TensorInfo]
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    tokenizer_files: Mapping[str, Path] = field(default_factory=dict[str, Path])
    unlisted: tuple[str, ...] = ()
    files: tuple[FileIdentity, ...] = ()
    quantization: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def identity(self) -> tuple[FileIdentity, ...]:
        """Path, size, mtime and inode of each file, sorted by path: the key under which results may be cached."""
        return self.files

    def only(self, names: Collection[str]) -> Checkpoint:
        """These tensors and their files, without config and tokenizer: what may be sent to where weights are read."""
        tensors = {name: self.tensors[name] for name in sorted(names)}
        paths = {info.file for info in tensors.values()}
        files = tuple(each for each in self.files if each.path in paths)
        return Checkpoint(self.container, self.path, tensors, {}, files=files)

    @cached_property
    def _known(self) -> Mapping[Path, FileIdentity]:
        return {each.path: each for each in self.files}

    def read(self, name: str) -> Bytes:
        """All bytes of the tensor ``name``, uint8 [rows, row_bytes]. Raises like ``read_rows``."""
        info = self.tensors[name]
        return self.read_rows(info, 0, info.rows)

    def read_rows(self, info: TensorInfo, start: int, stop: int) -> Bytes:
        """Bytes of rows [start, stop) of a tensor, uint8 [stop - start, row_bytes]; safe to call from many threads.

        Raises TapeoutError when the file has changed since the checkpoint was opened.
        """
        assert 0 <= start <= stop <= info.rows, (info.name, start, stop)
        out = np.empty((stop - start, info.row_bytes), np.uint8)
        with self._opened(info) as fd:
            _fill(fd, out.reshape(-1).data, info.offset + start * info.row_bytes, info)
            _fetch_ahead(fd, info.offset + start * info.row_bytes, out.size)
        return out

    def read_small(self, infos: Iterable[TensorInfo]) -> dict[str, bytes]:
        """All bytes of many small tensors, by name; neighbours in a file are read together.

        Raises like ``read_rows``.
        """
        found: dict[str, bytes] = {}
        for _, members in groupby(sorted(infos, key=_PLACE), key=attrgetter("file")):
            for run in _runs(list(members)):
                start = run[0].offset
                data = bytearray(run[-1].offset + run[-1].nbytes - start)
                with self._opened(run[0]) as fd:
                    _fill(fd, memoryview(data), start, run[-1])
                for info in run:
                    found[info.name] = bytes(data[info.offset - start : info.offset - start + info.nbytes])
        return found

    def read_columns(self, info: TensorInfo, start: int, stop: int) -> Bytes:
        """Bytes of columns [start, stop) of all rows, uint8 [rows, bytes]. Raises like ``read_rows``."""
        size = row_bytes(info.format, 1)
        assert 0 <= start <= stop <= info.shape[-1], (info.name, start, stop)
        out = np.empty((info.rows, (stop - start) * size), np.uint8)
        with self._opened(info) as fd:
            for row in range(info.rows):
                _fill(fd, out[row].data, info.offset + row * info.row_bytes + start * size, info)
        return out

    @contextlib.contextmanager
    def _opened(self, info: TensorInfo) -> Generator[int]:
        """The tensor's file, which must be the one that was opened."""
        known = self._known[info.file]
        try:
            fd = os.open(info.file, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise TapeoutError(f"{info.file}: cannot be read any more ({error.strerror}); compile again") from error
        try:
            if FileIdentity.of(info.file, os.fstat(fd)) != known:
                raise TapeoutError(f"{info.file}: the file changed while it was being read; compile again")
            yield fd
        finally:
            os.close(fd)


def _runs(infos: Sequence[TensorInfo]) -> Iterator[list[TensorInfo]]:
    """Tensors of one file, in its order, cut where one does not begin at the end of the one before."""
    run: list[TensorInfo] = []
    for info in infos:
        if run and info.offset != run[-1].offset + run[-1].nbytes:
            yield run
            run = []
        run.append(info)
    if run:
        yield run


def _fill(fd: int, view: memoryview, offset: int, info: TensorInfo) -> None:
    """Fill ``view`` with the bytes of the file from ``offset`` on."""
    done = 0
    while done < len(view):
        got = os.preadv(fd, [view[done:]], offset + done)
        if got == 0:
            raise TapeoutError(f"{info.file}: ends inside tensor {info.name!r}; the file was cut while in use")
        done += got


def _fetch_ahead(fd: int, offset: int, nbytes: int) -> None:
    """Rows are read a strip at a time, at several places of a file in turn, which no system takes for sequential."""
    end = offset + nbytes
    if offset // AHEAD_BYTES != end // AHEAD_BYTES:
        with contextlib.suppress(OSError):  # it is a hint
            os.posix_fadvise(fd, end, 2 * AHEAD_BYTES - end % AHEAD_BYTES, os.POSIX_FADV_WILLNEED)


def sorted_tensors(tensors: Iterable[TensorInfo]) -> dict[str, TensorInfo]:
    """Tensors by name, in name order. Names must be unique."""
    return {info.name: info for info in sorted(tensors, key=attrgetter("name"))}


def load_json(text: bytes, where: str) -> Any:
    """Parse strict JSON: UTF-8, no duplicate keys, no NaN. Raises TapeoutError that begins with ``where``."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        if len(found) < len(items):
            seen: set[str] = set()
            twice = next(key for key, _ in items if key in seen or seen.add(key))
            raise TapeoutError(
                f"{where}: the key {twice[:MAX_NAME]!r} stands twice in one JSON object; each may stand once"
            )
        return found

    def constant(text: str) -> NoReturn:
        raise TapeoutError(f"{where}: {text} is not JSON; numbers must be finite")

    try:
        return json.loads(text.decode(), object_pairs_hook=pairs, parse_constant=constant)
    except TapeoutError:
        raise
    except UnicodeDecodeError as error:
        raise TapeoutError(f"{where}: not UTF-8 text (byte {error.start}); JSON must be UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise TapeoutError(f"{where}: not valid JSON ({error}); the file is damaged") from error


def load_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a small file. Raises TapeoutError when it is not one."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise TapeoutError(f"{path}: cannot be read ({error.strerror})") from error
    value = load_json(text, str(path))
    if not isinstance(value, dict):
        raise TapeoutError(f"{path}: holds a JSON {type(value).__name__}; it must be an object")
    return cast("dict[str, Any]", value)
