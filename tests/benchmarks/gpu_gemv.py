"""Decode matrix-vector kernels on a GPU: correctness of every format, time a launch, and whole decode steps.

``--build`` compiles the kernels for the H200 into ``build/gpu/gemv`` (no GPU needed); without arguments they run: first
against float64, then each shape alone (weights rotated past the L2) with and without programmatic dependent launch,
then the linear layers of a model back to back. Running needs numpy and cuda.bindings alone.
"""

from __future__ import annotations

import argparse
import ctypes
import io
import json
import math
import os
import sys
import tarfile
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
BUILT = ROOT / "build" / "gpu" / "gemv" / "gemv.tar.xz"
ARCH = "sm_90"
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
        for name in ("compiler", "runtime", "passes", "specs"):
            (folder / name).symlink_to(ROOT / name)
        sys.path.insert(0, str(folder.parent))
    sys.path.insert(0, str(ROOT / "tests" / "unit"))


# ---- build ----


def candidates(
    format: str, n: int, k: int, m: int, epilogue: int, norm: int, tiles: Any = None, **more: Any
) -> list[Any]:
    """What ``gemv`` offers an H200 for a product of m rows, dense and without a bias unless ``more`` says otherwise.

    As in a model, what is normalised on the way is f32, and what one product passes to the next is bf16.
    """
    from tapeout.compiler.devices import load_device
    from tapeout.compiler.kernels.cuda import gemv

    options = {"ldx": k, "ldy": n, "eps": 1e-5, "bias": False, "device": load_device("h200")}
    options |= {"x": "f32" if norm else "bf16", "y": "bf16" if epilogue >= 2 else "f32"} | more
    return gemv.candidates(format, n, k, m, epilogue=epilogue, norm=bool(norm), tiles=tiles, **options)


class Builder:
    """Kernels to compile by name, and an entry for each use of one."""

    def __init__(self) -> None:
        self.entries: list[dict[str, Any]] = []
        self.kernels: dict[str, Any] = {}

    def add(self, candidate: Any, **facts: Any) -> None:
        """A use of a kernel, and what the run has to know of it."""
        kernel = candidate.kernel
        self.kernels[kernel.name] = kernel
        entry = {"name": kernel.name, "threads": kernel.threads, "shared": kernel.shared}
        self.entries.append(entry | {"grid": candidate.grid[0], "bytes": candidate.nbytes, **facts})

    def write(self, path: Path, **others: bytes) -> None:
        """Compile all and write them, with ``others`` that are compiled already; prints spills."""
        from tapeout.compiler.kernels.cuda import nvrtc

        with ThreadPoolExecutor(2) as pool:
            cubins = list(pool.map(lambda kernel: nvrtc.compile_cuda(kernel, ARCH), self.kernels.values()))
        for name, cubin in zip(self.kernels, cubins, strict=True):
            if cubin.resources.spill_bytes:
                print("spills", name, cubin.resources.spill_bytes, "bytes")
        found = {name: cubin.data for name, cubin in zip(self.kernels, cubins, strict=True)} | others
        path.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(path, "w:xz") as out:
            for name, data in {"meta.json": json.dumps(self.entries).encode(), **found}.items():
                member = tarfile.TarInfo(name)
                member.size = len(data)
                out.addfile(member, io.BytesIO(data))
        print(f"{len(found)} kernels, {path.stat().st_size / 1e6:.1f} MB")


def build() -> None:
    """Compile all kernels."""
    _tapeout()
    from tapeout.compiler.devices import load_device
    from tapeout.compiler.kernels.cuda import gemv, nvrtc
    from tapeout.compiler.kernels.cuda.base import GpuKernel, Param

    builder, device = Builder(), load_device("h200")

    def add(format: str, shape: tuple[int, ...], m: int = 1, tiles: Any = None) -> None:
        facts = {"format": format, "n": shape[0], "k": shape[1], "epilogue": shape[2], "m": m, "default": not tiles}
        for one in candidates(format, shape[0], shape[1], m, shape[2], shape[3], tiles)[: None if tiles else 1]:
            whole = "+" * (one.kernel.shared > device.half_shared)
            label = one.kernel.name.rsplit("_", 1)[1] + whole + "*" * (not tiles)
            builder.add(one, purpose="time", label=label, **facts)

    for case in _cases():
        options = {"ldx": case.k + case.pad, "ldy": case.n + case.pad, "bias": case.bias, "x": case.x, "y": case.y}
        tiles = [gemv.Tile(*case.tile)] if case.tile else None
        found = candidates(case.format, case.n, case.k, case.m, case.epilogue, case.norm, tiles, **options)
        builder.add(found[0], purpose="check", case=vars(case))
    for format, shapes in (("q4_0", SHAPES_8B), ("bf16", SHAPES_1B), ("bf16", SHAPES_8B[:4])):
        for shape in shapes:
            tiles = [gemv.Tile(r, s, w) for r in (1, 2) for s in (1, 2) for w in (8, 16)]
            tiles += [gemv.Tile(r, 1, 16, device.shared_per_block) for r in (1, 2)]
            add(format, shape, tiles=tiles)
            add(format, shape)
    for shape in (SHAPES_8B[0], *SHAPES_8B[2:4]):
        for format in OTHERS:
            add(format, shape)
        for format in ("q4_0", "bf16"):
            for m in (2, 4):
                add(format, shape, m)
    stand_in = GpuKernel("stand_in", "x", "cuda", "gpu_stand_in.cu", (Param("qkv"), Param("out")), (), 128)
    builder.write(BUILT, stand_in=nvrtc.compile_cuda(stand_in, ARCH, Path(__file__).parent).data)


def _cases() -> list[Any]:
    from gemv_cases import Case

    from tapeout.compiler.formats import FORMATS

    return [
        *(Case(f, 1500, 2816, m=1 + i % 2, norm=bool(i % 2), bias=bool(i % 3)) for i, f in enumerate(FORMATS)),
        *(Case(f, 700, 4096, m=4, epilogue=i % 4, norm=True, pad=4) for i, f in enumerate(FORMATS)),
        *(Case(f, 1059, 768, epilogue=2, y="bf16") for f in ("q4_0", "q6_k", "q8_0", "int4_g128_zp")),
        Case("q4_0", 2048, 14336, epilogue=1, x="bf16"),
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


def load(gpu: Gpu, path: Path) -> list[dict[str, Any]]:
    """Load what a Builder wrote; returns its entries."""
    with tarfile.open(path) as archive:
        files = {member.name: archive.extractfile(member).read() for member in archive}  # pyright: ignore[reportOptionalMemberAccess]
    entries = json.loads(files.pop("meta.json"))
    shared: dict[str, int] = {}
    for entry in entries:
        shared[entry["name"]] = max(entry["shared"], shared.get(entry["name"], 0))
    for name, data in files.items():
        gpu.load(name, data, shared.get(name, 0))
    return entries


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


def random_words(count: int, seed: int = 0) -> Any:
    """16-bit words that are finite and small as f16 and as bf16, and pairs of them as f32."""
    return np.random.default_rng(seed).integers(0, 1 << 16, count, np.uint16) & 0xBFFF


class Weights:
    """A large buffer of random words."""

    def __init__(self, gpu: Gpu, nbytes: int) -> None:
        self.size = nbytes
        self.base = gpu.alloc(nbytes)
        self.at = 0
        piece = random_words(1 << 25)
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


def seconds(
    gpu: Gpu,
    entry: dict[str, Any],
    weights: Weights,
    buffers: list[int],
    count: int,
    pdl: bool = True,
    repeats: int = 7,
) -> float:
    """Seconds a launch, of ``count`` behind one another, each with other weights."""
    x, norm, y = buffers[:3]

    def record() -> None:
        for _ in range(count):
            gpu.launch(entry, [x, norm, weights.take(entry["bytes"]), 0, y], pdl)

    return gpu.graph_time(record, repeats) / count


def time_all(gpu: Gpu, entries: list[dict[str, Any]], weights: Weights, buffers: list[int]) -> None:
    """Put seconds a launch into every entry, plain and with dependent launch."""
    for entry in entries:
        count = max(4, int(5e8 // entry["bytes"]))
        for key, pdl in (("plain", False), ("pdl", True)):
            entry[key] = seconds(gpu, entry, weights, buffers, count, pdl)


Key = tuple[str, int, int, int]
"""Format, N, K and M."""


def by_shape(entries: list[dict[str, Any]]) -> dict[Key, list[dict[str, Any]]]:
    """The entries of each problem, the fastest first."""
    groups: dict[Key, list[dict[str, Any]]] = {}
    for entry in entries:
        groups.setdefault((entry["format"], entry["n"], entry["k"], entry["m"]), []).append(entry)
    return {key: sorted(group, key=lambda e: e["pdl"]) for key, group in groups.items()}


def report(key: Key, entries: list[dict[str, Any]]) -> None:
    """Print a line: of each tile the us a launch (plain, if it was timed, and dependent) and its part of the reads.

    A tile with * is the compiler's choice, one with + takes more than half of a multiprocessor's shared memory.
    """
    format, n, k, m = key
    tiles: list[str] = []
    for entry in entries:
        times = " ".join(f"{entry[mode] * 1e6:.2f}" for mode in ("plain", "pdl") if mode in entry)
        tiles.append(f"{entry['label']} {times} {entry['bytes'] / entry['pdl'] / READS:.0%}")
    print(f"{format:12s} {n:6d}x{k:<5d} m{m} {entries[0]['bytes'] / 1e6:5.0f} MB | {'  '.join(tiles)}")


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
    entries = load(gpu, BUILT)
    check(gpu, [e for e in entries if e["purpose"] == "check"])
    weights = Weights(gpu, 5_000_000_000)
    buffers = [gpu.upload(random_words(1 << 19, seed)) for seed in range(6)]
    timed = [e for e in entries if e["purpose"] == "time"]
    time_all(gpu, timed, weights, buffers)
    groups = by_shape(timed)
    for key, found in groups.items():
        report(key, found[:2] + [e for e in found[2:] if e["default"]])
    defaults = {(e["format"], e["n"], e["k"]): e for e in timed if e["default"] and e["m"] == 1}
    for title, format, shapes, layers in (("8B q4_0", "q4_0", SHAPES_8B, 32), ("1B bf16", "bf16", SHAPES_1B, 16)):
        fastest = [groups[format, n, k, 1][0] for n, k, _, _ in shapes]
        chain(gpu, f"{title} best   ", fastest, layers, weights, buffers)
        chain(gpu, f"{title} default", [defaults[format, n, k] for n, k, _, _ in shapes], layers, weights, buffers)
    if "OUT" in os.environ:
        (Path(os.environ["OUT"]) / "gemv.json").write_text(json.dumps(timed))


if __name__ == "__main__":
    main()
