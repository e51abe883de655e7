"""Decode matrix-vector kernels of the integer formats on a GPU: correctness, then time of single launches by tile.

``--build`` compiles the kernels for the H200 into ``build/gpu/gemv_formats`` (no GPU needed); without arguments they
run: against float64, then each shape in a chain of dependent launches with weights rotated past the L2. Running needs
numpy and cuda.bindings alone.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
import tarfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from gpu_gemv import ARCH, DEVICE, READS, ROOT, Gpu, Weights, _tapeout, check

BUILT = ROOT / "build" / "gpu" / "gemv_formats" / "gemv_formats.tar.xz"
FORMATS = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k")
FORMATS += ("int4_g32", "int4_g64", "int4_g128", "int4_g128_zp")
WIDE = ("q4_0", "q8_0", "q4_k", "q6_k")
"""Formats that also run with a large head, with M of 2 and 4, and in more tiles."""
Shape = tuple[int, int, int]
GATED, DOWN, OUT, HEAD = (14336, 4096, 2), (4096, 14336, 1), (4096, 4096, 1), (128256, 4096, 0)
TILES = {
    GATED: ((1, 4, 8), (1, 2, 16), (1, 2, 8), (2, 2, 8)),
    DOWN: ((2, 2, 16), (2, 2, 8), (2, 4, 8), (1, 2, 16)),
    OUT: ((1, 4, 8), (2, 2, 16), (2, 2, 8), (1, 2, 16)),
    HEAD: ((2, 4, 8), (2, 2, 16), (4, 2, 8)),
}
"""Rows, steps and warps of a tile by N, K and epilogue."""


class Builder:
    """Kernels to compile by name, and an entry for each use of one."""

    def __init__(self) -> None:
        self.entries: list[dict[str, Any]] = []
        self.kernels: dict[str, Any] = {}

    def add(
        self, shape: tuple[int, int, int], format: str, tile: Sequence[int], m: int, terms: int, case: Any = None
    ) -> None:
        """A kernel to time, or to check on a ``gemv_cases.Case``."""
        from tapeout.compiler.kernels.cuda import gemv

        n, k, epilogue = shape
        tiles, norm = [gemv.Tile(*tile, blocks=1, ring=200_000)], case is not None or shape in (GATED, HEAD)
        options = {"ldx": k, "ldy": n, "eps": 1e-5, "bias": False, "device": DEVICE, "tiles": tiles}
        for made in gemv.candidates(format, n, k, m, epilogue=epilogue, norm=norm, terms=terms, **options):
            self.kernels[made.kernel.name] = made.kernel
            entry = {"name": made.kernel.name, "threads": made.kernel.threads, "shared": made.kernel.shared}
            entry |= {"grid": made.grid[0], "bytes": made.nbytes, "format": format, "shape": shape, "m": m}
            self.entries.append(entry | {"terms": terms, "tile": tile, "case": vars(case) if case else None})

    def compile(self) -> dict[str, bytes]:
        """Cubins by name; prints spills."""
        from tapeout.compiler.kernels.cuda import nvrtc

        with ThreadPoolExecutor(2) as pool:
            cubins = list(pool.map(lambda kernel: nvrtc.compile_cuda(kernel, ARCH), self.kernels.values()))
        for name, cubin in zip(self.kernels, cubins, strict=True):
            if cubin.resources.spill_bytes:
                print("spills", name, cubin.resources.spill_bytes, "bytes")
        return {name: cubin.data for name, cubin in zip(self.kernels, cubins, strict=True)}


def build() -> None:
    """Compile all kernels."""
    _tapeout()
    builder = Builder()
    for i, format in enumerate(FORMATS):
        _add_checks(builder, i, format)
        for shape, tiles in TILES.items():
            if shape != HEAD or format in WIDE:
                _add_times(builder, shape, format, tiles)
    files = {"meta.json": json.dumps(builder.entries).encode(), **builder.compile()}
    BUILT.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(BUILT, "w:xz") as out:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            out.addfile(member, io.BytesIO(data))
    print(f"{len(builder.kernels)} kernels, {BUILT.stat().st_size / 1e6:.1f} MB")


def _add_checks(builder: Builder, index: int, format: str) -> None:
    from gemv_cases import Case

    for steps in (1, 2, 4):
        m, terms = (1, 2, 4)[steps // 2], 1 + steps % 2
        case = Case(format, 300, (5376, 4096)[index % 2], m, index % 4, True, terms=terms)
        builder.add((case.n, case.k, case.epilogue), format, (1, steps, 8), m, terms, case)


def _add_times(
    builder: Builder, shape: tuple[int, int, int], format: str, tiles: Sequence[tuple[int, int, int]]
) -> None:
    wide = format in WIDE
    for tile in tiles[: 4 if wide else 3]:
        builder.add(shape, format, tile, 1, 1)
    for m, terms in ((1, 2), (2, 1), (4, 1), (4, 2))[: 4 if wide else 1]:
        for tile in tiles[: 3 if wide else 2]:
            builder.add(shape, format, tile, m, terms)


def time_all(gpu: Gpu, entries: list[dict[str, Any]]) -> None:
    """Put seconds a launch into every entry."""
    weights = Weights(gpu, 2_000_000_000)
    x, norm, y = (gpu.upload(np.random.default_rng(i).standard_normal(1 << 19).astype(np.float32)) for i in range(3))
    for entry in entries:
        count = max(4, min(24, int(8e8 // entry["bytes"])))

        def record(entry: dict[str, Any] = entry, count: int = count) -> None:
            for _ in range(count):
                gpu.launch(entry, [x, norm, weights.take(entry["bytes"]), 0, y])

        entry["seconds"] = gpu.graph_time(record, 5) / count


def report(entries: list[dict[str, Any]]) -> None:
    """A line for each format, shape, M and terms; tiles as rows, steps, warps, the fastest first."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for entry in entries:
        groups.setdefault((entry["format"], *entry["shape"][:2], entry["m"], entry["terms"]), []).append(entry)
    for (format, n, k, m, terms), group in sorted(groups.items(), key=lambda g: (g[0][3:], g[0][1:3], g[0][0])):
        group.sort(key=lambda e: e["seconds"])
        tiles = "  ".join(
            "r{}s{}w{}".format(*e["tile"][:3]) + f" {e['seconds'] * 1e6:.2f} {e['bytes'] / e['seconds'] / READS:.0%}"
            for e in group
        )
        print(f"{format:12s} {n:6d}x{k:<5d} m{m} t{terms} {group[0]['bytes'] / 1e6:4.0f} MB | {tiles}")


def main() -> None:
    """Build, or run all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", action="store_true")
    if parser.parse_args().build:
        return build()
    _tapeout()
    gpu = Gpu()
    with tarfile.open(BUILT) as archive:
        files = {member.name: archive.extractfile(member).read() for member in archive}  # pyright: ignore[reportOptionalMemberAccess]
    entries = json.loads(files.pop("meta.json"))
    shared = {entry["name"]: entry["shared"] for entry in entries}
    for name, data in files.items():
        gpu.load(name, data, shared[name])
    check(gpu, [entry for entry in entries if entry["case"]])
    timed = [entry for entry in entries if not entry["case"]]
    time_all(gpu, timed)
    report(timed)
    if "OUT" in os.environ:
        (Path(os.environ["OUT"]) / "gemv_formats.json").write_text(json.dumps(timed))


if __name__ == "__main__":
    main()
