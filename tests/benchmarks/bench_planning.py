"""Time the planning of a checkpoint of 10^12 parameters: headers, each pass, the plan's JSON, and the whole process.

    python tests/benchmarks/bench_planning.py [--layers 61] [--shards 200] [--repeats 3] [--keep FOLDER]

The checkpoint has the shape of Kimi-K2 with INT4 experts (compressed-tensors, groups of 32): some 208,000 tensors in
sparse files of the true sizes, which take no disk; only headers and the ``weight_shape`` of each expert are written.
It is planned for one rank, for 8, and for 8 with each expert whole on one of them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from small_model import write_spec, write_tokenizer

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "kimi_k2",
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "first_k_dense_replace": 1,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 384,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.827,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 163840,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "rope_scaling": {"type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0,
                     "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    "tie_word_embeddings": False,
    "eos_token_id": 0,
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32},
            }
        },
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
    },
}  # fmt: skip
ORDER = {"I64": 0, "F32": 1, "I32": 2, "BF16": 3}
"""The library writes tensors of wide types first."""
BYTES = {"I64": 8, "F32": 4, "I32": 4, "BF16": 2}
Tensor = tuple[str, str, tuple[int, ...]]
"""Name, type and shape."""
MEMORY = {"memory": "4TB"}
CASES: dict[str, dict[str, Any]] = {
    "1 rank": {},
    "8 ranks": {"count": 8},
    "8 ranks, expert 8": {"count": 8, "parallel": {"expert": 8}},
}


def tensors(config: dict[str, Any]) -> Iterator[Tensor]:
    """All tensors, in the order of the layers."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    yield "model.embed_tokens.weight", "BF16", (vocab, hidden)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        for name, shape in attention(config).items():
            yield f"{at}.{name}.weight", "BF16", shape
        if layer < config["first_k_dense_replace"]:
            yield from mlp(f"{at}.mlp", hidden, config["intermediate_size"])
            continue
        count, width = config["n_routed_experts"], config["moe_intermediate_size"]
        yield f"{at}.mlp.gate.weight", "BF16", (count, hidden)
        yield f"{at}.mlp.gate.e_score_correction_bias", "F32", (count,)
        yield from mlp(f"{at}.mlp.shared_experts", hidden, width)
        for name, _, shape in (each for expert in range(count) for each in mlp(f"{at}.mlp.experts.{expert}", hidden,
                                                                                  width)):  # fmt: skip
            yield f"{name}_packed", "I32", (shape[0], shape[1] // 8)
            yield f"{name}_scale", "BF16", (shape[0], shape[1] // 32)
            yield f"{name}_shape", "I64", (2,)
    yield "model.norm.weight", "BF16", (hidden,)
    yield "lm_head.weight", "BF16", (vocab, hidden)


def attention(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of the attention and the norms of a layer."""
    hidden, heads, rank = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    nope, rotated, value = (config[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    return {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_a_proj": (config["q_lora_rank"], hidden),
        "self_attn.q_a_layernorm": (config["q_lora_rank"],),
        "self_attn.q_b_proj": (heads * (nope + rotated), config["q_lora_rank"]),
        "self_attn.kv_a_proj_with_mqa": (rank + rotated, hidden),
        "self_attn.kv_a_layernorm": (rank,),
        "self_attn.kv_b_proj": (heads * (nope + value), rank),
        "self_attn.o_proj": (hidden, heads * value),
    }


def mlp(at: str, hidden: int, width: int) -> Iterator[Tensor]:
    """The three projections of a feed-forward."""
    for name, shape in {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}.items():
        yield f"{at}.{name}_proj.weight", "BF16", shape


def write_checkpoint(folder: Path, config: dict[str, Any], shards: int) -> tuple[int, int]:
    """The checkpoint in ``folder``, and how many tensors and bytes it has."""
    folder.mkdir(parents=True, exist_ok=True)
    listed = list(tensors(config))
    each = -(-len(listed) // shards)
    shards = -(-len(listed) // each)
    weight_map: dict[str, str] = {}
    total = 0
    for number in range(shards):
        name = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        members = listed[number * each : (number + 1) * each]
        total += write_shard(folder / name, members, config)
        weight_map |= {tensor: name for tensor, _, _ in members}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)
    return len(listed), total


def write_shard(path: Path, members: Sequence[Tensor], config: dict[str, Any]) -> int:
    """One sparse file, and the bytes of its tensors. Of these only the shapes of packed weights are written."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    stated = bytearray()
    offset = 0
    for name, dtype, shape in sorted(members, key=lambda member: (ORDER[member[1]], member[0])):
        size = BYTES[dtype] * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
        if dtype == "I64":
            wide, narrow = config["hidden_size"], config["moe_intermediate_size"]
            stated += struct.pack("<2q", *((wide, narrow) if ".down_proj." in name else (narrow, wide)))
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + stated)
        file.truncate(8 + len(text) + offset)
    return offset


def run_case(spec: Path, repeats: int) -> str:
    """A line of medians: `tapeout compile --plan-only` as a process of its own, then the steps of another."""
    plan = spec.with_name("plan.json")
    tapeout = str(Path(sys.executable).with_name("tapeout"))
    command = [tapeout, "compile", str(spec), "--plan-only", "-o", str(plan), "--force"]
    walls: list[float] = []
    cpus: list[float] = []
    peaks: list[float] = []
    for _ in range(repeats):
        started = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            sys.exit(f"{' '.join(command)} ended with {process.returncode}")
        walls.append(time.perf_counter() - started)
        cpus.append(usage.ru_utime + usage.ru_stime)
        peaks.append(usage.ru_maxrss / 1024)
    figures = f"{statistics.median(walls):.2f} s ({statistics.median(cpus):.2f} s of CPU), {max(peaks):.0f} MiB at most"
    steps = json.loads(subprocess.check_output([sys.executable, __file__, "--steps", str(spec)]))
    listed = ", ".join(f"{name} {seconds:.2f}" for name, seconds in steps.items())
    return f"{figures}, plan of {plan.stat().st_size / 1e6:.1f} MB\n    {listed}"


def time_steps(spec: Path) -> dict[str, float]:
    """Seconds of CPU of each step of a plan, in this process; what the driver does, one by one."""
    times: dict[str, float] = {}
    at = time.process_time()

    def note(name: str) -> None:
        nonlocal at
        now = time.process_time()
        times[name], at = now - at, now

    from tapeout.compiler import driver
    from tapeout.compiler.collector import collector_paused
    from tapeout.compiler.plan import build_plan, canonical
    from tapeout.compiler.spec import load_spec

    note("imports")
    loaded = load_spec(spec, [])
    device = driver.load_device(loaded.topology.device)
    note("spec")
    checkpoint = driver.open_source(loaded.model.source, None, spec.parent)
    note("headers")
    builder = driver.KernelBuilder(spec.parent)
    inputs = (loaded.model, loaded.quantization, loaded.topology, loaded.serving, device, checkpoint, builder,
              driver.Purpose(plan_only=True))  # fmt: skip
    with collector_paused():
        results = driver.PIPELINE.run(*inputs, callback=lambda name, _: note(name))
    tokenizer = driver.build_tokenizer(checkpoint)
    note("tokenizer")
    plan = build_plan(loaded, device, results, tokenizer.generation, tokenizer.decisions)
    note("plan")
    canonical(plan)
    note("JSON")
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the planning of a very large checkpoint.")
    parser.add_argument("--layers", type=int, default=CONFIG["num_hidden_layers"])
    parser.add_argument("--shards", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--keep", type=Path, help="a folder for the checkpoint, made if it is not there, and kept")
    parser.add_argument("--steps", type=Path, help="a spec: print the seconds of each step as JSON, and no more")
    arguments = parser.parse_args()
    if arguments.steps:
        print(json.dumps(time_steps(arguments.steps)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder: Path = arguments.keep or Path(scratch) / "checkpoint"
        if not folder.exists():
            config = CONFIG | {"num_hidden_layers": arguments.layers}
            count, size = write_checkpoint(folder, config, arguments.shards)
            print(f"{count:,} tensors, {size / 1e9:.0f} GB in {arguments.shards} files")
        for name, topology in CASES.items():
            spec = write_spec(Path(scratch) / "spec.json", folder.resolve(), topology={**MEMORY, **topology})
            print(f"{name}: {run_case(spec, arguments.repeats)}", flush=True)


if __name__ == "__main__":
    main()
