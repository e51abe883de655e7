"""A config without weights: enough to plan with. What stands for it is a Checkpoint that has no tensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tapeout.compiler.checkpoints.base import Checkpoint, FileIdentity, load_json_object
from tapeout.compiler.guards import is_mapping

CONFIG = "config"
"""The container of such a checkpoint."""


def open_config(path: Path) -> Checkpoint:
    """A config.json alone. Raises TapeoutError when it is not a JSON object."""
    return Checkpoint(CONFIG, path, {}, load_json_object(path), files=(FileIdentity.of(path),))


def written_differently(written: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """The keys of ``written`` that ``found`` lacks or has another value for, dotted where a section holds them."""
    differ: list[str] = []
    for key, value in written.items():
        other = found.get(key)
        if is_mapping(value) and is_mapping(other):
            differ += [f"{key}.{inner}" for inner in written_differently(value, other)]
        elif key not in found or other != value:
            differ.append(key)
    return differ


def written_config(config: Mapping[str, Any]) -> Checkpoint:
    """The keys of config.json as a spec writes them down."""
    return Checkpoint(CONFIG, Path("model.config"), {}, config)
