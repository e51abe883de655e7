"""Rates of a loaded artifact beside their floors: decode, batches, prefill, live against maximum context, memory."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gpu_engine

from tapeout.runtime.bench import bytes_per_token


@dataclass(frozen=True)
class Ceilings:
    """What the card was measured to do in the same run: bytes a second of plain reads, bf16 operations a second."""

    bandwidth: float
    operations: float


def decode(model: Any, ceilings: Ceilings, rows: int = 1, context: int = 128, steps: int = 128) -> dict[str, float]:
    """Tokens a second of greedy decode through the host, and a step's time on the device alone."""
    streamed: list[float] = []
    replayed: list[float] = []
    replays = gpu_engine.Replays(model)
    for _ in range(3):
        with gpu_engine.sequences(model, rows, context) as (held, first):
            *_, tokens = model.stream(held, first, 4)
            started = time.perf_counter()
            *_, tokens = model.stream(held, tokens, steps)
            streamed.append((time.perf_counter() - started) / steps)
            replayed.append(replays.seconds(held, tokens, 32))
    wall, device = statistics.median(streamed), statistics.median(replayed)
    weights = bytes_per_token(model.plan)
    cached = rows * (context + steps / 2) * model.plan["memory"]["kv"]["bytes_per_token"]
    floor = (weights + cached) / ceilings.bandwidth
    print(f"  {model.folder.name} decode, batch {rows}, {context} tokens of context: {rows / wall:,.1f} tok/s; "
          f"a step {wall * 1e6:,.1f} us ({min(streamed) * 1e6:,.1f} best), {device * 1e6:,.1f} us on the device alone; "
          f"reads {weights / 1e9:.3f} GB of weights and {cached / 1e9:.3f} GB of cache, "
          f"{(weights + cached) / wall / 1e12:.2f} TB/s, {100 * floor / wall:.1f} % of plain reads "
          f"({100 * floor / device:.1f} % on the device)", flush=True)  # fmt: skip
    return {"tok_s": rows / wall, "step_s": wall, "device_s": device, "of_bandwidth": floor / wall}


def batch(model: Any, ceilings: Ceilings, rows: int = 64, context: int = 1024) -> dict[str, float]:
    """Decode of many sequences; the floors of linear layers (bytes, operations) and of attention (bytes) beside it."""
    result = decode(model, ceilings, rows, context, 32)
    operations = 2 * rows * _matrix_parameters(model)
    linear = max(bytes_per_token(model.plan) / ceilings.bandwidth, operations / ceilings.operations)
    attention = rows * (context + 16) * model.plan["memory"]["kv"]["bytes_per_token"] / ceilings.bandwidth
    share = (linear + attention) / result["step_s"]
    print(f"    floors: linear {linear * 1e3:.2f} ms, attention {attention * 1e3:.2f} ms; their sum is "
          f"{100 * share:.1f} % of a step, {result['step_s'] * 1e3:.2f} ms", flush=True)  # fmt: skip
    return result | {"of_floors": share}


def prefill(model: Any, ceilings: Ceilings, counts: Sequence[int] = (512, 2048)) -> dict[str, float]:
    """Tokens a second from the prompt to the first token, and the share of the measured bf16 rate."""
    result: dict[str, float] = {}
    for count in counts:
        ids = gpu_engine.prompt(count, model.vocab_size)

        def run(ids: list[int] = ids) -> None:
            sequence = model.pool.open()
            try:
                model.prefill(sequence, ids)
            finally:
                model.pool.close(sequence)

        seconds = gpu_engine.median_seconds(run)
        config = model.plan["model"]["config"]
        attention = 2 * config["layers"] * config["heads"] * config["head_dim"] * count * count
        head = 2 * config["vocab_size"] * config["hidden"]
        operations = 2 * count * (_matrix_parameters(model) - head // 2) + head + attention
        share = operations / seconds / ceilings.operations
        print(f"  {model.folder.name} prefill of {count}: {count / seconds:,.0f} tok/s, {seconds * 1e3:.2f} ms, "
              f"{operations / seconds / 1e12:.0f} TFLOP/s, {100 * share:.1f} % of bf16 products",
              flush=True)  # fmt: skip
        result[f"prefill_{count}_tok_s"] = count / seconds
        result[f"prefill_{count}_of_rate"] = share
    return result


def _matrix_parameters(model: Any) -> int:
    """Elements of all matrices that a step multiplies with: the embedding counts only where it is the head too."""
    used = {
        each["args"]["w"][1]
        for graph in model.plan["graphs"]
        if graph["phase"] in ("decode", "head")
        for each in graph["launches"]
        if isinstance(each["args"].get("w"), list) and not each["kernel"].startswith("embed")
    }
    return sum(math.prod(weight["shape"]) for weight in model.plan["weights"] if weight["name"] in used)


def live_context(folders: Sequence[Path], live: int = 512) -> dict[str, float]:
    """A step's time at ``live`` tokens in artifacts that differ in their maximum context alone."""
    times: dict[str, float] = {}
    for folder in folders:
        with gpu_engine.open_model(folder) as model:
            replays = gpu_engine.Replays(model)
            runs: list[float] = []
            for _ in range(5):
                with gpu_engine.sequences(model, 1, live) as (held, tokens):
                    runs.append(replays.seconds(held, tokens, 64))
            times[folder.name] = statistics.median(runs)
            print(f"  {folder.name}: max context {model.max_context}, {live} live tokens: "
                  f"{times[folder.name] * 1e6:,.1f} us a step", flush=True)  # fmt: skip
    first, *others = times.values()
    print(f"    ratio to the first: {', '.join(f'{other / first:.4f}' for other in others)}", flush=True)
    return times


def memory(model: Any) -> dict[str, int]:
    """What the device lost by the load beside what the plan says."""
    held = model.device_memory()
    print(f"  {model.folder.name} memory: planned {held.planned:,} bytes, used {held.used:,}, beside the plan "
          f"{(held.used - held.planned) / 1e6:.1f} MB; the context itself takes {held.context / 1e6:.0f} MB; "
          f"loaded in {model.load_s:.2f} s", flush=True)  # fmt: skip
    return {"planned": held.planned, "used": held.used, "context": held.context}
