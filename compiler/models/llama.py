"""Llama (``LlamaForCausalLM``, GGUF ``llama``): SmolLM2, Llama 2 and 3, and everything of their shape.

A GGUF of this architecture may have experts, which makes it a Mixtral's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tapeout.compiler.ir import Builder
from tapeout.compiler.models import experts, names
from tapeout.compiler.models.base import Config, Family, Fields, Rope, Sources
from tapeout.compiler.models.experts import Experts
from tapeout.compiler.recipes import Constant, HalvesFromPairs, Recipe

ROTARY = "model.rotary_emb"


@dataclass(frozen=True)
class LlamaConfig(Config):
    """Llama's own fields; Mistral's ``window``, how many keys every layer sees (0: all), and Mixtral's ``experts``."""

    rope: Rope
    attention_bias: bool
    mlp_bias: bool
    window: int = 0
    experts: Experts | None = None


def parse_hf(raw: Mapping[str, Any]) -> LlamaConfig:
    """From config.json."""
    fields = Fields(raw, "config.json")
    return LlamaConfig(
        **names.hf_common(fields, context=2048),
        attention_bias=fields.flag("attention_bias", False),
        mlp_bias=fields.flag("mlp_bias", False),
    )


def parse_gguf(raw: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> LlamaConfig:
    """From GGUF metadata and the shapes of the file's tensors; Mistral's files are of this architecture too."""
    fields = Fields(raw, "GGUF metadata")
    fields.refuse("llama.attention.sliding_window_pattern")
    routed = "llama.expert_count" in fields and bool(fields.integer("llama.expert_count", least=0))
    common = names.gguf_common(fields, "llama", shapes, experts=True)
    return LlamaConfig(
        **common,
        rope=names.gguf_rope(fields, "llama", common["head_dim"]),
        attention_bias="blk.0.attn_q.bias" in shapes,
        mlp_bias="blk.0.ffn_up.bias" in shapes,
        window=fields.integer("llama.attention.sliding_window", 0, least=0),
        experts=experts.gguf_experts(fields, "llama", common["ffn"]) if routed else None,
    )


def gguf(config: LlamaConfig) -> Sources:
    """GGUF stores q and k rows in pair order; bring them to halves."""
    heads = {"q_proj": config.heads, "k_proj": config.kv_heads}

    def adapt(slot: str, recipe: Recipe) -> Recipe:
        count = heads.get(slot.removesuffix(".bias").rpartition(".")[2])
        return HalvesFromPairs(recipe, count) if count else recipe

    known = names.gguf_names({**NAMES, **experts.GGUF_NAMES}, ROTARY)
    return Sources(known, experts.gguf_adapt(adapt), names.gguf_ignored)


NAMES = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}


def constants(config: LlamaConfig) -> Mapping[str, Recipe]:
    """The rotary frequencies."""
    return {ROTARY: Constant(config.rope.inv_freq())}


def forward(config: LlamaConfig, b: Builder) -> str:
    """x += o(attention(rope(q), rope(k), v)); x += down(silu(gate) * up), or the experts' sum."""
    factor = config.rope.cos_sin_factor()
    x = b.embed("model.embed_tokens", config.vocab_size, config.hidden)
    for layer in range(config.layers):
        at = f"model.layers.{layer}"
        h = b.rmsnorm(f"{at}.input_layernorm", x, config.eps)
        q, k, v = names.qkv(b, f"{at}.self_attn", h, config, config.attention_bias)
        q = b.rope(f"{at}.self_attn.q_rope", q, ROTARY, config.head_dim, factor)
        k = b.rope(f"{at}.self_attn.k_rope", k, ROTARY, config.head_dim, factor)
        attended = b.attention(f"{at}.self_attn.attention", (q, k, v), layer=layer, head_dim=config.head_dim,
                               scale=config.head_dim**-0.5, window=config.window)  # fmt: skip
        o = b.linear(f"{at}.self_attn.o_proj", attended, config.hidden, ("hidden", "heads"), bias=config.attention_bias)
        x = b.add(f"{at}.attention_residual", x, o)
        h = b.rmsnorm(f"{at}.post_attention_layernorm", x, config.eps)
        if config.experts is not None:
            h = experts.routed_mlp(b, f"{at}.mlp", h, config.hidden, config.experts)
        else:
            h = names.gated_mlp(b, f"{at}.mlp", h, config, "silu", config.mlp_bias)
        x = b.add(at, x, h)
    return names.head(b, x, config)


FAMILY = Family("llama", parse_hf, parse_gguf, lambda config: names.HF_SOURCES, gguf, constants, forward)
