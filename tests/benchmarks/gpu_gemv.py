"""Decode matrix-vector kernels on a GPU: correctness of every format, time a launch, and whole decode steps.

``--build`` compiles the kernels for the H200 into ``build/gpu/gemv`` (no GPU needed); without arguments they run: first
against float64, then each shape alone (weights rotated past the L2) with and without programmatic dependent launch,
then the linear layers of a model back to back. Running needs numpy and cuda.bindings alone.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
BUILT = ROOT / "build" / "gpu" / "gemv" / "gemv.zip"
ARCH = "sm_90"
DEVICE = SimpleNamespace(sm_count=132, shared_per_block=232_448)
READS = 4.49e12
SHAPES_8B = ((4096, 4096, 1, 0), (6144, 4096, 0, 1), (14336, 4096, 2, 1), (4096, 14336, 1, 0), (128256, 4096, 0, 1))
SHAPES_1B = ((2048, 2048, 1, 0), (3072, 2048, 0, 1), (8192, 2048, 2, 1), (2048, 8192, 1, 0), (128256, 2048, 0, 1))
"""Output columns, K, epilogue, norm."""
OTHERS = ("f16", "fp8", "int4_g128", "q8_0", "q4_k", "q5_k", "q6_k")


def _tapeout() -> None:
    """Make ``tapeout`` importable where it is not installed."""
    try:
        import tapeout.compiler.layouts  # noqa: F401
    except ImportError:
        folder = Path(tempfile.mkdtemp()) / "tapeout"
        folder.mkdir()
        for name in ("compiler", "runtime", "passes"):
            (folder / name).symlink_to(ROOT / name)
        sys.path.insert(0, str(folder.parent))
    sys.path.insert(0, str(ROOT / "tests" / "unit"))


# ---- build ----


def build() -> None:
    """Compile all kernels; prints registers and spills where there are any."""
    _tapeout()
    from tapeout.compiler.kernels.cuda import gemv, nvrtc
    from tapeout.compiler.kernels.cuda.base import GpuKernel, Param

    entries: list[dict[str, Any]] = []
    cubins: dict[str, bytes] = {}

    def add(purpose: str, candidate: Any, **facts: Any) -> None:
        kernel = candidate.kernel
        if kernel.name not in cubins:
            cubin = nvrtc.compile_cuda(kernel, ARCH)
            cubins[kernel.name] = cubin.data
            if cubin.resources.spill_bytes:
                print("spills", kernel.name, cubin.resources)
        shape = {
            "threads": kernel.threads,
            "shared": kernel.shared,
            "grid": candidate.grid[0],
            "bytes": candidate.nbytes,
        }
        entries.append({"purpose": purpose, "name": kernel.name, **shape, **facts})

    def made(
        format: str, n: int, k: int, m: int, epilogue: int, norm: int, tiles: Any = None, **more: Any
    ) -> list[Any]:
        options = {"ldx": k, "ldy": n, "eps": 1e-5, "bias": False, "terms": 1, "device": DEVICE} | more
        return gemv.candidates(format, n, k, m, epilogue=epilogue, norm=bool(norm), tiles=tiles, **options)

    for case in _cases():
        options = {"ldx": case.k + case.pad, "ldy": case.n + case.pad, "bias": case.bias, "terms": case.terms}
        tiles = [gemv.Tile(*case.tile)] if case.tile else None
        found = made(case.format, case.n, case.k, case.m, case.epilogue, case.norm, tiles, **options)
        add("check", found[0], case=vars(case))
    for format, shapes in (("q4_0", SHAPES_8B), ("bf16", SHAPES_1B), ("bf16", SHAPES_8B[:4])):
        for n, k, epilogue, norm in shapes:
            rows = (1, 2) if epilogue >= 2 else (1, 2, 4)
            grid = [(r, s, w, b) for r in rows for s in (1, 2) for w, b in ((8, 1), (16, 1), (8, 2))]
            if k > 8192 and format == "bf16":
                grid = [t for t in grid if t[3] == 1]
            tiles = [gemv.Tile(*t) for t in grid] + [gemv.Tile(r, 2, 16, 1, 200_000) for r in rows]
            for candidate in made(format, n, k, 1, epilogue, norm, tiles):
                add("time", candidate, format=format, n=n, k=k, m=1, epilogue=epilogue, default=False)
            for candidate in made(format, n, k, 1, epilogue, norm)[:1]:
                add("time", candidate, format=format, n=n, k=k, m=1, epilogue=epilogue, default=True)
    for format in OTHERS:
        for n, k, epilogue, norm in (SHAPES_8B[0], *SHAPES_8B[2:4]):
            for candidate in made(format, n, k, 1, epilogue, norm):
                add("time", candidate, format=format, n=n, k=k, m=1, epilogue=epilogue, default=True)
    for format in ("q4_0", "bf16"):
        for m, terms in ((1, 2), (2, 1), (4, 1)):
            for n, k, epilogue, norm in (SHAPES_8B[0], *SHAPES_8B[2:4]):
                for candidate in made(format, n, k, m, epilogue, norm, terms=terms):
                    add("time", candidate, format=format, n=n, k=k, m=m, epilogue=epilogue, default=True, terms=terms)
    stand_in = GpuKernel("stand_in", "x", "cuda", "gpu_stand_in.cu", (Param("qkv"), Param("out")), (), 128)
    cubins["stand_in"] = nvrtc.compile_cuda(stand_in, ARCH, Path(__file__).parent).data
    BUILT.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(BUILT, "w", zipfile.ZIP_DEFLATED) as out:
        out.writestr("meta.json", json.dumps(entries))
        for name, data in cubins.items():
            out.writestr(name, data)
    print(f"{len(cubins)} kernels, {BUILT.stat().st_size / 1e6:.1f} MB")


def _cases() -> list[Any]:
    from gemv_cases import Case

    from tapeout.compiler.formats import FORMATS

    return [
        *(Case(f, 1500, 2816, m=1 + i % 2, norm=bool(i % 2), bias=bool(i % 3)) for i, f in enumerate(FORMATS)),
        *(Case(f, 700, 4096, m=4, epilogue=i % 4, norm=True, pad=4) for i, f in enumerate(FORMATS)),
        *(Case(f, 1059, 768, epilogue=2, terms=1) for f in ("q4_0", "q6_k", "q8_0", "int4_g128_zp")),
        Case("q4_0", 2048, 14336, epilogue=1),
        Case("bf16", 37, 576, m=4, epilogue=1),
        Case("bf16", 600, 14336, m=4),
        Case("f32", 1111, 1016, norm=True),
    ]


# ---- run ----


class Gpu:
    """The driver calls that this script needs."""

    def __init__(self) -> None:
        from cuda.bindings import driver

        self.cu = driver
        self.call("cuInit", 0)
        device = self.call("cuDeviceGet", 0)
        self.call("cuCtxSetCurrent", self.call("cuDevicePrimaryCtxRetain", device))
        self.stream = self.call("cuStreamCreate", 1)
        self.events = [self.call("cuEventCreate", 0) for _ in range(2)]
        self.functions: dict[str, Any] = {}

    def call(self, name: str, *arguments: Any) -> Any:
        """Call the driver; raises RuntimeError with the call's name."""
        status, *result = getattr(self.cu, name)(*arguments)
        if status != self.cu.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{name}: {status}")
        return result[0] if len(result) == 1 else result

    def load(self, name: str, data: bytes, shared: int) -> None:
        """Load a cubin's function."""
        function = self.call("cuModuleGetFunction", self.call("cuModuleLoadData", data), name.encode())
        if shared > 48_000:
            attribute = self.cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self.call("cuFuncSetAttribute", function, attribute, shared)
        carveout = self.cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
        self.call("cuFuncSetAttribute", function, carveout, 100)
        self.functions[name] = function

    def launch(self, entry: dict[str, Any], pointers: list[int], pdl: bool = True) -> None:
        """Launch a kernel whose arguments are all pointers."""
        cu, config = self.cu, self.cu.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = entry["grid"], 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = entry["threads"], 1, 1
        config.sharedMemBytes, config.hStream = entry["shared"], self.stream
        if pdl:
            attribute, value = cu.CUlaunchAttribute(), cu.CUlaunchAttributeValue()
            attribute.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            value.programmaticStreamSerializationAllowed = 1
            attribute.value = value
            config.attrs, config.numAttrs = [attribute], 1
        arguments = (tuple(pointers), (ctypes.c_void_p,) * len(pointers))
        self.call("cuLaunchKernelEx", config, self.functions[entry["name"]], arguments, 0)

    def alloc(self, nbytes: int) -> int:
        """Device memory."""
        return int(self.call("cuMemAlloc", nbytes))

    def upload(self, array: Any) -> int:
        """A copy of an array in device memory."""
        array = np.ascontiguousarray(array)
        pointer = self.alloc(array.nbytes)
        self.call("cuMemcpyHtoD", pointer, array.ctypes.data, array.nbytes)
        return pointer

    def graph_time(self, record: Callable[[], None], repeats: int = 7) -> float:
        """Median seconds of one replay of what ``record`` launches."""
        mode = self.cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self.call("cuStreamBeginCapture", self.stream, mode)
        record()
        graph = self.call("cuStreamEndCapture", self.stream)
        ready = self.call("cuGraphInstantiate", graph, 0)
        times: list[float] = []
        for i in range(repeats + 2):
            self.call("cuEventRecord", self.events[0], self.stream)
            self.call("cuGraphLaunch", ready, self.stream)
            self.call("cuEventRecord", self.events[1], self.stream)
            self.call("cuEventSynchronize", self.events[1])
            if i >= 2:
                times.append(self.call("cuEventElapsedTime", *self.events) * 1e-3)
        self.call("cuGraphExecDestroy", ready)
        self.call("cuGraphDestroy", graph)
        return sorted(times)[len(times) // 2]


def check(gpu: Gpu, entries: list[dict[str, Any]]) -> None:
    """Every case against float64."""
    from gemv_cases import Case, arrays_of, error

    worst: list[tuple[float, str]] = []
    for entry in entries:
        case = Case(**entry["case"])
        arrays = arrays_of(case, seed=3)
        pointers = [gpu.upload(arrays[name]) for name in ("x", "norm", "w", "bias", "y")]
        gpu.launch(entry, pointers)
        gpu.call("cuStreamSynchronize", gpu.stream)
        y = np.empty_like(arrays["y"])
        gpu.call("cuMemcpyDtoH", y.ctypes.data, pointers[4], y.nbytes)
        ratio = error(case, y, arrays["reference"]) / case.tolerance
        worst.append((math.inf if math.isnan(ratio) else ratio, entry["name"]))
        for pointer in pointers:
            gpu.call("cuMemFree", pointer)
    bad = [f"{name} {ratio:.2g}" for ratio, name in worst if not ratio < 1]
    print(f"correctness: {len(worst)} cases, largest error / tolerance {max(worst)[0]:.2f} ({max(worst)[1]})")
    if bad:
        sys.exit("WRONG: " + "; ".join(bad))


class Weights:
    """A large buffer of random bytes whose 16-bit words are finite and small as f16 and as bf16."""

    def __init__(self, gpu: Gpu, nbytes: int) -> None:
        self.size = nbytes
        self.base = gpu.alloc(nbytes)
        self.at = 0
        piece = np.random.default_rng(0).integers(0, 1 << 16, 1 << 25, np.uint16) & 0xBFFF
        gpu.call("cuMemcpyHtoD", self.base, piece.ctypes.data, piece.nbytes)
        done = piece.nbytes
        while done < nbytes:
            step = min(done, nbytes - done)
            gpu.call("cuMemcpyDtoD", self.base + done, self.base, step)
            done += step

    def take(self, nbytes: int) -> int:
        """The next place, around the end."""
        nbytes = -(-nbytes // 4096) * 4096
        if self.at + nbytes > self.size:
            self.at = 0
        self.at += nbytes
        return self.base + self.at - nbytes


def time_all(gpu: Gpu, entries: list[dict[str, Any]], weights: Weights, buffers: list[int]) -> list[dict[str, Any]]:
    """Seconds a launch of every kernel, plain and with dependent launch; results behind one another."""
    x, norm, y = buffers[:3]
    for entry in entries:
        count = max(4, int(5e8 // entry["bytes"]))
        for key, pdl in (("plain", False), ("pdl", True)):

            def record(entry: dict[str, Any] = entry, pdl: bool = pdl, count: int = count) -> None:
                for _ in range(count):
                    gpu.launch(entry, [x, norm, weights.take(entry["bytes"]), 0, y], pdl)

            entry[key] = gpu.graph_time(record) / count
    return entries


def report(entries: list[dict[str, Any]]) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Print the best and the default configuration of each shape; returns the best by shape."""
    shapes: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for entry in entries:
        key = (entry["format"], entry["n"], entry["k"], entry["m"], entry.get("terms", 1))
        shapes.setdefault(key, []).append(entry)
    best: dict[tuple[Any, ...], dict[str, Any]] = {}
    for key, group in shapes.items():
        group.sort(key=lambda e: e["pdl"])
        best[key] = group[0]
        show = group[:2] + [e for e in group[2:] if e["default"]]
        text = "  ".join(
            f"{e['name'].rsplit('_', 1)[1]}{'*' if e['default'] else ''} {e['plain'] * 1e6:.2f} {e['pdl'] * 1e6:.2f}"
            f" {e['bytes'] / e['pdl'] / READS:.0%}"
            for e in show
        )
        print(f"{key[0]:9s} {key[1]:6d}x{key[2]:<5d} m{key[3]} t{key[4]} {group[0]['bytes'] / 1e6:5.0f} MB | {text}")
    return best


def chain(
    gpu: Gpu, title: str, kernels: list[dict[str, Any]], layers: int, weights: Weights, buffers: list[int]
) -> None:
    """The linear layers of a decode step in one graph: qkv, attention's stand-in, o, gate and up, down; the head."""
    hidden, norm, qkv, attended, gated, logits = buffers
    out, qkv_k, gate_up, down, head = kernels
    stand_in = {"name": "stand_in", "grid": out["k"] // 128, "threads": 128, "shared": 0}

    def record(attention: bool) -> None:
        for _ in range(layers):
            gpu.launch(qkv_k, [hidden, norm, weights.take(qkv_k["bytes"]), 0, qkv])
            if attention:
                gpu.launch(stand_in, [qkv, attended])
            gpu.launch(out, [attended, norm, weights.take(out["bytes"]), 0, hidden])
            gpu.launch(gate_up, [hidden, norm, weights.take(gate_up["bytes"]), 0, gated])
            gpu.launch(down, [gated, norm, weights.take(down["bytes"]), 0, hidden])
        gpu.launch(head, [hidden, norm, weights.take(head["bytes"]), 0, logits])

    moved = sum(e["bytes"] for e in kernels[:4]) * layers + head["bytes"]
    alone = sum(e["pdl"] for e in kernels[:4]) * layers + head["pdl"]
    for attention in (True, False):
        seconds = gpu.graph_time(lambda attention=attention: record(attention))
        what = "with stand-in" if attention else "no attention "
        print(f"{title} {what}: {seconds * 1e6:.0f} us, {1 / seconds:.0f} tok/s, {moved / seconds / READS:.1%} of reads"
              f" (sum of launches {alone * 1e6:.0f} us)")  # fmt: skip


def main() -> None:
    """Build, or run all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", action="store_true")
    if parser.parse_args().build:
        return build()
    _tapeout()
    gpu = Gpu()
    with zipfile.ZipFile(BUILT) as archive:
        entries = json.loads(archive.read("meta.json"))
        shared = {entry["name"]: entry["shared"] for entry in entries}
        for name in archive.namelist():
            if name != "meta.json":
                gpu.load(name, archive.read(name), shared.get(name, 0))
    check(gpu, [e for e in entries if e["purpose"] == "check"])
    weights = Weights(gpu, 5_000_000_000)
    buffers = [gpu.upload(np.random.default_rng(i).standard_normal(1 << 18).astype(np.float32)) for i in range(6)]
    timed = time_all(gpu, [e for e in entries if e["purpose"] == "time"], weights, buffers)
    best = report(timed)
    defaults = {
        (e["format"], e["n"], e["k"]): e for e in timed if e["default"] and e["m"] == 1 and e.get("terms", 1) == 1
    }
    for title, format, shapes, layers in (("8B q4_0", "q4_0", SHAPES_8B, 32), ("1B bf16", "bf16", SHAPES_1B, 16)):
        fastest = [best[format, n, k, 1, 1] for n, k, _, _ in shapes]
        chain(gpu, f"{title} best   ", fastest, layers, weights, buffers)
        chain(gpu, f"{title} default", [defaults[format, n, k] for n, k, _, _ in shapes], layers, weights, buffers)
    if "OUT" in os.environ:
        (Path(os.environ["OUT"]) / "gemv.json").write_text(json.dumps(timed))


if __name__ == "__main__":
    main()
