"""The small CUDA kernels on a GPU: results against numpy and the CPU's sampler, then times in replayed graphs.

python gpu_small.py --build    without a GPU: kernels, weights and the sampler, into build/gpu/small
python gpu_small.py            with a GPU: needs numpy and cuda.bindings

With `sample`, either builds or runs the sampler alone.
"""

from __future__ import annotations

import ctypes as C
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "gpu" / "small"
MANY = 2048
EMBED_VOCAB, EMBED_K = 64, 1024
HIDDEN, INNER = 4096, 14336
HEADS, KV_HEADS, D, PAGE_TOKENS, MAX_PAGES = 32, 8, 128, 32, 4096
QKV = (HEADS + 2 * KV_HEADS) * D
EPS = 1e-5
SHARED = 232_448
"""Shared memory of a block of the GPU."""
SAMPLED = ((128_256, (1, 8, 64)), (49_152, (1, 64)), (262_144, (1, 64)), (1000, (1,)), (31, (1,)))
"""Vocabularies, and rows of logits."""

# ---- building, without a GPU


def build(only_sample: bool, arch: str = "sm_90") -> None:
    """Compile everything the script runs."""
    from tapeout.compiler.kernels.cuda import nvrtc, small
    from tapeout.compiler.kernels.toolchain import Unit, build_libraries

    FOLDER.mkdir(parents=True, exist_ok=True)
    for old in FOLDER.iterdir():
        if old.is_file():
            old.unlink()
    meta: dict[str, Any] = {}

    def put(label: str, candidate: Any) -> None:
        kernel = candidate.kernel
        cubin = nvrtc.compile_cuda(kernel, arch)
        (FOLDER / kernel.name).write_bytes(cubin.data)
        r = cubin.resources
        params = [p.name for p in kernel.params]
        meta[label] = {"file": kernel.name, "symbol": r.symbol, "threads": kernel.threads, "grid": candidate.grid}
        meta[label] |= {"params": params, "nbytes": candidate.nbytes, "shared": r.dynamic_shared}
        print(f"{label:28} {r.registers} registers, {r.shared} shared, {r.spill_bytes} spilled, {r.stack_bytes} stack")

    for vocab, many in SAMPLED:
        for rows in many:
            put(f"sample {vocab} x{rows}", small.sample(vocab, rows, advance=True, shared=SHARED))
    library = build_libraries([Unit("engine.c"), Unit("sample.c")], [], ["x86_64_v3"], FOLDER / "cache")
    (FOLDER / "sampler.so").write_bytes(library["x86_64_v3"])
    if not only_sample:
        build_rows(put)
        build_embed(put)
    (FOLDER / "meta.json").write_text(json.dumps(meta))
    print(len(meta), "kernels,", sum(f.stat().st_size for f in FOLDER.iterdir() if f.is_file()), "bytes")


Put = Callable[[str, Any], None]


def build_rows(put: Put) -> None:
    from tapeout.compiler.kernels.cuda import small
    from tapeout.compiler.kernels.cuda.attention import Attention

    rope = Attention(
        *(HEADS, KV_HEADS, D, PAGE_TOKENS, MAX_PAGES, 1.0, QKV, 0, HEADS * D, (HEADS + KV_HEADS) * D), qk_norm=True
    )
    for rows in (1, MANY):
        put(f"rmsnorm f32 {rows}", small.rmsnorm(HIDDEN, HIDDEN, EPS, "f32", rows))
        put(f"rmsnorm bf16 {rows}", small.rmsnorm(HIDDEN, HIDDEN, EPS, "bf16", rows))
        put(f"rmsnorm_add {rows}", small.rmsnorm_add(HIDDEN, HIDDEN, EPS, rows))
        put(f"gated {rows}", small.gated("silu", INNER, 2 * INNER, "bf16", rows))
        put(f"add {rows}", small.add(HIDDEN, rows))
        put(f"cast {rows}", small.cast(HIDDEN, HIDDEN, "bf16", rows))
        put(f"gather {rows}", small.gather(HIDDEN, rows))
        put(f"rope_kv {rows}", small.rope_kv(rope, rows))
        put(f"embed {rows}", small.embed("q4_0", 4096, HIDDEN, 1.0, rows))


def build_embed(put: Put) -> None:
    from tapeout.compiler.emit.pack import pack_planes
    from tapeout.compiler.formats import FORMATS
    from tapeout.compiler.kernels.cuda import small
    from tapeout.compiler.layouts import planes_hold

    data: dict[str, Any] = {}
    rng = np.random.default_rng(0)
    for name, known in FORMATS.items():
        if not known.is_float and not planes_hold(name):
            continue
        put(f"embed_{name}", small.embed(name, EMBED_VOCAB, EMBED_K, 1.5, EMBED_VOCAB))
        if known.encode is None:
            rows = rng.integers(0, 256, (EMBED_VOCAB, known.row_bytes(EMBED_K)), dtype=np.uint8)
        else:
            rows = known.encode(rng.standard_normal((EMBED_VOCAB, EMBED_K)).astype(np.float32))
        data[f"{name}.w"] = rows if known.is_float else pack_planes(name, rows, EMBED_K)
        data[f"{name}.y"] = known.decode(rows) * np.float32(1.5)
    np.savez_compressed(FOLDER / "embed.npz", **data)


# ---- the device


def check(result: tuple[Any, ...]) -> Any:
    if int(result[0]) != 0:
        raise RuntimeError(str(result[0]))
    return result[1] if len(result) == 2 else result[1:]


class Gpu:
    """One context and stream, the kernels by label, and launches under programmatic dependent launch."""

    def __init__(self) -> None:
        from cuda.bindings import driver

        self.cu = cu = driver
        check(cu.cuInit(0))
        self.device = check(cu.cuDeviceGet(0))
        check(cu.cuCtxSetCurrent(check(cu.cuDevicePrimaryCtxRetain(self.device))))
        self.stream = check(cu.cuStreamCreate(1))
        self.events = [check(cu.cuEventCreate(0)) for _ in range(2)]
        self.meta = json.loads((FOLDER / "meta.json").read_text())
        self.functions: dict[str, Any] = {}
        for label, entry in self.meta.items():
            module = check(cu.cuModuleLoadData((FOLDER / entry["file"]).read_bytes()))
            function = check(cu.cuModuleGetFunction(module, entry["symbol"].encode()))
            attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            check(cu.cuFuncSetAttribute(function, attribute, entry["shared"]))
            self.functions[label] = function

    def put(self, array: Any) -> int:
        """Memory that holds a copy of an array."""
        array = np.ascontiguousarray(array)
        pointer = check(self.cu.cuMemAlloc(max(array.nbytes, 16)))
        if array.nbytes:
            check(self.cu.cuMemcpyHtoD(pointer, array.ctypes.data, array.nbytes))
        return int(pointer)

    def empty(self, nbytes: int) -> int:
        """Memory full of 0xFF: NaN in each of the types."""
        pointer = check(self.cu.cuMemAlloc(nbytes))
        check(self.cu.cuMemsetD8(pointer, 0xFF, nbytes))
        return int(pointer)

    def get(self, pointer: int, shape: tuple[int, ...], kind: Any) -> Any:
        out = np.empty(shape, kind)
        check(self.cu.cuStreamSynchronize(self.stream))
        check(self.cu.cuMemcpyDtoH(out.ctypes.data, pointer, out.nbytes))
        return out

    def launch(self, label: str, **pointers: int | None) -> None:
        cu, entry = self.cu, self.meta[label]
        values = tuple(int(pointers[name] or 0) for name in entry["params"])
        config = cu.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = entry["grid"]
        config.blockDimX, config.blockDimY, config.blockDimZ = entry["threads"], 1, 1
        config.sharedMemBytes, config.hStream = entry["shared"], self.stream
        attribute = cu.CUlaunchAttribute()
        attribute.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        value = cu.CUlaunchAttributeValue()
        value.programmaticStreamSerializationAllowed = 1
        attribute.value = value
        config.attrs, config.numAttrs = [attribute], 1
        check(cu.cuLaunchKernelEx(config, self.functions[label], (values, (C.c_void_p,) * len(values)), 0))

    def microseconds(self, launches: Callable[[], None], count: int, repeats: int = 15) -> float:
        """Median time of one of ``count`` launches in a replayed graph."""
        cu = self.cu
        mode = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        check(cu.cuStreamBeginCapture(self.stream, mode))
        launches()
        graph = check(cu.cuGraphInstantiate(check(cu.cuStreamEndCapture(self.stream)), 0))
        times: list[float] = []
        for i in range(repeats + 2):
            check(cu.cuEventRecord(self.events[0], self.stream))
            check(cu.cuGraphLaunch(graph, self.stream))
            check(cu.cuEventRecord(self.events[1], self.stream))
            check(cu.cuEventSynchronize(self.events[1]))
            if i >= 2:
                times.append(check(cu.cuEventElapsedTime(*self.events)))
        check(cu.cuGraphExecDestroy(graph))
        return sorted(times)[len(times) // 2] * 1e3 / count


# ---- rows


def random(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def wide(bits: Any) -> Any:
    """bfloat16 bits as float64."""
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def error(actual: Any, expected: Any) -> float:
    """Norm of the difference over that of what is expected; NaN if anything was not written."""
    return float(np.linalg.norm(actual.astype(np.float64) - expected) / np.linalg.norm(expected))


def norm(x: Any, weight: Any) -> Any:
    x = x.astype(np.float64)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * weight


def report(gpu: Gpu, label: str, wrong: float, limit: float, sets: list[dict[str, int | None]]) -> None:
    """One line: the error, and the time of a launch over the given argument sets in turn."""
    count = 200 if label.endswith(" 1") else 24

    def launches() -> None:
        for i in range(count):
            gpu.launch(label, **sets[i % len(sets)])

    time = gpu.microseconds(launches, count)
    rate = gpu.meta[label]["nbytes"] / time / 1e6
    verdict = "ok" if wrong <= limit else "WRONG"
    print(f"{label:20} error {wrong:8.1e} {verdict:5} {time:8.2f} us  {rate:5.2f} TB/s", flush=True)


def bench_rows(gpu: Gpu, rows: int) -> None:
    """Norms and elementwise kernels: checked on the first argument set, timed over sets that exceed the L2."""
    sets = 1 if rows == 1 else 4
    x, weight = [random(rows, HIDDEN, seed=i) for i in range(sets)], random(HIDDEN, seed=9)
    y0 = random(rows, HIDDEN, seed=8)
    counts = gpu.put(np.array([rows, 1, rows, 0], np.int32))
    xs, w = [gpu.put(each) for each in x], gpu.put(weight)

    def outputs(size: int) -> list[int]:
        return [gpu.empty(rows * HIDDEN * size) for _ in range(sets)]

    def run(label: str, expected: Any, limit: float, size: int, start: Any = None, **more: int) -> None:
        ys = outputs(size) if start is None else [gpu.put(start) for _ in range(sets)]
        calls = [{"x": a, "y": b, "counts": counts, **more} for a, b in zip(xs, ys, strict=True)]
        gpu.launch(f"{label} {rows}", **calls[0])
        got = gpu.get(ys[0], (rows, HIDDEN), np.float32 if size == 4 else np.uint16)
        report(gpu, f"{label} {rows}", error(got if size == 4 else wide(got), expected), limit, calls)
        for pointer in ys:
            gpu.cu.cuMemFree(pointer)

    run("rmsnorm f32", norm(x[0], weight), 1e-6, 4, weight=w)
    run("rmsnorm bf16", norm(x[0], weight), 3e-3, 2, weight=w)
    run("rmsnorm_add", y0 + norm(x[0], weight), 1e-6, 4, y0, weight=w)
    run("add", y0.astype(np.float64) + x[0], 1e-6, 4, y0)
    run("cast", x[0].astype(np.float64), 3e-3, 2)
    order = np.random.default_rng(1).permutation(rows).astype(np.int32)
    run("gather", x[0][order].astype(np.float64), 0.0, 4, out_row=gpu.put(order))
    for pointer in xs:
        gpu.cu.cuMemFree(pointer)
    both = random(rows, 2 * INNER) * 2
    gate, up = both[:, :INNER].astype(np.float64), both[:, INNER:]
    call = {"x": gpu.put(both), "y": gpu.empty(rows * INNER * 2), "counts": counts}
    gpu.launch(f"gated {rows}", **call)
    got = wide(gpu.get(call["y"], (rows, INNER), np.uint16))
    report(gpu, f"gated {rows}", error(got, gate / (1 + np.exp(-gate)) * up), 3e-3, [call])
    gpu.cu.cuMemFree(call["x"])


def bench_rope(gpu: Gpu, rows: int) -> None:
    """Rotation at the far end of the context."""
    first = MAX_PAGES * PAGE_TOKENS - rows
    positions = np.arange(first, first + rows, dtype=np.int32)
    pages = rows // PAGE_TOKENS + 2
    table = np.full(MAX_PAGES, -1, np.int32)
    used = np.unique(positions // PAGE_TOKENS)
    table[used] = np.random.default_rng(2).permutation(pages)[: used.size]
    frequency = (500000.0 ** -(np.arange(D // 2) / (D // 2))).astype(np.float32)
    qkv, weights = random(rows, QKV), [random(D, seed=3), random(D, seed=4)]
    call: dict[str, int | None] = {
        "qkv": gpu.put(qkv),
        "positions": gpu.put(positions),
        "row_segment": gpu.put(np.zeros(rows, np.int32)),
        "page_table": gpu.put(table),
        "inv_freq": gpu.put(frequency),
        "q_norm": gpu.put(weights[0]),
        "k_norm": gpu.put(weights[1]),
        "kv": gpu.empty(pages * 2 * KV_HEADS * PAGE_TOKENS * D * 2),
        "q_out": gpu.empty(rows * HEADS * D * 2),
        "counts": gpu.put(np.array([rows, 1, rows, 0], np.int32)),
    }
    gpu.launch(f"rope_kv {rows}", **call)
    parts = qkv.reshape(rows, HEADS + 2 * KV_HEADS, D)
    q, k, v = np.split(parts, [HEADS, HEADS + KV_HEADS], axis=1)
    angle = (positions[:, None].astype(np.float32) * frequency).astype(np.float64)[:, None]

    def rotated(x: Any, weight: Any) -> Any:
        a, b = np.split(
            x.astype(np.float64) / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-6), 2, -1
        )
        a, b = a * weight[: D // 2], b * weight[D // 2 :]
        return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1)

    pool = gpu.get(int(call["kv"] or 0), (pages, 2, KV_HEADS, PAGE_TOKENS, D), np.float16)
    at, slot = table[positions // PAGE_TOKENS], positions % PAGE_TOKENS
    q_out = gpu.get(int(call["q_out"] or 0), (rows, HEADS, D), np.float16)
    wrong = [error(q_out, rotated(q, weights[0])), error(pool[at, 0, :, slot], rotated(k, weights[1]))]
    wrong.append(error(pool[at, 1, :, slot], v.astype(np.float64)))
    report(gpu, f"rope_kv {rows}", float(np.max(wrong)), 5e-4, [call])


def bench_embed(gpu: Gpu) -> None:
    """Every format bit for bit; then q4_0 at full width."""
    data = np.load(FOLDER / "embed.npz")
    tokens = np.random.default_rng(4).permutation(EMBED_VOCAB).astype(np.int32)
    counts = gpu.put(np.array([EMBED_VOCAB, 1, 0, 0], np.int32))
    wrong: list[str] = []
    names = [key[:-2] for key in data.files if key.endswith(".w")]
    for name in names:
        y = gpu.empty(EMBED_VOCAB * EMBED_K * 4)
        gpu.launch(f"embed_{name}", tokens=gpu.put(tokens), w=gpu.put(data[f"{name}.w"]), y=y, counts=counts)
        got = gpu.get(y, (EMBED_VOCAB, EMBED_K), np.float32)
        if not np.array_equal(got, data[f"{name}.y"][tokens], equal_nan=True):
            wrong.append(name)
    print(f"embed: {len(names) - len(wrong)} of {len(names)} formats equal bit for bit; wrong: {wrong or 'none'}")
    for rows in (1, MANY):
        w = gpu.put(np.random.default_rng(5).integers(0, 64, 4096 * HIDDEN * 9 // 16 + 4096, dtype=np.uint8))
        tokens = np.random.default_rng(6).integers(0, 4096, rows).astype(np.int32)
        count = gpu.put(np.array([rows, 1, 0, 0], np.int32))
        call: dict[str, int | None] = {"tokens": gpu.put(tokens), "w": w, "y": gpu.empty(rows * HIDDEN * 4)}
        report(gpu, f"embed {rows}", 0.0, 0.0, [{**call, "counts": count}])


# ---- sampling


class Sampling(C.Structure):
    """tp_sampling of the CPU sampler."""

    _fields_ = (
        *(("temperature", C.c_float), ("top_p", C.c_float), ("top_k", C.c_int32), ("want_logprob", C.c_int32)),
        *(("seed", C.c_uint64), ("position", C.c_uint64), ("token", C.c_int32), ("logprob", C.c_float)),
    )


SETTINGS = (
    ("greedy", 0.0, 0, 1.0),
    ("temperature", 0.8, 0, 1.0),
    ("top-p 0.9", 1.0, 0, 0.9),
    ("top-k 50", 1.0, 50, 1.0),
    ("top-k 50 top-p 0.9", 0.7, 50, 0.9),
)
"""Names, with temperature, top-k and top-p."""


def bench_sample(gpu: Gpu, cpu: C.CDLL, vocab: int, rows: int, spread: float, rounded: bool = False) -> None:
    """Draws equal the CPU's, step after step; then times by setting. ``rounded``: logits of bfloat16, many of them
    equal."""
    logits = random(rows, vocab, seed=rows) * np.float32(spread)
    if rounded:
        logits = (logits.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    label, device_logits = f"sample {vocab} x{rows}", gpu.put(logits)
    for name, t, k, p in SETTINGS:
        fields = {
            "temperature": np.full(rows, t, np.float32),
            "top_p": np.full(rows, p, np.float32),
            "top_k": np.full(rows, k, np.int32),
            "seed": np.arange(rows, dtype=np.uint64) * 7 + 3,
            "sample_position": np.zeros(rows, np.uint64),
            "counts": np.array([rows, rows, rows, 0], np.int32),
            "sampled": np.full(rows, -7, np.int32),
            "logprob": np.full(rows, np.nan, np.float32),
            "tokens": np.zeros(rows, np.int32),
            "positions": np.zeros(rows, np.int32),
        }
        call = {"logits": device_logits, **{key: gpu.put(value) for key, value in fields.items()}}
        steps, different, worst = 12 if rows == 1 else 2, 0, 0.0
        for step in range(steps):
            gpu.launch(label, **call)
            tokens = gpu.get(call["sampled"], (rows,), np.int32)
            logprob = gpu.get(call["logprob"], (rows,), np.float32)
            for row in range(rows):
                want = Sampling(t, p, k, 1, row * 7 + 3, step)
                cpu.tp_sample(logits[row].ctypes.data, vocab, C.byref(want))
                different += int(tokens[row] != want.token)
                worst = max(worst, abs(float(logprob[row]) - want.logprob)) if tokens[row] == want.token else worst

        def launches(call: dict[str, int] = call) -> None:
            for _ in range(20):
                gpu.launch(label, **call)

        time = gpu.microseconds(launches, 20)
        verdict = "ok" if different == 0 and worst < 5e-6 else "WRONG"
        print(
            f"{label:18} sigma {spread:.0f}{' bf16' if rounded else '':5} {name:18} {different} of {rows * steps} differ,"
            f" logprob {worst:.0e} {verdict:5} {time:8.2f} us",
            flush=True,
        )
    gpu.cu.cuMemFree(device_logits)


def bench_sampler(gpu: Gpu) -> None:
    """Flat and peaked logits, then logits with many equals."""
    cpu = C.CDLL(str(FOLDER / "sampler.so"))
    cpu.tp_sample.argtypes = [C.c_void_p, C.c_int, C.c_void_p]
    for vocab, many in SAMPLED:
        for rows in many:
            for spread in (1, 3) if rows < 64 else (2,):
                bench_sample(gpu, cpu, vocab, rows, spread)
    bench_sample(gpu, cpu, SAMPLED[0][0], 8, 2, rounded=True)


def main() -> None:
    only_sample = "sample" in sys.argv
    if "--build" in sys.argv:
        return build(only_sample)
    gpu = Gpu()
    bench_sampler(gpu)
    if only_sample:
        return None
    bench_embed(gpu)
    for rows in (1, MANY):
        bench_rows(gpu, rows)
        bench_rope(gpu, rows)
    return None


if __name__ == "__main__":
    main()
