"""Safetensors: header parser, and folders of shards with their index as an allow-list.

Format (safetensors README, "Format"): u64 header length, JSON header, data; offsets cover the data without holes.
"""

from __future__ import annotations

import math
import re
from operator import attrgetter
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, TypeGuard, cast

from tapeout.compiler.checkpoints.base import (
    MAX_NAME,
    Checkpoint,
    FileIdentity,
    TensorInfo,
    load_json,
    load_json_object,
    sorted_tensors,
)
from tapeout.compiler.checkpoints.hub import HubFiles
from tapeout.compiler.formats import by_safetensors
from tapeout.runtime.errors import TapeoutError

INDEX = "model.safetensors.index.json"
SHARD = re.compile(r"model-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")
_MOST = 1 << 63
MAX_HEADER = 100_000_000  # the limit of the safetensors library
DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F4": 4,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64,
    "C64": 64,
}  # fmt: skip


class Entry(NamedTuple):
    """One tensor as the header lists it; ``begin`` and ``end`` are absolute byte offsets."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


_PLACE = attrgetter("begin", "end")


def open_safetensors(path: Path) -> Checkpoint:
    """Open a safetensors file, or a folder of them with config.json.

    Raises TapeoutError naming the file, the tensor and the rule, for anything malformed.
    """
    folder = path if path.is_dir() else path.parent
    shards, listed = ([path], None) if path.is_file() else _shards(folder)
    if path.is_file() and (match := SHARD.fullmatch(path.name)) and int(match["count"]) > 1:
        raise TapeoutError(f"{path}: is one of {int(match['count'])} shards; name the folder {folder} instead")
    hub = HubFiles.beside(folder, "a safetensors checkpoint")
    small = [*hub.paths, *(each for each in (folder / INDEX,) if each.is_file())]
    files = tuple(FileIdentity.of(each) for each in sorted([*shards, *small]))
    headers = {shard: read_header(shard) for shard in shards}
    unlisted = _check_owners(headers, folder) if listed is None else _check_listed(headers, listed, folder)
    chosen = headers if listed is None else listed
    return Checkpoint(
        container="safetensors",
        path=path,
        tensors=sorted_tensors(_tensor(shard, headers[shard][name]) for shard in shards for name in chosen[shard]),
        config=hub.read_config(),
        generation_config=hub.read_generation_config(),
        quantization=hub.read_quantization(),
        tokenizer_files=hub.tokenizer,
        unlisted=unlisted,
        files=files,
    )


def _shards(folder: Path) -> tuple[list[Path], dict[Path, list[str]] | None]:
    """The shard files of a folder and, where there is an index, the tensors that it lists for each."""
    if (folder / INDEX).is_file():
        listed = _index(folder)
        return sorted(listed), listed
    found = sorted(folder.glob("*.safetensors"))
    names = [each.name for each in found]
    if names == ["model.safetensors"]:
        return found, None
    count = len(names)
    if names and names == [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]:
        return found, None
    held = "holds no safetensors files" if not names else f"holds {', '.join(names[:8])} without {INDEX}"
    raise TapeoutError(
        f"{folder}: {held}; needed are exactly model.safetensors, "
        f"a complete set model-00001-of-0000N.safetensors, or {INDEX}"
    )


def _index(folder: Path) -> dict[Path, list[str]]:
    path = folder / INDEX
    weight_map = load_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise TapeoutError(f"{path}: has no 'weight_map'; it must map each tensor to its shard file")
    listed: dict[Path, list[str]] = {}
    members: dict[str, list[str]] = {}
    for name, file in cast("dict[str, Any]", weight_map).items():
        known = members.get(file) if isinstance(file, str) else None
        if known is None:  # spellings of one path, as a.safetensors and ./a.safetensors, are one shard
            known = listed.setdefault(_shard(folder, name, file), [])
            members[file] = known
        known.append(name)
    return listed


def _shard(folder: Path, name: str, file: Any) -> Path:
    """The shard that the index assigns a tensor to, which must be there."""
    path = folder / INDEX
    if not isinstance(file, str) or not file or "\0" in file:
        raise TapeoutError(f"{path}: assigns tensor {name!r} to {file!r}; it must be the name of a file")
    parts = PurePosixPath(file).parts
    if file.startswith("/") or "\\" in file or ".." in parts or not parts:
        raise TapeoutError(
            f"{path}: assigns tensor {name!r} to {file!r}, outside the folder; shards must lie inside it"
        )
    if not (folder / file).is_file():
        raise TapeoutError(
            f"{path}: names the shard {file!r}, which is not in the folder; fetch it, or repair the index"
        )
    return folder / file


def _check_owners(headers: dict[Path, dict[str, Entry]], folder: Path) -> tuple[str, ...]:
    """Without an index every tensor stands in one shard, and none is left out."""
    owner: dict[str, Path] = {}
    for shard, header in headers.items():
        for name in header:
            if name in owner:
                raise TapeoutError(
                    f"{folder}: tensor {name!r} stands in {owner[name].name} and in {shard.name}; once is allowed"
                )
            owner[name] = shard
    return ()


def _check_listed(
    headers: dict[Path, dict[str, Entry]], listed: dict[Path, list[str]], folder: Path
) -> tuple[str, ...]:
    """Every shard holds what the index lists for it. The names that no index lists."""
    spare: set[str] = set()
    for shard, names in listed.items():
        header = headers[shard]
        for name in names:
            if name not in header:
                raise TapeoutError(
                    f"{folder / INDEX}: assigns tensor {name!r} to {shard.name}, which does not hold it; "
                    "fetch the shard again, or repair the index"
                )
        spare |= header.keys() - set(names)
    return tuple(sorted(spare.difference(*listed.values())))


def _tensor(shard: Path, entry: Entry) -> TensorInfo:
    try:
        name = by_safetensors(entry.dtype)
    except TapeoutError as error:
        raise TapeoutError(f"{shard}: tensor {entry.name!r} has dtype {entry.dtype}: {error}") from error
    return TensorInfo(entry.name, entry.shape, name, shard, entry.begin, entry.end - entry.begin)


def read_header(path: Path) -> dict[str, Entry]:
    """Every tensor of one safetensors file, by name. Reads the header only.

    Raises TapeoutError unless the tensors cover the data part exactly, each by as many bytes as its shape says.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 10 or not 2 <= length <= min(MAX_HEADER, size - 8):
                raise TapeoutError(
                    f"{path}: claims a header of {length} bytes in a file of {size}; it must fit in the file and in "
                    f"{MAX_HEADER} bytes: the file is truncated or is not safetensors"
                )
            header = load_json(file.read(length), f"{path}: header")
    except OSError as error:
        raise TapeoutError(f"{path}: cannot be read ({error.strerror})") from error
    if not isinstance(header, dict):
        raise TapeoutError(f"{path}: the header is a JSON {type(header).__name__}; it must be an object")
    listed = cast("dict[str, Any]", header)
    listed.pop("__metadata__", None)
    entries = [_entry(path, name, value, 8 + length) for name, value in listed.items()]
    _check_cover(path, entries, 8 + length, size)
    return {entry.name: entry for entry in entries}


def _entry(path: Path, name: str, value: Any, start: int) -> Entry:
    dtype, shape, begin, end = _fields(path, name, value)
    if dtype not in DTYPE_BITS:
        raise TapeoutError(f"{path}: tensor {name!r} has unknown dtype {dtype!r}; known: {', '.join(DTYPE_BITS)}")
    needed = -(-math.prod(shape) * DTYPE_BITS[dtype] // 8)
    if end - begin != needed:
        raise TapeoutError(
            f"{path}: tensor {name!r} of shape {list(shape)} and dtype {dtype} needs {needed} bytes and its offsets "
            f"[{begin}, {end}] give {end - begin}; they must agree"
        )
    return Entry(name, dtype, shape, start + begin, start + end)


def _fields(path: Path, name: str, value: object) -> tuple[str, tuple[int, ...], int, int]:
    if len(name) > MAX_NAME:
        raise TapeoutError(f"{path}: a tensor has a name of {len(name)} characters; names have at most {MAX_NAME}")
    shown: object = value
    if isinstance(value, dict):
        found = cast("dict[str, Any]", value)
        dtype, shape, place = found.get("dtype"), found.get("shape"), found.get("data_offsets")
        if isinstance(dtype, str) and _whole_numbers(shape) and _whole_numbers(place) and len(place) == 2:
            return dtype, tuple(shape), place[0], place[1]
    raise TapeoutError(
        f"{path}: tensor {name!r} is described as {str(shown)[:120]}; needed are dtype, shape and "
        "data_offsets [begin, end] of whole numbers from 0 and below 2^63"
    )


def _whole_numbers(value: Any) -> TypeGuard[list[int]]:
    if not isinstance(value, list):
        return False
    for each in cast("list[Any]", value):  # noqa: SIM110 - a generator takes twice the time, and tensors are many
        if type(each) is not int or not 0 <= each < _MOST:
            return False
    return True


def _check_cover(path: Path, entries: list[Entry], start: int, size: int) -> None:
    at, before = start, "the header"
    for entry in sorted(entries, key=_PLACE):
        if entry.begin != at:
            fault = "overlaps" if entry.begin < at else f"leaves a hole of {entry.begin - at} bytes after"
            raise TapeoutError(
                f"{path}: tensor {entry.name!r} {fault} {before!r}; tensors must follow each other without gaps"
            )
        at, before = entry.end, entry.name
        if at > size:
            raise TapeoutError(
                f"{path}: tensor {entry.name!r} ends at byte {at} and the file has {size}; "
                "the file is truncated: fetch it again"
            )
    if at != size:
        raise TapeoutError(
            f"{path}: has {size - at} bytes after the last tensor; nothing may follow it: the file is damaged"
        )
