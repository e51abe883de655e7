"""What configs of both containers say about multi-head latent attention, its index, and the experts beside it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tapeout.compiler.guards import is_list
from tapeout.compiler.models import experts, names
from tapeout.compiler.models.base import Config, Fields, Rope, rope_from_gguf
from tapeout.compiler.models.experts import Experts
from tapeout.runtime.errors import TapeoutError


@dataclass(frozen=True)
class Index:
    """The index that selects keys: ``heads`` of ``head_dim`` channels choose ``top_k`` of them.

    ``pairs`` says how its first channels are rotated, ``full`` for each layer whether it selects or takes over the
    selection of the layer before.
    """

    heads: int
    head_dim: int
    top_k: int
    pairs: bool
    full: tuple[bool, ...]


@dataclass(frozen=True)
class LatentConfig(Config):
    """Widths of latent attention, and which MLPs are routed (``sparse``, for each layer).

    ``q_rank`` 0 is one projection of q; ``shared`` is the width of the expert that sees every row. ``split_kv_b`` says
    that the container holds the two halves of kv_b_proj apart. Layers that draft further tokens are not compiled.
    """

    rope: Rope
    rope_pairs: bool
    attention_bias: bool
    q_rank: int
    latent: int
    nope: int
    rotated: int
    value: int
    scale: float
    experts: Experts | None
    shared: int
    sparse: tuple[bool, ...]
    num_nextn_predict_layers: int
    split_kv_b: bool = False
    index: Index | None = None


def hf_latent(fields: Fields, context: int, sizes: Mapping[str, int]) -> dict[str, Any]:
    """The fields of LatentConfig that config.json states, but for the experts; ``sizes`` are the family's defaults."""
    fields.refuse("mlp_bias")
    widths = {key: fields.integer(key, default) for key, default in sizes.items()}
    nope, rotated = widths["qk_nope_head_dim"], widths["qk_rope_head_dim"]
    plain = Fields({key: value for key, value in fields.raw.items() if key != "head_dim"}, fields.what)
    common = names.hf_common(plain, context, rotated)
    if common["kv_heads"] != common["heads"]:
        raise fields.unsupported("num_key_value_heads")
    scaling = fields.section("rope_scaling") or fields.section("rope_parameters")
    if common["rope"].scaling not in ("none", "yarn") and scaling.get("mscale_all_dim"):
        raise Fields(scaling, f"{fields.what}: rope scaling").unsupported("mscale_all_dim")
    return {
        **common,
        "kv_heads": 1,
        "head_dim": nope + rotated,
        "attention_bias": fields.flag("attention_bias", False),
        "latent": widths["kv_lora_rank"],
        "nope": nope,
        "rotated": rotated,
        "value": widths["v_head_dim"],
        "scale": (nope + rotated) ** -0.5 * softmax_factor(common["rope"]),
        "num_nextn_predict_layers": fields.integer("num_nextn_predict_layers", 0, least=0),
    }


def softmax_factor(rope: Rope) -> float:
    """What yarn multiplies the scale of the softmax with: the square of 0.1 mscale_all_dim ln(factor) + 1."""
    if rope.scaling != "yarn" or rope.factor <= 1:
        return 1.0
    return (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0) ** 2


def dense_first(fields: Fields, layers: int, default: int) -> tuple[bool, ...]:
    """Which MLPs are routed, by the keys of config.json: ``mlp_layer_types``, or the first few are not."""
    kinds = fields.raw.get("mlp_layer_types")
    if kinds is not None:
        if not is_list(kinds) or len(kinds) != layers or any(kind not in ["dense", "sparse"] for kind in kinds):
            raise TapeoutError(f"{fields.what}: mlp_layer_types must list {layers} times dense or sparse")
        return tuple(kind == "sparse" for kind in kinds)
    first = fields.integer("first_k_dense_replace", default, least=0)
    every = fields.integer("moe_layer_freq", 1)
    return tuple(layer >= first and layer % every == 0 for layer in range(layers))


def noaux_experts(fields: Fields, groups: tuple[int, int]) -> tuple[Experts, int]:
    """Routing of DeepSeek-V3 (``noaux_tc``), and the shared width: sigmoid scores, a bias that only chooses."""
    fields.choice("topk_method", {"noaux_tc": "noaux_tc"}, "noaux_tc")
    fields.choice("scoring_func", {"sigmoid": "sigmoid"}, "sigmoid")
    width = fields.integer("moe_intermediate_size", 2048)
    chosen = Experts(
        count=fields.integer("n_routed_experts", fields.integer("num_experts", 256)),
        top_k=fields.integer("num_experts_per_tok", 8),
        width=width,
        normalize=fields.flag("norm_topk_prob", True),
        score="sigmoid",
        bias=True,
        groups=fields.integer("n_group", groups[0]),
        top_groups=fields.integer("topk_group", groups[1]),
        group_score="top2",
        scale=fields.number("routed_scaling_factor", 2.5),
    )
    return experts.checked(chosen, fields.what), width * fields.integer("n_shared_experts", 1)


def gguf_latent(raw: Mapping[str, Any], arch: str, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """The fields of LatentConfig that GGUF metadata and the shapes of the file's tensors state.

    Newer files give the sizes of the cached key as key_length and value_length, and those of a head with ``_mla``;
    older ones those of a head alone.
    """
    fields = Fields(raw, "GGUF metadata")
    key = f"{arch}.attention."
    head_dim = fields.integer(f"{key}key_length_mla", fields.integer(f"{key}key_length", 192))
    value = fields.integer(f"{key}value_length_mla", fields.integer(f"{key}value_length", 128))
    rotated, latent = fields.integer(f"{arch}.rope.dimension_count"), fields.integer(f"{key}kv_lora_rank")
    if rotated >= head_dim:
        raise TapeoutError(
            f"{fields.what}: {arch}.rope.dimension_count is {rotated}, and a head has {head_dim} channels"
        )
    hidden_keys = (f"{key}value_length", f"{arch}.rope.dimension_count", f"{key}head_count_kv")
    plain = {name: held for name, held in raw.items() if name not in hidden_keys} | {f"{key}key_length": head_dim}
    common = names.gguf_common(Fields(plain, fields.what), arch, shapes, experts=True)
    drafts = _gguf_drafts(fields, arch, common["layers"], shapes)
    layers = common["layers"] - drafts
    rope = gguf_rope(fields, arch, rotated)
    routed, shared, sparse = gguf_experts(fields, arch, layers, shapes)
    return {
        **common,
        "layers": layers,
        "kv_heads": 1,
        "rope": rope,
        "rope_pairs": True,
        "attention_bias": "blk.0.attn_kv_a_mqa.bias" in shapes,
        "q_rank": fields.integer(f"{key}q_lora_rank", 0, least=0),
        "latent": latent,
        "nope": head_dim - rotated,
        "rotated": rotated,
        "value": value,
        "scale": head_dim**-0.5 * softmax_factor(rope),
        "experts": routed,
        "shared": shared,
        "sparse": sparse,
        "num_nextn_predict_layers": drafts,
        "split_kv_b": "blk.0.attn_k_b.weight" in shapes,
    }


def _gguf_drafts(fields: Fields, arch: str, blocks: int, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """How many of the last blocks draft further tokens; a file may count them without having their tensors."""
    held = sum(f"blk.{layer}.nextn.eh_proj.weight" in shapes for layer in range(blocks))
    counted = fields.integer(f"{arch}.nextn_predict_layers", 0, least=0)
    return held if held or f"blk.{blocks - 1}.attn_norm.weight" in shapes else counted


def gguf_rope(fields: Fields, arch: str, rotated: int) -> Rope:
    """Yarn's ``yarn_log_multiplier`` is 0.1 mscale_all_dim, and mscale is the same: cos and sin stay as they are."""
    fields.refuse(f"{arch}.attention.scale")
    rope = rope_from_gguf(fields, arch, fields.number(f"{arch}.rope.freq_base", 10000.0), rotated)
    multiplier = fields.number(f"{arch}.rope.scaling.yarn_log_multiplier", 0.0)
    if not multiplier:
        return rope
    if rope.scaling != "yarn" or fields.number(f"{arch}.rope.scaling.attn_factor", 1.0) != 1:
        raise fields.unsupported(f"{arch}.rope.scaling.yarn_log_multiplier")
    return replace(rope, attention_factor=1.0, mscale=10 * multiplier, mscale_all_dim=10 * multiplier)


def gguf_experts(
    fields: Fields, arch: str, layers: int, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[Experts | None, int, tuple[bool, ...]]:
    """The experts, the width of the shared one, and which layers have a router, by metadata and tensors."""
    sparse = tuple(f"blk.{layer}.ffn_gate_inp.weight" in shapes for layer in range(layers))
    if not any(sparse):
        return None, 0, sparse
    refused = ("expert_group_scale", "experts_per_group", "interleave_moe_layer_step")
    fields.refuse(*(f"{arch}.{key}" for key in refused))
    first = sparse.index(True)
    bias = f"blk.{first}.exp_probs_b.bias" in shapes
    gating = fields.integer(f"{arch}.expert_gating_func", 2 if bias else 1)
    if gating > 2:  # 1 softmax, 2 sigmoid
        raise fields.unsupported(f"{arch}.expert_gating_func")
    normalize = fields.flag(f"{arch}.expert_weights_norm", False)
    if normalize and gating < 2:
        raise fields.unsupported(f"{arch}.expert_weights_norm")
    width, groups = (
        fields.integer(f"{arch}.expert_feed_forward_length"),
        fields.integer(f"{arch}.expert_group_count", 1),
    )
    found = Experts(
        count=fields.integer(f"{arch}.expert_count"),
        top_k=fields.integer(f"{arch}.expert_used_count"),
        width=width,
        normalize=normalize,
        score="sigmoid" if gating == 2 else "softmax",
        bias=bias,
        groups=groups,
        top_groups=fields.integer(f"{arch}.expert_group_used_count", groups),
        group_score="top2" if gating == 2 else "max",
        scale=fields.number(f"{arch}.expert_weights_scale", 1.0),
    )
    shared = width * fields.integer(f"{arch}.expert_shared_count", 0, least=0)
    return experts.checked(found, fields.what), shared, sparse


def gguf_index(fields: Fields, arch: str, pairs: bool, layers: int, shapes: Mapping[str, tuple[int, ...]]) -> Index:
    """The index by metadata; which layers have one stands there as flags, or else the tensors say it."""
    key = f"{arch}.attention.indexer."
    types: Any = fields.raw.get(f"{key}types")
    full = tuple(f"blk.{layer}.indexer.attn_k.weight" in shapes for layer in range(layers))
    if types is not None:
        full = tuple(bool(kind) for kind in list(types)[:layers])
    if len(full) != layers or not full[0]:
        raise TapeoutError(
            f"{fields.what}: {key}types must flag {layers} layers, of which the first selects keys itself"
        )
    sizes = (fields.integer(f"{key}{name}") for name in ("head_count", "key_length", "top_k"))
    return Index(*sizes, pairs=pairs, full=full)
