"""gpt-oss (``GptOssForCausalLM``, GGUF ``gpt-oss``): attention sinks, windows in every other layer, biased experts.

Experts are clamped SwiGLUs whose gate and up rows take turns in safetensors, and are chosen by a softmax over the
chosen logits alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tapeout.compiler.ir import Builder
from tapeout.compiler.models import experts, names, windows
from tapeout.compiler.models.base import Config, Family, Fields, Rope, Sources
from tapeout.compiler.models.experts import Experts
from tapeout.compiler.recipes import Constant, Convert, Flatten, GroupRows, Recipe, TransposeGroups, Vector
from tapeout.runtime.errors import TapeoutError

ARCH = "gpt-oss"
ROTARY = "model.rotary_emb"
LIMIT = 7.0
# where config.json is silent (configuration_gpt_oss.py)
_YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}
DEFAULTS = {"head_dim": 64, "rms_norm_eps": 1e-5, "rope_theta": 150000.0, "rope_parameters": _YARN}


@dataclass(frozen=True)
class GptOssConfig(Config):
    """gpt-oss's own fields; ``windows``: how many keys each layer sees, 0 for all; ``limit`` clamps gate and up."""

    rope: Rope
    attention_bias: bool
    windows: tuple[int, ...]
    experts: Experts
    limit: float


def parse_hf(raw: Mapping[str, Any]) -> GptOssConfig:
    """From config.json."""
    fields = Fields({**DEFAULTS, **{key: value for key, value in raw.items() if value is not None}}, "config.json")
    if fields.number("swiglu_alpha", 1.702) != 1.702:
        raise fields.unsupported("swiglu_alpha")
    common = names.hf_common(fields, context=131072)
    slides = windows.layer_types(fields, common["layers"]) or windows.periodic(common["layers"], 2)
    if any(slides) and raw.get("sliding_window", 0) is None:
        raise TapeoutError("config.json: sliding_window is null, but layers slide; it must say how many keys they see")
    window = fields.integer("sliding_window", 128)
    routed = experts.hf_experts(fields, count=128, top_k=4, width=common["ffn"], normalize=False)
    return GptOssConfig(
        **common,
        attention_bias=fields.flag("attention_bias", True),
        windows=tuple(window if slide else 0 for slide in slides),
        experts=replace(routed, score="softmax_chosen"),
        limit=fields.positive("swiglu_limit", LIMIT),
    )


def parse_gguf(raw: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> GptOssConfig:
    """From GGUF metadata and the shapes of the file's tensors, which state no limit and no ``truncate`` of yarn."""
    fields = Fields(raw, "GGUF metadata")
    common = names.gguf_common(fields, ARCH, shapes, experts=True)
    routed = experts.gguf_experts(fields, ARCH, common["ffn"], gating=experts.GATING_SOFTMAX_CHOSEN)
    return GptOssConfig(
        **common,
        rope=replace(names.gguf_rope(fields, ARCH, common["head_dim"]), truncate=False),
        attention_bias="blk.0.attn_q.bias" in shapes,
        windows=windows.gguf_windows(fields, ARCH, common["layers"], period=2),
        experts=replace(routed, score="softmax_chosen", normalize=False),
        limit=LIMIT,
    )


def hf(config: GptOssConfig) -> Sources:
    """Gate and up are one tensor, their rows in turns; a plain stack has a matrix of in-features first an expert."""
    del config

    def name(slot: str) -> str:
        if ".experts." in slot:
            return re.sub(r"\.(gate|up)_proj", ".gate_up_proj", slot).replace(".bias", "_bias")
        return slot if slot.endswith(".sinks") else names.HF_SOURCES.name(slot)

    def adapt(slot: str, recipe: Recipe) -> Recipe:
        if ".experts." not in slot:
            return recipe
        if slot.endswith(".bias"):
            recipe = _vector(recipe)
        elif len(recipe.shape) == 3:
            recipe = TransposeGroups(Flatten(recipe), recipe.shape[0])
        turn = {"gate_proj": 0, "up_proj": 1}.get(slot.removesuffix(".bias").rpartition(".")[2])
        return recipe if turn is None else GroupRows(recipe, 2, turn, turn + 1)

    return Sources(name, adapt, names.HF_SOURCES.ignore)


def _vector(stack: Recipe) -> Recipe:
    """The biases [E, N] of all experts, one behind the other."""
    return Vector(stack if stack.format == "f32" else Convert(stack, "f32"))


NAMES = {
    **experts.GGUF_NAMES,
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "self_attn.sinks": "attn_sinks",
    "mlp.router": "ffn_gate_inp",
}


def gguf(config: GptOssConfig) -> Sources:
    """GGUF stores q and k in halves order, and gate, up and down of all experts in a stack each."""
    del config

    def adapt(slot: str, recipe: Recipe) -> Recipe:
        return _vector(recipe) if ".experts." in slot and slot.endswith(".bias") else recipe

    return Sources(names.gguf_names(NAMES, ROTARY), experts.gguf_adapt(adapt), names.gguf_ignored)


def constants(config: GptOssConfig) -> Mapping[str, Recipe]:
    """The rotary frequencies."""
    return {ROTARY: Constant(config.rope.inv_freq())}


def forward(config: GptOssConfig, b: Builder) -> str:
    """x += o(attention(rope(q), rope(k), v)); x += the experts' sum."""
    factor, bias = config.rope.cos_sin_factor(), config.attention_bias
    x = b.embed("model.embed_tokens", config.vocab_size, config.hidden)
    for layer, window in enumerate(config.windows):
        at = f"model.layers.{layer}"
        h = b.rmsnorm(f"{at}.input_layernorm", x, config.eps)
        q, k, v = names.qkv(b, f"{at}.self_attn", h, config, bias)
        q = b.rope(f"{at}.self_attn.q_rope", q, ROTARY, config.head_dim, factor)
        k = b.rope(f"{at}.self_attn.k_rope", k, ROTARY, config.head_dim, factor)
        attended = b.attention(f"{at}.self_attn.attention", (q, k, v), layer=layer, head_dim=config.head_dim,
                               scale=config.head_dim**-0.5, window=window, sinks=True)  # fmt: skip
        o = b.linear(f"{at}.self_attn.o_proj", attended, config.hidden, ("hidden", "heads"), bias=bias)
        x = b.add(f"{at}.attention_residual", x, o)
        h = b.rmsnorm(f"{at}.post_attention_layernorm", x, config.eps)
        x = b.add(at, x, _experts(b, f"{at}.mlp", h, config))
    return names.head(b, x, config)


def _experts(b: Builder, at: str, x: str, config: GptOssConfig) -> str:
    """The weighted sum of down((up + 1) gate sigmoid(1.702 gate)) over the chosen experts."""
    chosen = config.experts
    logits = b.linear(f"{at}.router", x, chosen.count, ("experts", "hidden"), bias=True)
    route = b.route(f"{at}.route", logits, top_k=chosen.top_k, score=chosen.score, normalize=chosen.normalize)
    return experts.chosen_mlp(b, at, x, route, config.hidden, chosen, "swiglu_oai", config.limit, bias=True)


FAMILY = Family("gpt_oss", parse_hf, parse_gguf, hf, gguf, constants, forward)
