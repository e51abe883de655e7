"""Pieces that decoder-only families share: tensor names of both containers, q/k/v, the gated MLP and the head."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from tapeout.compiler.ir import Builder
from tapeout.compiler.models.base import Config, Fields, Sources
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


def gguf_common(fields: Fields, arch: str, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """The fields of Config that every GGUF architecture states under the same keys."""
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
