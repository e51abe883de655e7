"""Recipes: immutable expressions that say how the bytes of one weight come from a checkpoint.

A recipe is built by passes and evaluated only by emission. Shape and format are inferred when it is built, so an
impossible step (a cut through a quantization block, a concatenation of unlike formats) cannot be expressed.
Every recipe is row-local: output rows depend on a known set of input rows, which is what lets emission stream.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import accumulate
from typing import Any, ClassVar, cast

from tapeout.compiler.formats import FORMATS
from tapeout.runtime.errors import TapeoutError

Json = dict[str, Any]


@dataclass(frozen=True)
class Recipe:
    """Base of all recipes. A subclass states its ``op`` and, where they differ from its source's, shape and format."""

    op: ClassVar[str]

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape in elements: [N, K] or [K]."""
        return self.inputs[0].shape

    @property
    def format(self) -> str:
        """Name of the number format of the result, an entry of FORMATS; what an Unpack reads may be in a carrier."""
        return self.inputs[0].format

    @property
    def inputs(self) -> tuple[Recipe, ...]:
        """The recipes this one reads, in declared order."""
        found: list[Recipe] = []
        for value in self._values().values():
            if isinstance(value, Recipe):
                found.append(value)
            elif isinstance(value, tuple):
                found.extend(item for item in cast(tuple[Any, ...], value) if isinstance(item, Recipe))
        return tuple(found)

    def _values(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def to_json(self) -> Json:
        """Canonical JSON, as it stands in the plan."""
        return {"op": self.op} | {name: _plain(value) for name, value in self._values().items()}

    @cached_property
    def digest(self) -> str:
        """Digest of the expression; equal recipes have equal digests."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def reads(self) -> Iterator[Read]:
        """Every tensor this recipe reads, in declared order."""
        for recipe in self.inputs:
            yield from recipe.reads()


def _plain(value: Any) -> Any:
    if isinstance(value, Recipe):
        return value.to_json()
    return [_plain(item) for item in cast(tuple[Any, ...], value)] if isinstance(value, tuple) else value


@dataclass(frozen=True)
class Read(Recipe):
    """A whole tensor of the checkpoint, by name. Matrices are [out, in] with rows contiguous."""

    op = "read"
    tensor: str
    tensor_shape: tuple[int, ...]
    tensor_format: str

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape."""
        return self.tensor_shape

    @property
    def format(self) -> str:
        """The tensor's format."""
        return self.tensor_format

    def to_json(self) -> Json:
        """Name, shape and format of the tensor."""
        return {"op": self.op, "tensor": self.tensor, "shape": list(self.shape), "format": self.format}

    def reads(self) -> Iterator[Read]:
        """Itself."""
        yield self


@dataclass(frozen=True)
class Rows(Recipe):
    """Rows [start, stop) of the input."""

    op = "rows"
    source: Recipe
    start: int
    stop: int

    def __post_init__(self) -> None:
        _check_range("rows", self.start, self.stop, self.source.shape[0], self.source)
        _check_tiles(f"rows from {self.start}", (self.start,), self.source.format)

    @property
    def shape(self) -> tuple[int, ...]:
        """The rows that are kept."""
        return (self.stop - self.start, *self.source.shape[1:])


@dataclass(frozen=True)
class Columns(Recipe):
    """Columns [start, stop) of a matrix; both ends must fall on block boundaries of its format."""

    op = "columns"
    source: Recipe
    start: int
    stop: int

    def __post_init__(self) -> None:
        if len(self.source.shape) != 2:
            raise TapeoutError(f"a column cut needs a matrix, got shape {list(self.source.shape)}")
        _check_range("columns", self.start, self.stop, self.source.shape[1], self.source)
        known = FORMATS[self.source.format]
        block = known.tiles[1] or known.block if known.tiles else known.block
        if self.start % block or self.stop % block:
            raise TapeoutError(
                f"columns {self.start}:{self.stop} cut through a block of {self.source.format}; "
                f"cuts must be multiples of {block}"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """The columns that are kept."""
        return (self.source.shape[0], self.stop - self.start)


def _check_tiles(what: str, starts: tuple[int, ...], format: str) -> None:
    """Refuse what would bring rows under one scale that were encoded under several."""
    tiles = FORMATS[format].tiles
    if tiles and any(start % tiles[0] if tiles[0] else 0 for start in starts):
        raise TapeoutError(
            f"{what} cut through a scale of {format}, which {tiles[0]} rows share; cuts must be multiples of {tiles[0]}"
        )


def _check_range(what: str, start: int, stop: int, count: int, source: Recipe) -> None:
    if not 0 <= start < stop <= count:
        raise TapeoutError(f"{what} {start}:{stop} do not lie in the {count} {what} of {list(source.shape)}")


@dataclass(frozen=True)
class Concat(Recipe):
    """The inputs one below the other (along rows), in declared order. All must share columns and format."""

    op = "concat"
    parts: tuple[Recipe, ...]

    def __post_init__(self) -> None:
        if not self.parts:
            raise TapeoutError("a concatenation needs at least one part")
        if len({(part.shape[1:], part.format) for part in self.parts}) > 1:
            listed = ", ".join(f"{list(part.shape)} {part.format}" for part in self.parts)
            raise TapeoutError(f"a concatenation needs parts of one width and format, got {listed}")
        format, starts = self.parts[0].format, list(accumulate(part.shape[0] for part in self.parts))
        if FORMATS[format].tiles == (0, 0) and len(self.parts) > 1:
            raise TapeoutError(f"{format} has one scale a tensor; concatenate before converting, not after")
        _check_tiles(f"parts that start in rows {starts[:-1]}", tuple(starts[:-1]), format)

    @property
    def shape(self) -> tuple[int, ...]:
        """All rows of all parts."""
        return (sum(part.shape[0] for part in self.parts), *self.parts[0].shape[1:])


def joined(parts: Sequence[Recipe]) -> Recipe:
    """The parts one below the other. Where rows share scales, the whole is converted instead of every part."""
    first = parts[0]
    if isinstance(first, Convert) and FORMATS[first.format].tiles:
        sources = [part.source for part in parts if isinstance(part, Convert)]
        assert len(sources) == len(parts), [part.op for part in parts]
        return Convert(joined(sources), first.to)
    return Concat(tuple(parts))


def joins_with(recipe: Recipe) -> str:
    """What recipes that can be ``joined`` agree in: the format, and what it is converted from where that matters.

    Scales that come from the checkpoint stay as they are, so its parts join only where their tiles meet.
    """
    tiles = FORMATS[recipe.format].tiles
    if tiles and isinstance(recipe, Convert):
        return f"{recipe.to} from {joins_with(recipe.source)}"
    apart = tiles and (not tiles[0] or recipe.shape[0] % tiles[0])
    return f"{recipe.format} {recipe.digest}" if apart else recipe.format


@dataclass(frozen=True)
class Unpack(Recipe):
    """A matrix [N, K] that another tool packed in tensors of its own, in the format ``to``: its codes and scales.

    ``packing`` says how:

    - pack-quantized: ``codes`` i32 [N, K/8], ``scales`` [N, groups], ``zeros`` i32 [N/8, groups];
    - gptq, gptq_v2: ``codes`` i32 [K/8, N], ``scales`` [groups, N], ``zeros`` i32 [groups, N/8];
    - awq: ``codes`` i32 [K, N/8], ``scales`` [groups, N], ``zeros`` i32 [groups, N/8];
    - fp8: ``codes`` e4m3 [N, K], ``scales`` of the tensor or of each 128 x 128 block.
    """

    op = "unpack"
    packing: str
    to: str
    codes: Read
    scales: Read
    zeros: Read | None = None

    def __post_init__(self) -> None:
        FORMATS[self.to].row_bytes(self.shape[1])

    @property
    def shape(self) -> tuple[int, ...]:
        """The matrix, not what it is packed in."""
        first, second = self.codes.shape
        return {
            "pack-quantized": (first, 8 * second),
            "gptq": (second, 8 * first),
            "gptq_v2": (second, 8 * first),
            "awq": (8 * second, first),
            "fp8": (first, second),
        }[self.packing]

    @property
    def format(self) -> str:
        """The format that holds the same numbers."""
        return self.to


@dataclass(frozen=True)
class HalvesFromPairs(Recipe):
    """Undo the row order that GGUF's ``llama`` class gives q and k (``permute`` of llama.cpp's convert_hf_to_gguf.py).

    Within each of ``heads`` equal groups of d rows, input row 2i + j becomes output row j * d/2 + i, so that rotary
    embedding pairs element i with element i + d/2.
    """

    op = "halves_from_pairs"
    source: Recipe
    heads: int

    def __post_init__(self) -> None:
        _check_tiles("rows in another order", (1,), self.source.format)
        if self.source.shape[0] % (2 * self.heads):
            raise TapeoutError(f"{self.source.shape[0]} rows do not make {self.heads} heads of an even size")


@dataclass(frozen=True)
class Convert(Recipe):
    """The input in another number format: decoded to float32 and, unless ``to`` is f32, encoded again."""

    op = "convert"
    source: Recipe
    to: str

    def __post_init__(self) -> None:
        target = FORMATS[self.to]
        if target.encode is None:
            can = ", ".join(name for name, known in FORMATS.items() if known.encode is not None)
            raise TapeoutError(f"nothing here writes the format {self.to}; formats that can be written: {can}")
        target.row_bytes(self.source.shape[-1])

    @property
    def format(self) -> str:
        """The format asked for."""
        return self.to


@dataclass(frozen=True)
class AddOne(Recipe):
    """A float32 vector plus one: Gemma's norm weights in safetensors are stored as w - 1."""

    op = "add_one"
    source: Recipe

    def __post_init__(self) -> None:
        if self.source.format != "f32":
            raise TapeoutError(f"adding one needs f32, got {self.source.format}")


@dataclass(frozen=True)
class Divide(Recipe):
    """One float32 vector divided by another: inverse frequencies by GGUF's ``rope_freqs``."""

    op = "divide"
    numerator: Recipe
    denominator: Recipe

    def __post_init__(self) -> None:
        kinds = [(part.shape, part.format) for part in (self.numerator, self.denominator)]
        if kinds[0] != kinds[1] or kinds[0][1] != "f32":
            raise TapeoutError(f"a division needs two f32 vectors of one length, got {kinds}")


@dataclass(frozen=True)
class Constant(Recipe):
    """A small float32 vector that comes from the config alone (rotary frequencies)."""

    op = "constant"
    values: tuple[float, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """One axis."""
        return (len(self.values),)

    @property
    def format(self) -> str:
        """Always f32."""
        return "f32"


@dataclass(frozen=True)
class Pack(Recipe):
    """The last step of a weight: the byte layout that a kernel reads. ``layout`` names an entry of LAYOUTS."""

    op = "pack"
    source: Recipe
    layout: str
