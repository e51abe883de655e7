"""Checkpoints: files of weights that others wrote, opened by content, headers only."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tapeout.compiler.checkpoints.base import Checkpoint, FileIdentity, TensorInfo
from tapeout.compiler.checkpoints.config import CONFIG, open_config, written_config
from tapeout.compiler.checkpoints.gguf import MAGIC, LazyArray, open_gguf
from tapeout.compiler.checkpoints.onnx import MODEL, is_onnx, open_onnx
from tapeout.compiler.checkpoints.safetensors import open_safetensors
from tapeout.compiler.checkpoints.source import resolve_source
from tapeout.compiler.collector import collector_paused
from tapeout.runtime.errors import TapeoutError

__all__ = [
    "CONFIG",
    "Checkpoint",
    "FileIdentity",
    "LazyArray",
    "TensorInfo",
    "open_checkpoint",
    "open_source",
    "require_weights",
    "resolve_source",
]

ACCEPTED = (
    "accepted are a .gguf file (of a split one its first part), a .safetensors file beside its config.json, "
    "a .onnx file beside its config.json, "
    "a folder with config.json and safetensors files or model.onnx, or with one .gguf file, "
    "and for a plan without weights a config.json alone"
)


def open_source(source: str | None, config: Mapping[str, Any] | None, base: Path) -> Checkpoint:
    """What a spec's ``model`` names: the checkpoint at ``source``, or ``config`` where there is none yet.

    A relative path starts from ``base``. Raises TapeoutError in one sentence for any fault.
    """
    if source is None:
        assert config is not None
        return written_config(config)
    return open_checkpoint(resolve_source(source, base))


def require_weights(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint. Raises TapeoutError where it is a config alone."""
    if checkpoint.container == CONFIG:
        raise TapeoutError(
            f"{checkpoint.path} is a config alone, which has no weights; name a checkpoint in model.source, or pass "
            "--plan-only to plan without one"
        )
    return checkpoint


@collector_paused()
def open_checkpoint(path: Path) -> Checkpoint:
    """Open the checkpoint at ``path``, told apart by content. Raises TapeoutError in one sentence for any fault."""
    if not path.exists():
        raise TapeoutError(f"{path}: there is no such file or folder; {ACCEPTED}")
    if path.is_dir():
        return _open_folder(path)
    try:
        with path.open("rb") as file:
            start = file.read(9)
    except OSError as error:
        raise TapeoutError(f"{path}: cannot be read ({error.strerror})") from error
    if start[:4] == MAGIC:
        return open_gguf(path)
    if start.lstrip()[:1] == b"{":
        return open_config(path)
    if start[8:9] == b"{":
        return open_safetensors(path)
    if is_onnx(start):
        return open_onnx(path)
    raise TapeoutError(f"{path}: is neither GGUF nor safetensors nor ONNX (it begins with {start!r}); {ACCEPTED}")


def _open_folder(path: Path) -> Checkpoint:
    ggufs = sorted(path.glob("*.gguf"))
    if (path / MODEL).is_file() and not any(path.glob("*.safetensors*")):
        return open_onnx(path)
    if not ggufs or (path / "config.json").is_file():
        return open_safetensors(path)
    if len(ggufs) > 1:
        raise TapeoutError(
            f"{path}: holds several GGUF files; name one of {', '.join(each.name for each in ggufs[:8])}"
        )
    return open_gguf(ggufs[0])
