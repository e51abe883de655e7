"""Attention on a GPU: results against float64, then times in replayed graphs with programmatic dependent launch.

Without a GPU the script builds its cubins into build/gpu/attention; with one it runs them (needs torch, cuda.bindings).
Decode is timed alone, and behind a kernel that streams 17 MB as a weight product would ("+": what attention adds).
"""

from __future__ import annotations

import ctypes
import json
import os
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "gpu" / "attention"
BANDWIDTH = 4.45e12  # bytes a second, plain reads, measured on one H200
TOKENS = 32
NAMES = {"HEAD_DIM": "D", "PAGE_TOKENS": "T", "LDX": "LD"}  # of the decode kernel, as the other spells them
CONTEXTS = (128, 200, 512, 2048, 8192, 32768, 131072)
READ_BLOCKS, READ_TILE, READ_TILES = 264, 4096, 4


# ---- building, without a GPU


def build() -> None:
    """Compile every variant for sm_90."""
    from tapeout.compiler.devices import load_device
    from tapeout.compiler.kernels.cuda import attention as at
    from tapeout.compiler.kernels.cuda.nvrtc import compile_cuda
    from tapeout.compiler.kernels.cuda.triton_build import compile_triton

    FOLDER.mkdir(parents=True, exist_ok=True)
    for old in FOLDER.iterdir():
        old.unlink()
    meta: list[dict[str, Any]] = []

    def add(kind: str, label: str, kernel: Any, **facts: Any) -> None:
        cubin = (compile_triton if kernel.language == "triton" else compile_cuda)(kernel, "sm_90")
        (FOLDER / kernel.name).write_bytes(cubin.data)
        r = cubin.resources
        print(kind, label, r.registers, "registers", r.shared, "shared", r.spill_bytes, "spilled", flush=True)
        meta.append(
            {
                "kind": kind,
                "label": label,
                "file": kernel.name,
                "symbol": r.symbol,
                "threads": kernel.threads,
                "shared": r.dynamic_shared,
                "defines": {NAMES.get(key, key): value for key, value in kernel.defines},
                "language": kernel.language,
                **facts,
            }
        )

    def shape(heads: int, kv: int, dim: int, context: int = 131072, **more: Any) -> Any:
        q, k = heads * dim, kv * dim
        plain = at.Attention(heads, kv, dim, TOKENS, context // TOKENS, dim**-0.5, q + 2 * k, 0, q, q + k)
        return replace(plain, **more)

    h200: Any = load_device("h200")
    llama, wide = shape(32, 8, 128), shape(64, 8, 128)
    gemma = shape(4, 1, 256, 8192, window=512, qk_norm=True)
    smol = shape(9, 3, 64, 8192)

    def decode(name: str, s: Any, sequences: int = 1, out: str = "f32", **changes: Any) -> None:
        """The best choice, or another beside it."""
        b = at.block_choices(s, sequences, h200)[0]._replace(**changes)
        label = f"{name} x{b.splits}/{b.collectors} w{b.warps} d{b.depth} n{b.near} f{b.far}"
        grid = max(h200.sm_count, b.splits * s.kv_heads * sequences)
        kernel = at.decode_kernel(s, sequences, b, out, h200.half_shared)
        add("decode", label, kernel, sequences=sequences, grid=grid)

    for name, s in (("32/8", llama), ("64/8", wide)):
        decode(name, s)
        for changes in (
            {"near": 1},
            {"far": 2},
            {"collectors": 2},
            {"collectors": 4},
            {"warps": 8, "depth": 3, "near": 1},
            {"warps": 4, "depth": 6, "near": 3},
        ):
            decode(name, s, **changes)
    decode("32/8 b4", llama, 4)
    decode("64/8 b4", wide, 4)
    decode("32/8 b64", shape(32, 8, 128, 8192), 64, "bf16")
    decode("gemma 4/1/256", gemma)
    decode("smollm2 9/3/64", smol)
    for t in ((128, 64, 8, 3), (128, 32, 8, 4)):
        kernel = at.prefill_kernel(llama, at.PrefillTile(*t), "bf16")
        add("prefill", f"32/8 m{t[0]} t{t[1]} w{t[2]} p{t[3]}", kernel)
    add("prefill", "gemma m64 t32 w4 p2", at.prefill_kernel(gemma, at.PrefillTile(64, 32, 4, 2), "bf16"))
    meta.append(_build_reader())
    (FOLDER / "meta.json").write_text(json.dumps(meta, indent=1))
    print(len(meta), "kernels,", sum(f.stat().st_size for f in FOLDER.iterdir()), "bytes")


def _build_reader() -> dict[str, Any]:
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

    scope = {"tl": tl, "gdc_wait": gdc_wait, "gdc_launch_dependents": gdc_launch_dependents}

    def reader(x, y, TILE: tl.constexpr, TILES: tl.constexpr):
        gdc_launch_dependents()
        at = tl.program_id(0) * TILE * TILES + tl.arange(0, TILE)
        now = tl.load(x + at, eviction_policy="evict_first")
        gdc_wait()
        total = tl.zeros((TILE,), tl.int32)
        for i in range(TILES):
            following = tl.load(x + at + (i + 1) * TILE, mask=at * 0 + i + 1 < TILES, eviction_policy="evict_first")
            total += now
            now = following
        tl.store(y + tl.program_id(0), tl.sum(total, 0))

    reader.__globals__.update(scope)
    function = triton.jit(reader)
    source = ASTSource(
        fn=function,
        signature={"x": "*i32", "y": "*i32", "TILE": "constexpr", "TILES": "constexpr"},
        constexprs={"TILE": READ_TILE, "TILES": READ_TILES},
        attrs={(0,): [["tt.divisibility", 16]], (1,): [["tt.divisibility", 16]]},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "launch_pdl": True})
    (FOLDER / "reader").write_bytes(compiled.asm["cubin"])
    name = compiled.metadata.name
    return {
        "kind": "reader",
        "label": "reader",
        "file": "reader",
        "symbol": name,
        "threads": 128,
        "shared": compiled.metadata.shared,
    }


# ---- running


class Kernel:
    """A loaded cubin, launched on torch's stream with programmatic dependent launch."""

    def __init__(self, meta: dict[str, Any]) -> None:
        from cuda.bindings import driver

        self.cu, self.meta = driver, meta
        module = check(driver.cuModuleLoadData((FOLDER / meta["file"]).read_bytes()))
        self.function = check(driver.cuModuleGetFunction(module, meta["symbol"].encode()))
        if meta["shared"] > 48 * 1024:
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            check(driver.cuFuncSetAttribute(self.function, attribute, meta["shared"]))

    def __call__(self, grid: tuple[int, int, int], *tensors: Any) -> None:
        import torch

        cu = self.cu
        config = cu.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = self.meta["threads"], 1, 1
        config.sharedMemBytes = self.meta["shared"]
        config.hStream = torch.cuda.current_stream().cuda_stream
        attribute = cu.CUlaunchAttribute()
        attribute.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        value = cu.CUlaunchAttributeValue()
        value.programmaticStreamSerializationAllowed = 1
        attribute.value = value
        config.attrs, config.numAttrs = [attribute], 1
        scratch = (0, 0) if self.meta.get("language", "triton") == "triton" else ()  # Triton's own
        values = (*(t.data_ptr() for t in tensors), *scratch)
        check(cu.cuLaunchKernelEx(config, self.function, (values, (ctypes.c_void_p,) * len(values)), 0))


def check(answer: Any) -> Any:
    if int(answer[0]):
        raise RuntimeError(str(answer[0]))
    return answer[1] if len(answer) == 2 else answer[1:]


def graph_time(calls: list[Any], repeats: int = 7) -> float:
    """Median microseconds of one replay of a graph of ``calls``."""
    import torch

    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(repeats + 2):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        graph.replay()
        b.record()
        b.synchronize()
        times.append(a.elapsed_time(b) * 1e3)
    return statistics.median(times[2:])


class Decode:
    """Inputs of a decode launch in ``copies`` places of one pool."""

    def __init__(self, kernel: Kernel, pool: Any, lengths: list[int], copies: int = 1) -> None:
        import torch

        d = kernel.meta["defines"]
        self.kernel, self.d, self.pool = kernel, d, pool
        self.sequences = kernel.meta["sequences"]
        tokens, dev = d["T"], "cuda"
        self.page = 2 * d["KV_HEADS"] * tokens * d["D"]
        each = max(-(-n // tokens) for n in lengths)
        need = each * len(lengths)
        copies = min(copies, pool.numel() // self.page // need)
        order = torch.randperm(copies * need, device=dev, dtype=torch.int32).view(copies, len(lengths), each)
        self.tables = []
        for c in range(copies):
            table = torch.full((self.sequences, d["MAX_PAGES"]), 2**30, device=dev, dtype=torch.int32)
            table[: len(lengths), :each] = order[c]
            self.tables.append(table)
        self.lengths = lengths
        rows = self.sequences
        self.positions = torch.zeros(self.sequences, device=dev, dtype=torch.int32)
        self.positions[: len(lengths)] = torch.tensor(lengths, dtype=torch.int32) - 1
        self.segment = torch.arange(rows, device=dev, dtype=torch.int32)
        self.qkv = torch.randn(rows, d["LD"], device=dev)
        self.inv_freq = 500000.0 ** (-torch.arange(d["D"] // 2, device=dev).float() / (d["D"] // 2))
        self.norms = torch.rand(2, d["D"], device=dev) + 0.5
        kind = torch.bfloat16 if rows > 4 else torch.float32
        self.out = torch.full((rows, d["HEADS"] * d["D"]), float("nan"), device=dev, dtype=kind)
        group = d["HEADS"] // d["KV_HEADS"]
        parts = rows * d["KV_HEADS"] * d["SPLITS"] * group * d["D"] // 4 if d["SPLITS"] > 1 else 0
        self.partial = torch.zeros(max(1, parts * 8), device=dev, dtype=torch.int32)
        self.counts = torch.tensor([len(lengths)] * 3 + [0], device=dev, dtype=torch.int32)
        self.grid = (kernel.meta["grid"], 1, 1)
        self.nbytes = sum(min(n, d["WINDOW"] or n) for n in lengths) * d["KV_HEADS"] * d["D"] * 4

    def launch(self, copy: int = 0) -> None:
        table = self.tables[copy % len(self.tables)]
        self.kernel(
            self.grid, self.qkv, self.positions, self.segment, table, self.inv_freq, self.norms[0], self.norms[1],
            self.pool, self.out, self.partial, self.counts,
        )  # fmt: skip

    def want(self) -> Any:
        import torch

        d, rows = self.d, len(self.lengths)
        heads, kv, dim, tokens = d["HEADS"], d["KV_HEADS"], d["D"], d["T"]
        pages = self.pool[: self.pool.numel() // self.page * self.page].view(-1, 2, kv, tokens, dim)
        out = []
        for r in range(rows):
            n = self.lengths[r]
            angle = (self.positions[r].float() * self.inv_freq).double()
            c, s = angle.cos() * d["FACTOR"], angle.sin() * d["FACTOR"]

            def turn(x: Any, norm: Any, c: Any = c, s: Any = s) -> Any:
                if d["QK_NORM"]:
                    x = x / (x.square().mean(-1, keepdim=True) + d["EPS"]).sqrt() * norm.double()
                a, b = x.chunk(2, -1)
                return torch.cat((a * c - b * s, b * c + a * s), -1)

            line = self.qkv[r].double()
            q = turn(line[d["Q_COL"] :][: heads * dim].view(heads, dim), self.norms[0])
            k = turn(line[d["K_COL"] :][: kv * dim].view(kv, dim), self.norms[1])
            v = line[d["V_COL"] :][: kv * dim].view(kv, dim)
            old = pages[self.tables[0][r, : -(-n // tokens)].long()]
            first = max(0, n - d["WINDOW"]) if d["WINDOW"] else 0
            keys, values = (
                torch.cat((old[:, i].transpose(1, 2).reshape(-1, kv, dim)[: n - 1].double(), x[None]))[first:]
                for i, x in ((0, k), (1, v))
            )
            g = heads // kv
            scores = torch.einsum("kgd,jkd->kgj", q.view(kv, g, dim), keys) * d["SCALE"]
            out.append(torch.einsum("kgj,jkd->kgd", scores.softmax(-1), values).reshape(-1))
        return torch.stack(out)

    def error(self) -> float:
        """Relative error of one launch; checks that parts are taken away and a second launch gives the same bits."""
        import torch

        want = self.want()
        self.out.fill_(float("nan"))
        self.launch()
        first = self.out.clone()
        self.out.fill_(float("nan"))
        self.launch()
        torch.cuda.synchronize()
        live = len(self.lengths)
        assert torch.equal(first[:live], self.out[:live]), "two launches differ"
        assert not self.partial.any(), "parts are left"
        return float((first[:live].double() - want).norm() / want.norm())


def main_decode(kernels: list[Kernel], reader: Kernel, pool: Any) -> None:
    import torch

    weights = torch.randint(0, 2**31 - 1, (40, READ_BLOCKS * READ_TILE * READ_TILES), device="cuda", dtype=torch.int32)
    sums = torch.zeros(READ_BLOCKS, device="cuda", dtype=torch.int32)

    def read(i: int) -> None:
        reader((READ_BLOCKS, 1, 1), weights[i % len(weights)], sums)

    base = graph_time([lambda i=i: read(i) for i in range(80)]) / 80
    say(f"reader alone {base:.2f} us, {weights[0].numel() * 4 / base / 1e6:.2f} TB/s")
    failed = 0
    say("decode: us and % of 4.45 TB/s alone; +us = added behind the reader; error is relative")
    for kernel in kernels:
        d, sequences = kernel.meta["defines"], kernel.meta["sequences"]
        top = d["MAX_PAGES"] * d["T"]
        tests = [[n] for n in (1, 2, 17, 100, 193, 200, 400, 511, 1030, 4097, 5000, top) if n <= top]
        if sequences > 1:
            tests = [torch.randint(1, 1500, (sequences,)).tolist(), [5] * max(1, sequences // 8), [2048] * sequences]
        try:
            worst = max(Decode(kernel, pool, lengths).error() for lengths in tests)
            assert worst < (6e-3 if sequences > 4 else 2e-3), f"error {worst}"
        except AssertionError as error:
            say(f"{kernel.meta['label']:42s} WRONG: {error}")
            failed += 1
            continue
        cells = []
        for n in (2048,) if sequences > 1 else [n for n in CONTEXTS if n <= top]:
            nbytes = n * d["KV_HEADS"] * d["D"] * 4 * sequences
            case = Decode(kernel, pool, [n] * sequences, copies=max(4, min(200, int(3e8 / nbytes))))
            launches = max(4, min(200, int(1.2e9 / nbytes)))
            each = graph_time([lambda i=i, c=case: c.launch(i) for i in range(launches)]) / launches
            cell = f"{n}: {each:.2f} ({case.nbytes / each / BANDWIDTH * 1e8:.0f}%)"
            if n <= 8192 and sequences <= 4:
                both = graph_time(
                    [lambda i=i, c=case, f=f: read(i) if f else c.launch(i) for i in range(80) for f in (1, 0)]
                )
                cell += f" +{both / 80 - base:.2f}"
            cells.append(cell)
        say(f"{kernel.meta['label']:42s} err {worst:.1e} | " + " | ".join(cells))
    assert not failed, f"{failed} kernels are wrong"


def main_prefill(kernels: list[Kernel], pool: Any) -> None:
    import torch

    say("prefill: us and TFLOP/s (causal-counted)")
    for kernel in kernels:
        d = kernel.meta["defines"]
        heads, kv, dim, tokens = d["HEADS"], d["KV_HEADS"], d["D"], d["T"]
        positions = torch.arange(32768 + 64, device="cuda", dtype=torch.int32)
        pages = pool[: 1024 * 2 * kv * tokens * dim].view(1024, 2, kv, tokens, dim)
        table = torch.full((1, d["MAX_PAGES"]), 2**30, device="cuda", dtype=torch.int32)
        table[0, : min(1024, d["MAX_PAGES"])] = torch.randperm(1024, device="cuda", dtype=torch.int32)[: d["MAX_PAGES"]]
        segment = torch.zeros(2048, device="cuda", dtype=torch.int32)
        per = d["BM"] // (heads // kv)

        def run(position: int, rows: int, q: Any, out: Any, counts: Any, kernel: Kernel = kernel) -> None:
            grid = (kv, -(-rows // per), 1)
            kernel(grid, q, positions[position:], segment, table, pool, out, counts)

        worst = 0.0
        for position, rows, live in ((0, 512, 500), (1000, 512, 512), (77, 64, 33)):
            q = torch.randn(rows, heads, dim, device="cuda").half()
            out = torch.full((rows, heads * dim), float("nan"), device="cuda", dtype=torch.bfloat16)
            counts = torch.tensor([live, 1, 1, 0], device="cuda", dtype=torch.int32)
            aligned = positions.clone()
            kernel((kv, -(-rows // per), 1), q, (aligned + position), segment, table, pool, out, counts)
            n = position + live
            old = pages[table[0, : -(-n // tokens)].long()]
            k, v = (old[:, i].transpose(1, 2).reshape(-1, kv, dim)[:n].double() for i in (0, 1))
            scores = torch.einsum("rkgd,jkd->kgrj", q[:live].double().view(live, kv, -1, dim), k) * d["SCALE"]
            i, j = torch.arange(live, device="cuda")[:, None] + position, torch.arange(n, device="cuda")
            hidden = (j > i) | ((i - j >= d["WINDOW"]) if d["WINDOW"] else False)
            want = torch.einsum("kgrj,jkd->rkgd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v).reshape(
                live, -1
            )
            worst = max(worst, float((out[:live].double() - want).norm() / want.norm()))
            assert out[live:].isnan().all()
        assert worst < 6e-3, (kernel.meta["label"], worst)
        cells = []
        for position, rows in ((0, 512), (0, 2048), (30720, 2048)):
            if position + rows > d["MAX_PAGES"] * tokens:
                continue
            q = torch.randn(rows, heads, dim, device="cuda").half()
            out = torch.empty(rows, heads * dim, device="cuda", dtype=torch.bfloat16)
            counts = torch.tensor([rows, 1, 1, 0], device="cuda", dtype=torch.int32)
            each = (
                graph_time([lambda p=position, r=rows, q=q, o=out, c=counts: run(p, r, q, o, c) for _ in range(10)])
                / 10
            )
            seen = sum(min(position + r + 1, d["WINDOW"] or 1 << 30) for r in range(rows))
            cells.append(f"{rows}@{position}: {each:.1f} us {4 * seen * heads * dim / each / 1e6:.0f} TF")
        say(f"{kernel.meta['label']:42s} err {worst:.1e} | " + " | ".join(cells))


_lines: list[str] = []


def say(line: str) -> None:
    print(line, flush=True)
    _lines.append(line)


def measure() -> None:
    import torch

    torch.manual_seed(0)
    began = time.time()
    torch.zeros(1, device="cuda")
    meta = json.loads((FOLDER / "meta.json").read_text())
    kernels = {kind: [Kernel(m) for m in meta if m["kind"] == kind] for kind in ("decode", "prefill", "reader")}
    pool = torch.empty(2_300_000_000 // 2, device="cuda", dtype=torch.float16).normal_()
    try:
        main_prefill(kernels["prefill"], pool)
        main_decode(kernels["decode"], kernels["reader"][0], pool)
    finally:
        say(f"{time.time() - began:.0f} s")
        if "OUT" in os.environ:
            (Path(os.environ["OUT"]) / "attention.txt").write_text("\n".join(_lines) + "\n")


if __name__ == "__main__":
    import torch

    sys.exit(measure() if torch.cuda.is_available() else build())
