"""GGUF v2 and v3: header parser that trusts no count, length or offset (format: shared by ggml, docs/gguf.md).

Nothing is allocated for a claim of the file before the claim is known to fit in the file.
"""

from __future__ import annotations

import mmap
import os
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, overload

import numpy as np

from tapeout.compiler.checkpoints.base import MAX_NAME, Checkpoint, FileIdentity, TensorInfo, sorted_tensors
from tapeout.compiler.formats import Carrier, Format, by_gguf_id
from tapeout.runtime.errors import TapeoutError

MAGIC = b"GGUF"
MAX_DIMS = 4
STRING, ARRAY = 8, 9
SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
MIN_KEY_BYTES, MIN_TENSOR_BYTES = 8 + 4 + 1, 8 + 4 + 8 + 4 + 8
SPLIT = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
# Types that ggml has and FORMATS may lack, so that the refusal can name them.
GGML_TYPES = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S",
    22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0",
    35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip


@dataclass(frozen=True)
class LazyArray(Sequence[Any]):
    """An array of the metadata: known by place and length, decoded when first looked into.

    ``kind`` is the GGUF element type; elements are str, or Python numbers. ``numpy`` gives numbers as an array.
    """

    file: Path
    key: str
    kind: int
    length: int
    offset: int
    nbytes: int

    def __len__(self) -> int:
        return self.length

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        return self._values[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._values)

    def numpy(self) -> np.ndarray[Any, Any]:
        """The numbers as an array [count] of the file's own type. Raises TapeoutError for an array of strings."""
        if self.kind == STRING:
            raise TapeoutError(f"{self.file}: the key {self.key!r} holds an array of strings where numbers are needed")
        return np.frombuffer(self._bytes(), SCALARS[self.kind])

    @cached_property
    def _values(self) -> list[Any]:
        return self._strings() if self.kind == STRING else self.numpy().tolist()

    def _bytes(self) -> bytes:
        with self.file.open("rb") as file:
            file.seek(self.offset)
            data = file.read(self.nbytes)
        if len(data) < self.nbytes:
            raise TapeoutError(f"{self.file}: ends inside the key {self.key!r}; the file was cut while in use")
        return data

    def _strings(self) -> list[str]:
        data, at, out = self._bytes(), 0, list[str]()
        length = struct.Struct("<Q").unpack_from
        try:
            for _ in range(self.length):
                end = at + 8 + length(data, at)[0]
                out.append(data[at + 8 : end].decode())
                at = end
        except UnicodeDecodeError as error:
            raise TapeoutError(
                f"{self.file}: element {len(out)} of the key {self.key!r} is not UTF-8; GGUF strings must be"
            ) from error
        return out


@dataclass
class _Reader:
    """A cursor over the mapped file; every ``take`` is checked against the file's end."""

    file: Path
    data: mmap.mmap | bytes
    at: int = 0
    subject: str = field(default="the header", init=False)

    def fail(self, problem: str) -> TapeoutError:
        return TapeoutError(f"{self.file}: {problem}")

    def room(self, nbytes: int, claim: str) -> None:
        left = len(self.data) - self.at
        if nbytes > left:
            raise self.fail(
                f"{self.subject} claims {claim}, which needs {nbytes} bytes where the file has {left} left; "
                "the file is truncated or damaged: fetch it again"
            )

    def number(self, code: str) -> Any:
        size = struct.calcsize(code)
        self.room(size, "a number")
        (value,) = struct.unpack_from(code, self.data, self.at)
        self.at += size
        return value

    def string(self, limit: int | None = None) -> str:
        length: int = self.number("<Q")
        if limit is not None and length > limit:
            raise self.fail(f"{self.subject} has a name of {length} bytes; names have at most {limit}")
        self.room(length, f"a string of {length} bytes")
        text = self.data[self.at : self.at + length]
        self.at += length
        try:
            return text.decode()
        except UnicodeDecodeError as error:
            raise self.fail(f"{self.subject} holds a string that is not UTF-8; GGUF strings must be") from error

    def array(self, key: str) -> LazyArray:
        kind: int = self.number("<I")
        count: int = self.number("<Q")
        if kind == ARRAY:
            raise self.fail(f"{self.subject} is an array of arrays; only arrays of numbers and strings are read")
        if kind != STRING and kind not in SCALARS:
            raise self.fail(f"{self.subject} is an array of unknown type {kind}; types are 0 to 12")
        size = 8 if kind == STRING else np.dtype(SCALARS[kind]).itemsize
        self.room(count * size, f"{count} array elements")
        start = self.at
        if kind == STRING:
            self._skip_strings(count)
        else:
            self.at += count * size
        return LazyArray(self.file, key, kind, count, start, self.at - start)

    def _skip_strings(self, count: int) -> None:
        """Pass over ``count`` strings. A tight loop: vocabularies have 262,144 of them."""
        data, at, length = self.data, self.at, struct.Struct("<Q").unpack_from
        try:
            for _ in range(count):
                at += 8 + length(data, at)[0]
        except (struct.error, OverflowError, IndexError):
            at = len(data) + 1
        if at > len(data):
            raise self.fail(
                f"{self.subject} has an array of {count} strings that runs past the end of the file; "
                "the file is truncated or damaged: fetch it again"
            )
        self.at = at


@dataclass(frozen=True)
class _Part:
    """One parsed file."""

    metadata: dict[str, Any]
    tensors: list[TensorInfo]
    identity: FileIdentity


def open_gguf(path: Path) -> Checkpoint:
    """Open a GGUF file, or all parts of a split one given its first part.

    Raises TapeoutError naming the file, the key or tensor, and the rule, for anything malformed.
    """
    first = _parse(path)
    parts = [first, *(_parse(other) for other in _other_parts(path, first.metadata))]
    _check_split(path, parts)
    return Checkpoint(
        container="gguf",
        path=path,
        tensors=sorted_tensors(info for part in parts for info in part.tensors),
        config=first.metadata,
        files=tuple(sorted((part.identity for part in parts), key=lambda identity: identity.path)),
    )


def _other_parts(path: Path, metadata: dict[str, Any]) -> list[Path]:
    """The further files of a split checkpoint, in order; none for a whole file."""
    count = metadata.get("split.count", 1)
    if not isinstance(count, int) or count < 2:
        return []
    match = SPLIT.fullmatch(path.name)
    if not match or int(match["count"]) != count:
        raise TapeoutError(
            f"{path}: is one of {count} parts (key 'split.count'), so its name must end in -00001-of-{count:05}.gguf"
        )
    if int(match["number"]) != 1:
        first = f"{match['stem']}-00001-of-{count:05}.gguf"
        raise TapeoutError(f"{path}: is part {int(match['number'])} of {count}; name the first part, {first}")
    others = [path.with_name(f"{match['stem']}-{number:05}-of-{count:05}.gguf") for number in range(2, count + 1)]
    for other in others:
        if not other.is_file():
            raise TapeoutError(f"{path}: is part 1 of {count} and {other.name} is missing; put all parts in one folder")
    return others


def _check_split(path: Path, parts: list[_Part]) -> None:
    if len(parts) == 1:
        return
    owner: dict[str, Path] = {}
    for number, part in enumerate(parts):
        file, meta = part.identity.path, part.metadata
        if (meta.get("split.no"), meta.get("split.count")) != (number, len(parts)):
            raise TapeoutError(
                f"{file}: says it is part {meta.get('split.no')} (from 0) of {meta.get('split.count')} where its name "
                f"makes it part {number} of {len(parts)}; the parts belong to different checkpoints"
            )
        for info in part.tensors:
            if info.name in owner:
                raise TapeoutError(
                    f"{file}: tensor {info.name!r} stands in {owner[info.name].name} too; once is allowed"
                )
            owner[info.name] = file
    total = parts[0].metadata.get("split.tensors.count", len(owner))
    if total != len(owner):
        raise TapeoutError(
            f"{path}: key 'split.tensors.count' says {total} tensors and the {len(parts)} parts hold {len(owner)}; "
            "the parts belong to different checkpoints"
        )


def _parse(path: Path) -> _Part:
    try:
        with path.open("rb") as file:
            identity = FileIdentity.of(path, os.fstat(file.fileno()))
            if identity.size < 24:
                raise TapeoutError(
                    f"{path}: has {identity.size} bytes; a GGUF header has at least 24: the file is truncated"
                )
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                metadata, tensors = _header(_Reader(path, data))
                return _Part(metadata, tensors, identity)
    except OSError as error:
        raise TapeoutError(f"{path}: cannot be read ({error.strerror})") from error


def _header(reader: _Reader) -> tuple[dict[str, Any], list[TensorInfo]]:
    _check_version(reader)
    tensor_count: int = reader.number("<Q")
    key_count: int = reader.number("<Q")
    reader.room(tensor_count * MIN_TENSOR_BYTES, f"{tensor_count} tensors")
    reader.room(key_count * MIN_KEY_BYTES, f"{key_count} metadata keys")
    metadata: dict[str, Any] = {}
    for number in range(key_count):
        reader.subject = f"metadata key number {number + 1} of {key_count}"
        key = reader.string(MAX_NAME)
        if key in metadata:
            raise reader.fail(f"the metadata key {key!r} stands twice; each may stand once")
        metadata[key] = _value(reader, key)
    claims: dict[str, _Claim] = {}
    for number in range(tensor_count):
        reader.subject = f"tensor number {number + 1} of {tensor_count}"
        claim = _tensor(reader)
        if claim.name in claims:
            raise reader.fail(f"the tensor {claim.name!r} stands twice; names must be unique")
        claims[claim.name] = claim
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1) or alignment > 1 << 20:
        raise reader.fail(f"the key 'general.alignment' is {alignment!r}; it must be a power of two up to {1 << 20}")
    start = -(-reader.at // alignment) * alignment
    return metadata, _place(reader, list(claims.values()), start, alignment)


def _check_version(reader: _Reader) -> None:
    magic = bytes(reader.data[:4])
    if magic != MAGIC:
        raise reader.fail(f"begins with {magic!r}; a GGUF file begins with {MAGIC!r}")
    reader.at = 4
    version: int = reader.number("<I")
    if version & 0xFFFF == 0 and version:
        raise reader.fail(
            "is a big-endian GGUF; only little-endian files are read: "
            "convert it with `gguf-convert-endian FILE little` of the gguf package"
        )
    if version not in (2, 3):
        raise reader.fail(f"is GGUF version {version}; versions 2 and 3 are read: convert the model again")


def _value(reader: _Reader, key: str) -> Any:
    kind: int = reader.number("<I")
    reader.subject = f"the metadata key {key!r}"
    if kind == STRING:
        return reader.string()
    if kind == ARRAY:
        return reader.array(key)
    if kind not in SCALARS:
        raise reader.fail(f"{reader.subject} has unknown value type {kind}; types are 0 to 12")
    return reader.number(_STRUCT_CODES[kind])


_STRUCT_CODES = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}


@dataclass(frozen=True)
class _Claim:
    """What the header says of a tensor: checked by itself, not yet against the file."""

    name: str
    shape: tuple[int, ...]
    format: Format | Carrier
    offset: int
    nbytes: int


def _tensor(reader: _Reader) -> _Claim:
    name = reader.string(MAX_NAME)
    reader.subject = f"tensor {name!r}"
    dims: int = reader.number("<I")
    if not 1 <= dims <= MAX_DIMS:
        raise reader.fail(f"{reader.subject} has {dims} dimensions; 1 to {MAX_DIMS} are allowed")
    shape = tuple(reader.number("<Q") for _ in range(dims))[::-1]
    elements = 1
    for extent in shape:
        elements *= extent
    if not 0 < elements < 1 << 63:
        raise reader.fail(
            f"{reader.subject} has shape {list(shape)}; every extent must be positive and the product below 2^63"
        )
    form = _format(reader, reader.number("<I"))
    try:
        nbytes = elements // shape[-1] * form.row_bytes(shape[-1])
    except ValueError as error:
        raise reader.fail(f"{reader.subject} has rows that do not fit its type: {error}") from error
    return _Claim(name, shape, form, reader.number("<Q"), nbytes)


def _format(reader: _Reader, kind: int) -> Format | Carrier:
    try:
        return by_gguf_id(kind)
    except TapeoutError as error:
        name = GGML_TYPES.get(kind, "a type that ggml does not list")
        raise reader.fail(f"{reader.subject} has ggml type {kind} ({name}): {error}") from error


def _place(reader: _Reader, claims: list[_Claim], start: int, alignment: int) -> list[TensorInfo]:
    """Give each tensor its absolute offset; none may be misaligned, overlap another or end past the file."""
    size, end, before = len(reader.data), start, ""
    placed: list[TensorInfo] = []
    for claim in sorted(claims, key=lambda claim: claim.offset):
        offset = start + claim.offset
        if claim.offset % alignment:
            raise reader.fail(
                f"tensor {claim.name!r} has offset {claim.offset}; offsets must be multiples of {alignment}"
            )
        if offset < end:
            raise reader.fail(
                f"tensor {claim.name!r} overlaps {before!r} (offset {claim.offset}); each needs bytes of its own"
            )
        if offset + claim.nbytes > size:
            raise reader.fail(
                f"tensor {claim.name!r} ends at byte {offset + claim.nbytes} and the file has {size}; "
                "the file is truncated or damaged: fetch it again"
            )
        end, before = offset + claim.nbytes, claim.name
        placed.append(TensorInfo(claim.name, claim.shape, claim.format.name, reader.file, offset, claim.nbytes))
    return placed
