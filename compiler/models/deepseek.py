"""DeepSeek-V2 and V3, Kimi-K2 and the text part of Kimi-K2.5 (``DeepseekV2ForCausalLM``, GGUF ``deepseek2``, …)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tapeout.compiler.models import experts, latent, latent_config
from tapeout.compiler.models.base import Family, Fields
from tapeout.compiler.models.experts import Experts
from tapeout.compiler.models.latent_config import LatentConfig
from tapeout.runtime.errors import TapeoutError

SIZES = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
ARCH = "deepseek2"


def parse_hf(raw: Mapping[str, Any]) -> LatentConfig:
    """From config.json (the text part of a multimodal one); defaults are those of transformers' configurations."""
    whole = Fields(raw, "config.json")
    fields = Fields(whole.section("text_config") or raw, "config.json")
    tied = fields.flag("tie_word_embeddings", False)
    if whole.flag("tie_word_embeddings", tied) != tied:
        raise TapeoutError(f"config.json: tie_word_embeddings is {not tied} at the top and {tied} in text_config")
    return _v2(fields) if _is_v2(fields) else _v3(fields)


def _is_v2(fields: Fields) -> bool:
    named: Any = fields.raw.get("architectures") or []
    return "DeepseekV2ForCausalLM" in named or (not named and fields.raw.get("model_type") == "deepseek_v2")


def _v2(fields: Fields) -> LatentConfig:
    common = latent_config.hf_latent(fields, 2048, SIZES)
    fields.choice("scoring_func", {"softmax": "softmax"}, "softmax")
    sparse = latent_config.dense_first(fields, common["layers"], 0)
    routed, shared = _v2_experts(fields) if any(sparse) else (None, 0)
    return LatentConfig(**common, rope_pairs=True, q_rank=_q_rank(fields), experts=routed, shared=shared, sparse=sparse)


def _v2_experts(fields: Fields) -> tuple[Experts, int]:
    """Softmax routing, the best group by its best expert; transformers has no weights that are normalised."""
    fields.refuse("norm_topk_prob")
    limited = fields.choice("topk_method", {"greedy": "", "group_limited_greedy": "groups"}, "greedy")
    width = fields.integer("moe_intermediate_size", 1407)
    chosen = Experts(
        count=fields.integer("n_routed_experts", fields.integer("num_experts", 64)),
        top_k=fields.integer("num_experts_per_tok"),
        width=width,
        normalize=False,
        groups=fields.integer("n_group") if limited else 1,
        top_groups=fields.integer("topk_group") if limited else 1,
        scale=fields.number("routed_scaling_factor", 1.0),
    )
    return experts.checked(chosen, fields.what), width * fields.integer("n_shared_experts", 2)


def _v3(fields: Fields) -> LatentConfig:
    common = latent_config.hf_latent(fields, 4096, SIZES)
    sparse = latent_config.dense_first(fields, common["layers"], 3)
    routed, shared = latent_config.noaux_experts(fields, (8, 4)) if any(sparse) else (None, 0)
    pairs = fields.flag("rope_interleave", True)
    return LatentConfig(
        **common, rope_pairs=pairs, q_rank=_q_rank(fields), experts=routed, shared=shared, sparse=sparse
    )


def _q_rank(fields: Fields) -> int:
    """The rank of q; null is none, a missing key 1536."""
    stated = "q_lora_rank" in fields.raw and fields.raw["q_lora_rank"] is None
    return 0 if stated else fields.integer("q_lora_rank", 1536)


def parse_gguf(raw: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> LatentConfig:
    """From GGUF metadata and the shapes of the file's tensors."""
    return LatentConfig(**latent_config.gguf_latent(raw, ARCH, shapes))


FAMILY = Family("deepseek", parse_hf, parse_gguf, latent.hf, latent.gguf, latent.constants, latent.forward)
