"""A GPU artifact of a toy model, and Python functions in place of its kernels.

The toy remembers all tokens in its KV pages: the next one is ``permutation[sum((p + 1) * (token[p] + 1)) % VOCAB]``
over the positions p so far, and under sampling, that plus seed and position. Whatever goes astray on the way (a page
table, a position, a stale token) changes what follows.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from fake_driver import FakeCuda

VOCAB, PAGE, CONTEXT, SEQUENCES, EOS = 64, 4, 32, 3, 63
MAX_PAGES, PAGES = CONTEXT // PAGE, SEQUENCES * CONTEXT // PAGE
ROWS, OUT_ROWS, SEGMENTS = 8, 4, 4
BULK = 5 << 20  # bytes of a weight that only has to arrive
CHUNK = 3 << 20
PERMUTATION = np.random.default_rng(5).permutation(VOCAB).astype(np.int32)
TAIL = np.random.default_rng(6).bytes(BULK)
PARAMS: Mapping[str, Sequence[str]] = {
    "embed": ("tokens", "y", "counts"),
    "mix": ("x", "positions", "row_segment", "page_table", "kv", "y", "counts"),
    "gather": ("x", "out_row", "y", "counts"),
    "head": ("x", "w", "y", "counts"),
    "head_body": ("x", "w", "y", "counts"),
    "sample": ("logits", "temperature", "seed", "sample_position", "sampled", "partial", "counts"),
    "sample_advance": (
        *("logits", "temperature", "seed", "sample_position", "sampled", "partial", "counts"),
        *("tokens", "positions"),
    ),
}
EXTRA = {"mix": 2}


def next_token(history: Sequence[int], temperature: float = 0.0, seed: int = 0) -> int:
    """The token behind a history."""
    chosen = int(PERMUTATION[sum((p + 1) * (token + 1) for p, token in enumerate(history)) % VOCAB])
    return (chosen + seed + len(history)) % VOCAB if temperature > 0 else chosen


def continuation(prompt: Sequence[int], count: int, temperature: float = 0.0, seed: int = 0) -> list[int]:
    """What follows a prompt."""
    history = list(prompt)
    for _ in range(count):
        history.append(next_token(history, temperature, seed))
    return history[len(prompt) :]


# ---- kernels -----------------------------------------------------------------------------------------------------


def bf16(value: float) -> int:
    """The bits of a value that bf16 holds exactly."""
    return struct.unpack("<I", struct.pack("<f", value))[0] >> 16


def embed(gpu: FakeCuda, a: Mapping[str, Any]) -> None:
    for row in range(gpu.get("i", a["counts"])):
        gpu.put("f", a["y"], row, gpu.get("i", a["tokens"], row))


def mix(gpu: FakeCuda, a: Mapping[str, Any]) -> None:
    rows = range(gpu.get("i", a["counts"]))

    def place(segment: int, position: int) -> int:
        page = gpu.get("i", a["page_table"], segment * MAX_PAGES + position // PAGE)
        assert 0 <= page < PAGES, f"page {page} of position {position}"
        return page * PAGE + position % PAGE

    where = [(gpu.get("i", a["row_segment"], row), gpu.get("i", a["positions"], row)) for row in rows]
    for row in rows:
        gpu.put("e", a["kv"], place(*where[row]), gpu.get("f", a["x"], row))
    for row in rows:
        segment, last = where[row]
        total = sum((p + 1) * (int(gpu.get("e", a["kv"], place(segment, p))) + 1) for p in range(last + 1))
        gpu.put("H", a["y"], row, bf16(total % VOCAB))


def gather(gpu: FakeCuda, a: Mapping[str, Any]) -> None:
    for row in range(gpu.get("i", a["counts"], 2)):
        value = struct.unpack("<f", struct.pack("<I", gpu.get("H", a["x"], gpu.get("i", a["out_row"], row)) << 16))[0]
        gpu.put("e", a["y"], row, value)


def _head(gpu: FakeCuda, a: Mapping[str, Any], row: int, value: float) -> None:
    best = gpu.get("i", a["w"], int(value)) if not math.isnan(value) else 0
    for token in range(VOCAB):
        gpu.put("f", a["y"], row * VOCAB + token, -abs(token - best) / VOCAB if not math.isnan(value) else float("nan"))


def head(gpu: FakeCuda, a: Mapping[str, Any]) -> None:
    for row in range(gpu.get("i", a["counts"], 2)):
        _head(gpu, a, row, gpu.get("e", a["x"], row))


def head_body(gpu: FakeCuda, a: Mapping[str, Any]) -> None:
    for row in range(gpu.get("i", a["counts"])):
        _head(gpu, a, row, struct.unpack("<f", struct.pack("<I", gpu.get("H", a["x"], row) << 16))[0])


def sample(gpu: FakeCuda, a: Mapping[str, Any]) -> None:
    assert gpu.get("i", a["partial"]) == 0, "partial results are zero between launches"
    for row in range(gpu.get("i", a["counts"], 2)):
        logits = [gpu.get("f", a["logits"], row * VOCAB + token) for token in range(VOCAB)]
        chosen = -1 if any(math.isnan(value) for value in logits) else logits.index(max(logits))
        if gpu.get("f", a["temperature"], row) > 0:
            chosen = (chosen + gpu.get("Q", a["seed"], row) + gpu.get("Q", a["sample_position"], row)) % VOCAB
        gpu.put("i", a["sampled"], row, chosen)


def sample_advance(gpu: FakeCuda, a: Mapping[str, Any]) -> None:
    sample(gpu, a)
    for row in range(gpu.get("i", a["counts"])):
        gpu.put("i", a["tokens"], row, gpu.get("i", a["sampled"], row))
        gpu.put("i", a["positions"], row, gpu.get("i", a["positions"], row) + 1)
        gpu.put("Q", a["sample_position"], row, gpu.get("Q", a["sample_position"], row) + 1)


KERNELS: dict[str, Callable[[FakeCuda, Mapping[str, Any]], None]] = {
    f"tp_{function.__name__}": function for function in (embed, mix, gather, head, head_body, sample, sample_advance)
}


def fake_gpu(**options: Any) -> FakeCuda:
    """A fake driver that knows the toy's kernels."""
    return FakeCuda(dict(KERNELS), **options)


# ---- the plan ----------------------------------------------------------------------------------------------------


def step_fields(max_pages: int) -> tuple[tuple[str, int], ...]:
    """Names and bytes of the step's arrays."""
    rows = tuple((name, 4 * ROWS) for name in ("tokens", "positions", "row_segment", "out_row"))
    words = tuple((name, 4 * OUT_ROWS) for name in ("temperature", "top_p", "top_k", "sampled", "logprob"))
    longs = tuple((name, 8 * OUT_ROWS) for name in ("seed", "sample_position"))
    return (("counts", 16), *rows, *words, *longs, ("page_table", 4 * SEGMENTS * max_pages))


def make_plan(architectures: Sequence[str] = ("sm_90",), context: int = CONTEXT, bulk: int = BULK) -> dict[str, Any]:
    """The toy's plan.json for sequences of ``context`` tokens."""
    max_pages = context // PAGE
    pages = SEQUENCES * max_pages
    fields, at = dict[str, list[int]](), 0
    for name, nbytes in step_fields(max_pages):
        fields[name] = [at, nbytes]
        at += -(-nbytes // 16) * 16
    step = {"bytes": at, "offset": 256, "fields": fields, "rows": ROWS, "segments": SEGMENTS}
    places = {"step": (256, at)}
    free = 256 + -(-at // 256) * 256
    for name, nbytes in (("hidden", 4 * ROWS), ("mixed", 2 * ROWS), ("gathered", 2 * OUT_ROWS), ("partial", 4)):
        places[name] = (free, nbytes)
        free += 256
    places["logits"] = (free, 4 * VOCAB * OUT_ROWS)
    arena = free + 4 * VOCAB * OUT_ROWS
    lists = [_list("prefill", rows, ("embed", "mix"), places) for rows in (4, ROWS)]
    lists += [_list("decode", rows, ("embed", "mix", "head_body", "sample_advance"), places) for rows in (1, 2, 3)]
    lists += [_list("head", rows, ("gather", "head"), places) for rows in (1, OUT_ROWS)]
    lists.append(_list("sample", 1, ("sample",), places))
    weights = [
        {"name": "permutation", "shape": [VOCAB], "offset": 0, "bytes": 256},
        {"name": "bulk", "shape": [bulk], "offset": 256, "bytes": bulk},
    ]
    kv_pool = 2 * PAGE * pages
    return {
        "target": "cuda",
        "model": {"vocab_size": VOCAB, "max_context": context},
        "generation": {"bos_token_id": 1, "eos_token_ids": [EOS]},
        "weights": weights,
        "kernels": {
            "targets": list(architectures),
            "multiprocessors": 2,
            "table": [_kernel(name, architectures) for name in PARAMS],
        },
        "memory": {
            "weights": 256 + bulk,
            "kv_pool": kv_pool,
            "arena": arena,
            "max_sequences": SEQUENCES,
            "kv": {"pages": pages, "page_tokens": PAGE, "dtype": "f16"},
            "step": {**step, "out_rows": OUT_ROWS, "max_pages": max_pages},
            "buffers": [
                {"name": name, "graph": entry["name"], "offset": offset, "bytes": nbytes, "first": 0, "last": 9}
                for entry in lists
                for name, (offset, nbytes) in places.items()
            ],
        },
        "graphs": lists,
    }


def _kernel(name: str, architectures: Sequence[str]) -> dict[str, Any]:
    taken = {"registers": 32, "shared": 0, "dynamic_shared": 0, "spill_bytes": 0, "blocks_per_sm": 8}
    resources: dict[str, Any] = {"symbol": f"tp_{name}", **taken}
    if name in EXTRA:
        resources["extra_ptrs"] = EXTRA[name]
    if name == "head":
        resources["dynamic_shared"] = 100 << 10
    return {
        "name": name,
        "template": name,
        "language": "triton" if name in EXTRA else "cuda",
        "params": [[param, "ptr"] for param in PARAMS[name]],
        "threads": 128,
        "pdl": True,
        "resources": dict.fromkeys(architectures, resources),
    }


OUTPUTS = {"embed": ("f32", 1, "embed"), "mix": ("bf16", 1, "mix"), "gather": ("f16", 1, "gather")}
OUTPUTS |= {name: ("f32", VOCAB, "lm_head") for name in ("head", "head_body")}


def _list(phase: str, rows: int, names: Sequence[str], places: Mapping[str, tuple[int, int]]) -> dict[str, Any]:
    buffers = {"embed": (None, "hidden"), "mix": ("hidden", "mixed"), "gather": ("mixed", "gathered")}
    buffers |= {"head": ("gathered", "logits"), "head_body": ("mixed", "logits")}
    launches: list[dict[str, Any]] = []
    for name in names:
        source, target = buffers.get(name, (None, None))
        args: dict[str, Any] = {}
        for param in PARAMS[name]:
            buffer = {"x": source, "y": target, "logits": "logits", "partial": "partial"}.get(param)
            args[param] = ["arena", places[buffer][0]] if buffer else ["step", param]
        args |= {"kv": ["kv", 0]} if "kv" in args else {}
        args |= {"w": ["weight", "permutation"]} if "w" in args else {}
        launch = {"kernel": name, "op": OUTPUTS[name][2] if name in OUTPUTS else "sample", "grid": [rows, 1, 1]}
        launch["args"] = args
        if name in OUTPUTS:
            kind, width, op = OUTPUTS[name]
            launch["output"] = {"arg": "y", "kind": kind, "stride": width, "in_place": False}
            launch["produces"] = [{"op": op, "columns": [0, width]}]
        launches.append(launch)
    return {"name": f"{phase}.{rows}", "phase": phase, "rows": rows, "launches": launches}


# ---- the artifact ------------------------------------------------------------------------------------------------


def fake_cubin(architecture: str, name: str) -> bytes:
    """What the fake driver takes for a compiled kernel: its parameters."""
    del architecture
    return json.dumps({f"tp_{name}": [(param, "ptr") for param in abi(name)]}).encode()


def abi(name: str) -> list[str]:
    """A kernel's parameters with those that only the compiler knows of."""
    return [*PARAMS[name], *(f"extra{index}" for index in range(EXTRA.get(name, 0)))]


def write_artifact(
    folder: Path,
    architectures: Sequence[str] = ("sm_90",),
    change: Callable[[dict[str, Any]], object] = lambda plan: None,
    *,
    cubin: Callable[[str, str], bytes] = fake_cubin,
    context: int = CONTEXT,
    bulk: bytes = TAIL,
) -> Path:
    """The toy's folder, with ``change`` made to its plan; digests agree with what is written."""
    plan = make_plan(architectures, context, len(bulk))
    change(plan)
    header = b"{}".ljust(92)
    data = len(header).to_bytes(8, "little") + header + PERMUTATION.tobytes() + bulk
    files = {"plan.json": json.dumps(plan).encode(), "generation.json": b"{}", "weights/rank0.safetensors": data}
    for architecture in architectures:
        files |= {f"kernels/{architecture}/{name}.cubin": cubin(architecture, name) for name in PARAMS}
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    listed = [
        {
            "path": path,
            "bytes": len(content),
            "chunk_bytes": CHUNK,
            "sha256": [hashlib.sha256(content[at : at + CHUNK]).hexdigest() for at in range(0, len(content), CHUNK)],
        }
        for path, content in files.items()
    ]
    manifest = {"format_version": 2, "tapeout_version": "0.1.0", "requires_runtime": ">=0.1"}
    (folder / "manifest.json").write_text(
        json.dumps({**manifest, "architectures": list(architectures), "files": listed})
    )
    return folder
