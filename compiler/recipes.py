"""Recipes: immutable expressions that say how the bytes of one weight come from a checkpoint.

A recipe is built by passes and evaluated only by emission. Shape and format are inferred when it is built, so an
impossible step (a cut through a quantization block, a concatenation of unlike formats) cannot be expressed.
Every recipe is row-local: output rows depend on a known set of input rows, which is what lets emission stream.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tapeout.compiler.formats import FORMATS, Format
from tapeout.runtime.errors import TapeoutError

Json = dict[str, Any]


@dataclass(frozen=True)
class Recipe:
    """Base of all recipes. ``shape`` is [N, K] or [K]; ``format`` names an entry of FORMATS (or a packed layout)."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape, in elements."""
        raise NotImplementedError

    @property
    def format(self) -> str:
        """Name of the number format of the result."""
        raise NotImplementedError

    @property
    def inputs(self) -> tuple[Recipe, ...]:
        """The recipes this one reads."""
        return ()

    def to_json(self) -> Json:
        """Canonical JSON, as it stands in the plan."""
        raise NotImplementedError

    @cached_property
    def digest(self) -> str:
        """Digest of the expression; equal recipes have equal digests."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def reads(self) -> Iterator[Read]:
        """Every tensor this recipe reads, in declared order."""
        for recipe in self.inputs:
            yield from recipe.reads()

    def _format(self) -> Format:
        return FORMATS[self.format]


def _matrix(recipe: Recipe, step: str) -> tuple[int, int]:
    if len(recipe.shape) != 2:
        raise TapeoutError(f"{step} needs a matrix, got shape {list(recipe.shape)}")
    return recipe.shape[0], recipe.shape[1]


@dataclass(frozen=True)
class Read(Recipe):
    """A whole tensor of the checkpoint, by name. Matrices are [out, in] with rows contiguous."""

    tensor: str
    tensor_shape: tuple[int, ...]
    tensor_format: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor_shape

    @property
    def format(self) -> str:
        return self.tensor_format

    def to_json(self) -> Json:
        return {"op": "read", "tensor": self.tensor, "shape": list(self.tensor_shape), "format": self.tensor_format}

    def reads(self) -> Iterator[Read]:
        yield self


@dataclass(frozen=True)
class Rows(Recipe):
    """Rows [start, stop) of the input."""

    source: Recipe
    start: int
    stop: int

    def __post_init__(self) -> None:
        rows = self.source.shape[0]
        if not 0 <= self.start < self.stop <= rows:
            raise TapeoutError(f"rows {self.start}:{self.stop} do not lie in the {rows} rows of {self.source.shape}")

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.stop - self.start, *self.source.shape[1:])

    @property
    def format(self) -> str:
        return self.source.format

    @property
    def inputs(self) -> tuple[Recipe, ...]:
        return (self.source,)

    def to_json(self) -> Json:
        return {"op": "rows", "source": self.source.to_json(), "start": self.start, "stop": self.stop}


@dataclass(frozen=True)
class Columns(Recipe):
    """Columns [start, stop) of a matrix; both ends must fall on block boundaries of its format."""

    source: Recipe
    start: int
    stop: int

    def __post_init__(self) -> None:
        _, k = _matrix(self.source, "a column cut")
        block = self.source._format().block
        if not 0 <= self.start < self.stop <= k:
            raise TapeoutError(f"columns {self.start}:{self.stop} do not lie in the {k} columns of {self.source.shape}")
        if self.start % block or self.stop % block:
            raise TapeoutError(
                f"columns {self.start}:{self.stop} cut through a block of {self.source.format}; "
                f"cuts must be multiples of {block}"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.source.shape[0], self.stop - self.start)

    @property
    def format(self) -> str:
        return self.source.format

    @property
    def inputs(self) -> tuple[Recipe, ...]:
        return (self.source,)

    def to_json(self) -> Json:
        return {"op": "columns", "source": self.source.to_json(), "start": self.start, "stop": self.stop}


@dataclass(frozen=True)
class Concat(Recipe):
    """The inputs one below the other (along rows), in declared order. All must share columns and format."""

    parts: tuple[Recipe, ...]

    def __post_init__(self) -> None:
        if not self.parts:
            raise TapeoutError("a concatenation needs at least one part")
        kinds = {(part.shape[1:], part.format) for part in self.parts}
        if len(kinds) > 1:
            listed = ", ".join(f"{list(part.shape)} {part.format}" for part in self.parts)
            raise TapeoutError(f"a concatenation needs parts of one width and format, got {listed}")

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(part.shape[0] for part in self.parts), *self.parts[0].shape[1:])

    @property
    def format(self) -> str:
        return self.parts[0].format

    @property
    def inputs(self) -> tuple[Recipe, ...]:
        return self.parts

    def to_json(self) -> Json:
        return {"op": "concat", "parts": [part.to_json() for part in self.parts]}


@dataclass(frozen=True)
class HalvesFromPairs(Recipe):
    """Undo the row order that GGUF's ``llama`` class gives q and k (see formats.md 3.4).

    Within each of ``heads`` equal groups of d rows, input row 2i + j becomes output row j * d/2 + i, so that rotary
    embedding pairs element i with element i + d/2.
    """

    source: Recipe
    heads: int

    def __post_init__(self) -> None:
        if self.source.shape[0] % (2 * self.heads):
            raise TapeoutError(f"{self.source.shape[0]} rows do not make {self.heads} heads of an even size")

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape

    @property
    def format(self) -> str:
        return self.source.format

    @property
    def inputs(self) -> tuple[Recipe, ...]:
        return (self.source,)

    def to_json(self) -> Json:
        return {"op": "halves_from_pairs", "source": self.source.to_json(), "heads": self.heads}


@dataclass(frozen=True)
class Convert(Recipe):
    """The input in another number format: decoded to float32 and, unless ``to`` is f32, encoded again."""

    source: Recipe
    to: str

    def __post_init__(self) -> None:
        target = FORMATS[self.to]
        if target.encode is None:
            can = ", ".join(name for name, known in FORMATS.items() if known.encode is not None)
            raise TapeoutError(f"nothing here writes the format {self.to}; formats that can be written: {can}")
        target.row_bytes(self.source.shape[-1])

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape

    @property
    def format(self) -> str:
        return self.to

    @property
    def inputs(self) -> tuple[Recipe, ...]:
        return (self.source,)

    def to_json(self) -> Json:
        return {"op": "convert", "source": self.source.to_json(), "to": self.to}


@dataclass(frozen=True)
class AddOne(Recipe):
    """A float32 vector plus one: Gemma's norm weights in safetensors are stored as w - 1."""

    source: Recipe

    def __post_init__(self) -> None:
        if self.source.format != "f32":
            raise TapeoutError(f"adding one needs f32, got {self.source.format}")

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape

    @property
    def format(self) -> str:
        return "f32"

    @property
    def inputs(self) -> tuple[Recipe, ...]:
        return (self.source,)

    def to_json(self) -> Json:
        return {"op": "add_one", "source": self.source.to_json()}


@dataclass(frozen=True)
class Divide(Recipe):
    """One float32 vector divided by another: inverse frequencies by GGUF's ``rope_freqs``."""

    numerator: Recipe
    denominator: Recipe

    def __post_init__(self) -> None:
        kinds = [(part.shape, part.format) for part in (self.numerator, self.denominator)]
        if kinds[0] != kinds[1] or kinds[0][1] != "f32":
            raise TapeoutError(f"a division needs two f32 vectors of one length, got {kinds}")

    @property
    def shape(self) -> tuple[int, ...]:
        return self.numerator.shape

    @property
    def format(self) -> str:
        return "f32"

    @property
    def inputs(self) -> tuple[Recipe, ...]:
        return (self.numerator, self.denominator)

    def to_json(self) -> Json:
        return {"op": "divide", "numerator": self.numerator.to_json(), "denominator": self.denominator.to_json()}


@dataclass(frozen=True)
class Constant(Recipe):
    """A small float32 vector that comes from the config alone (rotary frequencies)."""

    values: tuple[float, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.values),)

    @property
    def format(self) -> str:
        return "f32"

    def to_json(self) -> Json:
        return {"op": "constant", "values": list(self.values)}


@dataclass(frozen=True)
class Pack(Recipe):
    """The last step of a weight: the byte layout that a kernel reads. ``layout`` names an entry of LAYOUTS."""

    source: Recipe
    layout: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape

    @property
    def format(self) -> str:
        return self.source.format

    @property
    def inputs(self) -> tuple[Recipe, ...]:
        return (self.source,)

    def to_json(self) -> Json:
        return {"op": "pack", "source": self.source.to_json(), "layout": self.layout}
