"""GLM-5 (``GlmMoeDsaForCausalLM``, GGUF ``glm-dsa``): DeepSeek-V3.2's layers, some of which share a selection."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tapeout.compiler.guards import is_list
from tapeout.compiler.models import deepseek_v32, latent, latent_config
from tapeout.compiler.models.base import Family, Fields
from tapeout.compiler.models.latent_config import LatentConfig
from tapeout.runtime.errors import TapeoutError

SIZES = {"kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256}
ARCH = "glm-dsa"
_KINDS = {"full": True, "F": True, "shared": False, "S": False}


def parse_hf(raw: Mapping[str, Any]) -> LatentConfig:
    """From config.json; attention and index both rotate pairs."""
    fields = Fields({"rms_norm_eps": 1e-5, **raw}, "config.json")
    if not fields.flag("indexer_rope_interleave", True):
        raise fields.unsupported("indexer_rope_interleave")
    common = deepseek_v32.sparse_common(fields, 202752, SIZES, (1, 1))
    full = _full(fields, common["layers"])
    index = deepseek_v32.index(fields, 32, True, full)
    return LatentConfig(**common, q_rank=fields.integer("q_lora_rank", 2048), index=index)


def _full(fields: Fields, layers: int) -> tuple[bool, ...]:
    """Which layers select keys themselves: a list or string of kinds, or every ``index_topk_freq``-th of them."""
    key = "indexer_types" if "indexer_types" in fields else "index_topk_pattern"
    kinds: Any = fields.raw.get(key)
    if kinds is None:
        every, offset = fields.integer("index_topk_freq", 1), fields.integer("index_skip_topk_offset", 2, least=0)
        full = tuple(max(layer - offset + 1, 0) % every == 0 for layer in range(layers))
    else:
        listed = list(kinds) if isinstance(kinds, str) or is_list(kinds) else []
        if len(listed) != layers or any(kind not in list(_KINDS) for kind in listed):
            raise TapeoutError(f"{fields.what}: {key} must list {layers} times full or shared, or be as many F and S")
        full = tuple(_KINDS[kind] for kind in listed)
    if not full[0]:
        raise TapeoutError(f"{fields.what}: layer 0 shares the selection of a layer before it, and there is none")
    return full


def parse_gguf(raw: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> LatentConfig:
    """From GGUF metadata and the shapes of the file's tensors."""
    common = latent_config.gguf_latent(raw, ARCH, shapes)
    index = latent_config.gguf_index(Fields(raw, "GGUF metadata"), ARCH, True, common["layers"], shapes)
    return LatentConfig(**common, index=index)


FAMILY = Family("glm_dsa", parse_hf, parse_gguf, latent.hf, latent.gguf, latent.constants, latent.forward)
