"""Where a checkpoint says how it is quantized: in config.json, or in ModelOpt's hf_quant_config.json beside it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tapeout.compiler.checkpoints.base import Checkpoint
from tapeout.compiler.checkpoints.config import CONFIG
from tapeout.compiler.checkpoints.hub import QUANTIZATION
from tapeout.compiler.guards import is_mapping
from tapeout.runtime.errors import TapeoutError

_KEYS = ("quantization_config", "compression_config")


def quantization_config(checkpoint: Checkpoint) -> Mapping[str, Any] | None:
    """That of config.json, at its top or in text_config (compression_config is an old name), or ModelOpt's; or None.

    Raises TapeoutError for several that differ.
    """
    if checkpoint.container not in ("safetensors", CONFIG):
        return None
    found, beside = _in_config(checkpoint), checkpoint.quantization
    if found is None:
        return beside or None
    name, config = found
    if beside and (config.get("quant_method") != "modelopt" or _algorithm(config) != _algorithm(beside)):
        raise TapeoutError(
            f"{checkpoint.path}: config.json: {name} says {config.get('quant_method')} {_algorithm(config)} and "
            f"{QUANTIZATION} modelopt {_algorithm(beside)}; leave the one that is right"
        )
    return config


def _in_config(checkpoint: Checkpoint) -> tuple[str, Mapping[str, Any]] | None:
    """The one of config.json, with its name."""
    text: Any = checkpoint.config.get("text_config")
    levels = [("", checkpoint.config), *([("text_config.", text)] if is_mapping(text) else [])]
    found = [(prefix + key, level[key]) for prefix, level in levels for key in _KEYS if level.get(key) is not None]
    for name, value in found:
        if not is_mapping(value):
            raise TapeoutError(f"{checkpoint.path}: config.json: {name} is {value!r:.60}; it must be an object")
        if value != found[0][1]:
            raise TapeoutError(
                f"{checkpoint.path}: config.json: {found[0][0]} and {name} differ; leave the one that is right"
            )
    return found[0] if found else None


def _algorithm(config: Mapping[str, Any]) -> Any:
    """ModelOpt's quant_algo, at the top of its config or under quantization."""
    inner: Any = config.get("quantization", config)
    return inner.get("quant_algo") if is_mapping(inner) else None
