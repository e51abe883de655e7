"""DeepSeek-V3.2 (``DeepseekV32ForCausalLM``, GGUF ``deepseek32``): V3 with an index that selects keys in each layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tapeout.compiler.models import deepseek, latent, latent_config
from tapeout.compiler.models.base import Family, Fields
from tapeout.compiler.models.latent_config import Index, LatentConfig

ARCH = "deepseek32"


def parse_hf(raw: Mapping[str, Any]) -> LatentConfig:
    """From config.json; the index rotates halves of its first channels, attention pairs."""
    fields = Fields(raw, "config.json")
    fields.refuse("indexer_rope_interleave", "index_topk_pattern", "indexer_types")
    if fields.integer("index_topk_freq", 1) != 1:
        raise fields.unsupported("index_topk_freq")
    common = sparse_common(fields, 163840, deepseek.SIZES, (8, 4))
    full = (True,) * common["layers"]
    return LatentConfig(**common, q_rank=fields.integer("q_lora_rank", 1536), index=index(fields, 64, False, full))


def sparse_common(fields: Fields, context: int, sizes: Mapping[str, int], groups: tuple[int, int]) -> dict[str, Any]:
    """What V3.2 and GLM-5 share: attention by pairs, and the experts of V3."""
    if not fields.flag("rope_interleave", True):
        raise fields.unsupported("rope_interleave")
    common = latent_config.hf_latent(fields, context, sizes)
    sparse = latent_config.dense_first(fields, common["layers"], 3)
    routed, shared = latent_config.noaux_experts(fields, groups) if any(sparse) else (None, 0)
    return {**common, "rope_pairs": True, "experts": routed, "shared": shared, "sparse": sparse}


def index(fields: Fields, heads: int, pairs: bool, full: tuple[bool, ...]) -> Index:
    """The index by config.json; ``heads`` is the family's default."""
    return Index(
        heads=fields.integer("index_n_heads", heads),
        head_dim=fields.integer("index_head_dim", 128),
        top_k=fields.integer("index_topk", 2048),
        pairs=pairs,
        full=full,
    )


def parse_gguf(raw: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> LatentConfig:
    """From GGUF metadata and the shapes of the file's tensors."""
    common = latent_config.gguf_latent(raw, ARCH, shapes)
    index = latent_config.gguf_index(Fields(raw, "GGUF metadata"), ARCH, False, common["layers"], shapes)
    return LatentConfig(**common, index=index)


FAMILY = Family("deepseek_v32", parse_hf, parse_gguf, latent.hf, latent.gguf, latent.constants, latent.forward)
