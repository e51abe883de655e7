"""Multi-head latent attention and what its families share: tensor names of both containers, and the program.

Each token leaves one key [latent | rope] that all heads share. The up-projection of keys is multiplied into the query
and that of values into the output (the absorbed form), so only that key is cached. Formulas: transformers
``modeling_deepseek_v3.py`` and ``modeling_glm_moe_dsa.py``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from tapeout.compiler.formats import FORMATS
from tapeout.compiler.ir import Builder
from tapeout.compiler.models import experts, names
from tapeout.compiler.models.base import Sources
from tapeout.compiler.models.latent_config import Index, LatentConfig
from tapeout.compiler.recipes import Constant, Convert, Flatten, GroupRows, Recipe, TransposeGroups

ROTARY = "model.rotary_emb"
NORM_EPS = 1e-6  # of the norms of latents and of the index, whatever the config says
GGUF_NAMES = {
    **experts.GGUF_NAMES,
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.indexer.wq_b": "indexer.attn_q_b",
    "self_attn.indexer.wk": "indexer.attn_k",
    "self_attn.indexer.k_norm": "indexer.k_norm",
    "self_attn.indexer.weights_proj": "indexer.proj",
    "mlp.route": "exp_probs_b",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}


def hf(config: LatentConfig) -> Sources:
    """kv_b_proj holds keys and values of one head after the other; every expert has tensors of its own."""

    def name(slot: str) -> str:
        slot = re.sub(r"\.self_attn\.[kv]_b_proj$", ".self_attn.kv_b_proj", slot)
        if slot.endswith(".mlp.route.bias"):
            return slot.replace(".mlp.route.bias", ".mlp.gate.e_score_correction_bias")
        return names.HF_SOURCES.name(slot)

    def adapt(slot: str, recipe: Recipe) -> Recipe:
        return _half_of_kv_b(config, slot, recipe)

    base = Sources(name, adapt, lambda tensor: _ignored(config, "layers", tensor) or names.HF_SOURCES.ignore(tensor))
    return experts.hf_sources(base, config.experts.count) if config.experts else base


def gguf(config: LatentConfig) -> Sources:
    """attn_k_b and attn_v_b are stacks of a matrix a head; older files have kv_b_proj as it is."""
    halves = ("k_b", "v_b") if config.split_kv_b else ("kv_b", "kv_b")
    half_names = {f"self_attn.{half}_b_proj": f"attn_{name}" for half, name in zip("kv", halves, strict=True)}

    def adapt(slot: str, recipe: Recipe) -> Recipe:
        if config.split_kv_b and slot.endswith((".k_b_proj", ".v_b_proj")):
            return Flatten(recipe)
        return _half_of_kv_b(config, slot, recipe)

    def ignore(tensor: str) -> str | None:
        return _ignored(config, "blk", tensor) or names.gguf_ignored(tensor)

    return Sources(names.gguf_names({**GGUF_NAMES, **half_names}, ROTARY), experts.gguf_adapt(adapt), ignore)


def _half_of_kv_b(config: LatentConfig, slot: str, recipe: Recipe) -> Recipe:
    """The part of kv_b_proj [heads * (nope + value), latent] that a slot holds, keys transposed a head."""
    both = config.nope + config.value
    if slot.endswith(".k_b_proj"):
        # blocks along the latent would run across what is multiplied: exact values as float32 instead
        floats = recipe if FORMATS[recipe.format].is_float else Convert(recipe, "f32")
        return TransposeGroups(GroupRows(floats, both, 0, config.nope), config.heads)
    if slot.endswith(".v_b_proj"):
        tile = FORMATS[recipe.format].tiles
        if tile and (not tile[0] or config.nope % tile[0] or both % tile[0]):
            recipe = Convert(recipe, "f32")  # heads cut through rows that share a scale
        return GroupRows(recipe, both, config.nope, both)
    return recipe


def _ignored(config: LatentConfig, layers: str, tensor: str) -> str | None:
    """Layers behind the last predict further tokens (MTP)."""
    match = re.search(rf"(?:^|\.){layers}\.(\d+)\.", tensor)
    if match and 0 <= int(match[1]) - config.layers < config.num_nextn_predict_layers:
        return "a layer that drafts further tokens is not part of the model itself; the checkpoint keeps it"
    if tensor.startswith(("mm_projector.", "model.mm_projector.")):
        return "the vision part of a multimodal checkpoint is not compiled"
    return None


def constants(config: LatentConfig) -> Mapping[str, Recipe]:
    """The rotary frequencies."""
    return {ROTARY: Constant(config.rope.inv_freq())}


def attention(b: Builder, at: str, h: str, config: LatentConfig, layer: int, selection: str = "") -> tuple[str, str]:
    """The attention of one layer, and the selection that it took, made here where the layer has an index of its own."""
    q, kv, residual = _projected(b, at, h, config)
    head, factor = config.head_dim, config.rope.cos_sin_factor()

    def rotated(name: str, x: str) -> str:
        return b.rotate(f"{at}.{name}", x, ROTARY, rotated=config.rotated, period=config.rotated, factor=factor,
                        pairs=config.rope_pairs)  # fmt: skip

    q_rope = rotated("q_rope", b.columns(f"{at}.q_pe", q, config.nope, head, head))
    c = b.columns(f"{at}.kv_latent", kv, 0, config.latent)
    c = b.rmsnorm(f"{at}.kv_a_layernorm", c, NORM_EPS)
    k_rope = rotated("k_rope", b.columns(f"{at}.k_pe", kv, config.latent, config.latent + config.rotated))
    if config.index is not None and config.index.full[layer]:
        selection = select(b, f"{at}.indexer", (h, residual), config, config.index, layer)
    q_nope = b.columns(f"{at}.q_nope", q, 0, config.nope, head)
    q_latent = b.head_linear(f"{at}.k_b_proj", q_nope, config.heads, config.latent, ("heads", "head_dim"))
    attended = b.latent_attention(f"{at}.attention", (q_latent, q_rope), (c, k_rope), selection, layer=layer,
                                  heads=config.heads, scale=config.scale)  # fmt: skip
    values = b.head_linear(f"{at}.v_b_proj", attended, config.heads, config.value, ("heads", "latent"))
    o = b.linear(f"{at}.o_proj", values, config.hidden, ("hidden", "heads"), bias=config.attention_bias)
    return o, selection


def _projected(b: Builder, at: str, h: str, config: LatentConfig) -> tuple[str, str, str]:
    """q, the latent and the rope key side by side, and what q was made of."""
    width, cached = config.heads * config.head_dim, config.latent + config.rotated
    fuse = f"{at}.q_a_kv_a_proj_with_mqa_proj" if config.q_rank else ""
    down = (
        b.linear(f"{at}.q_a_proj", h, config.q_rank, ("latent", "hidden"), bias=config.attention_bias, fuse=fuse)
        if config.q_rank
        else ""
    )
    kv = b.linear(f"{at}.kv_a_proj_with_mqa", h, cached, ("latent", "hidden"), bias=config.attention_bias, fuse=fuse)
    if not down:
        return b.linear(f"{at}.q_proj", h, width, ("heads", "hidden")), kv, h
    residual = b.rmsnorm(f"{at}.q_a_layernorm", down, NORM_EPS)
    return b.linear(f"{at}.q_b_proj", residual, width, ("heads", "latent")), kv, residual


def select(b: Builder, at: str, x: tuple[str, str], config: LatentConfig, index: Index, layer: int) -> str:
    """The positions that an index selects, from the layer's input and the latent of q (``x``)."""
    h, residual = x
    factor = config.rope.cos_sin_factor()

    def rotated(name: str, value: str) -> str:
        return b.rotate(f"{at}.{name}", value, ROTARY, rotated=config.rotated, period=index.head_dim, factor=factor,
                        pairs=index.pairs)  # fmt: skip

    q = b.linear(f"{at}.wq_b", residual, index.heads * index.head_dim, ("index_heads", "latent"))
    k = b.layernorm(f"{at}.k_norm", b.linear(f"{at}.wk", h, index.head_dim, ("head_dim", "hidden")), NORM_EPS)
    weights = b.linear(f"{at}.weights_proj", h, index.heads, ("index_weights", "hidden"))
    return b.index_select(f"{at}.select", rotated("q_rope", q), rotated("k_rope", k), weights, layer=layer,
                          top_k=index.top_k, scale=(index.head_dim * index.heads) ** -0.5)  # fmt: skip


def forward(config: LatentConfig, b: Builder) -> str:
    """x += attention(norm(x)); x += the experts' sum and the shared expert, or the MLP of a dense layer."""
    x = b.embed("model.embed_tokens", config.vocab_size, config.hidden)
    selection = ""
    for layer in range(config.layers):
        at = f"model.layers.{layer}"
        h = b.rmsnorm(f"{at}.input_layernorm", x, config.eps)
        o, selection = attention(b, f"{at}.self_attn", h, config, layer, selection)
        x = b.add(f"{at}.attention_residual", x, o)
        h = b.rmsnorm(f"{at}.post_attention_layernorm", x, config.eps)
        mlp, width = f"{at}.mlp", config.ffn
        if config.experts is not None and config.sparse[layer]:
            routed = experts.routed_mlp(b, mlp, h, config.hidden, config.experts)
            x = b.add(f"{at}.routed_residual" if config.shared else at, x, routed)
            mlp, width = f"{mlp}.shared_experts", config.shared
        if width:
            x = b.add(at, x, names.gated_mlp(b, mlp, h, replace(config, ffn=width), "silu", bias=False))
    return names.head(b, x, config)
