"""What a model family declares, and the pieces families share: typed access to configs, and rotary frequencies."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tapeout.compiler.guards import is_mapping
from tapeout.compiler.ir import Builder
from tapeout.compiler.recipes import Recipe
from tapeout.runtime.errors import TapeoutError


@dataclass(frozen=True)
class Rope:
    """Rotary frequencies of ``dim`` rotated channels; ``scaling`` in none, linear, llama3, yarn.

    Formulas: transformers ``modeling_rope_utils.py``. ``divisors`` (GGUF ``rope_freqs.weight``) are handled by
    ingestion, not here.
    """

    theta: float
    dim: int
    scaling: str = "none"
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 0.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True

    def inv_freq(self) -> tuple[float, ...]:
        """Inverse frequencies, float32 values [dim / 2]. Raises TapeoutError where the parameters give none."""
        exponents = np.arange(0, self.dim, 2, dtype=np.float64) / self.dim
        scale = {"none": self._none, "linear": self._linear, "llama3": self._llama3, "yarn": self._yarn}[self.scaling]
        try:
            with np.errstate(all="ignore"):
                scaled = scale(1.0 / np.power(self.theta, exponents)).astype(np.float32)
        except (ArithmeticError, ValueError):
            scaled = np.array([np.nan])
        if not np.isfinite(scaled).all():
            raise TapeoutError(
                f"rope theta {self.theta:g} with scaling {self.scaling} by {self.factor:g} gives frequencies that are "
                "not finite; theta and the factor must be positive, and theta must not be 1"
            )
        return tuple(float(value) for value in scaled)

    def cos_sin_factor(self) -> float:
        """What cos and sin are multiplied with (yarn's attention factor, else 1)."""
        if self.scaling != "yarn":
            return 1.0
        if self.attention_factor:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._mscale(self.mscale) / self._mscale(self.mscale_all_dim)
        return self._mscale(1.0)

    def _mscale(self, scale: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * scale * math.log(self.factor) + 1.0

    def _none(self, inv: np.ndarray) -> np.ndarray:
        return inv

    def _linear(self, inv: np.ndarray) -> np.ndarray:
        return inv / self.factor

    def _llama3(self, inv: np.ndarray) -> np.ndarray:
        wavelength = 2 * math.pi / inv
        low, high, old = self.low_freq_factor, self.high_freq_factor, self.original_context
        smooth = np.clip((old / wavelength - low) / (high - low), 0.0, 1.0)
        return (1 - smooth) * inv / self.factor + smooth * inv

    def _yarn(self, inv: np.ndarray) -> np.ndarray:
        def channel(rotations: float) -> float:
            return self.dim * math.log(self.original_context / (rotations * 2 * math.pi)) / (2 * math.log(self.theta))

        low, high = channel(self.beta_fast), channel(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.dim - 1)
        if low == high:
            high += 0.001
        ramp = np.clip((np.arange(self.dim // 2) - low) / (high - low), 0.0, 1.0)
        return inv / self.factor * ramp + inv * (1 - ramp)


@dataclass(frozen=True)
class Config:
    """What every family's config holds; families add their own fields."""

    vocab_size: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    eps: float
    max_context: int
    tied: bool

    def to_json(self) -> dict[str, Any]:
        """The config as it stands in the plan."""
        return asdict(self)


def no_parts(slot: str) -> tuple[str, ...]:
    """Every slot is one tensor, or a part of one."""
    del slot
    return ()


@dataclass(frozen=True)
class Sources:
    """How a container names and stores the weights of a family.

    ``name`` maps a weight slot to its tensor; ``adapt`` turns the tensor's recipe into the slot's (order, offsets, a
    part of it). ``ignore`` maps tensor names that carry nothing for inference to the reason. ``parts`` lists the
    tensors that a slot is made of, one below the other, where they are several (one an expert), instead of ``name``.
    ``others`` lists what a tensor is called in checkpoints that another program wrote.
    """

    name: Callable[[str], str]
    adapt: Callable[[str, Recipe], Recipe]
    ignore: Callable[[str], str | None]
    parts: Callable[[str], tuple[str, ...]] = no_parts
    others: Callable[[str], tuple[str, ...]] = no_parts


@dataclass(frozen=True)
class Family:
    """One model family: config parsing, names, constants and the forward pass."""

    name: str
    parse_hf: Callable[[Mapping[str, Any]], Any]
    parse_gguf: Callable[[Mapping[str, Any], Mapping[str, tuple[int, ...]]], Any]
    hf: Callable[[Any], Sources]
    gguf: Callable[[Any], Sources]
    constants: Callable[[Any], Mapping[str, Recipe]]
    forward: Callable[[Any, Builder], str]


class Fields:
    """Typed reading of a config mapping; a missing or ill-typed key is one clear error naming key and file kind."""

    def __init__(self, raw: Mapping[str, Any], what: str) -> None:
        self.raw, self.what = raw, what

    def __contains__(self, key: str) -> bool:
        return self.raw.get(key) is not None

    def integer(self, key: str, default: int | None = None, least: int = 1) -> int:
        """An integer of at least ``least``, which is 1 or 0."""
        value = self.raw.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self._bad(key, value, "a positive integer" if least else "0 or a positive integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number."""
        value = self.raw.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self._bad(key, value, "a finite number")
        return float(value)

    def positive(self, key: str, default: float | None = None) -> float:
        """A finite number above zero."""
        value = self.number(key, default)
        if value <= 0:
            raise self._bad(key, value, "above zero")
        return value

    def section(self, key: str) -> Mapping[str, Any]:
        """A mapping; empty when the key is missing or null."""
        value = self.raw.get(key)
        if value is None:
            return {}
        if not is_mapping(value):
            raise self._bad(key, value, "an object")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """A boolean."""
        value = self.raw.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._bad(key, value, "true or false")
        return value

    def choice(self, key: str, legal: Mapping[str, str], default: str) -> str:
        """One of the legal spellings, mapped to our name."""
        value = default if self.raw.get(key) is None else self.raw[key]
        if not isinstance(value, str) or value not in legal:
            raise self._bad(key, value, f"one of {', '.join(sorted(legal))}")
        return legal[value]

    def refuse(self, *keys: str) -> None:
        """Refuse keys that change the mathematics and are set to anything but null, false or zero."""
        for key in keys:
            value = self.raw.get(key)
            if value:
                raise self.unsupported(key)

    def unsupported(self, key: str) -> TapeoutError:
        """The error for a key that changes the mathematics in a way the family does not know."""
        return TapeoutError(
            f"{self.what} sets {key} = {self.raw.get(key)!r:.60}, which changes the mathematics and is not supported "
            "for this family"
        )

    def _bad(self, key: str, value: object, rule: str) -> TapeoutError:
        said = "is missing" if value is None else f"is {value!r:.60}"
        return TapeoutError(f"{self.what}: {key} {said}; it must be {rule}")


_ROPE_KINDS = ("default", "linear", "llama3", "yarn")
_ROPE_KEYS = frozenset(("rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "finetuned",
                        "original_max_position_embeddings", "low_freq_factor", "high_freq_factor", "beta_fast",
                        "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"))  # fmt: skip


def rope_from_hf(fields: Fields, theta: float, dim: int, raw: Mapping[str, Any], max_context: int) -> Rope:
    """A Rope from a Hugging Face ``rope_scaling`` or ``rope_parameters`` mapping, in all spellings of transformers.

    Raises TapeoutError for a kind or a key that is not known, and for partial rotation.
    """
    values = Fields(raw, f"{fields.what}: rope scaling")
    for each in (fields, values):
        if each.number("partial_rotary_factor", 1.0) != 1:
            raise each.unsupported("partial_rotary_factor")
    kind = raw.get("rope_type") or raw.get("type") or "default"
    if kind not in _ROPE_KINDS:
        known = ", ".join(_ROPE_KINDS)
        raise TapeoutError(f"{fields.what}: rope scaling type {kind!r} is unknown; known are {known}")
    values.refuse(*sorted(raw.keys() - _ROPE_KEYS))
    theta = values.positive("rope_theta") if "rope_theta" in values else theta
    if kind == "default":
        return Rope(theta, dim)
    if kind == "linear":
        return Rope(theta, dim, "linear", values.positive("factor"))
    original = values.integer("original_max_position_embeddings", max_context)
    original = fields.integer("original_max_position_embeddings", original)
    if kind == "llama3":
        return Rope(theta, dim, "llama3", values.positive("factor"), original,
                    low_freq_factor=values.number("low_freq_factor"),
                    high_freq_factor=values.number("high_freq_factor"))  # fmt: skip
    return Rope(theta, dim, "yarn", values.positive("factor"), original, beta_fast=values.number("beta_fast", 32.0),
                beta_slow=values.number("beta_slow", 1.0), attention_factor=values.number("attention_factor", 0.0),
                mscale=values.number("mscale", 0.0), mscale_all_dim=values.number("mscale_all_dim", 0.0),
                truncate=values.flag("truncate", True))  # fmt: skip


def rope_from_gguf(fields: Fields, arch: str, theta: float, dim: int) -> Rope:
    """A Rope from GGUF metadata (keys ``A.rope.scaling.*``)."""
    key = f"{arch}.rope.scaling."
    kind = fields.raw.get(key + "type", "none")
    if kind == "none":
        return Rope(theta, dim)
    factor = fields.positive(key + "factor", 1.0)
    if kind == "linear":
        return Rope(theta, dim, "linear", factor)
    if kind == "yarn":
        original = fields.integer(key + "original_context_length", fields.integer(f"{arch}.context_length"))
        # llama.cpp multiplies its own 0.1 ln(factor) + 1 with the stored factor
        attention_factor = fields.number(key + "attn_factor", 1.0) * (
            0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
        )
        return Rope(theta, dim, "yarn", factor, original, beta_fast=fields.number(key + "yarn_beta_fast", 32.0),
                    beta_slow=fields.number(key + "yarn_beta_slow", 1.0),
                    attention_factor=attention_factor)  # fmt: skip
    raise TapeoutError(f"{fields.what}: rope scaling type {kind!r} is unknown; known are none, linear, yarn")
