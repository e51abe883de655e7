"""Qwen3, dense (``Qwen3ForCausalLM``, GGUF ``qwen3``): Llama with q and k normalised a head, and a head size apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tapeout.compiler.ir import Builder
from tapeout.compiler.models import names, windows
from tapeout.compiler.models.base import Config, Family, Fields, Rope, Sources
from tapeout.compiler.recipes import Constant, Recipe

ROTARY = "model.rotary_emb"
NAMES = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}


@dataclass(frozen=True)
class Qwen3Config(Config):
    """Qwen3's own fields; ``windows`` holds how many keys each layer sees, 0 for all."""

    rope: Rope
    attention_bias: bool
    windows: tuple[int, ...]


def parse_hf(raw: Mapping[str, Any]) -> Qwen3Config:
    """From config.json."""
    fields = Fields(raw, "config.json")
    common = names.hf_common(fields, context=32768, head_dim=128)
    return Qwen3Config(
        **common,
        attention_bias=fields.flag("attention_bias", False),
        windows=windows.qwen_windows(fields, common["layers"]),
    )


def parse_gguf(raw: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> Qwen3Config:
    """From GGUF metadata and the shapes of the file's tensors."""
    fields = Fields(raw, "GGUF metadata")
    common = names.gguf_common(fields, "qwen3", shapes)
    return Qwen3Config(
        **common,
        rope=names.gguf_rope(fields, "qwen3", common["head_dim"]),
        attention_bias="blk.0.attn_q.bias" in shapes,
        windows=windows.gguf_windows(fields, "qwen3", common["layers"]),
    )


def gguf(config: Qwen3Config) -> Sources:
    """GGUF stores q and k in halves order."""
    del config
    return Sources(names.gguf_names(NAMES, ROTARY), names.HF_SOURCES.adapt, names.gguf_ignored)


def constants(config: Qwen3Config) -> Mapping[str, Recipe]:
    """The rotary frequencies."""
    return {ROTARY: Constant(config.rope.inv_freq())}


def attended(b: Builder, at: str, x: str, config: Qwen3Config, layer: int) -> str:
    """x += o(attention(rope(norm(q)), rope(norm(k)), v)) of one layer."""
    factor, head_dim = config.rope.cos_sin_factor(), config.head_dim
    h = b.rmsnorm(f"{at}.input_layernorm", x, config.eps)
    q, k, v = names.qkv(b, f"{at}.self_attn", h, config, config.attention_bias)
    q = b.rmsnorm(f"{at}.self_attn.q_norm", q, config.eps, head_dim)
    k = b.rmsnorm(f"{at}.self_attn.k_norm", k, config.eps, head_dim)
    q = b.rope(f"{at}.self_attn.q_rope", q, ROTARY, head_dim, factor)
    k = b.rope(f"{at}.self_attn.k_rope", k, ROTARY, head_dim, factor)
    seen = b.attention(f"{at}.self_attn.attention", (q, k, v), layer=layer, head_dim=head_dim, scale=head_dim**-0.5,
                       window=config.windows[layer])  # fmt: skip
    o = b.linear(f"{at}.self_attn.o_proj", seen, config.hidden, ("hidden", "heads"), bias=config.attention_bias)
    return b.add(f"{at}.attention_residual", x, o)


def forward(config: Qwen3Config, b: Builder) -> str:
    """Attention, then x += down(silu(gate) * up), in every layer."""
    x = b.embed("model.embed_tokens", config.vocab_size, config.hidden)
    for layer in range(config.layers):
        at = f"model.layers.{layer}"
        x = attended(b, at, x, config, layer)
        h = b.rmsnorm(f"{at}.post_attention_layernorm", x, config.eps)
        x = b.add(at, x, names.gated_mlp(b, f"{at}.mlp", h, config, "silu", bias=False))
    return names.head(b, x, config)


FAMILY = Family("qwen3", parse_hf, parse_gguf, lambda config: names.HF_SOURCES, gguf, constants, forward)
