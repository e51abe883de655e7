"""A small plan of four layers, written by hand after the description of plan.json."""

from __future__ import annotations

import copy
from typing import Any

LAYERS = 4
_LAYER_BYTES = {"self_attn.qkv_proj": 345_600, "mlp.down_proj": 552_960}


def read(tensor: str, shape: list[int], format_: str) -> dict[str, Any]:
    return {"op": "read", "tensor": tensor, "shape": shape, "format": format_}


def pack(source: dict[str, Any], layout: str = "tile16") -> dict[str, Any]:
    return {"op": "pack", "source": source, "layout": layout}


def place(plan: dict[str, Any], weight: dict[str, Any], *ranks: dict[str, Any]) -> None:
    """Give a weight other recipes, nested ones of each rank, by the description of the table in docs/plan.md."""
    weight["ranks"] = [_add(plan["recipes"], recipe) for recipe in ranks]


def nested(plan: dict[str, Any], weight: dict[str, Any]) -> dict[str, Any]:
    """The recipe of a weight on the first rank; for tables without templates, as that of the example is."""

    def take(place: int) -> dict[str, Any]:
        node = copy.deepcopy(plan["recipes"][place])
        below = node.pop("inputs", {})
        return node | {key: list(map(take, at)) if isinstance(at, list) else take(at) for key, at in below.items()}

    return take(weight["ranks"][0])


def _add(table: list[dict[str, Any]], recipe: dict[str, Any]) -> int:
    node: dict[str, Any] = {}
    inputs: dict[str, Any] = {}
    for key, value in recipe.items():
        if isinstance(value, dict):
            inputs[key] = _add(table, value)
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            inputs[key] = [_add(table, part) for part in value]
        else:
            node[key] = value
    table.append(node | ({"inputs": inputs} if inputs else {}))
    return len(table) - 1


def _weights(table: list[dict[str, Any]]) -> list[dict[str, Any]]:
    weights: list[dict[str, Any]] = []
    offset = 0
    for layer in range(LAYERS):
        parts = [
            read(f"blk.{layer}.attn_{part}.weight", [rows, 576], "q4_1")
            for part, rows in (("q", 576), ("k", 192), ("v", 192))
        ]
        parts[0] = {"op": "halves_from_pairs", "source": parts[0], "heads": 9}
        parts[1] = {"op": "halves_from_pairs", "source": parts[1], "heads": 3}
        recipes = {
            "self_attn.qkv_proj": ([960, 576], pack({"op": "concat", "parts": parts})),
            "mlp.down_proj": ([576, 1536], pack(read(f"blk.{layer}.ffn_down.weight", [576, 1536], "q4_1"))),
        }
        for name, (shape, recipe) in recipes.items():
            weights.append(
                {
                    "name": f"model.layers.{layer}.{name}",
                    "shape": shape,
                    "format": "q4_1",
                    "layout": "tile16",
                    "offset": offset,
                    "bytes": _LAYER_BYTES[name],
                    "axes": ["heads", "hidden"] if "attn" in name else ["hidden", "ffn"],
                    "ranks": [_add(table, recipe)],
                }
            )
            offset += _LAYER_BYTES[name]
    norm = pack(read("output_norm.weight", [576], "f32"), "raw")
    weights.append(
        {
            "name": "model.norm",
            "shape": [576],
            "format": "f32",
            "layout": "raw",
            "offset": offset,
            "bytes": 2304,
            "axes": ["hidden"],
            "ranks": [_add(table, norm)],
        }
    )
    return weights


def _launches() -> list[dict[str, Any]]:
    launches: list[dict[str, Any]] = []
    for layer in range(LAYERS):
        for name, n, k in (("self_attn.qkv_proj", 960, 576), ("mlp.down_proj", 576, 1536)):
            op = f"model.layers.{layer}.{name}"
            args = {"x": ["arena", 0], "w": ["weight", op], "y": ["arena", 4096], "n": n, "k": k, "bias": 0}
            launches.append({"kernel": "linear_q4_1", "op": op, "args": args})
    args = {"x": ["arena", 4096], "weight": ["weight", "model.norm"], "y": ["arena", 0], "k": 576, "eps": 1e-05}
    launches.append({"kernel": "rmsnorm_f32", "op": "model.norm", "args": args})
    return launches


def example_plan() -> dict[str, Any]:
    """A fresh plan, to change at will."""
    recipes: list[dict[str, Any]] = []
    weights = _weights(recipes)
    total = sum(weight["bytes"] for weight in weights)
    return {
        "format_version": 2,
        "tapeout_version": "0.1.0",
        "spec": {
            "model": {"source": "pypi:pkg/tiny.gguf", "name": "tiny", "family": None},
            "quantization": {"default": "keep", "rules": [], "allow_requantize": True, "activations": "int8"},
            "topology": {"device": "cpu", "count": 1, "memory": None, "parallel": {"tensor": 1, "expert": 1}},
            "serving": {"max_context": 2048, "max_sequences": 1, "kv_dtype": "f16", "page_tokens": 32},
        },
        "model": {
            "family": "llama",
            "name": "tiny",
            "config": {"hidden_size": 576, "layers": LAYERS},
            "parameters": 5_751_360,
            "vocab_size": 49152,
            "max_context": 8192,
        },
        "checkpoint": {
            "container": "gguf",
            "tensors": 18,
            "consumed": 17,
            "ignored": [{"tensor": "rope_freqs.weight", "reason": "all ones"}],
        },
        "quantization": [],
        "weights": weights,
        "recipes": recipes,
        "kernels": {
            "targets": ["x86_64_v3", "x86_64_v4"],
            "table": [
                {"name": "linear_q4_1", "template": "linear", "params": ["x", "w", "y", "n", "k", "bias"]},
                {"name": "rmsnorm_f32", "template": "rmsnorm", "params": ["x", "weight", "y", "k", "eps"]},
            ],
        },
        "memory": {
            "weights": total,
            "kv_pool": 6_291_456,
            "arena": 1_048_576,
            "scratch": 524_288,
            "total": total + 7_864_320,
            "capacity": 17_179_869_184,
            "context": 0,
            "max_sequences": 1,
            "kv": {
                "dtype": "f16",
                "page_tokens": 32,
                "pages": 64,
                "bytes_per_token": 3072,
                "tokens_that_fit": 5_590_720,
                "caches": [],
            },
            "buffers": [
                {"name": "hidden", "graph": "prefill.256", "bytes": 589_824, "offset": 0, "first": 0, "last": 8},
                {"name": "hidden", "graph": "decode.1", "bytes": 2304, "offset": 0, "first": 0, "last": 8},
            ],
        },
        "communication": {"ranks": 1, "lists": []},
        "graphs": [
            {"name": "prefill.256", "phase": "prefill", "rows": 256, "launches": _launches()},
            {"name": "decode.1", "phase": "decode", "rows": 1, "launches": _launches()},
        ],
        "generation": {"bos_token_id": 1, "eos_token_ids": [2], "add_bos": False},
        "decisions": [
            {
                "pass": "select_kernels",
                "subject": "model.layers.*.mlp.down_proj",
                "choice": "linear_q4_1",
                "reason": "reads the fewest bytes",
                "alternatives": [{"choice": "linear_f32", "why": "reads 6.4 times the bytes"}],
                "evidence": {"bytes": 552960, "weights": 4},
            },
            {
                "pass": "plan_memory",
                "subject": "kv_pool",
                "choice": "f16, pages of 32 tokens",
                "reason": "serving.kv_dtype",
                "alternatives": [],
                "evidence": {},
            },
        ],
    }
