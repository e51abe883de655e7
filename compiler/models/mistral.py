"""Mistral (``MistralForCausalLM``; GGUF ``llama``): Llama without biases, with one window for all layers or none.

A GGUF that does not state the window attends to everything, as llama.cpp does with every file of this architecture.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tapeout.compiler.models import llama, names
from tapeout.compiler.models.base import Family, Fields
from tapeout.compiler.models.llama import LlamaConfig


def parse_hf(raw: Mapping[str, Any]) -> LlamaConfig:
    """From config.json. A null ``sliding_window`` is none, a missing one 4096 (``configuration_mistral.py``)."""
    fields = Fields(raw, "config.json")
    fields.refuse("layer_types")
    common = names.hf_common(fields, context=131072)
    window = 0 if fields.raw.get("sliding_window", 0) is None else fields.integer("sliding_window", 4096)
    if window and not fields.flag("use_sliding_window", True):
        raise fields.unsupported("use_sliding_window")
    return LlamaConfig(**common, attention_bias=False, mlp_bias=False, window=window)


FAMILY = Family("mistral", parse_hf, llama.parse_gguf, llama.FAMILY.hf, llama.gguf, llama.constants, llama.forward)
