"""A whole compile of a large checkpoint to several ranks beside `cp` of its files: GB/s of each, and peak memory.

    python tests/benchmarks/bench_ranks_emission.py [GB] [--ranks 8] [--experts N] [--reps 3] [--folder DIR]

Writes a checkpoint of random BF16 weights (layers of Mistral 7B; with --experts, of Mixtral 8x7B) in shards of 5 GB to
a temporary folder in DIR and removes it in the end; at most it takes the source and one copy or artifact (which holds
the embedding once a rank). Runs alternate. Each starts with the source out of the page cache, and its time ends when
all that it wrote is on the disk: `compile` syncs its artifact itself, and `cp` is followed by `sync` of the copy. The
build cache is off; kernels come from it, since a compile of any model builds the same ones. Reported rates count bytes
read and bytes written, ratios are of neighbouring runs; memory is the peak RSS of the compiling process.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from peers import machine

HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 4096, 14336, 32, 8, 128, 32768
SHARD_BYTES = 5_000_000_000


def layer_shapes(experts: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of one layer's tensors."""
    found: dict[str, tuple[int, ...]] = {
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
        "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
    }
    if not experts:
        return found | {
            "mlp.gate_proj": (FFN, HIDDEN),
            "mlp.up_proj": (FFN, HIDDEN),
            "mlp.down_proj": (HIDDEN, FFN),
        }
    found["block_sparse_moe.gate"] = (experts, HIDDEN)
    for expert in range(experts):
        at = f"block_sparse_moe.experts.{expert}"
        found |= {f"{at}.w1": (FFN, HIDDEN), f"{at}.w2": (HIDDEN, FFN), f"{at}.w3": (FFN, HIDDEN)}
    return found


def config(layers: int, experts: int) -> dict[str, object]:
    """config.json of the model."""
    kind: dict[str, object] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    if experts:
        kind = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
        kind |= {"num_local_experts": experts, "num_experts_per_tok": 2}
    return kind | {
        "hidden_size": HIDDEN, "intermediate_size": FFN, "num_hidden_layers": layers, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "vocab_size": VOCAB, "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5, "rope_theta": 1e6, "hidden_act": "silu", "tie_word_embeddings": False,
    }  # fmt: skip


def nbytes(shape: tuple[int, ...]) -> int:
    """Bytes in BF16."""
    return 2 * math.prod(shape)


def write_checkpoint(folder: Path, gigabytes: float, experts: int) -> None:
    """Shards, index and config."""
    each = sum(map(nbytes, layer_shapes(experts).values()))
    layers = max(1, round((gigabytes * 1e9 - 2 * nbytes((VOCAB, HIDDEN))) / each))
    shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(layers):
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in layer_shapes(experts).items()}
    shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    for name, shape in shapes.items():
        if sum(map(nbytes, shards[-1].values())) + nbytes(shape) > SHARD_BYTES:
            shards.append({})
        shards[-1][name] = shape
    import numpy as np

    folder.mkdir()
    normal = np.random.default_rng(0).standard_normal(1 << 24, np.float32) * np.float32(0.02)
    pool = np.tile((normal.view(np.uint32) >> 16).astype(np.uint16), 2)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        weight_map |= dict.fromkeys(shard, file)
        write_shard(folder / file, shard, pool)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config(layers, experts)))
    subprocess.run(["sync", *map(str, folder.iterdir())], check=True)


def write_shard(path: Path, shapes: dict[str, tuple[int, ...]], pool: Any) -> None:
    """Each tensor begins elsewhere in a pool of 2^24 normal numbers, which it repeats."""
    header, end = dict[str, object](), 0
    for name, shape in shapes.items():
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + nbytes(shape)]}
        end += nbytes(shape)
    text = json.dumps(header).encode()
    half = len(pool) // 2
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shapes.items():
            start = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little") % half
            for at in range(0, nbytes(shape) // 2, half):
                file.write(pool[start : start + min(half, nbytes(shape) // 2 - at)].data)


def forget(folder: Path) -> None:
    """Put the files of a folder out of the page cache."""
    for path in folder.iterdir():
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def timed(words: list[str]) -> tuple[float, float, int]:
    """Seconds, processor seconds, and peak RSS in bytes of a command."""
    start = time.perf_counter()
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(words)} failed")
    return time.perf_counter() - start, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024


def copy(source: Path, target: Path) -> tuple[float, float, int, int]:
    """`cp` and `sync` of the files; the last number is the bytes written."""
    forget(source)
    found = timed(["sh", "-c", f"cp -r '{source}' '{target}' && sync '{target}'/* '{target}'"])
    written = sum(path.stat().st_size for path in target.iterdir())
    shutil.rmtree(target)
    return *found, written


def compile_(spec: Path, source: Path, target: Path) -> tuple[float, float, int, int]:
    """`tapeout compile`, which syncs."""
    forget(source)
    main = "import sys; from tapeout.compiler.cli import main; sys.exit(main())"
    found = timed([sys.executable, "-c", main, "compile", str(spec), "-o", str(target), "--no-cache"])
    written = sum(path.stat().st_size for path in target.glob("weights/*"))
    shutil.rmtree(target)
    return *found, written


def bench(args: argparse.Namespace, folder: Path) -> None:
    """Write the source, alternate, print a table."""
    source, spec = folder / "source", folder / "spec.yaml"
    # in a child: the RSS of this process counts as that of the commands it starts
    words = [sys.executable, __file__, str(args.gb), f"--experts={args.experts}", f"--generate={source}"]
    subprocess.run(words, check=True)
    size = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    topology = {"device": "cpu", "count": args.ranks, "memory": "4TB"}  # nobody runs it
    spec.write_text(
        json.dumps({"model": {"source": str(source)}, "topology": topology, "serving": {"max_context": 512}})
    )
    print(machine())
    print(f"source: {size / 1e9:.2f} GB in {len(list(source.glob('*.safetensors')))} shards, {args.ranks} ranks")
    runs: dict[str, list[tuple[float, float, int, int]]] = {"cp": [], "compile": []}
    for number in range(args.reps):
        runs["cp"].append(copy(source, folder / "copy"))
        runs["compile"].append(compile_(spec, source, folder / "artifact"))
        times = ", ".join(f"{name} {each[-1][0]:.1f} s" for name, each in runs.items())
        print(f"run {number + 1}: {times}, load average {os.getloadavg()[0]:.1f}", flush=True)
    print(f"{'':10}{'s':>8}{'CPU s':>8}{'GB written':>12}{'read GB/s':>11}{'written GB/s':>14}{'peak RSS MB':>13}")
    for name, found in runs.items():
        seconds, processor = (statistics.median(run[at] for run in found) for at in (0, 1))
        peak, written = max(run[2] for run in found), found[0][3]
        print(f"{name:10}{seconds:8.1f}{processor:8.1f}{written / 1e9:12.2f}{size / seconds / 1e9:11.3f}"
              f"{written / seconds / 1e9:14.3f}{peak / 1e6:13.0f}")  # fmt: skip
    ratios = [ours[3] / ours[0] * theirs[0] / theirs[3] for theirs, ours in zip(*runs.values(), strict=True)]
    listed = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    print(f"written GB/s, compile to cp: {listed}, median {statistics.median(ratios):.2f}")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gb", type=float, nargs="?", default=30.0)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--experts", type=int, default=0)
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--folder", default=".", help="where to put the temporary folder")
    parser.add_argument("--generate", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.generate:
        write_checkpoint(args.generate, args.gb, args.experts)
        return
    with tempfile.TemporaryDirectory(prefix="bench-emission-", dir=args.folder) as folder:
        bench(args, Path(folder))


if __name__ == "__main__":
    main()
