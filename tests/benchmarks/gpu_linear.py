"""Linear layers of eight rows and more on this GPU: correctness of every format and epilogue, then times by tile.

    mkdir -p /tmp/tp/tapeout && ln -sfn $PWD/compiler /tmp/tp/tapeout/compiler && ln -sfn $PWD/runtime /tmp/tp/tapeout/runtime
    PYTHONPATH=/tmp/tp python3 tests/benchmarks/gpu_linear.py            # what is right, and which tile is the fastest
    PYTHONPATH=/tmp/tp python3 tests/benchmarks/gpu_linear.py --first    # only times what the compiler would choose

Needs torch, triton and cuda.bindings. Kernels are compiled ahead of time, as in an artifact, and launched through the
driver. Shapes are those of an 8B model; weights are rotated past the L2; times are medians of replayed graphs. The
whole table goes to $OUT/linear.txt when OUT is set.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from random_planes import random_planes

from tapeout.compiler.formats import FORMATS
from tapeout.compiler.kernels.cuda import linear
from tapeout.compiler.kernels.cuda.base import Candidate, GpuKernel
from tapeout.compiler.kernels.cuda.linear import ADD, GATED_SILU, STORE, Problem, Tile
from tapeout.compiler.layouts import packed_bytes

BUDGET_S = float(os.environ.get("BUDGET", "85"))
PEAK_TFLOPS, PEAK_TB = 790.0, 4.49
TIMED = ("bf16", "q4_0", "q4_k", "fp8")
SHAPES = ((6144, 4096, STORE), (4096, 4096, ADD), (14336, 4096, GATED_SILU), (4096, 14336, ADD))
ROWS = (16, 64, 128, 512, 2048)
FIRST_FORMATS = ("bf16", "q4_0", "q4_k", "int4_g128", "fp8")
FIRST_ROWS = (8, 16, 32, 64, 128, 512, 2048)
FIRST_LAUNCHES = 48
DEVICE: Any = SimpleNamespace(sm_count=132, shared_per_block=232_448, capability=90)
DTYPES = {"bf16": "*bf16", "f16": "*fp16", "f32": "*fp32", "u8": "*u8", "i32": "*i32"}


def tiles_for(format: str, rows: int) -> list[Tile]:
    """What is tried for so many rows."""
    if FORMATS[format].is_float:
        if rows <= 64:
            return [
                Tile(rows, bn, bk, warps, stages, False, ahead=ahead)
                for bn, bk, warps, stages in (
                    (32, 64, 4, 6), (32, 128, 4, 4), (32, 128, 4, 6), (32, 128, 4, 8), (64, 64, 4, 6), (64, 128, 4, 5),
                    (16, 128, 4, 6), (16, 256, 4, 4), (128, 64, 4, 6),
                )
                for ahead in ((512,) if (bn, bk, stages) != (32, 128, 6) else (0, 512))
            ]  # fmt: skip
        if rows == 128:
            return [Tile(bm, bn, 64, warps, stages, False, ahead=256)
                    for bm, bn, warps, stages in ((128, 32, 4, 6), (128, 64, 4, 5), (128, 64, 8, 5), (128, 128, 8, 4), (64, 64, 4, 5))]  # fmt: skip
        return [
            Tile(bm, bn, bk, warps, stages, swap, group)
            for bm, bn, bk, warps, stages, swap, group in (
                (128, 256, 64, 8, 3, False, 8), (128, 256, 64, 8, 4, False, 8), (128, 256, 64, 8, 4, False, 16),
                (256, 128, 64, 8, 4, False, 8), (256, 128, 64, 8, 4, True, 8), (128, 128, 64, 4, 4, False, 8),
                (128, 128, 64, 8, 3, False, 8), (128, 128, 128, 8, 3, False, 8), (128, 192, 64, 8, 4, False, 8),
            )
            if bn != 192
        ]  # fmt: skip
    if rows <= 64:
        return [
            Tile(rows, bn, bk, warps, stages, True, ahead=256)
            for bn, bk, warps, stages in (
                (32, 128, 4, 4), (32, 128, 4, 6), (32, 256, 4, 3), (32, 256, 4, 4), (64, 128, 4, 4), (64, 256, 4, 4),
                (32, 128, 2, 4), (16, 256, 2, 4), (128, 128, 4, 4), (128, 128, 8, 4),
            )
        ]  # fmt: skip
    if rows == 128:
        return [Tile(bm, bn, bk, warps, stages, True, ahead=256)
                for bm, bn, bk, warps, stages in ((128, 64, 128, 4, 4), (128, 32, 128, 4, 4), (64, 64, 128, 4, 4), (128, 128, 128, 8, 3), (64, 128, 128, 8, 4))]  # fmt: skip
    return [
        Tile(bm, bn, bk, warps, stages, True)
        for bm, bn, bk, warps, stages in (
            (128, 128, 64, 8, 4), (128, 128, 128, 8, 3), (256, 128, 64, 8, 3), (256, 128, 64, 8, 4),
            (128, 64, 128, 4, 4), (256, 64, 64, 4, 4), (128, 128, 128, 4, 3),
        )
    ]  # fmt: skip


def compile_kernel(kernel: GpuKernel) -> tuple[str, bytes, str, int, int]:
    """(name, cubin, symbol, shared, registers) or an error's text for the cubin."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from tapeout.compiler.kernels.cuda import triton_linear

    function: Any = triton_linear.linear
    names = function.arg_names
    types = {param.name: DTYPES[param.dtype] for param in kernel.params}
    constants = {"PDL": True, **dict(kernel.defines)}
    source = ASTSource(
        fn=function,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs=constants,
        attrs={(names.index(param.name),): [["tt.divisibility", 16]] for param in kernel.params},
    )
    options = {"num_warps": kernel.threads // 32, "launch_pdl": True, **dict(kernel.options)}
    try:
        compiled: Any = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    except Exception as error:
        return kernel.name, str(error)[:200].encode(), "", 0, 0
    return kernel.name, compiled.asm["cubin"], compiled.metadata.name, compiled.metadata.shared, 0


class Gpu:
    """Loads cubins and launches them on a stream, under programmatic dependent launch."""

    def __init__(self) -> None:
        import torch
        from cuda.bindings import driver

        self.torch, self.cu = torch, driver
        torch.cuda.init()
        torch.zeros(1, device="cuda")
        self.stream = self.check(driver.cuStreamCreate(1))
        self.events = [self.check(driver.cuEventCreate(0)) for _ in range(2)]
        self.functions: dict[str, Any] = {}

    def check(self, result: tuple[Any, ...]) -> Any:
        if result[0] != self.cu.CUresult.CUDA_SUCCESS:
            raise RuntimeError(str(result[0]))
        return result[1] if len(result) == 2 else result[1:]

    def load(self, kernel: GpuKernel, built: tuple[str, bytes, str, int, int]) -> bool:
        _, cubin, symbol, shared, _ = built
        if not symbol:
            print("does not compile:", kernel.name, cubin.decode())
            return False
        try:
            module = self.check(self.cu.cuModuleLoadData(cubin))
            function = self.check(self.cu.cuModuleGetFunction(module, symbol.encode()))
            attribute = self.cu.CUfunction_attribute
            if shared > 48000:
                self.check(self.cu.cuFuncSetAttribute(
                    function, attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared))  # fmt: skip
        except RuntimeError as error:
            print("does not load:", kernel.name, error)
            return False
        registers = self.check(self.cu.cuFuncGetAttribute(attribute.CU_FUNC_ATTRIBUTE_NUM_REGS, function))
        local = self.check(self.cu.cuFuncGetAttribute(attribute.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES, function))
        self.functions[kernel.name] = (function, kernel.threads, shared, registers, local)
        return True

    def launch(self, name: str, grid: int, pointers: list[int]) -> None:
        cu = self.cu
        function, threads, shared, _, _ = self.functions[name]
        config = cu.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes, config.hStream = shared, self.stream
        attribute, value = cu.CUlaunchAttribute(), cu.CUlaunchAttributeValue()
        attribute.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        value.programmaticStreamSerializationAllowed = 1
        attribute.value = value
        config.attrs, config.numAttrs = [attribute], 1
        types = (ctypes.c_void_p,) * (len(pointers) + 2)
        self.check(cu.cuLaunchKernelEx(config, function, ((*pointers, 0, 0), types), 0))

    def sync(self) -> None:
        self.check(self.cu.cuStreamSynchronize(self.stream))

    def time_us(self, record: Any, launches: int, repeats: int = 5) -> float:
        """Median time of one of the launches that ``record`` makes, from replays of a graph of them."""
        cu = self.cu
        mode = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self.check(cu.cuStreamBeginCapture(self.stream, mode))
        record()
        graph = self.check(cu.cuStreamEndCapture(self.stream))
        replay = self.check(cu.cuGraphInstantiate(graph, 0))
        self.check(cu.cuGraphLaunch(replay, self.stream))
        times = []
        for _ in range(repeats):
            self.check(cu.cuEventRecord(self.events[0], self.stream))
            self.check(cu.cuGraphLaunch(replay, self.stream))
            self.check(cu.cuEventRecord(self.events[1], self.stream))
            self.check(cu.cuEventSynchronize(self.events[1]))
            times.append(self.check(cu.cuEventElapsedTime(*self.events)))
        self.check(cu.cuGraphExecDestroy(replay))
        self.check(cu.cuGraphDestroy(graph))
        return sorted(times)[repeats // 2] * 1e3 / launches


def small_problems() -> list[tuple[Problem, Tile]]:
    """Every format and epilogue, on narrow and wide tiles, with ragged N, K and rows."""
    found = []
    for index, format in enumerate(FORMATS):
        known = FORMATS[format]
        act = format if known.is_float else "bf16"
        k = 768 if known.block > 32 else 544 if known.block == 32 else 520
        for step, tile in enumerate((Tile(16, 32, 64, 4, 3, True, ahead=128), Tile(64, 64, 64, 4, 3, True),
                                     Tile(128, 128, 128, 8, 3, True), Tile(64, 32, 64, 4, 4, False, ahead=128),
                                     Tile(128, 128, 64, 8, 3, False))):  # fmt: skip
            if act == "f32":
                tile = Tile(16, 32, 32, 4, 2, step % 2 == 0)
            elif not tile.swap and not known.is_float:
                continue
            if FORMATS[format].tiles and FORMATS[format].tiles[0]:
                k = 768
            for epilogue in range(4) if step < 2 or format in TIMED else ((index + step) % 4,):
                problem = Problem(
                    format,
                    300,
                    k,
                    k + 8,
                    304,
                    epilogue,
                    (index + epilogue) % 2 == 0,
                    act,
                    2 * (step % 2),
                    act if epilogue >= 2 else "f32",
                )
                found.append((problem, tile))
    return found


def check_one(gpu: Gpu, problem: Problem, tile: Tile, rng: np.random.Generator) -> float:
    """Relative error against float64; inf where something was written that should not, or not written."""
    torch = gpu.torch
    live, bucket = 77, 128
    shape = (problem.weight_rows, problem.k)
    dtype = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}[problem.x]
    if problem.is_float:
        w = torch.randn(shape, device="cuda").to(dtype)
        values = w.double()
    else:
        data, decoded = random_planes(*shape, problem.format, rng)
        w, values = torch.from_numpy(data).cuda(), torch.from_numpy(decoded).cuda()
    x = torch.randn((bucket, problem.ldx), device="cuda", dtype=torch.float32).div(problem.k**0.5).to(dtype)
    bias = torch.randn(problem.weight_rows, device="cuda")
    before = torch.randn((bucket, problem.ldy), device="cuda")
    y = before.clone() if problem.epilogue == ADD else torch.full_like(before, float("nan"))
    if problem.gated:
        y = y.to(dtype)
    start = y.clone()
    counts = torch.full((4,), 1 << 20, dtype=torch.int32, device="cuda")
    counts[problem.count_index] = live
    torch.cuda.synchronize()
    kernel = linear.kernel_of(problem, tile)
    pointers = [t.data_ptr() for t in (x, w, bias, y, counts)]
    gpu.launch(kernel.name, linear.grid_of(problem, tile, bucket), pointers)
    gpu.sync()
    sums = x[:live, : problem.k].double() @ values.T + (bias.double() if problem.bias else 0)
    gate, up = sums[:, : problem.n], sums[:, problem.n :]
    if problem.epilogue == ADD:
        sums = before[:live, : problem.n].double() + sums
    elif problem.gated:
        act = (
            torch.nn.functional.silu(gate)
            if problem.epilogue == 2
            else torch.nn.functional.gelu(gate, approximate="tanh")
        )
        sums = act * up
    got = y[:live, : problem.n].double()
    rest = torch.equal(y[live:].nan_to_num(7), start[live:].nan_to_num(7))
    rest &= torch.equal(y[:, problem.n :].nan_to_num(7), start[:, problem.n :].nan_to_num(7))
    return float((got - sums).norm() / sums.norm()) if rest and bool(got.isfinite().all()) else float("inf")


def check_all(gpu: Gpu, cases: list[tuple[Problem, Tile]], say: Any) -> None:
    rng, worst, bad = np.random.default_rng(5), dict[str, float](), 0
    for problem, tile in cases:
        name = linear.kernel_of(problem, tile).name
        if name not in gpu.functions:
            bad += 1
            continue
        error = check_one(gpu, problem, tile, rng)
        limit = {"bf16": 5e-3, "f16": 1e-3, "f32": 1e-5}[problem.x]
        worst[problem.format] = max(worst.get(problem.format, 0), error)
        if not error < limit:
            bad += 1
            say(f"WRONG {name}: {error:.2e}")
    say(f"correctness: {len(cases)} cases, {bad} wrong; worst " + ", ".join(f"{k} {v:.1e}" for k, v in worst.items()))


def weight_pool(gpu: Gpu, problem: Problem) -> list[int]:
    """Addresses of enough copies of a weight to leave nothing in the L2; scales are small numbers."""
    torch = gpu.torch
    size = (
        -(
            -packed_bytes((problem.weight_rows, problem.k), problem.format, "raw" if problem.is_float else "planes")
            // 256
        )
        * 256
    )
    copies = max(2, -(-240_000_000 // size))
    if problem.is_float:
        gpu.pool = torch.randn(copies * size // 2, device="cuda", dtype=torch.bfloat16) * 0.02
    else:
        gpu.pool = torch.randint(0, 256, (copies, size), dtype=torch.uint8, device="cuda")
        gpu.pool[:, dict(linear.kernel_of(problem, Tile(16, 32, 64, 4, 3, True)).defines)["SCALES"] :] = 0x24
    return [gpu.pool.data_ptr() + i * size for i in range(copies)]


def time_all(gpu: Gpu, cases: dict[tuple[str, int, int], list[tuple[Problem, Tile]]], began: float, say: Any) -> None:
    torch = gpu.torch
    x = torch.randn((2048, 14336), device="cuda").to(torch.bfloat16)
    y = torch.zeros((2048, 14336), device="cuda")
    bias, counts = torch.zeros(32768, device="cuda"), torch.zeros(4, dtype=torch.int32, device="cuda")
    total: dict[tuple[str, int], float] = {}
    skipped = 0
    for (format, shape, rows), tried in sorted(cases.items(), key=lambda item: (item[0][:2], item[0][2])):
        problem = tried[0][0]
        if time.time() - began > BUDGET_S:
            skipped += 1
            continue
        weights = weight_pool(gpu, problem)
        live_rows = (8, 16) if rows == 16 else (rows,)
        for live in live_rows:
            counts.fill_(live)
            torch.cuda.synchronize()
            flops, act = 2.0 * live * problem.weight_rows * problem.k, 2
            size = packed_bytes(
                (problem.weight_rows, problem.k), problem.format, "raw" if problem.is_float else "planes"
            )
            moved = size + live * problem.k * act + live * problem.n * (4, 8, 2, 2)[problem.epilogue]
            results = []
            for _, tile in tried:
                name = linear.kernel_of(problem, tile).name
                if name not in gpu.functions:
                    continue
                grid = linear.grid_of(problem, tile, live)
                launches = max(len(weights), 4)

                def record(name: str = name, grid: int = grid, launches: int = launches) -> None:
                    for i in range(launches):
                        gpu.launch(
                            name,
                            grid,
                            [x.data_ptr(), weights[i % len(weights)], bias.data_ptr(), y.data_ptr(), counts.data_ptr()],
                        )

                try:
                    results.append((gpu.time_us(record, launches), tile, gpu.functions[name]))
                except RuntimeError as error:
                    say(f"FAILED {name}: {error}")
                    raise
            results.sort(key=lambda item: item[0])
            if not results:
                continue
            best = results[0][0]
            total[format, live] = total.get((format, live), 0) + best
            line = f"{format:5} n={problem.weight_rows:5} k={problem.k:5} m={live:4}: {best:8.2f} us {flops / best / 1e6:5.0f} TF ({flops / best / 1e4 / PEAK_TFLOPS:3.0f}%) {moved / best / 1e6:5.2f} TB/s ({moved / best / 1e4 / PEAK_TB:3.0f}%)"
            if format == "bf16":
                line += f" cublas {cublas_us(gpu, problem, live, x, weights):8.2f}"
            say(line + " | " + " ".join(f"{tile_text(t)}:{us:.1f}" for us, t, _ in results[:3]))
            for us, tile, (_, _, shared, registers, local) in results[3:]:
                say(f"      {tile_text(tile)}:{us:.2f} regs {registers} shared {shared} local {local}", full=True)
    say_layers(total, say)
    if skipped:
        say(f"{skipped} cells skipped: {BUDGET_S} s were over")


def first_cases() -> dict[tuple[str, int, int], tuple[Problem, Candidate]]:
    """What the compiler would choose, by format, place in SHAPES and rows of the bucket."""
    found = {}
    for format in FIRST_FORMATS:
        for index, (n, k, epilogue) in enumerate(SHAPES):
            problem = Problem(format, n, k, k, n, epilogue, False, "bf16", 0, "bf16" if epilogue >= 2 else "f32")
            for rows in FIRST_ROWS:
                offered = linear.candidates(
                    format, n, k, rows, ldx=k, ldy=n, epilogue=epilogue, bias=False, x="bf16", y="bf16" if epilogue >= 2 else "f32", count_index=0,
                    device=DEVICE,
                )  # fmt: skip
                found[format, index, rows] = problem, offered[0]
    return found


def time_first(gpu: Gpu, cases: dict[tuple[str, int, int], tuple[Problem, Candidate]], began: float, say: Any) -> None:
    """A line a case: us, how near to the time that its bytes take, and the share of the tensor cores' bf16 rate."""
    torch = gpu.torch
    x = torch.randn((2048, 14336), device="cuda").to(torch.bfloat16)
    y = torch.zeros((2048, 14336), device="cuda")
    bias, counts = torch.zeros(32768, device="cuda"), torch.zeros(4, dtype=torch.int32, device="cuda")
    total: dict[tuple[str, int], float] = {}
    weights: list[int] = []
    held, skipped = None, 0
    for (format, shape, rows), (problem, candidate) in cases.items():
        name = candidate.kernel.name
        if name not in gpu.functions or time.time() - began > BUDGET_S:
            skipped += 1
            continue
        if held != (format, shape):
            weights, held = weight_pool(gpu, problem), (format, shape)
        counts.fill_(rows)
        torch.cuda.synchronize()
        launches = -(-FIRST_LAUNCHES // len(weights)) * len(weights)

        def record() -> None:
            for i in range(launches):
                pointers = [x.data_ptr(), weights[i % len(weights)], bias.data_ptr(), y.data_ptr(), counts.data_ptr()]
                gpu.launch(name, candidate.grid[0], pointers)

        us = gpu.time_us(record, launches)
        total[format, rows] = total.get((format, rows), 0) + us
        _, _, shared, registers, local = gpu.functions[name]
        floor = candidate.nbytes / PEAK_TB / 1e6
        rate = 2.0 * rows * problem.weight_rows * problem.k / us / 1e6
        say(
            f"{format:9} {problem.weight_rows:5}x{problem.k:<5} rows {rows:4}: {us:8.2f} us, {100 * floor / us:3.0f}% of "
            f"bandwidth floor, {100 * rate / PEAK_TFLOPS:3.0f}% of bf16 rate | {defines_text(candidate.kernel)} "
            f"regs {registers} shared {shared}" + f", SPILLS {local} bytes" * (local > 0)
        )
    if skipped:
        say(f"{skipped} cases skipped: {BUDGET_S} s were over, or the kernel does not compile")
    else:
        say_layers(total, say)


def defines_text(kernel: GpuKernel) -> str:
    """The tile of a kernel, as ``tile_text`` writes it."""
    known = dict(kernel.defines)
    bm, bn, bk, group, ahead = (int(known[name]) for name in ("BM", "BN", "BK", "GROUP_M", "AHEAD"))
    stages = dict(kernel.options)["num_stages"]
    return tile_text(Tile(bm, bn, bk, kernel.threads // 32, stages, bool(known["SWAP"]), group, ahead))


def say_layers(total: dict[tuple[str, int], float], say: Any) -> None:
    """The four linear layers of one layer of the model together."""
    for (format, live), us in sorted(total.items()):
        flops = sum(2.0 * live * (2 * n if e >= 2 else n) * k for n, k, e in SHAPES)
        say(
            f"layer {format:9} m={live:4}: {us:8.1f} us, x32 = {us * 32 / 1e3:7.2f} ms, {flops / us / 1e6:4.0f} TFLOP/s, {live / us / 32 * 1e6:9.0f} tok/s"
        )


def cublas_us(gpu: Gpu, problem: Problem, live: int, x: Any, weights: list[int]) -> float:
    torch = gpu.torch
    size = problem.weight_rows * problem.k
    views = [gpu.pool[i * size : (i + 1) * size].view(problem.weight_rows, problem.k) for i in range(len(weights))]
    held = x.flatten()[: live * problem.k].view(live, problem.k)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        out = held @ views[0].T
        with torch.cuda.graph(graph, stream=stream):
            for view in views:
                torch.mm(held, view.T, out=out)
        times = []
        for _ in range(5):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
    return sorted(times)[2] * 1e3 / len(views)


def tile_text(tile: Tile) -> str:
    return f"{tile.bm}x{tile.bn}x{tile.bk}w{tile.warps}s{tile.stages}{'T' * tile.swap}{f'g{tile.group_m}' * (tile.group_m != 8)}{f'a{tile.ahead}' * (tile.ahead > 0)}"


def main() -> None:
    began = time.time()
    out = Path(os.environ["OUT"]) / "linear.txt" if os.environ.get("OUT") else None
    lines: list[str] = []

    def say(text: str, full: bool = False) -> None:
        lines.append(text)
        if not full:
            print(text, flush=True)
        if out:
            out.write_text("\n".join(lines) + "\n")

    if "--first" in sys.argv[1:]:
        first = first_cases()
        gpu = loaded((candidate.kernel for _, candidate in first.values()), began, say)
        time_first(gpu, first, began, say)
    else:
        search(began, say)
    say(f"{time.time() - began:.0f} s")


def loaded(wanted: Iterable[GpuKernel], began: float, say: Any) -> Gpu:
    """The GPU with these kernels, compiled on all cores."""
    kernels = {kernel.name: kernel for kernel in wanted}
    with ProcessPoolExecutor(max(1, (os.cpu_count() or 2) - 1)) as pool:
        built = list(pool.map(compile_kernel, kernels.values()))
    say(f"{len(kernels)} kernels compiled in {time.time() - began:.0f} s")
    gpu = Gpu()
    for result in built:
        gpu.load(kernels[result[0]], result)
    return gpu


def search(began: float, say: Any) -> None:
    """Check every format and epilogue, then time all tiles that are worth a try."""
    checks = small_problems()
    cases: dict[tuple[str, int, int], list[tuple[Problem, Tile]]] = {}
    for format in TIMED:
        for index, (n, k, epilogue) in enumerate(SHAPES):
            problem = Problem(format, n, k, k, n, epilogue, False, "bf16", 0, "bf16" if epilogue >= 2 else "f32")
            for rows in ROWS:
                if rows == 512 and FORMATS[format].is_float:
                    pass
                cases[format, index, rows] = [(problem, tile) for tile in tiles_for(format, rows)]
    everything = checks + [case for tried in cases.values() for case in tried]
    gpu = loaded((linear.kernel_of(*case) for case in everything), began, say)
    check_all(gpu, checks, say)
    say(
        f"{time.time() - began:.0f} s; tiles are rows x weight rows x k step, w warps, s stages, T weights left, a ahead"
    )
    time_all(gpu, cases, began, say)


if __name__ == "__main__":
    main()
