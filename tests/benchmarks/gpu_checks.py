"""Is what the artifact computes right? Against transformers on the same weights, and replay against eager."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gpu_engine
import numpy as np

PROMPT, CHUNK, STEPS, LONG = 300, 77, 24, 2100
REPLAYS = 272
WORST = 5e-2  # relative error of any position's logits; typical errors are printed


def against_reference(folder: Path, recipe: Path) -> list[str]:
    """Logits of prefill and decode beside a float64 (or, above 3e9 parameters, float32) transformers model."""
    import torch
    from gpu_reference import llama, logits

    torch.backends.cuda.matmul.allow_tf32 = False
    failures: list[str] = []
    with gpu_engine.open_model(folder) as model:
        ids = gpu_engine.prompt(min(LONG, model.max_context - STEPS - 1), model.vocab_size)
        ours = model.logits(ids)
        short = _decode(model, ids[:PROMPT])
        long = _decode(model, ids)
        parameters = model.plan["model"]["parameters"]
    dtype = torch.float64 if parameters < 3e9 else torch.float32
    reference = llama(folder, recipe, dtype)
    name = folder.name
    failures += _compare(f"{name} prefill {len(ids)}", logits(reference, ids), ours)
    for label, (tokens, found), start in (("short", short, PROMPT), ("long", long, len(ids))):
        expected = logits(reference, ids[:start] + tokens[:-1])[start - 1 :]
        failures += _compare(f"{name} decode at {start} ({label})", expected[1:], found)
        failures += _greedy(f"{name} greedy at {start}", expected, tokens)
    return failures


def _decode(model: Any, ids: list[int]) -> tuple[list[int], np.ndarray]:
    """Prefill in uneven pieces, then greedy steps: the tokens, and the logits of every decode step."""
    sequence = model.pool.open()
    try:
        for start in range(0, len(ids), CHUNK if len(ids) <= PROMPT else len(ids)):
            token = model.prefill(sequence, ids[start : start + (CHUNK if len(ids) <= PROMPT else len(ids))])
        tokens, rows = [token], []
        for _ in range(STEPS):
            tokens += model.decode([sequence], tokens[-1:])
            rows.append(gpu_engine.decoded_logits(model, 1)[0])
        return tokens, np.stack(rows)
    finally:
        model.pool.close(sequence)


def _compare(label: str, expected: Any, ours: np.ndarray) -> list[str]:
    import torch

    worst: list[float] = []
    for start in range(0, len(ours), 256):
        mine = torch.from_numpy(ours[start : start + 256]).to(expected.device).double()
        wanted = expected[start : start + 256]
        worst += ((mine - wanted).norm(dim=1) / wanted.norm(dim=1)).tolist()
    errors = np.array(worst)
    bad = not bool((errors < WORST).all())
    print(f"  {label}: relative error median {np.median(errors):.2e}, worst {errors.max():.2e} of {len(errors)} "
          f"positions{'  FAILED' if bad else ''}", flush=True)  # fmt: skip
    return [label] if bad else []


def _greedy(label: str, expected: Any, tokens: list[int]) -> list[str]:
    """The tokens are the reference's own, except where its two best are nearly tied (given our tokens so far)."""
    best = expected.max(dim=1)
    chosen = expected[range(len(tokens)), tokens]
    gaps = (best.values - chosen).tolist()
    spread = float(expected.std())
    differ = [(index, round(gap / spread, 4)) for index, gap in enumerate(gaps) if gap > 0]
    bad = any(gap > 0.1 for _, gap in differ)
    print(f"  {label}: {len(tokens) - len(differ)} of {len(tokens)} tokens equal; others (step, gap in standard "
          f"deviations of the logits): {differ}{'  FAILED' if bad else ''}", flush=True)  # fmt: skip
    return [label] if bad else []


def replay_is_eager(folder: Path, rows: int = 1, steps: int = REPLAYS) -> list[str]:
    """Logits of every replayed step equal those of the same launches one by one, bit for bit, outputs poisoned before.

    The tokens of a stream, which runs ahead of the host, are the same again.
    """
    name = f"{folder.name} replay of decode.{rows}"
    with gpu_engine.open_model(folder) as replayed:
        first = _logged(replayed, rows, steps, spoil=True)
        with gpu_engine.sequences(replayed, rows, 20) as (held, tokens):
            streamed = [tokens, *replayed.stream(held, tokens, steps)]
    with gpu_engine.open_model(folder, graphs=False) as eager:
        second = _logged(eager, rows, steps, spoil=False)
    same = [bool((a == b).all()) for (_, a), (_, b) in zip(first, second, strict=True)]
    finite = all(bool(np.isfinite(logits).all()) for _, logits in first)
    tokens_equal = [list(tokens) for tokens, _ in first] == [list(tokens) for tokens in streamed[1:]]
    good = all(same) and finite and tokens_equal
    print(f"  {name}: {sum(same)} of {len(same)} steps bit-equal to eager, finite {finite}, "
          f"streamed tokens equal {tokens_equal}{'' if good else '  FAILED'}", flush=True)  # fmt: skip
    return [] if good else [name]


def _logged(model: Any, rows: int, steps: int, *, spoil: bool) -> list[tuple[list[int], np.ndarray]]:
    logged: list[tuple[list[int], np.ndarray]] = []
    with gpu_engine.sequences(model, rows, 20) as (held, first):
        tokens = first
        for _ in range(steps):
            if spoil:
                gpu_engine.poison(model, rows)
            tokens = model.decode(held, tokens)
            logged.append((tokens, _folded(gpu_engine.decoded_logits(model, rows))))
    return logged


def _folded(logits: np.ndarray) -> np.ndarray:
    """The bits of a step's logits, in a form that is cheap to keep: sums of odd multiples, which any change changes."""
    bits = logits.view(np.uint32).astype(np.uint64).reshape(len(logits), -1)
    odd = 2 * np.arange(bits.shape[1], dtype=np.uint64) + 1
    whole = (bits * odd * np.uint64(0x9E3779B97F4A7C15)).sum(axis=1)
    return np.concatenate(((whole >> np.uint64(12)).astype(np.float64), logits[:, :64].astype(np.float64).reshape(-1)))
