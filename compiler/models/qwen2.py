"""Qwen2 and Qwen2.5, dense (``Qwen2ForCausalLM``, GGUF ``qwen2``): Llama with biases on q, k and v alone."""

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
class Qwen2Config(Config):
    """Qwen2's own fields; ``windows`` holds how many keys each layer sees, 0 for all."""

    rope: Rope
    windows: tuple[int, ...]


def parse_hf(raw: Mapping[str, Any]) -> Qwen2Config:
    """From config.json."""
    fields = Fields(raw, "config.json")
    common = names.hf_common(fields, context=32768)
    return Qwen2Config(**common, windows=windows.qwen_windows(fields, common["layers"]))


def parse_gguf(raw: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> Qwen2Config:
    """From GGUF metadata and the shapes of the file's tensors."""
    fields = Fields(raw, "GGUF metadata")
    common = names.gguf_common(fields, "qwen2", shapes)
    return Qwen2Config(
        **common,
        rope=names.gguf_rope(fields, "qwen2", common["head_dim"]),
        windows=windows.gguf_windows(fields, "qwen2", common["layers"]),
    )


def gguf(config: Qwen2Config) -> Sources:
    """GGUF stores q and k in halves order."""
    del config
    return Sources(names.gguf_names(NAMES, ROTARY), names.HF_SOURCES.adapt, names.gguf_ignored)


def constants(config: Qwen2Config) -> Mapping[str, Recipe]:
    """The rotary frequencies."""
    return {ROTARY: Constant(config.rope.inv_freq())}


def forward(config: Qwen2Config, b: Builder) -> str:
    """x += o(attention(rope(q), rope(k), v)); x += down(silu(gate) * up)."""
    factor, head_dim = config.rope.cos_sin_factor(), config.head_dim
    x = b.embed("model.embed_tokens", config.vocab_size, config.hidden)
    for layer, window in enumerate(config.windows):
        at = f"model.layers.{layer}"
        h = b.rmsnorm(f"{at}.input_layernorm", x, config.eps)
        q, k, v = names.qkv(b, f"{at}.self_attn", h, config, bias=True)
        q = b.rope(f"{at}.self_attn.q_rope", q, ROTARY, head_dim, factor)
        k = b.rope(f"{at}.self_attn.k_rope", k, ROTARY, head_dim, factor)
        attended = b.attention(f"{at}.self_attn.attention", (q, k, v), layer=layer, head_dim=head_dim,
                               scale=head_dim**-0.5, window=window)  # fmt: skip
        o = b.linear(f"{at}.self_attn.o_proj", attended, config.hidden, ("hidden", "heads"))
        x = b.add(f"{at}.attention_residual", x, o)
        h = b.rmsnorm(f"{at}.post_attention_layernorm", x, config.eps)
        x = b.add(at, x, names.gated_mlp(b, f"{at}.mlp", h, config, "silu", bias=False))
    return names.head(b, x, config)


FAMILY = Family("qwen2", parse_hf, parse_gguf, lambda config: names.HF_SOURCES, gguf, constants, forward)
