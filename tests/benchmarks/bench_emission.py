"""Emission of a generated BF16 checkpoint beside `cp` and `llama-quantize` on the same file: MB/s of source, peak RSS.

    python tests/benchmarks/bench_emission.py [--gb 4] [--formats q8_0,q4_k,bf16] [--reps 3] [--jobs N]
        [--llama-quantize PATH] [--folder DIR]

Runs are interleaved and medians printed. The checkpoint (a Llama of random weights) is written to a temporary folder in
DIR, which also takes the outputs; both are deleted. Files are warm in the page cache if memory allows; nobody syncs.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HIDDEN, FFN, KV, VOCAB = 2048, 8192, 512, 49152
LLAMA_TYPES = {"q8_0": "Q8_0", "q4_0": "Q4_0", "q4_1": "Q4_1", "q4_k": "Q4_K_S", "q6_k": "Q6_K", "bf16": "BF16"}


def shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """GGUF tensors of a Llama with tied embeddings."""
    found: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(layers):
        rows = {
            "attn_q": (HIDDEN, HIDDEN),
            "attn_k": (KV, HIDDEN),
            "attn_v": (KV, HIDDEN),
            "attn_output": (HIDDEN, HIDDEN),
        }
        rows |= {"ffn_gate": (FFN, HIDDEN), "ffn_up": (FFN, HIDDEN), "ffn_down": (HIDDEN, FFN)}
        found |= {f"blk.{layer}.{name}.weight": shape for name, shape in rows.items()}
        found |= {f"blk.{layer}.{name}.weight": (HIDDEN,) for name in ("attn_norm", "ffn_norm")}
    return found


def generate(path: Path, gigabytes: float) -> None:
    """Write the checkpoint: normal weights in BF16, norms in F32; in a child, whose RSS no other child inherits."""
    import gguf
    import numpy as np

    per_layer = 2 * (2 * HIDDEN * HIDDEN + 2 * KV * HIDDEN + 3 * FFN * HIDDEN)
    layers = max(1, round((gigabytes * 1e9 - 2 * VOCAB * HIDDEN) / per_layer))
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(2048), writer.add_embedding_length(HIDDEN), writer.add_block_count(layers)
    writer.add_feed_forward_length(FFN), writer.add_head_count(32), writer.add_head_count_kv(8)
    writer.add_layer_norm_rms_eps(1e-5), writer.add_rope_dimension_count(64), writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("no_vocab")
    for name, shape in shapes(layers).items():
        size = int(np.prod(shape)) * (2 if len(shape) == 2 else 4)
        if len(shape) == 2:
            kind = gguf.GGMLQuantizationType.BF16
            writer.add_tensor_info(name, (*shape[:-1], shape[-1] * 2), np.dtype(np.uint8), size, raw_dtype=kind)
        else:
            writer.add_tensor_info(name, shape, np.dtype(np.float32), size)
    writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_ti_data_to_file()
    normal = np.random.default_rng(0).standard_normal(1 << 24, np.float32) * np.float32(0.02)
    pool = (normal.view(np.uint32) >> 16).astype(np.uint16)
    for number, shape in enumerate(shapes(layers).values()):
        if len(shape) == 1:
            writer.write_tensor_data(np.ones(shape, np.float32))
        else:
            turned = np.roll(pool, number * 4099)
            writer.write_tensor_data(np.resize(turned, int(np.prod(shape))).reshape(shape).view(np.uint8))
    writer.close()


def emit(source: Path, out: Path, to: str, jobs: int) -> None:
    """Emit every tensor and print seconds and peak RSS: the body of a child process."""
    from tapeout.compiler.checkpoints import open_checkpoint
    from tapeout.compiler.emit.executors import Threads
    from tapeout.compiler.emit.jobs import Journal
    from tapeout.compiler.emit.native import load_native
    from tapeout.compiler.emit.pieces import WeightEntry
    from tapeout.compiler.emit.weights import emission_key, emit_weights, plan_emission
    from tapeout.compiler.environment import Environment
    from tapeout.compiler.layouts import packed_bytes, plan_offsets
    from tapeout.compiler.recipes import Convert, Pack, Read, Recipe

    native = load_native(Environment.read().cache / "emit")
    start = time.perf_counter()
    checkpoint = open_checkpoint(source)
    recipes: dict[str, Recipe] = {}
    sizes: list[int] = []
    for name, info in checkpoint.tensors.items():
        matrix = len(info.shape) == 2
        read = Read(name, info.shape, info.format)
        step = Convert(read, to) if matrix and to != info.format else read
        recipes[name] = Pack(step, "tile16" if matrix else "raw")
        sizes.append(packed_bytes(step.shape, step.format, "tile16" if matrix else "raw"))
    places = zip(recipes.items(), plan_offsets(sizes), strict=True)
    entries = [WeightEntry(name, recipe, *at) for (name, recipe), at in places]
    emission = plan_emission(entries, checkpoint)
    journal = Journal(out.with_suffix(".journal"), emission_key(emission))
    (report,) = emit_weights(emission, [out], native, journal, executor=Threads(jobs))
    seconds = time.perf_counter() - start
    worst = max((error.relative_rms for error in report.errors.values()), default=0.0)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"seconds": seconds, "peak_rss": peak, "relative_rms": worst, "bytes": report.nbytes}))


def run_child(command: list[str], out: Path) -> tuple[float, float, int, float]:
    """Seconds, processor seconds, peak RSS in bytes, and the worst relative error if the child reports one."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    text = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    if status:
        raise SystemExit(f"{' '.join(command)} failed:\n{text[-2000:]}")
    out.unlink(missing_ok=True)
    reported = json.loads(text) if text.startswith("{") else {}
    processor = usage.ru_utime + usage.ru_stime
    return reported.get("seconds", seconds), processor, usage.ru_maxrss * 1024, reported.get("relative_rms", 0.0)


def bench(args: argparse.Namespace, folder: Path) -> None:
    source, out = folder / "source.gguf", folder / "out"
    subprocess.run([sys.executable, __file__, "--generate", str(source), "--gb", str(args.gb)], check=True)
    size = source.stat().st_size
    print(f"source: {size / 1e9:.2f} GB BF16, {args.jobs} workers, {args.reps} runs each")
    rows: dict[str, list[tuple[float, float, int, float]]] = {}
    for _ in range(args.reps):
        rows.setdefault("cp", []).append(run_child(["cp", str(source), str(out)], out))
        for to in args.formats.split(","):
            ours = [
                sys.executable,
                __file__,
                "--emit",
                to,
                "--source",
                str(source),
                "--out",
                str(out),
                "--jobs",
                str(args.jobs),
            ]
            rows.setdefault(f"tapeout {to}", []).append(run_child(ours, out))
            if args.llama_quantize:
                theirs = [args.llama_quantize, "--pure", str(source), str(out), LLAMA_TYPES[to], str(args.jobs)]
                rows.setdefault(f"llama-quantize {to}", []).append(run_child(theirs, out))
    print(f"{'':24}{'s':>8}{'MB/s':>8}{'CPU s':>8}{'RSS MB':>8}{'rel. RMS':>10}")
    for name, runs in rows.items():
        seconds, processor = (statistics.median(run[at] for run in runs) for at in (0, 1))
        peak = max(run[2] for run in runs)
        error = f"{runs[0][3]:10.5f}" if runs[0][3] else ""
        print(f"{name:24}{seconds:8.2f}{size / seconds / 1e6:8.0f}{processor:8.2f}{peak / 1e6:8.0f}{error}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=4.0)
    parser.add_argument("--formats", default="q8_0,q4_k,bf16")
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--llama-quantize", help="path of llama.cpp's program, to run it beside ours")
    parser.add_argument("--folder", default=".", help="where to put the temporary folder; needs about three times --gb")
    parser.add_argument("--generate", help=argparse.SUPPRESS)
    parser.add_argument("--emit", help=argparse.SUPPRESS)
    parser.add_argument("--source", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.generate:
        generate(Path(args.generate), args.gb)
        return
    if args.emit:
        emit(Path(args.source), Path(args.out), args.emit, args.jobs)
        return
    with tempfile.TemporaryDirectory(prefix="bench-emission-", dir=args.folder) as folder:
        bench(args, Path(folder))


if __name__ == "__main__":
    main()
