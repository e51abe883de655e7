"""Qwen3 with a mixture of experts (``Qwen3MoeForCausalLM``, GGUF ``qwen3moe``): Qwen3 whose MLPs are routed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tapeout.compiler.guards import is_list
from tapeout.compiler.ir import Builder
from tapeout.compiler.models import experts, names, qwen3
from tapeout.compiler.models.base import Family, Fields, Sources
from tapeout.compiler.models.experts import Experts
from tapeout.runtime.errors import TapeoutError

ARCH = "qwen3moe"


@dataclass(frozen=True)
class Qwen3MoeConfig(qwen3.Qwen3Config):
    """Qwen3's fields and the experts; ``sparse`` says for each layer whether its MLP is routed."""

    experts: Experts
    sparse: tuple[bool, ...]


def parse_hf(raw: Mapping[str, Any]) -> Qwen3MoeConfig:
    """From config.json; defaults are those of ``configuration_qwen3_moe.py``."""
    fields = Fields(raw, "config.json")
    fields.refuse(
        "layer_types", "shared_expert_intermediate_size", "n_shared_experts", "n_group", "routed_scaling_factor"
    )
    common = names.hf_common(fields, context=32768)
    width, normalize = fields.integer("moe_intermediate_size", 768), fields.flag("norm_topk_prob", False)
    slides = fields.flag("use_sliding_window", False) and fields.raw.get("sliding_window", 0) is not None
    window = fields.integer("sliding_window", 4096) if slides else 0
    return Qwen3MoeConfig(
        **common,
        attention_bias=fields.flag("attention_bias", False),
        windows=(window,) * common["layers"],
        experts=experts.hf_experts(fields, count=128, top_k=8, width=width, normalize=normalize),
        sparse=_sparse(fields, common["layers"]),
    )


def _sparse(fields: Fields, layers: int) -> tuple[bool, ...]:
    """Every ``decoder_sparse_step``-th layer is routed, but for those in ``mlp_only_layers``."""
    step = fields.integer("decoder_sparse_step", 1)
    dense: Any = fields.raw.get("mlp_only_layers") or []
    if not is_list(dense) or any(isinstance(layer, bool) or layer not in range(layers) for layer in dense):
        raise TapeoutError(f"{fields.what}: mlp_only_layers is {dense!r:.60}; it must list layers below {layers}")
    return tuple((layer + 1) % step == 0 and layer not in dense for layer in range(layers))


def parse_gguf(raw: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> Qwen3MoeConfig:
    """From GGUF metadata and the shapes of the file's tensors; all layers of this architecture are routed."""
    fields = Fields(raw, "GGUF metadata")
    fields.refuse(f"{ARCH}.attention.sliding_window")
    common = names.gguf_common(fields, ARCH, shapes, experts=True)
    return Qwen3MoeConfig(
        **common,
        rope=names.gguf_rope(fields, ARCH, common["head_dim"]),
        attention_bias="blk.0.attn_q.bias" in shapes,
        windows=(0,) * common["layers"],
        experts=experts.gguf_experts(fields, ARCH, common["ffn"]),
        sparse=(True,) * common["layers"],
    )


def hf(config: Qwen3MoeConfig) -> Sources:
    """Every expert has tensors of its own."""
    return experts.hf_sources(names.HF_SOURCES, config.experts.count)


def gguf(config: Qwen3MoeConfig) -> Sources:
    """GGUF stores q and k in halves order, and the experts of a projection in one stack."""
    del config
    known = names.gguf_names({**qwen3.NAMES, **experts.GGUF_NAMES}, qwen3.ROTARY)
    return Sources(known, experts.gguf_adapt(names.HF_SOURCES.adapt), names.gguf_ignored)


def forward(config: Qwen3MoeConfig, b: Builder) -> str:
    """x += o(attention(rope(norm(q)), rope(norm(k)), v)); x += the experts' sum, or the MLP of a dense layer."""
    x = b.embed("model.embed_tokens", config.vocab_size, config.hidden)
    for layer, sparse in enumerate(config.sparse):
        at = f"model.layers.{layer}"
        x = qwen3.attended(b, at, x, config, layer)
        h = b.rmsnorm(f"{at}.post_attention_layernorm", x, config.eps)
        if sparse:
            x = b.add(at, x, experts.routed_mlp(b, f"{at}.mlp", h, config.hidden, config.experts))
        else:
            x = b.add(at, x, names.gated_mlp(b, f"{at}.mlp", h, config, "silu", bias=False))
    return names.head(b, x, config)


FAMILY = Family("qwen3_moe", parse_hf, parse_gguf, hf, gguf, qwen3.constants, forward)
