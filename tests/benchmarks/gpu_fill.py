"""Fills the weights that gpu_skeleton.py left out with random but sane values, digests included. Needs numpy alone.

    python gpu_fill.py SKELETONS OUT [CASE ...]

Matrices get a standard deviation of about 0.02, as a model fresh from its initialisation has; norms are 1 +- 0.1.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

WEIGHTS = "weights/rank0.safetensors"
PAGE = 4096
CHUNK = 8 << 20
BLOCK = 32 << 20
STD = 0.02


@dataclass(frozen=True)
class Span:
    """``nbytes`` of the file from ``offset``, which repeat ``block`` from byte ``phase`` of it on."""

    offset: int
    nbytes: int
    block: Bytes
    phase: int

    def copy(self, start: int, stop: int, out: Bytes) -> None:
        """Bytes [start, stop) of the file into ``out``, as far as the span covers them."""
        at, end = max(start, self.offset), min(stop, self.offset + self.nbytes)
        while at < end:
            place = (self.phase + at - self.offset) % self.block.size
            count = min(end - at, self.block.size - place)
            out[at - start : at - start + count] = self.block[place : place + count]
            at += count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("skeletons", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("cases", nargs="*", metavar="CASE")
    arguments = parser.parse_args()
    found = sorted(path.name.removesuffix(".fill.json") for path in arguments.skeletons.glob("*.fill.json"))
    for name in arguments.cases or found:
        started = time.perf_counter()
        nbytes = fill(arguments.skeletons, arguments.out, name)
        print(f"filled {name}: {nbytes / 1e9:.2f} GB in {time.perf_counter() - started:.1f} s", flush=True)


def fill(skeletons: Path, out: Path, name: str) -> int:
    """Make the artifact ``out / name`` whole, if it is not yet; returns the bytes of its weights file."""
    folder = out / name
    if (folder / WEIGHTS).exists():
        return (folder / WEIGHTS).stat().st_size
    recipe = json.loads((skeletons / f"{name}.fill.json").read_text())
    shutil.copytree(skeletons / name, folder, dirs_exist_ok=True)
    (folder / WEIGHTS).parent.mkdir(exist_ok=True)
    if recipe["weights_of"]:
        fill(skeletons, out, recipe["weights_of"])
        os.link(out / recipe["weights_of"] / WEIGHTS, folder / WEIGHTS)
        entry = next(e for e in _manifest(out / recipe["weights_of"])["files"] if e["path"] == WEIGHTS)
    else:
        entry = _write(folder / WEIGHTS, recipe["weights"])
    manifest = _manifest(folder)
    manifest["files"] = [each for each in manifest["files"] if each["path"] != WEIGHTS] + [entry]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return int(entry["bytes"])


def _manifest(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "manifest.json").read_text())


def _write(path: Path, weights: list[dict[str, Any]]) -> dict[str, Any]:
    """Write an artifact's weights file and return its entry of the manifest."""
    header = _header(weights)
    end = len(header) + max(each["offset"] + each["bytes"] for each in weights)
    blocks = Blocks()
    spans = [Span(0, len(header), np.frombuffer(header, np.uint8), 0)]
    for each in weights:
        spans += blocks.spans(each, len(header) + each["offset"])
    return {"path": WEIGHTS, "bytes": end, "chunk_bytes": CHUNK, "sha256": write_spans(path, spans, end)}


def write_spans(path: Path, spans: list[Span], end: int) -> list[str]:
    """Write a file of ``end`` bytes on all cores, zeros between the spans; returns the digest of every chunk."""
    spans = sorted(spans, key=lambda span: span.offset)
    starts = np.array([span.offset for span in spans])
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.ftruncate(fd, end)

    def chunk(start: int) -> str:
        data = np.zeros(min(CHUNK, end - start), np.uint8)
        first = max(int(np.searchsorted(starts, start, side="right")) - 1, 0)
        last = int(np.searchsorted(starts, start + data.size, side="left"))
        for span in spans[first:last]:
            span.copy(start, start + data.size, data)
        written = 0
        while written < data.size:
            written += os.pwrite(fd, data[written:].data, start + written)
        return hashlib.sha256(data.data).hexdigest()

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        digests = list(pool.map(chunk, range(0, end, CHUNK)))
    os.close(fd)
    return digests


def _header(weights: list[dict[str, Any]]) -> bytes:
    """The safetensors header of an artifact: one U8 tensor a weight, padded so that the data starts on a page."""
    tensors = {
        each["name"]: {"dtype": "U8", "shape": [each["bytes"]],
                       "data_offsets": [each["offset"], each["offset"] + each["bytes"]]}
        for each in weights
    }  # fmt: skip
    text = json.dumps(tensors, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % PAGE)
    return len(text).to_bytes(8, "little") + text


class Blocks:
    """Blocks of random bytes, made once a kind; each weight starts somewhere else in them."""

    def __init__(self) -> None:
        self.made: dict[tuple[Any, ...], Bytes] = {}

    def spans(self, weight: dict[str, Any], at: int) -> list[Span]:
        """What fills one weight that starts at byte ``at`` of the file."""
        seed = zlib.crc32(weight["name"].encode())
        if "values" in weight:
            values = np.array(weight["values"], np.float32).view(np.uint8)
            return [Span(at, values.size, values, 0)]
        count = int(np.prod(weight["shape"]))
        if len(weight["shape"]) == 1:
            values = (1 + 0.1 * np.random.default_rng(seed).uniform(-1, 1, count)).astype(np.float32).view(np.uint8)
            return [Span(at, values.size, values, 0)]
        if "planes" in weight:
            return self._planes(weight["planes"], at, seed)
        size = {"bf16": 2, "f16": 2, "f32": 4}[weight["format"]]
        block = self._get(("normal", weight["format"]), lambda: normal_block(weight["format"]))
        return [Span(at, count * size, block, seed % (block.size // 16) * 16)]

    def _planes(self, planes: dict[str, Any], at: int, seed: int) -> list[Span]:
        spans: list[Span] = []
        for number, code in enumerate(planes["codes"]):
            used = planes["k"] * code["bits"] // 8
            key = ("codes", planes["element"], planes["bits"], used, code["row_bytes"], number)
            block = self._get(key, lambda code=code, used=used: _codes(planes, code, used))
            spans.append(_rows_of(block, at + code["offset"], planes["rows"], code["row_bytes"], seed + number))
        scales = planes["scales"]
        block = self._get(("scales", json.dumps(planes | {"rows": 0, "codes": 0})), lambda: _scales(planes))
        spans.append(_rows_of(block, at + scales["offset"], scales["rows"], scales["row_bytes"], seed))
        return spans

    def _get(self, key: tuple[Any, ...], make: Any) -> Bytes:
        if key not in self.made:
            self.made[key] = make()
        return self.made[key]


def _rows_of(block: Bytes, offset: int, rows: int, row_bytes: int, seed: int) -> Span:
    return Span(offset, rows * row_bytes, block, seed % (block.size // row_bytes) * row_bytes)


def normal_block(format: str) -> Bytes:
    values = np.random.default_rng(1).standard_normal(BLOCK // 2 + 8 * 1021, np.float32) * np.float32(STD)
    if format == "bf16":
        bits = values.view(np.uint32)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16).view(np.uint8)
    return values.astype(np.float16 if format == "f16" else np.float32).view(np.uint8)


def _codes(planes: dict[str, Any], code: dict[str, Any], used: int) -> Bytes:
    rows = max(1, BLOCK // code["row_bytes"]) | 1
    block = np.zeros((rows, code["row_bytes"]), np.uint8)
    random = np.frombuffer(np.random.default_rng(2 + code["low"]).bytes(rows * used), np.uint8).reshape(rows, used)
    if planes["element"] == "e4m3":
        random = (random & 0x80) | (random & 0x7F) % 0x78  # finite, up to 240
    elif planes["bits"] == 8:
        random = np.where(random == 0x80, 0x81, random)  # no format has -128
    block[:, :used] = random
    return block.reshape(-1)


def _scales(planes: dict[str, Any]) -> Bytes:
    """A block of rows of scales. ``d`` is such that values have a standard deviation of about STD and no mean."""
    rng = np.random.default_rng(3)
    scales, k = planes["scales"], planes["k"]
    supers, groups = -(-k // planes["super"]), -(-k // planes["group"])
    rows = max(1, min(BLOCK // scales["row_bytes"], 8192)) | 1
    block = np.zeros((rows, scales["row_bytes"]), np.uint8)
    mean = 2 ** planes["bits"] / 2 - 0.5  # of the codes; those with a zero are centred by it
    sub = 1.0
    if scales["sub"] is not None:
        signed = scales["dmin"] is None
        top = {2: 16, 3: 32}.get(planes["bits"], 64)
        values = rng.integers(-top // 2, top // 2, (rows, groups)) if signed else rng.integers(1, top, (rows, groups))
        sub = float(np.sqrt((values.astype(np.float64) ** 2).mean()))
        _put(block, scales["sub"], values.astype(np.int8))
    width = 240 / 4 if planes["element"] == "e4m3" else 2 ** planes["bits"] / 12**0.5
    d = STD / (width * sub) * rng.uniform(0.7, 1.3, (rows, supers))
    _put(block, scales["d"], _float(d, planes["d_type"]))
    if scales["dmin"] is not None:
        low = 1.0
        if scales["submin"] is not None:
            values = rng.integers(1, 64 if planes["bits"] > 2 else 16, (rows, groups))
            low = float(values.mean())
            _put(block, scales["submin"], values.astype(np.uint8))
        centre = mean * (sub * 0.86 if scales["sub"] is not None else 1.0)
        _put(block, scales["dmin"], (-planes["minimum_sign"] * d * centre / low).astype(np.float16))
    if scales["zeros"] is not None:
        _put(block, scales["zeros"], rng.integers(6, 10, (rows, groups)).astype(np.uint8))
    return block.reshape(-1)


def _float(values: npt.NDArray[np.float64], kind: str) -> npt.NDArray[Any]:
    if kind == "bf16":
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(np.float16 if kind == "f16" else np.float32)


def _put(block: Bytes, at: int, values: npt.NDArray[Any]) -> None:
    raw = np.ascontiguousarray(values).view(np.uint8).reshape(len(block), -1)
    block[:, at : at + raw.shape[1]] = raw


if __name__ == "__main__":
    main()
