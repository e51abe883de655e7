"""Decode matrix-vector kernels of the integer formats on a GPU: correctness, then time, by tile and among others.

``--build`` compiles the kernels for the H200 into ``build/gpu/gemv_formats`` (no GPU needed); without arguments they
run, always with weights rotated past the L2: against float64; then each shape in a chain of launches of itself, for
every tile; then the products of a layer (qkv, o, gate and up, down) behind one another, each reading what the one before
wrote. Those have the compiler's tile, which takes half of a multiprocessor (with M of 2 and 4 more registers than that),
and a product costs there what the chain takes more than the one without it. Running needs numpy and cuda.bindings alone.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from gpu_gemv import (
    ARCH,
    READS,
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
QKV = (6144, 4096, 0)
LAYER = (QKV, OUT, GATED, DOWN)
LAYERS = 16
"""Repetitions of the layer in a chain: enough for the launch of the graph to count for little."""
TILES = {
    GATED: ((1, 1, 16), (1, 2, 16), (1, 2, 8)),
    DOWN: ((1, 2, 16), (1, 1, 16), (2, 1, 16)),
    OUT: ((1, 2, 16), (1, 1, 16), (2, 1, 16)),
    HEAD: ((2, 1, 16), (1, 2, 16), (2, 2, 8)),
}
"""Rows, steps and warps of a tile by N, K and epilogue; the compiler's own choice is added for those of the layer."""


def build() -> None:
    """Compile all kernels."""
    _tapeout()
    builder = Builder()
    for i, format in enumerate(FORMATS):
        _add_checks(builder, i, format)
        for shape, tiles in TILES.items():
            if shape != HEAD or format in WIDE:
                _add_times(builder, shape, format, tiles)
        for shape in LAYER:
            _add_times(builder, shape, format, [()])
    builder.write(BUILT)


def _add(builder: Builder, shape: Shape, format: str, tile: Sequence[int], m: int, case: Any = None) -> None:
    """A kernel to time, of the compiler's tile if ``tile`` is empty, or to check on a ``gemv_cases.Case``."""
    from tapeout.compiler.kernels.cuda import gemv, nvrtc

    n, k, epilogue = shape
    norm = case.norm if case else shape in (QKV, GATED, HEAD)
    types = {"x": case.x, "y": case.y} if case else {"y": "bf16"} if shape == QKV else {}  # the next product reads it
    facts = {"format": format, "n": n, "k": k, "epilogue": epilogue, "m": m, "default": not tile}
    found = candidates(format, n, k, m, epilogue, norm, [gemv.Tile(*tile)] if tile else None, **types)
    if not tile:  # as the compiler chooses: the first that does not spill
        fits = (one for one in found if not nvrtc.compile_cuda(one.kernel, ARCH).resources.spill_bytes)
        found = [next(fits)]
    for one in found[:1]:
        label = "r{}s{}w{}".format(*tile) if tile else one.kernel.name.rsplit("_", 1)[1] + "*"
        builder.add(one, label=label, case=vars(case) if case else None, **facts)


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


def time_all(gpu: Gpu, entries: list[dict[str, Any]], weights: Weights, buffers: list[int]) -> None:
    """Put seconds a launch into every entry, behind launches of the same kernel."""
    for entry in entries:
        count = max(4, min(24, int(8e8 // entry["bytes"])))
        entry["pdl"] = seconds(gpu, entry, weights, buffers, count, repeats=5)


def time_layer(gpu: Gpu, layer: list[dict[str, Any]], weights: Weights, buffers: list[int]) -> float:
    """Seconds of one layer, and into every entry what its launch adds to the others of the layer (``chain``)."""
    norm, hidden, attended, gated = buffers
    places = {QKV: (hidden, attended), OUT: (attended, hidden), GATED: (hidden, gated), DOWN: (gated, hidden)}

    def record(products: list[dict[str, Any]]) -> None:
        for _ in range(LAYERS):
            for each in products:
                x, y = places[each["n"], each["k"], each["epilogue"]]
                gpu.launch(each, [x, norm, weights.take(each["bytes"]), 0, y])

    def measured(products: list[dict[str, Any]]) -> float:
        return gpu.graph_time(lambda: record(products)) / LAYERS

    whole = measured(layer)
    for one in layer:
        one["chain"] = whole - measured([each for each in layer if each is not one])
    return whole


def report_layer(layer: list[dict[str, Any]], whole: float) -> None:
    """Print a line: the layer's us and part of the reads, then those of each product in it."""
    parts = [(f"{e['n']}x{e['k']} {e['bytes'] / 1e6:.0f} MB", e["bytes"], e["chain"]) for e in layer]
    parts.insert(0, ("layer", sum(e["bytes"] for e in layer), whole))
    texts = [f"{title} {seconds * 1e6:.2f} {nbytes / seconds / READS:.0%}" for title, nbytes, seconds in parts]
    print(f"{layer[0]['format']:12s} m{layer[0]['m']} among others | {'  '.join(texts)}", flush=True)


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
    weights = Weights(gpu, 2_000_000_000)
    buffers = [gpu.upload(random_words(1 << 20, seed)) for seed in range(4)]
    time_all(gpu, timed, weights, buffers)
    for key, found in sorted(by_shape(timed).items(), key=lambda group: (group[0][3:], group[0][1:3], group[0][0])):
        report(key, found)
    layers: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    for entry in timed:
        if entry["default"]:
            layers[entry["format"], entry["m"]].append(entry)
    for layer in layers.values():
        report_layer(layer, time_layer(gpu, layer, weights, buffers))
    if "OUT" in os.environ:
        (Path(os.environ["OUT"]) / "gemv_formats.json").write_text(json.dumps(timed))


if __name__ == "__main__":
    main()
