"""Measures a loaded model: prefill and decode rates without text work around them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

from tapeout.runtime.errors import TapeoutError
from tapeout.runtime.model import Model


def bench_model(model: Model, prompt_tokens: int, max_tokens: int, repeats: int) -> dict[str, Any]:
    """Medians over ``repeats`` runs: a prompt of ``prompt_tokens``, then ``max_tokens`` greedy steps."""
    if min(prompt_tokens, max_tokens, repeats) < 1:
        raise TapeoutError("bench needs at least one prompt token, one generated token and one repeat")
    longest = max(prompt_tokens, max_tokens + 1)
    if longest > model.max_context:
        raise TapeoutError(f"{longest} tokens do not fit the artifact's context of {model.max_context}; ask for fewer")
    ids = [(7 * index + 11) % model.vocab_size for index in range(prompt_tokens)]
    prefill: list[float] = []
    decode: list[float] = []
    _prefill_rate(model, ids[: min(64, prompt_tokens)])
    for _ in range(repeats):
        prefill.append(_prefill_rate(model, ids))
        decode.append(_decode_rate(model, max_tokens))
    read = bytes_per_token(model.plan)
    rate = statistics.median(decode)
    return {
        "target": model.target,
        "device": model.device,
        "threads": model.threads,
        "prefill_tokens": prompt_tokens,
        "decode_tokens": max_tokens,
        "prefill_tok_s": statistics.median(prefill),
        "decode_tok_s": rate,
        "prefill_tok_s_runs": prefill,
        "decode_tok_s_runs": decode,
        "bytes_per_token": read,
        "decode_gb_s": rate * read / 1e9,
    }


def _prefill_rate(model: Model, ids: list[int]) -> float:
    sequence = model.pool.open()
    try:
        started = time.perf_counter()
        model.prefill(sequence, ids)
        return len(ids) / (time.perf_counter() - started)
    finally:
        model.pool.close(sequence)


def _decode_rate(model: Model, count: int) -> float:
    sequence = model.pool.open()
    try:
        token = model.prefill(sequence, [model.plan["generation"].get("bos_token_id") or 0])
        started = time.perf_counter()
        for _ in model.stream([sequence], [token], count):
            pass
        return count / (time.perf_counter() - started)
    finally:
        model.pool.close(sequence)


def bytes_per_token(plan: dict[str, Any]) -> int:
    """Weight bytes a decode step reads: every weight of its lists once, but for tables that are looked up.

    Of experts those of one row, which are as many as ``dispatch`` is told.
    """
    share: dict[str, float] = {}
    for graph in plan["graphs"]:
        chosen = 1.0
        for launch in graph["launches"] if graph["phase"] in ("decode", "head") else ():
            args = launch["args"]
            if launch["kernel"] == "dispatch":
                chosen = min(1.0, args["top_k"] / args["experts"])
            if not launch["kernel"].startswith("embed_"):
                share |= dict.fromkeys(_weights_of(launch), chosen if args.get("starts") else 1.0)
    return round(sum(weight["bytes"] * share.get(weight["name"], 0) for weight in plan["weights"]))


def _weights_of(launch: dict[str, Any]) -> Iterator[str]:
    pairs: list[Any] = [arg for arg in launch["args"].values() if isinstance(arg, list)]
    for base, where in pairs:
        if base == "weight":
            yield where
