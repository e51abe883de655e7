"""Model families, one file each. To add one: its file, a line in FAMILIES, a row of tests/parity/test_families.py."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from tapeout.compiler.models.base import Family
from tapeout.runtime.errors import TapeoutError

# module name -> the architecture strings of config.json and of GGUF that it serves
FAMILIES: Mapping[str, tuple[str, ...]] = {
    "llama": ("LlamaForCausalLM", "llama"),
    "mistral": ("MistralForCausalLM", "mistral"),
    "mixtral": ("MixtralForCausalLM",),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "qwen3moe"),
    "gpt_oss": ("GptOssForCausalLM", "gpt-oss"),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration", "gemma3"),
    "deepseek": (
        "DeepseekV2ForCausalLM",
        "DeepseekV3ForCausalLM",
        "KimiK25ForConditionalGeneration",
        "Kimi_K25ForConditionalGeneration",
        "deepseek2",
    ),
    "deepseek_v32": ("DeepseekV32ForCausalLM", "deepseek32"),
    "glm_dsa": ("GlmMoeDsaForCausalLM", "glm-dsa"),
    "deepseek_v4": ("DeepseekV4ForCausalLM",),
}


def find_family(architectures: list[str], where: str) -> Family:
    """The family of that name, or that serves a known architecture. Raises TapeoutError listing the known ones."""
    for module, known in FAMILIES.items():
        if any(name in (module, *known) for name in architectures):
            loaded: Any = importlib.import_module(f"tapeout.compiler.models.{module}")
            return loaded.FAMILY
    known = ", ".join(name for names in FAMILIES.values() for name in names)
    raise TapeoutError(f"{where}: architecture {', '.join(architectures) or 'missing'} is unknown; known are {known}")
