"""Which layers see only a window of keys, as config.json and GGUF metadata say it. A window of 0 sees everything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

from tapeout.compiler.guards import is_list
from tapeout.compiler.models.base import Fields
from tapeout.runtime.errors import TapeoutError

_KINDS = {"full_attention": False, "sliding_attention": True}


def periodic(layers: int, period: int) -> tuple[bool, ...]:
    """Every ``period``-th layer is full and the others slide."""
    return tuple((layer + 1) % period != 0 for layer in range(layers))


def layer_types(fields: Fields, layers: int) -> tuple[bool, ...] | None:
    """Whether each layer slides, by the key ``layer_types`` of config.json; None without it."""
    kinds = fields.raw.get("layer_types")
    if kinds is None:
        return None
    if not is_list(kinds) or len(kinds) != layers or any(kind not in list(_KINDS) for kind in kinds):
        raise TapeoutError(f"{fields.what}: layer_types must list {layers} times one of {', '.join(_KINDS)}")
    return tuple(_KINDS[kind] for kind in kinds)


def qwen_windows(fields: Fields, layers: int) -> tuple[int, ...]:
    """The window of each layer of Qwen2 and Qwen3: ``use_sliding_window`` admits one, at first to the upper layers.

    A null ``sliding_window`` is none, a missing one 4096 (transformers ``configuration_qwen2.py``).
    """
    kinds = layer_types(fields, layers)
    window = 0
    if fields.flag("use_sliding_window", False):
        window = 0 if fields.raw.get("sliding_window", 0) is None else fields.integer("sliding_window", 4096)
    if kinds is None:
        first = fields.integer("max_window_layers", 28, least=0)
        kinds = tuple(layer >= first for layer in range(layers))
    elif any(kinds) and not window:
        raise TapeoutError(
            f"{fields.what}: layer_types has sliding layers, but there is no window; it must be stated by "
            "sliding_window, and use_sliding_window must be true"
        )
    return tuple(window if slides else 0 for slides in kinds)


def _is_array(value: Any) -> TypeGuard[Sequence[Any]]:
    """Whether a value of GGUF metadata is an array, which is known by place until it is looked into."""
    return isinstance(value, Sequence) and not isinstance(value, str)


def gguf_windows(fields: Fields, arch: str, layers: int, period: int = 0) -> tuple[int, ...]:
    """The window of each layer by ``A.attention.sliding_window`` and ``_pattern``: a flag a layer, or a period.

    ``period`` is the architecture's own where a file is silent. Raises TapeoutError where neither states one, since not
    all layers of these families slide.
    """
    key = f"{arch}.attention.sliding_window"
    window = fields.integer(key, 0, least=0)
    if not window:
        return (0,) * layers
    pattern: Any = fields.raw.get(f"{key}_pattern")
    if pattern is None and period:
        kinds = periodic(layers, period)
    elif isinstance(pattern, int) and not isinstance(pattern, bool):
        kinds = periodic(layers, fields.integer(f"{key}_pattern"))
    elif _is_array(pattern) and len(pattern) == layers:
        kinds = tuple(bool(slides) for slides in pattern)
    else:
        raise TapeoutError(
            f"{fields.what}: {key} is {window}, but which layers slide is not known; {key}_pattern must be a period "
            f"or list true or false for {layers} layers"
        )
    return tuple(window if slides else 0 for slides in kinds)
