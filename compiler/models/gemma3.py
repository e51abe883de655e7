"""Gemma 3 text (``Gemma3ForCausalLM``, GGUF ``gemma3``): four norms a layer, q/k norms, two rotary bases, windows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tapeout.compiler.ir import Builder
from tapeout.compiler.models import names, windows
from tapeout.compiler.models.base import Config, Family, Fields, Rope, Sources, rope_from_gguf, rope_from_hf
from tapeout.compiler.recipes import AddOne, Constant, Recipe
from tapeout.runtime.errors import TapeoutError

FULL, SLIDING = "model.rotary_emb", "model.rotary_emb_local"


@dataclass(frozen=True)
class Gemma3Config(Config):
    """Gemma 3's own fields; ``sliding`` says for each layer whether it sees only ``window`` keys."""

    rope: Rope
    local_rope: Rope
    window: int
    sliding: tuple[bool, ...]
    attention_scale: float


def _tied(whole: Fields, text: Fields) -> bool:
    """Whether the head is the embedding; a multimodal config says it at either level, or at both."""
    tied = text.flag("tie_word_embeddings", whole.flag("tie_word_embeddings", True))
    if whole.flag("tie_word_embeddings", tied) != tied:
        raise TapeoutError(f"config.json: tie_word_embeddings is {not tied} at the top and {tied} in text_config")
    return tied


def parse_hf(raw: Mapping[str, Any]) -> Gemma3Config:
    """From config.json (the text part of a multimodal one)."""
    whole = Fields(raw, "config.json")
    fields = Fields(whole.section("text_config") or raw, "config.json")
    fields.refuse("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention", "attention_bias")
    act = "hidden_activation" if "hidden_activation" in fields else "hidden_act"
    fields.choice(act, {"gelu_pytorch_tanh": "gelu_tanh"}, "gelu_pytorch_tanh")
    layers, head_dim = fields.integer("num_hidden_layers"), fields.integer("head_dim", 256)
    context, heads = fields.integer("max_position_embeddings", 131072), fields.integer("num_attention_heads")
    nested = Fields(fields.section("rope_parameters"), f"{fields.what}: rope_parameters")
    full = nested.section("full_attention") or fields.section("rope_scaling")
    local_theta = fields.positive("rope_local_base_freq", 1e4)
    kinds = windows.layer_types(fields, layers)
    return Gemma3Config(
        vocab_size=fields.integer("vocab_size", 262208),
        hidden=fields.integer("hidden_size"),
        layers=layers,
        heads=heads,
        kv_heads=fields.integer("num_key_value_heads", heads),
        head_dim=head_dim,
        ffn=fields.integer("intermediate_size"),
        eps=fields.number("rms_norm_eps", 1e-6),
        max_context=context,
        tied=_tied(whole, fields),
        rope=rope_from_hf(fields, fields.number("rope_theta", 1e6), head_dim, full, context),
        local_rope=Rope(
            Fields(nested.section("sliding_attention"), nested.what).positive("rope_theta", local_theta), head_dim
        ),
        window=fields.integer("sliding_window", 4096),
        sliding=kinds or windows.periodic(layers, fields.integer("sliding_window_pattern", 6)),
        attention_scale=fields.positive("query_pre_attn_scalar", 256.0) ** -0.5,
    )


def parse_gguf(raw: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> Gemma3Config:
    """From GGUF metadata; the scale of the 62-layer model and the pattern are llama.cpp's rules (llama-model.cpp)."""
    fields = Fields(raw, "GGUF metadata")
    common = names.gguf_common(fields, "gemma3", shapes)
    layers, head_dim = common["layers"], common["head_dim"]
    scalar = common["hidden"] / common["heads"] if layers == 62 else head_dim
    return Gemma3Config(
        **common,
        rope=rope_from_gguf(fields, "gemma3", fields.number("gemma3.rope.freq_base", 1e6), head_dim),
        local_rope=Rope(fields.number("gemma3.rope.freq_base_swa", 1e4), head_dim),
        window=fields.integer("gemma3.attention.sliding_window"),
        sliding=windows.periodic(layers, fields.integer("gemma3.attention.sliding_window_pattern", 6)),
        attention_scale=fields.number("gemma3.attention.scale", scalar**-0.5),
    )


def hf(config: Gemma3Config) -> Sources:
    """Safetensors store every norm as w - 1."""
    del config

    def adapt(slot: str, recipe: Recipe) -> Recipe:
        return AddOne(recipe) if slot.endswith("norm") else recipe

    return Sources(names.HF_SOURCES.name, adapt, names.HF_SOURCES.ignore)


NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def gguf(config: Gemma3Config) -> Sources:
    """GGUF stores norms ready to use and q, k in halves order."""
    del config
    return Sources(names.gguf_names(NAMES, FULL), names.HF_SOURCES.adapt, names.gguf_ignored)


def constants(config: Gemma3Config) -> Mapping[str, Recipe]:
    """Both sets of rotary frequencies."""
    return {FULL: Constant(config.rope.inv_freq()), SLIDING: Constant(config.local_rope.inv_freq())}


def forward(config: Gemma3Config, b: Builder) -> str:
    """x += norm(attention(norm(x))); x += norm(mlp(norm(x)))."""
    x = b.embed("model.embed_tokens", config.vocab_size, config.hidden, scale=math.sqrt(config.hidden))
    for layer, sliding in enumerate(config.sliding):
        at = f"model.layers.{layer}"
        rope, slot = (config.local_rope, SLIDING) if sliding else (config.rope, FULL)
        h = b.rmsnorm(f"{at}.input_layernorm", x, config.eps)
        q, k, v = names.qkv(b, f"{at}.self_attn", h, config, bias=False)
        q = b.rmsnorm(f"{at}.self_attn.q_norm", q, config.eps, config.head_dim)
        k = b.rmsnorm(f"{at}.self_attn.k_norm", k, config.eps, config.head_dim)
        q = b.rope(f"{at}.self_attn.q_rope", q, slot, config.head_dim, rope.cos_sin_factor())
        k = b.rope(f"{at}.self_attn.k_rope", k, slot, config.head_dim, rope.cos_sin_factor())
        attended = b.attention(f"{at}.self_attn.attention", (q, k, v), layer=layer, head_dim=config.head_dim,
                               scale=config.attention_scale, window=config.window if sliding else 0)  # fmt: skip
        o = b.linear(f"{at}.self_attn.o_proj", attended, config.hidden, ("hidden", "heads"))
        o = b.rmsnorm(f"{at}.post_attention_layernorm", o, config.eps)
        x = b.add(f"{at}.attention_residual", x, o)
        h = b.rmsnorm(f"{at}.pre_feedforward_layernorm", x, config.eps)
        h = names.gated_mlp(b, f"{at}.mlp", h, config, "gelu_tanh", bias=False)
        h = b.rmsnorm(f"{at}.post_feedforward_layernorm", h, config.eps)
        x = b.add(at, x, h)
    return names.head(b, x, config)


FAMILY = Family("gemma3", parse_hf, parse_gguf, hf, gguf, constants, forward)
