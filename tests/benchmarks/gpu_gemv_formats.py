"""Decode matrix-vector kernels of the integer formats on a GPU: correctness, then time of single launches by tile.

``--build`` compiles the kernels for the H200 into ``build/gpu/gemv_formats`` (no GPU needed); without arguments they
run: against float64, then each shape in a chain of dependent launches with weights rotated past the L2. Running needs
numpy and cuda.bindings alone.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from gpu_gemv import (
    ROOT,
    Builder,
    Gpu,
    Weights,
    _tapeout,
    by_shape,
    candidates,
    check,
    load,
    random_words,
    report,
    seconds,
)

BUILT = ROOT / "build" / "gpu" / "gemv_formats" / "gemv_formats.tar.xz"
FORMATS = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k")
FORMATS += ("int4_g32", "int4_g64", "int4_g128", "int4_g128_zp")
WIDE = ("q4_0", "q8_0", "q4_k", "q6_k")
"""Formats that also run with a large head, and with M of 2 and 4."""
Shape = tuple[int, int, int]
GATED, DOWN, OUT, HEAD = (14336, 4096, 2), (4096, 14336, 1), (4096, 4096, 1), (128256, 4096, 0)
TILES = {
    GATED: ((1, 1, 16), (1, 2, 16), (1, 2, 8)),
    DOWN: ((1, 2, 16), (1, 1, 16), (2, 1, 16)),
    OUT: ((1, 2, 16), (1, 1, 16), (2, 1, 16)),
    HEAD: ((2, 1, 16), (1, 2, 16), (2, 2, 8)),
}
"""Rows, steps and warps of a tile by N, K and epilogue."""


def build() -> None:
    """Compile all kernels."""
    _tapeout()
    builder = Builder()
    for i, format in enumerate(FORMATS):
        _add_checks(builder, i, format)
        for shape, tiles in TILES.items():
            if shape != HEAD or format in WIDE:
                _add_times(builder, shape, format, tiles)
    builder.write(BUILT)


def _add(builder: Builder, shape: Shape, format: str, tile: Sequence[int], m: int, case: Any = None) -> None:
    """A kernel to time, or to check on a ``gemv_cases.Case``."""
    from tapeout.compiler.kernels.cuda import gemv

    n, k, epilogue = shape
    norm = case.norm if case else shape in (GATED, HEAD)
    types = {"x": case.x, "y": case.y} if case else {}
    facts = {"format": format, "n": n, "k": k, "epilogue": epilogue, "m": m}
    for found in candidates(format, n, k, m, epilogue, norm, [gemv.Tile(*tile)], **types):
        builder.add(found, label="r{}s{}w{}".format(*tile), case=vars(case) if case else None, **facts)


def _add_checks(builder: Builder, index: int, format: str) -> None:
    from gemv_cases import Case

    for steps in (1, 2, 4):
        m, y = (1, 2, 4)[steps // 2], "bf16" if index % 4 >= 2 else "f32"
        case = Case(format, 300, (5376, 4096)[index % 2], m, index % 4, norm=True, y=y)
        _add(builder, (case.n, case.k, case.epilogue), format, (1, steps, 8), m, case)


def _add_times(builder: Builder, shape: Shape, format: str, tiles: Sequence[Sequence[int]]) -> None:
    wide = format in WIDE
    for m in (1, 2, 4) if wide else (1,):
        for tile in tiles:
            _add(builder, shape, format, tile, m)


def time_all(gpu: Gpu, entries: list[dict[str, Any]]) -> None:
    """Put seconds a launch into every entry."""
    weights = Weights(gpu, 2_000_000_000)
    buffers = [gpu.upload(random_words(1 << 20, seed)) for seed in range(3)]
    for entry in entries:
        count = max(4, min(24, int(8e8 // entry["bytes"])))
        entry["pdl"] = seconds(gpu, entry, weights, buffers, count, repeats=5)


def main() -> None:
    """Build, or run all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", action="store_true")
    if parser.parse_args().build:
        return build()
    _tapeout()
    gpu = Gpu()
    entries = load(gpu, BUILT)
    check(gpu, [entry for entry in entries if entry["case"]])
    timed = [entry for entry in entries if not entry["case"]]
    time_all(gpu, timed)
    for key, found in sorted(by_shape(timed).items(), key=lambda group: (group[0][3:], group[0][1:3], group[0][0])):
        report(key, found)
    if "OUT" in os.environ:
        (Path(os.environ["OUT"]) / "gemv_formats.json").write_text(json.dumps(timed))


if __name__ == "__main__":
    main()
