"""Pieces that decoder-only families share: config keys and tensor names of both containers, q/k/v, gated MLP, head."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from tapeout.compiler.ir import Builder
from tapeout.compiler.models.base import Config, Fields, Rope, Sources, rope_from_gguf, rope_from_hf
from tapeout.compiler.recipes import Recipe
from tapeout.runtime.errors import TapeoutError

_GGUF_LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GGUF_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_names(layer_names: Mapping[str, str], rotary: str) -> Callable[[str], str]:
    """Slot name to GGUF tensor name; ``layer_names`` adds a family's norms, ``rotary`` is the slot GGUF may divide."""
    layer = {**_GGUF_LAYER, **layer_names}

    def name(slot: str) -> str:
        base, suffix = (slot.removesuffix(".bias"), ".bias") if slot.endswith(".bias") else (slot, ".weight")
        if base == rotary:
            return "rope_freqs.weight"
        if base in _GGUF_TOP:
            return _GGUF_TOP[base] + suffix
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", base)
        if match is None or match[2] not in layer:
            return slot
        return f"blk.{match[1]}.{layer[match[2]]}{suffix}"

    return name


def gguf_ignored(tensor: str) -> str | None:
    """Why a GGUF tensor may be left unused, or None."""
    return "rotary frequencies are planned from the metadata" if tensor.startswith("rope_freqs") else None


def _hf_name(slot: str) -> str:
    return slot if slot.endswith(".bias") else f"{slot}.weight"


def _hf_ignored(tensor: str) -> str | None:
    if tensor.endswith("rotary_emb.inv_freq"):
        return "rotary frequencies are planned from the config"
    if tensor.startswith(
        ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")
    ):
        return "the vision part of a multimodal checkpoint is not compiled"
    return None


def _as_is(slot: str, recipe: Recipe) -> Recipe:
    del slot
    return recipe


HF_SOURCES = Sources(_hf_name, _as_is, _hf_ignored)


# What leaves no trace among the tensors and that no family here computes. Other departures (experts, attention sinks,
# further norms) have tensors of their own, which ingestion refuses.
_HF_UNSUPPORTED = ("attn_logit_softcapping", "final_logit_softcapping", "attention_chunk_size", "clip_qkv",
                   "use_bidirectional_attention", "dual_chunk_attention_config", "use_mrope", "logit_scale",
                   "logits_scaling", "embedding_multiplier", "residual_multiplier", "attention_multiplier",
                   "attention_value_scale", "no_rope_layers")  # fmt: skip
_GGUF_UNSUPPORTED = ("expert_count", "attn_logit_softcapping", "final_logit_softcapping", "logit_scale",
                     "residual_scale", "embedding_scale", "use_parallel_residual", "attention.clamp_kqv",
                     "attention.max_alibi_bias", "attention.output_scale", "attention.temperature_scale",
                     "attention.shared_kv_layers", "rope.scaling.alpha", "rope.dimension_sections")  # fmt: skip


def hf_common(fields: Fields, context: int, head_dim: int = 0) -> dict[str, Any]:
    """The fields of Config that config.json states under the same keys, and the rope, for a family of Llama's shape.

    ``context`` and ``head_dim`` are the family's defaults; without one a head is hidden / heads. Raises TapeoutError
    for settings that change the mathematics.
    """
    fields.refuse(*_HF_UNSUPPORTED)
    if not fields.flag("is_causal", True):
        raise fields.unsupported("is_causal")
    fields.choice("hidden_act", {"silu": "silu"}, "silu")
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    head_dim = fields.integer("head_dim", head_dim or hidden // heads)
    context = fields.integer("max_position_embeddings", context)
    scaling = fields.section("rope_scaling") or fields.section("rope_parameters")
    return {
        "vocab_size": fields.integer("vocab_size"),
        "hidden": hidden,
        "layers": fields.integer("num_hidden_layers"),
        "heads": heads,
        "kv_heads": fields.integer("num_key_value_heads", heads),
        "head_dim": head_dim,
        "ffn": fields.integer("intermediate_size"),
        "eps": fields.number("rms_norm_eps", 1e-6),
        "max_context": context,
        "tied": fields.flag("tie_word_embeddings", False),
        "rope": rope_from_hf(fields, fields.number("rope_theta", 10000.0), head_dim, scaling, context),
    }


def gguf_rope(fields: Fields, arch: str, head_dim: int) -> Rope:
    """The rope of a GGUF whose architecture has one; without scaling of the softmax, which comes with the head size."""
    fields.refuse(f"{arch}.attention.scale")
    return rope_from_gguf(fields, arch, fields.number(f"{arch}.rope.freq_base", 10000.0), head_dim)


def gguf_common(
    fields: Fields, arch: str, shapes: Mapping[str, tuple[int, ...]], *, experts: bool = False
) -> dict[str, Any]:
    """The fields of Config that every GGUF architecture states under the same keys; ``experts``: it may have them.

    Raises TapeoutError for keys that change the mathematics.
    """
    fields.refuse(*(f"{arch}.{key}" for key in _GGUF_UNSUPPORTED if key != "expert_count" or not experts))
    if not fields.flag(f"{arch}.attention.causal", True):
        raise fields.unsupported(f"{arch}.attention.causal")
    hidden, heads = fields.integer(f"{arch}.embedding_length"), fields.integer(f"{arch}.attention.head_count")
    head_dim = fields.integer(f"{arch}.attention.key_length", hidden // heads)
    if fields.integer(f"{arch}.attention.value_length", head_dim) != head_dim:
        raise TapeoutError(f"GGUF metadata: key and value heads differ in size, which the family {arch} does not have")
    if fields.integer(f"{arch}.rope.dimension_count", head_dim) != head_dim:
        raise TapeoutError(
            f"GGUF metadata: {arch}.rope.dimension_count differs from the head size {head_dim}; "
            "partial rotation is not supported for this family"
        )
    if "token_embd.weight" not in shapes:
        raise TapeoutError("the GGUF has no tensor token_embd.weight, so the vocabulary size is unknown")
    return {
        "vocab_size": shapes["token_embd.weight"][0],
        "hidden": hidden,
        "layers": fields.integer(f"{arch}.block_count"),
        "heads": heads,
        "kv_heads": fields.integer(f"{arch}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "ffn": fields.integer(f"{arch}.feed_forward_length"),
        "eps": fields.number(f"{arch}.attention.layer_norm_rms_epsilon"),
        "max_context": fields.integer(f"{arch}.context_length"),
        "tied": "output.weight" not in shapes,
    }


def qkv(b: Builder, at: str, x: str, config: Config, bias: bool) -> tuple[str, str, str]:
    """The three projections, declared as parts of one fused weight in the order q, k, v."""
    fuse = f"{at}.qkv_proj"
    q = b.linear(f"{at}.q_proj", x, config.heads * config.head_dim, ("heads", "hidden"), bias=bias, fuse=fuse)
    k = b.linear(f"{at}.k_proj", x, config.kv_heads * config.head_dim, ("kv_heads", "hidden"), bias=bias, fuse=fuse)
    v = b.linear(f"{at}.v_proj", x, config.kv_heads * config.head_dim, ("kv_heads", "hidden"), bias=bias, fuse=fuse)
    return q, k, v


def gated_mlp(b: Builder, at: str, x: str, config: Config, act: str, bias: bool) -> str:
    """down(act(gate) * up), gate and up declared as parts of one fused weight in this order."""
    fuse = f"{at}.gate_up_proj"
    gate = b.linear(f"{at}.gate_proj", x, config.ffn, ("ffn", "hidden"), bias=bias, fuse=fuse)
    up = b.linear(f"{at}.up_proj", x, config.ffn, ("ffn", "hidden"), bias=bias, fuse=fuse)
    return b.linear(f"{at}.down_proj", b.gated(f"{at}.act", gate, up, act), config.hidden, ("hidden", "ffn"), bias=bias)


def head(b: Builder, x: str, config: Config) -> str:
    """Final norm and logits of the selected rows; a tied head shares the embedding's slot."""
    x = b.rmsnorm("model.norm", b.select("select", x), config.eps)
    return b.linear(
        "lm_head", x, config.vocab_size, ("vocab", "hidden"), weight="model.embed_tokens" if config.tied else ""
    )
